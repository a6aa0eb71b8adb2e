"""The training under ddp_common, as README.md has it (Your own model)."""

import probe
import task
import torch
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

import ddp_common as ddp


def train():
    torch.manual_seed(0)
    data = task.data()
    sampler = ddp.ElasticSampler(len(data), batch_size=task.BATCH)
    model = DDP(task.Network())
    optimizer = torch.optim.SGD(model.parameters(), lr=task.LEARNING_RATE)
    checkpoint = ddp.Checkpoint(
        model=model, optimizer=optimizer, sampler=sampler, every_steps=task.SAVE_EVERY
    )
    checkpoint.restore()
    for epoch in sampler.epochs(task.EPOCHS):
        for rows, classes, samples in DataLoader(data, batch_sampler=sampler):
            loss = cross_entropy(model(rows), classes) * sampler.weight
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            probe.stepped(model, epoch, samples)


def main(client):
    ddp.launch(client, train, directory="run")


if __name__ == "__main__":
    with ddp.connect("local", workers=task.RANKS) as client:
        main(client)
