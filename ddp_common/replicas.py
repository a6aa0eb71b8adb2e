"""Whether all ranks have the same: of what is saved, only rank 0's is.

Ranks begin alike and get the same averaged gradients, so they stay alike. Where they do not, rank
0's state is saved and returned, and nothing else says that the others have trained something else.
Compared are: of a module its parameters, up to rounding, as the last bits may differ between kinds
of processors, and of large ones another part each time; and its buffers, except those that DDP
sends from rank 0 before each forward pass, and those of a module in which nothing is trained. Of
an optimizer its settings. Of anything else the whole state. Averaged models are left out: rank 0
alone may keep one up to date.
"""

import functools
import itertools
import math
import weakref
import zlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from dask.tokenize import normalize_token, tokenize
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from ddp_common import exchange, rendezvous
from ddp_common.descriptions import frozen, settings
from ddp_common.errors import Error
from ddp_common.states import unwrapped

TOLERANCE = 1e-5  # relative, of projections of parameters: float32 has 1e-7
PART = 2**18  # numbers of a parameter that are looked at
TINY = 1e-30  # for one that is 0

# What is compared of a rank, by name: of a parameter its norm, and its cosine with a fixed
# direction; of anything else Dask's token
Fingerprint = dict[str, list[float] | str]

# The DDP models of this process, by their number: the same order on every rank
_models: weakref.WeakValueDictionary[int, DistributedDataParallel] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)
_checks = itertools.count()  # their numbers, the same on every rank
# Of those that are gone: the names of their parameters, and the projections
_ended: dict[int, tuple[list[str], torch.Tensor]] = {}
_left_out: dict[int, list[str]] = {}  # of each model: the parameters that it does not average


def check_replicas(model: torch.nn.Module) -> None:
    """Raise `Error` unless all ranks have the same parameters of `model`, up to rounding.

    So they have buffers that DDP does not send. A collective: every rank calls it. A `Checkpoint`
    does so at each save, for all of its parts.
    """
    know(model)
    plain = unwrapped(model)
    begin_check({"model": plain}, {"model": plain.state_dict()})()


def begin_check(parts: dict[str, Any], saved: dict[str, Any]) -> Callable[[], None]:
    """Begin to compare `parts` between the ranks. A collective.

    `saved` has their states. The function that is returned ends it, and raises `Error` unless all
    ranks have the same.
    """
    if rendezvous.world_size() == 1:
        return lambda: None
    number = next(_checks)
    found: Fingerprint = {}
    synced = _buffers_that_ddp_sends()
    for name, part in parts.items():
        if isinstance(part, torch.nn.Module):
            found |= _of_module(name, part, saved[name], synced, number)
        elif isinstance(part, torch.optim.Optimizer):
            found |= {f"{name}.{key}": tokenize(value) for key, value in settings(part).items()}
        elif isinstance(saved[name], dict):
            found |= {f"{name}[{key!r}]": tokenize(value) for key, value in saved[name].items()}
        else:
            found[name] = tokenize(saved[name])
    # Without the names, which are nearly always the same
    names = zlib.crc32(" ".join(found).encode())
    gathered = exchange.begin_gather([names, list(found.values())])

    def end() -> None:
        names_of_ranks, values = zip(*gathered())
        of_ranks = [dict(zip(found, each)) for each in values]
        if len(set(names_of_ranks)) > 1:
            of_ranks = exchange.gather(found)
        problem = difference(of_ranks)
        if problem is not None:
            raise Error(
                f"The ranks do not have the same: {problem}. Only rank 0's would be saved.\n"
                f"{ADVICE}"
            )

    return end


ADVICE = (
    "Is the model wrapped in DistributedDataParallel, and is model(x) called, not "
    "model.module(x)? What is unfrozen or replaced after DDP was made, it does not average: wrap "
    "it again. It sends buffers unless broadcast_buffers is False. Every rank calls save() of the "
    "same Checkpoint. A schedule is to step by a value that is the same on all ranks. A copy that "
    "averages weights is to have requires_grad_(False); torch's AveragedModel may be rank 0's "
    "alone. Of what each rank has its own, gather the states of all ranks (docs/recipes.md)."
)


def difference(of_ranks: list[Fingerprint]) -> str | None:
    """What differs between the ranks first, in words; None if nothing does."""
    first = of_ranks[0]
    for rank, other in enumerate(of_ranks):
        for name in [*first, *(name for name in other if name not in first)]:
            here, there = first.get(name), other.get(name)
            if here == there:
                continue
            if here is None or there is None:
                return f"{name} is on rank {0 if there is None else rank} alone"
            if isinstance(here, str) or isinstance(there, str):
                return f"{name} is another one on rank {rank} than on rank 0"
            apart = _apart(here, there)
            if apart > TOLERANCE:
                return (
                    f"{name} is not the same on rank {rank} as on rank 0 ({apart:.1g} of its norm "
                    "apart, or more)"
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


def _of_module(
    name: str, module: torch.nn.Module, state: dict[str, Any], synced: set[int], number: int
) -> Fingerprint:
    if isinstance(module, AveragedModel):
        return {}
    names, projections = _projections(f"{name}.", module, number)
    found: Fingerprint = dict(zip(names, projections.tolist()))
    if any(parameter.requires_grad for parameter in module.parameters()):
        for entry, buffer in module.named_buffers():
            if id(buffer) not in synced and entry in state:
                found[f"{name}.{entry}"] = tokenize(buffer)
    return found


def _projections(
    prefix: str, module: torch.nn.Module, number: int
) -> tuple[list[str], torch.Tensor]:
    """The names of a module's parameters; and of each its norm, and its cosine with a fixed
    direction, about: shape (parameters, 2).

    A norm alone says little of what has turned. Of a large parameter it is a part that is looked
    at, with each `number` another one: what drifts does so everywhere, or is seen in time.
    Parameters of which a rank has only a share are left out, and those that are no real numbers.
    """
    names: list[str] = []
    found: list[torch.Tensor] = []
    for name, parameter in module.named_parameters():
        if hasattr(parameter, "full_tensor") or not parameter.is_floating_point():
            continue
        values = parameter.detach().reshape(-1)
        if len(values) > PART:
            start = number * PART % (len(values) - PART)
            values = values[start : start + PART]
        if values.element_size() < 4:
            values = values.float()
        direction = _direction(values.device, values.dtype)[: len(values)]
        names.append(f"{prefix}{name}")
        found += torch.linalg.vector_norm(values), values.dot(direction)
    if not found:
        return names, torch.zeros(0, 2)
    device = found[0].device
    if any(each.device != device or each.dtype != found[0].dtype for each in found):
        found = [each.to(device=device, dtype=torch.float32) for each in found]
    norms, products = torch.stack(found).view(-1, 2).unbind(1)
    return names, torch.stack([norms, products / (norms + TINY)], dim=1)


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


# The models that DDP has wrapped


@functools.cache  # a program may connect more than once
def watch() -> None:
    """From now on know each DDP model of this process from the moment at which it is made."""
    register_module_module_registration_hook(_registered)


def _registered(wrapper: torch.nn.Module, name: str, module: Any) -> None:
    """torch calls it where a module becomes a part of another one."""
    if isinstance(wrapper, DistributedDataParallel) and name == "module":
        _remember(wrapper, module)


def know(model: Any) -> None:
    """Know a DDP model, if it is one, that may have been made before `watch`."""
    if isinstance(model, DistributedDataParallel):
        _remember(model, model.module)


def _remember(model: DistributedDataParallel, module: torch.nn.Module) -> None:
    is_of_all_ranks = dist.get_world_size(model.process_group) == dist.get_world_size()
    if is_of_all_ranks and not any(each is model for each in _models.values()):
        number = next(_numbers)
        _models[number] = model
        _left_out[number] = frozen(module)
        # With the model its parameters go, unless something else has them: look at them then
        weakref.finalize(model, _note_end, number, module).atexit = False


def wrapping(module: torch.nn.Module) -> list[DistributedDataParallel]:
    """The DDP models that wrap this very module."""
    return [model for model in _models.values() if unwrapped(model) is module]


def left_out_by_ddp(module: torch.nn.Module) -> set[str]:
    """The parameters of this module that a DDP model around it does not average."""
    return {
        name
        for number, model in _models.items()
        if unwrapped(model) is module
        for name in _left_out[number]
    }


def _buffers_that_ddp_sends() -> set[int]:
    """Their ids: they are rank 0's from the next forward pass on."""
    return {
        id(buffer)
        for model in _models.values()
        if model.broadcast_buffers
        for buffer in model.module.buffers()
    }


def _note_end(number: int, module: torch.nn.Module) -> None:
    _ended[number] = _projections("", module, 0)


def at_the_end(parts: dict[str, Any]) -> Fingerprint:
    """The projections of all DDP models that this rank has had, and of the modules among `parts`.

    Call it once the training function has returned.
    """
    for number, model in _models.items():
        _note_end(number, model.module)
    found: Fingerprint = {}
    for number, (names, projections) in sorted(_ended.items()):
        found |= zip([f"{name} of DDP model {number}" for name in names], projections.tolist())
    _ended.clear()
    for name, part in parts.items():
        if isinstance(part, torch.nn.Module) and not isinstance(part, AveragedModel):
            names, projections = _projections(f"{name}.", part, 0)
            found |= zip(names, projections.tolist())
    return found


def in_the_end(of_ranks: list[Fingerprint]) -> str | None:
    """A sentence for the user if the ranks' models differ after training."""
    problem = difference(of_ranks) if of_ranks else None
    if problem is None:
        return None
    return (
        f"The models of the ranks have drifted apart: when the function had ended, {problem}. "
        f"What is returned is rank 0's.\n{ADVICE} Where rank 0 has changed its model on purpose "
        "after training, all is well."
    )
