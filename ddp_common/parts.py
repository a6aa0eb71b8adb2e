"""The parts of a Checkpoint: a class for each kind, which knows what is particular about it.

What a checkpoint asks of each part: the state that is saved; a *description* that is saved beside
it, plain text; whether a saved one belongs to it; to load it; what must be the same on all ranks.
Modules and optimizers are described by their entries, and torch's own schedules by what they were
made with. Of anything else the name of its class is known, and no more.

Promises: what another program wrote is refused before a part is loaded; other data are, when the
position of the sampler is. Parameters are trained or frozen as they were. A copy of a state has
its types, its tensors share no memory with the part, and it loads without executing code, or it is
refused.
"""

import math
import sys
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import torch
from dask.tokenize import tokenize
from torch.nn import BatchNorm1d, BatchNorm2d, BatchNorm3d
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from ddp_common import replicas, reporting
from ddp_common.errors import Error
from ddp_common.rendezvous import rank

WRITTEN_BY = "written_by"  # the descriptions in a file, beside the states
# Names that no entry of a module has: a word of Python's, and one that ends with a dot
CLASS = "class"
FROZEN = "frozen."  # the parameters that are not trained
NAMED = 3  # so many differences are named in a message

Description = dict[str, str]


def parts_of(values: dict[str, Any]) -> dict[str, "Part"]:
    """A `Part` for each value. Raises `Error` for one that cannot be saved."""
    parts: dict[str, Part] = {}
    for name, value in values.items():
        kinds = [each for each in KINDS if isinstance(replicas.unwrapped(value), each)]
        parts[name] = KINDS[kinds[0]](name, value, parts)
    return parts


class Part:
    """Anything that has `state_dict` and `load_state_dict`."""

    def __init__(self, name: str, value: Any, parts: dict[str, "Part"]):
        """`parts` will have all of its Checkpoint. Raises `Error` for what cannot be saved."""
        self.name = name
        self.value = replicas.unwrapped(value)
        self.parts = parts
        if not hasattr(self.value, "load_state_dict") or name == WRITTEN_BY:
            raise Error(
                f"Checkpoint cannot save {name}: a {type(self.value).__name__} has no state that "
                "it could load again. Give what has load_state_dict, for the position in the data "
                f"the ElasticSampler; and another name than {WRITTEN_BY}."
            )

    def state(self) -> Any:
        """What is saved of it."""
        return self.value.state_dict()

    def description(self, state: Any) -> Description:
        """What is saved beside that state, and must be the same in a program that resumes."""
        return {CLASS: type(self.value).__name__}

    def made_with(self, state: Any) -> dict[str, Any]:
        """What never changes while it runs, of a state that may be anything, by name."""
        return {}

    def fingerprint(self, state: Any) -> replicas.Fingerprint:
        """What must be the same on all ranks, by name."""
        if not isinstance(state, dict):
            return {self.name: tokenize(state)}
        return {f"{self.name}[{key!r}]": tokenize(value) for key, value in state.items()}

    def refuse_unfit(self) -> None:
        """Raise `Error` for what would be wrong after a resume."""

    def refuse_other(self, saved: Any, state: Any, path: Path) -> None:
        """Raise `Error` if another program has saved this description, or this state."""
        here = self.state()
        differs = _difference(_texts(saved), self.description(here))
        if differs is not None:
            raise Error(
                f"{path} was written by another {self.name}: {differs}. Resume with the code and "
                "the config.json of its run; make all parameter groups before restore()."
            )
        there, mine = self.made_with(state), self.made_with(here)
        in_both = [name for name in there if name in mine]
        differs = _listed(_changed(*[{k: each[k] for k in in_both} for each in (there, mine)]))
        if differs is not None:
            models = [name for name, part in self.parts.items() if isinstance(part, ModulePart)]
            model = models[0] if models else "model"
            raise Error(
                f"{path} was written with another {self.name}: {differs}. Its course is that of "
                "the run which made it, to the end. Resume with the config.json of its run; a "
                "longer run is a new run from these weights, without this folder: "
                f"model.load_state_dict(torch.load({str(path)!r}, weights_only=True)[{model!r}])"
            )

    def load(self, saved: Any, state: Any) -> None:
        """Load a state, of which `saved` is the description; tell what the user must know."""
        self.value.load_state_dict(state)

    def problems(self, of_partitions: bool) -> list[str]:
        """What is not wrong and may surprise. `of_partitions`: a rank's rows are."""
        return []


class ModulePart(Part):
    """A module, without DDP and torch.compile around it."""

    def __init__(self, name: str, value: Any, parts: dict[str, Part]):
        super().__init__(name, value, parts)
        self.ddp = replicas.ddp_around(value)
        # DDP averages those that were trained when it was made
        self._not_averaged = set(self._frozen()) if self.ddp is not None else set()

    def _frozen(self) -> list[str]:
        """The names of the parameters that are not trained."""
        return [name for name, each in self.value.named_parameters() if not each.requires_grad]

    def description(self, state: Any) -> Description:
        entries = {name: _form(value) for name, value in state.items()}
        return super().description(state) | entries | {FROZEN: " ".join(self._frozen())}

    def fingerprint(self, state: Any) -> replicas.Fingerprint:
        return replicas.of_module(self.name, self.value, state, self.ddp)

    def trained(self) -> list[str]:
        """The names of the parameters that are trained."""
        return [name for name, each in self.value.named_parameters() if each.requires_grad]

    def refuse_other(self, saved: Any, state: Any, path: Path) -> None:
        super().refuse_other(saved, state, path)
        left_out = sorted(self._not_averaged - set(self._saved_frozen(saved)))
        if left_out:
            raise Error(
                f"{path} was written when requires_grad of {self.name}.{left_out[0]} was True, "
                "and DDP was made here when it was False: it would not average it. Give "
                "Checkpoint the plain model, and call restore() before DistributedDataParallel(…)."
            )

    def _saved_frozen(self, saved: Any) -> list[str]:
        frozen = saved.get(FROZEN)
        return frozen.split() if isinstance(frozen, str) else self._frozen()

    def load(self, saved: Any, state: Any) -> None:
        frozen = self._saved_frozen(saved)
        for name, parameter in self.value.named_parameters():
            if parameter.requires_grad is (name in frozen):
                parameter.requires_grad_(name not in frozen)
        super().load(saved, state)

    def problems(self, of_partitions: bool) -> list[str]:
        found = []
        kinds = BatchNorm1d, BatchNorm2d, BatchNorm3d
        if of_partitions and any(isinstance(each, kinds) for each in self.value.modules()):
            found.append(
                f"{self.name} normalises batches, and each rank has rows of its own partitions "
                "alone: where the table is ordered, the ranks' batches differ. Shuffle it in "
                "Dask, or use LayerNorm, or SyncBatchNorm on GPUs."
            )
        for hook, state in [] if self.ddp is None else self.ddp._comm_hooks:
            if not isinstance(state, torch.distributed.ProcessGroup | None):
                found.append(
                    f"{self.name} has the communication hook {hook.__name__}, whose state is in "
                    "no checkpoint: a resumed run ends with other weights."
                )
        return found


class OptimizerPart(Part):
    """An optimizer: its parameters in their order, and their groups."""

    OF_GROUPS = ("params", "param_names", "initial_lr")  # which are no options
    SCHEDULED = ("lr", "momentum", "betas")  # options that schedules change

    def _names(self) -> dict[int, str]:
        """The name of each parameter that a part of this Checkpoint has, by its id."""
        return {
            id(parameter): f"{part.name}.{name}"
            for part in self.parts.values()
            if isinstance(part, ModulePart)
            for name, parameter in part.value.named_parameters()
        }

    def description(self, state: Any) -> Description:
        names = self._names()
        found = super().description(state)
        number = 0
        for group_number, group in enumerate(self.value.param_groups):
            for parameter in group["params"]:
                found[f"parameter {number}"] = names.get(id(parameter), "unnamed")
                found[f"the type of parameter {number}"] = _form(parameter)
                number += 1
            found[f"the end of group {group_number}"] = f"before parameter {number}"
        return found

    def made_with(self, state: Any) -> dict[str, Any]:
        """What schedules have put into its groups: `max_lr` and the like."""
        groups = state.get("param_groups") if isinstance(state, dict) else None
        known = (*self.OF_GROUPS, *self.value.defaults)
        return {
            f"{option} of group {number}": value
            for number, group in enumerate(groups if isinstance(groups, list) else [])
            for option, value in (group.items() if isinstance(group, dict) else [])
            if option not in known
        }

    def settings(self) -> dict[str, Any]:
        """The options of its groups, as in a program: `optimizer.param_groups[0]['lr']`."""
        return {
            f"{self.name}.param_groups[{number}][{option!r}]": value
            for number, group in enumerate(self.value.param_groups)
            for option, value in group.items()
            if option not in self.OF_GROUPS[:2]
        }

    def fingerprint(self, state: Any) -> replicas.Fingerprint:
        return {option: tokenize(value) for option, value in self.settings().items()}

    def has_schedule(self) -> bool:
        """Whether a part is a schedule of it, or of one that has its groups, as SAM's base."""
        mine = {id(group) for group in self.value.param_groups}
        scheduled = [getattr(part.value, "optimizer", None) for part in self.parts.values()]
        groups = [group for each in scheduled for group in getattr(each, "param_groups", [])]
        return any(id(group) in mine for group in groups)

    def refuse_unfit(self) -> None:
        """Raise `Error` where a schedule, or weights, would begin again after a resume."""
        names = self._names()
        trained = [each for group in self.value.param_groups for each in group["params"]]
        unsaved = [each for each in trained if id(each) not in names]
        if unsaved:
            raise Error(
                f"{self.name} trains {len(unsaved)} parameter(s) that no module of this "
                f"Checkpoint has, such as one of shape {tuple(unsaved[0].shape)}: a resume would "
                "begin with new ones. Wrap their module in DistributedDataParallel, so that they "
                f"stay the same on all ranks, and name it, too: Checkpoint({self.name}=…, loss=…)."
            )
        # torch's schedules add this name to each group of their optimizer
        is_driven = any("initial_lr" in group for group in self.value.param_groups)
        if is_driven and not self.has_schedule():
            raise Error(
                f"A schedule drives {self.name}, as `initial_lr` in its groups says, and is no "
                "part of this Checkpoint: after a resume it would begin again. Name it, too: "
                f"Checkpoint({self.name}=…, schedule=schedule, …). If none drives it any more: "
                f"for group in {self.name}.param_groups: del group['initial_lr']."
            )

    def load(self, saved: Any, state: Any) -> None:
        """Load it. Options that the program has set otherwise are named on stderr."""
        before = self.settings()
        super().load(saved, state)
        after = self.settings()
        moving = self.SCHEDULED if self.has_schedule() else ()
        options = tuple(f"[{each!r}]" for each in self.value.defaults if each not in moving)
        for option, value in before.items() if rank() == 0 else []:
            is_given = option.endswith(options) and option in after
            if is_given and repr(value) != repr(after[option]):
                text = (
                    f"Resumed with {option} = {after[option]!r}, as it was saved; "
                    f"this program has made it with {value!r}."
                )
                print(text, file=sys.stderr, flush=True)


class SchedulePart(Part):
    """A schedule of an optimizer's rate. Of torch's own classes it is known what moves."""

    # Of the state; and `verbose`, which torch has no more
    MOVING = (
        *("last_epoch", "best", "num_bad_epochs", "cooldown_counter", "T_cur", "T_i", "verbose"),
        *("_step_count", "_last_lr", "_is_initial", "_get_lr_called_within_step"),
    )
    MADE_OF = "_schedulers"  # the schedules that a schedule is made of, in its state too

    def description(self, state: Any) -> Description:
        return {CLASS: self._class_name(self.value)}

    def _class_name(self, schedule: LRScheduler) -> str:
        """The name of its class; of a schedule made of others with theirs."""
        inner = [self._class_name(each) for each in getattr(schedule, self.MADE_OF, [])]
        name = type(schedule).__name__
        return f"{name}({', '.join(inner)})" if inner else name

    def made_with(self, state: Any) -> dict[str, Any]:
        return self._made_with(self.value, state, "")

    def _made_with(self, schedule: LRScheduler, state: Any, prefix: str) -> dict[str, Any]:
        is_of_torch = type(schedule).__module__ == LRScheduler.__module__
        if not is_of_torch or not isinstance(state, dict):
            return {}
        moving = (*self.MOVING, self.MADE_OF)
        found = {f"{prefix}{k}": value for k, value in state.items() if k not in moving}
        states = state.get(self.MADE_OF)
        inner = zip(getattr(schedule, self.MADE_OF, []), states if type(states) is list else [])
        for number, (each, its_state) in enumerate(inner):
            found |= self._made_with(each, its_state, f"{prefix}{self.MADE_OF}[{number}].")
        return found

    def load(self, saved: Any, state: Any) -> None:
        """Load it. Another function than the run had is told: a LambdaLR saves none."""
        super().load(saved, state)
        schedule = self.value
        if not isinstance(schedule, LambdaLR) or schedule.last_epoch < 0 or rank() != 0:
            return
        pairs = zip(schedule.base_lrs, schedule.lr_lambdas)
        rates = [base * function(schedule.last_epoch) for base, function in pairs]
        there = schedule.get_last_lr()
        # Up to rounding: the file may come from another kind of processor
        if not all(math.isclose(*pair, rel_tol=1e-6) for pair in zip(rates, there)):
            text = (
                f"The function of {self.name} is another one than in the run that saved: for step "
                f"{schedule.last_epoch} that had the rates {there}, and this one has {rates}. "
                "Training goes on with this program's function. For the rest of the earlier "
                "course, resume with its settings."
            )
            reporting.post(reporting.Problem(text))


# The first that fits
KINDS = {
    torch.nn.Module: ModulePart,
    torch.optim.Optimizer: OptimizerPart,
    LRScheduler: SchedulePart,
    object: Part,
}


# A file


def load_into(parts: dict[str, Part], content: Any, path: Path) -> None:
    """Load each part from the `content` of the file at `path`.

    Raises `Error` for what another program wrote.
    """
    if not isinstance(content, dict) or not isinstance(content.get(WRITTEN_BY), dict):
        raise Error(
            f"{path} does not say what wrote it ({WRITTEN_BY}): another program did, or version "
            "0.3 or older. Go on with that one."
        )
    there = [str(name) for name in content if name != WRITTEN_BY]
    if set(there) != set(parts):
        raise Error(
            f"{path} holds {', '.join(there)}; this run saves {', '.join(parts)}. Resume "
            "with the code that wrote it."
        )
    saved = content[WRITTEN_BY]
    for name, part in parts.items():
        part.refuse_other(saved.get(name), content[name], path)
    for name, part in parts.items():
        try:
            part.load(saved[name], content[name])
        except Error:
            raise
        except Exception as error:
            raise Error(
                f"{path} was written by another {name}, which does not load it: {error!r}. Resume "
                "with the code that wrote it."
            ) from error


# Descriptions


def _form(value: Any) -> str:
    if is_lazy(value):
        return "not made yet (call the model once)"
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} of shape {tuple(value.shape)}"
    return type(value).__name__


def _texts(saved: Any) -> Description:
    """A saved description, which may be anything."""
    return {str(k): str(v) for k, v in saved.items()} if isinstance(saved, dict) else {}


def _difference(saved: Description, here: Description) -> str | None:
    """How two descriptions differ, None if they do not. What is frozen is no difference."""
    if saved.get(CLASS) != here[CLASS]:
        return f"{saved.get(CLASS)} there, {here[CLASS]} here"
    differs = _listed(_changed({**saved, FROZEN: ""}, {**here, FROZEN: ""}))
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


# Copies

# What loads without executing code, beside tensors and containers
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.Size, torch.dtype, torch.device)


def copy_of(value: Any, where: str, buffers: dict[str, torch.Tensor]) -> Any:
    """A copy of a state, of the same types, its tensors on the CPU.

    `where` names its place in the whole, `buffers` are the tensors of an earlier copy by their
    places, which are used again where they fit: new memory costs more than copying. Raises `Error`
    for anything that `torch.load(weights_only=True)` would refuse, and for a tensor of which a
    rank has only a part.
    """
    if isinstance(value, torch.Tensor):
        return _copy_of_tensor(value, where, buffers)
    if type(value) in (dict, OrderedDict, Counter):
        copy = type(value)()
        for key, each in value.items():
            copy[copy_of(key, where, {})] = copy_of(each, f"{where}[{key!r}]", buffers)
        if isinstance(value, OrderedDict):  # the versions of its modules: `_metadata`
            vars(copy).update(copy_of(vars(value), where, {}))
        return copy
    if type(value) in (list, tuple):
        pairs = enumerate(value)
        return type(value)(copy_of(each, f"{where}[{number}]", buffers) for number, each in pairs)
    if type(value) is set:
        return {copy_of(each, where, {}) for each in value}
    if type(value) in PLAIN:
        return value
    raise Error(
        f"The state {where} is a {type(value).__module__}.{type(value).__name__}, which cannot be "
        "loaded again without executing code. Keep states to tensors and plain Python values (a "
        "NumPy number becomes one with .item())."
    )


def _copy_of_tensor(
    value: torch.Tensor, where: str, buffers: dict[str, torch.Tensor]
) -> torch.Tensor:
    if hasattr(value, "full_tensor"):  # a DTensor; to import its class takes time
        raise Error(
            f"The state {where} is a DTensor: rank 0 has only a part of it. Gather the whole "
            "first, on all ranks (docs/gpu.md), or use torch.distributed.checkpoint."
        )
    buffer = buffers.get(where)
    if buffer is None or (buffer.shape, buffer.dtype) != (value.shape, value.dtype):
        buffer = torch.empty_like(value, device="cpu", requires_grad=False)
        buffers[where] = buffer
    return buffer.copy_(value.detach())
