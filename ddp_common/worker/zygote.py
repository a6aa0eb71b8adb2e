"""One process for a host that has torch imported: the workers' forkservers are forked from it.

To import torch takes two seconds of a core. With a zygote (Android's word for such a process) a
host pays them once, while Dask's workers are still starting, and not once for each worker. The
client of a local cluster starts it (`Zygote`). A worker connects to its socket and hands over its
own environment, its output and the two descriptors that a forkserver needs (`request`). The answer
is the number of the guard that has been forked for it, with the forkserver below (`guard`).

Promises: the zygote ends when its client closes it, or dies; a forkserver ends with its worker,
as it does without a zygote. Needs Linux 5.3 (pidfd_open(2)). Where it is not there, or was made
for another environment, workers start forkservers of their own.
"""

import fcntl
import hashlib
import json
import multiprocessing.forkserver
import os
import secrets
import signal
import socket
import struct
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any, NamedTuple

from ddp_common.ranks.parent import PR_SET_CHILD_SUBREAPER, prctl
from ddp_common.worker.guard import has_pidfds, leave_a_guard
from ddp_common.worker.imports import import_what_ranks_need

LENGTH = struct.Struct("!q")  # of a request, before it
CREDENTIALS = struct.Struct("3i")  # process, user and group of a socket's other end (unix(7))
REQUEST_TIMEOUT = 10.0  # seconds that a worker may take over its request
LONGEST_REQUEST = 2**24  # bytes; an environment has 2**21 at most (execve(2))
BACKLOG = 1024  # workers that may ask while torch is being imported

# Libraries read these when they are loaded: a zygote with other values is of no use to a worker.
READ_AT_IMPORT = ("CUDA", "GOMP", "KMP", "LD_", "MKL", "OMP", "OPENBLAS", "PYTHON", "TORCH")


class Address(NamedTuple):
    """Where workers find the zygote, and for what environment it was made."""

    path: str  # of a socket, in a folder that only its user can enter
    fingerprint: str


def fingerprint(environment: dict[str, str]) -> str:
    """A digest of those variables that must be the same in the zygote and in a worker."""
    read = {name: value for name, value in environment.items() if name.startswith(READ_AT_IMPORT)}
    return hashlib.sha256(json.dumps(read, sort_keys=True).encode()).hexdigest()


# On the client


class Zygote:
    """The client's handle: starts the process, and ends it."""

    def __init__(self, folder: str, environment: dict[str, str]):
        """Start it. `folder` must be private to the user, `environment` be that of the workers."""
        path = Path(folder) / f"zygote-{secrets.token_hex(8)}"
        self.address = Address(str(path), fingerprint(environment))
        self._lifeline, theirs = socket.socketpair()
        with socket.socket(socket.AF_UNIX) as listener, theirs:
            listener.bind(self.address.path)
            listener.listen(BACKLOG)
            descriptors = (listener.fileno(), theirs.fileno())
            private: Any = subprocess
            flags = private._args_from_interpreter_flags()  # such as -B; multiprocessing does so
            program = _program(*descriptors, self.address.path)
            self._process = subprocess.Popen(
                [sys.executable, *flags, "-c", program],
                env=environment,
                stdin=subprocess.DEVNULL,
                pass_fds=descriptors,
                start_new_session=True,  # a terminal's Ctrl-C is not for it
            )

    def close(self) -> None:
        """End it; what was forked from it stays, and ends with its worker."""
        self._process.kill()
        self._process.wait()
        self._lifeline.close()
        Path(self.address.path).unlink(missing_ok=True)


def _program(*arguments):
    return (
        f"import sys; sys.path[:] = {sys.path!r}; "
        f"from ddp_common.worker.zygote import main; main{arguments!r}"
    )


# In the zygote


def main(listener_fd: int, lifeline_fd: int, path: str) -> None:
    """Import torch, then fork a guard and a forkserver for every worker that asks."""
    _end_with_the_client(lifeline_fd, path)
    if not _can_guard():
        return
    import_what_ranks_need()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # guards that have ended are no zombies
    with socket.socket(fileno=listener_fd) as listener:
        while True:
            connection, _ = listener.accept()
            with connection:
                _serve(connection, others=(listener_fd, lifeline_fd))


def _end_with_the_client(lifeline_fd: int, path: str) -> None:
    """Have the kernel send SIGIO when the client's end of the lifeline is closed."""

    def end(*_):
        Path(path).unlink(missing_ok=True)
        os._exit(0)

    signal.signal(signal.SIGIO, end)
    fcntl.fcntl(lifeline_fd, fcntl.F_SETOWN, os.getpid())
    flags = fcntl.fcntl(lifeline_fd, fcntl.F_GETFL)
    fcntl.fcntl(lifeline_fd, fcntl.F_SETFL, flags | os.O_ASYNC)
    with socket.socket(fileno=os.dup(lifeline_fd)) as lifeline:
        lifeline.setblocking(False)
        try:
            lifeline.recv(1)
        except BlockingIOError:
            return
    end()  # it was closed before


def _can_guard() -> bool:
    """Whether this system has what a guard that is no child of its worker needs."""
    if not has_pidfds():
        return False
    return prctl(PR_SET_CHILD_SUBREAPER, 1) and prctl(PR_SET_CHILD_SUBREAPER, 0)


def _serve(connection: socket.socket, others: tuple[int, ...]) -> None:
    """Fork for one worker."""
    descriptors: list[int] = []
    try:
        connection.settimeout(REQUEST_TIMEOUT)
        announced, descriptors, _, _ = socket.recv_fds(connection, LENGTH.size, 4)
        (length,) = LENGTH.unpack(announced)
        if not 0 < length <= LONGEST_REQUEST or len(descriptors) != 4:
            return
        with connection.makefile("rb") as stream:
            content = json.loads(stream.read(length))
        if os.fork() == 0:
            _in_child(connection, content, descriptors, others)
    except (OSError, ValueError, struct.error):
        return  # the worker has ended before its request was whole
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _in_child(connection, content, descriptors, others):
    """What the worker asked for; never returns."""
    try:
        for other in others:
            os.close(other)
        _be_a_forkserver(connection, content, *descriptors)
    except SystemExit:  # so multiprocessing's forkserver leaves, once the worker has gone
        os._exit(0)
    except (BrokenPipeError, ConnectionResetError, ProcessLookupError):
        os._exit(1)  # the worker has ended meanwhile
    except BaseException:  # the worker finds that this process has ended, and does without
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(1)


def _be_a_forkserver(
    connection: socket.socket,
    content: dict,
    listener_fd: int,
    alive_fd: int,
    output_fd: int,
    error_fd: int,
) -> None:
    """As the worker's own forkserver would be: its environment, folder, cores and output."""
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    worker, _, _ = CREDENTIALS.unpack(credentials)
    pidfd = os.pidfd_open(worker)
    connection.sendall(LENGTH.pack(os.getpid()))  # it fails if the worker has ended meanwhile
    connection.close()
    for descriptor, stream in ((output_fd, 1), (error_fd, 2)):
        os.dup2(descriptor, stream)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(content["environment"])
    os.chdir(content["folder"])
    os.sched_setaffinity(0, content["cores"])
    leave_a_guard(pidfd)
    os.close(pidfd)
    multiprocessing.forkserver.main(listener_fd, alive_fd, preload=[])


# In a worker


def request(address: Address, listener: socket.socket, alive_fd: int) -> socket.socket:
    """Ask for a forkserver; returns the connection on which `guard` will find the answer.

    `listener` and `alive_fd` are what `multiprocessing.forkserver.main` takes. Raises OSError if
    there is no zygote.
    """
    content = {
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "cores": sorted(os.sched_getaffinity(0)),
    }
    encoded = json.dumps(content).encode()
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(address.path)
        descriptors = [listener.fileno(), alive_fd, 1, 2]
        socket.send_fds(connection, [LENGTH.pack(len(encoded))], descriptors)
        connection.sendall(encoded)
    except BaseException:
        connection.close()
        raise
    return connection


def guard(connection: socket.socket) -> int | None:
    """The number of the guard that was forked on `request`; None if the zygote has ended.

    Waits for it while the zygote imports torch.
    """
    try:
        answer = connection.recv(LENGTH.size, socket.MSG_WAITALL)
    except OSError:
        answer = b""
    return LENGTH.unpack(answer)[0] if len(answer) == LENGTH.size else None
