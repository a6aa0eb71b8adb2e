"""One run at a time in a run directory: a lock that ends with the process that holds it.

Relies on `filelock`, and that on `flock`: the kernel takes it back when the process ends, however
it ends. NFS shares it between hosts, and so does Lustre with its mount option `flock`. Where a
file system has none, the file itself is the lock: one that a killed run on another host has left
is removed by hand, and the refusal says which.

Not covered: a run directory in object storage, where each program locks its own local copy.
"""

import contextlib
import os
import socket
from pathlib import Path

from filelock import FileLock, SoftFileLock, Timeout

from ddp_common.errors import Error

NAME = ".lock"
WAIT = 3  # seconds for the run before to be gone
WAIT_IN_A_JOB = 60  # nobody watches a batch job, and the one before may still be saving


class RunLock:
    """The lock of `folder`, held from now on until `release`, or until this process ends.

    Raises `Error` if another run holds it and does not end soon, OSError where no file can be
    written.
    """

    def __init__(self, folder: Path):
        self.path = folder / NAME
        self._ours = (str(os.getpid()), socket.gethostname())
        self._lock = FileLock(self.path, mode=0o600, thread_local=False)
        self._acquire()

    def _acquire(self):
        is_job = "SLURM_JOB_ID" in os.environ or "PBS_JOBID" in os.environ
        try:
            self._lock.acquire(timeout=WAIT_IN_A_JOB if is_job else WAIT)
        except Timeout:
            raise Error(self._refusal()) from None
        if not self._is_the_file():
            with contextlib.suppress(OSError):  # a full disk: it holds, but nobody can read whose
                self.path.write_text("\n".join(self._ours))

    def _is_the_file(self):
        """Whether the file system has no `flock`. Then filelock itself writes who holds it."""
        return isinstance(self._lock, SoftFileLock)

    def _holder(self):
        """The process id and the host in the file; None if nothing can be read."""
        try:
            pid, host = self.path.read_text().split()[:2]
        except (OSError, ValueError):
            return None
        return pid, host

    def _refusal(self):
        holder = self._holder()
        if holder is None:
            who = "Another run"
        elif holder == self._ours:
            who = "Another run (this very process)"
        else:
            who = f"Another run (process {holder[0]} on {holder[1]})"
        words = (
            f"{who} is writing in {self.path.parent}. "
            "Two runs in one directory would overwrite each other's checkpoints. "
            "Wait until it has ended, or end it; to train beside it, choose another directory."
        )
        if self._is_the_file():
            words += f" If that process is gone, remove {self.path}: there is no flock here."
        return words

    def renew(self):
        """Take the lock of the folder that is at this path now, if the one before was removed."""
        if self._holder() != self._ours:
            self._lock.release()
            self._acquire()

    def release(self):
        if self._holder() == self._ours and not self._is_the_file():
            with contextlib.suppress(OSError):  # where the disk has become read-only it stays
                self.path.unlink()
        self._lock.release()
