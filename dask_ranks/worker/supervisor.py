"""A supervisor: the process that forks ranks, and ends each with all that it has started.

A worker connects to the fork server, which forks a supervisor for that connection (`Supervisor` is
the worker's end of it); it has one rank after the other. It is a child subreaper (Linux,
prctl(2)): whatever the rank has started and left behind becomes its child, and when the worker
says END, it kills its children until there are none. What is said, in this order, from the second
line on for each rank:

    supervisor: None, it is there; or, by the fork server, the OSError for which it is not
    worker:     a `Request`, then the descriptors that it names
    supervisor: the pid of the rank; or the OSError for which that could not be forked
    supervisor: the exit code, when the rank has ended
    worker:     END, at any time
    supervisor: the numbers of processes that are still there although they were killed

Promises: a supervisor ends everything and itself when its worker or the owner of the fork server
ends, however that ended; a fork server that ends takes none with it. A rank ends with its
supervisor, and so does all that the rank has started, as long as the fork server lives. The rank
has the environment, the folder, the cores and the `sys.path` that its worker has at that moment.
"""

import atexit
import contextlib
import ctypes
import errno
import gc
import importlib
import io
import logging
import multiprocessing.util
import os
import signal
import socket
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from dask_ranks.messages import ASK_WHERE

PR_SET_PDEATHSIG = 1  # options of prctl(2)
PR_SET_CHILD_SUBREAPER = 36

POLL = 0.03  # seconds between looks at whether a rank is still wanted
END = "end"
BUFFERED = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)
END_TIMEOUT = 5.0  # seconds that processes may take to be gone once they are killed


@dataclass
class Request:
    """The process that is to be forked: it calls `function` of `module`, and ends.

    The function gets `arguments` and, by these names, the descriptors.
    """

    module: str
    function: str
    arguments: tuple
    descriptors: list[str]
    environment: dict[str, str]
    folder: str
    cores: set[int]
    path: list[str]  # `sys.path`


# In a worker


class Supervisor:
    """A worker's end of the connection to a supervisor that has a rank."""

    def __init__(self, connection: Connection, pid: int):
        self.connection = connection  # readable: `take_note`; closed: the supervisor has ended
        self.pid = pid  # of the rank's process
        self.exitcode: int | None = None  # minus a signal's number; None while it is not known

    def take_note(self) -> None:
        """Receive the exit code, or learn that the supervisor has ended, and so the process."""
        try:
            self.exitcode = _number(self.connection.recv())
        except (EOFError, OSError):
            self.connection.close()

    def end(self) -> list[int]:
        """Have the process gone, and all that it has started; the supervisor may have another.

        Returns the numbers of processes that are not gone although they were killed. Then the
        connection is closed, and the supervisor ends.
        """
        if self.connection.closed:
            return []
        left = [self.pid]
        try:
            self.connection.send(END)
            while self.connection.poll(2 * END_TIMEOUT):
                answer = self.connection.recv()
                if isinstance(answer, list):
                    left = answer
                    break
        except (EOFError, OSError):
            left = []
            self.connection.close()
        if left:
            self.connection.close()
        return left


def wait_until_forked(connection: Connection, is_wanted: Callable[[], bool]) -> bool:
    """Wait for the supervisor of a new connection to the fork server, which may import torch.

    Returns whether it is there: it is not where no rank is wanted any more. Raises as `start`.
    """
    while not connection.poll(POLL):
        if not is_wanted():
            connection.close()
            return False
    _number(connection.recv())
    return True


def start(connection: Connection, request: Request, descriptors: list[int]) -> Supervisor:
    """Have a process forked by the supervisor at the other end of a connection, which waits.

    Raises OSError if no process can be forked, and EOFError or ConnectionError if the supervisor
    ends meanwhile, or has ended.
    """
    with contextlib.ExitStack() as until_it_is_there:
        until_it_is_there.enter_context(connection)
        connection.send(request)
        with contextlib.suppress(ConnectionError), _socket_of(connection) as channel:
            socket.send_fds(channel, [b"d"], descriptors)
        # also where it did not take them: it says why, or is gone
        pid = _number(connection.recv())
        until_it_is_there.pop_all()
    return Supervisor(connection, pid)


def _number(answer: Any) -> int:
    """The number that a supervisor has said, of a process or of its exit code.

    Raises the OSError that it has said, and EOFError where it has said what is left: it ends.
    """
    if isinstance(answer, OSError):
        raise answer
    if isinstance(answer, list):
        raise EOFError("the supervisor has ended")
    return answer


def _socket_of(connection: Connection) -> socket.socket:
    """A connection's socket, over which descriptors travel."""
    return socket.fromfd(connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM)


# In the supervisor


def supervise(worker: Connection, lifeline: socket.socket) -> NoReturn:
    """Have one rank after the other until the worker or the owner of the fork server has ended."""
    try:
        subreaper()
        # In a rank SIGTERM waits for its handler, a question for its thread that answers.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, ASK_WHERE})
        woken = wake_when_a_child_ends()
        worker.send(None)
        while lifeline not in wait([worker, lifeline]):
            rank_pid = _fork_rank(worker, lifeline, woken)
            worker.send(rank_pid)
            while not {worker, lifeline} & {*wait([worker, lifeline, woken])}:
                woken.recv(2**16)
                for pid, code in reap():
                    if pid == rank_pid:
                        worker.send(code)
            if not worker.poll():
                break
            worker.recv()
            worker.send(end_children())
    except (EOFError, ConnectionError):  # the worker has ended
        pass
    except OSError as error:  # no process can be forked, or no file opened
        tell(worker, error)
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            lifeline.close()  # where no more files can be opened, one can be now
            tell(worker, end_children())
        finally:
            os._exit(0)


def _fork_rank(worker: Connection, *not_for_ranks: socket.socket) -> int:
    request = worker.recv()
    with _socket_of(worker) as channel:
        _, received, *_ = socket.recv_fds(channel, 1, len(request.descriptors))
    if len(received) < len(request.descriptors):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    for descriptor in received:
        os.set_inheritable(descriptor, False)  # programs that a rank starts do not get them
    supervisor = os.getpid()
    rank_pid = os.fork()
    if rank_pid == 0:
        try:
            worker.close()
            for inherited in not_for_ranks:
                inherited.close()
            _be_rank(supervisor, request, dict(zip(request.descriptors, received)))
        finally:  # whatever happens, the rank never goes on as its supervisor
            os._exit(1)
    for descriptor in received:
        os.close(descriptor)
    return rank_pid


def wake_when_a_child_ends() -> socket.socket:
    """A socket that becomes readable when a child has ended."""
    reader, writer = socket.socketpair()
    for end in (reader, writer):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    _close_wakeup(signal.set_wakeup_fd(writer.detach()))
    return reader


def _close_wakeup(descriptor: int) -> None:
    """Close the other end of what the process that forked this one is woken by."""
    if descriptor != -1:
        os.close(descriptor)


def reap() -> list[tuple[int, int]]:
    """Take note of children that have ended, adopted ones too: (number, exit code) of each."""
    ended = []
    with contextlib.suppress(ChildProcessError):  # there are none any more
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:  # those that are left live
                break
            ended.append((pid, os.waitstatus_to_exitcode(status)))
    return ended


def end_children() -> list[int]:
    """Kill this process's children until there are none; a subreaper kills all its descendants.

    The children of one that has ended become ours, and come next. Returns the numbers of processes
    that are still there after `END_TIMEOUT`.
    """
    deadline = time.monotonic() + END_TIMEOUT
    pause = 0.001
    while True:
        for child in children():
            kill(child)
        reap()
        left = children()
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(pause)
        pause = min(2 * pause, 0.02)


def children() -> list[int]:
    """This process's children, zombies among them; it has one thread."""
    pid = os.getpid()
    return [*map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]


def kill(pid: int) -> None:
    # It has ended; or it runs as another user (sudo).
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def tell(worker: Connection, message: Any) -> None:
    with contextlib.suppress(OSError):  # the worker has ended
        worker.send(message)


# In the rank's process


def _be_rank(supervisor: int, request: Request, descriptors: dict[str, int]) -> NoReturn:
    code = 1
    try:
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # it ends with its supervisor, however that ended
        if os.getppid() != supervisor:  # that has ended before
            os._exit(1)
        # What the fork server has imported needs no clean-up here. The program's will: `logging`
        # writes what it keeps, multiprocessing ends the workers of a loader.
        atexit._clear()
        atexit.register(logging.shutdown)
        atexit.register(multiprocessing.util._exit_function)  # type: ignore[attr-defined]
        weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]
        sys.modules["__main__"] = ModuleType("__main__")  # for what the client's program has there
        _close_wakeup(signal.set_wakeup_fd(-1))
        for number in (signal.SIGCHLD, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_DFL)
        sys.path[:] = request.path
        os.environ.clear()
        os.environ.update(request.environment)
        os.chdir(request.folder)
        os.sched_setaffinity(0, request.cores)
        sockets = multiprocessing.current_process()._config["tempdir"]  # type: ignore[attr-defined]
        os.makedirs(sockets, mode=0o700, exist_ok=True)  # something may have cleaned /tmp
        function = getattr(importlib.import_module(request.module), request.function)
        function(*request.arguments, **descriptors)
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
    """End as Python does: threads first, then exit functions, then what the program has left."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # what Python calls at its own end
        atexit._run_exitfuncs()
        _let_go()
    finally:
        os._exit(code)


def _let_go() -> None:
    """Finalize what the program's `__main__` has, and write what is in files that are open."""
    threading.excepthook = lambda _: None  # daemon threads go on without what they use
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):  # it may keep all names of its module
            signal.signal(number, signal.SIG_IGN)
    streams = sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    # They stay to the end: finalizers may write
    files = [each for each in gc.get_objects() if issubclass(type(each), BUFFERED)]
    for name in ("__main__", "__mp_main__"):
        sys.modules.pop(name, None)
    gc.collect(2 if gc.get_objects(generation=2) else 1)  # where all is young, 2 takes 1.3 ms more
    for each in (*files, *streams):
        with contextlib.suppress(Exception):  # it is closed, or its disk is full
            each.flush()


def subreaper() -> None:
    """From now on the descendants of this process whose parent ends become its children."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
