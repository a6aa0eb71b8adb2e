"""A run directory in object storage: a local folder, and a thread that sends what is new in it.

Promises: when `finish` returns, the remote directory has everything, or an error says where it is kept.
"""

import atexit
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path

from ddp_common.errors import Error
from ddp_common.run import run_lock

PUSH_INTERVAL = 2.0  # seconds between two looks for what is new in a mirror


def is_temporary(path):
    """Whether a file of a run directory is one of ours that is being written, or is of use on this machine alone."""
    ours = path.name.startswith((run_lock.NAME, ".seen-"))
    return ours or (
        path.suffix == ".tmp" and (path.name.startswith(".") or path.parent.name == "checkpoints")
    )


class Mirror:
    """A local folder whose files a thread keeps sending to a URL, until this program ends. Checkpoints follow their digests."""

    def __init__(self, url):
        import fsspec

        self.url, self.sent, self.lock, self.finished = url, {}, threading.Lock(), False
        try:
            self.filesystem, self.root = fsspec.url_to_fs(url)
            present = self.filesystem.find(self.root)
        except ImportError as error:
            raise Error(
                f"Runs at {url} need one more package ({error}). For s3:// install the extra: pip install -e '.[s3]'."
            ) from None
        except (
            Exception
        ) as error:  # each file system has its own: access denied, no such bucket, no network
            raise Error(
                f"The run directory {url} cannot be reached: {error}. Check its name, the credentials and the network."
            ) from None
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
                raise Error(
                    f"The local copy {self.path} of {self.url} is gone. What was sent before is still there."
                )
            try:
                there = {
                    path.relative_to(self.path): path
                    for path in self.path.rglob("*")
                    if path.is_file() and not is_temporary(path)
                }
                for name in sorted(there, key=lambda name: (name.suffix == ".pt", name)):
                    self._send(name, there[name])
                gone = {
                    name
                    for name in self.sent
                    if name not in there and name.match("checkpoints/step-*")
                }  # by retention; nothing else goes
                for name in sorted(gone, key=lambda name: (name.suffix != ".pt", name)):
                    self.filesystem.rm_file(f"{self.root}/{name.as_posix()}")
                    del self.sent[name]
            except Exception as error:  # as above
                raise Error(
                    f"The run directory {self.url} cannot be written: {error}. Everything is kept in {self.path}."
                ) from None

    def _send(self, name, path):
        try:
            if self.sent.get(name) != (version := self._version(path)):
                target = f"{self.root}/{name.as_posix()}"
                self.filesystem.makedirs(
                    target.rpartition("/")[0], exist_ok=True
                )  # object storage has no folders, others do
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
