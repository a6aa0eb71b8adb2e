"""The first thing a worker's forkserver imports: the kernel shall end it with its worker, even while it imports torch (Linux)."""

import contextlib
import ctypes
import signal


def die_with_parent():
    """Ask the kernel to kill this process when the thread that started it ends: prctl(2), PR_SET_PDEATHSIG."""
    with contextlib.suppress(OSError, AttributeError):  # other systems have no prctl
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


die_with_parent()
