"""End with the process that has started this one, however that ended (Linux, prctl(2)).

Uses the standard library alone: a forkserver's guard imports it before anything else.
"""

import contextlib
import ctypes
import signal

# Options of prctl(2).
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def die_with_parent() -> None:
    """Ask the kernel to kill this process when the thread that started it ends."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def prctl(option: int, value: int) -> bool:
    """Set an option of prctl(2). False if the kernel refused, or is not Linux."""
    with contextlib.suppress(OSError, AttributeError):
        return ctypes.CDLL(None).prctl(option, value, 0, 0, 0) == 0
    return False
