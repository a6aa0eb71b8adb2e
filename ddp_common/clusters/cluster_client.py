"""The client that `connect` returns.

A `distributed.Client` that takes its cluster down with it and, where workers are jobs, keeps
their number up. Relies on `connect` to set what it knows of the cluster. Promises: when `close`
returns, the cluster that `connect` has started is closed, too.
"""

import re
import time
from typing import Any

from distributed import Client

from ddp_common.clusters.collector import no_garbage_collection
from ddp_common.clusters.jobs import Jobs
from ddp_common.clusters.notebooks import Cell
from ddp_common.clusters.quiet import quiet
from ddp_common.clusters.waiting import ended, wait_for_workers
from ddp_common.worker.nursery import ForkServer
from ddp_common.worker.time_limit import time_left

GONE_TIMEOUT = 15  # seconds that the workers of cancelled jobs have to leave


class ClusterClient(Client):
    """A `distributed.Client` that takes its cluster down with it."""

    cluster: Any = None  # that is closed with the client; None if somebody else has started it
    jobs: Jobs | None = None  # of the cluster where workers are jobs
    fork_server: ForkServer | None = None  # has torch imported, for a local cluster's workers
    expected = 1  # number of workers
    most: int | None = None  # number of ranks that were asked for, where there are more workers
    timeout = 60  # seconds that workers have to appear

    # Only in a notebook, where they tell whether a cell asks for the same cluster again:
    cell: Cell | None = None  # the cell that started the cluster, and its execution
    request: tuple | None = None  # what was asked for

    @property
    def ranks(self) -> int:
        """How many ranks a launch would have: one for each worker, unless fewer were asked for."""
        there = len(self.workers())
        return min(self.most or there, there)

    def workers(self) -> dict[str, dict]:
        """What the scheduler knows of its workers that are ready to work, by their address."""
        known = self.scheduler_info(n_workers=-1)["workers"]
        return {
            address: worker for address, worker in known.items() if worker["status"] == "running"
        }

    def _repr_html_(self):
        """For a notebook: the number of ranks, then what Dask shows, with the dashboard's link."""
        shown = super()._repr_html_()
        if self.status != "running":
            return shown
        return f"<p><strong>{self.ranks} rank(s)</strong> in a launch</p>{shown}"

    @property
    def dashboard_link(self) -> str:
        """The address of the dashboard.

        With jobs it is one on this host alone, whatever the scheduler's own address is.
        """
        link = super().dashboard_link
        if self.jobs is None:
            return link
        return re.sub(r"//[^/]*(:\d+)", r"//127.0.0.1\1", link)

    def make_ready(self, failed: bool) -> None:
        """Before a launch: replace jobs that have ended, and wait for the workers of new ones.

        After a failure (`failed`) also jobs whose time limit is near are replaced. Raises `Error`
        if no worker comes in time.
        """
        if self.jobs is None:
            return
        if not failed and len(self.workers()) >= self.expected:
            return
        over = self._jobs_near_their_limit() if failed else {}
        over |= ended(self.jobs.states())
        self.replace(over)
        self.jobs.submit(self.expected)
        wait_for_workers(self, self.expected, at_least=1)

    def _jobs_near_their_limit(self):
        jobs = {address: self.jobs.job_of(worker) for address, worker in self.workers().items()}
        left = self.run(time_left, on_error="ignore")
        near = {}
        for address, seconds in left.items():
            if address in jobs and seconds < 1.5 * self.jobs.warning:
                near[jobs[address]] = "its time limit is near"
        return near

    def replace(self, jobs: dict[str, str]) -> None:
        """Cancel jobs (name -> why) and wait until their workers are gone.

        `jobs.submit` then makes others.
        """
        assert self.jobs is not None, "there are jobs to replace"
        leaving = {
            address
            for address, worker in self.workers().items()
            if self.jobs.job_of(worker) in jobs
        }
        self.jobs.cancel(jobs)
        deadline = time.monotonic() + GONE_TIMEOUT
        while leaving & set(self.workers()) and time.monotonic() < deadline:
            time.sleep(0.05)

    def close(self, *args, **kwargs):
        cluster, self.cluster = self.cluster, None
        fork_server, self.fork_server = self.fork_server, None
        # Connections to workers end in the middle of what Dask wanted to tell them.
        try:
            with quiet(), no_garbage_collection():
                closed = super().close(*args, **kwargs)
                if self.jobs is not None:
                    self.jobs.close()
                elif cluster is not None and _is_ours_to_stop(cluster):
                    cluster.close()
        finally:
            if fork_server is not None:
                fork_server.close()
        return closed


def _is_ours_to_stop(cluster):
    return getattr(cluster, "shutdown_on_close", True)  # Saturn's may be told to stay
