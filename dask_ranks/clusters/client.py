"""The client that `connect` returns.

A `distributed.Client` that takes its cluster down with it and, where workers are jobs, keeps
their number up. Promises: each wait for workers ends, at the client's timeout at the latest, with
the queue's own word on why they do not come; when `close` returns, the cluster that `connect` has
started is closed, too.
"""

import contextlib
import logging
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from distributed import Client, Scheduler
from distributed.security import Security

from dask_ranks.client import claims, rpc
from dask_ranks.clusters.jobs import Jobs, ended
from dask_ranks.worker import plugin
from dask_ranks.worker.fork_server import ForkServer
from dask_ranks.worker.time_limit import time_left
from ddp_common.errors import Error

ANSWER_TIMEOUT = 5  # seconds that workers have to say how long their jobs may last
GONE_TIMEOUT = 15  # seconds that the workers of cancelled jobs have to leave
QUEUE_INTERVAL = 5.0  # seconds between two questions to the queue

# What `connect` has returned, and gives again for the same request. Were one of them garbage, and
# collected in the new thread of another client, it would want to stop its own, and wait for a lock
# that the new client holds.
open_clients: "set[ClusterClient]" = set()


@dataclass
class Request:
    """What `connect` was asked for."""

    name: str  # of a profile, or an address
    profile: dict
    workers: int
    is_limited: bool  # to that many ranks, where there are more workers


class ClusterClient(Client):
    """A `distributed.Client` that takes its cluster down with it."""

    def __init__(
        self,
        address: str,
        security: Security,
        request: Request,
        *,
        cluster: Any = None,
        jobs: Jobs | None = None,
        fork_server: ForkServer | None = None,
        **options: Any,
    ):
        """Connect to the scheduler at an address; `options` are Dask's.

        `cluster` is ours (None: somebody else has started it), `jobs` are those of a cluster whose
        workers are jobs, `fork_server` has torch imported for the workers of a local cluster.
        What is put into `to_close` is closed with the client.
        """
        self.to_close = contextlib.ExitStack()
        super().__init__(address, security=security, **options)
        self.cluster = cluster
        self.jobs = jobs
        self.fork_server = fork_server
        self.request = request
        self.expected = request.workers
        self.timeout: float = request.profile["timeout"]  # seconds that workers have to appear
        self.most: int | None = None  # ranks that were asked for, where there are more workers
        self.times_given = 1  # by `connect`: it is closed by the last `with`
        self._blocks: list[Any] = []  # the `with` blocks in which it is Dask's current client

    def make_usable(self) -> None:
        """Wait until the workers are there, and have each import torch ahead."""
        self.wait_until_there()
        rpc.ask_all(self, time_left)  # refuses those that do not answer, or have no ddp_common
        try:
            self.run_on_scheduler(time_left)
        except ImportError as error:
            rpc.refuse_without_package(error)
            raise
        path = self.fork_server.path if self.fork_server else None
        self.register_plugin(
            plugin.Preload(is_own_cluster=self.cluster is not None, fork_server=path)
        )
        if self.request.is_limited and len(self.workers()) > self.expected:
            self.most = self.expected

    @property
    def ranks(self) -> int:
        """How many ranks a launch would have: one for each worker, unless fewer were asked for."""
        there = len(self.workers())
        return min(self.most or there, there)

    def workers(self) -> dict[str, dict]:
        """What the scheduler knows of its workers that are ready to work, by their address.

        An empty dict while the scheduler cannot be reached.
        """
        try:
            known = rpc.known_workers(self)
        except OSError:
            return {}
        return {at: worker for at, worker in known.items() if worker["status"] == "running"}

    def wait_until_there(self, at_least: int | None = None) -> None:
        """Wait until all workers are there; once the time is over, `at_least` so many will do.

        Says what the queue says whenever it changes. A job that ends after its worker has come is
        submitted again. Raises `Error` if the workers do not come in time, or if a job has ended
        before its worker came.
        """
        deadline = time.monotonic() + self.timeout
        said = None
        while not rpc.wait_until(
            lambda: len(self.workers()) >= self.expected,
            min(QUEUE_INTERVAL, deadline - time.monotonic()),
        ):
            there = len(self.workers())
            if time.monotonic() > deadline:
                if there < (at_least or self.expected):
                    raise Error(self._too_late(there))
                print(
                    f"Going on with {there} of {self.expected} workers: "
                    f"the others did not come within {self.timeout:g} s.",
                    file=sys.stderr,
                )
                break
            if self.jobs is not None:
                self.jobs.note_arrivals(self.workers())
                states, over = self.jobs.look()
                if over:  # their workers had come
                    self._replace(self.jobs, over)
                line = f"Waiting for workers: {there} of {self.expected}. Jobs: {states}"
                if line != said:
                    print(line, file=sys.stderr, flush=True)
                said = line
        if self.jobs is not None:
            self.jobs.note_arrivals(self.workers())

    def _too_late(self, there: int) -> str:
        message = f"{there} of {self.expected} workers came within {self.timeout:g} s. "
        fewer = f", ask for fewer (WORKERS={max(there, 1)})"
        if self.jobs is not None:
            return (
                f"{message}{self.jobs.why_late()}"
                f'Wait longer (OPTIONS="timeout=3600"){fewer} '
                'or for another queue (OPTIONS="queue=…").'
            )
        if self.cluster is None:
            first = f"Start them with `dask worker {self.scheduler.address}`"
        else:
            first = "Look at the workers' log"
        return f'{message}{first}{fewer} or wait longer (OPTIONS="timeout=3600").'

    def make_ready(self, failed: bool) -> None:
        """Before a launch: replace jobs that have ended, and wait for the workers of new ones.

        After a failure (`failed`) also jobs whose time limit is near are replaced. Raises `Error`
        if no worker comes in time.
        """
        if self.jobs is None:
            return
        if not failed and len(self.workers()) >= self.expected:
            return
        over = ended(self.jobs.states() or {})
        if failed:  # those that would soon end a restart
            job_at = {at: self.jobs.job_of(worker) for at, worker in self.workers().items()}
            left = rpc.answers_within(ANSWER_TIMEOUT, self, time_left, workers=list(job_at))
            over |= {
                job_at[at] for at, seconds in left.items() if seconds < 1.5 * self.jobs.warning
            }
        self._replace(self.jobs, over)
        self.wait_until_there(at_least=1)

    def why_lost(self, address: str) -> str:
        """What the queue says of the job whose worker was at this address; '' if nothing."""
        return "" if self.jobs is None else self.jobs.said_of(address)

    def _replace(self, jobs: Jobs, over: set[str]) -> None:
        """Cancel jobs, wait until their workers are gone, and submit others."""
        leaving = {
            address for address, worker in self.workers().items() if jobs.job_of(worker) in over
        }
        jobs.cancel(over)
        rpc.wait_until(lambda: not leaving & set(self.workers()), GONE_TIMEOUT)
        jobs.submit(self.expected)

    def __enter__(self) -> "ClusterClient":
        self._blocks.append(self.as_current())
        self._blocks[-1].__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        """Close it, unless `connect` has given it to somebody else, who has it still."""
        if self._blocks:  # else it was made without `with`, as a notebook's cells do
            self._blocks.pop().__exit__(*error)
        self.times_given -= 1
        if self.times_given < 1:
            self.close()

    def close(self, *args: Any, **kwargs: Any) -> Any:
        open_clients.discard(self)
        if self.cluster is None and self.status == "running":
            # It may be lost, or have no dask_ranks; or a worker does not answer it
            with contextlib.suppress(OSError, ImportError):
                forgetting = rpc.begin(self, lambda: self.run_on_scheduler(forget_plugin, self.id))
                forgetting.result(ANSWER_TIMEOUT)
        # Connections to workers end in the middle of what Dask wanted to tell them.
        with dask_is_silent(), self.to_close:
            return super().close(*args, **kwargs)


async def forget_plugin(client_id: str, dask_scheduler: Scheduler) -> None:
    """On a scheduler of others, for a client that leaves it: have no worker keep our plugin.

    They keep it while a launch is going on, and for another client of `connect`.
    """
    kind, _, _ = client_id.partition("-")
    others = [each for each in dask_scheduler.clients if each.startswith(kind)]
    is_needed = others != [client_id] or claims.NAME in dask_scheduler.plugins
    if plugin.NAME in dask_scheduler.worker_plugins and not is_needed:
        await dask_scheduler.unregister_worker_plugin(comm=None, name=plugin.NAME)


@contextlib.contextmanager
def dask_is_silent() -> Iterator[None]:
    """Meanwhile Dask logs nothing: what failed is said once, by us."""
    logger = logging.getLogger("distributed")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
