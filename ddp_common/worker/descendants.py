"""All that a process has started, directly or through others, in whatever session: find it,
weigh it, end it.

Used by a worker's agent and by the guard of its forkserver. Relies on the guard being a child
subreaper (Linux, prctl(2)): a process whose parent has ended becomes the guard's child, so
that nothing a rank has started can leave the tree. Uses the standard library alone, because
the guard imports it before anything else; systems without /proc are asked through psutil.
"""

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import NamedTuple

RANK = "ddp-rank-"  # what the name of a rank's process begins with
END = signal.SIGUSR2  # from a worker to the guard of its forkserver: end everything
END_TIMEOUT = 5.0  # seconds that processes may take to be gone once they are killed


class Entry(NamedTuple):
    """A process as the kernel lists it. `started` counts from the start of the system; its
    unit does not matter here.
    """

    parent: int
    state: str
    started: float


def processes():
    """Every process of this machine: number -> `Entry`."""
    if not Path("/proc/self/stat").exists():
        return _processes_without_proc()
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):  # it ended meanwhile
                with open(f"/proc/{name}/stat", "rb") as file:
                    fields = (
                        file.read().rpartition(b")")[2].split()
                    )  # the command before it may hold anything
                found[int(name)] = Entry(int(fields[1]), fields[0].decode(), float(fields[19]))
    return found


def _processes_without_proc():
    import psutil

    found = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            state = "Z" if process.status() == psutil.STATUS_ZOMBIE else "R"
            found[process.pid] = Entry(process.ppid(), state, process.create_time())
    return found


def trees(roots, table):
    """Those of `roots` that live and all that they have started, of a table by `processes`;
    zombies are dead.
    """
    children = {}
    for pid, entry in table.items():
        children.setdefault(entry.parent, []).append(pid)
    found, waiting = [], list(roots)
    while waiting:
        pid = waiting.pop()
        if pid in table:
            found.append(pid)
            waiting.extend(children.get(pid, ()))
    return [pid for pid in found if table[pid].state != "Z"]


def of_rank(rank, guard):
    """What lives of a rank and of all that it, or a rank before it, has started: process
    numbers, the rank's own among them.

    `guard` is the process that the worker started as its forkserver: its first child is the
    forkserver, the others are what has lost its parent.
    """
    table = processes()
    adopted = sorted(
        (pid for pid, entry in table.items() if entry.parent == guard),
        key=lambda pid: (table[pid].started, pid),
    )
    return trees([rank, *adopted[1:]], table)


def end(find):
    """Kill all that `find()` lists until it lists nothing more; returns what is still there
    after `END_TIMEOUT`.

    They are stopped before they are killed: what is stopped starts nothing new while the rest
    is looked for.
    """
    deadline, pause = time.monotonic() + END_TIMEOUT, 0.001
    while (found := set(find())) and time.monotonic() < deadline:
        stopped = set()
        while (new := found - stopped) and time.monotonic() < deadline:
            _signal_all(new, signal.SIGSTOP)
            stopped |= new
            found = set(find())
        _signal_all(stopped, signal.SIGKILL)
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    return sorted(found)


def _signal_all(pids, number):
    for pid in pids:
        with contextlib.suppress(
            ProcessLookupError, PermissionError
        ):  # it has ended; or it runs as another user (sudo)
            os.kill(pid, number)


def memory_of(pids, limit):
    """Bytes of memory that processes hold together, of what the kernel could not take back: no
    pages of files.

    Up to `limit` it is the quick sum, which counts pages that a fork shares with its parent
    twice. Beyond it they are counted once (PSS), which takes the kernel a walk through all
    pages.
    """
    quick = sum(_kilobytes(pid, "status", ("RssAnon:", "RssShmem:")) for pid in pids) * 1024
    if quick <= limit:
        return quick
    exact = (
        sum(_kilobytes(pid, "smaps_rollup", ("Pss_Anon:", "Pss_Shmem:")) for pid in pids) * 1024
    )
    return exact or quick  # an old kernel does not tell


def _kilobytes(pid, file, names):
    total = 0
    with contextlib.suppress(OSError):  # it has ended
        for line in Path(f"/proc/{pid}/{file}").read_text().splitlines():
            if line.startswith(names):
                total += int(line.split()[1])
    return total
