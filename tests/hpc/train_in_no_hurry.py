"""Train a small model that waits for what is to happen to it: `train_in_no_hurry.py PAUSE`.

Until the run has been resumed, each of its thousand steps is followed by a pause of so many
seconds, in which other tests have the cores. The weights depend on the steps alone, so a run
without pauses tells what they should be. Every tenth step is saved, in CHECKPOINT, the run
directory.
"""

import os
import sys
import time

import torch
from torch.nn.parallel import DistributedDataParallel as DDP

import ddp_common as ddp

STEPS = 1_000
BATCH = 16


def train(pause):
    torch.manual_seed(0)
    x = torch.randn(STEPS * BATCH, 4)
    y = x.sum(1, keepdim=True)
    model = DDP(torch.nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    sampler = ddp.ElasticSampler(len(x), BATCH, seed=1)
    checkpoint = ddp.Checkpoint(model=model, optimizer=optimizer, sampler=sampler, every_steps=10)
    is_resumed = checkpoint.restore() is not None
    for _ in sampler.epochs(1):
        for rows in sampler:
            loss = torch.nn.functional.mse_loss(model(x[rows]), y[rows]) * sampler.weight
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ddp.report(loss=loss)
            time.sleep(0 if is_resumed else pause)
    checkpoint.save()


def main():
    pause = float(sys.argv[1])
    with ddp.connect() as client:
        ddp.launch(client, train, pause=pause, directory=os.environ["CHECKPOINT"])


if __name__ == "__main__":
    main()
