"""What a checkpoint needs to know of the states that it saves.

The part behind its wrappers, a copy of its state, with which settings it was made, and the norms
of its parameters. Relies on `state_dict` alone, but for modules, optimizers and schedules of
torch.
"""

import sys
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler

from ddp_common.errors import Error

# What loads without executing code, beside tensors and containers
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.Size, torch.dtype, torch.device)

# Options of an optimizer that schedules change, and those that they add. `initial_lr` they add as
# well, and never change.
SCHEDULED = ("lr", "momentum", "betas")
ADDED = ("max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr")
# Of a schedule's state, what changes while it runs; and `verbose`, which torch has no more
MOVING = ("last_epoch", "best", "num_bad_epochs", "cooldown_counter", "T_cur", "T_i", "verbose")


def unwrapped(part: Any) -> Any:
    """A module without the wrappers of DDP and torch.compile; anything else as it is."""
    dynamo = sys.modules.get("torch._dynamo")  # to import it takes a second; torch.compile does
    compiled: tuple[Any, ...] = (dynamo.OptimizedModule,) if dynamo is not None else ()
    wrappers: tuple[Any, ...] = (DistributedDataParallel, *compiled)
    while isinstance(part, wrappers):
        part = getattr(part, "_orig_mod" if isinstance(part, compiled) else "module")
    return part


def copy_of(value: Any, earlier: Any, where: str) -> Any:
    """A copy of a state on the CPU.

    Uses the tensors of an `earlier` copy where they fit: new memory costs more than copying.
    Raises `Error` for anything that `torch.load(weights_only=True)` would refuse, and for a
    tensor of which a rank has only a part; `where` names its place in the state.
    """
    if isinstance(value, torch.Tensor):
        if hasattr(value, "full_tensor"):  # a DTensor; to import its class takes time
            raise Error(
                f"The state {where} is a DTensor (fully_shard makes them): each rank has only a "
                "part of it, and rank 0 would save its own. Gather the whole first, on all ranks, "
                "as docs/gpu.md shows, or use torch.distributed.checkpoint."
            )
        return _copy_of_tensor(value, earlier)
    if isinstance(value, dict):
        old_values = earlier if isinstance(earlier, dict) else {}
        return {
            copy_of(key, None, where): copy_of(each, old_values.get(key), f"{where}[{key!r}]")
            for key, each in value.items()
        }
    if type(value) in (list, tuple):
        fits = isinstance(earlier, type(value)) and len(earlier) == len(value)
        before = earlier if fits else [None] * len(value)
        return type(value)(
            copy_of(each, old, f"{where}[{number}]")
            for number, (each, old) in enumerate(zip(value, before))
        )
    if type(value) in PLAIN:
        return value
    raise Error(
        f"The state {where} is a {type(value).__module__}.{type(value).__name__}, which cannot be "
        "loaded again without executing code. Keep states to tensors and plain Python values (a "
        "NumPy number becomes one with .item())."
    )


def _copy_of_tensor(value, earlier):
    fits = (
        isinstance(earlier, torch.Tensor)
        and earlier.shape == value.shape
        and earlier.dtype == value.dtype
    )
    copy = earlier if fits else torch.empty_like(value, device="cpu", requires_grad=False)
    return copy.copy_(value.detach())


def settings(part: Any) -> dict[str, Any]:
    """What an optimizer or a schedule of torch was made with; of anything else nothing.

    The keys are written as in a program: `param_groups[0]['lr']`, `step_size`.
    """
    if isinstance(part, torch.optim.Optimizer):
        return {
            f"param_groups[{number}]['{option}']": value
            for number, group in enumerate(part.param_groups)
            for option, value in group.items()
            if option not in ("params", *ADDED)
        }
    if isinstance(part, LRScheduler):
        return {
            name: value
            for name, value in part.state_dict().items()
            if not name.startswith("_") and name not in MOVING
        }
    return {}


def are_of_one_kind(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Whether two `settings` can be of the same class: they have the same names."""
    names = before.keys() ^ after.keys()
    return all(name.endswith("['initial_lr']") for name in names)


def differences(before: dict[str, Any], after: dict[str, Any], has_schedule: bool) -> list[str]:
    """The names of what differs in two `settings` of one class.

    With `has_schedule`, options that schedules change are left out.
    """
    moving = tuple(f"['{option}']" for option in SCHEDULED) if has_schedule else ()
    return [
        name
        for name in before
        if name in after and not name.endswith(moving) and before[name] != after[name]
    ]


def norms(parameters: list[torch.nn.Parameter]) -> torch.Tensor:
    """The norm of each, float32, shape (parameters,); empty if a rank has only parts of them."""
    if not parameters or any(hasattr(parameter, "full_tensor") for parameter in parameters):
        return torch.zeros(0)
    first = parameters[0].device
    each = []
    for parameter in parameters:
        summed_in = torch.promote_types(parameter.dtype, torch.float32)
        norm = torch.linalg.vector_norm(parameter.detach(), dtype=summed_in)
        each.append(norm.to(device=first, dtype=torch.float32))
    return torch.stack(each)
