"""Exchange plain values between ranks as JSON, where torch's object collectives would unpickle.

Whoever sends a pickle has its reader run code. JSON is data, whoever sent it.
"""

import json
from typing import Any

import torch
import torch.distributed as dist


def told_by_rank_0(value: Any) -> Any:
    """Rank 0's value, which is what JSON can hold, on every rank. A collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    text = json.dumps(value).encode() if dist.get_rank() == 0 else b""
    length = torch.tensor([len(text)], device=device)
    dist.broadcast(length, src=0)
    content = torch.frombuffer(bytearray(text.ljust(int(length))), dtype=torch.uint8).to(device)
    dist.broadcast(content, src=0)
    return json.loads(bytes(content.cpu().numpy()))


def gather(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """The values of all ranks, in their order, on every rank; each is what JSON can hold.

    A collective: every rank of the group calls it. The tensors are on the CPU with gloo, on this
    rank's GPU with NCCL.
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return [value]
    world = dist.get_world_size(group)
    device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
    text = json.dumps(value).encode()
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(world)]
    dist.all_gather(lengths, torch.tensor([len(text)], device=device), group=group)
    longest = max(int(length) for length in lengths)
    padded = bytearray(text.ljust(longest))
    mine = torch.frombuffer(padded, dtype=torch.uint8).to(device)
    everyone = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(everyone, mine, group=group)
    return [json.loads(bytes(each.cpu().numpy())) for each in everyone]
