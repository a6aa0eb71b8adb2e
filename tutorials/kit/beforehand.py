"""What is checked before anything is started or written: the settings, the folder, the workers.

Every check raises `Error` with what to do; together they save the minutes until a cluster is up.
"""

import os
from pathlib import Path

from dask_ranks.clusters.profiles import may_have_gpus, number_of_workers, read_profile
from dask_ranks.run.folders import check_folder, local
from dask_ranks.run.job import whole_number
from dask_ranks.without_dask.launchers import LAUNCHERS
from ddp_common.checkpoint_files import newest
from ddp_common.errors import Error
from tutorials import kit
from tutorials.kit.cells import cells_with_tag
from tutorials.kit.parameters import config_of


def check_choices(path: Path, workers: str | int | None) -> int | None:
    """Check everything that the environment says for the tutorial in the file `path`.

    Returns the number of workers; None if that is yet to be seen: at an address, or where there
    may be GPUs. Raises `Error` for anything that cannot be.
    """
    check_settings(path)
    if os.environ.get("CHECKPOINT"):
        check_folder(os.environ["CHECKPOINT"])
    cluster = os.environ.get("CLUSTER") or "local"
    check_launcher(cluster)
    profile = {"workers": "auto"} if cluster in LAUNCHERS else read_profile(cluster)
    wanted = workers or profile["workers"]
    if wanted == "auto" and ("://" in cluster or may_have_gpus()):
        return None
    return number_of_workers(wanted)


def check_launcher(cluster: str):
    """Raise `Error` for a choice that torchrun or srun would not follow."""
    if cluster not in LAUNCHERS:
        return
    restarts = whole_number("RESTARTS", os.environ.get("RESTARTS") or 0, least=0)
    if cluster == "srun" and restarts:
        raise Error(
            f"RESTARTS={restarts}: srun starts its ranks once. Leave it out, or use CLUSTER=slurm "
            "or torchrun, which start them again."
        )


def check_cluster(cluster: str):
    """Raise `Error` where there are no commands of the batch system, or no such options."""
    from dask_ranks.clusters.connect import check  # imports distributed

    if cluster not in LAUNCHERS and "://" not in cluster:
        check(cluster)


def check_settings(path: Path):
    """Let the tutorial's own call of `settings` check SET, PRESET, RESUME and CHECKPOINT.

    It is in the cell with the tag 'parameters'.
    """
    cell = cells_with_tag(path.read_text(), "parameters")
    try:
        exec(compile(cell, path, "exec"), {"__name__": "__main__", "kit": kit})
    except NameError:
        return  # a cell that needs more of the program than `kit` is checked when its turn comes


def check_resumable(directory: str | None):
    """Raise `Error` unless the run in `directory`, that of RESUME, has a checkpoint."""
    if not directory:
        return
    config_of(directory)
    if newest(local(directory) / "checkpoints") is None:
        raise Error(
            f"RESUME={directory}: there is no checkpoint in that folder to go on from. "
            "Start a new run."
        )
