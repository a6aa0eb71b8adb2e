"""Train on random numbers and print the mean loss of all ranks.

torchrun --standalone --nproc-per-node 2 broken_loop.py SEED
"""

import datetime
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

EPOCHS = 2
STEPS = 4


def main(seed):
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=20))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(seed + rank)
    model = DDP(nn.Linear(10, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(EPOCHS):
        total = torch.zeros(())
        for step in range(STEPS):
            inputs = torch.randn(16, 10)
            loss = F.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)  # all ranks call it
        if rank == 0:
            print(f"epoch {epoch}: mean loss {total / STEPS / world_size:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]))
