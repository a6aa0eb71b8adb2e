"""Runs a student's script as a rank of torchrun, and writes down what it did.

    python -m tutorials.checks.as_rank SCRIPT …

The script need not cooperate. Each rank leaves `rank-R.pt`, what a `Seen` holds, beside the
folder in which it works; a rank that is killed leaves none. GPUs are hidden, or simulated, and
process groups wait at most `PATIENCE` for a rank that does not come. Variables say so:
DDP_CHECK_ON_EACH how many ranks each machine is said to have (empty: all are on this one),
DDP_CHECK_GPUS that each has a GPU.

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

from tutorials.checks.simulated_gpus import SimulatedGpus

PATIENCE = datetime.timedelta(seconds=45)
COUNTED = [(dist, "init_process_group"), (dist, "destroy_process_group"), (torch, "save")]


@dataclass
class Seen:
    """What a rank did."""

    calls: dict = field(default_factory=dict)  # of functions in `COUNTED`: how many returned
    printed: int = 0  # bytes on the standard output, and what it wrote to the standard error
    initial: dict = field(default_factory=dict)  # the weights when DDP has made them equal
    final: dict = field(default_factory=dict)  # the weights at the end
    batches: list = field(default_factory=list)  # the DDP model's inputs, if a backward followed
    shown: set = field(default_factory=set)  # the first digit of each input of a module, bytes
    used: set = field(default_factory=set)  # numbers of this machine's GPUs, if they are simulated
    backends: list = field(default_factory=list)  # of `init_process_group`, if GPUs are simulated
    error: str = ""  # its type and message
    line: str = ""  # the line of the script that raised it


def watch(seen: Seen) -> None:
    """Have torch note in `seen` what the script asks of it."""
    torch.cuda.is_available = lambda: False  # also if the script sets CUDA_VISIBLE_DEVICES
    dist.init_process_group = _with_patience(dist.init_process_group)
    for module, name in COUNTED:
        setattr(module, name, _counted(getattr(module, name), seen.calls))
    _watch_ddp(seen)
    _watch_inputs(seen)
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
    wrap = DistributedDataParallel.__init__

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
        seen.initial = _weights(module)
        seen.final = module.state_dict()  # the tensors themselves: they change with each step
        self.register_forward_hook(note_batch, with_kwargs=True)

    DistributedDataParallel.__init__ = __init__


def _watch_inputs(seen):
    """Note which digits are given to models, also to those without DDP."""

    def note_first_digit(_, inputs, output):
        if inputs and isinstance(inputs[0], torch.Tensor) and inputs[0].shape[-1:] == (784,):
            row = inputs[0].detach().reshape(-1, 784)[:1].cpu()
            seen.shown.add((255 * row).round().to(torch.uint8).numpy().tobytes())

    torch.nn.modules.module.register_module_forward_hook(note_first_digit)


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
    save, top = torch.save, Path.cwd().parent  # the script may go elsewhere
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if on_each := int(os.environ["DDP_CHECK_ON_EACH"] or 0):
        os.environ.update(LOCAL_RANK=str(rank % on_each), LOCAL_WORLD_SIZE=str(on_each))
        machines = {"GROUP_RANK": rank // on_each, "GROUP_WORLD_SIZE": ranks // on_each}
        os.environ.update({name: str(number) for name, number in machines.items()})
    watch(seen)
    sys.argv = [script, *arguments]
    if os.environ["DDP_CHECK_GPUS"]:
        with SimulatedGpus(script, on_each) as gpus:
            code = run(script, seen)
        seen.used, seen.backends = gpus.used, gpus.backends
    else:
        code = run(script, seen)
    if not seen.error:
        atexit._run_exitfuncs()  # the script may leave its group there
    sys.stdout.flush()
    sys.stderr.flush()
    seen.printed += os.fstat(1).st_size  # torchrun has it written to a file
    record = Path(top, f"rank-{rank}.pt")
    save(vars(seen), record.with_suffix(".part"))
    os.replace(record.with_suffix(".part"), record)  # a rank may be killed before
    os._exit(code & 0xFF)


if __name__ == "__main__":
    main(*sys.argv[1:])
