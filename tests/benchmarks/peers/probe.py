"""What the benchmark puts into every peer's loop: one call a step, which is not counted as code.

Each process appends a line of JSON to a file in the folder PEERS_LOG: when (s since 1970), its
rank, the epoch, how many steps are in the weights, and the samples of this step. With PEERS_FAULT
rank 1 raises, or is killed, when FAULT_STEP steps are in the weights; `mark` then holds when. It
waits before, so that a checkpoint that is written or reported in the background is there: a real
epoch is longer than this one.
"""

import json
import os
import signal
import time
from pathlib import Path

import torch.distributed as dist

FAULT_RANK = 1
FAULT_STEP = 104  # the second epoch begins after 64
MESSAGE = "a fault on purpose"
PAUSE = 3  # seconds before the fault


def stepped(model, epoch, samples):
    """Write down a step that is done. `samples` has their numbers."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    steps = steps_in(model)
    folder = os.environ.get("PEERS_LOG")
    if not folder:
        return
    line = {
        "time": time.time(),
        "rank": rank,
        "epoch": epoch,
        "steps": steps,
        "samples": samples.tolist(),
    }
    with open(Path(folder) / f"{os.getpid()}.jsonl", "a") as file:
        file.write(json.dumps(line) + "\n")
    if rank == FAULT_RANK and steps == FAULT_STEP:
        strike(os.environ.get("PEERS_FAULT"), Path(folder) / "mark")


def steps_in(model):
    """How many steps are in the weights of a model, whatever a peer has wrapped it into."""
    for name, parameter in model.named_parameters():
        if name.endswith("steps"):
            return int(parameter)
    raise LookupError("the model has no parameter `steps`")


def strike(fault, mark):
    if fault:
        time.sleep(PAUSE)
        mark.write_text(repr(time.time()))
    if fault == "raise":
        raise ValueError(MESSAGE)
    if fault == "SIGKILL":
        os.kill(os.getpid(), signal.SIGKILL)
