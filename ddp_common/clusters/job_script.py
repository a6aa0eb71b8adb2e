"""Workers that are jobs of a batch system: the options and the script of such a job.

dask-jobqueue writes the scripts. What it leaves open is added here: TLS with credentials of this
cluster alone, the job's time limit, and a private folder for temporary files. Relies on a folder
that the jobs see, too. Promises: `job_script` starts nothing, and needs no batch system.
"""

import difflib
import importlib
import inspect
import re
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dask
from distributed.security import Security

from ddp_common.clusters import protection
from ddp_common.clusters.queues import SYSTEMS
from ddp_common.clusters.quiet import interrupts_as_before
from ddp_common.errors import Error
from ddp_common.worker.time_limit import UNLIMITED

# Options of the cluster that dask-jobqueue's class for a single job does not take.
CLUSTER_ONLY = {
    "scheduler_options",
    "silence_logs",
    "shared_temp_directory",
    "n_workers",
    "name",
}
# Classes of this package that have moved: what an older profile names -> where it is now
MOVED = {"ddp_common.saturn.SaturnCluster": "ddp_common.clusters.saturn.SaturnCluster"}
ROLES = ("client", "scheduler", "worker")
# A program of Python in one line, for Dask's `--preload`: no harm where `ddp_common` is not there
PRELOAD = (
    "with __import__('contextlib').suppress(ImportError): "
    "from ddp_common.worker.plugin import dask_setup, dask_teardown"
)


def is_batch(profile: dict) -> bool:
    return profile["cluster"].startswith("dask_jobqueue.")


def cluster_class(name: str) -> type[Any]:
    """The class that a profile names. Raises `Error` if it cannot be imported."""
    name = MOVED.get(name, name)
    module, _, attribute = name.rpartition(".")
    try:
        with interrupts_as_before():
            return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise Error(
            f"The profile's cluster class {name} cannot be imported: {error}. "
            "Is its package installed?"
        ) from None


def processes_in_a_job(profile: dict) -> int:
    """How many workers, and so ranks, a job of the profile has."""
    return profile["options"].get("processes") or 1


def job_options(profile: dict, directory: str | Path) -> dict:
    """The keyword arguments of dask-jobqueue's cluster class: the profile's, and our own.

    `directory` is for the jobs' logs and has the credentials, `cert.pem` and `key.pem`.
    """
    options = {"processes": 1, "silence_logs": "error", **profile["options"]}
    scheduler_options = options.get("scheduler_options") or {}
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
        "security": _security(directory),
        "protocol": "tls://",
        "log_directory": str(directory),
        "scheduler_options": {"dashboard_address": "127.0.0.1:0", **scheduler_options},
    }


def _prologue(profile, directory):
    """The lines of bash before the worker starts."""
    limit = seconds_of(profile["options"].get("walltime"))
    now_plus_limit = f"$(($(date +%s) + {limit}))"
    lines = []
    if system_of(profile).name == "PBS":  # which copies a job's output only at its end
        log = f"{directory}/worker-${{PBS_JOBID:-$SLURM_JOB_ID}}.log"
        lines.append(f'exec >> "{log}" 2>&1')
    lines += [
        f"export DDP_JOB_END=${{SLURM_JOB_END_TIME:-{now_plus_limit}}}  # seconds since 1970",
        f"export DDP_JOB_WARNING={job_warning(profile):g}"
        "  # seconds before it, ranks save and leave",
        "export DASK_DISTRIBUTED__WORKER__DAEMON=False"
        " DASK_DISTRIBUTED__COMM__TIMEOUTS__TCP=11s"
        " DASK_DISTRIBUTED__WORKER__HTTP__ROUTES=[]",
        "export DASK_DISTRIBUTED__WORKER__PRELOAD="
        f'"${{DASK_DISTRIBUTED__WORKER__PRELOAD:-{PRELOAD}}}"',
    ]
    if dask.config.get("temporary-directory") is None:
        lines.append(protection.PRIVATE_FOLDER_IN_A_JOB)
    lines += profile["options"].get("job_script_prologue") or []
    return lines


def _security(directory):
    files = {}
    for role in ROLES:
        files[f"tls_{role}_cert"] = f"{directory}/cert.pem"
        files[f"tls_{role}_key"] = f"{directory}/key.pem"
    return Security(require_encryption=True, tls_ca_file=f"{directory}/cert.pem", **files)


def job_warning(profile: dict) -> float:
    """Seconds before a job's time limit at which its rank is told.

    This is the profile's `warning`, or a quarter of the time limit where that is no longer.
    """
    limit = seconds_of(profile["options"].get("walltime"))
    if profile["warning"] < limit:
        return profile["warning"]
    return limit // 4


def system_of(profile: dict) -> SimpleNamespace:
    """What is known of the profile's batch system: name, states (function), commands."""
    submit = cluster_class(profile["cluster"]).job_cls.submit_command
    unknown = SimpleNamespace(name=submit, states=lambda ids: {}, commands=(submit,))
    return SYSTEMS.get(submit, unknown)


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


def unknown_option(job_class: type, error: Exception) -> str | None:
    """What to say if `error` is that the class of a job has no option of that name; else None."""
    found = re.search(r"unexpected keyword argument '(\w+)'", str(error))
    if not found:
        return None
    known = {
        parameter.name
        for cls in job_class.__mro__
        for parameter in inspect.signature(cls).parameters.values()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    }
    near = difflib.get_close_matches(found[1], sorted(known), n=1)
    meant = f" Did you mean {near[0]}?" if near else ""
    return f"there is no option {found[1]!r}.{meant} It stands in OPTIONS, or in the profile."


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
            job = job_class("tls://SCHEDULER:PORT", name="worker-0", **options)
            script = job.job_script()
        except (TypeError, ValueError, AttributeError) as error:
            said = unknown_option(job_class, error) or f"{error}."
            raise Error(f"{profile['cluster']} refuses the profile's options: {said}") from None
        return script.replace(folder, "runs/clusters/TIME").strip() + "\n"
