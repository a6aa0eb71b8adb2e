"""All that a process has started, in whatever session: find it, weigh it, end it.

That is what it has started directly, or through others. Used by a worker's agent and by the guard
of its forkserver. Relies on the guard being a child subreaper (Linux, prctl(2)): a process whose
parent has ended becomes the guard's child, so that nothing a rank has started can leave the tree.
Uses the standard library alone, because the guard imports it before anything else; systems without
/proc are asked through psutil.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

RANK = "ddp-rank-"  # what the name of a rank's process begins with
END = signal.SIGUSR2  # from a worker to the guard of its forkserver: end everything
END_TIMEOUT = 5.0  # seconds that processes may take to be gone once they are killed
SHORTEST_PAUSE = 0.001  # seconds until the first look at what is left; later ones take longer
LONGEST_PAUSE = 0.05


class Entry(NamedTuple):
    """A process as the kernel lists it."""

    parent: int
    state: str
    started: float  # since the start of the system; its unit does not matter here


def processes() -> dict[int, Entry]:
    """Every process of this machine: number -> `Entry`."""
    if not Path("/proc/self/stat").exists():
        return _processes_without_proc()
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):  # it ended meanwhile
                found[int(name)] = _entry(name)
    return found


def _entry(name: str) -> Entry:
    """The `Entry` of the process with this number. Raises OSError if there is none."""
    with open(f"/proc/{name}/stat", "rb") as file:
        line = file.read()
    _, _, rest = line.rpartition(b")")  # the command, in brackets, may hold anything
    fields = rest.split()
    return Entry(parent=int(fields[1]), state=fields[0].decode(), started=float(fields[19]))


def _processes_without_proc() -> dict[int, Entry]:
    import psutil  # not at the top: the guard imports this module before anything else

    found = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            state = "Z" if process.status() == psutil.STATUS_ZOMBIE else "R"
            found[process.pid] = Entry(process.ppid(), state, process.create_time())
    return found


def trees(roots: Iterable[int], table: dict[int, Entry]) -> list[int]:
    """Those of `roots` that live, and all that they have started; zombies are dead.

    `table` is of `processes`.
    """
    children: dict[int, list[int]] = {}
    for pid, entry in table.items():
        children.setdefault(entry.parent, []).append(pid)
    found = []
    waiting = list(roots)
    while waiting:
        pid = waiting.pop()
        if pid in table:
            found.append(pid)
            waiting.extend(children.get(pid, ()))
    return [pid for pid in found if table[pid].state != "Z"]


def of_rank(pid: int, guard: int | None) -> list[int]:
    """What lives of a rank and of all that it, or a rank before it, has started.

    `pid` is the rank's process number. Returns such numbers, that one among them. `guard` is the
    process that the worker started as its forkserver: its first child is the forkserver, the
    others are what has lost its parent.
    """
    table = processes()
    adopted = sorted(
        (each for each, entry in table.items() if entry.parent == guard),
        key=lambda each: (table[each].started, each),
    )
    return trees([pid, *adopted[1:]], table)


def end(find: Callable[[], Iterable[int]]) -> list[int]:
    """Kill all that `find()` lists until it lists nothing more.

    They are stopped before they are killed: what is stopped starts nothing new while the rest is
    looked for. Returns what is still there after `END_TIMEOUT`.
    """
    deadline = time.monotonic() + END_TIMEOUT
    pause = SHORTEST_PAUSE
    found = _find_twice(find)
    while found:
        _stop_and_kill(found, find, deadline)
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)
        found = _find_twice(find)
        if time.monotonic() > deadline:
            break
    return sorted(found)


def _find_twice(find: Callable[[], Iterable[int]]) -> set[int]:
    """What `find()` lists, or lists when it is asked again.

    A look at all processes takes a moment. One that starts another and ends in that moment may be
    missed, and the other too.
    """
    return set(find()) or set(find())


def _stop_and_kill(found: set[int], find: Callable[[], Iterable[int]], deadline: float) -> None:
    """Stop what was found, and what `find()` lists then, until all is stopped; then kill it."""
    stopped: set[int] = set()
    running = found
    while running:
        _signal_all(running, signal.SIGSTOP)
        stopped |= running
        if time.monotonic() > deadline:
            break
        running = set(find()) - stopped
    _signal_all(stopped, signal.SIGKILL)


def _signal_all(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        # It has ended; or it runs as another user (sudo).
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def memory_of(pids: Iterable[int], limit: float) -> int:
    """Bytes of memory that processes hold together, without pages of files.

    It is what the kernel could not take back. Up to `limit` it is the quick sum, which counts
    pages that a fork shares with its parent twice. Beyond it they are counted once (PSS), which
    takes the kernel a walk through all pages.
    """
    quick = 1024 * sum(_kilobytes(pid, "status", ("RssAnon:", "RssShmem:")) for pid in pids)
    if quick <= limit:
        return quick
    exact = 1024 * sum(
        _kilobytes(pid, "smaps_rollup", ("Pss_Anon:", "Pss_Shmem:")) for pid in pids
    )
    return exact or quick  # an old kernel does not tell


def _kilobytes(pid: int, file: str, names: tuple[str, ...]) -> int:
    """The sum of the lines of /proc/<pid>/<file> with these names; 0 if the process has ended."""
    total = 0
    with contextlib.suppress(OSError):  # it has ended
        for line in Path(f"/proc/{pid}/{file}").read_text().splitlines():
            if line.startswith(names):
                total += int(line.split()[1])
    return total
