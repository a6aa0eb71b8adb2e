"""What all checks share: an answer is judged, or a script of a student's is run.

Promises: whatever an answer does, the notebook goes on. An exception, `sys.exit`, an endless loop
and a flood of output are each told in a sentence. What an answer leaves running is ended.
"""

import contextlib
import dis
import inspect
import io
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import distributed
import psutil

from dask_ranks.run.job import RankFailed
from tutorials.kit.launchers import meet_in

TIMEOUT = 60.0  # seconds that an answer or a script may take
SHOWN = 4_000  # characters of what an answer prints
FLOOD = 50_000_000  # bytes after which a script that prints is ended
MARK = "DDP_CHECK"  # variable: what a script starts, and what that starts, has it


def named(said: object, options: Iterable[str]) -> str | None:
    """The option whose last word occurs in a prediction; None if none, or more than one."""
    words = re.findall("[a-z]+", str(said).lower())
    found = [option for option in options if option.split()[-1] in words]
    return found[0] if len(found) == 1 else None


class Wrong(Exception):
    """An answer is wrong: what was seen, what was expected, and a question that leads on."""

    def __init__(self, yours: object, expected: object, question: str):
        super().__init__(f"  yours:    {yours}\n  expected: {expected}\n  {question}")


class Verdict(NamedTuple):
    """What a check has found."""

    mark: str  # "right", "not right", "nothing written" or "did not end"
    said: str  # what stands below the cell


def judge(check: Callable, answer: Callable, *, timeout: float = TIMEOUT) -> None:
    """Print whether `answer`, a function, is right: run `check(answer)`.

    The check raises `Wrong`, or returns what it has seen to be right, a str. After `timeout`
    seconds it is ended.
    """
    print(verdict(check, answer, timeout).said)


def verdict(check: Callable, answer: Callable, timeout: float) -> Verdict:
    """What `judge` prints, and the mark. The first that the answer has printed is printed."""
    printed = _Limited()
    before = set(psutil.Process().children())
    try:
        with contextlib.redirect_stdout(printed), _time_limit(timeout):
            found = _verdict(check, answer, timeout)
    finally:
        said = printed.getvalue()
        print(said, end="\n" if said and not said.endswith("\n") else "")
        _end_children_since(before)
    return found


def _verdict(check, answer, timeout):
    name = getattr(answer, "__name__", repr(answer))
    if _is_empty(answer):
        return Verdict("nothing written", f"not yet: nothing is written yet in {name}")
    try:
        return Verdict("right", f"right: {check(answer)}")
    except Wrong as wrong:
        said = f"not yet\n{wrong}"
    except _TooLong:
        why = "Is there a loop without an end, or a rank that waits for another?"
        return Verdict("did not end", f"not yet: {name} was ended after {timeout:g} s. {why}")
    except SystemExit as left:
        said = f"not yet: {name} calls sys.exit({left.code!r}). That would end the notebook."
    except RankFailed as failure:
        lines = [str(failure).splitlines()[0], *failure.traceback.strip().splitlines()[-3:]]
        said = "not yet: " + "\n  ".join(lines)
    except Exception as error:  # whatever a student's function may raise
        raised = "".join(traceback.format_exception_only(error)).strip()
        said = f"not yet: {name} cannot be judged. {_place(answer, error)}: {raised}"
    return Verdict("not right", said)


def _is_empty(function):
    """Whether it does nothing and returns None, or ends with a gap, `...`, that is untouched."""

    def empty(): ...

    if not hasattr(function, "__code__"):
        return False
    with contextlib.suppress(OSError):  # there is no source of what `exec` has made
        if re.search(r"# your code\n\s*\.\.\.\s*$", inspect.getsource(function)):
            return True
    own, nothing = (
        [(step.opname, step.argval) for step in dis.get_instructions(each)]
        for each in (function, empty)
    )
    return own == nothing


def _place(function, error):
    """The line of `function` in which the error came up; else who raised it."""
    code = getattr(function, "__code__", None)
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if code is not None and (frame.name, frame.filename) == (code.co_name, code.co_filename):
            return f"Its line {frame.lineno - code.co_firstlineno + 1}, `{frame.line}`, raises"
    return "The check cannot use what it returns"


class _Limited(io.StringIO):
    """Keeps the first `SHOWN` characters of what is printed."""

    def write(self, text: str) -> int:
        room = SHOWN - self.tell()
        if room >= 0:
            super().write(text[:room])
            if len(text) > room:
                super().write("\n… [more was printed]\n")
        return len(text)


class _TooLong(BaseException):
    """Raised in the answer; no `except Exception` of its own catches it."""


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise `_TooLong` in the block after so many seconds, and every ten again.

    Only where signals can do so: in the main thread, and not on Windows.
    """
    if threading.current_thread() is not threading.main_thread() or os.name == "nt":
        yield
        return

    def end(*_):
        raise _TooLong

    earlier = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds, 10)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, earlier)


def _end_children_since(before):
    """End processes that the answer has started. Dask starts its own by multiprocessing."""
    left = []
    for child in set(psutil.Process().children()) - before:
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.status() != psutil.STATUS_ZOMBIE and not _is_of_python(child):
                left += [child, *child.children(recursive=True)]
    _kill(left)
    if left:
        print(f"{len(left)} process(es) that were left running have been ended.")


def _is_of_python(child):
    """Whether multiprocessing has started it: a worker of Dask's, or a server."""
    return "multiprocessing" in " ".join(child.cmdline())


def _kill(processes):
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


@contextlib.contextmanager
def enough_workers(client: distributed.Client, count: int) -> Iterator[None]:
    """Have `count` workers in the block: of a LocalCluster that has fewer, others are started."""
    there = len(client.scheduler_info(n_workers=-1)["workers"])
    if there >= count:
        yield
        return
    client.cluster.scale(count)
    try:
        client.wait_for_workers(count, timeout=60)
        yield
    finally:
        client.cluster.scale(there)


@dataclass
class ScriptRun:
    """How a script ran."""

    exit_code: int | None  # of torchrun; None if the script was ended
    printed: list[str]  # what each rank printed, by rank
    output: str  # the same with `[rank0]: ` before each line, as torchrun shows it
    folder: Path  # in which it ran; it is removed with this object
    ended_because: str  # why it was ended, a sentence; empty if it has ended by itself
    _temporary: tempfile.TemporaryDirectory

    @property
    def ok(self) -> bool:
        """Whether all ranks have ended without an error."""
        return self.exit_code == 0


def run_script(
    source: str | Path,
    *arguments: str,
    ranks: int = 2,
    timeout: float = TIMEOUT,
    on_each: int | None = None,
    gpus: bool = False,
) -> ScriptRun:
    """Run a script with torchrun on `ranks` processes of this machine, in a folder of its own.

    `source` is the path of the script, or its text as a str. `arguments` are its own. It is ended
    after `timeout` seconds, or when it has printed `FLOOD` bytes. The ranks are told that they are
    on machines with `on_each` of them (LOCAL_RANK …), and with `gpus` that each has a GPU.
    """
    temporary = tempfile.TemporaryDirectory(prefix="ddp-script-", ignore_cleanup_errors=True)
    top = Path(temporary.name).resolve()
    folder, logs = top / "work", top / "logs"
    folder.mkdir()
    script = source.resolve() if isinstance(source, Path) else folder / "script.py"
    if not isinstance(source, Path):
        script.write_text(source, encoding="utf-8")
    # in place of --standalone, whose port every user of this host reaches
    torchrun = [sys.executable, "-m", "torch.distributed.run", *meet_in(top)]
    torchrun += [f"--nproc-per-node={ranks}", "--redirects=3", f"--log-dir={logs}"]
    mark = secrets.token_hex(8)
    environment = {**os.environ, MARK: mark, "OMP_NUM_THREADS": "1", "PYTHONPATH": _path()}
    environment["DDP_CHECK_ON_EACH"] = str(on_each or "")
    environment["DDP_CHECK_GPUS"] = "1" if gpus else ""
    environment["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # it warns where this host's name has no address
    process = subprocess.Popen(
        [*torchrun, "--module", "tutorials.checks.as_rank", str(script), *arguments],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # a terminal's Ctrl-C reaches the caller, who ends it
    )
    try:
        ended_because = _wait(process, logs, timeout)
    finally:
        while marked := list(_marked(mark)):
            _kill(marked)
        process.wait()
    printed = [_rank_printed(logs, rank) for rank in range(ranks)]
    lines = [
        f"[rank{rank}]: {line}" for rank, text in enumerate(printed) for line in text.splitlines()
    ]
    return ScriptRun(
        exit_code=None if ended_because else process.returncode,
        printed=printed,
        output="\n".join(lines),
        folder=folder,
        ended_because=ended_because,
        _temporary=temporary,
    )


def _path():
    """Python's path for the ranks: this repository, wherever they run."""
    here, path = str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")
    return os.pathsep.join([here, path]) if path else here


def _wait(process, logs, timeout):
    """Wait for torchrun. Returns why it must be ended, empty if it has ended."""
    began = time.monotonic()
    while process.poll() is None:
        if time.monotonic() - began > timeout:
            return f"It was ended after {timeout:g} s."
        if sum(path.stat().st_size for path in logs.rglob("*.log")) > FLOOD:
            return f"It was ended after it had printed {FLOOD // 10**6} MB."
        time.sleep(0.1)
    return ""


def _marked(mark):
    """All processes that a script has started, also those with a session of their own."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == mark:
                yield process


def _rank_printed(logs, rank):
    """The beginning and the end of what a rank printed."""
    text = ""
    for name in ("stdout.log", "stderr.log"):
        for path in logs.rglob(f"{rank}/{name}"):
            text += path.read_text(errors="replace")
    if len(text) <= 20_000:
        return text
    return f"{text[:10_000]}\n… [{len(text) - 20_000:,} characters left out] …\n{text[-10_000:]}"
