"""Train a small model that waits for what is to happen to it: SET="pause=1".

A script, and a tutorial for a repository of which it is the only one. The run directory is
CHECKPOINT or RESUME.

Until the run has been resumed, or a file is there whose path is the setting `until`, each step is
followed by a pause of so many seconds, in which other tests have the cores. The weights depend on
the steps alone, so a run without pauses tells what they should be. Every second step is saved.
"""

import os
import time

import torch
from torch.nn.parallel import DistributedDataParallel as DDP

import ddp_common as ddp
from tutorials import kit

STEPS = 200
BATCH = 16


def train(pause, until):
    torch.manual_seed(0)
    x = torch.randn(STEPS * BATCH, 4)
    y = x.sum(1, keepdim=True)
    model = DDP(torch.nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    sampler = ddp.ElasticSampler(len(x), BATCH, seed=1)
    checkpoint = ddp.Checkpoint(model=model, optimizer=optimizer, sampler=sampler, every_steps=2)
    hurries = checkpoint.restore() is not None
    for _ in sampler.epochs(1):
        for rows in sampler.batches():
            loss = torch.nn.functional.mse_loss(model(x[rows]), y[rows]) * sampler.weight
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            checkpoint.step()
            ddp.report(loss=loss)
            hurries = hurries or os.path.exists(until)
            time.sleep(0 if hurries else pause)
    checkpoint.save()


def main():
    settings = kit.settings("in_no_hurry", pause=0.0, until="")
    with ddp.connect() as client:
        ddp.launch(client, train, **kit.launch_options(), **vars(settings))
    print("Trained in no hurry.")  # as a job's words after its launch: only rank 0 is heard


if __name__ == "__main__":
    main()
