"""Resume from a checkpoint: which file, whether it belongs to these parts, and into them.

Rank 0 chooses the newest good file, and every rank loads that one. Loading executes no code
(`weights_only=True`). Promises: whatever is in a file, it is loaded or an `Error` says why not;
what another program wrote is refused before a part is loaded (`descriptions`), other data when
the sampler's position is. Parameters are trained or frozen as they were.
"""

import pickle
import socket
import sys
from pathlib import Path
from typing import Any

import torch

from ddp_common import exchange, replicas, reporting
from ddp_common.checkpoint_files import fault, newest, remove_unfinished
from ddp_common.descriptions import (
    FROZEN,
    WRITTEN_BY,
    added_by_schedules,
    change_of_course,
    changed_settings,
    describe,
    difference,
    frozen,
    has_schedule,
    other_function,
    settings,
)
from ddp_common.errors import Error, first_line
from ddp_common.rendezvous import rank


def chosen_file(directory: Path) -> Path | None:
    """The newest good file in `directory` that rank 0 sees, None if there is no checkpoint.

    A collective. Raises `Error` if there are checkpoints but none is good, and if this rank does
    not see the chosen one.
    """

    def ask() -> str | None:
        remove_unfinished(directory)
        path = newest(directory)
        return None if path is None else path.name

    name = exchange.asked_of_rank_0(ask)
    if name is None:
        return None
    path = directory / name
    if rank() != 0:
        _check_seen(path)
    return path


def _check_seen(path: Path) -> None:
    """Raise `Error` unless this rank sees the file that rank 0 has chosen, and it is good."""
    try:
        problem = fault(path)
    except OSError:
        problem = "it does not see that file"
    if problem is not None:
        raise Error(
            f"Rank {rank()} on {socket.gethostname()} cannot resume from {path}, which rank 0 has "
            f"chosen: {problem}. The folder must be the same on every host."
        )


def load(path: Path) -> Any:
    """The state in a checkpoint file, on the CPU: `load_state_dict` moves what belongs on a GPU.

    An optimizer's count of steps does not belong there: each step would wait for the GPU.

    Raises `Error` rather than execute anything that is no plain state, and whatever else is wrong
    with the content.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        lines = str(error).splitlines()
        reasons = [line.strip() for line in lines if "Unpickler error" in line]
        reason = reasons[0] if reasons else f"{type(error).__name__}: {first_line(error)}"
        what = "cannot be loaded"
        if isinstance(error, pickle.UnpicklingError):
            what = "cannot be loaded without executing code, so it was not"
        raise Error(
            f"{path} {what} ({reason}). Keep states to tensors and plain Python values, and load "
            "no files of strangers."
        ) from error


def load_into(parts: dict[str, Any], path: Path) -> None:
    """Load each of the `parts` from the file.

    Options of an optimizer that the program has set otherwise than the run that saved are named
    on stderr. Raises `Error` for what another program wrote.
    """
    state = load(path)
    _check_origin(parts, state, path)
    for name, part in parts.items():
        if isinstance(part, torch.nn.Module):
            _freeze_as_saved(name, part, state[WRITTEN_BY][name].get(FROZEN), path)
    for name, part in parts.items():
        if isinstance(part, torch.optim.Optimizer):
            before = settings(part)
            _load_part(name, part, state[name], path)
            if rank() == 0:
                _name_changed_settings(name, part, before, has_schedule(part, parts))
        else:
            _load_part(name, part, state[name], path)
    for name, part in parts.items():
        rates = other_function(part)
        if rates is not None and rank() == 0:
            reporting.post(
                reporting.Problem(
                    f"The function of {name} is another one than in the run that saved: for step "
                    f"{part.last_epoch} that had {rates}. Training goes on with this program's "
                    "function. For the rest of the earlier course, resume with its settings."
                )
            )


def _check_origin(parts: dict[str, Any], state: Any, path: Path) -> None:
    """Raise `Error` unless the file was written by a program with the same parts."""
    if not isinstance(state, dict) or not isinstance(state.get(WRITTEN_BY), dict):
        raise Error(
            f"{path} does not say what wrote it ({WRITTEN_BY}): another program did, or version "
            "0.3 or older. Go on with that one."
        )
    there = [str(name) for name in state if name != WRITTEN_BY]
    if set(there) != set(parts):
        raise Error(
            f"{path} holds {', '.join(there)}; this run saves {', '.join(parts)}. Resume "
            "with the code that wrote it."
        )
    modules = {name: part for name, part in parts.items() if isinstance(part, torch.nn.Module)}
    states = {name: module.state_dict() for name, module in modules.items()}
    for name, description in describe(parts, states).items():
        differs = difference(state[WRITTEN_BY].get(name), description)
        if differs is not None:
            raise Error(
                f"{path} was written by another {name}: {differs}. Resume with the code and "
                "the config.json of its run; make all parameter groups before restore()."
            )
    for name, part in parts.items():
        differs = change_of_course(part, state[name])
        if isinstance(part, torch.optim.Optimizer) and isinstance(state[name], dict):
            differs = added_by_schedules(part, state[name].get("param_groups"))
        if differs is not None:
            raise Error(
                f"{path} was written with another {name}: {differs}. Its course is that of the "
                "run which made it, to the end. Resume with the config.json of its run; a longer "
                "run is a new run from these weights, without this folder: "
                f"{_from_these_weights(parts, path)}"
            )


def _from_these_weights(parts: dict[str, Any], path: Path) -> str:
    """The line of a new run that loads the model, before DDP is made."""
    models = [name for name, part in parts.items() if isinstance(part, torch.nn.Module)]
    name = models[0] if models else "model"
    return f"model.load_state_dict(torch.load({str(path)!r}, weights_only=True)[{name!r}])"


def _freeze_as_saved(name: str, module: torch.nn.Module, saved: Any, path: Path) -> None:
    """Train those parameters that were trained.

    Raises `Error` where DDP, which has chosen its parameters already, does not average one.
    """
    if not isinstance(saved, str):  # a file of version 0.4
        return
    there = set(saved.split())
    differing = sorted(there ^ set(frozen(module)))
    if not differing:
        return
    left_out = [entry for entry in replicas.left_out_by_ddp(module) if entry not in there]
    if left_out:
        raise Error(
            f"{path} was written when requires_grad of {name}.{left_out[0]} was True, and DDP was "
            "made here when it was False: it would not average it. Give Checkpoint the plain "
            "model, and call restore() before DistributedDataParallel(…)."
        )
    for entry, parameter in module.named_parameters():
        if entry in differing:
            parameter.requires_grad_(entry not in there)


def _load_part(name: str, part: Any, state: Any, path: Path) -> None:
    try:
        part.load_state_dict(state)
    except Error:
        raise
    except Exception as error:
        raise Error(
            f"{path} was written by another {name}, which does not load it: {error!r}. Resume "
            "with the code that wrote it."
        ) from error


def _name_changed_settings(
    name: str, part: torch.optim.Optimizer, before: dict[str, Any], is_scheduled: bool
) -> None:
    after = settings(part)
    for setting in changed_settings(part, before, is_scheduled):
        _tell(
            f"Resumed with {name}.{setting} = {after[setting]!r}, as it was saved; this program "
            f"has made it with {before[setting]!r}."
        )


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
