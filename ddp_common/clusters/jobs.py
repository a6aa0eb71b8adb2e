"""The jobs of one cluster, from their submission to the end.

Promises: when `close` returns, the jobs are cancelled and the credentials are gone.
"""

import contextlib
import math
import re
import shutil
import sys
from pathlib import Path

from distributed import Status

from ddp_common.clusters import protection
from ddp_common.clusters.batch import (
    cluster_class,
    job_options,
    job_warning,
    processes_in_a_job,
    system_of,
)
from ddp_common.clusters.queues import ENDED
from ddp_common.errors import Error
from ddp_common.run.places import new_directory

LOG_LINES = 15  # of a worker's log, for an error message


class Jobs:
    """The jobs of one cluster: `cluster` (dask-jobqueue's), and `directory` with their logs and, as long as it lives, its credentials."""

    def __init__(self, profile):
        self.profile, self.system = profile, system_of(profile)
        if shutil.which(self.system.commands[0]) is None:
            raise Error(
                f"There is no {self.system.commands[0]} here: {profile['cluster']} submits its jobs with it. Log in to a host of the cluster that "
                "has the batch system's commands (`module load` may bring them), or use CLUSTER=local. DRY=1 prints the job script anywhere."
            )
        self.warning, self.arrived = (
            job_warning(profile),
            set(),
        )  # names of jobs whose workers have been there
        self.directory = Path(new_directory("clusters", local=True)).absolute()
        self.directory.chmod(0o700)
        protection.write_credentials(protection.credentials(), self.directory)
        try:
            self.cluster = protection.private(cluster_class(profile["cluster"]))(
                **job_options(profile, self.directory)
            )
        except BaseException:
            self._remove_credentials()
            raise

    def _remove_credentials(self):
        for name in ("cert.pem", "key.pem"):
            (self.directory / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # not empty: it has logs
            self.directory.rmdir()

    def submit(self, workers):
        """Have as many jobs as `workers` need: submits what is missing. Raises `Error` with the batch system's own words."""
        processes = processes_in_a_job(self.profile)
        while len(self.cluster.worker_spec) < math.ceil(workers / processes):
            self.cluster.worker_spec.update(self.cluster.new_worker_spec())
        try:
            self.cluster.sync(lambda: self.cluster)
        except (RuntimeError, OSError, ValueError) as error:
            for job in self.cluster.workers.values():
                if (
                    job.job_id is None
                ):  # dask-jobqueue forgets to; Dask would not close the cluster
                    job.status = Status.closed
            said = re.search(r"stdout:\n(.*)stderr:\n(.*)", str(error), re.DOTALL)
            raise Error(
                f"{self.system.name} refused the job: {(said[1] + said[2] if said else str(error)).strip()}\nChange the profile, or for once "
                'OPTIONS="queue=… account=… walltime=…". DRY=1 prints the job script; `make doctor` lists the queues.'
            ) from None

    def job_of(self, worker):
        """The name of the job that a worker, as the scheduler describes it, is in."""
        name = str(worker["name"])
        return (
            name if name in self.cluster.worker_spec else name.rpartition("-")[0]
        )  # one of several in a job

    def note_arrivals(self, workers):
        self.arrived.update(map(self.job_of, workers.values()))

    def states(self):
        """Name of a job -> (pending, running or ended; why). None if the batch system does not answer."""
        ids = {name: job.job_id for name, job in self.cluster.workers.items() if job.job_id}
        try:
            known = self.system.states(list(ids.values()))
        except OSError:
            return None
        return {
            name: known.get(job, (ENDED, "no longer in the queue")) for name, job in ids.items()
        }

    def cancel(self, names):
        """Cancel these jobs (a dict: name -> why), as far as they live, and forget them."""
        for name, why in names.items():
            print(
                f"Job {self.cluster.workers[name].job_id} makes room for a new one: {why}",
                file=sys.stderr,
                flush=True,
            )
            self.cluster.worker_spec.pop(name, None)
            self.arrived.discard(name)
        if names:
            self.cluster.sync(
                lambda: self.cluster
            )  # now: Dask may give one of these names to the next job

    def log(self, name):
        """The end of what a job has printed, with the path; a sentence if there is nothing."""
        job = self.cluster.workers[name].job_id
        written = [path for path in sorted(self.directory.glob(f"*{job}*")) if path.stat().st_size]
        if not written:
            return f"Job {job} has left no log in {self.directory}: is that folder visible on the hosts of the jobs?"
        return "\n".join(
            f"{path}:\n" + "\n".join(path.read_text(errors="replace").splitlines()[-LOG_LINES:])
            for path in written
        )

    def close(self):
        try:
            self.cluster.close()
        finally:
            self._remove_credentials()
