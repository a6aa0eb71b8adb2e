"""The process that outlives a worker by a moment, and ends what its ranks have left behind.

A process splits in two (`leave_a_guard`). The child goes on as the worker's forkserver. The parent
is its guard: a child subreaper (Linux, prctl(2)), so that whatever a rank has started and left
behind becomes the guard's child. It outlives the worker by a moment, in which it ends all of that,
however the worker ended. Without prctl there is no guard. Uses the standard library alone: it runs
before anything else is imported.
"""

import contextlib
import os
import select
import signal
import threading
from collections.abc import Callable

from ddp_common.ranks.parent import (
    PR_SET_CHILD_SUBREAPER,
    PR_SET_PDEATHSIG,
    die_with_parent,
    prctl,
)
from ddp_common.worker import descendants
from ddp_common.worker.descendants import END

WORKER_ENDED = signal.SIGUSR1  # to the guard, from the kernel or from its own thread
LOOK_INTERVAL = 5.0  # seconds after which the guard looks for its worker without having been told
WATCHED = {WORKER_ENDED, END, signal.SIGCHLD}


def leave_a_guard(worker_pidfd: int | None = None) -> None:
    """Fork: the child returns and goes on as the forkserver, the parent stands guard.

    The worker is the parent of this process; or the process of `worker_pidfd` (pidfd_open(2)).
    """
    worker = os.getppid()
    if not prctl(PR_SET_CHILD_SUBREAPER, 1):
        die_with_parent()
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    if worker_pidfd is None:
        prctl(PR_SET_PDEATHSIG, WORKER_ENDED)
    with contextlib.suppress(PermissionError):
        os.setsid()  # what kills the worker's whole process group leaves the guard its moment
    guard = os.getpid()
    forkserver = os.fork()
    if forkserver == 0:
        die_with_parent()
        if os.getppid() != guard:
            os._exit(1)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED)
        return
    try:
        if worker_pidfd is None:
            _close_what_was_inherited()
            _stand_guard(forkserver, lambda: os.getppid() == worker)
        else:
            _close_what_was_inherited(but=worker_pidfd)
            threading.Thread(target=_tell_of_the_end, args=(worker_pidfd,), daemon=True).start()
            _stand_guard(forkserver, lambda: not has_ended(worker_pidfd))
    finally:
        os._exit(0)


def has_pidfds() -> bool:
    """Whether this system can watch a process that is no child by a descriptor (Linux 5.3)."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True


def has_ended(pidfd: int, milliseconds: int | None = 0) -> bool:
    """Whether the process of a pidfd has ended, or does within so many milliseconds.

    None: wait for it.
    """
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(milliseconds))


def _tell_of_the_end(pidfd: int) -> None:
    has_ended(pidfd, None)
    os.kill(os.getpid(), WORKER_ENDED)


def _stand_guard(forkserver: int, worker_lives: Callable[[], bool]) -> None:
    """Wait until the worker or the forkserver has ended, or END comes; then end all below."""
    # What everybody is told at once: the guard leaves last.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    told = None
    while told != END and worker_lives() and forkserver not in _reap():
        received = signal.sigtimedwait(WATCHED, LOOK_INTERVAL)
        told = received.si_signo if received is not None else None
    descendants.end(_all_below)
    _reap()


def _close_what_was_inherited(but: int | None = None) -> None:
    """The forkserver's socket and its line to the worker are not the guard's to hold open."""
    for name in os.listdir("/proc/self/fd"):
        descriptor = int(name)
        if descriptor > 2 and descriptor != but:
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
