"""Runs a script as `__main__`, and writes down what it asks torch to do.

    torchrun … observed.py RECORDS SCRIPT [ARGUMENT …]

The script need not cooperate, and does not import this package. Each rank leaves in the folder
RECORDS a file `rank-R.jsonl`, a line for each event, written when it happens, so that it can be
read after a rank was killed; and `initial-R.pt` and `final-R.pt`, the parameters that its
optimizer has before the first step and after the last. Relies on names of torch that a script
calls, and on `DataLoader`'s private `_next_index`. GPUs are hidden, and process groups get a
time-out of `PATIENCE`: two ranks must find room everywhere, and nobody waits half an hour.
"""

import datetime
import functools
import json
import os
import runpy
import sys
import threading

os.environ["CUDA_VISIBLE_DEVICES"] = ""

PATIENCE = datetime.timedelta(seconds=20)
COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "broadcast",
    "broadcast_object_list",
    "reduce",
    "gather",
    "gather_object",
    "scatter",
    "barrier",
)


def _do_nothing():
    """Nothing is to be done at the end of a script that has no optimizer."""


class Notes:
    """The events of this rank. Writing one takes some microseconds."""

    def __init__(self, folder: str, rank: str):
        self.folder, self.rank = folder, rank
        self.inside = threading.local()  # whether a thread is in a call that is noted
        self.at_the_end = _do_nothing
        self._file = open(os.path.join(folder, f"rank-{rank}.jsonl"), "a", buffering=1)

    def add(self, event, **values):
        print(json.dumps({"event": event, **values}), file=self._file)

    def place(self, kind):
        return os.path.join(self.folder, f"{kind}-{self.rank}.pt")


def watch(notes: Notes):
    """Make torch tell `notes` what it is asked to do."""
    import torch
    import torch.distributed as dist

    _watch_process_group(notes, dist)
    _watch_ddp(notes, torch.nn.parallel.DistributedDataParallel)
    _watch_loaders(notes, torch.utils.data.DataLoader)
    _watch_training(notes, torch)
    _watch_saving(notes, torch)


def _watch_process_group(notes, dist):
    init, destroy = dist.init_process_group, dist.destroy_process_group

    @functools.wraps(init)
    def init_process_group(*arguments, **named):
        notes.add("joining")
        init(*arguments, **{**named, "timeout": PATIENCE})
        notes.add("init", rank=dist.get_rank(), world_size=dist.get_world_size())

    @functools.wraps(destroy)
    def destroy_process_group(*arguments, **named):
        destroy(*arguments, **named)
        notes.add("destroy")

    dist.init_process_group = init_process_group
    dist.destroy_process_group = destroy_process_group
    for name in COLLECTIVES:
        setattr(dist, name, _noted(notes, name, getattr(dist, name)))


def _noted(notes, name, collective):
    """`collective`, noted when it is called by the script and not by torch in another one."""

    @functools.wraps(collective)
    def call(*arguments, **named):
        if getattr(notes.inside, "call", False):
            return collective(*arguments, **named)
        notes.inside.call = True
        notes.add("call", name=name)
        try:
            result = collective(*arguments, **named)
        finally:
            notes.inside.call = False
        notes.add("returned", name=name)
        return result

    return call


def _watch_ddp(notes, wrapper):
    init, forward = wrapper.__init__, wrapper.forward

    @functools.wraps(init)
    def __init__(self, module, device_ids=None, *arguments, **named):
        notes.inside.call = True
        try:
            init(self, module, device_ids, *arguments, **named)
        finally:
            notes.inside.call = False
        notes.add("wrap")

    @functools.wraps(forward)
    def noted_forward(self, *arguments, **named):
        notes.add("forward")
        return forward(self, *arguments, **named)

    wrapper.__init__, wrapper.forward = __init__, noted_forward


def _watch_loaders(notes, loader_class):
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    begin, next_index = loader_class.__iter__, _BaseDataLoaderIter._next_index
    numbers = {}  # of loaders, by the object that gives indices

    @functools.wraps(begin)
    def __iter__(self):
        sampler = self._index_sampler
        number, _ = numbers.setdefault(id(sampler), (len(numbers), sampler))  # kept alive
        dealer = type(getattr(self, "sampler", None)).__name__
        notes.add("pass", loader=number, length=len(self.dataset), sampler=dealer)
        return begin(self)

    @functools.wraps(next_index)
    def _next_index(self):
        indices = next_index(self)
        number, _ = numbers.get(id(self._index_sampler), (None, None))
        listed = indices if isinstance(indices, (list, tuple)) else [indices]
        notes.add("fetch", loader=number, indices=[int(index) for index in listed])
        return indices

    loader_class.__iter__, _BaseDataLoaderIter._next_index = __iter__, _next_index


def _watch_training(notes, torch):
    from torch.optim import optimizer as optimizers

    backward, save = torch.Tensor.backward, torch.save
    known = []

    @functools.wraps(backward)
    def noted_backward(self, *arguments, **named):
        if self.numel() == 1:
            notes.add("backward", loss=self.item())
        return backward(self, *arguments, **named)

    def parameters_of(optimizer):
        return [
            parameter.detach().cpu().clone()
            for group in optimizer.param_groups
            for parameter in group["params"]
        ]

    def save_whole(content, place):
        save(content, f"{place}.part")
        os.replace(f"{place}.part", place)

    def before(optimizer, *_):
        if not known:
            known.append(optimizer)
            save_whole(parameters_of(optimizer), notes.place("initial"))

    def after(optimizer, *_):
        rate = float(optimizer.param_groups[0]["lr"])
        notes.add("step", optimizer=type(optimizer).__name__, lr=rate)

    def at_the_end():
        if known:
            save_whole(parameters_of(known[0]), notes.place("final"))

    torch.Tensor.backward = noted_backward
    optimizers.register_optimizer_step_pre_hook(before)
    optimizers.register_optimizer_step_post_hook(after)
    notes.at_the_end = at_the_end


def _watch_saving(notes, torch):
    save = torch.save

    @functools.wraps(save)
    def noted_save(obj, f, *arguments, **named):  # torch's own names: they may be given by name
        file = getattr(f, "name", f)  # of one that is open
        place = os.path.abspath(file) if isinstance(file, (str, os.PathLike)) else None
        notes.add("save", file=place)
        return save(obj, f, *arguments, **named)

    torch.save = noted_save


def main(folder: str, script: str, *arguments: str):
    """Run the script; whatever it raises, this process raises too."""
    notes = Notes(folder, os.environ["RANK"])
    watch(notes)
    sys.argv = [script, *arguments]
    sys.path[0] = os.path.dirname(script)
    try:
        runpy.run_path(script, run_name="__main__")
        notes.add("end")
    except BaseException as error:
        notes.add("error", type=type(error).__name__, text=str(error)[:2_000])
        raise
    finally:
        notes.at_the_end()


if __name__ == "__main__":
    main(*sys.argv[1:])
