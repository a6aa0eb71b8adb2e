"""The first thing a worker's forkserver imports: it leaves a guard behind.

The process that the worker has started splits in two. The child goes on as the forkserver, and
imports what every rank needs. The parent is its guard: a child subreaper (Linux, prctl(2)), so
that whatever a rank has started and left behind becomes the guard's child. It outlives the worker
by a moment, in which it ends all of that, however the worker ended. Without prctl there is no
guard. To import this module is to do all that: nothing but a forkserver may.
"""

import contextlib
import importlib
import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing import spawn
from typing import Any

from ddp_common.ranks.parent import (
    PR_SET_CHILD_SUBREAPER,
    PR_SET_PDEATHSIG,
    die_with_parent,
    prctl,
)
from ddp_common.worker import descendants
from ddp_common.worker.descendants import END, RANK

NEEDED = [
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "torch.nn.parallel",
    "ddp_common.ranks.process",
    "ddp_common.ranks.rendezvous",
    "ddp_common.ranks.sampling",
    "ddp_common.ranks.checkpoint",
    "ddp_common.ranks.stopping",
]
PARENT_ENDED = signal.SIGUSR1  # from the kernel to the guard
LOOK_INTERVAL = 5.0  # seconds after which the guard looks for its worker without having been told


def leave_a_guard() -> None:
    """Fork: the child returns and goes on as the forkserver, the parent stands guard."""
    worker = os.getppid()
    watched = {PARENT_ENDED, END, signal.SIGCHLD}
    if not prctl(PR_SET_CHILD_SUBREAPER, 1):
        die_with_parent()
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    prctl(PR_SET_PDEATHSIG, PARENT_ENDED)
    with contextlib.suppress(PermissionError):
        os.setsid()  # what kills the worker's whole process group leaves the guard its moment
    guard = os.getpid()
    forkserver = os.fork()
    if forkserver == 0:
        die_with_parent()
        if os.getppid() != guard:
            os._exit(1)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, watched)
        return
    try:
        _stand_guard(worker, forkserver, watched)
    finally:
        os._exit(0)


def _stand_guard(worker: int, forkserver: int, watched: set[signal.Signals]) -> None:
    """Wait until the worker or the forkserver has ended, or END comes; then end all below."""
    # What everybody is told at once: the guard leaves last.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _close_what_was_inherited()
    told = None
    while told != END and os.getppid() == worker and forkserver not in _reap():
        received = signal.sigtimedwait(watched, LOOK_INTERVAL)
        told = received.si_signo if received is not None else None
    descendants.end(_all_below)
    _reap()


def _close_what_was_inherited() -> None:
    """The forkserver's socket and its line to the worker are not the guard's to hold open."""
    for name in os.listdir("/proc/self/fd"):
        descriptor = int(name)
        if descriptor > 2:
            with contextlib.suppress(OSError):
                os.close(descriptor)


def _reap() -> set[int]:
    """Take note of children that have ended; returns their process numbers."""
    ended: set[int] = set()
    with contextlib.suppress(ChildProcessError):  # there are none any more
        while True:
            pid, _ = os.waitpid(-1, os.WNOHANG)
            if pid == 0:  # those that are left live
                break
            ended.add(pid)
    return ended


def _all_below() -> list[int]:
    """All that lives below the guard, the forkserver among it."""
    _reap()
    me = os.getpid()
    return [pid for pid in descendants.trees([me], descendants.processes()) if pid != me]


def _not_in_ranks(import_main: Callable) -> Callable:
    """Let a rank not import the program's main module, which holds the user's script.

    `multiprocessing` would do so. What a training function needs of it travels with the function,
    by value.
    """

    def unless_rank(main: Any) -> None:
        if not multiprocessing.current_process().name.startswith(RANK):
            import_main(main)

    return unless_rank


def prepare() -> None:
    """Import what ranks need.

    What cannot be imported is left to the rank, which tells the client why.
    """
    private: Any = spawn  # what is replaced is private to multiprocessing
    private._fixup_main_from_path = _not_in_ranks(private._fixup_main_from_path)
    private._fixup_main_from_name = _not_in_ranks(private._fixup_main_from_name)
    for name in NEEDED:
        with contextlib.suppress(Exception):
            importlib.import_module(name)


leave_a_guard()
prepare()
