"""Exchange plain values between ranks as JSON, where torch's object collectives would unpickle.

Whoever sends a pickle has its reader run code. JSON is data, whoever sent it.
"""

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ddp_common.errors import Error
from ddp_common.ranks.rendezvous import rank, world_size


def told_by(source: int, value: Any) -> Any:
    """That rank's value, which is what JSON can hold, on every rank. A collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    text = json.dumps(value).encode() if dist.get_rank() == source else b""
    length = torch.tensor([len(text)], device=device)
    dist.broadcast(length, src=source)
    content = torch.frombuffer(bytearray(text.ljust(int(length))), dtype=torch.uint8).to(device)
    dist.broadcast(content, src=source)
    return json.loads(bytes(content.cpu().numpy()))


def asked_of_rank_0(ask: Callable[[], Any]) -> Any:
    """What `ask()` returns, or the `Error` that it raises, on every rank; only rank 0 asks.

    It returns what JSON can hold. A collective.
    """
    answer = problem = None
    if rank() == 0 or not dist.is_initialized():
        try:
            answer = ask()
        except Error as error:
            problem = str(error)
    answer, problem = told_by(0, [answer, problem])
    if problem is not None:
        raise Error(problem)
    return answer


def gather(value: Any) -> list[Any]:
    """The values of all ranks, in their order, on every rank. A collective."""
    return [told_by(source, value) for source in range(world_size())]
