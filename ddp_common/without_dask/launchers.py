"""Which launcher other than Dask has started this process, if any. Imports nothing that takes time."""

import os

from ddp_common.ranks import slurm

LAUNCHERS = ("torchrun", "srun")


def started_by():
    """The launcher that has started this process as one of its ranks, else None."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return "torchrun"
    if slurm.in_step() and (
        int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1
        or os.environ.get("DDP_LAUNCHER") == "srun"
    ):
        return "srun"
    return None
