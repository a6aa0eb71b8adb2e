"""Workers that are jobs of a batch system: their script, their credentials, and the queue's own word on where they are.

dask-jobqueue writes the job scripts and submits them. What it leaves open is here: TLS with credentials of this cluster alone, a reason
for every wait, jobs that die at start, jobs that near their time limit or have ended and are submitted anew. Relies on a folder that
the jobs see too. Promises: when `close` returns, the jobs are cancelled and the credentials are gone.
"""

import importlib
import tempfile
from types import SimpleNamespace

import dask

from ddp_common.clusters import protection
from ddp_common.clusters.queues import SYSTEMS
from ddp_common.errors import Error
from ddp_common.worker.time_limit import UNLIMITED

LOOK_INTERVAL, LONGEST_INTERVAL = (
    1.0,
    10.0,
)  # seconds between two questions to the queue: at first, and when it has been long
CLUSTER_ONLY = {
    "scheduler_options",
    "silence_logs",
    "shared_temp_directory",
    "n_workers",
    "name",
}  # no business of a job's script
LISTS = {
    "job_script_prologue": "module load gcc",
    "worker_extra_args": "--no-dashboard",
    "job_extra_directives": "--exclusive",
}  # and an example


def is_batch(profile):
    return profile["cluster"].startswith("dask_jobqueue.")


def cluster_class(name):
    """The class that a profile names. Raises `Error` if it cannot be imported."""
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise Error(
            f"The profile's cluster class {name} cannot be imported: {error}. Is its package installed?"
        ) from None


def processes_in_a_job(profile):
    """How many workers, and so ranks, a job of the profile has. Raises `Error` for what is no such number."""
    number = profile["options"].get("processes")
    if number is None:
        return 1
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise Error(
            f"processes={number}: it is the number of workers in a job, a whole number of at least 1."
        )
    return number


def check_options(profile):
    """Raise `Error` for options that would fail late, or mean something else: of text, Python makes a list of letters."""
    processes_in_a_job(profile)
    options = profile["options"]
    for name in LISTS:
        value = options.get(name)
        if value is not None and not (
            isinstance(value, list) and all(isinstance(each, str) for each in value)
        ):
            raise Error(
                f'{name}={value!r}: it is a list of texts, such as {name}: ["{LISTS[name]}"]; on the command line '
                f"OPTIONS=\"{name}='[{LISTS[name]}]'\"."
            )
    if not isinstance(options.get("scheduler_options") or {}, dict):
        raise Error(
            f"scheduler_options={options['scheduler_options']!r}: it maps names to values, such as scheduler_options: {{interface: eth0}}; "
            'on the command line OPTIONS="scheduler_options.interface=eth0".'
        )


def job_options(profile, directory):
    """The keyword arguments of dask-jobqueue's cluster class: the profile's, and what every job here has."""
    from distributed.security import Security

    check_options(profile)
    options = {"processes": 1, "silence_logs": "error", **profile["options"]}
    limit = seconds_of(options.get("walltime"))
    security = Security(
        require_encryption=True,
        tls_ca_file=f"{directory}/cert.pem",
        **{
            f"tls_{role}_{part}": f"{directory}/{part}.pem"
            for role in ("client", "scheduler", "worker")
            for part in ("cert", "key")
        },
    )
    prologue = [
        f"export DDP_JOB_END=${{SLURM_JOB_END_TIME:-$(($(date +%s) + {limit}))}}  # seconds since 1970",
        f"export DDP_JOB_WARNING={job_warning(profile):g}  # seconds before it, ranks save and leave",
        "export DASK_DISTRIBUTED__WORKER__DAEMON=False DASK_DISTRIBUTED__COMM__TIMEOUTS__TCP=11s DASK_DISTRIBUTED__WORKER__HTTP__ROUTES=[]",
        *(
            [protection.PRIVATE_FOLDER_IN_A_JOB]
            if dask.config.get("temporary-directory") is None
            else []
        ),
        *(options.get("job_script_prologue") or []),
    ]
    if system_of(profile).name == "PBS":  # which copies a job's output only at its end
        prologue.insert(0, f'exec >> "{directory}/worker-${{PBS_JOBID:-$SLURM_JOB_ID}}.log" 2>&1')
    worker_arguments = [
        "--dashboard-address",
        "127.0.0.1:0",
        "--no-dashboard",
        *(options.get("worker_extra_args") or []),
    ]
    return {
        "shebang": "#!/usr/bin/env bash",
        **options,
        "job_script_prologue": prologue,
        "worker_extra_args": worker_arguments,
        "security": security,
        "protocol": "tls://",
        "log_directory": str(directory),
        "scheduler_options": {
            "dashboard_address": "127.0.0.1:0",
            **(options.get("scheduler_options") or {}),
        },
    }


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
        return int(days or 0) * 86400 + sum(
            part * 60**place for place, part in enumerate(reversed(parts))
        )
    except ValueError:
        raise Error(
            f"walltime={walltime}: it is written hours:minutes:seconds, such as 02:00:00."
        ) from None


def job_script(profile):
    """The script that would be submitted for each job; nothing is started, and no batch system need be there. Raises `Error`."""
    with tempfile.TemporaryDirectory() as folder:
        options = {
            name: value
            for name, value in job_options(profile, folder).items()
            if name not in CLUSTER_ONLY
        }
        try:
            script = (
                cluster_class(profile["cluster"])
                .job_cls("tls://SCHEDULER:PORT", name="worker-0", **options)
                .job_script()
            )
        except (TypeError, ValueError, AttributeError) as error:
            raise Error(f"{profile['cluster']} refuses the profile's options: {error}.") from None
        return script.replace(folder, "runs/clusters/TIME").strip() + "\n"


# On the worker, in a job
