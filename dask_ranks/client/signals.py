"""What a person or a batch system has asked of this program by a signal.

Flags, which a launch looks at twice a second while it follows its ranks: Python swallows an
exception that a signal's handler raises in a callback of an import or of the garbage collector.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

from ddp_common.errors import RunStopped

stop_requested = False  # by SIGTERM: the ranks shall save and leave
interrupted = False  # by Ctrl-C; while a launch in the main thread runs, it sets this itself

attempts_running = 0  # whom it concerns; none: a handler of SIGTERM ends the program itself


def pass_on_sigterm(number: int, frame: FrameType | None) -> None:
    """A handler of SIGTERM: ranks are told, if any run; else, and the second time, it exits."""
    global stop_requested
    if stop_requested or not attempts_running:
        sys.exit(128 + number)
    stop_requested = True


@contextlib.contextmanager
def noting_interrupts() -> Iterator[None]:
    """Within the block Ctrl-C sets `interrupted`, and does what it did before."""
    global interrupted
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        yield
        return

    def note(number: int, frame: FrameType | None) -> None:
        global interrupted
        interrupted = True
        previous(number, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        interrupted = False


@contextlib.contextmanager
def passing_on_sigterm() -> Iterator[None]:
    """Within the block SIGTERM, where it would just kill this program, has the ranks leave.

    It kills the program afterwards, unless `RunStopped` says that they have left.
    """
    global stop_requested
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    process = os.getpid()

    def pass_on(number: int, frame: FrameType | None) -> None:
        if os.getpid() == process:
            pass_on_sigterm(number, frame)
        else:  # one that this program has forked
            _end_by(number)

    signal.signal(signal.SIGTERM, pass_on)
    try:
        yield
    except RunStopped:
        stop_requested = False
        raise
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if stop_requested:
            _end_by(signal.SIGTERM)


def _end_by(number: int) -> None:
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
