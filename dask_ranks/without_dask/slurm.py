"""Ranks that `srun` has started: the variables of a Slurm step, put as torchrun would put them.

Slurm hands out no port, so all ranks of a step derive one from its number. Two steps on one node
rarely get the same; where they do, or where another program holds it, rank 0 says so, and
MASTER_PORT chooses another one.
"""

import os
import re
import shutil
import subprocess

from ddp_common.errors import Error

LOOPBACK = "127.0.0.1"  # where ranks meet that are all on one host
FIRST_PORT = 15_000
PORTS = 17_000  # so many: they end below the range that systems use for outgoing connections
NEEDED = (
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_STEP_NODELIST",
)


def in_step() -> bool:
    """Whether `srun` has started this process. A batch script alone has no number of a step."""
    return "SLURM_STEP_ID" in os.environ and "SLURM_PROCID" in os.environ


def set_variables() -> None:
    """Set what torchrun would set for this process of a step.

    MASTER_ADDR and MASTER_PORT are as the user has set them, if so. Raises `Error` if variables of
    Slurm are missing.
    """
    missing = [name for name in NEEDED if name not in os.environ]
    if missing:
        raise Error(
            f"srun has started this process, but {', '.join(missing)} is not set. A wrapper "
            "(sudo, env -i, a container) may have dropped it: hand on all SLURM_ variables, or "
            "start the ranks with torchrun."
        )
    job, step = os.environ["SLURM_JOB_ID"], os.environ["SLURM_STEP_ID"]
    if os.environ.get("SLURM_STEP_NUM_NODES") == "1":
        address = LOOPBACK
    else:
        address = first_host(os.environ["SLURM_STEP_NODELIST"])
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
    if shutil.which("scontrol"):
        command = ["scontrol", "show", "hostnames", nodes]
        found = subprocess.run(command, capture_output=True, text=True)
        hosts = found.stdout.split()
        if found.returncode == 0 and hosts:
            return hosts[0]
    prefix_number_suffix = re.match(r"([^\[,]+)(?:\[(\d+)[^\]]*\]([^,]*))?", nodes)
    assert prefix_number_suffix is not None, f"{nodes!r} does not begin with a host"
    return "".join(part for part in prefix_number_suffix.groups() if part)
