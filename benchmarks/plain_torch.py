"""The alternative: a script for torchrun, as one writes it without this package.

    torchrun --nproc-per-node=2 plain_torch.py FUNCTION FOLDER [NUMBER …]

Each rank leaves what it has measured in FOLDER/<rank>.json. The model is that of the tutorial
`pets`; its batches are random characters.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

LETTERS, WIDTH, GLOBAL_BATCH, BATCHES = 31, 8, 512, 50
SAVE_EVERY, KILLED_AT = 10, 25  # steps, of a training that is killed


class NextLetter(nn.Module):
    """An LSTM that reads WIDTH characters, int64 (batch, WIDTH), and scores the next one.

    The scores have the shape (batch, LETTERS).
    """

    def __init__(self, dropout=0.0):
        super().__init__()
        self.embedding = nn.Embedding(LETTERS, 32)
        self.lstm = nn.LSTM(32, 64, num_layers=2, batch_first=True, dropout=dropout)
        self.scores = nn.Linear(64, LETTERS)

    def forward(self, contexts):
        return self.scores(self.lstm(self.embedding(contexts))[0][:, -1])


def random_letters():
    """Contexts (n, WIDTH) and the characters that follow (n,), the same on each rank."""
    generator = torch.Generator().manual_seed(0)
    samples = GLOBAL_BATCH * BATCHES
    contexts = torch.randint(LETTERS, (samples, WIDTH), generator=generator)
    return contexts, torch.randint(LETTERS, (samples,), generator=generator)


def leave(folder, **values):
    (Path(folder) / f"{dist.get_rank()}.json").write_text(json.dumps(values))


def first_backward(folder):
    """Leaves the time (s since 1970) at which this rank has finished its first backward."""
    torch.set_num_threads(1)
    contexts, targets = random_letters()
    share = GLOBAL_BATCH // dist.get_world_size()
    scores = DDP(NextLetter())(contexts[:share])
    nn.functional.cross_entropy(scores, targets[:share]).backward()
    leave(folder, finished=time.time())


def train(folder, steps, is_killed):
    """Train for so many steps; leaves the time (s since 1970) at which each had ended.

    With `is_killed`, rank 1 is killed the first time. Started again in the same folder, the ranks
    go on from the last save, and leave the time of the kill as well.
    """
    torch.set_num_threads(1)
    contexts, targets = random_letters()
    model = DDP(NextLetter())
    optimizer = torch.optim.Adam(model.parameters())
    saved, mark, first, ended = Path(folder) / "saved.pt", Path(folder) / "killed", 0, []
    if saved.exists():
        state = torch.load(saved)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    for step in range(first, steps):
        if step == first or step % BATCHES == 0:
            batches = own_batches(epoch=step // BATCHES)
        if is_killed and step == KILLED_AT and dist.get_rank() == 1:
            kill_once(mark)
        batch = batches[step % BATCHES]
        loss = nn.functional.cross_entropy(model(contexts[batch]), targets[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ended.append(time.time())
        if is_killed and (step + 1) % SAVE_EVERY == 0 and dist.get_rank() == 0:
            parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**parts, "step": step + 1}, saved.with_suffix(".new"))
            saved.with_suffix(".new").rename(saved)
    leave(folder, ended=ended, killed=time_of(mark))


def own_batches(epoch):
    """The shuffled indices of this rank: a tensor for each step."""
    generator = torch.Generator().manual_seed(epoch)
    order = torch.randperm(GLOBAL_BATCH * BATCHES, generator=generator)
    return order[dist.get_rank() :: dist.get_world_size()].chunk(BATCHES)


def kill_once(mark):
    """Kill this process, unless it has been done before: then there is the file `mark`."""
    if not mark.exists():
        mark.write_text(repr(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)


def time_of(mark):
    """When the kill was (s since 1970); None without one."""
    return float(mark.read_text()) if mark.exists() else None


if __name__ == "__main__":
    name, folder, *numbers = sys.argv[1:]
    dist.init_process_group("gloo")
    globals()[name](folder, *map(int, numbers))
    dist.barrier()
    os._exit(0)  # torch 2.13 sometimes hangs where a gloo group is destroyed after a backward
