"""Look at the processes of a run from outside, start a cluster of one's own, hold a run back."""

import contextlib
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import cloudpickle
import psutil
import pytest
from patience import PATIENCE

import ddp_common as ddp

TESTS = str(Path(__file__).parent)  # where other programs find `faults_on_purpose`
RANK_MARK = b"DDP_RANK_PROCESS="  # every rank has its own number there, and hands it down


def wait_until(condition, within=2 * PATIENCE):
    """The first true value of `condition()`. Raises if there is none in time."""
    deadline = time.monotonic() + within
    while not (value := condition()):
        assert time.monotonic() < deadline, f"nothing came of {condition} within {within} s"
        time.sleep(0.02)
    return value


def log_of(directory):
    path = directory / "log.txt"
    return path.read_text() if path.exists() else ""


def workers_of(directory):
    """The addresses of the workers of a run, in rank order."""
    return json.loads((directory / "config.json").read_text())["workers"]


def has_begun(directory):
    """Whether a rank has reported, as a function for `wait_until`."""
    metrics = directory / "metrics.jsonl"
    return lambda: metrics.exists() and metrics.stat().st_size > 0


def saved_steps(directory):
    """The steps after which there are checkpoints in a run's directory, the newest last."""
    names = [path.name for path in (directory / "checkpoints").glob("step-*.pt")]
    return sorted(int(re.match(r"step-(\d+)", name)[1]) for name in names)


def assert_nothing_left(directory, ranks, within=PATIENCE):
    """The run in `directory` has started `ranks` ranks; neither they nor their children live."""
    pids = rank_pids(directory)
    assert len(pids) == ranks
    assert_gone(lambda: members(pids), within)


def assert_gone(left, within=PATIENCE):
    """`left()`, a list of process numbers, becomes empty."""
    wait_until(lambda: not left(), within)


def processes_of(directory):
    """Living processes (pids) of a run: its ranks and what they have started."""
    return members(rank_pids(directory))


def rank_pids(directory):
    """The process numbers of all ranks that a run has started, in all its attempts, by its log."""
    started = re.findall(r"rank \d+ started: process (\d+) on", log_of(Path(directory)))
    return [int(pid) for pid in started]


def members(pids):
    """Living processes of the ranks `pids`.

    Those of their sessions, and all that has inherited their environment, in any session.
    """
    leaders = set(pids)
    return [
        process.pid
        for process in psutil.process_iter()
        if _rank_of(process.pid) & leaders and is_alive(process.pid)
    ]


def _rank_of(pid):
    """The ranks that a process may be of: its session's leader, and whom its environment names."""
    ranks = set()
    with contextlib.suppress(ProcessLookupError):
        ranks.add(os.getsid(pid))
    with contextlib.suppress(OSError):
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        marks = [entry for entry in entries if entry.startswith(RANK_MARK)]
        ranks |= {int(mark.removeprefix(RANK_MARK)) for mark in marks}
    return ranks


def is_alive(pid):
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def environment_for(client, folder):
    """Environment variables for another program of this user that connects to this cluster.

    They are Dask's own, for TLS.
    """
    if not client.scheduler.address.startswith("tls://"):
        return dict(os.environ)
    folder = Path(folder)
    if not (folder / "key.pem").exists():
        security = client.security
        for name, text in {"cert": security.tls_ca_file, "key": security.tls_worker_key}.items():
            (folder / f"{name}.pem").touch(0o600, exist_ok=False)
            (folder / f"{name}.pem").write_text(text)
    prefix = "DASK_DISTRIBUTED__COMM__TLS__"
    files = {"CA_FILE": "cert.pem", "CLIENT__CERT": "cert.pem", "CLIENT__KEY": "key.pem"}
    return {**os.environ, **{prefix + name: str(folder / file) for name, file in files.items()}}


@contextlib.contextmanager
def separate_cluster(
    folder, *prefix, workers=2, hosts=(), words=(), scheduler=("-m", "dask", "scheduler")
):
    """A scheduler and workers as processes of their own.

    Yields (the scheduler's process, its address). `prefix` is a command to start the workers with,
    `scheduler` what Python executes to be the scheduler. `hosts` are addresses of this machine,
    for a worker each: a launch takes each for a host of its own. `words` are for all of them.
    """
    file = Path(folder) / "scheduler.json"
    dask = [sys.executable, "-m", "dask"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    ports = "--host 127.0.0.1 --port 0 --dashboard-address 127.0.0.1:0".split()
    command = [sys.executable, *scheduler, *ports, *words, "--scheduler-file", file]
    scheduler = subprocess.Popen(command, **quiet)
    options = "--nthreads 1 --no-dashboard --memory-limit 0 --local-directory".split()
    each = [*prefix, *dask, "worker", *options, folder, *words, "--scheduler-file", file]
    placed = [[*each, "--host", host] for host in hosts] or [each] * workers
    processes = [scheduler, *(subprocess.Popen(worker, **quiet) for worker in placed)]
    try:
        # it is not written at once
        wait_until(lambda: file.exists() and file.read_text().endswith("}"))
        yield scheduler, json.loads(file.read_text())["address"]
    finally:
        for process in processes:
            process.kill()  # what they have started ends with them
        for process in processes:
            process.wait()


def finished(*words, within=4 * PATIENCE, **options):
    """A Python program that has come to a good end, with what it has said (str)."""
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=within, **options
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def can_hide():
    """Whether this user may make mount namespaces, as root may."""
    return (
        bool(shutil.which("unshare"))
        and subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode == 0
    )


def hiding(folder):
    """The beginning of a command that sees `folder` empty, and cannot write there."""
    mount = f'mount -t tmpfs -o ro,size=4k tmpfs {folder} && exec "$@"'
    return ["unshare", "--mount", "sh", "-c", mount, "sh"]


class Background:
    """A call in a thread of its own; `outcome()` waits for it and returns or raises as it did."""

    def __init__(self, function, *args, **kwargs):
        self._ended = threading.Event()
        self._returned = None
        self._raised = None
        threading.Thread(target=self._run, args=(function, args, kwargs), daemon=True).start()

    def _run(self, function, args, kwargs):
        try:
            self._returned = function(*args, **kwargs)
        except BaseException as error:  # raised again in the thread that asks
            self._raised = error
        self._ended.set()

    def is_running(self):
        return not self._ended.is_set()

    def outcome(self, within=3 * PATIENCE):
        """What the call returned; raises what it raised."""
        assert self._ended.wait(within), f"still running after {within} s"
        if self._raised is not None:
            raise self._raised
        return self._returned


@contextlib.contextmanager
def held_back(function, gate, *, rank=1, step=8):
    """Yields `function` with a wait in it: `rank` stops after `step` steps, and so do all others.

    They go on when the block is left: within it the run is still going on, however slow the
    machine. `gate` is the path of a file that does not exist yet; the ranks look for it.
    """
    try:
        yield ddp.inject(function, functools.partial(_wait_for, gate), rank=rank, step=step)
    finally:
        gate.touch()


def _wait_for(gate):
    while not gate.exists():
        time.sleep(0.02)


STALL_TIMEOUT = PATIENCE / 12  # a rank that a busy machine holds up is not one of these


def stalled(client, tmp_path, function, *arguments, workers=2):
    """The exception of a launch whose ranks wait for ever."""
    with pytest.raises(ddp.RankStalled) as caught:
        ddp.launch(
            client,
            functools.partial(function, *arguments),
            workers=workers,
            directory=tmp_path / "run",
            stall_timeout=STALL_TIMEOUT,
        )
    return caught.value


cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import it
