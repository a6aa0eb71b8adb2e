"""What proves that a saved state belongs to a part of this program, and what may differ.

A description is plain text: the class of a part, of a module the entries of its state, of an
optimizer its parameters in their order. It is saved beside the states and compared before one is
loaded. So is the course of a schedule, in its own state: what does not change while it runs.
Relies on torch's modules, optimizers and schedules; of anything else it knows the class alone.
"""

import math
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from ddp_common.errors import Error

WRITTEN_BY = "written_by"  # the descriptions in a file, beside the states
# Names that no entry of a module has: a word of Python's, and one that ends with a dot
CLASS = "class"
FROZEN = "frozen."  # the parameters that are not trained

# Of a schedule's state, what changes while it runs; and `verbose`, which torch has no more
MOVING = (
    *("last_epoch", "best", "num_bad_epochs", "cooldown_counter", "T_cur", "T_i", "verbose"),
    *("_step_count", "_last_lr", "_is_initial", "_get_lr_called_within_step"),
)
MADE_OF = "_schedulers"  # the schedules that a schedule is made of, in its state too
OF_GROUPS = ("params", "param_names", "initial_lr")  # which no option of an optimizer is
SCHEDULED = ("lr", "momentum", "betas")  # options of an optimizer that schedules change
NAMED = 3  # so many differences are named in a message


def describe(parts: dict[str, Any], states: dict[str, Any]) -> dict[str, dict[str, str]]:
    """The description of each part, without the wrappers of DDP and torch.compile.

    `states` has what the `state_dict` of modules gives.
    """
    names = {
        id(parameter): f"{part_name}.{name}"
        for part_name, part in parts.items()
        if isinstance(part, torch.nn.Module)
        for name, parameter in part.named_parameters()
    }
    return {name: _description(part, states.get(name), names) for name, part in parts.items()}


def _description(part: Any, state: Any, names: dict[int, str]) -> dict[str, str]:
    found = {CLASS: _class_name(part)}
    if isinstance(part, torch.nn.Module):
        for name, value in state.items():
            found[name] = _form(value)
        found[FROZEN] = " ".join(frozen(part))
    if isinstance(part, torch.optim.Optimizer):
        number = 0
        for group_number, group in enumerate(part.param_groups):
            for parameter in group["params"]:
                found[f"parameter {number}"] = names.get(id(parameter), "unnamed")
                found[f"the type of parameter {number}"] = _form(parameter)
                number += 1
            found[f"the end of group {group_number}"] = f"before parameter {number}"
    return found


def frozen(module: torch.nn.Module) -> list[str]:
    """The names of the parameters that are not trained."""
    return [name for name, each in module.named_parameters() if not each.requires_grad]


def _class_name(part: Any) -> str:
    """The name of its class; of a schedule made of others with theirs."""
    name = type(part).__name__
    if not isinstance(part, LRScheduler):
        return name
    inner = [_class_name(schedule) for schedule in getattr(part, MADE_OF, [])]
    return f"{name}({', '.join(inner)})" if inner else name


def _form(value: Any) -> str:
    if is_lazy(value):
        return "not made yet (call the model once)"
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} of shape {tuple(value.shape)}"
    return type(value).__name__


def difference(there: Any, here: dict[str, str]) -> str | None:
    """How the saved description of a part, which may be anything, differs from today's.

    None if it does not. Which parameters are frozen is no difference.
    """
    saved: dict[str, str] = {}
    if isinstance(there, dict):
        saved = {str(name): str(value) for name, value in there.items() if name != FROZEN}
    if saved.get(CLASS) != here[CLASS]:
        return f"{saved.get(CLASS)} there, {here[CLASS]} here"
    found = _changed(saved, {name: value for name, value in here.items() if name != FROZEN})
    differs = _listed(found)
    if differs is not None and "_orig_mod" in differs:
        differs += (
            ". `_orig_mod` is of a part of a model that torch.compile(part) has wrapped in one of "
            "the two programs: part.compile() changes no names"
        )
    return differs


def _changed(saved: dict[str, Any], here: dict[str, Any]) -> list[str]:
    found = [
        f"{name} is {saved[name]} there, {value} here"
        for name, value in here.items()
        if name in saved and repr(saved[name]) != repr(value)  # a saved value may be anything
    ]
    found += [f"only there is {name}" for name in saved if name not in here]
    found += [f"only here is {name}" for name in here if name not in saved]
    return found


def _listed(found: list[str]) -> str | None:
    if len(found) > NAMED:
        found[NAMED:] = [f"and {len(found) - NAMED} more"]
    return "; ".join(found) or None


# Schedules and settings


def refuse_schedule_left_out(parts: dict[str, Any]) -> None:
    """Raise `Error` for an optimizer whose schedule would begin again after a resume.

    torch's schedules add `initial_lr` to each group of their optimizer.
    """
    for name, part in parts.items():
        if not isinstance(part, torch.optim.Optimizer) or has_schedule(part, parts):
            continue
        if any("initial_lr" in group for group in part.param_groups):
            raise Error(
                f"A schedule drives {name}, as `initial_lr` in its groups says, and is no part of "
                "this Checkpoint: after a resume it would begin again. Name it, too: "
                f"Checkpoint({name}=…, schedule=schedule, …). If none drives it any more: "
                f"for group in {name}.param_groups: del group['initial_lr']."
            )


def has_schedule(optimizer: torch.optim.Optimizer, parts: dict[str, Any]) -> bool:
    """Whether one of `parts` is a schedule of it, or of one that has its groups, as SAM's base."""
    mine = {id(group) for group in optimizer.param_groups}
    scheduled = [getattr(part, "optimizer", None) for part in parts.values()]
    groups = [group for each in scheduled for group in getattr(each, "param_groups", [])]
    return any(id(group) in mine for group in groups)


def change_of_course(part: Any, state: Any) -> str | None:
    """How a schedule was made otherwise than the one whose state was saved; None if alike."""
    if not isinstance(part, LRScheduler):
        return None
    return _listed(_changed(_course(state, ""), _course(part.state_dict(), "")))


def other_function(part: Any) -> str | None:
    """Of a schedule that was loaded: the saved rates, and those of its function in this program.

    A LambdaLR saves no function. None if they are the same, but for rounding on another kind of
    processor; for another kind of schedule; and where the schedule has not begun.
    """
    if not isinstance(part, LambdaLR) or part.last_epoch < 0:
        return None
    pairs = zip(part.base_lrs, part.lr_lambdas)
    rates = [base * function(part.last_epoch) for base, function in pairs]
    saved = part.get_last_lr()
    if all(math.isclose(*pair, rel_tol=1e-6) for pair in zip(rates, saved)):
        return None
    return f"the rates {saved}, and this one has {rates}"


def _course(state: Any, prefix: str) -> dict[str, Any]:
    """What a schedule was made with, of its state, which may be anything."""
    found: dict[str, Any] = {}
    if isinstance(state, dict):
        for name, value in state.items():
            if name == MADE_OF and isinstance(value, list | tuple):
                for number, each in enumerate(value):
                    found |= _course(each, f"{prefix}{MADE_OF}[{number}].")
            elif name not in MOVING:
                found[f"{prefix}{name}"] = value
    return found


def added_by_schedules(optimizer: torch.optim.Optimizer, groups: Any) -> str | None:
    """How what schedules have put into its groups differs from that in saved `groups`.

    That is `max_lr` and the like, which do not change while they run.
    """
    there, here = {}, {}
    if isinstance(groups, list):
        for number, (saved, group) in enumerate(zip(groups, optimizer.param_groups)):
            for option, value in group.items():
                is_added = option not in (*OF_GROUPS, *optimizer.defaults)
                if is_added and isinstance(saved, dict) and option in saved:
                    there[f"{option} of group {number}"] = saved[option]
                    here[f"{option} of group {number}"] = value
    return _listed(_changed(there, here))


def settings(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The options of its groups, by names as in a program: `param_groups[0]['lr']`."""
    return {
        f"param_groups[{number}][{option!r}]": value
        for number, group in enumerate(optimizer.param_groups)
        for option, value in group.items()
        if option not in OF_GROUPS[:2]
    }


def changed_settings(
    optimizer: torch.optim.Optimizer, before: dict[str, Any], is_scheduled: bool
) -> list[str]:
    """The names of those options that a program has given and that now are others than `before`.

    Without those that schedules change, if it `is_scheduled`.
    """
    after = settings(optimizer)
    options = [
        option for option in optimizer.defaults if not (is_scheduled and option in SCHEDULED)
    ]
    given = tuple(f"[{option!r}]" for option in options)
    return [
        name
        for name, value in before.items()
        if name.endswith(given) and name in after and repr(value) != repr(after[name])
    ]
