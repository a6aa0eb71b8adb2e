"""What proves that a saved state belongs to a part of this program, and what may differ.

A description is plain text: the class of a part, of a module the entries of its state, of an
optimizer its parameters in their order. It is saved beside the states and compared before one is
loaded. Settings, such as a learning rate, may differ: they are compared afterwards, to be named.
Relies on torch's modules, optimizers and schedules; of anything else it knows the class alone.
"""

from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

WRITTEN_BY = "written_by"  # the descriptions in a file, beside the states
CLASS = "class"  # no entry of a module has this name: it is a word of Python's

# Options of an optimizer that schedules change, and those that they add. `initial_lr` they add as
# well, and never change.
SCHEDULED = ("lr", "momentum", "betas")
ADDED = ("max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr")
# Of a schedule's state, what changes while it runs; and `verbose`, which torch has no more
MOVING = ("last_epoch", "best", "num_bad_epochs", "cooldown_counter", "T_cur", "T_i", "verbose")
NAMED = 3  # so many differences are named in a message


def describe(parts: dict[str, Any]) -> dict[str, dict[str, str]]:
    """The description of each part, without the wrappers of DDP and torch.compile."""
    names = {
        id(parameter): f"{part_name}.{name}"
        for part_name, part in parts.items()
        if isinstance(part, torch.nn.Module)
        for name, parameter in part.named_parameters()
    }
    return {name: _description(part, names) for name, part in parts.items()}


def _description(part: Any, names: dict[int, str]) -> dict[str, str]:
    found = {CLASS: _class_name(part)}
    if isinstance(part, torch.nn.Module):
        for name, value in part.state_dict().items():
            found[name] = _form(value)
    if isinstance(part, torch.optim.Optimizer):
        number = 0
        for group_number, group in enumerate(part.param_groups):
            for parameter in group["params"]:
                found[f"parameter {number}"] = names.get(id(parameter), "unnamed")
                found[f"the type of parameter {number}"] = _form(parameter)
                number += 1
            found[f"the end of group {group_number}"] = f"before parameter {number}"
    return found


def _class_name(part: Any) -> str:
    """The name of its class; of a schedule made of others with theirs."""
    name = type(part).__name__
    if not isinstance(part, LRScheduler):
        return name
    inner = [_class_name(schedule) for schedule in _schedules_within(part)]
    return f"{name}({', '.join(inner)})" if inner else name


def _schedules_within(schedule: LRScheduler) -> list[LRScheduler]:
    """Those that a SequentialLR or a ChainedScheduler is made of."""
    return getattr(schedule, "_schedulers", [])


def _form(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} of shape {tuple(value.shape)}"
    return type(value).__name__


def difference(there: Any, here: dict[str, str]) -> str | None:
    """How the saved description of a part, which may be anything, differs from today's.

    None if it does not.
    """
    saved: dict[str, str] = {}
    if isinstance(there, dict):
        saved = {str(name): str(value) for name, value in there.items()}
    if saved.get(CLASS) != here[CLASS]:
        return f"{saved.get(CLASS)} there, {here[CLASS]} here"
    found = [
        f"{name} is {saved[name]} there, {value} here"
        for name, value in here.items()
        if name in saved and saved[name] != value
    ]
    found += [f"only there is {name}" for name in saved if name not in here]
    found += [f"only here is {name}" for name in here if name not in saved]
    if len(found) > NAMED:
        found[NAMED:] = [f"and {len(found) - NAMED} more"]
    return "; ".join(found) or None


def settings(part: Any) -> dict[str, Any]:
    """What an optimizer or a schedule of torch was made with; of anything else nothing.

    The keys are written as in a program: `param_groups[0]['lr']`, `step_size`.
    """
    if isinstance(part, torch.optim.Optimizer):
        return {
            f"param_groups[{number}]['{option}']": value
            for number, group in enumerate(part.param_groups)
            for option, value in group.items()
            if option not in ("params", "param_names", *ADDED)
        }
    if isinstance(part, LRScheduler):
        found = {
            name: value
            for name, value in part.state_dict().items()
            if not name.startswith("_") and name not in MOVING
        }
        for number, schedule in enumerate(_schedules_within(part)):
            for name, value in settings(schedule).items():
                found[f"_schedulers[{number}].{name}"] = value
        return found
    return {}


def changed_settings(
    before: dict[str, Any], after: dict[str, Any], has_schedule: bool
) -> list[str]:
    """The names of what differs in two `settings` of one class, as they are printed.

    With `has_schedule`, options that schedules change are left out.
    """
    moving = tuple(f"['{option}']" for option in SCHEDULED) if has_schedule else ()
    return [
        name
        for name in before
        if name in after
        and not name.endswith(moving)
        and repr(before[name]) != repr(after[name])  # of a saved value, which may be anything
    ]
