"""Exchange plain values between ranks as JSON, where torch's object collectives would unpickle.

Whoever sends a pickle has its reader run code. JSON is data, whoever sent it.
"""

import json
from typing import Any

import torch
import torch.distributed as dist

from ddp_common.ranks.rendezvous import world_size


def told_by(rank: int, value: Any) -> Any:
    """That rank's value, which is what JSON can hold, on every rank. A collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    text = json.dumps(value).encode() if dist.get_rank() == rank else b""
    length = torch.tensor([len(text)], device=device)
    dist.broadcast(length, src=rank)
    content = torch.frombuffer(bytearray(text.ljust(int(length))), dtype=torch.uint8).to(device)
    dist.broadcast(content, src=rank)
    return json.loads(bytes(content.cpu().numpy()))


def gather(value: Any) -> list[Any]:
    """The values of all ranks, in their order, on every rank. A collective."""
    return [told_by(rank, value) for rank in range(world_size())]
