"""The run directory: what the client writes down of the things that ranks report.

`runs/<tutorial>/<time>/` holds config.json, metrics.jsonl, log.txt, checkpoints/ and whatever
ranks save. Relies on `filelock` to be the only run there. Promises: a file appears whole or not at
all, and none lies outside; a disk that is full, or a folder that somebody removes, does not end
the training, and `problems` says what was lost.
"""

import contextlib
import json
import math
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from filelock import FileLock, SoftFileLock, Timeout

from ddp_common.errors import Error
from ddp_common.files import METRICS_OF_A_RANK, make_private, save_whole
from ddp_common.run.folders import local
from ddp_common.run.progress import say

LOCK = ".lock"
WAIT = 3  # seconds for the run before to be gone
WAIT_IN_A_JOB = 60  # nobody watches a batch job, and the one before may still be saving
OWN_FILES = ("metrics.jsonl", "log.txt", "config.json")  # the others are saved by ranks
NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}  # numbers unknown to JSON


class RunDirectory:
    """Where a run leaves what it has to say.

    `path` is its full path. It belongs to this run alone until `close`. `records` (list of dict)
    are all reports, those of a resumed run first; `problems` (list of str) is what could not be
    written, for a user to read.

    Raises `Error` if there can be no such directory, or if another run holds it.
    """

    def __init__(self, location: str | Path):
        self.path = local(location)
        self._problems: dict[str, str] = {}  # what it is about -> a sentence
        self._lost_files: list[str] = []
        self.function: str | None = None  # the name of the training function
        self.is_temporary = False  # it goes with the run
        self._closed = False
        # Checkpoints, as the ranks report them.
        self._saved = 0
        self._not_saved = 0
        self._last_failure: str | None = None
        try:
            make_private(self.path)
            self._lock = _locked(self.path)
            (self.path / "checkpoints").mkdir(exist_ok=True)
            self.records = self._earlier_records()
            self._metrics = self._open_to_append("metrics.jsonl")
            self._log = self._open_to_append("log.txt")
            for path in self.path.iterdir():
                is_of_rank = METRICS_OF_A_RANK.fullmatch(path.name)
                if is_of_rank:  # of a run that was killed
                    self.take_in(int(is_of_rank[1]), path)
        except (OSError, ValueError) as error:  # ValueError: a name that no file can have
            if hasattr(self, "_lock"):
                # In a notebook the traceback would keep this object, and with it the lock
                _unlock(self._lock)
            why = getattr(error, "strerror", None) or error
            raise Error(
                f"{self.path} cannot be a run directory: {why}.\n"
                "Choose a folder that you may write to."
            ) from None

    def _open_to_append(self, name: str) -> TextIO:
        path = self.path / name
        return open(path, "a", buffering=1, encoding="utf-8", errors="backslashreplace")

    def _earlier_records(self) -> list[dict]:
        """The records of a run that is resumed; lines that hold none are left out."""
        path = self.path / "metrics.jsonl"
        if not path.exists():
            return []
        records = list(read_records(path))
        lines = "".join(map(as_line, records)).encode()
        if path.read_bytes() != lines:  # its last line was cut off, say
            self.save("metrics.jsonl", lines)
        return records

    def take_in(self, rank: int, path: Path) -> None:
        """Put the records in a file of a rank's own into metrics.jsonl, and remove the file.

        Ranks have such files where torchrun or srun has started them. It stays if the disk is
        full.
        """
        with contextlib.suppress(FileNotFoundError):
            for record in read_records(path):
                self.record(rank, record)
        if "metrics.jsonl" not in self._problems:
            path.unlink(missing_ok=True)

    def record(self, rank: int, values: dict) -> None:
        """Keep what a rank has reported, in memory and in metrics.jsonl."""
        record = _with_names_kept_once({"rank": rank, **values})
        self.records.append(record)
        with self._tolerate_failure("metrics.jsonl"):
            self._metrics.write(as_line(record))

    def log(self, text: str) -> None:
        """Append a line with the time to log.txt."""
        with self._tolerate_failure("log.txt"):
            if not self._log.closed:
                self._log.write(f"{time.strftime('%H:%M:%S')} {text}\n")

    @property
    def problems(self) -> list[str]:
        """What a user must know of what was not written, in sentences."""
        sentences = list(self._problems.values())
        if len(self._lost_files) > 1:
            sentences.append(
                f"{len(self._lost_files)} files could not be written, "
                f"the last of them {self._lost_files[-1]}."
            )
        if self._not_saved and self._saved:
            tried = self._saved + self._not_saved
            sentences.append(
                f"{self._not_saved} of {tried} checkpoints were not saved. "
                f"The last failure: {self._last_failure}"
            )
        elif self._not_saved:
            sentences.append(
                f"No checkpoint was saved, of {self._not_saved}. "
                f"The last failure: {self._last_failure}"
            )
        return sentences

    def saved(self) -> None:
        """Take note that a rank has saved a checkpoint."""
        self._saved += 1

    def not_saved(self, why: str) -> None:
        """Take note that a rank could not save a checkpoint; it trains on, and has logged it."""
        if self._not_saved == 0:
            self._show(why)
        self._not_saved += 1
        self._last_failure = why

    def problem(self, text: str, about: str) -> None:
        """Keep a sentence for `problems`, show it and log it: the first one `about` a thing."""
        if about not in self._problems:
            self._say(text, about)
            self.log(text)

    def _say(self, text: str, about: str) -> None:
        self._problems[about] = text
        self._show(text)

    @staticmethod
    def _show(text: str) -> None:
        say(text, sys.stderr)

    @contextlib.contextmanager
    def _tolerate_failure(self, name: str) -> Iterator[None]:
        """Go on after an OSError in writing `name`, and show the first: records stay in memory.

        A full disk on the client is no reason to end the training on the ranks.
        """
        try:
            yield
        except OSError as error:
            is_own = name in OWN_FILES
            about = name if is_own else "files"
            if about not in self._problems:
                why = error.strerror or error
                self._say(f"{self.path / name} cannot be written: {why}. Training goes on.", about)
            if not is_own:
                self._lost_files.append(name)

    def write_json(self, name: str, values: dict) -> None:
        """Write `values` to `name`, as `save` does."""
        self.save(name, (json.dumps(values, indent=2, default=str) + "\n").encode())

    def save(self, name: str, content: bytes) -> None:
        """Write bytes to the relative path `name`, whole or not at all.

        Raises `Error` if the name or a link leads out of the directory.
        """
        with self._tolerate_failure(name):
            save_whole(self.path, name, content)

    def close(self) -> None:
        """Finish writing."""
        if self._closed:
            return
        self._closed = True
        with self._tolerate_failure("metrics.jsonl"):
            self._metrics.close()
        with self._tolerate_failure("log.txt"):
            self._log.close()
        if not (self.path / "metrics.jsonl").exists():
            self._say(
                f"{self.path} was removed while the run was writing there.\n"
                "What lay there is lost, but for checkpoints that were saved later. `records` of "
                "what launch returns has all reports.",
                "removed",
            )
        elif "metrics.jsonl" in self._problems:
            self._write_metrics_again()
        _unlock(self._lock)

    def _write_metrics_again(self) -> None:
        """After a disk was full: there may be room now, and everything is in memory."""
        lines = "".join(map(as_line, self.records))
        try:
            save_whole(self.path, "metrics.jsonl", lines.encode())
        except OSError as error:
            why = error.strerror or error
            self._problems["metrics.jsonl"] = (
                f"{self.path / 'metrics.jsonl'} is not complete: {why}."
            )
        else:
            del self._problems["metrics.jsonl"]


def as_line(record: dict) -> str:
    """A record as a line of metrics.jsonl."""
    return json.dumps({key: _for_json(value) for key, value in record.items()}) + "\n"


def read_record(line: str) -> dict:
    """The record in a line of metrics.jsonl.

    Raises ValueError, AttributeError or RecursionError if there is none.
    """
    values = json.loads(line).items()
    return _with_names_kept_once({name: _from_json(value) for name, value in values})


def read_records(path: Path) -> Iterator[dict]:
    """The records in a file such as metrics.jsonl, without lines that hold none."""
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            with contextlib.suppress(ValueError, AttributeError, RecursionError):
                yield read_record(line)


def _with_names_kept_once(record: dict) -> dict:
    """The same record, whose names all records share: it takes 0.4 kB instead of 0.7."""
    return {sys.intern(str(name)): value for name, value in record.items()}


def _for_json(value: Any) -> Any:
    """JSON has no NaN and no infinity: they are written as their names."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _from_json(value: Any) -> Any:
    """A value as it was before it was written."""
    return NOT_FINITE.get(value, value) if isinstance(value, str) else value


# One run at a time


def _locked(folder: Path) -> FileLock:
    """The lock of a run directory, held until `_unlock`, or until this process ends.

    It is `flock`: the kernel takes it back, however the process ends. NFS shares it between hosts,
    and so does Lustre with its mount option `flock`. Where a file system has none, the file itself
    is the lock, and one that a killed run has left is removed by hand. Raises `Error` if another
    run holds it and does not end soon, OSError where no file can be written.
    """
    path = folder / LOCK
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
        who = " on ".join(_holder(path)) or "unknown"
        by_hand = f" If it is gone, remove {path}." if isinstance(lock, SoftFileLock) else ""
        raise Error(
            f"Another run (process {who}) is writing in {folder}.\n"
            f"Wait until it has ended, or end it; or choose another directory.{by_hand}"
        ) from None
    if not isinstance(lock, SoftFileLock):  # that one writes itself who holds it
        with contextlib.suppress(OSError):  # a full disk: it holds, but nobody can read whose
            path.write_text(f"{os.getpid()}\n{socket.gethostname()}\n")
    return lock


def _holder(path: Path) -> list[str]:
    """The pid and the host in the file of a lock; empty if nothing can be read."""
    try:
        return path.read_text().split()[:2]
    except (OSError, ValueError):
        return []


def _unlock(lock: FileLock) -> None:
    path = Path(lock.lock_file)
    is_ours = _holder(path) == [str(os.getpid()), socket.gethostname()]  # the folder may be new
    if is_ours and not isinstance(lock, SoftFileLock):
        with contextlib.suppress(OSError):  # where the disk has become read-only it stays
            path.unlink()
    lock.release()
