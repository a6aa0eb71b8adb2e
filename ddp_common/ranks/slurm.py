"""Ranks that `srun` has started: what the variables of a Slurm step say.

Slurm hands out no port. All ranks of a step derive the same few from its number. Rank 0 opens its
store on the first of these that is free, and the store proves that it belongs to the step
(`store`). So two steps on one node do not meet, and a port that another program holds is skipped.
"""

import os
import re
import shutil
import socket
import subprocess

from ddp_common.errors import Error
from ddp_common.ranks.place import LOOPBACK, Place

FIRST_PORT = 15_000
PORTS = 17_000  # so many: they end below the range that systems use for outgoing connections
CANDIDATES = 4
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


def place() -> Place | None:
    """This process's place in its step, None outside of one.

    Raises `Error` if variables are missing.
    """
    if not in_step():
        return None
    missing = [name for name in NEEDED if name not in os.environ]
    if missing:
        raise Error(
            f"srun has started this process, but {', '.join(missing)} is not set. A wrapper "
            "(sudo, env -i, a container) may have dropped it: hand on all SLURM_ variables, or "
            "start the ranks with torchrun."
        )
    if os.environ.get("SLURM_STEP_NUM_NODES") == "1":
        address = LOOPBACK
    else:
        address = first_host(os.environ["SLURM_STEP_NODELIST"])
    return Place(
        rank=int(os.environ["SLURM_PROCID"]),
        world_size=int(os.environ["SLURM_STEP_NUM_TASKS"]),
        local_rank=int(os.environ["SLURM_LOCALID"]),
        address=address,
    )


def token() -> str:
    """The name of this step, which no other step of the cluster has."""
    return f"slurm-{os.environ['SLURM_JOB_ID']}.{os.environ['SLURM_STEP_ID']}"


def candidates() -> list[int]:
    """The ports on which the store of this step may be, in the order rank 0 tries them."""
    job = int(os.environ["SLURM_JOB_ID"])
    step = int(os.environ["SLURM_STEP_ID"])
    return [
        FIRST_PORT + (job * 101 + step * 7 + candidate * 4_001) % PORTS
        for candidate in range(CANDIDATES)
    ]


def open_port(address: str) -> socket.socket:
    """A socket that listens on the first candidate that is free.

    It listens on loopback only if that is the `address`. Raises OSError if no candidate is free.
    """
    host = LOOPBACK if address == LOOPBACK else ""
    listener = socket.socket()
    for port in candidates():
        try:
            listener.bind((host, port))
            listener.listen(1024)
            return listener
        except OSError:
            continue
    listener.close()
    raise OSError(f"the ports {candidates()} are all taken on this host")


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
