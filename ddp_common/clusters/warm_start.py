"""A local cluster's zygote: torch is imported once for all workers, while they are starting."""

import os
import sys

import dask

from ddp_common.clusters.protection import private_folder
from ddp_common.worker.zygote import Zygote

HASH_SEED = "6640"  # what Dask's nanny gives its workers, so that they hash alike


def start_zygote() -> Zygote | None:
    """Start one for workers of this host; None where the system has nothing of the kind."""
    if sys.platform != "linux":
        return None
    try:
        return Zygote(private_folder(), _environment_of_workers())
    except OSError:  # a folder whose name is too long for a socket: workers do without
        return None


def _environment_of_workers():
    """What Dask's nanny makes of this process's environment.

    Where a worker finds another, because an option of its profile says so, it does without.
    """
    environment = dict(os.environ)
    for key in ("pre-spawn-environ", "environ"):
        for name, value in dask.config.get(f"distributed.nanny.{key}").items():
            if value is not None:
                environment.setdefault(name, str(value))
    if environment.get("PYTHONHASHSEED", "0") == "0":
        environment["PYTHONHASHSEED"] = HASH_SEED
    environment.pop("MALLOC_TRIM_THRESHOLD_", None)  # workers drop it: it slows every step
    return environment
