"""A module beside the script makes the group, as timm or a trainer does; and once more."""

import torch
from beside import device_and_rank
from torch.nn.parallel import DistributedDataParallel as DDP

device, rank = device_and_rank()
device_and_rank()
torch.manual_seed(rank)
model = DDP(torch.nn.Linear(2, 1).to(device))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    x = torch.randn(4, 2, device=device)
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
if rank == 0:
    print("RESULT", model.module.weight.norm().item())
