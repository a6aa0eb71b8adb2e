"""Workers that are jobs of a batch system: their script, their credentials, and the queue's own word on where they are.

dask-jobqueue writes the job scripts and submits them. What it leaves open is here: TLS with credentials of this cluster alone, a reason
for every wait, jobs that die at start, jobs that near their time limit or have ended and are submitted anew. Relies on a folder that
the jobs see too. Promises: when `close` returns, the jobs are cancelled and the credentials are gone.
"""

import contextlib
import importlib
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import dask
from distributed import Status

from ddp_common import protection
from ddp_common.errors import Error

LOOK_INTERVAL, LONGEST_INTERVAL = 1.0, 10.0  # seconds between two questions to the queue: at first, and when it has been long
LOG_LINES = 15  # of a worker's log, for an error message
UNLIMITED = 10**10  # seconds: no limit known
CLUSTER_ONLY = {"scheduler_options", "silence_logs", "shared_temp_directory", "n_workers", "name"}  # no business of a job's script
LISTS = {"job_script_prologue": "module load gcc", "worker_extra_args": "--no-dashboard", "job_extra_directives": "--exclusive"}  # and an example
QUEUED, RUNNING, ENDED = "pending", "running", "ended"
UNKNOWN_JOB = re.compile(r"[Uu]nknown [Jj]ob|[Ii]nvalid job|has finished")


def slurm_states(ids):
    """Job id -> (pending, running or ended; Slurm's state and reason). Jobs that it has forgotten are absent."""
    said = _ask("squeue", "--me", "--noheader", "--states=all", "--format=%i|%T|%r")
    states = {}
    for job, state, reason in (line.split("|", 2) for line in said.splitlines() if line.count("|") >= 2):
        kind = QUEUED if state in ("PENDING", "CONFIGURING", "REQUEUED", "SUSPENDED") else RUNNING if state == "RUNNING" else ENDED
        states[job] = kind, reason.replace("None", "just submitted") if kind == QUEUED else f"{state}, {reason}" if reason not in ("None", "") else state
    return {job: states[job] for job in ids if job in states}


def pbs_states(ids):
    """The same from `qstat -f`, of PBS Pro, OpenPBS or Torque; jobs that have ended may be absent."""
    states = {}
    for block in _ask("qstat", "-f", *ids).split("Job Id:")[1:]:
        job, state, comment = re.match(r"\s*(\d+)", block), re.search(r"job_state = (\w)", block), re.search(r"comment = (.*)", block)
        if job and state:
            kind = RUNNING if state[1] in "RB" else ENDED if state[1] in "ECFX" else QUEUED
            states[job[1]] = kind, comment[1].strip() if comment else f"state {state[1]}"
    return {job: states[job] for job in ids if job in states}


def _ask(*command):
    """What a command prints. Raises `OSError` if there is no answer, which is not the same as an empty one."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except subprocess.TimeoutExpired:
        raise OSError(f"{command[0]} did not answer within 30 s") from None
    if done.returncode and not done.stdout and not UNKNOWN_JOB.search(done.stderr):
        raise OSError(f"{command[0]}: {done.stderr.strip()}")
    return done.stdout


SYSTEMS = {  # by the command that submits
    "sbatch": SimpleNamespace(name="Slurm", states=slurm_states, commands=("sbatch", "squeue", "scancel", "sinfo")),
    "qsub": SimpleNamespace(name="PBS", states=pbs_states, commands=("qsub", "qstat", "qdel")),
}


def is_batch(profile):
    return profile["cluster"].startswith("dask_jobqueue.")


def cluster_class(name):
    """The class that a profile names. Raises `Error` if it cannot be imported."""
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise Error(f"The profile's cluster class {name} cannot be imported: {error}. Is its package installed?") from None


def processes_in_a_job(profile):
    """How many workers, and so ranks, a job of the profile has. Raises `Error` for what is no such number."""
    number = profile["options"].get("processes")
    if number is None:
        return 1
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise Error(f"processes={number}: it is the number of workers in a job, a whole number of at least 1.")
    return number


def check_options(profile):
    """Raise `Error` for options that would fail late, or mean something else: of text, Python makes a list of letters."""
    processes_in_a_job(profile)
    options = profile["options"]
    for name in LISTS:
        value = options.get(name)
        if value is not None and not (isinstance(value, list) and all(isinstance(each, str) for each in value)):
            raise Error(f"{name}={value!r}: it is a list of texts, such as {name}: [\"{LISTS[name]}\"]; on the command line "
                        f"OPTIONS=\"{name}='[{LISTS[name]}]'\".")
    if not isinstance(options.get("scheduler_options") or {}, dict):
        raise Error(f"scheduler_options={options['scheduler_options']!r}: it maps names to values, such as scheduler_options: {{interface: eth0}}; "
                    "on the command line OPTIONS=\"scheduler_options.interface=eth0\".")


def job_options(profile, directory):
    """The keyword arguments of dask-jobqueue's cluster class: the profile's, and what every job here has."""
    from distributed.security import Security

    check_options(profile)
    options = {"processes": 1, "silence_logs": "error", **profile["options"]}
    limit = seconds_of(options.get("walltime"))
    security = Security(require_encryption=True, tls_ca_file=f"{directory}/cert.pem", **{
        f"tls_{role}_{part}": f"{directory}/{part}.pem" for role in ("client", "scheduler", "worker") for part in ("cert", "key")})
    prologue = [
        f"export DDP_JOB_END=${{SLURM_JOB_END_TIME:-$(($(date +%s) + {limit}))}}  # seconds since 1970",
        f"export DDP_JOB_WARNING={job_warning(profile):g}  # seconds before it, ranks save and leave",
        "export DASK_DISTRIBUTED__WORKER__DAEMON=False DASK_DISTRIBUTED__COMM__TIMEOUTS__TCP=11s DASK_DISTRIBUTED__WORKER__HTTP__ROUTES=[]",
        *([protection.PRIVATE_FOLDER_IN_A_JOB] if dask.config.get("temporary-directory") is None else []),
        *(options.get("job_script_prologue") or []),
    ]
    if system_of(profile).name == "PBS":  # which copies a job's output only at its end
        prologue.insert(0, f'exec >> "{directory}/worker-${{PBS_JOBID:-$SLURM_JOB_ID}}.log" 2>&1')
    worker_arguments = ["--dashboard-address", "127.0.0.1:0", "--no-dashboard", *(options.get("worker_extra_args") or [])]
    return {"shebang": "#!/usr/bin/env bash", **options, "job_script_prologue": prologue, "worker_extra_args": worker_arguments,
            "security": security, "protocol": "tls://", "log_directory": str(directory),
            "scheduler_options": {"dashboard_address": "127.0.0.1:0", **(options.get("scheduler_options") or {})}}


def job_warning(profile):
    """Seconds before a job's time limit that its rank is told: the profile's; for a job that is no longer than that, a quarter of it."""
    limit = seconds_of(profile["options"].get("walltime"))
    return profile["warning"] if profile["warning"] < limit else limit // 4


def system_of(profile):
    """What is known of the profile's batch system: name, states (function), commands."""
    submit = cluster_class(profile["cluster"]).job_cls.submit_command
    unknown = SimpleNamespace(name=submit, states=lambda ids: {}, commands=(submit,))
    return SYSTEMS.get(submit, unknown)


def seconds_of(walltime):
    """Seconds of [days-][hours:]minutes:seconds, as Slurm and PBS write it."""
    if walltime is None:
        return UNLIMITED
    days, _, clock = str(walltime).rpartition("-")
    try:
        parts = [int(part) for part in clock.split(":")]
        return int(days or 0) * 86400 + sum(part * 60**place for place, part in enumerate(reversed(parts)))
    except ValueError:
        raise Error(f"walltime={walltime}: it is written hours:minutes:seconds, such as 02:00:00.") from None


def job_script(profile):
    """The script that would be submitted for each job; nothing is started, and no batch system need be there. Raises `Error`."""
    with tempfile.TemporaryDirectory() as folder:
        options = {name: value for name, value in job_options(profile, folder).items() if name not in CLUSTER_ONLY}
        try:
            script = cluster_class(profile["cluster"]).job_cls("tls://SCHEDULER:PORT", name="worker-0", **options).job_script()
        except (TypeError, ValueError, AttributeError) as error:
            raise Error(f"{profile['cluster']} refuses the profile's options: {error}.") from None
        return script.replace(folder, "runs/clusters/TIME").strip() + "\n"


class Jobs:
    """The jobs of one cluster: `cluster` (dask-jobqueue's), and `directory` with their logs and, as long as it lives, its credentials."""

    def __init__(self, profile):
        from ddp_common.run_directory import new_directory

        self.profile, self.system = profile, system_of(profile)
        if shutil.which(self.system.commands[0]) is None:
            raise Error(f"There is no {self.system.commands[0]} here: {profile['cluster']} submits its jobs with it. Log in to a host of the cluster that "
                        "has the batch system's commands (`module load` may bring them), or use CLUSTER=local. DRY=1 prints the job script anywhere.")
        self.warning, self.arrived = job_warning(profile), set()  # names of jobs whose workers have been there
        self.directory = Path(new_directory("clusters", local=True)).absolute()
        self.directory.chmod(0o700)
        protection.write_credentials(protection.credentials(), self.directory)
        try:
            self.cluster = protection.private(cluster_class(profile["cluster"]))(**job_options(profile, self.directory))
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
                if job.job_id is None:  # dask-jobqueue forgets to; Dask would not close the cluster
                    job.status = Status.closed
            said = re.search(r"stdout:\n(.*)stderr:\n(.*)", str(error), re.DOTALL)
            raise Error(f"{self.system.name} refused the job: {(said[1] + said[2] if said else str(error)).strip()}\nChange the profile, or for once "
                        "OPTIONS=\"queue=… account=… walltime=…\". DRY=1 prints the job script; `make doctor` lists the queues.") from None

    def job_of(self, worker):
        """The name of the job that a worker, as the scheduler describes it, is in."""
        name = str(worker["name"])
        return name if name in self.cluster.worker_spec else name.rpartition("-")[0]  # one of several in a job

    def note_arrivals(self, workers):
        self.arrived.update(map(self.job_of, workers.values()))

    def states(self):
        """Name of a job -> (pending, running or ended; why). None if the batch system does not answer."""
        ids = {name: job.job_id for name, job in self.cluster.workers.items() if job.job_id}
        try:
            known = self.system.states(list(ids.values()))
        except OSError:
            return None
        return {name: known.get(job, (ENDED, "no longer in the queue")) for name, job in ids.items()}

    def cancel(self, names):
        """Cancel these jobs (a dict: name -> why), as far as they live, and forget them."""
        for name, why in names.items():
            print(f"Job {self.cluster.workers[name].job_id} makes room for a new one: {why}", file=sys.stderr, flush=True)
            self.cluster.worker_spec.pop(name, None)
            self.arrived.discard(name)
        if names:
            self.cluster.sync(lambda: self.cluster)  # now: Dask may give one of these names to the next job

    def log(self, name):
        """The end of what a job has printed, with the path; a sentence if there is nothing."""
        job = self.cluster.workers[name].job_id
        written = [path for path in sorted(self.directory.glob(f"*{job}*")) if path.stat().st_size]
        if not written:
            return f"Job {job} has left no log in {self.directory}: is that folder visible on the hosts of the jobs?"
        return "\n".join(f"{path}:\n" + "\n".join(path.read_text(errors="replace").splitlines()[-LOG_LINES:]) for path in written)

    def close(self):
        try:
            self.cluster.close()
        finally:
            self._remove_credentials()


def summary(states):
    """'1 running, 2 pending (Resources)'."""
    parts = []
    for kind in (RUNNING, QUEUED, ENDED):
        reasons = [reason for each, reason in states.values() if each == kind]
        if reasons:
            parts.append(f"{len(reasons)} {kind}" + (f" ({', '.join(sorted(set(reasons)))})" if kind != RUNNING else ""))
    return ", ".join(parts) or "none submitted"


# On the worker, in a job


def time_left():
    """Seconds until the job's time limit; infinite without one, or without one that is a number."""
    try:
        end = float(os.environ.get("DDP_JOB_END", "inf"))
    except ValueError:
        end = float("inf")
    return end - time.time() if end < UNLIMITED else float("inf")


def watch_time_limit(tell):
    """Call `tell` when the job's time limit is near, and again until its end: a thread, which needs no word from the batch system."""
    warning = float(os.environ.get("DDP_JOB_WARNING", 0))

    def watch():
        while (left := time_left()) > warning:
            time.sleep(min(left - warning, 60))
        print(f"{left:.0f} s before this job's time limit: the rank is told to save and leave", file=sys.stderr, flush=True)
        while True:
            tell()
            time.sleep(2)

    if time_left() < float("inf"):
        threading.Thread(target=watch, daemon=True, name="ddp-time-limit").start()
