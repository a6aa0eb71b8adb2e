"""Ranks are forked from a process that has torch imported, and ended with all they have started.

That process, the fork server, imports torch once, for the workers of a local cluster together and
elsewhere for each worker. It listens at a socket in a folder that only its user may enter
(`ForkServer`). A worker connects to it before its first rank
(`connect`), and the server forks a nursery for that connection. The nursery forks one rank after
the other (`Nursery.start`), and at the end of each it kills its children until there are none
(`Nursery.end`). It is a child subreaper (Linux, prctl(2)): whatever a rank has started and left
behind becomes the nursery's child; and the fork server's, which kills it, if the nursery itself
was killed.

Promises: a nursery ends everything and itself when its worker or the owner of the fork server
ends, however that ended; a rank, and all that it has started, ends with its nursery. The rank has
the environment, the folder, the cores and the `sys.path` that its worker has at that moment. Where
nursery and fork server have ended, the worker starts a fork server of its own.

What a worker and a nursery tell each other, in this order (`Nursery` sends and receives it):

    nursery: None, it is there; or the OSError for which it could not be forked

and for each rank:

    worker:  surroundings, module, function, arguments, names of descriptors; then these
    nursery: the pid of the rank; or the OSError for which that could not be forked
    nursery: the exit code, when the rank has ended
    worker:  "end", at any time
    nursery: the numbers of processes that are still there although they were killed

Relies on the fork server and the nurseries to run Python in one thread each: others would not
survive a fork, and the kernel takes the end of the thread that forked a process for the end of its
parent.
Without prctl (macOS) the rank's process group is ended, and what has left that group stays.
"""

import atexit
import contextlib
import ctypes
import errno
import gc
import importlib
import multiprocessing.util
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from multiprocessing.connection import Client, Connection, wait
from pathlib import Path
from typing import Any, NoReturn

PR_SET_PDEATHSIG = 1  # options of prctl(2)
PR_SET_CHILD_SUBREAPER = 36

BACKLOG = 1024  # workers that may connect while torch is being imported
LONGEST_FOLDER = 70  # characters, for temporary files: a socket's path below it has 108 at most
POLL = 0.03  # seconds between looks at whether a rank is still wanted
END_TIMEOUT = 5.0  # seconds that processes may take to be gone once they are killed

# Dask's nanny sets it for its workers. A malloc that returns every 64 KB to the system makes each
# training step fault its memory in again.
MALLOC_TRIM = "MALLOC_TRIM_THRESHOLD_"

NEEDED = (
    "torch",
    "torch.distributed",
    "torch._dynamo",  # by the first DistributedDataParallel
    "torch.nn.parallel",
    "ddp_common.ranks.process",
    "ddp_common.ranks.life",
    "ddp_common.ranks.sampling",
)


# In the process that owns a fork server: a worker, or the client of a local cluster


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
            program = (
                f"import sys; sys.path[:] = {sys.path!r}; "
                f"from ddp_common.worker.nursery import main; main{(*descriptors, self._folder)!r}"
            )
            self._process = subprocess.Popen(
                [sys.executable, "-c", program],
                env=environment,
                stdin=subprocess.DEVNULL,
                pass_fds=descriptors,
                start_new_session=True,  # a terminal's Ctrl-C is not for it
            )
        self.pid = self._process.pid

    def close(self) -> None:
        """End it; its nurseries end, too, with all that is in them."""
        # A process that the owner has forked may hold a copy, which `close` would leave open
        with contextlib.suppress(OSError):  # the fork server has ended before
            self._lifeline.shutdown(socket.SHUT_RDWR)
        self._lifeline.close()
        self._process.kill()  # it may still import torch
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


# In a worker. It takes the shared fork server; where that has ended, one of its own.

_shared_path: str | None = None  # of the fork server of a local cluster
_own: ForkServer | None = None  # this worker's
_idle: "Nursery | None" = None  # that of the last rank, for the next one
_choosing = threading.Lock()


def prepare(shared_path: str | None = None) -> None:
    """Use the fork server whose socket is at `shared_path`; None: have one of our own."""
    global _shared_path, _own
    with _choosing:
        if shared_path is not None:
            _shared_path = shared_path
        elif _own is None:
            _own = ForkServer(dict(os.environ))


def close() -> None:
    """End this worker's nursery, and its own fork server, if there is one."""
    global _own, _idle
    with _choosing:
        if _idle is not None:
            _idle.connection.close()
            _idle = None
        if _own is not None:
            _own.close()
            _own = None


def connect(is_wanted: Callable[[], bool] = lambda: True) -> "Nursery | None":
    """The nursery of the last rank, or a new one; waits while the fork server imports torch.

    None if it is not wanted any more before it is there. Raises OSError if no process can be
    forked, and RuntimeError if the fork server ends meanwhile.
    """
    global _idle
    with _choosing:
        idle, _idle = _idle, None
    if idle is not None:
        if not idle.connection.poll():
            return idle
        idle.connection.close()  # it was killed meanwhile
    connection = _reach_fork_server()
    while not connection.poll(POLL):
        if not is_wanted():
            connection.close()
            return None
    try:
        error = connection.recv()
    except (EOFError, ConnectionError):  # the fork server has ended
        error = RuntimeError(
            "the process that imports torch, and from which ranks are forked, has ended. Was it "
            "killed, or was memory short? The next launch starts another."
        )
    if error is None:
        return Nursery(connection)
    connection.close()
    raise error


def _reach_fork_server() -> Connection:
    """A connection to the fork server; where that has ended, another is started."""
    global _own
    with _choosing:
        for path in (_shared_path, _own.path if _own is not None else None):
            if path is not None:
                with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
                    return Client(path, "AF_UNIX")
        if _own is not None:
            _own.close()
        _own = ForkServer(dict(os.environ))
        return Client(_own.path, "AF_UNIX")


class Nursery:
    """A worker's connection to a nursery, and the state of the process inside."""

    def __init__(self, connection: Connection):
        self.connection = connection  # when it is readable, call `take_note`
        self._no_process()

    def _no_process(self) -> None:
        self.pid = 0  # of the process that was started
        self.has_ended = False  # that process
        self.exitcode: int | None = None  # minus a signal's number; None while it is not known

    def start(
        self, module: str, function: str, *arguments: Any, descriptors: dict[str, int]
    ) -> None:
        """Fork a process that calls `function` of `module`, and then ends.

        The function gets `arguments` and, by their names, the file descriptors. Raises OSError if
        no process can be forked or this folder is gone, and EOFError or ConnectionError if the
        nursery has ended.
        """
        self._no_process()
        environment = {**os.environ}
        environment.pop(MALLOC_TRIM, None)  # for programs that the rank starts; its own is set
        cores = os.sched_getaffinity(0) if sys.platform == "linux" else None
        surroundings = environment, os.getcwd(), cores, sys.path, sys.argv
        self.connection.send((surroundings, module, function, arguments, [*descriptors]))
        with contextlib.suppress(ConnectionError), _socket_of(self.connection) as channel:
            socket.send_fds(channel, [b"d"], [*descriptors.values()])
        answer = self.connection.recv()  # also where it did not take them: it says why, or is gone
        if isinstance(answer, OSError):
            raise answer
        self.pid = answer

    def take_note(self) -> None:
        """Receive the exit code, or learn that the nursery has ended, and so the process."""
        with contextlib.suppress(EOFError, OSError):
            self.exitcode = self.connection.recv()
        self.has_ended = True

    def end(self) -> list[int]:
        """Have the process gone, and all that it has started.

        Returns the numbers of processes that are not gone although they were killed.
        """
        global _idle
        left = [self.pid]
        try:
            self.connection.send("end")
            while self.connection.poll(2 * END_TIMEOUT):
                answer = self.connection.recv()
                if isinstance(answer, list):
                    left = answer
                    break
        except (EOFError, OSError):  # it has ended, and all that was in it
            self.connection.close()
            return []
        if left:
            self.connection.close()
        else:
            with _choosing:
                _idle = self
        return left


# In the fork server


def main(listener_fd: int, lifeline_fd: int, folder: str) -> None:
    """Import torch, then fork a nursery for every connection, until the owner has ended."""
    # Signals that every process of a session or a job gets: the fork server and the nurseries
    # ignore them, and end last. Ranks have handlers of their own.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # multiprocessing makes a folder for sockets in each rank, and a killed rank cannot remove it.
    # Here it goes with the fork server.
    multiprocessing.current_process()._config["tempdir"] = folder  # type: ignore[attr-defined]
    # Read when torch is imported: it would print a stack of C++ for each connection that ends
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    import_ahead(NEEDED)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    children = {*_children(None)}  # of imports, and the nurseries
    # After the imports, which may wait for children of theirs
    wakeup_reader, wakeup_writer = _wake_when_a_child_ends()
    listener = socket.socket(fileno=listener_fd)
    lifeline = socket.socket(fileno=lifeline_fd)
    while True:
        ready, _, _ = select.select([listener, lifeline, wakeup_reader], [], [])
        if lifeline in ready:
            break
        if wakeup_reader in ready:
            wakeup_reader.recv(2**16)
            children -= {pid for pid, _ in _reap()}
            for left_behind in {*_children(None)} - children:  # by a nursery that was killed
                _kill(os.kill, left_behind)
        if listener not in ready:
            continue
        accepted, _ = listener.accept()
        with Connection(accepted.detach()) as worker:
            try:
                pid = os.fork()
            except OSError as error:
                _tell(worker, error)
                continue
            if pid == 0:
                for not_for_nurseries in (listener, wakeup_reader, wakeup_writer):
                    not_for_nurseries.close()
                _be_nursery(worker, lifeline)
            children.add(pid)
    shutil.rmtree(folder, ignore_errors=True)


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
    gc.freeze()
    gc.enable()


# In a nursery


def _be_nursery(worker: Connection, lifeline: socket.socket) -> NoReturn:
    rank_pid = None
    try:
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        # In a rank SIGTERM waits for its handler, SIGUSR1 for its thread that answers.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1})
        wakeup_reader, wakeup_writer = _wake_when_a_child_ends()
        not_for_ranks = (worker, lifeline, wakeup_reader, wakeup_writer)
        worker.send(None)  # it is there
        while True:
            ready = wait([worker, lifeline, wakeup_reader])
            if lifeline in ready:  # the owner of the fork server has ended
                break
            if wakeup_reader in ready:
                wakeup_reader.recv(2**16)
                for pid, code in _reap():
                    if pid == rank_pid:
                        worker.send(code)
            if worker not in ready:
                continue
            request = worker.recv()
            if request == "end":
                worker.send(end_children(rank_pid))
                rank_pid = None
            else:
                rank_pid = _fork_rank(worker, not_for_ranks, *request)
    except (EOFError, ConnectionError):  # the worker has ended
        pass
    except OSError as error:  # no process can be forked, or no file opened
        _tell(worker, error)
    except BaseException:
        traceback.print_exc()
    finally:
        end_children(rank_pid)
        os._exit(0)


def _fork_rank(
    worker: Connection,
    not_for_ranks: Iterable[Connection | socket.socket],
    surroundings: tuple,
    module: str,
    function: str,
    arguments: tuple,
    names: list[str],
) -> int:
    """Fork a rank; returns the number of its process, and tells it the worker."""
    with _socket_of(worker) as channel:
        _, received, *_ = socket.recv_fds(channel, 1, len(names))
    if len(received) < len(names):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    descriptors = dict(zip(names, received))
    for descriptor in received:
        os.set_inheritable(descriptor, False)  # programs that a rank starts do not get them
    nursery = os.getpid()
    rank_pid = os.fork()
    if rank_pid == 0:
        try:
            for inherited in not_for_ranks:
                inherited.close()
            _be_rank(nursery, surroundings, module, function, arguments, descriptors)
        finally:  # whatever happens, the rank never goes on as its nursery
            os._exit(1)
    for descriptor in descriptors.values():
        os.close(descriptor)
    worker.send(rank_pid)
    return rank_pid


def _socket_of(connection: Connection) -> socket.socket:
    """A connection's socket, over which descriptors travel."""
    return socket.fromfd(connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM)


def _wake_when_a_child_ends() -> tuple[socket.socket, socket.socket]:
    """Two ends of a connection: the first becomes readable when a child has ended."""
    reader, writer = socket.socketpair()
    for end in (reader, writer):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(writer.fileno())
    return reader, writer


def _reap() -> list[tuple[int, int]]:
    """Take note of children that have ended, adopted ones too: (number, exit code) of each."""
    ended = []
    with contextlib.suppress(ChildProcessError):  # there are none any more
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:  # those that are left live
                break
            ended.append((pid, os.waitstatus_to_exitcode(status)))
    return ended


def end_children(group: int | None = None) -> list[int]:
    """Kill this process's children until there are none; a subreaper kills all its descendants.

    The children of one that has ended become ours, and come next. `group` is a child that leads a
    process group (a rank does from `process.main` on), which is killed all at once. Returns the
    numbers of processes that are still there after `END_TIMEOUT`.
    """
    deadline = time.monotonic() + END_TIMEOUT
    pause = 0.001
    while True:
        if group is not None:
            _kill(os.killpg, group)
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:  # there are none any more
            return []
        if pid != 0:
            continue
        children = _children(group)
        for child in children:
            _kill(os.kill, child)
        if time.monotonic() > deadline:
            return children
        time.sleep(pause)
        pause = min(2 * pause, 0.02)


def _children(group: int | None) -> list[int]:
    """This process's children; it has one thread. Where the kernel does not say, only `group`."""
    pid = os.getpid()
    try:
        listed = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return [group] if group is not None else []
    return [int(each) for each in listed]


def _kill(kill: Callable[[int, int], None], pid: int) -> None:
    # It has ended; or it runs as another user (sudo).
    with contextlib.suppress(ProcessLookupError, PermissionError):
        kill(pid, signal.SIGKILL)


def _tell(worker: Connection, message: Any) -> None:
    with contextlib.suppress(OSError):  # the worker has ended
        worker.send(message)


# In the rank's process


def _be_rank(
    nursery: int,
    surroundings: tuple,
    module: str,
    function: str,
    arguments: tuple,
    descriptors: dict[str, int],
) -> NoReturn:
    code = 1
    try:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # it ends with its nursery, however that ended
        if os.getppid() != nursery:  # that has ended before
            os._exit(1)
        # What the fork server has imported needs no clean-up here. multiprocessing does: it ends
        # the workers of a loader.
        atexit._clear()
        atexit.register(multiprocessing.util._exit_function)  # type: ignore[attr-defined]
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        environment, folder, cores, sys.path[:], sys.argv[:] = surroundings
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        if cores is not None:
            os.sched_setaffinity(0, cores)
        getattr(importlib.import_module(module), function)(*arguments, **descriptors)
        code = 0
    except SystemExit as error:
        if error.code is None:
            code = 0
        elif isinstance(error.code, int):
            code = error.code & 0xFF  # as the system does with the exit code of any process
    except BaseException:
        traceback.print_exc()
    finally:
        _leave(code)


def _leave(code: int) -> NoReturn:
    """End as a process of multiprocessing does: its threads first, then its exit functions."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # what Python calls at its own end
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # the rank has closed it
                stream.flush()
    finally:
        os._exit(code)


def prctl(option: int, value: int) -> None:
    """Set an option of prctl(2), where the kernel is Linux and does not refuse."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
