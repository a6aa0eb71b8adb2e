"""Gradients of several batches with no_sync, bfloat16, and an average of weights."""

import contextlib

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(
        torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.GELU(), torch.nn.Linear(16, 1))
    )
    average = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(dist.get_rank())
    for step in range(12):
        is_last = step % 4 == 3
        x = torch.randn(8, 6)
        with model.no_sync() if not is_last else contextlib.nullcontext():
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            (loss / 4).backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model.module)
    norm = sum(parameter.norm() for parameter in average.parameters())
    if dist.get_rank() == 0:
        print("RESULT", norm.item())
    dist.destroy_process_group()


main()
