"""The processes that the tests have started and that are still there."""

import psutil


def children():
    """Numbers of this process's living descendants.

    multiprocessing's own tracker, which stays as long as its parent, is not counted.
    """
    found = set()
    for process in psutil.Process().children(recursive=True):
        words = command_line(process)
        if words and "resource_tracker" not in " ".join(words):
            found.add(process.pid)
    return found


def command_line(process):
    """The words of its command; none if it has just ended, or is a zombie."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:  # a ZombieProcess is one as well
        return []
