"""The client's side of reporting: the run directory.

`runs/<tutorial>/<time>/` holds config.json, metrics.jsonl, log.txt, checkpoints/ and whatever ranks save. It may also be an fsspec URL
such as s3://bucket/run: then there is a local mirror, and a thread that sends what is new in it. Promises: a file appears whole or not
at all, and none lies outside; when `close` returns, the remote directory has everything, or an error says where it is kept.
"""

import atexit
import contextlib
import itertools
import json
import math
import os
import shutil
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path

from ddp_common.errors import Error
from ddp_common.reporting import check_name

PUSH_INTERVAL = 2.0  # seconds between two looks for what is new in a mirror

_mirrors = {}  # URL -> Mirror


class RunDirectory:
    """Where a run leaves what it has to say. `location` is a path or an fsspec URL; `path` is where it lies on this machine."""

    def __init__(self, location):
        self.path = local(location)
        self.mirror, self.problem = _mirrors.get(str(location)), None
        try:
            (self.path / "checkpoints").mkdir(parents=True, exist_ok=True)
            self.records = self._earlier_records()
            self._metrics = open(self.path / "metrics.jsonl", "a", buffering=1)
            self._log = open(self.path / "log.txt", "a", buffering=1)
        except OSError as error:
            raise Error(f"{self.path} cannot be a run directory: {error.strerror}. Choose a folder that you may write to.") from None

    def _earlier_records(self):
        """Those of a run that is resumed. What ends in a half-written line is written again without it."""
        lines, records = (self.path / "metrics.jsonl").read_text().splitlines() if (self.path / "metrics.jsonl").exists() else [], []
        try:
            for line in lines:
                record = json.loads(line)
                records.append({key: NAMES.get(value, value) for key, value in record.items()})
        except (ValueError, AttributeError):
            self.save("metrics.jsonl", "".join(line + "\n" for line in lines[:len(records)]).encode())
        return records

    def record(self, rank, values):
        self.records.append({"rank": rank, **values})
        finite = {key: str(value) if isinstance(value, float) and not math.isfinite(value) else value for key, value in values.items()}
        with self._going_on("metrics.jsonl"):
            self._metrics.write(json.dumps({"rank": rank, **finite}) + "\n")  # JSON has no NaN: it is written as its name

    def log(self, text):
        with self._going_on("log.txt"):
            self._log.write(f"{time.strftime('%H:%M:%S')} {text}\n")

    @contextlib.contextmanager
    def _going_on(self, name):
        """A full disk here is no reason to end the training there: the first time it is said, and records stay in memory."""
        try:
            yield
        except OSError as error:
            if self.problem is None:
                print(f"{self.path / name} cannot be written: {error.strerror}. Training goes on.", file=sys.stderr, flush=True)
            self.problem = error

    def write_json(self, name, values):
        self.save(name, (json.dumps(values, indent=2, default=str) + "\n").encode())

    def save(self, name, content):
        """Write bytes to the relative path `name`, whole or not at all. Raises `Error` if a link leads it out of the directory."""
        with self._going_on(name):
            save_whole(self.path, name, content)

    def close(self):
        """Finish writing. With a mirror, send the rest; if that fails, say where it is kept: it is tried again when the program ends."""
        for file, name in ((self._metrics, "metrics.jsonl"), (self._log, "log.txt")):
            with self._going_on(name):
                file.close()
        if self.mirror is not None:
            try:
                self.mirror.push()
            except Error as error:
                print(error, file=sys.stderr)


NAMES = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}  # of numbers that JSON does not know


def local(location):
    """The path on this machine of a run directory; for a URL that of its mirror, which is filled from it when first asked for."""
    if "://" not in str(location):
        return Path(location)
    if str(location) not in _mirrors:
        _mirrors[str(location)] = Mirror(str(location))
    return _mirrors[str(location)].path


def shown(path):
    """A run directory as a person would type it: the URL of a mirror, a path relative to here where that is shorter."""
    for url, mirror in _mirrors.items():
        if mirror.path == Path(path):
            return url
    return os.path.relpath(path) if Path(path).resolve().is_relative_to(Path.cwd()) else str(path)


def save_whole(directory, name, content):
    """Write bytes to `name` in `directory`, whole or not at all. Raises `Error` for a name that leads out of it, OSError for a full disk."""
    check_name(name)
    path = directory / name
    if not path.resolve().is_relative_to(directory.resolve()):
        raise Error(f"The file name {name!r} leads out of the run directory through a link ({path.resolve()}). Choose another name.")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(content)
    temporary.replace(path)


def is_temporary(path):
    """Whether a file of a run directory is one of ours that is being written."""
    return path.suffix == ".tmp" and (path.name.startswith(".") or path.parent.name == "checkpoints")


class Mirror:
    """A local folder whose files a thread keeps sending to a URL, until this program ends. Checkpoints follow their digests."""

    def __init__(self, url):
        import fsspec

        self.url, self.sent, self.lock, self.finished = url, {}, threading.Lock(), False
        try:
            self.filesystem, self.root = fsspec.url_to_fs(url)
            present = self.filesystem.find(self.root)
        except ImportError as error:
            raise Error(f"Runs at {url} need one more package ({error}). For s3:// install the extra: pip install -e '.[s3]'.") from None
        except Exception as error:  # each file system has its own: access denied, no such bucket, no network
            raise Error(f"The run directory {url} cannot be reached: {error}. Check its name, the credentials and the network.") from None
        self.path = Path(tempfile.mkdtemp(prefix="ddp-run-"))
        for source in present:
            target = self.path / source.removeprefix(self.root).lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            self.filesystem.get_file(source, str(target))
            self.sent[target.relative_to(self.path)] = self._version(target)
        self.problem = None
        threading.Thread(target=self._keep_pushing, daemon=True, name="ddp-mirror").start()
        atexit.register(self.finish)

    def push(self):
        """Send what is new, take away what is gone. Raises `Error`, which names the local copy, if that fails."""
        with self.lock:
            if self.finished:
                return
            if not self.path.is_dir():
                raise Error(f"The local copy {self.path} of {self.url} is gone. What was sent before is still there.")
            try:
                there = {path.relative_to(self.path): path for path in self.path.rglob("*") if path.is_file() and not is_temporary(path)}
                for name in sorted(there, key=lambda name: (name.suffix == ".pt", name)):
                    self._send(name, there[name])
                gone = {name for name in self.sent if name not in there and name.match("checkpoints/step-*")}  # by retention; nothing else goes
                for name in sorted(gone, key=lambda name: (name.suffix != ".pt", name)):
                    self.filesystem.rm_file(f"{self.root}/{name.as_posix()}")
                    del self.sent[name]
            except Exception as error:  # as above
                raise Error(f"The run directory {self.url} cannot be written: {error}. Everything is kept in {self.path}.") from None

    def _send(self, name, path):
        try:
            if self.sent.get(name) != (version := self._version(path)):
                target = f"{self.root}/{name.as_posix()}"
                self.filesystem.makedirs(target.rpartition("/")[0], exist_ok=True)  # object storage has no folders, others do
                self.filesystem.put_file(str(path), target)
                self.sent[name] = version
        except FileNotFoundError:
            if path.exists():
                raise  # the place it should go to is missing; else retention has removed the file meanwhile

    @staticmethod
    def _version(path):
        return path.stat().st_size, path.stat().st_mtime_ns

    def _keep_pushing(self):
        while not self.finished:
            time.sleep(PUSH_INTERVAL)
            try:
                self.push()
                self.problem = None
            except Error as error:  # the network may come back: the last word is that of `close`
                if self.problem is None:
                    print(f"{error} Trying again.", file=sys.stderr)
                self.problem = error

    def finish(self):
        """Send the rest and remove the local copy."""
        self.push()
        with self.lock:
            self.finished = True
            shutil.rmtree(self.path, ignore_errors=True)
        atexit.unregister(self.finish)


def new_directory(name, local=False):
    """A path (or URL, unless it must be `local`) that no other run has, under RUNS (default: `runs/` of the repository, or of the working directory)."""
    repository = Path(__file__).parent.parent
    root = os.environ.get("RUNS")
    if not root or (local and "://" in root):
        root = (repository if (repository / "tutorials").is_dir() else Path.cwd()) / "runs"
    stamp = time.strftime("%Y-%m-%dT%H-%M-%S")
    if "://" in str(root):
        return f"{str(root).rstrip('/')}/{name}/{stamp}-{uuid.uuid4().hex[:4]}"
    for suffix in itertools.chain([""], (f"-{n}" for n in itertools.count(2))):
        path = Path(root) / name / f"{stamp}{suffix}"
        try:
            path.mkdir(parents=True)  # the one who makes it owns it, also when two launches share a second
        except FileExistsError:
            continue
        except OSError as error:
            raise Error(f"Cannot make the run directory {path}: {error.strerror}. Choose another place with RUNS=…") from None
        return path
