"""Launchers other than Dask: which one has started this process.

Promises: it imports nothing that takes time, so that the command line can ask.
"""

import os

from ddp_common.ranks import mpi, slurm

LAUNCHERS = ("torchrun", "srun")  # those that `make run` can start


def started_by() -> str | None:
    """The launcher that has started this process as one of several ranks, else None.

    Besides torchrun and srun that may be 'mpiexec', or 'env://', as torch calls it where RANK,
    WORLD_SIZE, MASTER_ADDR and MASTER_PORT come from anywhere else, such as Kubeflow.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return "torchrun"
    if mpi.variables():
        return "mpiexec"
    if slurm.in_step():
        tasks = int(os.environ.get("SLURM_STEP_NUM_TASKS", 1))
        if tasks > 1 or os.environ.get("DDP_LAUNCHER") == "srun":
            return "srun"
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        return "env://"
    return None
