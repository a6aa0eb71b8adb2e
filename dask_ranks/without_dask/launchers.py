"""Launchers other than Dask: which one has started this process, and what `srun` leaves unset.

Slurm hands out no port, so all ranks of a step derive one from its number. Two steps on one node
rarely get the same; where they do, or where another program holds it, rank 0 says so, and
MASTER_PORT chooses another one.
Promises: it imports nothing that takes time, so that the command line can ask.
"""

import os
import re

from ddp_common.errors import Error

LAUNCHERS = ("torchrun", "srun")  # those that `make run` can start
MPI = ("OMPI_COMM_WORLD", "PMI")  # how variables of Open MPI begin; of MPICH and Intel MPI
FIRST_PORT = 15_000
PORTS = 17_000  # so many: they end below the range that systems use for outgoing connections
NEEDED = "PROCID LOCALID JOB_ID STEP_ID STEP_NUM_TASKS STEP_NODELIST".split()  # after SLURM_


def started_by() -> str | None:
    """The launcher that has started this process as one of several ranks, else None.

    Besides torchrun and srun that may be 'env://', as torch calls it where RANK, WORLD_SIZE,
    MASTER_ADDR and MASTER_PORT come from anywhere else, such as Kubeflow. Raises `Error` in a
    process of mpiexec without them: it would train alone.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return "torchrun"
    if in_slurm_step():
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


def in_slurm_step() -> bool:
    """Whether `srun` has started this process. A batch script alone has no number of a step."""
    return "SLURM_STEP_ID" in os.environ and "SLURM_PROCID" in os.environ


def set_variables_of_slurm() -> None:
    """Set what torchrun would set for this process of a step of Slurm.

    MASTER_ADDR and MASTER_PORT are as the user has set them, if so. Raises `Error` if variables of
    Slurm are missing.
    """
    missing = [f"SLURM_{name}" for name in NEEDED if f"SLURM_{name}" not in os.environ]
    if missing:
        raise Error(
            f"srun has started this process, but {', '.join(missing)} is not set. A wrapper "
            "(sudo, env -i, a container) may have dropped it: hand on all SLURM_ variables, or "
            "start the ranks with torchrun."
        )
    job, step = os.environ["SLURM_JOB_ID"], os.environ["SLURM_STEP_ID"]
    is_one_host = os.environ.get("SLURM_STEP_NUM_NODES") == "1"
    address = "127.0.0.1" if is_one_host else first_host(os.environ["SLURM_STEP_NODELIST"])
    variables = {
        "RANK": os.environ["SLURM_PROCID"],
        "WORLD_SIZE": os.environ["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": os.environ["SLURM_LOCALID"],
        "MASTER_ADDR": os.environ.get("MASTER_ADDR", address),
        "MASTER_PORT": os.environ.get("MASTER_PORT", str(port(int(job), int(step)))),
        "DDP_RUN_ID": f"slurm-{job}.{step}",
    }
    os.environ.update(variables)


def port(job: int, step: int) -> int:
    """The port of a step's store."""
    return FIRST_PORT + (job * 101 + step * 7) % PORTS


def first_host(nodes: str) -> str:
    """The host of rank 0: the first of a node list such as n[07-09,12] or gpu-a,gpu-b."""
    first = re.match(r"([^\[,]|\[[^\]]*\])+", nodes)
    assert first is not None, f"{nodes!r} does not begin with a host"
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0])
