"""The run directory: what the client writes down of the things that ranks report.

`runs/<tutorial>/<time>/` holds config.json, metrics.jsonl, log.txt, checkpoints/ and whatever
ranks save. It may also be an fsspec URL such as s3://bucket/run: then it is a local folder that
is copied there (`mirror`). Relies on `run_lock` to be the only run there. Promises: a
file appears whole or not at all, and none lies outside; a disk that is full does not end the
training; when `close` returns, the remote directory has everything, or an error says where it is
kept.
"""

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

from ddp_common.errors import Error
from ddp_common.files import METRICS_OF_A_RANK, make_private, save_whole
from ddp_common.run.places import local, mirrors
from ddp_common.run.run_lock import RunLock

CHECK_INTERVAL = 2.0  # seconds between two looks at whether the folder is still there
OWN_FILES = ("metrics.jsonl", "log.txt", "config.json")  # the others are saved by ranks
NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}  # numbers unknown to JSON


class RunDirectory:
    """Where a run leaves what it has to say.

    `location` is a path or an fsspec URL; `path` is where it lies on this machine. It belongs to
    this run alone until `close`. `records` (list of dict) are all reports, those of a resumed run
    first; `problems` (list of str) is what could not be written, for a person to read.

    Raises `Error` if there can be no such directory, or if another run holds it.
    """

    def __init__(self, location: str | Path):
        self.path = local(location)
        self.mirror = mirrors.get(str(location))
        self._problems: dict[str, str] = {}  # what it is about -> a sentence
        self._lost_files: list[str] = []
        self._checked = time.monotonic()
        self.function: str | None = None  # the name of the training function
        self.about: dict = {}  # what the program has config.json say
        self.is_temporary = False  # it goes with the run
        self._config: bytes | None = None  # the bytes of config.json
        self._closed = False
        # Checkpoints, as the ranks report them.
        self._saved = 0
        self._not_saved = 0
        self._last_failure: str | None = None
        try:
            make_private(self.path)
            self._lock = RunLock(self.path)
            (self.path / "checkpoints").mkdir(exist_ok=True)
            self.records = self._earlier_records()
            self._open()
            for path in self.path.iterdir():
                is_of_rank = METRICS_OF_A_RANK.fullmatch(path.name)
                if is_of_rank:  # of a run that was killed
                    self.take_in(int(is_of_rank[1]), path)
        except (OSError, ValueError) as error:  # ValueError: a name that no file can have
            if hasattr(self, "_lock"):
                # In a notebook the traceback would keep this object, and with it the lock
                self._lock.release()
            why = getattr(error, "strerror", None) or error
            raise Error(
                f"{self.path} cannot be a run directory: {why}. "
                "Choose a folder that you may write to."
            ) from None

    def _open(self):
        self._metrics = self._open_to_append("metrics.jsonl")
        self._log = self._open_to_append("log.txt")

    def _open_to_append(self, name):
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

    def take_in(self, rank: int, path: Path):
        """Put the records in a file of a rank's own into metrics.jsonl, and remove the file.

        Ranks have such files where torchrun or srun has started them. It stays if the disk is
        full.
        """
        with contextlib.suppress(FileNotFoundError):
            for record in read_records(path):
                self.record(rank, record)
        if "metrics.jsonl" not in self._problems:
            path.unlink(missing_ok=True)

    def record(self, rank: int, values: dict):
        """Keep what a rank has reported, in memory and in metrics.jsonl."""
        with self._tolerate_failure("metrics.jsonl"):
            self._check_now_and_then()
        record = _with_names_kept_once({"rank": rank, **values})
        self.records.append(record)
        with self._tolerate_failure("metrics.jsonl"):
            if not self._metrics.closed:
                self._metrics.write(as_line(record))

    def log(self, text: str):
        """Append a line with the time to log.txt."""
        with self._tolerate_failure("log.txt"):
            self._check_now_and_then()
            if not self._log.closed:
                self._log.write(f"{time.strftime('%H:%M:%S')} {text}\n")

    @property
    def problems(self) -> list[str]:
        """What a person must know of what was not written, in sentences."""
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

    def saved(self):
        """Take note that a rank has saved a checkpoint."""
        self._saved += 1
        self.copy_soon()

    def copy_soon(self):
        """Have what is new copied to object storage, if the run is there."""
        if self.mirror is not None:
            self.mirror.push_soon()

    def not_saved(self, why: str):
        """Take note that a rank could not save a checkpoint; it trains on, and has logged it."""
        if self._not_saved == 0:
            self._show(why)
        self._not_saved += 1
        self._last_failure = why

    def problem(self, text: str, about: str):
        """Keep a sentence for `problems`, show it and log it: the first one `about` a thing."""
        if about not in self._problems:
            self._say(text, about)
            self.log(text)

    def _say(self, text, about):
        self._problems[about] = text
        self._show(text)

    @staticmethod
    def _show(text):
        tqdm.write(text, file=sys.stderr)  # it leaves a progress bar whole
        sys.stderr.flush()

    @contextlib.contextmanager
    def _tolerate_failure(self, name):
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

    def _check_now_and_then(self):
        if time.monotonic() - self._checked > CHECK_INTERVAL:
            self.check()

    def check(self):
        """Make the folder again, with what is known of it, if somebody has removed or moved it.

        Raises OSError if that fails, and `Error` if another run has taken its place.
        """
        self._checked = time.monotonic()
        has_metrics = _is_in_place(self._metrics, self.path / "metrics.jsonl")
        is_whole = has_metrics and _is_in_place(self._log, self.path / "log.txt")
        make_private(self.path)
        (self.path / "checkpoints").mkdir(exist_ok=True)
        if not is_whole:
            self._make_again()

    def _make_again(self):
        self._lock.renew()
        for file in (self._metrics, self._log):
            with contextlib.suppress(OSError):  # what is left in its buffer has nowhere to go
                file.close()
        metrics_gone = not (self.path / "metrics.jsonl").exists()
        log_gone = not (self.path / "log.txt").exists()
        self._open()
        if metrics_gone:
            self._metrics.writelines(map(as_line, self.records))
        if self._config is not None and not (self.path / "config.json").exists():
            save_whole(self.path, "config.json", self._config)
        text = (
            f"{self.path}, or a file of the run in it, was removed while the run was writing "
            "there. What is known was written there again, all metrics among it."
        )
        if log_gone:
            text += " The log until then and the checkpoints are lost."
        self.problem(text, "removed")

    def write_json(self, name: str, values: dict):
        """Write `values` to `name`, as `save` does."""
        content = (json.dumps(values, indent=2, default=str) + "\n").encode()
        if name == "config.json":
            self._config = content
        self.save(name, content)

    def save(self, name: str, content: bytes):
        """Write bytes to the relative path `name`, whole or not at all.

        Raises `Error` if the name or a link leads out of the directory.
        """
        with self._tolerate_failure(name):
            save_whole(self.path, name, content)

    def close(self):
        """Finish writing. With a mirror, upload the rest.

        If that fails, `problems` say where it is kept: it is tried again when the program ends.
        """
        if self._closed:
            return
        self._closed = True
        try:
            with self._tolerate_failure("log.txt"):
                self.check()
        except Error as error:  # another run has taken the place
            self._say(str(error), "place")
        with self._tolerate_failure("metrics.jsonl"):
            self._metrics.close()
        with self._tolerate_failure("log.txt"):
            self._log.close()
        if "metrics.jsonl" in self._problems:
            self._write_metrics_again()
        if self.mirror is not None:
            try:
                self.mirror.push()
            except Error as error:
                self._say(str(error), "mirror")
        self._lock.release()

    def _write_metrics_again(self):
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


def _for_json(value):
    """JSON has no NaN and no infinity: they are written as their names."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _from_json(value):
    """A value as it was before it was written."""
    return NOT_FINITE.get(value, value) if isinstance(value, str) else value


def _is_in_place(file, path):
    """Whether a file is open and still in a folder, and `path` leads to one."""
    return not file.closed and os.fstat(file.fileno()).st_nlink > 0 and path.exists()
