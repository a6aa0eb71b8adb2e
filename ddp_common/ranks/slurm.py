"""Ranks that `srun` has started: what the variables of a Slurm step say.

Slurm hands out no port. All ranks of a step derive the same few from its number; on the first of these that is free, rank 0 opens its
store, which proves to them that it belongs to the step (`store`). So two steps on one node do not meet, and a port that somebody else
holds is passed over.
"""

import os
import re
import shutil
import socket
import subprocess

from ddp_common.errors import Error
from ddp_common.ranks.place import LOOPBACK, Place

FIRST_PORT, PORTS = (
    15_000,
    17_000,
)  # below the range from which systems take ports for outgoing connections
CANDIDATES = 4
NEEDED = (
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_STEP_NODELIST",
)


def in_step():
    """Whether `srun` has started this process. A batch script by itself is no step: it has no number of one."""
    return "SLURM_STEP_ID" in os.environ and "SLURM_PROCID" in os.environ


def place():
    """This process's `Place` in its step of several tasks; None outside of one. Raises `Error` if variables are missing."""
    if not in_step():
        return None
    missing = [name for name in NEEDED if name not in os.environ]
    if missing:
        raise Error(
            f"srun has started this process, but {', '.join(missing)} is not set. A wrapper (sudo, env -i, a container) may have "
            "dropped it: hand on all SLURM_ variables, or start the ranks with torchrun."
        )
    return Place(
        int(os.environ["SLURM_PROCID"]),
        int(os.environ["SLURM_STEP_NUM_TASKS"]),
        int(os.environ["SLURM_LOCALID"]),
        LOOPBACK
        if os.environ.get("SLURM_STEP_NUM_NODES") == "1"
        else first_host(os.environ["SLURM_STEP_NODELIST"]),
    )


def token():
    return f"slurm-{os.environ['SLURM_JOB_ID']}.{os.environ['SLURM_STEP_ID']}"


def candidates():
    """The ports on which the store of this step may be."""
    job, step = int(os.environ["SLURM_JOB_ID"]), int(os.environ["SLURM_STEP_ID"])
    return [
        FIRST_PORT + (job * 101 + step * 7 + candidate * 4_001) % PORTS
        for candidate in range(CANDIDATES)
    ]


def open_port(address):
    """A socket that listens on the first of them that is free, on `address` only if that is LOOPBACK. Raises OSError if none is."""
    listener = socket.socket()
    for candidate in candidates():
        try:
            listener.bind((LOOPBACK if address == LOOPBACK else "", candidate))
            listener.listen(1024)
            return listener
        except OSError:
            continue
    listener.close()
    raise OSError(f"the ports {candidates()} are all taken on this host")


def first_host(nodes):
    """The host of rank 0: the first of a node list such as n[07-09,12] or gpu-a,gpu-b."""
    if shutil.which("scontrol"):
        found = subprocess.run(
            ["scontrol", "show", "hostnames", nodes], capture_output=True, text=True
        )
        if found.returncode == 0 and found.stdout.split():
            return found.stdout.split()[0]
    match = re.match(r"([^\[,]+)(?:\[(\d+)[^\]]*\]([^,]*))?", nodes)
    return "".join(part for part in match.groups() if part)
