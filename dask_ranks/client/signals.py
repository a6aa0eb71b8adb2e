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

from dask_ranks.run.job import RunStopped

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
def heard(sigterm_too: bool) -> Iterator[None]:
    """Within the block Ctrl-C sets `interrupted`, and does what it did before.

    With `sigterm_too`, SIGTERM has the ranks leave where it would just kill this program. It kills
    it afterwards, unless `RunStopped` says that they have left.
    """
    global interrupted, stop_requested
    in_main_thread = threading.current_thread() is threading.main_thread()
    on_interrupt = signal.getsignal(signal.SIGINT)
    hears_interrupt = in_main_thread and callable(on_interrupt)
    kills = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    hears_sigterm = in_main_thread and sigterm_too and kills
    process = os.getpid()

    def note_interrupt(number: int, frame: FrameType | None) -> None:
        global interrupted
        interrupted = True
        assert callable(on_interrupt)
        on_interrupt(number, frame)

    def pass_on(number: int, frame: FrameType | None) -> None:
        if os.getpid() == process:
            pass_on_sigterm(number, frame)
        else:  # one that this program has forked
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    if hears_interrupt:
        signal.signal(signal.SIGINT, note_interrupt)
    if hears_sigterm:
        signal.signal(signal.SIGTERM, pass_on)
    try:
        yield
    except RunStopped:
        if hears_sigterm:
            stop_requested = False
        raise
    finally:
        if hears_interrupt:
            signal.signal(signal.SIGINT, on_interrupt)
            interrupted = False
        if hears_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            if stop_requested:
                os.kill(os.getpid(), signal.SIGTERM)
