"""A script that trains for a minute or two, with DataLoader workers; for torchrun and srun."""

import os
import time

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import ddp_common as ddp


def train():
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = TensorDataset(torch.randn(100_000, 8))
    sampler = ddp.ElasticSampler(len(data), 10)
    ddp.Checkpoint(model=model, optimizer=optimizer, sampler=sampler, every_steps=5)
    for _ in sampler.epochs(1):
        for (batch,) in ddp.DataLoader(data, batch_sampler=sampler, num_workers=2):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            time.sleep(0.02)


if __name__ == "__main__":
    with ddp.connect() as client:
        ddp.launch(client, train, directory=os.environ["RUN_DIRECTORY"])
