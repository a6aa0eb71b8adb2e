"""Launchers other than Dask: which one has started this process.

Promises: it imports nothing that takes time, so that the command line can ask.
"""

import os

from dask_ranks.without_dask import slurm
from ddp_common.errors import Error

LAUNCHERS = ("torchrun", "srun")  # those that `make run` can start
MPI = ("OMPI_COMM_WORLD", "PMI")  # how variables of Open MPI begin; of MPICH and Intel MPI


def started_by() -> str | None:
    """The launcher that has started this process as one of several ranks, else None.

    Besides torchrun and srun that may be 'env://', as torch calls it where RANK, WORLD_SIZE,
    MASTER_ADDR and MASTER_PORT come from anywhere else, such as Kubeflow. Raises `Error` in a
    process of mpiexec without them: it would train alone.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return "torchrun"
    if slurm.in_step():
        tasks = int(os.environ.get("SLURM_STEP_NUM_TASKS") or 1)
        if tasks > 1 or os.environ.get("DDP_LAUNCHER") == "srun":
            return "srun"
    if int(os.environ.get("WORLD_SIZE") or 1) > 1:
        return "env://"
    for prefix in MPI:
        if int(os.environ.get(f"{prefix}_SIZE") or 1) > 1:
            raise Error(
                "mpiexec has started this process as one of several, but RANK, WORLD_SIZE, "
                "MASTER_ADDR and MASTER_PORT are not set. Export the last two, and write: "
                "mpiexec -n 8 sh -c "
                f"'RANK=${prefix}_RANK WORLD_SIZE=${prefix}_SIZE exec python train.py'"
            )
    return None
