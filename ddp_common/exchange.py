"""Exchange plain values between ranks as JSON, where torch's object collectives would unpickle.

Whoever sends a pickle has its reader run code. JSON is data, whoever sent it.
"""

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ddp_common.errors import Error
from ddp_common.rendezvous import rank

SHORT = 2**14  # bytes that are gathered at once


def asked_of_rank_0(ask: Callable[[], Any]) -> Any:
    """What `ask()` returns, or the `Error` that it raises, on every rank; only rank 0 asks.

    It returns what JSON can hold. A collective.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return ask()
    answer = problem = None
    if rank() == 0:
        try:
            answer = ask()
        except Error as error:
            problem = str(error)
    text = json.dumps([answer, problem]).encode() if rank() == 0 else b""
    length = torch.tensor([len(text)], device=_device())
    dist.broadcast(length, src=0)
    content = torch.frombuffer(bytearray(text.ljust(int(length))), dtype=torch.uint8).to(_device())
    dist.broadcast(content, src=0)
    answer, problem = json.loads(bytes(content.cpu().numpy()))
    if problem is not None:
        raise Error(problem)
    return answer


def gather(value: Any) -> list[Any]:
    """The values of all ranks, in their order, on every rank. A collective."""
    return begin_gather(value)()


def begin_gather(value: Any) -> Callable[[], list[Any]]:
    """As `gather`, which the function that is returned ends: this rank may work meanwhile."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return lambda: [value]
    text = json.dumps(value).encode()
    begun = _begin_all_gather(text, SHORT)

    def end() -> list[Any]:
        texts = begun()
        if max(map(len, texts)) == SHORT:  # at least one was cut
            longest = max(gather(len(text)))
            texts = _begin_all_gather(text, longest)()
        return [json.loads(each) for each in texts]

    return end


def _begin_all_gather(text: bytes, length: int) -> Callable[[], list[bytes]]:
    """Of the texts of all ranks that many bytes; meanwhile shorter ones end with zeros."""
    mine = torch.frombuffer(bytearray(text[:length].ljust(length, b"\0")), dtype=torch.uint8)
    mine = mine.to(_device())
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    work = dist.all_gather(gathered, mine, async_op=True)

    def end() -> list[bytes]:
        work.wait()
        return [bytes(each.cpu().numpy()).rstrip(b"\0") for each in gathered]

    return end


def _device() -> torch.device:
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
