"""The fork server: a process that has torch imported, and forks ranks' supervisors.

There is one for the workers of a local cluster together, and elsewhere one for each worker. It
listens at a socket in a folder that only its user may enter, and forks a supervisor for each
connection (`supervisor`). Promises: it ends when its owner ends, however that ended; it kills
what a supervisor that was killed has left behind. Relies on running Python in one thread:
others would not survive a fork, and the kernel takes the end of the thread that forked a process
for the end of its parent.
"""

import contextlib
import gc
import importlib
import json
import multiprocessing
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Iterable
from multiprocessing.connection import Connection

from dask_ranks.worker import supervisor

BACKLOG = 1024  # workers that may connect while torch is being imported
LONGEST_FOLDER = 70  # characters, for temporary files: a socket's path below it has 108 at most

# Dask's nanny sets it for its workers. A malloc that returns every 64 KB to the system makes each
# training step fault its memory in again.
MALLOC_TRIM = "MALLOC_TRIM_THRESHOLD_"

NEEDED = (
    "torch",
    "torch.distributed",
    "torch._dynamo",  # by the first DistributedDataParallel
    "torch.nn.parallel",
    "torch.utils.serialization",  # by torch.save, of a result: a script may change its root
    "dask_ranks.rank.process",
    "dask_ranks.rank.life",
    "ddp_common.sampling",
)
PROGRAM = """
import json, sys
path, *descriptors, folder = json.loads(sys.argv[1])
sys.argv[:] = ["ddp-fork-server"]
sys.path[:] = path
from dask_ranks.worker.fork_server import main
main(*descriptors, folder)
"""


class ForkServer:
    """The owner's handle: starts the process, and ends it. `path` is that of its socket."""

    def __init__(self, environment: dict[str, str]):
        """Start it; `environment` is that of the workers. They may connect at once."""
        environment = {**environment}
        environment.pop(MALLOC_TRIM, None)
        parent_folder = "/tmp" if len(tempfile.gettempdir()) > LONGEST_FOLDER else None
        self._folder = tempfile.mkdtemp(prefix="ddp-", dir=parent_folder)
        self.path = os.path.join(self._folder, "fork-server")
        # Nothing is sent through it. Its end says that the owner has ended, or closes this.
        self._lifeline, theirs = socket.socketpair()
        with socket.socket(socket.AF_UNIX) as listener, theirs:
            listener.bind(self.path)
            os.chmod(self.path, 0o600)
            listener.listen(BACKLOG)
            descriptors = (listener.fileno(), theirs.fileno())
            arguments = json.dumps([texts_of(sys.path), *descriptors, self._folder])
            self._process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, arguments],
                env=environment,
                stdin=subprocess.DEVNULL,
                pass_fds=descriptors,
                start_new_session=True,  # a terminal's Ctrl-C is not for it
            )
        self.pid = self._process.pid

    def close(self) -> None:
        """End it; its supervisors end, too, with all that is in them."""
        # A process that the owner has forked may hold a copy, which `close` would leave open
        with contextlib.suppress(OSError):  # the fork server has ended before
            self._lifeline.shutdown(socket.SHUT_RDWR)
        self._lifeline.close()
        self._process.kill()  # it may still import torch
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


def texts_of(path: list) -> list[str]:
    """`sys.path` without what Python passes over, such as a `pathlib.Path`."""
    return [entry for entry in path if isinstance(entry, str)]


def import_ahead(names: Iterable[str]) -> None:
    """Import modules ahead. An import that fails here fails again in the rank, with its message.

    No garbage is collected meanwhile: imports leave hardly any, and looking for it takes a quarter
    of their time. What they have made is then left out of all later collections (`gc.freeze`): a
    forked process does not go through it, and goes on sharing its memory.
    """
    gc.disable()
    for name in names:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]  # a rank has its own
    gc.freeze()
    gc.enable()


def main(listener_fd: int, lifeline_fd: int, folder: str) -> None:
    """Import torch, then fork a supervisor for every connection, until the owner has ended."""
    # Signals that every process of a session or a job gets: the fork server and the supervisors
    # ignore them, and end last. Ranks have handlers of their own.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    # multiprocessing makes a folder for sockets in each rank, and a killed rank cannot remove it.
    # Here it goes with the fork server.
    multiprocessing.current_process()._config["tempdir"] = folder  # type: ignore[attr-defined]
    # Read when torch is imported: it would print a stack of C++ for each connection that ends
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # torch makes it, by default in /tmp, where anybody may have taken its name
    home = next(each for each in (os.path.expanduser("~"), folder) if os.access(each, os.W_OK))
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{home}/.cache/torchinductor")
    import_ahead(NEEDED)
    supervisor.subreaper()
    known = {*supervisor.children()}  # of imports, and the supervisors
    # After the imports, which may wait for children of theirs
    woken = supervisor.wake_when_a_child_ends()
    listener = socket.socket(fileno=listener_fd)
    lifeline = socket.socket(fileno=lifeline_fd)
    while True:
        ready, _, _ = select.select([listener, lifeline, woken], [], [])
        if lifeline in ready:
            break
        if woken in ready:
            woken.recv(2**16)
            known -= {pid for pid, _ in supervisor.reap()}
            # By a supervisor that was killed
            for left_behind in {*supervisor.children()} - known:
                supervisor.kill(left_behind)
        if listener not in ready:
            continue
        accepted, _ = listener.accept()
        with Connection(accepted.detach()) as worker:
            try:
                pid = os.fork()
            except OSError as error:
                supervisor.tell(worker, error)
                continue
            if pid == 0:
                listener.close()
                woken.close()
                supervisor.supervise(worker, lifeline)
            known.add(pid)
    shutil.rmtree(folder, ignore_errors=True)
