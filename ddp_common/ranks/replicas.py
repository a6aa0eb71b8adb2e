"""Whether all ranks have the same: of what is saved, only rank 0's is.

Ranks begin alike and get the same averaged gradients, so they stay alike. Where they do not, rank
0's state is saved and returned, and nothing else says that the others have trained something else.
Compared are: of a module its parameters, by their norms, since the last bits may differ between
kinds of processors; and its buffers, except where they are rank 0's by definition, or not trained
with. Of an optimizer its settings. Of anything else the whole state. Averaged models are left out:
rank 0 alone may keep one up to date.
"""

import itertools
import math
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from dask.tokenize import normalize_token, tokenize
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from ddp_common.errors import Error
from ddp_common.ranks import exchange, rendezvous
from ddp_common.ranks.descriptions import settings
from ddp_common.ranks.states import unwrapped

TOLERANCE = 1e-5  # relative, of norms of parameters: float32 has 1e-7

# What is compared of a rank, by name: the norm of a parameter, or Dask's token of anything else
Fingerprint = dict[str, float | str]

# The DDP models of this process, by their number: the same order on every rank
_models: weakref.WeakValueDictionary[int, DistributedDataParallel] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)
# Of those that are gone: the names of their parameters, and the norms
_ended: dict[int, tuple[list[str], torch.Tensor]] = {}


def check_replicas(model: torch.nn.Module) -> None:
    """Raise `Error` unless all ranks have the same parameters of `model`, up to rounding.

    So they have buffers that DDP does not send. A collective: every rank calls it. A `Checkpoint`
    does so at each save, for all of its parts.
    """
    know(model)
    begin_check({"model": unwrapped(model)}, {})()


def begin_check(parts: dict[str, Any], saved: dict[str, Any]) -> Callable[[], None]:
    """Begin to compare `parts` between the ranks. A collective.

    `saved` has the states of those that are neither modules nor optimizers. The function that is
    returned ends it, and raises `Error` unless all ranks have the same.
    """
    if rendezvous.world_size() == 1:
        return lambda: None
    found: Fingerprint = {}
    synced = _buffers_that_ddp_sends()
    for name, part in parts.items():
        if isinstance(part, torch.nn.Module):
            found |= _of_module(name, part, synced)
        elif isinstance(part, torch.optim.Optimizer):
            found |= {f"{name}.{key}": tokenize(value) for key, value in settings(part).items()}
        elif isinstance(saved[name], dict):
            found |= {f"{name}[{key!r}]": tokenize(value) for key, value in saved[name].items()}
        else:
            found[name] = tokenize(saved[name])
    gathered = exchange.begin_gather(found)

    def end() -> None:
        problem = difference(gathered())
        if problem is not None:
            raise Error(
                f"The ranks do not have the same: {problem}. Only rank 0's would be saved.\n"
                f"{ADVICE}"
            )

    return end


ADVICE = (
    "Is the model wrapped in DistributedDataParallel, and is model(x) called, not "
    "model.module(x)? What is unfrozen or replaced after DDP was made, it does not average: wrap "
    "it again. It sends buffers unless broadcast_buffers is False. A schedule is to step by a "
    "value that is the same on all ranks. Of what each rank has its own, gather the states of all "
    "ranks (docs/recipes.md)."
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
            both_diverged = math.isnan(here) and math.isnan(there)
            if not both_diverged and not math.isclose(here, there, rel_tol=TOLERANCE):
                return f"{name} has the norm {here:.6g} on rank 0 and {there:.6g} on rank {rank}"
    return None


def _of_module(name: str, module: torch.nn.Module, synced: set[int]) -> Fingerprint:
    if isinstance(module, AveragedModel):
        return {}
    names, norms = _norms(f"{name}.", module)
    found: Fingerprint = dict(zip(names, norms.tolist()))
    if any(parameter.requires_grad for parameter in module.parameters()):
        for entry, buffer in module.named_buffers():
            if id(buffer) not in synced:
                found[f"{name}.{entry}"] = tokenize(buffer)
    return found


def _norms(prefix: str, module: torch.nn.Module) -> tuple[list[str], torch.Tensor]:
    """The names of a module's parameters, and their norms: float32, shape (parameters,).

    Without those of which a rank has only a part, and those that are no real numbers.
    """
    names: list[str] = []
    norms: list[torch.Tensor] = []
    for name, parameter in module.named_parameters():
        if hasattr(parameter, "full_tensor") or not parameter.is_floating_point():
            continue
        summed_in = torch.promote_types(parameter.dtype, torch.float32)
        names.append(f"{prefix}{name}")
        norms.append(torch.linalg.vector_norm(parameter.detach(), dtype=summed_in))
    if not norms:
        return names, torch.zeros(0)
    first = norms[0]
    return names, torch.stack(
        [norm.to(device=first.device, dtype=torch.float32) for norm in norms]
    )


@normalize_token.register(torch.Tensor)
def _content(tensor: torch.Tensor) -> tuple:
    """What Dask's `tokenize` knows a tensor by."""
    if hasattr(tensor, "full_tensor"):  # a DTensor: each rank has a part of it
        return tensor.dtype, tensor.shape
    values = tensor.detach().to_dense().cpu().contiguous().reshape(-1)
    return tensor.dtype, tensor.shape, values.view(torch.uint8).numpy()


# The models that DDP has wrapped


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
        # With the model its parameters go, unless something else has them: look at them then
        weakref.finalize(model, _note_end, number, module).atexit = False


def wrapping(module: torch.nn.Module) -> list[DistributedDataParallel]:
    """The DDP models that wrap this very module."""
    return [model for model in _models.values() if unwrapped(model) is module]


def _buffers_that_ddp_sends() -> set[int]:
    """Their ids: they are rank 0's from the next forward pass on."""
    return {
        id(buffer)
        for model in _models.values()
        if model.broadcast_buffers
        for buffer in model.module.buffers()
    }


def _note_end(number: int, module: torch.nn.Module) -> None:
    _ended[number] = _norms("", module)


def at_the_end(parts: dict[str, Any]) -> Fingerprint:
    """The norms of all DDP models that this rank has had, and of the modules among `parts`.

    Call it once the training function has returned.
    """
    for number, model in _models.items():
        _note_end(number, model.module)
    found: Fingerprint = {}
    for number, (names, norms) in sorted(_ended.items()):
        found |= zip([f"{name} of DDP model {number}" for name in names], norms.tolist())
    _ended.clear()
    for name, part in parts.items():
        if isinstance(part, torch.nn.Module) and not isinstance(part, AveragedModel):
            names, norms = _norms(f"{name}.", part)
            found |= zip(names, norms.tolist())
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
