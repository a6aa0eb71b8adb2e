"""Workers that are jobs of a batch system, from the script of a job to its end.

dask-jobqueue writes the scripts and submits them. What it leaves open is here: credentials of this
cluster alone, the job's time limit, the batch system's own words when it refuses a job or says
where one is, and jobs that are cancelled because others are submitted in their place. Relies on a
folder that the jobs see, too. Promises: `job_script` starts nothing, and needs no batch system;
when `close` returns, the jobs are cancelled and the credentials are gone.
"""

import contextlib
import difflib
import inspect
import itertools
import math
import re
import shutil
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import dask
from distributed import Status
from distributed.security import Security

from ddp_common.clusters import protection
from ddp_common.clusters.profiles import cluster_class
from ddp_common.clusters.queues import ENDED, RUNNING, SYSTEMS, summary
from ddp_common.errors import Error
from ddp_common.run.places import new_directory
from ddp_common.worker.time_limit import UNLIMITED

# Options of the cluster that dask-jobqueue's class for a single job does not take.
CLUSTER_ONLY = {
    "scheduler_options",
    "silence_logs",
    "shared_temp_directory",
    "n_workers",
    "name",
}
LOG_LINES = 15  # of a worker's log, for an error message


def processes_in_a_job(profile: dict) -> int:
    """How many workers, and so ranks, a job of the profile has."""
    return profile["options"].get("processes") or 1


def system_of(profile: dict) -> SimpleNamespace:
    """What is known of the profile's batch system: name, states (function), commands."""
    submit = cluster_class(profile["cluster"]).job_cls.submit_command
    unknown = SimpleNamespace(name=submit, states=lambda ids: {}, commands=(submit,))
    return SYSTEMS.get(submit, unknown)


# The script of a job


def job_script(profile: dict) -> str:
    """The script that would be submitted for each job; nothing is started.

    Raises `Error` for a cluster class that cannot be imported or that refuses the options.
    """
    with tempfile.TemporaryDirectory() as folder:
        options = job_options(profile, folder)
        for name in CLUSTER_ONLY:
            options.pop(name, None)
        job_class = cluster_class(profile["cluster"]).job_cls
        try:
            script = job_class("tls://SCHEDULER:PORT", name="worker-0", **options).job_script()
        except (TypeError, ValueError, AttributeError) as error:
            raise refused(profile, error) from None
        return script.replace(folder, "runs/clusters/TIME").strip() + "\n"


def job_options(profile: dict, directory: str | Path) -> dict:
    """The keyword arguments of dask-jobqueue's cluster class: the profile's, and our own.

    `directory` is for the jobs' logs and has the credentials, `cert.pem` and `key.pem`. Raises
    `Error` for an option of another type than dask-jobqueue's own default.
    """
    options = {"processes": 1, "silence_logs": "error", **profile["options"]}
    _compare_with_defaults(profile["cluster"], options)
    scheduler_options = options.get("scheduler_options") or {}
    certificate, key = f"{directory}/cert.pem", f"{directory}/key.pem"
    files = {"tls_ca_file": certificate}
    for role in ("client", "scheduler", "worker"):
        files |= {f"tls_{role}_cert": certificate, f"tls_{role}_key": key}
    return {
        "shebang": "#!/usr/bin/env bash",
        **options,
        "job_script_prologue": _prologue(profile, directory),
        "worker_extra_args": [
            "--dashboard-address",
            "127.0.0.1:0",
            "--no-dashboard",
            *(options.get("worker_extra_args") or []),
        ],
        "security": Security(require_encryption=True, **files),
        "protocol": "tls://",
        "log_directory": str(directory),
        "scheduler_options": {"dashboard_address": "127.0.0.1:0", **scheduler_options},
    }


def _compare_with_defaults(cluster, options):
    """Raise `Error` for a text where dask-jobqueue takes a list, and the like."""
    defaults = dask.config.get(f"jobqueue.{cluster_class(cluster).job_cls.config_name}")
    for option, value in options.items():
        default = defaults.get(option.replace("_", "-"))
        if None not in (value, default) and not isinstance(value, type(default)):
            kind = type(default).__name__
            raise Error(
                f"The option {option}={value!r} is no {kind}, which {cluster} takes there: "
                f"{default!r} without one. It stands in OPTIONS, or in the profile."
            )


def _prologue(profile, directory):
    """The lines of bash before the worker starts."""
    end = f"$(($(date +%s) + {seconds_of(profile['options'].get('walltime'))}))"
    lines = []
    system = system_of(profile).name
    if system == "PBS":  # which copies a job's output only at its end
        lines.append(f'exec >> "{directory}/worker-$PBS_JOBID.log" 2>&1')
    if system == "Slurm":
        end = f"${{SLURM_JOB_END_TIME:-{end}}}"
    lines += [
        f"export DDP_JOB_END={end}  # seconds since 1970",
        f"export DDP_JOB_WARNING={job_warning(profile):g}  # seconds before, ranks save and leave",
        "export DASK_DISTRIBUTED__WORKER__DAEMON=False",
        "export DASK_DISTRIBUTED__WORKER__HTTP__ROUTES=[]",
        "export DASK_DISTRIBUTED__COMM__TIMEOUTS__TCP=11s",
    ]
    if dask.config.get("temporary-directory") is None:
        lines += [
            "export DDP_SCRATCH=$(mktemp -d)  # a folder that only you can read",
            "export DASK_TEMPORARY_DIRECTORY=$DDP_SCRATCH",
            """trap 'rm -rf "$DDP_SCRATCH"' EXIT""",
        ]
    lines += profile["options"].get("job_script_prologue") or []
    return lines


def job_warning(profile: dict) -> float:
    """Seconds before a job's time limit at which its rank is told.

    This is the profile's `warning`, or a quarter of the time limit where that is no longer.
    """
    limit = seconds_of(profile["options"].get("walltime"))
    if profile["warning"] < limit:
        return profile["warning"]
    return limit // 4


def seconds_of(walltime: str | None) -> int:
    """Seconds of [days-][hours:]minutes:seconds, as Slurm and PBS write it.

    Without a time limit these are `UNLIMITED`. Raises `Error` for any other text.
    """
    if walltime is None:
        return UNLIMITED
    days, _, clock = str(walltime).rpartition("-")
    try:
        seconds = 0
        for part in clock.split(":"):
            seconds = seconds * 60 + int(part)
        return int(days or 0) * 86400 + seconds
    except ValueError:
        raise Error(
            f"walltime={walltime}: it is written hours:minutes:seconds, such as 02:00:00."
        ) from None


def refused(profile: dict, error: BaseException) -> Error:
    """What to raise where dask-jobqueue's class refuses the options of a profile with `error`."""
    said = f"{error}".rstrip(".")
    unknown = re.search(r"unexpected keyword argument '(\w+)'", said)
    if unknown:
        said = f"there is no option {unknown[1]!r}{_meant(profile, unknown[1])}"
    return Error(
        f"{profile['cluster']} refuses the profile's options: {said}. "
        "It stands in OPTIONS, or in the profile."
    )


def _meant(profile, option):
    """What an option that does not exist may be called, in brackets."""
    if option == "partition":
        return " (Slurm's partition is `queue`)"
    known = {
        parameter.name
        for cls in cluster_class(profile["cluster"]).job_cls.__mro__
        for parameter in inspect.signature(cls).parameters.values()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    }
    near = difflib.get_close_matches(option, sorted(known), n=1)
    return f" (did you mean {near[0]}?)" if near else ""


# The jobs of a cluster


class Jobs:
    """The jobs of one cluster.

    `cluster` is dask-jobqueue's, `directory` has the logs and, as long as the cluster lives, its
    credentials. `warning` is in seconds before a job's time limit, `arrived` are the names of the
    jobs whose workers have been there.
    """

    def __init__(self, profile: dict):
        """Start the scheduler, but no job.

        Raises `Error` for what is wrong in the profile, then without the batch system's commands.
        """
        job_script(profile)  # refuses a faulty one: what it returns is not needed here
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
        self._names = (f"worker-{number}" for number in itertools.count())
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
            # Not Dask's names, of which it gives one that is free again to another job
            self.cluster.worker_spec[next(self._names)] = self.cluster.new_spec
        try:
            self._apply_spec()
        except (RuntimeError, OSError, ValueError) as error:
            # dask-jobqueue does not mark the refused jobs, and Dask would not close the cluster.
            for name, job in list(self.cluster.workers.items()):
                if job.job_id is None:
                    job.status = Status.closed
                    self.cluster.worker_spec.pop(name, None)  # the next one has another name
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

    def refuse_early_ends(self, over: dict[str, str]) -> None:
        """Raise `Error` if one of the jobs that are `over` (name -> why) never had its worker."""
        for name, reason in over.items():
            if name not in self.arrived:
                raise Error(
                    f"Job {self.cluster.workers[name].job_id} ended before its worker came "
                    f"({reason}).\n{self.log(name)}\n"
                    "Fix the cause that it names; DRY=1 prints the job script, "
                    "`make doctor` checks the usual causes."
                )

    def cancel(self, names: dict[str, str]) -> None:
        """Cancel these jobs (name -> why) where they still live, and forget them."""
        for name, why in names.items():
            if name not in self.cluster.workers:  # it is cancelled, and its worker about to go
                continue
            job_id = self.cluster.workers[name].job_id
            print(f"Job {job_id} makes room for a new one: {why}", file=sys.stderr, flush=True)
            self.cluster.worker_spec.pop(name, None)
            self.arrived.discard(name)
        if names:
            self._apply_spec()

    def why_late(self) -> str:
        """What the batch system says of the jobs, and the logs of those that run in vain."""
        states = self.states()
        queue = summary(states) if states is not None else "nothing, it does not answer"
        said = f"{self.system.name} says of the jobs: {queue}. They were cancelled.\n"
        for name, (kind, _) in (states or {}).items():
            if kind == RUNNING and name not in self.arrived:
                said += f"{self.log(name)}\n"
        return said

    def log(self, name: str) -> str:
        """The end of what a job has printed, with the path; a sentence if there is nothing."""
        job_id = self.cluster.workers[name].job_id
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
