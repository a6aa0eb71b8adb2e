"""What a worker has for its ranks: one `RankHost`, which is `HOST`.

Promises: one rank at a time; where the fork server has ended, the worker starts another, its own.
"""

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Client, Connection

from dask_ranks.worker import supervisor
from dask_ranks.worker.fork_server import MALLOC_TRIM, ForkServer, texts_of
from dask_ranks.worker.supervisor import Request, Supervisor


class RankHost:
    """The rank that runs on a worker, and what it needs before and after."""

    def __init__(self) -> None:
        self.one_rank = threading.Lock()
        self.running: Supervisor | None = None  # of the rank that runs
        self.sigterms = 0.0  # how many more of them it gets
        self._store: tuple[str, socket.socket] | None = None  # of an attempt, for its rank 0
        self.afterwards: list[Callable[[], None]] = []  # to be done when the rank is gone
        self._shared_path: str | None = None  # of the fork server of a local cluster
        self._own: ForkServer | None = None  # this worker's
        self._choosing = threading.Lock()  # between the two
        self._idle: Connection | None = None  # to the supervisor of the last rank, for the next

    # The fork server

    def prepare(self, shared_path: str | None = None) -> None:
        """Use the fork server whose socket is at `shared_path`; None: have one of our own."""
        with self._choosing:
            self._shared_path = shared_path or self._shared_path
            if shared_path is None and self._own is None:
                self._own = ForkServer(dict(os.environ))

    def keep(self, connection: Connection) -> None:
        """Keep a connection to a supervisor that waits; one that is closed counts for nothing."""
        self._idle = None if connection.closed else connection

    def close(self) -> None:
        """End the supervisor that waits, and this worker's own fork server, if there are any."""
        with self._choosing:
            if self._idle is not None:
                self._idle.close()
                self._idle = None
            if self._own is not None:
                self._own.close()
                self._own = None

    def fork(
        self,
        module: str,
        function: str,
        *arguments: object,
        descriptors: dict[str, int],
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> Supervisor | None:
        """Have a process forked that calls `function` of `module`, and then ends.

        The function gets `arguments` and, by their names, the file descriptors. Returns its
        supervisor; None if the process was not wanted any more before there was one. Waits while a
        fork server imports torch. Raises OSError if no process can be forked or this folder is
        gone, and RuntimeError if the fork server ends meanwhile.
        """
        environment = {**os.environ}
        environment.pop(MALLOC_TRIM, None)  # for programs that the rank starts; its own is set
        request = Request(
            module=module,
            function=function,
            arguments=arguments,
            descriptors=[*descriptors],
            environment=environment,
            folder=os.getcwd(),
            cores=os.sched_getaffinity(0),
            path=texts_of(sys.path),
        )
        numbers = [*descriptors.values()]
        idle, self._idle = self._idle, None
        if idle is not None:
            with contextlib.suppress(EOFError, ConnectionError):  # it was killed meanwhile
                return supervisor.start(idle, request, numbers)
        try:
            new = self._reach_fork_server()
            if not supervisor.wait_until_forked(new, is_wanted):
                return None
            return supervisor.start(new, request, numbers)
        except (EOFError, ConnectionError):
            raise RuntimeError(
                "the process that imports torch, and from which ranks are forked, has ended. Was "
                "it killed, or was memory short? The worker's output may say. The next launch "
                "starts another"
            ) from None

    def _reach_fork_server(self) -> Connection:
        """A connection to the fork server; where that has ended, another is started."""
        with self._choosing:
            for path in (self._shared_path, self._own.path if self._own is not None else None):
                if path is not None:
                    with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
                        return Client(path, "AF_UNIX")
            if self._own is not None:
                self._own.close()
            self._own = ForkServer(dict(os.environ))
            return Client(self._own.path, "AF_UNIX")

    # Where the ranks of an attempt meet

    def listen(self, attempt_id: str, host: str) -> int:
        """Bind a port of `host` for the store of rank 0, any that is free; returns its number."""
        if self._store is not None:  # left by a launch that came no further
            _, earlier = self._store
            earlier.close()
        bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        bound.bind((host, 0))
        bound.listen(1024)
        self._store = attempt_id, bound
        return bound.getsockname()[1]

    def take_store(self, attempt_id: str) -> socket.socket:
        """That socket, which is the caller's from now on."""
        assert self._store is not None, "the client calls `listen` first"
        bound_for, bound = self._store
        assert bound_for == attempt_id, "the socket is that of another attempt"
        self._store = None
        return bound

    # The rank that runs

    def signal(self, number: int) -> None:
        """Send a signal to the rank, if there is one."""
        running = self.running  # read once: it may end at any moment
        if running is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(running.pid, number)

    def after_the_rank(self, do: Callable[[], None]) -> None:
        """Call `do` when the rank is gone; at once if there is none.

        A rank that is being forked or ended is there.
        """
        self.afterwards.append(do)
        if not self.one_rank.locked():  # looked at last: the rank may end at any moment
            self.rank_is_gone(lambda each: each())

    def rank_is_gone(self, call: Callable[[Callable[[], None]], object]) -> None:
        """Have `call` call what was to be done then."""
        with contextlib.suppress(IndexError):  # there is none left
            while True:
                call(self.afterwards.pop())


HOST = RankHost()
