"""A small training function, and more faults and moments for it than `ddp.inject` has.

`benchmarks/fault_lab.py` has the table of what is broken, when, and on which rank.
"""

import functools
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import cloudpickle
import psutil
from patience import PATIENCE

import ddp_common as ddp
from ddp_common.faults import FAULTS as PUBLIC
from ddp_common.faults import is_due

SLOW_SAVE = 0.3  # seconds that a save takes at the moment 'save'
OTHER_SIZE = 100_000  # elements, which no bucket of `train` has


def inject(function, fault, *, rank=1, when="step", step=8, mark=None):
    """`ddp.inject` with any of `FAULTS`, and with more moments.

    `when` is 'start' (before the function begins), 'step' (as `ddp.inject` has it), 'save' (the
    same, while the checkpoint of that step is being written: choose one at which there is a save)
    or 'end' (the rank returns what cannot be pickled). When `mark` was made says when the fault
    struck: see `struck_at`.
    """
    act = fault if callable(fault) else FAULTS[fault]
    mark = None if mark is None else str(mark)
    if when == "start":
        faulty = functools.partial(_strike_at_start, function, act, rank, mark)
    elif when == "end":
        faulty = functools.partial(_spoil_result, function, rank, mark)
    else:
        faulty = ddp.inject(function, act, rank=rank, step=step, mark=mark)
    if when == "save":
        faulty = functools.partial(_save_slowly, faulty, step)
    return functools.update_wrapper(faulty, function, updated=())


def struck_at(mark):
    """When the fault struck (s since 1970), None if it did not."""
    mark = Path(mark)
    return mark.stat().st_mtime if mark.exists() else None


def _strike_at_start(function, act, rank, mark, /, **arguments):
    if is_due(rank, mark):
        act()
    return function(**arguments)


def _spoil_result(function, rank, mark, /, **arguments):
    result = function(**arguments)
    return threading.Lock() if is_due(rank, mark) else result


def _save_slowly(function, step, /, **arguments):
    from ddp_common import checkpoint, moments

    def wait_for_save(sampler):
        if sampler.steps_done == step:
            time.sleep(SLOW_SAVE / 3)  # rank 0's save has begun, and is not done

    checkpoint.sync = _slow_sync
    moments.injected.append(wait_for_save)  # before the fault, which `function` appends
    return function(**arguments)


def _slow_sync(descriptor):
    time.sleep(SLOW_SAVE)
    os.fsync(descriptor)


# Faults


def _signal(number):
    return lambda: os.kill(os.getpid(), number)


def _raise_interrupt():
    raise KeyboardInterrupt


def _start_and_raise():
    """Leave two processes behind that are not in the rank's process group.

    One has a session of its own, one has no parent.
    """
    subprocess.Popen(["sleep", "3600"], start_new_session=True)
    subprocess.run(["sh", "-c", "sleep 3600 &"], start_new_session=True, check=True)
    PUBLIC["raise"]()


def _call_barrier():
    import torch.distributed as dist

    dist.barrier()


def _reduce_another_size():
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.zeros(OTHER_SIZE))


def _lose_loader_worker():
    """Read batches while the process that loads them is killed."""
    from torch.utils.data import DataLoader

    for _ in DataLoader(_KillsItsReader(), num_workers=1):
        pass


class _KillsItsReader:
    """A dataset whose first row kills the process that reads it."""

    def __len__(self):
        return 1

    def __getitem__(self, index):
        os.kill(os.getpid(), signal.SIGKILL)
        return index


def _kill_worker():
    worker_of_this_rank().kill()
    _end_with_the_worker()


def _kill_worker_and_nanny():
    worker = worker_of_this_rank()
    worker.parent().kill()
    worker.kill()
    _end_with_the_worker()


def _end_with_the_worker():
    """Do nothing more. On a busy machine it takes a moment until a rank ends with its worker."""
    time.sleep(PATIENCE)


def worker_of_this_rank():
    """The process of this rank's Dask worker."""
    return psutil.Process(int(os.environ["DDP_WORKER_PROCESS"]))


FAULTS = {
    **PUBLIC,
    "sys.exit(3)": lambda: sys.exit(3),
    "os._exit(0)": lambda: os._exit(0),
    "SIGSEGV": _signal(signal.SIGSEGV),
    "SIGTERM": _signal(signal.SIGTERM),
    "KeyboardInterrupt": _raise_interrupt,
    "collective under a condition": _call_barrier,
    "collective of another size": _reduce_another_size,
    "loader worker killed": _lose_loader_worker,
    "child with a session of its own": _start_and_raise,
    "worker killed": _kill_worker,
    "worker and nanny killed": _kill_worker_and_nanny,
    "result that cannot be pickled": None,  # at the moment 'end'
}


# What is broken


def train(
    epochs=2,
    samples=103,
    batch_size=16,
    every_steps=3,
    dropout=0.5,
    pause=0.0,
    leaves_early=None,
    on_error="warn",
    file_limit=None,
    mark=os.devnull,
):
    """Train a small network with dropout: 7 steps an epoch, a checkpoint every third.

    Returns its weights as one tensor. `pause` is in seconds per step. `leaves_early` is a rank
    that ends the last epoch one batch too soon. `file_limit` (bytes) is the size beyond which no
    file can grow: a full disk. Both make the file `mark` when they strike.
    """
    import resource

    import torch
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    data = torch.randn(samples, 8)
    targets = data.square().sum(1, keepdim=True)
    network = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Dropout(dropout), torch.nn.Linear(16, 1)
    )
    model = DistributedDataParallel(network)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    sampler = ddp.ElasticSampler(samples, batch_size, seed=1)
    checkpoint = ddp.Checkpoint(
        model=model,
        optimizer=optimizer,
        sampler=sampler,
        every_steps=every_steps,
        on_error=on_error,
    )
    checkpoint.restore()
    if file_limit is not None:
        Path(mark).write_text("")
        _, hard_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, hard_limit))
    for epoch in sampler.epochs(epochs):
        for indices in sampler.batches():
            if leaves_early == ddp.rank() and sampler.steps_done == epochs * len(sampler):
                Path(mark).write_text("")
                return None
            loss = torch.nn.functional.mse_loss(model(data[indices]), targets[indices])
            loss = loss * sampler.weight
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            checkpoint.step()
            ddp.report(loss=loss)
            time.sleep(pause)
    checkpoint.save()
    return torch.cat([parameter.detach().flatten() for parameter in network.parameters()])


cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import it
