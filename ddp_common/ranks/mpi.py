"""Ranks that `mpiexec` has started: the variables of Open MPI, MPICH and Intel MPI.

They tell a process its rank, but not where rank 0 is: MASTER_ADDR and MASTER_PORT have to be set,
the same for all ranks.
"""

import os

from ddp_common.ranks import slurm

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
# The same by the names of others
OPEN_MPI = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")
MPICH = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID")  # Intel MPI has these too


def variables() -> dict[str, str]:
    """What torchrun would set for this process, as far as mpiexec knows it.

    That is RANK, WORLD_SIZE and mostly LOCAL_RANK; {} where no mpiexec has started it, or none
    but it.
    """
    for names in (OPEN_MPI, MPICH):
        values = [os.environ.get(name, "") for name in names]
        known = {as_torchrun: value for as_torchrun, value in zip(TORCHRUN, values) if value}
        is_one_of_several = "RANK" in known and int(known.get("WORLD_SIZE", 1)) > 1
        if is_one_of_several and not (names == MPICH and _is_of_srun(known["WORLD_SIZE"])):
            return known
    return {}


def _is_of_srun(size: str) -> bool:
    """srun sets these variables as well; an mpiexec inside of a step counts otherwise."""
    return slurm.in_step() and os.environ.get("SLURM_STEP_NUM_TASKS") == size
