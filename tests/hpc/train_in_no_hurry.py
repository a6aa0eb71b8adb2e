"""Train a small model for a while without computing much: `train_in_no_hurry.py STEPS PAUSE`.

Each step is followed by a pause of so many seconds, in which other tests have the cores. The
weights depend on the number of steps alone, so a run without pauses tells what they should be.
Every tenth step is saved. The run directory is CHECKPOINT.
"""

import os
import sys
import time

import torch
from torch.nn.parallel import DistributedDataParallel as DDP

import ddp_common as ddp

BATCH = 16


def train(steps, pause):
    torch.manual_seed(0)
    x = torch.randn(steps * BATCH, 4)
    y = x.sum(1, keepdim=True)
    model = DDP(torch.nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    sampler = ddp.ElasticSampler(len(x), BATCH, seed=1)
    checkpoint = ddp.Checkpoint(model=model, optimizer=optimizer, sampler=sampler, every_steps=10)
    checkpoint.restore()
    for _ in sampler.epochs(1):
        for rows in sampler:
            loss = torch.nn.functional.mse_loss(model(x[rows]), y[rows]) * sampler.weight
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ddp.report(loss=loss)
            time.sleep(pause)
    checkpoint.save()


def main():
    steps, pause = int(sys.argv[1]), float(sys.argv[2])
    with ddp.connect() as client:
        ddp.launch(client, train, steps=steps, pause=pause, directory=os.environ["CHECKPOINT"])


if __name__ == "__main__":
    main()
