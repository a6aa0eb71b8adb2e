"""The client that `connect` returns: one that takes its cluster down with it."""

import re
import time

from distributed import Client

from ddp_common.clusters.quiet import quiet
from ddp_common.clusters.waiting import ended, wait_for_workers
from ddp_common.worker.time_limit import time_left

GONE_TIMEOUT = 15  # seconds that the workers of cancelled jobs have to leave


class ClusterClient(Client):
    """A `distributed.Client` that takes its cluster down with it.

    `jobs` is a `batch.Jobs` where workers are jobs, else None; `most` the number of ranks that were asked for where there are more
    workers, else None.
    """

    cluster = jobs = most = None
    timeout, expected = 60, 1
    cell = request = (
        None  # of a notebook: the cell and its execution that started the cluster; what was asked for
    )

    @property
    def ranks(self):
        """How many ranks a launch would have: the number of workers, unless fewer were asked for."""
        there = len(self.workers())
        return min(self.most or there, there)

    def workers(self):
        """What the scheduler knows of its workers that are ready to work: address -> dict."""
        return {
            address: worker
            for address, worker in self.scheduler_info(n_workers=-1)["workers"].items()
            if worker["status"] == "running"
        }

    def _repr_html_(self):
        """What a notebook shows: the number of ranks, then what Dask shows, with the dashboard's address."""
        shown = super()._repr_html_()
        return (
            f"<p><strong>{self.ranks} rank(s)</strong> in a launch</p>{shown}"
            if self.status == "running"
            else shown
        )

    @property
    def dashboard_link(self):
        """The address of the dashboard; with jobs, one on this host alone, whatever the scheduler's own address is."""
        link = super().dashboard_link
        return re.sub(r"//[^/]*(:\d+)", r"//127.0.0.1\1", link) if self.jobs is not None else link

    def make_ready(self, failed):
        """Before a launch: jobs that have ended, or after a failure are about to, are submitted anew and waited for."""
        if self.jobs is None or (not failed and len(self.workers()) >= self.expected):
            return
        ending = {}
        if failed:
            jobs = {
                address: self.jobs.job_of(worker) for address, worker in self.workers().items()
            }
            left = self.run(time_left, on_error="ignore")
            ending = {
                jobs[address]: "its time limit is near"
                for address, seconds in left.items()
                if address in jobs and seconds < 1.5 * self.jobs.warning
            }
        self.replace({**ending, **ended(self.jobs.states())})
        self.jobs.submit(self.expected)
        wait_for_workers(self, self.expected, at_least=1)

    def replace(self, jobs):
        """Cancel jobs (a dict: name -> why) and wait until their workers are gone; `jobs.submit` then makes others."""
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
        with quiet():  # connections to workers end in the middle of what Dask wanted to tell them
            closed = super().close(*args, **kwargs)
            if self.jobs is not None:
                self.jobs.close()
            elif cluster is not None and getattr(
                cluster, "shutdown_on_close", True
            ):  # Saturn's may be told to stay
                cluster.close()
        return closed
