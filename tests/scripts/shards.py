"""FSDP2 on a DeviceMesh, with a checkpoint of torch's own, saved and loaded again.

shards.py FOLDER
"""

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def sharded(mesh):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
model, optimizer = sharded(mesh)
for step in range(6):
    if step == 3:
        dcp.save({"model": model.state_dict()}, checkpoint_id=sys.argv[1])
        model, optimizer = sharded(mesh)
        state = {"model": model.state_dict()}
        dcp.load(state, checkpoint_id=sys.argv[1])
        model.load_state_dict(state["model"])
    torch.manual_seed(10 * step + dist.get_rank())
    loss = (model(torch.randn(8, 4)) - 1).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.all_reduce(loss.detach())
if dist.get_rank() == 0:
    print("RESULT", loss.item())
dist.destroy_process_group()
