"""The run directory: what is written down of the things that ranks report.

`runs/<name>/<time>/` holds config.json, metrics.jsonl, log.txt, checkpoints/ and whatever
ranks save. Relies on `filelock` to be the only run there. Promises: a file appears whole or not at
all, and none lies outside; a disk that is full, or a folder that somebody removes, does not end
the training; where there is room in the end, all records are in metrics.jsonl; `problems` says
what was not written.
"""

import contextlib
import json
import math
import os
import socket
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from filelock import FileLock, SoftFileLock, Timeout

from dask_ranks.run.folders import local
from dask_ranks.run.progress import say
from ddp_common.errors import Error
from ddp_common.files import METRICS_OF_A_RANK, check_name, make_folder, open_file

METRICS = "metrics.jsonl"
LOG = "log.txt"
OTHERS = "other files"  # a problem is about one of these two files, or about the others
LOCK = ".lock"
WAIT = 3  # seconds for the run before to be gone
WAIT_IN_A_JOB = 60  # nobody watches a batch job, and the one before may still be saving
NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}  # numbers unknown to JSON


class RunFiles:
    """What a process writes into a run's folder: what a `Recorder` needs.

    `path` is the folder's full path, `metrics` the name of the file there for what is reported.
    `records` (list of dict) are these reports; `restart` is the number that they get: of which
    start of the ranks they are, from 0 on. A temporary folder goes with the run.
    """

    def __init__(self, path: Path, metrics: str, is_temporary: bool = False):
        self.path = path
        self.metrics = metrics
        self.is_temporary = is_temporary
        self.records: list[dict] = []
        self.restart = 0
        self._open: dict[str, TextIO] = {}  # the files to which lines are appended
        self._problems: dict[str, str] = {}  # what it is about -> a sentence

    def record(self, rank: int, values: dict) -> None:
        """Keep what a rank has reported, in memory and in the file for it."""
        record = _with_names_kept_once({"restart": self.restart, "rank": rank, **values})
        self.records.append(record)
        self._append(self.metrics, as_line(record))

    def log(self, text: str) -> None:
        """Append a line with the time to log.txt."""
        self._append(LOG, f"{time.strftime('%H:%M:%S')} {text}\n")

    def _append(self, name: str, line: str) -> None:
        with self._tolerate_failure(name):
            self._opened(name).write(line)

    def _opened(self, name: str) -> TextIO:
        if name not in self._open:
            self._open[name] = open(
                self.path / name, "a", 1, "utf-8", "backslashreplace", opener=open_file
            )
        return self._open[name]

    def save(self, name: str, content: bytes) -> None:
        """Write bytes to the relative path `name`, whole or not at all.

        Nothing is written where the name or a link leads out of the directory.
        """
        try:
            with self._tolerate_failure(name):
                save_whole(self.path, name, content)
        except Error as error:
            self.problem(str(error), about="refused names")

    def problem(self, text: str, about: str) -> None:
        """Log a sentence for `problems`; of those `about` a thing the first is shown."""
        before = self._problems.get(about)
        self._problems[about] = text
        if before is None:
            say(text, sys.stderr)
        if before != text:
            self.log(text)

    @property
    def problems(self) -> list[str]:
        """What a user must know of what was not written: the last sentence about each thing."""
        return list(self._problems.values())

    @contextlib.contextmanager
    def _tolerate_failure(self, name: str) -> Iterator[None]:
        """Go on after an OSError in writing `name`.

        A full disk is no reason to end the training: records stay in memory.
        """
        try:
            yield
        except OSError as error:
            about = name if name in (self.metrics, LOG) else OTHERS
            self.problem(
                f"{self.path / name} cannot be written: {error.strerror or error}.", about
            )

    def close(self) -> None:
        """Finish writing; records that are not in their file are written again, all of them."""
        while self._open:
            name, file = self._open.popitem()
            with self._tolerate_failure(name):
                file.close()
                os.stat(self.path / name)  # somebody may have removed it
        if self.metrics in self._problems:
            lines = "".join(map(as_line, self.records)).encode()
            with self._tolerate_failure(self.metrics):
                save_whole(self.path, self.metrics, lines)
                del self._problems[self.metrics]


class RunDirectory(RunFiles):
    """The whole of a run's folder. It belongs to this run alone until `close`.

    `records` are the reports of all ranks, those of a resumed run first. Raises `Error` if there
    can be no such directory, or if another run holds it.
    """

    def __init__(self, location: str | Path, is_temporary: bool = False):
        super().__init__(local(location), METRICS, is_temporary)
        self._lock: FileLock | None = None
        try:
            make_folder(self.path)
            self._lock = _locked(self.path)
            make_folder(self.path / "checkpoints", 0o755)
            earlier = self.path / METRICS
            if earlier.exists():  # of a run that is resumed
                self.records = list(read_records(earlier))
                lines = "".join(map(as_line, self.records)).encode()
                if earlier.read_bytes() != lines:  # its last line was cut off, say
                    self.save(METRICS, lines)
            self._opened(METRICS)
            self._opened(LOG)
            for of_rank in map(METRICS_OF_A_RANK.fullmatch, os.listdir(self.path)):
                if of_rank:  # of a run that was killed
                    self.take_in(int(of_rank[1]))
            self.restart = 1 + max((record["restart"] for record in self.records), default=-1)
        except Error:
            self.close()
            raise
        except (OSError, TypeError, ValueError) as error:  # no such number, no such name
            self.close()  # in a notebook the traceback would keep this object, and the lock
            why = getattr(error, "strerror", None) or error
            raise Error(
                f"{self.path} cannot be a run directory: {why}.\n"
                "Choose a folder that you may write to."
            ) from None

    def take_in(self, rank: int) -> None:
        """Put the records in a rank's own file into metrics.jsonl, and remove the file.

        Ranks have such files where torchrun or srun has started them. It stays if the disk is
        full.
        """
        path = self.path / metrics_of(rank)
        with contextlib.suppress(FileNotFoundError):
            for record in read_records(path):
                self.record(rank, record)
        if METRICS not in self._problems:
            path.unlink(missing_ok=True)

    def close(self) -> None:
        super().close()
        if self._lock is not None:
            self._lock.release()


def as_line(record: dict) -> str:
    """A record as a line of metrics.jsonl. JSON has no NaN and no infinity: their names stand."""
    return json.dumps({k: str(v) if str(v) in NOT_FINITE else v for k, v in record.items()}) + "\n"


def read_records(path: Path) -> Iterator[dict]:
    """The records in a file such as metrics.jsonl, without lines that hold none."""
    with open(path, encoding="utf-8", errors="replace", opener=open_file) as file:
        for line in file:
            with contextlib.suppress(ValueError, TypeError, RecursionError):
                values = {"restart": 0, **json.loads(line)}.items()  # version 0.5 wrote none
                yield _with_names_kept_once({k: NOT_FINITE.get(str(v), v) for k, v in values})


def _with_names_kept_once(record: dict) -> dict:
    """The same record, whose names all records share: it takes 0.4 kB instead of 0.7."""
    return {sys.intern(str(name)): value for name, value in record.items()}


# One run at a time


def _locked(folder: Path) -> FileLock:
    """The lock of a run directory, held until it is released, or until this process ends.

    It is `flock`: the kernel takes it back, however the process ends. NFS shares it between hosts,
    and so does Lustre with its mount option `flock`. Where a file system has none, the file itself
    is the lock, and one that a killed run has left is removed by hand. Raises `Error` if another
    run holds it and does not end soon, OSError where no file can be written.
    """
    path = folder / LOCK
    with contextlib.suppress(FileNotFoundError):  # it is made below
        os.close(open_file(path, os.O_RDONLY))
    lock = FileLock(path, mode=0o600, thread_local=False)
    is_job = "SLURM_JOB_ID" in os.environ or "PBS_JOBID" in os.environ
    seconds = WAIT_IN_A_JOB if is_job else WAIT
    try:
        with contextlib.suppress(Timeout):
            lock.acquire(blocking=False)
        if not lock.is_locked:
            say(f"Another run is writing in {folder}: waiting {seconds} s for its end", sys.stderr)
            lock.acquire(timeout=seconds)
    except Timeout:
        who = "unknown"
        with contextlib.suppress(OSError, ValueError):  # nothing can be read
            who = " on ".join(path.read_text().split()[:2]) or who
        by_hand = f" If it is gone, remove {path}." if isinstance(lock, SoftFileLock) else ""
        raise Error(
            f"Another run (process {who}) is writing in {folder}.\n"
            f"Wait until it has ended, or end it; or choose another directory.{by_hand}"
        ) from None
    if not isinstance(lock, SoftFileLock):  # that one writes itself who holds it
        with contextlib.suppress(OSError):  # a full disk: it holds, but nobody can read whose
            with open(path, "w", opener=open_file) as file:
                file.write(f"{os.getpid()}\n{socket.gethostname()}\n")
    return lock


# Files


def metrics_of(rank: int) -> str:
    """The file of a rank's own reports, where torchrun or srun has started the ranks."""
    return f"metrics-{rank}.jsonl"


def save_whole(directory: Path, name: str, content: bytes) -> None:
    """Write bytes to `name` in `directory`, whole or not at all.

    Raises `Error` for a name that leads out of the directory, OSError for a full disk.
    """
    check_name(name)
    path = directory / name
    target = path.resolve()
    if not target.is_relative_to(directory.resolve()):
        raise Error(
            f"The file name {name!r} leads out of the run directory through a link ({target}).\n"
            "Choose another name."
        )
    os.stat(directory)  # a run directory that was removed is not made again
    make_folder(path.parent, 0o755)
    # Of its own for each writer: under torchrun every rank may save the same file
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        with open(temporary, "xb", opener=open_file) as file:
            file.write(content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)  # it is there after a full disk, half-written
