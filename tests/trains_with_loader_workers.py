"""A script that trains for minutes, with DataLoader workers; for torchrun and srun.

START_METHOD is that of the workers, STEPS is the length of an epoch. From the sixth step of an
epoch on each is one call of C, of a second or two, in which the rank does not see a signal. At the
beginning of an epoch its workers start.
"""

import os

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import ddp_common as ddp


def train():
    torch.manual_seed(0)  # the same data on all ranks
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = TensorDataset(torch.randn(100_000, 8))
    sampler = ddp.ElasticSampler(len(data), 10, steps=int(os.environ["STEPS"]))
    checkpoint = ddp.Checkpoint(model=model, optimizer=optimizer, sampler=sampler, every_steps=5)
    checkpoint.restore()
    for _ in sampler.epochs(1000):
        loader = ddp.DataLoader(
            data,
            batch_sampler=sampler,
            num_workers=2,
            multiprocessing_context=os.environ["START_METHOD"],
        )
        for (batch,) in loader:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            checkpoint.step()
            if sampler.step > 5:
                sum(range(10**8))


if __name__ == "__main__":
    with ddp.connect() as client:
        ddp.launch(client, train, directory=os.environ["RUN_DIRECTORY"])
