"""Whether all ranks have the same: of what is saved, only rank 0's is.

Ranks begin alike and get the same averaged gradients, so they stay alike. Where they do not, rank
0's state is saved and returned, and nothing else says that the others have trained something else.
Compared are: of a module its parameters, up to rounding, as the last bits may differ between kinds
of processors, and of large ones another part each time; and the buffers of a DDP model that does
not send them from rank 0 before each forward pass. Averaged models are left out: rank 0 alone may
keep one up to date. What is compared of other parts, `parts` says.
"""

import functools
import math
import sys
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from dask.tokenize import normalize_token, tokenize
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from ddp_common import exchange, rendezvous
from ddp_common.errors import Error

TOLERANCE = 1e-5  # relative, of projections of parameters: float32 has 1e-7
PART = 2**18  # numbers of a parameter that are looked at
TINY = 1e-30  # for one that is 0
OF_BATCHES = ("running_mean", "running_var")  # buffers of torch's BatchNorm: of a rank's own rows

# What is compared of a rank, by name: of a parameter its norm, and its cosine with a fixed
# direction; of anything else Dask's token
Fingerprint = dict[str, list[float] | str]

ADVICE = (
    "Is the model wrapped in DistributedDataParallel, and is model(x) called, not "
    "model.module(x)? Within no_sync() nothing is averaged: the forward and backward pass before "
    "an optimizer's step belong outside. What is unfrozen or replaced after DDP was made, it does "
    "not average: wrap it again. It sends buffers unless broadcast_buffers is False. A schedule "
    "is to step by a value that is the same on all ranks, and a GradScaler by gradients that are "
    "averaged. A copy that averages weights is to have requires_grad_(False); torch's "
    "AveragedModel may be rank 0's alone. Of what each rank has its own, gather the states of all "
    "ranks (docs/recipes.md)."
)

_checks = 0  # so many were begun, on every rank


def unwrapped(part: Any) -> Any:
    """A module without the wrappers of DDP and torch.compile; anything else as it is."""
    *_, innermost = _wrapped(part)
    return innermost


def ddp_around(part: Any) -> DistributedDataParallel | None:
    """The DDP model that a part is, or that torch.compile has wrapped; None if there is none."""
    found = [each for each in _wrapped(part) if isinstance(each, DistributedDataParallel)]
    return found[0] if found else None


def _wrapped(part: Any) -> list[Any]:
    """A part, and what is in its wrappers, the outermost first."""
    dynamo = sys.modules.get("torch._dynamo")  # to import it takes a second; torch.compile does
    compiled: tuple[Any, ...] = (dynamo.OptimizedModule,) if dynamo is not None else ()
    wrappers: tuple[Any, ...] = (DistributedDataParallel, *compiled)
    found = [part]
    while isinstance(found[-1], wrappers):
        name = "_orig_mod" if isinstance(found[-1], compiled) else "module"
        found.append(getattr(found[-1], name))
    return found


def check_replicas(model: torch.nn.Module) -> None:
    """Raise `Error` unless all ranks have the same parameters of `model`, up to rounding.

    So they have the buffers of a DDP model that does not send them. A collective: every rank
    calls it. A `Checkpoint` does so at each save, for all of its parts.
    """
    plain = unwrapped(model)
    begin_check(lambda: of_module("model", plain, plain.state_dict(), ddp_around(model)))()


def begin_check(find: Callable[[], Fingerprint]) -> Callable[[], None]:
    """Begin to compare what `find` finds on each rank. A collective; alone nothing is looked for.

    The function that is returned ends it, and raises `Error` unless all ranks have the same.
    """
    global _checks
    _checks += 1
    if rendezvous.world_size() == 1:
        return lambda: None
    found = find()
    # Without the names, which are nearly always the same
    names = zlib.crc32(" ".join(found).encode())
    gathered = exchange.begin_gather([names, list(found.values())])

    def end() -> None:
        names_of_ranks, values = zip(*gathered())
        of_ranks = [dict(zip(found, each)) for each in values]
        advice = ADVICE
        if len(set(names_of_ranks)) > 1:
            of_ranks = exchange.gather(found)
            advice = f"Every rank calls save() of the same Checkpoint, at the same place. {ADVICE}"
        problem = difference(dict(enumerate(of_ranks)))
        if problem is not None:
            raise Error(
                f"The ranks do not have the same: {problem}. Only rank 0's would be saved.\n"
                f"{advice}"
            )

    return end


def difference(of_ranks: Mapping[int, Fingerprint]) -> str | None:
    """What differs first between the ranks, in words; None if nothing does."""
    first_rank, first = next(iter(of_ranks.items()))
    for rank, other in of_ranks.items():
        for name in [*first, *(name for name in other if name not in first)]:
            here, there = first.get(name), other.get(name)
            if here == there:
                continue
            if here is None or there is None:
                return f"{name} is on rank {first_rank if there is None else rank} alone"
            if isinstance(here, str) or isinstance(there, str):
                return f"{name} is another one on rank {rank} than on rank {first_rank}"
            apart = _apart(here, there)
            if apart > TOLERANCE:
                return (
                    f"{name} is not the same on rank {rank} as on rank {first_rank} "
                    f"({apart:.1g} of its norm apart, or more)"
                )
    return None


def _apart(here: list[float], there: list[float]) -> float:
    """How far apart two parameters are, in parts of their norm; 0 if both have diverged."""
    (norm, cosine), (other_norm, other_cosine) = here, there
    if not math.isfinite(norm) and not math.isfinite(other_norm):
        return 0.0
    differences = (
        abs(norm - other_norm) / (max(norm, other_norm) + TINY),
        abs(cosine - other_cosine),
    )
    return max(differences) if all(map(math.isfinite, differences)) else math.inf


def of_module(
    name: str,
    module: torch.nn.Module,
    state: Mapping[str, Any],
    ddp: DistributedDataParallel | None,
) -> Fingerprint:
    """What is compared of a module, around which is `ddp`; `state` is what is saved of it."""
    if isinstance(module, AveragedModel):
        return {}
    found = projections(f"{name}.", module.named_parameters(), turn=_checks)
    if ddp is None:
        return found
    is_of_all_ranks = dist.get_world_size(ddp.process_group) == dist.get_world_size()
    if not (ddp.broadcast_buffers and is_of_all_ranks):  # else they are rank 0's from now on
        for entry, buffer in module.named_buffers():
            if entry in state:
                found[f"{name}.{entry}"] = tokenize(buffer)
    return found


def projections(
    prefix: str, tensors: Iterable[tuple[str, torch.Tensor]], turn: int
) -> Fingerprint:
    """Of each tensor, by its name, its norm, and its cosine with a fixed direction, about.

    A norm alone says little of what has turned. Of a large one it is a part that is looked at,
    another one at each `turn`: what drifts does so everywhere, or is seen in time. Left out are
    tensors of which a rank has only a share, and those that are no real numbers.
    """
    names: list[str] = []
    found: list[torch.Tensor] = []
    for name, tensor in tensors:
        is_a_share = hasattr(tensor, "full_tensor")
        if is_a_share or tensor.layout != torch.strided or not tensor.is_floating_point():
            continue
        values = tensor.detach().reshape(-1)
        if len(values) > PART:
            start = turn * PART % (len(values) - PART + 1)
            values = values[start : start + PART]
        if values.element_size() < 4:
            values = values.float()
        direction = _direction(values.device, values.dtype)[: len(values)]
        names.append(f"{prefix}{name}")
        found += torch.linalg.vector_norm(values), values.dot(direction)
    if not found:
        return {}
    device = found[0].device
    if any(each.device != device or each.dtype != found[0].dtype for each in found):
        found = [each.to(device=device, dtype=torch.float32) for each in found]
    norms, products = torch.stack(found).view(-1, 2).unbind(1)
    return dict(zip(names, torch.stack([norms, products / (norms + TINY)], dim=1).tolist()))


@functools.cache
def _direction(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Shape (PART,), the same on every rank."""
    direction = torch.randn(PART, generator=torch.Generator().manual_seed(0))
    return direction.to(device=device, dtype=dtype)


@normalize_token.register(torch.Tensor)
def _content(tensor: torch.Tensor) -> tuple:
    """What Dask's `tokenize` knows a tensor by."""
    if hasattr(tensor, "full_tensor"):  # a DTensor: each rank has a part of it
        return tensor.dtype, tensor.shape
    values = tensor.detach().to_dense().cpu().contiguous().reshape(-1)
    return tensor.dtype, tensor.shape, values.view(torch.uint8).numpy()


# What the ranks return


def of_result(result: Any) -> Fingerprint:
    """What is compared of what a training function returns: the parameters of a model.

    They are found in a module, and in its state dict, which torch marks by `_metadata`.
    """
    if isinstance(result, torch.nn.Module):
        model = unwrapped(result)
        is_average = isinstance(model, AveragedModel)
        return {} if is_average else projections("", model.named_parameters(), turn=_checks)
    if not hasattr(result, "_metadata"):
        return {}
    tensors = {k: each for k, each in result.items() if isinstance(each, torch.Tensor)}
    pairs = [pair for pair in tensors.items() if not pair[0].endswith(OF_BATCHES)]
    return projections("", pairs, turn=_checks)


def apart_in_result(of_ranks: list[Fingerprint]) -> str | None:
    """A sentence for the user if the models that ranks have returned differ; None if not."""
    returned = {rank: found for rank, found in enumerate(of_ranks) if found}
    problem = difference(returned) if len(returned) > 1 else None
    if problem is None:
        return None
    return (
        f"The models that the ranks have returned have drifted apart: {problem}. run.result is "
        f"rank 0's.\n{ADVICE} Where a rank has changed its model on purpose after training, all "
        "is well."
    )
