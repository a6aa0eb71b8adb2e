"""The client's side of reporting: the run directory.

`runs/<tutorial>/<time>/` holds config.json, metrics.jsonl, log.txt, checkpoints/ and whatever ranks save. It may also be an fsspec URL
such as s3://bucket/run: then there is a local mirror, and a thread that sends what is new in it. Promises: a file appears whole or not
at all, and none lies outside; when `close` returns, the remote directory has everything, or an error says where it is kept.
"""

import contextlib
import errno
import json
import math
import os
import sys
import time

from tqdm import tqdm

from ddp_common.errors import Error
from ddp_common.files import make_private, save_whole
from ddp_common.run.places import local, mirrors
from ddp_common.run.records import Records
from ddp_common.run.run_lock import NAME, Lock

CHECK_INTERVAL = 2.0  # seconds between two looks at whether the folder is still there
OWN = ("metrics.jsonl", "log.txt", "config.json")


class RunDirectory:
    """Where a run leaves what it has to say. `location` is a path or an fsspec URL; `path` is where it lies on this machine.

    It is this run's alone until `close` (see `run_lock`). `problems` (list of str) is what could not be written, for a person to read.
    """

    def __init__(self, location):
        self.path = local(location)
        self.mirror = mirrors.get(str(location))
        self._problems, self._checked = {}, time.monotonic()  # what it is about -> a sentence
        self._saved, self._not_saved, self._last_failure = (
            0,
            0,
            None,
        )  # checkpoints, as the ranks tell
        self._lost_files, self._config, self._closed = [], None, False
        try:
            make_private(self.path)
            self._lock = Lock(self.path)
            (self.path / "checkpoints").mkdir(exist_ok=True)
            self.records = self._earlier_records()
            self._open()
        except (OSError, ValueError) as error:  # the latter of a name that no file can have
            why = getattr(error, "strerror", None) or error
            raise Error(
                f"{self.path} cannot be a run directory: {why}. Choose a folder that you may write to."
            ) from None

    def _open(self):
        self._metrics = self._appended("metrics.jsonl")
        self._log = self._appended("log.txt")

    def _appended(self, name):
        return open(
            self.path / name, "a", buffering=1, encoding="utf-8", errors="backslashreplace"
        )

    def _earlier_records(self):
        """Those of a run that is resumed. Lines that hold none, such as one that was cut, are left out and the file is written again."""
        records, lines, bad = Records(), [], []
        path = self.path / "metrics.jsonl"
        if not path.exists():
            return records
        with open(path, encoding="utf-8", errors="replace") as file:
            for line in file:
                try:
                    record = {key: _finite(value) for key, value in json.loads(line).items()}
                except (ValueError, AttributeError, RecursionError):
                    bad.append(line)
                else:
                    records.append(record)
                    lines.append(line.rstrip("\n") + "\n")
        if len(bad) > 1:
            self._say(
                f"{len(bad)} lines of {path} cannot be read and were left out; the other {len(records)} records are there.",
                "earlier",
            )
        if bad or (lines and not line.endswith("\n")):
            self.save("metrics.jsonl", "".join(lines).encode())
        return records

    def record(self, rank, values):
        with self._going_on("metrics.jsonl"):
            self._check_now_and_then()
        self.records.append({"rank": rank, **values})
        with self._going_on("metrics.jsonl"):
            if not self._metrics.closed:
                self._metrics.write(_line({"rank": rank, **values}))

    def log(self, text):
        with self._going_on("log.txt"):
            self._check_now_and_then()
            if not self._log.closed:
                self._log.write(f"{time.strftime('%H:%M:%S')} {text}\n")

    @property
    def problems(self):
        """What a person must know of what was not written: a list of sentences."""
        sentences = list(self._problems.values())
        if len(self._lost_files) > 1:
            sentences.append(
                f"{len(self._lost_files)} files could not be written, the last of them {self._lost_files[-1]}."
            )
        if self._not_saved and self._saved:
            tried = self._saved + self._not_saved
            sentences.append(
                f"{self._not_saved} of {tried} checkpoints were not saved. The last failure: {self._last_failure}"
            )
        elif self._not_saved:
            sentences.append(
                f"No checkpoint was saved, of {self._not_saved}. The last failure: {self._last_failure}"
            )
        return sentences

    def saved(self):
        """A rank has saved a checkpoint."""
        self._saved += 1

    def not_saved(self, why):
        """A rank could not save a checkpoint; it goes on, and has said so in the log."""
        if self._not_saved == 0:
            self._show(why)
        self._not_saved, self._last_failure = self._not_saved + 1, why

    def problem(self, text, about):
        """Keep a sentence for `problems`, show it and log it; the first one `about` the same thing."""
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
    def _going_on(self, name):
        """A full disk here is no reason to end the training there: the first time it is said, and records stay in memory."""
        try:
            yield
        except OSError as error:
            is_own = name in OWN
            about = name if is_own else "files"
            if about not in self._problems:
                self._say(
                    f"{self.path / name} cannot be written: {error.strerror or error}. Training goes on.",
                    about,
                )
            if not is_own:
                self._lost_files.append(name)

    def _check_now_and_then(self):
        if time.monotonic() - self._checked > CHECK_INTERVAL:
            self.check()

    def check(self):
        """Make the folder again, with what is known of it, if somebody has removed it or moved it away. Raises OSError if that fails."""
        self._checked = time.monotonic()
        is_whole = _is_there(self._metrics, self.path / "metrics.jsonl") and _is_there(
            self._log, self.path / "log.txt"
        )
        if self.mirror is not None and not self.path.is_dir():
            raise FileNotFoundError(
                errno.ENOENT, "the local copy is gone; what was sent before is still there"
            )
        make_private(self.path)
        (self.path / "checkpoints").mkdir(exist_ok=True)
        if not is_whole:
            self._make_again()

    def _make_again(self):
        if not (self.path / NAME).exists():
            self._lock.renew()
        for file in (self._metrics, self._log):
            with contextlib.suppress(OSError):  # what is left in its buffer has nowhere to go
                file.close()
        metrics_gone, log_gone = (
            not (self.path / name).exists() for name in ("metrics.jsonl", "log.txt")
        )
        self._open()
        if metrics_gone:
            self._metrics.writelines(map(_line, self.records))
        if self._config is not None and not (self.path / "config.json").exists():
            save_whole(self.path, "config.json", self._config)
        lost = "The log until then and the checkpoints are lost." if log_gone else ""
        self.problem(
            f"{self.path}, or a file of the run in it, was removed while the run was writing there. What is known was "
            f"written there again, all metrics among it. {lost}".strip(),
            "removed",
        )

    def say_ending(self):
        """The run was told to stop: who waits for this directory may have it soon."""
        self._lock.say_ending()

    def write_json(self, name, values):
        content = (json.dumps(values, indent=2, default=str) + "\n").encode()
        if name == "config.json":
            self._config = content
        self.save(name, content)

    def save(self, name, content):
        """Write bytes to the relative path `name`, whole or not at all. Raises `Error` if a link leads it out of the directory."""
        with self._going_on(name):
            save_whole(self.path, name, content)

    def close(self):
        """Finish writing. With a mirror, send the rest; if that fails, say where it is kept: it is tried again when the program ends."""
        if self._closed:
            return
        self._closed = True
        try:
            with self._going_on("log.txt"):
                self.check()
        except Error as error:  # another run has taken the place
            self._say(str(error), "place")
        for file, name in ((self._metrics, "metrics.jsonl"), (self._log, "log.txt")):
            with self._going_on(name):
                file.close()
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
        try:
            save_whole(self.path, "metrics.jsonl", "".join(map(_line, self.records)).encode())
        except OSError as error:
            self._problems["metrics.jsonl"] = (
                f"{self.path / 'metrics.jsonl'} is not complete: {error.strerror or error}."
            )
        else:
            del self._problems["metrics.jsonl"]


def _line(record):
    """A record as a line of metrics.jsonl. JSON has no NaN: it is written as its name."""
    finite = {
        key: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in record.items()
    }
    return json.dumps(finite) + "\n"


def _finite(value):
    """The opposite: a value as it was before it was written."""
    return NAMES.get(value, value) if isinstance(value, str) else value


def _is_there(file, path):
    """Whether a file is open and still in a folder, and `path` leads to one."""
    return not file.closed and os.fstat(file.fileno()).st_nlink > 0 and path.exists()


NAMES = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}  # of numbers that JSON does not know
