"""One run at a time in a run directory: a lock that ends with the process that holds it.

Whoever writes in a run directory holds `.lock` in it, on one machine and across machines. What
this relies on, the strongest first:

- `flock`: the kernel gives it to one process and takes it back when that process ends, however it
  ends. Linux's NFS client passes it on to the server, and so does Lustre with its mount option
  `flock`: there it also holds between hosts.
- A heartbeat, where a file system knows no `flock` or keeps it to each host: the holder touches
  the file every few seconds. A lock of another host that has been silent for half a minute, by the
  clock of the file server, is void. On the same host the process number and the time at which that
  process began decide, at once.

Promises: a lock whose holder is dead never blocks for longer than that half minute, and on one
host not at all; a child that the holder has forked does not keep it; the message of a refusal says
who holds it.

Not covered: a run directory in object storage, where each program locks its own local copy, and
two hosts without a common `flock` that begin at the same moment.
"""

import contextlib
import errno
import fcntl
import json
import os
import socket
import threading
import time
import weakref
from pathlib import Path

import psutil

from ddp_common.errors import Error

NAME = ".lock"
BEAT = 5.0  # seconds between two heartbeats
SILENT = 30.0  # seconds without a heartbeat after which a holder on another host counts as dead
GRACE = 3.0  # seconds that a new run waits for the one before it to be gone
# The same where that one has been told to stop, or is this batch job before it was requeued.
ENDING_TIMEOUT = 60.0
RETRY_INTERVAL = 0.1  # seconds
NO_FLOCK = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)

_held: weakref.WeakSet["Lock"] = weakref.WeakSet()


class Lock:
    """The lock of `folder`, held from now on until `release`, or until this process ends.

    Raises `Error` if another run holds it and does not end soon, OSError where no file can be
    written.
    """

    def __init__(self, folder: str | Path):
        self._descriptor = None  # of the open file, while the lock is held
        self._guard = threading.Lock()  # of the descriptor: the heartbeat is a thread
        self._stop = threading.Event()
        self.folder = Path(folder)
        self.path = Path(folder) / NAME
        self._ours = _this_process()
        self._acquire()
        _held.add(self)
        threading.Thread(
            target=_keep_beating,
            args=(weakref.ref(self), self._stop),
            daemon=True,
            name="ddp-lock",
        ).start()

    def _acquire(self):
        began = time.monotonic()
        first_beat = None
        while True:
            holder = self._try()
            if holder is None:
                return
            waited = time.monotonic() - began
            if holder.get("uncertain"):
                # It is on another host, and either dead, or its next heartbeat comes soon.
                first_beat = first_beat or holder["beat"]
                is_alive = holder["beat"] != first_beat
                patience = GRACE if is_alive else SILENT + BEAT
            elif self._is_ending(holder):
                patience = ENDING_TIMEOUT
            else:
                patience = GRACE
            if waited > patience:
                raise Error(self._refusal(holder))
            time.sleep(RETRY_INTERVAL)

    def _try(self):
        """Take the lock and return None, or return what is known of its holder (dict)."""
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        is_ours = False
        try:
            holder = self._holder(descriptor)
            if holder is None:
                self._write(descriptor, self._ours)
                self._descriptor = descriptor
                is_ours = True
            return holder
        finally:
            if not is_ours:
                os.close(descriptor)

    def _holder(self, descriptor):
        """Who else holds the lock (dict), None if nobody does.

        Where there is a `flock`, it is ours in that case.
        """
        has_flock = True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return _read(descriptor) or {}
        except OSError as error:
            if error.errno not in NO_FLOCK:
                raise
            has_flock = False
        if not _is_same_file(self.path, descriptor):  # its holder has just removed it
            return {}
        known = _read(descriptor)
        if not known:
            return None
        if known.get("boot") == self._ours["boot"]:
            is_held = not has_flock and _is_alive(known)
            return known if is_held else None
        beat = os.fstat(descriptor).st_mtime
        if self._now() - beat > SILENT:
            return None
        return {**known, "uncertain": True, "beat": beat}

    def _now(self):
        """The time by the clock of the machine that has the files."""
        probe = self.folder / f"{NAME}-{os.getpid()}"
        try:
            probe.touch()
            return probe.stat().st_mtime
        finally:
            probe.unlink(missing_ok=True)

    def _is_ending(self, holder):
        """Whether the holder was told to stop, or is this batch job before it was requeued.

        PBS does not say how often it has started a job: there a launch in the same job may also be
        another one beside this, which is then refused later than it could be.
        """
        is_same_job = holder.get("job") is not None and holder.get("job") == self._ours["job"]
        start = self._ours["start"]
        may_be_requeued = is_same_job and (start is None or holder.get("start", 0) < start)
        return bool(holder.get("ending")) or may_be_requeued

    def _refusal(self, holder):
        if not holder:
            who = "Another run"
        else:
            is_here = holder.get("boot") == self._ours["boot"] and holder.get("pid") == os.getpid()
            if is_here:
                process = "this very process"
            else:
                process = f"process {holder.get('pid')} on {holder.get('host')}"
            job = f", batch job {holder['job']}" if holder.get("job") else ""
            who = f"Another run ({process}{job}, since {holder.get('since')})"
        return (
            f"{who} is writing in {self.folder}. "
            "Two runs in one directory would overwrite each other's checkpoints. "
            "Wait until it has ended, or end it; to train beside it, choose another directory."
        )

    def _write(self, descriptor, record):
        """Write in one piece over what stood there.

        If the disk is full, the lock holds all the same, but nobody can read who holds it.
        """
        with contextlib.suppress(OSError):
            content = json.dumps(record).encode()
            os.pwrite(descriptor, content, 0)
            os.ftruncate(descriptor, len(content))
            os.fsync(descriptor)

    def say_ending(self):
        """Let those who wait for this lock know that it is released soon."""
        with self._guard:
            if self._descriptor is not None and not self._ours.get("ending"):
                self._ours["ending"] = True
                self._write(self._descriptor, self._ours)

    def beat(self):
        """Give a sign of life; it takes no room on the disk."""
        with self._guard, contextlib.suppress(OSError):
            if self._descriptor is not None:
                os.utime(self._descriptor)

    def renew(self):
        """Take the lock of the folder that is at this path now; the one before was removed."""
        self._close()
        self._acquire()

    def release(self):
        self._stop.set()
        self._close()

    def _close(self):
        with self._guard:
            descriptor = self._descriptor
            self._descriptor = None
            if descriptor is None:
                return
            with contextlib.suppress(OSError):  # the folder may be gone
                if _is_same_file(self.path, descriptor):
                    self.path.unlink()
            os.close(descriptor)

    def __del__(self):
        if self._descriptor is not None:
            self.release()

    def forget(self):
        """In a child that was forked: close the copy. The parent's lock stays."""
        self._guard = threading.Lock()  # a thread of the parent may have held the old one
        descriptor = self._descriptor
        self._descriptor = None
        if descriptor is not None:
            os.close(descriptor)


def _this_process():
    """What the lock file says about its holder."""
    job = os.environ.get("SLURM_JOB_ID") or os.environ.get("PBS_JOBID")
    start = None  # how often the job was requeued; None where nobody says so
    if "SLURM_JOB_ID" in os.environ:
        count = os.environ.get("SLURM_RESTART_COUNT", "0")
        start = int(count) if count.isdigit() else 0
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "began": psutil.Process().create_time(),
        "boot": _boot(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        "job": job,
        "start": start,
    }


def _boot():
    """What distinguishes this host, since it was booted, from all others."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return f"{socket.gethostname()} {psutil.boot_time()}"


def _is_alive(holder):
    try:
        return abs(psutil.Process(holder["pid"]).create_time() - holder["began"]) < 1
    except (psutil.Error, KeyError, TypeError, ValueError):
        return False


def _is_same_file(path, descriptor):
    try:
        there = os.stat(path)
        ours = os.fstat(descriptor)
    except FileNotFoundError:
        return False
    return (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)


def _read(descriptor):
    """What the holder has written (dict), None if that is nothing or no such record."""
    try:
        record = json.loads(os.pread(descriptor, 4096, 0))
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None


def _keep_beating(reference, stop):
    while not stop.wait(BEAT):
        lock = reference()
        if lock is None:
            return
        lock.beat()
        del lock  # this thread must not keep it alive while it waits


def _after_fork_in_child():
    for lock in list(_held):
        lock.forget()
    _held.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
