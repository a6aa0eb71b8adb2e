"""The state of a part: without its wrappers, and copied as it is to the CPU.

Promises: a copy has the types of the state, its tensors share no memory with the part, and it
loads without executing code, or it is refused.
"""

import sys
from collections import Counter, OrderedDict
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ddp_common.errors import Error

# What loads without executing code, beside tensors and containers
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.Size, torch.dtype, torch.device)


def unwrapped(part: Any) -> Any:
    """A module without the wrappers of DDP and torch.compile; anything else as it is."""
    dynamo = sys.modules.get("torch._dynamo")  # to import it takes a second; torch.compile does
    compiled: tuple[Any, ...] = (dynamo.OptimizedModule,) if dynamo is not None else ()
    wrappers: tuple[Any, ...] = (DistributedDataParallel, *compiled)
    while isinstance(part, wrappers):
        part = getattr(part, "_orig_mod" if isinstance(part, compiled) else "module")
    return part


def without_ddp(result: Any) -> Any:
    """What a function returns, with plain models in place of those that DDP has wrapped."""
    if type(result) is dict:
        return {key: without_ddp(each) for key, each in result.items()}
    if type(result) in (list, tuple):
        return type(result)(map(without_ddp, result))
    return result.module if isinstance(result, DistributedDataParallel) else result


def trained(parts: dict[str, Any]) -> list[tuple[str, str]]:
    """The weights that are trained: the name of the module among `parts`, and that in it."""
    return [
        (name, entry)
        for name, part in parts.items()
        if isinstance(part, torch.nn.Module)
        for entry, parameter in part.named_parameters()
        if parameter.requires_grad
    ]


def has_nan(value: Any) -> bool:
    """Whether a tensor has a NaN; False where that cannot be asked, as of a sparse one."""
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return False
    return value.dtype.itemsize > 1 and bool(value.isnan().any())


def copy_of(value: Any, earlier: Any, where: str) -> Any:
    """A copy of a state, of the same types, its tensors on the CPU.

    Uses the tensors of an `earlier` copy where they fit: new memory costs more than copying.
    Raises `Error` for anything that `torch.load(weights_only=True)` would refuse, and for a
    tensor of which a rank has only a part; `where` names its place in the state.
    """
    if isinstance(value, torch.Tensor):
        if hasattr(value, "full_tensor"):  # a DTensor; to import its class takes time
            raise Error(
                f"The state {where} is a DTensor: rank 0 has only a part of it. Gather the whole "
                "first, on all ranks (docs/gpu.md), or use torch.distributed.checkpoint."
            )
        return _copy_of_tensor(value, earlier)
    if type(value) in (dict, OrderedDict, Counter):
        return _copy_of_dict(value, earlier, where)
    if type(value) in (list, tuple):
        fits = type(earlier) is type(value) and len(earlier) == len(value)
        before = earlier if fits else [None] * len(value)
        return type(value)(
            copy_of(each, old, f"{where}[{number}]")
            for number, (each, old) in enumerate(zip(value, before))
        )
    if type(value) is set:
        return {copy_of(each, None, where) for each in value}
    if type(value) in PLAIN:
        return value
    raise Error(
        f"The state {where} is a {type(value).__module__}.{type(value).__name__}, which cannot be "
        "loaded again without executing code. Keep states to tensors and plain Python values (a "
        "NumPy number becomes one with .item())."
    )


def _copy_of_tensor(value: torch.Tensor, earlier: Any) -> torch.Tensor:
    fits = (
        isinstance(earlier, torch.Tensor)
        and earlier.shape == value.shape
        and earlier.dtype == value.dtype
    )
    copy = earlier if fits else torch.empty_like(value, device="cpu", requires_grad=False)
    return copy.copy_(value.detach())


def _copy_of_dict(value: dict, earlier: Any, where: str) -> dict:
    old_values = earlier if isinstance(earlier, dict) else {}
    copy = type(value)()
    for key, each in value.items():
        copied_key = copy_of(key, None, where)
        copy[copied_key] = copy_of(each, old_values.get(key), f"{where}[{key!r}]")
    if isinstance(value, OrderedDict):  # the versions of its modules: `_metadata`
        vars(copy).update(copy_of(vars(value), None, where))
    return copy
