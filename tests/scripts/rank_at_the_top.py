"""No function: RANK is read at the top, settings come from a file of YAML beside the data."""

import argparse
import os
import sys

import torch
import torch.distributed as dist
import yaml

RANK = int(os.environ.get("RANK", 0))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))
MASTER = RANK == 0

parser = argparse.ArgumentParser()
parser.add_argument("--config", default="config.yaml")
with open(parser.parse_args().config) as file:  # relative to the folder of who starts it
    config = yaml.safe_load(file)

dist.init_process_group()
torch.manual_seed(1337 + RANK)
model = torch.nn.Linear(3, 1)
model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
for step in range(config["steps"]):
    x = torch.randn(config["batch"] // WORLD_SIZE, 3)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
if MASTER:
    with open("out.txt", "w") as file:  # and so is this
        file.write(str(loss.item()))
    print("RESULT", loss.item())
dist.destroy_process_group()
sys.exit(0)
