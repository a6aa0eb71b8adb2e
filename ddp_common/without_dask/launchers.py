"""Launchers other than Dask: which one has started this process, and the command of each.

Promises: it imports nothing that takes time, so that the command line can ask.
"""

import os
import sys

from ddp_common.ranks import slurm

LAUNCHERS = ("torchrun", "srun")


def started_by() -> str | None:
    """The launcher that has started this process as one of its ranks, else None."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return "torchrun"
    if not slurm.in_step():
        return None
    tasks = int(os.environ.get("SLURM_STEP_NUM_TASKS", 1))
    if tasks > 1 or os.environ.get("DDP_LAUNCHER") == "srun":
        return "srun"
    return None


def command(launcher: str, tutorial: str, workers: int, restarts: int) -> list[str]:
    """The command line by which torchrun or srun starts the ranks."""
    program = ["-m", "ddp_common", "run", tutorial]
    if launcher == "srun":
        return ["srun", f"--ntasks={workers}", "--kill-on-bad-exit=1", sys.executable, *program]
    return [
        "torchrun",
        "--standalone",
        f"--nproc-per-node={workers}",
        f"--max-restarts={restarts}",
        *program,
    ]
