"""The jobs of one cluster, from their submission to the end.

dask-jobqueue submits them. What it leaves open is here: credentials of this cluster alone, the
batch system's own words when it refuses a job or says where one is, and jobs that are cancelled
because others are submitted in their place. Relies on a folder that the jobs see, too. Promises:
when `close` returns, the jobs are cancelled and the credentials are gone.
"""

import contextlib
import math
import re
import shutil
import sys
from pathlib import Path

from distributed import Status

from ddp_common.clusters import protection
from ddp_common.clusters.job_script import (
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
    """The jobs of one cluster.

    `cluster` is dask-jobqueue's, `directory` has the logs and, as long as the cluster lives, its
    credentials. `warning` is in seconds before a job's time limit, `arrived` are the names of the
    jobs whose workers have been there.
    """

    def __init__(self, profile: dict):
        """Start the scheduler, but no job. Raises `Error` without the batch system's commands."""
        self.profile = profile
        self.system = system_of(profile)
        submit = self.system.commands[0]
        if shutil.which(submit) is None:
            raise Error(
                f"There is no {submit} here: {profile['cluster']} submits its jobs with it. "
                "Log in to a host of the cluster that has the batch system's commands "
                "(`module load` may bring them), or use CLUSTER=local. "
                "DRY=1 prints the job script anywhere."
            )
        self.warning = job_warning(profile)
        self.arrived: set[str] = set()
        self.directory = Path(new_directory("clusters", local=True)).absolute()
        self.directory.chmod(0o700)
        protection.write_credentials(protection.credentials(), self.directory)
        try:
            cls = protection.private(cluster_class(profile["cluster"]))
            self.cluster = cls(**job_options(profile, self.directory))
        except BaseException:
            self._remove_credentials()
            raise

    def _remove_credentials(self):
        for name in ("cert.pem", "key.pem"):
            (self.directory / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # not empty: it has logs
            self.directory.rmdir()

    def submit(self, workers: int) -> None:
        """Have as many jobs as `workers` need: submits what is missing.

        Raises `Error` with the batch system's own words.
        """
        wanted = math.ceil(workers / processes_in_a_job(self.profile))
        while len(self.cluster.worker_spec) < wanted:
            self.cluster.worker_spec.update(self.cluster.new_worker_spec())
        try:
            self._apply_spec()
        except (RuntimeError, OSError, ValueError) as error:
            # dask-jobqueue does not mark the refused jobs, and Dask would not close the cluster.
            for job in self.cluster.workers.values():
                if job.job_id is None:
                    job.status = Status.closed
            output = re.search(r"stdout:\n(.*)stderr:\n(.*)", str(error), re.DOTALL)
            said = output[1] + output[2] if output else str(error)
            self._refuse_if_silent()
            raise Error(
                f"{self.system.name} refused the job: {said.strip()}\n"
                'Change the profile, or for once OPTIONS="queue=… account=… walltime=…". '
                "DRY=1 prints the job script; `make doctor` lists the queues."
            ) from None

    def _refuse_if_silent(self):
        """Raise `Error` if the batch system does not answer: then no option is to blame."""
        try:
            self.system.states(())
        except OSError as error:
            name = self.system.name
            raise Error(
                f"{name} does not answer: {error}\n"
                f"{name} is down or cannot be reached from here. Try `{self.system.commands[1]}` "
                "by hand; if it fails too, ask those who run the cluster. "
                "CLUSTER=local trains on this machine."
            ) from None

    def _apply_spec(self):
        """Have Dask submit and cancel jobs until there are those of `worker_spec`, now."""
        self.cluster.sync(lambda: self.cluster)  # a cluster can be awaited

    def job_of(self, worker: dict) -> str:
        """The name of the job that a worker, as the scheduler describes it, is in."""
        name = str(worker["name"])
        if name in self.cluster.worker_spec:
            return name
        return name.rpartition("-")[0]  # one of several workers in a job

    def note_arrivals(self, workers: dict[str, dict]) -> None:
        self.arrived.update(self.job_of(worker) for worker in workers.values())

    def states(self) -> dict[str, tuple[str, str]] | None:
        """Name of a job -> (pending, running or ended; why).

        None if the batch system does not answer.
        """
        jobs = dict(self.cluster.workers)  # Dask's own thread may change it meanwhile
        ids = {name: job.job_id for name, job in jobs.items() if job.job_id}
        try:
            known = self.system.states(list(ids.values()))
        except OSError:
            return None
        forgotten = (ENDED, "no longer in the queue")
        return {name: known.get(job_id, forgotten) for name, job_id in ids.items()}

    def cancel(self, names: dict[str, str]) -> None:
        """Cancel these jobs (name -> why) where they still live, and forget them."""
        for name, why in names.items():
            job_id = self._id_of(name)
            print(f"Job {job_id} makes room for a new one: {why}", file=sys.stderr, flush=True)
            self.cluster.worker_spec.pop(name, None)
            self.arrived.discard(name)
        if names:
            # Dask would give one of these names to the next job, and cancel that one when the
            # time is over (lost-worker-timeout) that the lost worker of this name has to come back
            self.cluster._i += 1
            self._apply_spec()

    def _id_of(self, name: str) -> str:
        """The batch system's id of a job. Dask may forget one at any moment, when it is lost."""
        job = self.cluster.workers.get(name)
        return job.job_id if job is not None else "(forgotten)"

    def log(self, name: str) -> str:
        """The end of what a job has printed, with the path; a sentence if there is nothing."""
        job_id = self._id_of(name)
        paths = sorted(self.directory.glob(f"*{job_id}*"))
        written = [path for path in paths if path.stat().st_size]
        if not written:
            return (
                f"Job {job_id} has left no log in {self.directory}: "
                "is that folder visible on the hosts of the jobs?"
            )
        return "\n".join(f"{path}:\n{_last_lines(path)}" for path in written)

    def close(self) -> None:
        try:
            self.cluster.close()
        finally:
            self._remove_credentials()


def _last_lines(path):
    return "\n".join(path.read_text(errors="replace").splitlines()[-LOG_LINES:])
