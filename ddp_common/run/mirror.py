"""A run directory in object storage: a local folder, and a thread that copies it there.

It does so when a checkpoint was saved, and once a minute. Relies on fsspec for every kind of
storage. Promises: when `push` returns, all is there, or an error says where it is kept. Another
program that writes to the same URL is not kept out.
"""

import atexit
import contextlib
import shutil
import sys
import tempfile
import threading
from pathlib import Path

from ddp_common.errors import Error
from ddp_common.run import run_lock

INTERVAL = 60.0  # seconds: the log and the numbers of a run that saves nothing arrive, too


class Mirror:
    """A local folder, `path`, which is copied to a URL until this program ends.

    It is filled from the URL first. Raises `Error` if the URL cannot be reached, or a package for
    it is missing.
    """

    def __init__(self, url: str):
        import fsspec  # only for those who use a URL: it would slow down the command line

        self.url = url
        self._lock = threading.Lock()  # of the upload
        self._something_new = threading.Event()
        self._has_failed = False
        self._is_finished = False
        with _explain_unreachable(url):
            self.filesystem, self.root = fsspec.url_to_fs(url)
            present = self.filesystem.find(self.root)
        self.path = Path(tempfile.mkdtemp(prefix="ddp-run-"))
        try:
            with _explain_unreachable(url):
                if present:
                    there = f"{self.root.rstrip('/')}/"  # with it, what is inside is copied
                    self.filesystem.get(there, f"{self.path}/", recursive=True)
        except BaseException:
            shutil.rmtree(self.path, ignore_errors=True)
            raise
        self._sent = self._versions()
        threading.Thread(target=self._keep_pushing, daemon=True, name="ddp-mirror").start()
        atexit.register(self.finish)

    def push_soon(self):
        """Have the thread copy what is new."""
        self._something_new.set()

    def push(self):
        """Copy what is new, and delete there the checkpoints that retention has removed here.

        Raises `Error`, which names the local folder, if that fails.
        """
        with self._lock:
            try:
                self._push()
            except Exception as error:  # each file system has its own
                raise Error(
                    f"The run directory {self.url} cannot be written: {error}. "
                    f"Everything is kept in {self.path}."
                ) from None

    def _push(self):
        versions = self._versions()
        new = [name for name in versions if self._sent.get(name) != versions[name]]
        if self._is_finished:
            return
        # Object storage has no folders, but other file systems do
        for folder in {self._there(name).rpartition("/")[0] for name in new}:
            self.filesystem.makedirs(folder, exist_ok=True)
        for name in new:
            with contextlib.suppress(FileNotFoundError):  # retention was quicker
                self.filesystem.put_file(str(self.path / name), self._there(name))
                self._sent[name] = versions[name]
        for name in self._sent.keys() - versions.keys():
            if any(_supersedes(present, name) for present in versions):
                with contextlib.suppress(FileNotFoundError):  # somebody else has removed it
                    self.filesystem.rm_file(self._there(name))
            del self._sent[name]

    def _there(self, name):
        return f"{self.root}/{name.as_posix()}"

    def _versions(self):
        """The files here that belong to the run: relative path -> size and time."""
        versions = {}
        for path in self.path.rglob("*"):
            name = path.relative_to(self.path)
            with contextlib.suppress(FileNotFoundError):  # retention was quicker
                if path.is_file() and not _is_for_here_alone(name):
                    versions[name] = (path.stat().st_size, path.stat().st_mtime_ns)
        return versions

    def _keep_pushing(self):
        while not self._is_finished:
            self._something_new.wait(INTERVAL)
            self._something_new.clear()
            try:
                self.push()
                self._has_failed = False
            except Error as error:  # the network may come back; `finish` has the last word
                if not self._has_failed:
                    print(f"{error} Trying again.", file=sys.stderr)
                self._has_failed = True

    def finish(self):
        """Copy the rest and remove the local folder. Raises `Error` as `push` does."""
        self.push()
        with self._lock:  # the thread is not to take what is removed for removed by retention
            self._is_finished = True
            shutil.rmtree(self.path, ignore_errors=True)
        atexit.unregister(self.finish)


def _supersedes(present: Path, gone: Path) -> bool:
    """Whether retention may have removed the checkpoint `gone`: there is a newer one beside it."""
    are_checkpoints = present.match("step-*.pt") and gone.match("step-*.pt")
    return are_checkpoints and present.parent == gone.parent and present.name > gone.name


def _is_for_here_alone(name: Path) -> bool:
    """Whether a file is still being written, or is needed on this machine alone."""
    if name.name.startswith((run_lock.NAME, ".seen-")):
        return True
    return name.suffix == ".tmp" and (name.name.startswith(".") or "checkpoints" in name.parts)


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
