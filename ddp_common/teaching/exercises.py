"""What the exercises of the tutorials share: a check is run, and a failure is told in a few words.

Promises: whatever an answer does, the notebook goes on. An exception is one more wrong answer, not
a traceback through the check; so is `sys.exit`. An endless loop is ended, a flood of output is
shown in part, processes that were left behind are ended.
"""

import contextlib
import multiprocessing
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator

import psutil

from ddp_common.clusters.protection import DASK_WORKER
from ddp_common.errors import RankFailed, first_line
from ddp_common.teaching.shown import HeadAndTail

SHOWN_LINES = 5  # of a rank's traceback
SHOWN_CHARACTERS = 4_000  # of what an answer prints
TIMEOUT = 60.0  # seconds that a check may take
AGAIN = 10.0  # seconds after which an answer is ended again that has caught the first time


def judge(check: Callable, answer: Callable, *, timeout: float = TIMEOUT):
    """Run `check(answer)`, which prints whether `answer`, a function, is right.

    If it raises, leaves with `sys.exit` or takes more than `timeout` seconds, that is printed
    instead. What the check returns is dropped, so that nothing but its words stands under the
    cell.
    """
    shown = HeadAndTail(SHOWN_CHARACTERS)
    before = set(psutil.Process().children())
    verdict = ""
    try:
        with contextlib.redirect_stdout(shown), _time_limit(timeout):
            verdict = _outcome(check, answer, timeout)
    finally:
        said = shown.text() + verdict
        if said:
            print(said.rstrip("\n"))
        _end_what_was_left(before)


def _outcome(check: Callable, answer: Callable, timeout: float) -> str:
    """Run the check; returns what is to be said of an answer that did not come through it."""
    name = getattr(answer, "__name__", repr(answer))
    try:
        check(answer)
    except _TooLong:
        return (
            f"not yet: {name} was ended after {timeout:g} s. "
            "Is there a loop without an end, or a rank that waits for another?"
        )
    except RankFailed as failure:
        end = failure.traceback.strip().splitlines()[-SHOWN_LINES:]
        return "\n".join([f"not yet: {first_line(failure)}", *end])
    except SystemExit as left:
        return f"not yet: {name} calls sys.exit({left.code!r}), which would end the notebook"
    except Exception as error:  # whatever a student's function may raise
        said = "".join(traceback.format_exception_only(error)).strip()
        place = _place_in(answer, error)
        if place is None:
            return f"not yet: the check cannot use what {name} returns\n  {said}"
        return f"not yet: {name} raises an error in its {place}\n  {said}"
    return ""


def _place_in(function, error):
    """'line 3: the line itself' of `function` in which `error` came up.

    None if it came up elsewhere, when `function` had returned.
    """
    code = getattr(function, "__code__", None)
    if code is None:
        return None
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if (frame.name, frame.filename) == (code.co_name, code.co_filename):
            number = frame.lineno - code.co_firstlineno + 1
            return f"line {number}: {frame.line or ''}".rstrip(": ")
    return None


class _TooLong(BaseException):
    """Raised in the answer; no `except Exception` of its own catches it."""


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise `_TooLong` in the block after so many seconds, and again if that was caught.

    Only where signals can do so: in the main thread, and not on Windows.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or not hasattr(signal, "setitimer"):
        yield
        return

    def end(*_):
        raise _TooLong

    began = time.monotonic()
    earlier = signal.signal(signal.SIGALRM, end)
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, earlier)
        if left:  # somebody else's alarm goes on
            remaining = left - (time.monotonic() - began)
            signal.setitimer(signal.ITIMER_REAL, max(remaining, 0.01), interval)


def _end_what_was_left(before: set[psutil.Process]) -> None:
    """End children of this process that are new, but for Dask's, and say so."""
    of_dask = {
        process.pid
        for process in multiprocessing.active_children()
        if process.name.startswith(DASK_WORKER)
    }
    left = [
        child
        for child in psutil.Process().children()
        if child not in before and child.pid not in of_dask and _is_started_by_the_answer(child)
    ]
    if not left:
        return
    for child in left:
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            for process in (*child.children(recursive=True), child):
                process.kill()
    print(f"{len(left)} process(es) that were left behind have been ended", file=sys.stderr)


def _is_started_by_the_answer(child: psutil.Process) -> bool:
    """Whether it lives, and is no server of multiprocessing's that serves later calls too."""
    with contextlib.suppress(psutil.Error):
        if child.status() == psutil.STATUS_ZOMBIE:
            return False
        command = " ".join(child.cmdline())
        return "multiprocessing.resource_tracker" not in command and "forkserver" not in command
    return False
