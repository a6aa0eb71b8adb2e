"""Workers that are jobs of a batch system, from the script of a job to its end.

dask-jobqueue writes the scripts, the credentials of this cluster alone, and submits. What it
leaves open is here: the job's time limit, the batch system's own words when it refuses a job or
says where one is, and jobs that are cancelled because others are submitted in their place. Relies
on a folder that the jobs see, too. Promises: `job_script` starts nothing, and needs no batch
system; when `close` returns, the jobs are cancelled and the credentials are gone.
"""

import contextlib
import copy
import itertools
import json
import math
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import dask
import psutil
from distributed import Status
from distributed.comm import get_address_host
from distributed.security import Security

from dask_ranks.clusters import protection
from dask_ranks.clusters.profiles import cluster_class, refused
from dask_ranks.clusters.queues import SYSTEMS, JobState, States, job_number, summary
from dask_ranks.run.folders import new_directory
from dask_ranks.run.job import whole_number
from dask_ranks.worker.time_limit import UNLIMITED
from ddp_common.errors import Error

# Options of the cluster that dask-jobqueue's class for a single job does not take.
CLUSTER_ONLY = ("scheduler_options", "silence_logs", "shared_temp_directory", "n_workers", "name")
# What dask-jobqueue's settings call otherwise than its arguments
ARGUMENTS = {"name": "job_name", "extra": "worker_extra_args", "env_extra": "job_script_prologue"}
# The files with what a job of this number has printed: ours, those of PBS Pro, those of Torque
LOGS = ("worker-{}.log", "worker-{}.*.log", "{}.*.OU", "{}.*.ER", "*.o{}", "*.e{}")
CREDENTIALS = ("tls_ca_file", "tls_worker_cert", "tls_worker_key")  # that a worker needs
LOG_LINES = 25  # of a worker's log, for an error message


def number_of_jobs(profile: dict, workers: int) -> int:
    """How many jobs have so many workers: each has `processes` of them."""
    in_each = whole_number("processes", profile["options"].get("processes") or 1, least=1)
    return math.ceil(workers / in_each)


def check_commands(profile: dict) -> None:
    """Raise `Error` where there is no command to submit a job."""
    submit = SYSTEMS[profile["cluster"]].submit
    if shutil.which(submit) is None:
        raise Error(
            f"There is no {submit} here, with which {profile['cluster']} submits its jobs.\n"
            "Run this on a host that has it, perhaps after `module load`. DRY=1 prints the job "
            "script anywhere."
        )


# The script of a job

# What a worker does first: its fork server imports torch while the worker connects. A worker that
# lacks ddp_common gets it later.
PRELOAD = (
    "import contextlib\nwith contextlib.suppress(ImportError): "
    "from dask_ranks.worker.rank_host import HOST; HOST.prepare()"
)


def job_script(profile: dict) -> str:
    """The script that would be submitted for each job; nothing is started.

    Raises `Error` for a cluster class that cannot be imported or that refuses the options.
    """
    job_class = cluster_class(profile["cluster"]).job_cls
    with tempfile.TemporaryDirectory() as folder:
        paths = {name: f"{folder}/credentials/{name}" for name in CREDENTIALS}
        security = Security(require_encryption=True, **paths)
        try:
            all_options = job_options(profile, folder, security).items()
            options = {name: value for name, value in all_options if name not in CLUSTER_ONLY}
            script = job_class("tls://SCHEDULER:PORT", name="worker-0", **options).job_script()
        except (TypeError, ValueError, AttributeError) as error:
            raise refused(profile, error) from None
    return script.replace(folder, "runs/clusters/TIME").strip() + "\n"


def job_options(profile: dict, directory: str | Path, security: Security) -> dict[str, Any]:
    """The keyword arguments of dask-jobqueue's cluster class: the profile's, and our own.

    `directory` is for the jobs' logs.
    """
    options = {"processes": 1, "silence_logs": "error", **profile["options"]}
    if SYSTEMS[profile["cluster"]].name == "Slurm":
        # In quotes, which dask-jobqueue's own lines lack
        paths = [f'-{stream} "{directory}/worker-%j.log"' for stream in "oe"]
        ours = [*paths, "--no-requeue"]
    else:
        options["log_directory"] = str(directory)
        ours = ["-r n"]
    # One that its batch system has taken back would be queued again, later than its replacement
    section = cluster_class(profile["cluster"]).job_cls.config_name
    sites = dask.config.get(f"jobqueue.{section}.job-extra-directives", None) or []
    options["job_extra_directives"] = [*ours, *(options.get("job_extra_directives") or sites)]
    return {
        "shebang": "#!/usr/bin/env bash",
        "python": shlex.quote(sys.executable),
        **options,
        "job_script_prologue": _prologue(profile, directory),
        "worker_extra_args": [
            "--dashboard-address",
            "127.0.0.1:0",
            "--no-dashboard",
            *(options.get("worker_extra_args") or []),
        ],
        "security": security,
        "protocol": "tls://",
        "shared_temp_directory": str(directory),
        "scheduler_options": {
            "dashboard_address": "127.0.0.1:0",
            **(options.get("scheduler_options") or {}),
        },
    }


def in_files(security: Security, folder: Path) -> Security:
    """What a worker needs of `security`, in files of a new folder, which may have a space."""
    folder.mkdir(mode=0o700)
    written = copy.copy(security)
    for name in CREDENTIALS:
        path = folder / name
        path.touch(0o600)
        path.write_text(getattr(security, name))
        setattr(written, name, shlex.quote(str(path)))
    return written


def _prologue(profile: dict, directory: str | Path) -> list[str]:
    """The lines of bash before the worker starts."""
    end = f"$(($(date +%s) + {seconds_of(profile['options'].get('walltime'))}))"
    lines = []
    system = SYSTEMS[profile["cluster"]].name
    if system == "PBS":  # which copies a job's output only at its end
        lines.append(f'exec >> "{directory}/worker-$PBS_JOBID.log" 2>&1')
    if system == "Slurm":
        end = f"${{SLURM_JOB_END_TIME:-{end}}}"
    if path := os.environ.get("PYTHONPATH"):  # PBS passes no variables on
        lines.append(f"export PYTHONPATH={shlex.quote(path)}")
    return [
        *lines,
        f"export DDP_JOB_END={end}  # seconds since 1970",
        f"export DDP_JOB_WARNING={job_warning(profile):g}  # seconds before, ranks save and leave",
        "export DASK_DISTRIBUTED__WORKER__DAEMON=False",
        "export DASK_DISTRIBUTED__WORKER__HTTP__ROUTES=[]",
        "export DASK_DISTRIBUTED__COMM__TIMEOUTS__TCP=11s",
        f"export DASK_DISTRIBUTED__WORKER__PRELOAD={shlex.quote(json.dumps([PRELOAD]))}",
        "trap : TERM  # it is for the worker, for whose end this shell waits",
        *(profile["options"].get("job_script_prologue") or []),
        "export DDP_SCRATCH=$(mktemp -d)  # a folder that only you can read",
        "export DASK_TEMPORARY_DIRECTORY=$DDP_SCRATCH",
        # A trap of the profile's lines runs too, and with the exit code that it would have seen
        'eval "set -- $(trap -p EXIT)"  # $3: what the lines above have at the end',
        """trap 'ddp_code=$?; set +e; rm -rf "$DDP_SCRATCH"; (exit $ddp_code); '"${3-}" EXIT""",
    ]


def job_warning(profile: dict) -> float:
    """Seconds before a job's time limit at which its rank is told.

    This is the profile's `warning`, or a quarter of the time limit where that is no longer.
    """
    limit = seconds_of(profile["options"].get("walltime"))
    return profile["warning"] if profile["warning"] < limit else limit // 4


def seconds_of(walltime: str | None) -> int:
    """Seconds of [days-][hours:]minutes:seconds, or Slurm's days-hours[:minutes].

    Without a time limit these are `UNLIMITED`. Raises `Error` for any other text.
    """
    if walltime is None:
        return UNLIMITED
    days, dash, clock = str(walltime).rpartition("-")
    try:
        parts = [int(part) for part in clock.split(":")]
        if dash:
            parts += [0] * (3 - len(parts))
        seconds = 0
        for part in parts:
            seconds = seconds * 60 + part
        return int(days or 0) * 86400 + seconds
    except ValueError:
        raise Error(
            f"walltime={walltime} is no time.\nIt is written hours:minutes:seconds: 02:00:00."
        ) from None


# The jobs of a cluster


class Jobs:
    """The jobs of one cluster.

    `cluster` is dask-jobqueue's, `directory` has the logs and, as long as the cluster lives, its
    credentials. `warning` is in seconds before a job's time limit, `arrived` are the names of the
    jobs whose workers have been there, by these workers' addresses.
    """

    def __init__(self, profile: dict):
        """Start the scheduler, but no job.

        Raises `Error` for what is wrong in the profile, then without the batch system's commands.
        """
        job_script(profile)  # refuses a faulty one: what it returns is not needed here
        check_commands(profile)
        self.profile = profile
        self.system = SYSTEMS[profile["cluster"]]
        self.warning = job_warning(profile)
        self.arrived: dict[str, str] = {}
        self._names = (f"worker-{number}" for number in itertools.count())
        self.directory = new_directory("clusters").absolute()
        self.credentials = self.directory / "credentials"
        self.cluster: Any = None
        cls = cluster_class(profile["cluster"])
        own_number = {"_job_id_from_submit_output": staticmethod(job_number)}
        own_files = {
            "job_cls": type(cls.job_cls.__name__, (cls.job_cls,), own_number),
            "_get_worker_security": lambda _, security: in_files(security, self.credentials),
        }
        cls = protection.private(type(cls.__name__, (cls,), own_files))
        try:
            for path in (str(self.directory), profile["options"].get("python") or sys.executable):
                # dask-jobqueue writes it into a script as it is
                if " " in path and self.system.name != "Slurm":
                    raise Error(
                        f"{self.system.name} cannot have jobs with a space in a path: {path}.\n"
                        "Move the clone, or set RUNS=/a/folder and the profile's `python`."
                    )
            self.cluster = cls(**job_options(profile, self.directory, protection.credentials()))
            refuse_loopback(self.cluster)
        except BaseException:
            self.close()
            raise

    def submit(self, workers: int) -> None:
        """Have as many jobs as `workers` need: submits what is missing.

        Raises `Error` with the batch system's own words.
        """
        while len(self.cluster.worker_spec) < number_of_jobs(self.profile, workers):
            # Not Dask's names, of which it gives one that is free again to another job
            self.cluster.worker_spec[next(self._names)] = self.cluster.new_spec
        try:
            self._apply_spec()
        except (Error, RuntimeError, OSError, ValueError) as error:
            # dask-jobqueue does not mark the refused jobs, and Dask would not close the cluster.
            for name, job in list(self.cluster.workers.items()):
                if job.job_id is None:
                    job.status = Status.closed
                    self.cluster.worker_spec.pop(name, None)  # the next one has another name
            if isinstance(error, Error):
                raise
            output = re.search(r"stdout:\n(.*)stderr:\n(.*)", str(error), re.DOTALL)
            said = output[1] + output[2] if output else str(error)
            raise Error(
                f"{self.system.name} refused the job: {said.strip()}\n"
                "If that names an option, change the profile, or for once "
                'OPTIONS="queue=… account=… walltime=…". DRY=1 prints the job script; '
                "`make doctor` lists the queues."
            ) from None

    def _apply_spec(self) -> None:
        """Have Dask submit and cancel jobs until there are those of `worker_spec`, now."""
        self.cluster.sync(lambda: self.cluster)  # a cluster can be awaited

    def job_of(self, worker: dict) -> str:
        """The name of the job that a worker, as the scheduler describes it, is in."""
        name = str(worker["name"])
        if name in self.cluster.worker_spec:
            return name
        return name.rpartition("-")[0]  # one of several workers in a job

    def note_arrivals(self, workers: dict[str, dict]) -> None:
        self.arrived.update({there: self.job_of(worker) for there, worker in workers.items()})

    def states(self) -> States | None:
        """What is known of the jobs, by their names; None if the batch system does not answer."""
        ids = self._ids()
        try:
            known = self.system.states(list(ids.values()))
        except OSError:
            return None
        forgotten = (JobState.ENDED, "it is no longer in the queue")
        return {name: known.get(job_id, forgotten) for name, job_id in ids.items()}

    def _ids(self) -> dict[str, str]:
        """Name of a job -> its id, of those that are submitted."""
        jobs = dict(self.cluster.workers)  # Dask's own thread may change it meanwhile
        return {name: job.job_id for name, job in jobs.items() if job.job_id}

    def look(self) -> tuple[str, set[str]]:
        """What the batch system says of the jobs, in a few words, and those that are over.

        Raises `Error` if one is over and never had its worker.
        """
        states = self.states()
        if states is None:
            return f"{self.system.name} does not answer", set()
        for name in ended(states) - set(self.arrived.values()):
            raise Error(
                f"Job {self._ids()[name]} ended before its worker came: {states[name][1]}.\n"
                f"{self.log(name)}\n"
                "Fix the cause that it names; DRY=1 prints the job script, "
                "`make doctor` checks the usual causes."
            )
        return summary(states), ended(states)

    def said_of(self, address: str) -> str:
        """What the batch system says of the job whose worker was there; '' if that is unknown."""
        name = self.arrived.get(address, "")
        states = self.states() or {}
        return f"job {self._ids()[name]}: {states[name][1]}" if name in states else ""

    def cancel(self, names: Iterable[str]) -> None:
        """Cancel these jobs where they still live, and forget them."""
        for name in names:
            self.cluster.worker_spec.pop(name, None)
        self._apply_spec()

    def why_late(self) -> str:
        """What the batch system says of the jobs, and the logs of those that run in vain."""
        states = self.states()
        if states is None:
            return f"{self.system.name} does not answer: look later whether the jobs are gone.\n"
        said = f"{self.system.name} says of the jobs: {summary(states)}. They were cancelled.\n"
        for name, (state, _) in states.items():
            if state is JobState.RUNNING and name not in self.arrived.values():
                said += (
                    f"{self.log(name)}\n"
                    "A job that runs without its worker coming cannot reach the scheduler here: "
                    "name the network that both share, `interface` and "
                    "`scheduler_options.interface`.\n"
                )
        return said

    def log(self, name: str) -> str:
        """The end of what a job has printed, with the path; a sentence if there is nothing."""
        job_id = self._ids()[name]
        told = []
        for path in (each for log in LOGS for each in self.directory.glob(log.format(job_id))):
            if lines := path.read_text(errors="replace").splitlines():
                told += [f"{path}:", *lines[-LOG_LINES:]]
        if told:
            return "\n".join(told)
        return (
            f"Job {job_id} has left no log in {self.directory}: "
            "is that folder visible on the hosts of the jobs?"
        )

    def close(self) -> None:
        """Cancel the jobs, and remove the credentials."""
        try:
            if self.cluster is not None:
                self.cluster.close()
        finally:
            shutil.rmtree(self.credentials, ignore_errors=True)
            with contextlib.suppress(OSError):  # not empty: it has logs
                self.directory.rmdir()


def refuse_loopback(cluster: Any) -> None:
    """Raise `Error` for a scheduler that other hosts cannot reach, unless it was asked for."""
    scheduler, chosen = cluster.scheduler, cluster.scheduler_spec["options"]
    host = get_address_host(scheduler.address)
    asked_for = chosen.get("host") or chosen.get("interface") or scheduler.contact_address
    if host.startswith(("127.", "::1")) and not asked_for:
        raise Error(
            f"Jobs on other hosts cannot reach a scheduler at {host}. It would be there, as this "
            "host's own name leads there and it has no default route.\nName the network that it "
            f'shares with them: OPTIONS="interface=…", one of {", ".join(psutil.net_if_addrs())}. '
            "Where they call it otherwise, `scheduler_options.interface` is for this host."
        )


def from_site(profile: dict) -> str:
    """A line on what jobs have from Dask's settings, as a site's jobqueue.yaml; '' if nothing."""
    section = cluster_class(profile["cluster"]).job_cls.config_name
    default = dask.config.merge(*dask.config.defaults)["jobqueue"][section]
    ours = {"log_directory": True, **job_options(profile, "", Security())}
    ours["job_extra_directives"] = profile["options"].get("job_extra_directives")
    said: dict[bool, list[str]] = {True: [], False: []}  # whether it is taken
    for name, value in dask.config.get(f"jobqueue.{section}").items():
        if value != default.get(name):
            option = name.replace("-", "_")
            said[ours.get(ARGUMENTS.get(option, option)) is None].append(f"{option}={value}")
    taken, replaced = (", ".join(said[each]) or "nothing" for each in (True, False))
    line = f"From jobqueue.yaml, Dask's settings: {taken}. Replaced here: {replaced}.\n"
    return line if said[True] or said[False] else ""


def ended(states: States) -> set[str]:
    """The names of jobs that are over."""
    return {job for job, (state, _) in states.items() if state is JobState.ENDED}
