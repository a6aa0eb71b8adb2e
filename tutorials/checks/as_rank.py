"""Runs a student's script as a rank of torchrun, and writes down what it did.

    python -m tutorials.checks.as_rank SCRIPT …

The script need not cooperate. Each rank leaves `rank-R.pt`, what a `Seen` holds, beside the
folder in which it works; a rank that is killed leaves none. GPUs are hidden, and process groups
wait at most `PATIENCE` for a rank that does not come.

torch 2.13 may hang or abort where the last reference to a gloo group goes right after a backward.
A script that is right would not end. So the group is kept, and the process ends without taking
the script's objects apart. What the script has registered with `atexit` is called before.
"""

import atexit
import datetime
import functools
import logging
import os
import runpy
import sys
import traceback
import warnings
from dataclasses import dataclass, field
from pathlib import Path

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

PATIENCE = datetime.timedelta(seconds=45)
COUNTED = [(dist, "init_process_group"), (dist, "destroy_process_group"), (torch, "save")]


@dataclass
class Seen:
    """What a rank did."""

    calls: dict = field(default_factory=dict)  # of functions in `COUNTED`: how many returned
    printed: int = 0  # bytes on the standard output, and what it wrote to the standard error
    moved_late: bool = False  # `.to` was called for the model when DDP had it, and not before
    initial: dict = field(default_factory=dict)  # the weights when DDP has made them equal
    final: dict = field(default_factory=dict)  # the weights at the end
    moves: set = field(default_factory=set)  # (line, "model" or "tensor") of `.to`, `.cuda`
    batches: list = field(default_factory=list)  # the DDP model's inputs, if a backward followed
    shown: set = field(default_factory=set)  # the first digit of each input of a module, bytes
    error: str = ""  # its type and message
    line: str = ""  # the line of the script that raised it


def watch(seen: Seen, script: str) -> None:
    """Have torch note in `seen` what the script asks of it."""
    torch.cuda.is_available = lambda: False  # also if the script sets CUDA_VISIBLE_DEVICES
    dist.init_process_group = _with_patience(dist.init_process_group)
    for module, name in COUNTED:
        setattr(module, name, _counted(getattr(module, name), seen.calls))
    _watch_ddp(seen)
    _watch_inputs(seen)
    _watch_moves(seen, script)
    _watch_standard_error(seen)


def _counted(function, calls):
    name = function.__name__

    @functools.wraps(function)
    def call(*arguments, **named):
        result = function(*arguments, **named)
        calls[name] = calls.get(name, 0) + 1
        return result

    return call


def _with_patience(init):
    """`init_process_group` with a time-out, and a reference to the group that is never lost."""
    kept = []

    @functools.wraps(init)
    def init_process_group(*arguments, **named):
        if len(arguments) < 3:  # the third is the time-out
            named.setdefault("timeout", PATIENCE)
        init(*arguments, **named)
        kept.append(dist.group.WORLD)

    return init_process_group


def _watch_ddp(seen):
    wrap, move = DistributedDataParallel.__init__, torch.nn.Module.to
    moved, not_moved = [], []  # models that `.to` was called for; those that DDP has before

    def note_batch(_, inputs, named, output):
        given = [*inputs, *named.values()]
        if not given or not all(isinstance(each, torch.Tensor) for each in (given[0], output)):
            return
        if output.requires_grad:  # else it is not for training
            batch = given[0].detach().cpu().clone()
            output.register_hook(lambda gradient: seen.batches.append(batch))

    @functools.wraps(wrap)
    def __init__(self, module, *arguments, **named):
        wrap(self, module, *arguments, **named)
        if module not in moved:
            not_moved.extend([self, module])
        seen.initial = _weights(module)
        seen.final = module.state_dict()  # the tensors themselves: they change with each step
        self.register_forward_hook(note_batch, with_kwargs=True)

    @functools.wraps(move)
    def to(self, *arguments, **named):
        seen.moved_late = seen.moved_late or self in not_moved
        moved.append(self)
        return move(self, *arguments, **named)

    DistributedDataParallel.__init__, torch.nn.Module.to = __init__, to


def _watch_inputs(seen):
    """Note which digits are given to models, also to those without DDP."""

    def note_first_digit(_, inputs, output):
        if inputs and isinstance(inputs[0], torch.Tensor) and inputs[0].shape[-1:] == (784,):
            row = inputs[0].detach().reshape(-1, 784)[:1].cpu()
            seen.shown.add((255 * row).round().to(torch.uint8).numpy().tobytes())

    torch.nn.modules.module.register_module_forward_hook(note_first_digit)


def _watch_moves(seen, script):
    """Note where the script itself, and none of torch's lines, moves a model or a tensor."""

    def noted(function, kind):
        @functools.wraps(function)
        def move(self, *arguments, **named):
            caller = sys._getframe(1)
            if caller.f_code.co_filename == script and (
                function.__name__ == "cuda" or _names_device(arguments, named)
            ):
                seen.moves.add((caller.f_lineno, kind))
            return function(self, *arguments, **named)

        return move

    for owner, kind in ((torch.nn.Module, "model"), (torch.Tensor, "tensor")):
        for name in ("to", "cuda"):
            setattr(owner, name, noted(getattr(owner, name), kind))


def _names_device(arguments, named):
    kinds = torch.device, torch.Tensor, str
    is_number = any(type(each) is int for each in arguments)
    return "device" in named or is_number or any(isinstance(each, kinds) for each in arguments)


def _watch_standard_error(seen):
    """Count what the script writes there, without warnings and what torch logs."""
    write, show, emit = sys.stderr.write, warnings.showwarning, logging.StreamHandler.emit

    def counted(text):
        seen.printed += len(text)
        return write(text)

    def not_counted(function):
        @functools.wraps(function)
        def call(*arguments, **named):
            before = seen.printed
            function(*arguments, **named)
            seen.printed = before

        return call

    def emit_and_count(handler, record):
        from_torch = record.name.partition(".")[0] == "torch"
        (not_counted(emit) if from_torch else emit)(handler, record)

    sys.stderr.write = counted
    warnings.showwarning = not_counted(show)
    logging.StreamHandler.emit = emit_and_count


def _weights(module):
    return {name: value.detach().cpu().clone() for name, value in module.state_dict().items()}


def run(script: str, seen: Seen) -> int:
    """Run the script as its own program would be run. Returns its exit code."""
    sys.path[0] = os.path.dirname(script)
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        inside = error.__traceback__
        while inside is not None and inside.tb_frame.f_code.co_filename != script:
            inside = inside.tb_next
        traceback.print_exception(type(error), error, inside)
        seen.error = "".join(traceback.format_exception_only(error)).strip()
        places = [each for each in traceback.extract_tb(inside) if each.filename == script]
        seen.line = f"line {places[-1].lineno}, `{places[-1].line}`" if places else ""
        return 1
    return 0


def main(script: str, *arguments: str) -> None:
    """Run the script, leave what was seen, and end this process."""
    seen = Seen()
    record = Path.cwd().parent / f"rank-{os.environ['RANK']}.pt"
    save = torch.save
    if os.environ.get("DDP_CHECK_APART"):
        os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
        os.environ.update(GROUP_RANK=os.environ["RANK"], GROUP_WORLD_SIZE=os.environ["WORLD_SIZE"])
    watch(seen, script)
    sys.argv = [script, *arguments]
    code = run(script, seen)
    if not seen.error:
        atexit._run_exitfuncs()  # the script may leave its group there
    sys.stdout.flush()
    sys.stderr.flush()
    seen.printed += os.fstat(1).st_size  # torchrun has it written to a file
    save(vars(seen), record)
    os._exit(code & 0xFF)


if __name__ == "__main__":
    main(*sys.argv[1:])
