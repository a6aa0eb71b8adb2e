"""The processes that the tests have started and that are still there."""

import contextlib

import psutil


def children():
    """Numbers of this process's living descendants.

    multiprocessing's own tracker, which stays as long as its parent, is not counted.
    """
    found = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended, or is a zombie
            if "resource_tracker" not in " ".join(process.cmdline()):
                found.add(process.pid)
    return found
