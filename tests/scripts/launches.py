"""A program of this package, which finds the ranks that are there."""

import torch
from torch.nn.parallel import DistributedDataParallel as DDP

import ddp_common as ddp


def train(steps):
    torch.manual_seed(0)
    x = torch.randn(64, 3)
    model = DDP(torch.nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler = ddp.ElasticSampler(len(x), 8)
    checkpoint = ddp.Checkpoint(model=model, optimizer=optimizer, sampler=sampler)
    checkpoint.restore()
    for _ in sampler.epochs(2):
        for rows in sampler.batches():
            loss = (model(x[rows]) - x[rows].sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            (loss * sampler.weight).backward()
            optimizer.step()
            checkpoint.step()
            ddp.report(loss=loss)
        checkpoint.save()
    return model.module.weight.norm().item()


if __name__ == "__main__":
    with ddp.connect() as client:
        run = ddp.launch(client, train, steps=3)
    print("RESULT", run.result, flush=True)
