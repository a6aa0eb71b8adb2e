"""What ranks do that this package starts: train as in `plain_torch`, and look at tables.

    python with_ddp.py FOLDER

As a script it is a cold launch: it starts a local cluster of two workers, and then the ranks.
Ranks import this module, so it imports no more than they need.
"""

import sys
import time
from pathlib import Path

import torch
from plain_torch import (
    GLOBAL_BATCH,
    KILLED_AT,
    SAVE_EVERY,
    NextLetter,
    first_backward,
    kill_once,
    leave,
    random_letters,
    time_of,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import ddp_common as ddp


def train(folder, steps, is_killed=False, saves=False):
    """Train for so many steps, whole epochs, with a report of each; returns the weights.

    Leaves the time at which each step had ended, and that of the kill (s since 1970). With
    `saves` there is dropout, so that a resume has to restore the random state too.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    contexts, targets = random_letters()
    model = DDP(NextLetter(dropout=0.1 if saves else 0.0))
    optimizer = torch.optim.Adam(model.parameters())
    sampler = ddp.ElasticSampler(len(contexts), GLOBAL_BATCH)
    checkpoint = ddp.Checkpoint(
        model=model,
        optimizer=optimizer,
        sampler=sampler,
        every_steps=SAVE_EVERY if saves else None,
    )
    checkpoint.restore()
    mark, ended = Path(folder) / "killed", []
    for _ in sampler.epochs(steps // len(sampler)):
        for batch in sampler.batches():
            if is_killed and sampler.steps_done > KILLED_AT and ddp.rank() == 1:
                kill_once(mark)
            loss = nn.functional.cross_entropy(model(contexts[batch]), targets[batch])
            loss = loss * sampler.weight
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            checkpoint.step()
            ddp.report(loss=loss)
            ended.append(time.time())
    leave(folder, ended=ended, killed=time_of(mark))
    return nn.utils.parameters_to_vector(model.parameters()).detach()


# Tables. All values are added up: a page that nobody has read was not handed over.


def see_table(table, folder):
    leave_total(folder, (part.to_numpy() for part in table.parts))


def see_parquet(path, folder):
    import pandas as pd

    files = sorted(Path(path).glob("*.parquet"))[ddp.rank() :: ddp.world_size()]
    leave_total(folder, (pd.read_parquet(file).to_numpy() for file in files))


def see_arrays(arrays, folder):
    leave_total(folder, arrays[ddp.rank() :: ddp.world_size()])


def leave_total(folder, arrays):
    leave(folder, total=sum(float(array.sum()) for array in arrays), seen=time.time())


if __name__ == "__main__":
    folder = sys.argv[1]
    with ddp.connect("local", workers=2) as client:
        ddp.launch(client, first_backward, folder=folder, directory=f"{folder}/run")
