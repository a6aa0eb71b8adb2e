"""One run at a time in a run directory: a lock that ends with the process that holds it, on one machine and over several.

Whoever writes in a run directory holds `.lock` in it. What this relies on, the strongest first:

- `flock`: the kernel gives it to one process and takes it back when that process ends, however it ends. Linux's NFS client passes it on
  to the server, Lustre does with its mount option `flock`, so on these it also holds between hosts.
- A heartbeat, where a file system knows no `flock` or keeps it to each host: the holder touches the file every few seconds. A lock of
  another host that has been silent for half a minute, by the clock of the file server, is void. On the same host the process number and
  the time at which that process began decide, at once.

Promises: a lock whose holder is dead never blocks for longer than that half minute, and on one host not at all; a child that the holder
has forked does not keep it; the message of a refusal says who holds it. Not covered: a run directory on object storage, where each
program locks its own local copy, and two hosts without a common `flock` that begin within the same moment.
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
BEAT = 5.0  # seconds between two signs of life
SILENT = 30.0  # seconds without one after which a holder on another host counts as dead
GRACE = 3.0  # seconds that a new run waits for the one before it to be gone
ENDING_TIMEOUT = 60.0  # the same where the one before has been told to stop, or is this batch job's own predecessor
LOOK = 0.1  # seconds between two tries
NO_FLOCK = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)

_held = weakref.WeakSet()


class Lock:
    """The lock of the folder `folder`, held from now on until `release`, or until this process ends.

    Raises `Error` if another run holds it and does not end soon, OSError where no file can be written.
    """

    def __init__(self, folder):
        self._descriptor, self._stop, self._guard = None, threading.Event(), threading.Lock()
        self.path, self.folder = Path(folder) / NAME, Path(folder)
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
        began, seen = time.monotonic(), None
        while (holder := self._try()) is not None:
            waited = time.monotonic() - began
            if holder.get(
                "uncertain"
            ):  # of another host: it is dead, or its next sign of life comes soon
                seen = seen or holder["beat"]
                patience = GRACE if holder["beat"] != seen else SILENT + BEAT
            else:
                patience = ENDING_TIMEOUT if self._is_ending(holder) else GRACE
            if waited > patience:
                raise Error(self._refusal(holder))
            time.sleep(LOOK)

    def _try(self):
        """Take the lock and return None, or return what is known of its holder (dict)."""
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            holder = self._holder(descriptor)
            if holder is None:
                self._write(descriptor, self._ours)
                self._descriptor, descriptor = descriptor, None
            return holder
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def _holder(self, descriptor):
        """Who else holds the lock (dict), None if nobody does. If there is a `flock`, it is ours where nobody does."""
        has_flock = True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return _read(descriptor) or {}
        except OSError as error:
            if error.errno not in NO_FLOCK:
                raise
            has_flock = False
        if not _is_file(self.path, descriptor):  # its holder has just removed it
            return {}
        known = _read(descriptor)
        if not known or (has_flock and known.get("boot") == self._ours["boot"]):
            return None
        if known.get("boot") == self._ours["boot"]:
            return known if _is_alive(known) else None
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
        """Whether the holder has been told to stop, or is what this batch job was before the batch system started it again."""
        again = (
            holder.get("job") is not None
            and holder.get("job") == self._ours["job"]
            and holder.get("start", 0) < self._ours["start"]
        )
        return bool(holder.get("ending")) or again

    def _refusal(self, holder):
        if not holder:
            who = "Another run"
        else:
            here = holder.get("boot") == self._ours["boot"] and holder.get("pid") == os.getpid()
            process = (
                "this very process"
                if here
                else f"process {holder.get('pid')} on {holder.get('host')}"
            )
            job = f", batch job {holder['job']}" if holder.get("job") else ""
            who = f"Another run ({process}{job}, since {holder.get('since')})"
        return (
            f"{who} is writing in {self.folder}. Two runs in one directory would overwrite each other's checkpoints. "
            "Wait until it has ended, or end it; to train beside it, choose another directory."
        )

    def _write(self, descriptor, record):
        """In one piece over what stood there; on a full disk the lock itself holds all the same, only nobody can read whose it is."""
        with contextlib.suppress(OSError):
            content = json.dumps(record).encode()
            os.pwrite(descriptor, content, 0)
            os.ftruncate(descriptor, len(content))
            os.fsync(descriptor)

    def say_ending(self):
        """From now on, who waits for this lock may expect it soon."""
        with self._guard:
            if self._descriptor is not None and not self._ours.get("ending"):
                self._ours["ending"] = True
                self._write(self._descriptor, self._ours)

    def beat(self):
        """A sign of life; it needs no room on the disk."""
        with self._guard, contextlib.suppress(OSError):
            if self._descriptor is not None:
                os.utime(self._descriptor)

    def renew(self):
        """Hold the lock of the folder that lies at this path now, after the one before was removed."""
        self._close()
        self._acquire()

    def release(self):
        self._stop.set()
        self._close()

    def _close(self):
        with self._guard:
            descriptor, self._descriptor = self._descriptor, None
            if descriptor is None:
                return
            with contextlib.suppress(OSError):  # the folder may be gone
                if _is_file(self.path, descriptor):
                    self.path.unlink()
            os.close(descriptor)

    def __del__(self):
        if self._descriptor is not None:
            self.release()

    def forget(self):
        """In a child that was forked: close the copy. The parent's lock stays."""
        self._guard, descriptor = threading.Lock(), self._descriptor
        self._descriptor = None
        if descriptor is not None:
            os.close(descriptor)


def _this_process():
    job = os.environ.get("SLURM_JOB_ID") or os.environ.get("PBS_JOBID")
    start = os.environ.get("SLURM_RESTART_COUNT", "0")
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "began": psutil.Process().create_time(),
        "boot": _boot(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        "job": job,
        "start": int(start) if start.isdigit() else 0,
    }


def _boot():
    """What tells this running system from every other one."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return f"{socket.gethostname()} {psutil.boot_time()}"


def _is_alive(holder):
    try:
        return abs(psutil.Process(holder["pid"]).create_time() - holder["began"]) < 1
    except (psutil.Error, KeyError, TypeError, ValueError):
        return False


def _is_file(path, descriptor):
    try:
        there, ours = os.stat(path), os.fstat(descriptor)
    except FileNotFoundError:
        return False
    return (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)


def _read(descriptor):
    """What the holder has written (dict), None if that is nothing, or no record of a holder."""
    try:
        record = json.loads(os.pread(descriptor, 4096, 0))
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None


def _keep_beating(reference, stop):
    while not stop.wait(BEAT):
        if (lock := reference()) is None:
            return
        lock.beat()
        del lock


def _after_fork_in_child():
    for lock in list(_held):
        lock.forget()
    _held.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
