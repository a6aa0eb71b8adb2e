"""What stands beside a script."""

import os

import torch
import torch.distributed as dist


def device_and_rank():
    if not dist.is_initialized():
        dist.init_process_group(backend="gloo", init_method="env://")
    return torch.device("cpu"), int(os.environ["RANK"])
