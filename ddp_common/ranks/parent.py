"""End with the process that has started this one, however that ended (Linux, prctl(2)).

Uses the standard library alone: the guard of a forkserver imports it before anything else.
"""

import contextlib
import ctypes
import signal

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # of prctl(2)


def die_with_parent():
    """Ask the kernel to kill this process when the thread that started it ends."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def prctl(option, value):
    """Whether the kernel did what prctl(2) was asked for; other systems do not have it."""
    with contextlib.suppress(OSError, AttributeError):
        return ctypes.CDLL(None).prctl(option, value, 0, 0, 0) == 0
    return False
