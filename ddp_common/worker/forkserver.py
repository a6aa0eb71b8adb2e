"""The process from which a worker forks its ranks.

It has torch imported, so that a rank starts in a fraction of a second. It is forked from the
host's zygote where there is one (`zygote`); else it is a process of its own, in which
`in_forkserver` runs first.
"""

import contextlib
import multiprocessing
import multiprocessing.forkserver
import os
import socket
import sys
import tempfile
import time
from multiprocessing import resource_tracker
from multiprocessing.connection import arbitrary_address  # type: ignore[attr-defined]
from multiprocessing.context import ForkServerContext
from multiprocessing.forkserver import ForkServer
from multiprocessing.process import BaseProcess
from typing import Any

from ddp_common.worker import zygote
from ddp_common.worker.descendants import END
from ddp_common.worker.guard import has_ended

PRELOAD = ["ddp_common.worker.in_forkserver"]  # which imports the rest
ENDING = 30.0  # seconds within which a guard notices that its forkserver has ended, and ends too
LONGEST_FOLDER = 70  # characters, for temporary files: a socket's path below it has 108 at most


def start_forkserver(address: zygote.Address | None = None) -> ForkServerContext:
    """Start the forkserver unless it runs already, of the zygote at `address` if that suits.

    Returns the context from which to make processes. Two things that the nanny gives a worker must
    not reach the ranks: a daemonic process may have no children, and a malloc that returns every
    64 KB to the system makes each training step fault its memory in again. The path of its socket
    must be short (unix(7)).
    """
    process = multiprocessing.current_process()
    process._config["daemon"] = False  # type: ignore[attr-defined]  # private to multiprocessing
    os.environ.pop("MALLOC_TRIM_THRESHOLD_", None)
    if len(tempfile.gettempdir()) > LONGEST_FOLDER:
        tempfile.tempdir = "/tmp"
    if address is not None:
        _ask_zygote(address)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    if not isinstance(_server(), FromZygote):
        multiprocessing.forkserver.ensure_running()
    return context


def start_process(process: BaseProcess) -> None:
    """Start a process of the context, from another forkserver if this one is just ending.

    A forkserver that ends in between (it was killed, or memory was short) is told by its silence:
    then nothing has been started, since a process tells its number itself. Raises EOFError or
    OSError if no other forkserver has started it within `ENDING` seconds after that.
    """
    deadline = None
    while True:
        try:
            process.start()
            return
        except (EOFError, ConnectionError, FileNotFoundError):
            if deadline is None:
                deadline = time.monotonic() + ENDING
            if time.monotonic() > deadline:
                raise
        time.sleep(0.05)  # until its guard has ended, too, it is taken to live


def guard() -> int | None:
    """The number of the process that stands guard over the forkserver and its ranks.

    It guards all that these have started. None before the forkserver has been started, and while
    the zygote has not answered.
    """
    return _server()._forkserver_pid


def end_forkserver() -> None:
    """End it, and all that it has started, now.

    While it imports torch it does not notice that its worker leaves, and the worker would wait for
    it.
    """
    pid = guard()
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, END)


def _server() -> Any:  # its attributes are private to multiprocessing
    return multiprocessing.forkserver._forkserver


def _ask_zygote(address: zygote.Address) -> None:
    """Take the forkserver from a zygote, from now on, if there is one for this environment."""
    if _server()._forkserver_pid is not None or isinstance(_server(), FromZygote):
        return
    if sys.version_info >= (3, 14):  # whose forkserver wants a secret from its parent besides
        return
    if zygote.fingerprint(dict(os.environ)) != address.fingerprint:
        return
    try:
        server = FromZygote(address)
    except OSError:  # the zygote has ended
        return
    module: Any = multiprocessing.forkserver
    module._forkserver = server
    for name in (
        "ensure_running",
        "get_inherited_fds",
        "connect_to_new_process",
        "set_forkserver_preload",
    ):
        setattr(module, name, getattr(server, name))


class FromZygote(ForkServer):
    """A forkserver that is no child of this process: its guard is told by a pidfd that it lives.

    Once it has ended, the next one is started as `multiprocessing` does.
    """

    # As in the class above it.
    _lock: Any
    _forkserver_address: Any
    _forkserver_alive_fd: Any
    _forkserver_pid: int | None

    def __init__(self, address: zygote.Address):
        super().__init__()
        path = arbitrary_address("AF_UNIX")
        alive_read, alive_write = os.pipe()
        try:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(path)
                os.chmod(path, 0o600)
                listener.listen()
                answer = zygote.request(address, listener, alive_read)
        except BaseException:
            os.close(alive_write)
            raise
        finally:
            os.close(alive_read)
        self._answer: socket.socket | None = answer
        self._guard_pidfd: int | None = None
        self._forkserver_address = path
        self._forkserver_alive_fd = alive_write

    def ensure_running(self) -> None:
        """Wait for the zygote's answer, the first time; start another if it has ended."""
        with self._lock:
            if self._answer is not None:
                self._take_answer(self._answer)
                self._answer = None
            if self._guard_pidfd is not None:
                if not has_ended(self._guard_pidfd):
                    resource_tracker.ensure_running()
                    return
                self._forget()
        super().ensure_running()

    def _take_answer(self, answer: socket.socket) -> None:
        with answer:
            pid = zygote.guard(answer)
        if pid is None:
            self._forget()
            return
        self._forkserver_pid = pid
        try:
            self._guard_pidfd = os.pidfd_open(pid)
        except ProcessLookupError:  # it has ended at once
            self._forget()

    def _forget(self) -> None:
        if self._guard_pidfd is not None:
            os.close(self._guard_pidfd)
            self._guard_pidfd = None
        os.close(self._forkserver_alive_fd)
        self._forkserver_address = None
        self._forkserver_alive_fd = None
        self._forkserver_pid = None
