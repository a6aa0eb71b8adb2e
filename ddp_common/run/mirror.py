"""A run directory in object storage: a local folder, and a thread that uploads what is new in it.

Relies on fsspec for every kind of storage. Promises: when `finish` returns, the remote directory
has everything, or an error says where it is kept.
"""

import atexit
import contextlib
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path

from ddp_common.errors import Error
from ddp_common.run import run_lock

PUSH_INTERVAL = 2.0  # seconds between two uploads of what is new


def is_temporary(path: Path) -> bool:
    """Whether this package is still writing a file, or needs it on this machine alone."""
    if path.name.startswith((run_lock.NAME, ".seen-")):
        return True
    if path.suffix != ".tmp":
        return False
    return path.name.startswith(".") or "checkpoints" in path.parts


@contextlib.contextmanager
def _explain_unreachable(url):
    """Inside the `with` block, whatever a file system raises becomes an `Error`."""
    try:
        yield
    except ImportError as error:
        raise Error(
            f"Runs at {url} need one more package ({error}). "
            "For s3:// install the extra: pip install -e '.[s3]'."
        ) from None
    # Each file system has its own exceptions: access denied, no such bucket, no network.
    except Exception as error:
        raise Error(
            f"The run directory {url} cannot be reached: {error}. "
            "Check its name, the credentials and the network."
        ) from None


class Mirror:
    """A local folder, `path`, whose files a thread keeps uploading to a URL.

    It is filled from the URL first; uploads go on until this program ends. Raises `Error` if the
    URL cannot be reached, or a package for it is missing.
    """

    def __init__(self, url: str):
        import fsspec  # only for those who use a URL: it would slow down the command line

        self.url = url
        self.sent: dict[Path, tuple[int, int]] = {}  # relative path -> version that was uploaded
        self.lock = threading.Lock()
        self.finished = False
        with _explain_unreachable(url):
            self.filesystem, self.root = fsspec.url_to_fs(url)
            present = self.filesystem.find(self.root)
        self.path = Path(tempfile.mkdtemp(prefix="ddp-run-"))
        try:
            with _explain_unreachable(url):
                self._download(present)
        except BaseException:
            shutil.rmtree(self.path, ignore_errors=True)
            raise
        self.problem = None
        threading.Thread(target=self._keep_pushing, daemon=True, name="ddp-mirror").start()
        atexit.register(self.finish)

    def _download(self, sources):
        for source in sources:
            target = self.path / source.removeprefix(self.root).lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            self.filesystem.get_file(source, str(target))
            self.sent[target.relative_to(self.path)] = self._version(target)

    def push(self):
        """Upload what is new, and delete remotely the checkpoints that retention has removed here.

        Raises `Error`, which names the local copy, if that fails.
        """
        with self.lock:
            if self.finished:
                return
            if not self.path.is_dir():
                raise Error(
                    f"The local copy {self.path} of {self.url} is gone. "
                    "What was sent before is still there."
                )
            try:
                present = self._files()
                self._upload(present)
                self._delete_checkpoints_not_in(present)
            except Exception as error:  # as in __init__, of any kind
                raise Error(
                    f"The run directory {self.url} cannot be written: {error}. "
                    f"Everything is kept in {self.path}."
                ) from None

    def _files(self):
        """The files of the local folder that belong to the run: relative path -> path."""
        return {
            path.relative_to(self.path): path
            for path in self.path.rglob("*")
            if path.is_file() and not is_temporary(path)
        }

    def _upload(self, present):
        for name in present:
            self._send(name, present[name])

    def _delete_checkpoints_not_in(self, present):
        removed = [
            name
            for name in self.sent
            if name not in present and name.parts[0] == "checkpoints" and name.match("step-*.pt")
        ]
        for name in removed:
            self.filesystem.rm_file(f"{self.root}/{name.as_posix()}")
            del self.sent[name]

    def _send(self, name, path):
        try:
            version = self._version(path)
            if self.sent.get(name) == version:
                return
            target = f"{self.root}/{name.as_posix()}"
            folder = target.rpartition("/")[0]
            # Object storage has no folders, but other file systems do.
            self.filesystem.makedirs(folder, exist_ok=True)
            self.filesystem.put_file(str(path), target)
            self.sent[name] = version
        except FileNotFoundError:
            if path.exists():
                raise  # the remote place is missing
            # else retention has removed the local file in the meantime

    @staticmethod
    def _version(path):
        return path.stat().st_size, path.stat().st_mtime_ns

    def _keep_pushing(self):
        while not self.finished:
            time.sleep(PUSH_INTERVAL)
            try:
                self.push()
                self.problem = None
            except Error as error:  # the network may come back; `finish` has the last word
                if self.problem is None:
                    print(f"{error} Trying again.", file=sys.stderr)
                self.problem = error

    def finish(self):
        """Upload the rest and remove the local copy. Raises `Error` as `push` does."""
        self.push()
        with self.lock:
            self.finished = True
            shutil.rmtree(self.path, ignore_errors=True)
        atexit.unregister(self.finish)
