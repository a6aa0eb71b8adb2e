"""Fault injection: break a rank at a chosen moment, in a real run, to see what becomes of it.

`inject` wraps any training function that uses `ElasticSampler`; the tutorials and the tests use
it. `train` is a small, quick one. See `tests/fault_lab.py` for the table of all of them.
"""

import functools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil

SLOW_SAVE = 0.3  # seconds that a save takes at the moment 'save'
PATIENCE = 60  # seconds that a rank waits for its end
OTHER_SIZE = 100_000  # elements, which no bucket of `train` has


def inject(
    function: Callable,
    fault: str | Callable,
    *,
    rank: int = 1,
    when: str = "step",
    step: int = 8,
    mark: str | Path | None = None,
) -> Callable:
    """Return `function` with a fault that strikes on `rank`: `FAULTS[fault]`, or a function.

    `when` is 'start' (before the function begins), 'step' (between two steps, when `step` are
    done), or 'save' (the same, while the checkpoint of that step is being written: choose one at
    which there is a save). With `mark`, a path that every rank can see, it strikes once, however
    often the run is restarted, and the file holds when (s since 1970).
    """
    mark = str(mark) if mark else mark
    faulty = functools.partial(_run_with_fault, function, fault, rank, when, step, mark)
    return functools.update_wrapper(faulty, function, updated=())


def _run_with_fault(function, fault, rank, when, step, mark, /, **arguments):
    # These import torch, which the client that calls `inject` does without.
    from ddp_common.ranks import checkpoint, rendezvous, sampling

    def is_due():
        return rendezvous.rank() == rank and (mark is None or _is_first(mark))

    def strike():
        if is_due():
            act = fault if callable(fault) else FAULTS[fault]
            act()

    def strike_between_steps(sampler):
        if sampler.steps_done == step:
            if when == "save":
                time.sleep(SLOW_SAVE / 3)  # rank 0's save has begun, and is not done
            strike()

    if fault == RESULT:
        result = function(**arguments)
        return threading.Lock() if is_due() else result
    if when == "start":
        strike()
    if when == "save":
        checkpoint.sync = _slow_sync
    sampling.injected.append(strike_between_steps)
    return function(**arguments)


def _is_first(mark):
    """Whether the fault has not struck yet; `mark` then says when it did: now."""
    try:
        with open(mark, "x") as file:
            file.write(repr(time.time()))
    except FileExistsError:
        return False
    return True


def _slow_sync(descriptor):
    time.sleep(SLOW_SAVE)
    os.fsync(descriptor)


def _raise():
    raise ValueError("a fault on purpose")


def _signal(number):
    return lambda: os.kill(os.getpid(), number)


def _deadlock():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def _raise_interrupt():
    raise KeyboardInterrupt


def _start_and_raise():
    """Leave two processes behind that are not in the rank's process group.

    One has a session of its own, one has no parent.
    """
    subprocess.Popen(["sleep", "3600"], start_new_session=True)
    subprocess.run(["sh", "-c", "sleep 3600 &"], start_new_session=True, check=True)
    _raise()


def _call_barrier():
    import torch.distributed as dist  # the client that names a fault does without

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

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
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


def worker_of_this_rank() -> psutil.Process:
    """The process of this rank's Dask worker."""
    return psutil.Process(int(os.environ["DDP_WORKER_PROCESS"]))


RESULT = "result that cannot be pickled"
FAULTS = {
    "raise": _raise,
    "kill": _signal(signal.SIGKILL),
    "stop": _signal(signal.SIGSTOP),
    "hang": _deadlock,
    "sys.exit(3)": lambda: sys.exit(3),
    "os._exit(0)": lambda: os._exit(0),
    "SIGKILL": _signal(signal.SIGKILL),
    "SIGSEGV": _signal(signal.SIGSEGV),
    "SIGTERM": _signal(signal.SIGTERM),
    "SIGSTOP": _signal(signal.SIGSTOP),
    "deadlock": _deadlock,
    "KeyboardInterrupt": _raise_interrupt,
    "collective under a condition": _call_barrier,
    "collective of another size": _reduce_another_size,
    "loader worker killed": _lose_loader_worker,
    "child with a session of its own": _start_and_raise,
    "worker killed": _kill_worker,
    "worker and nanny killed": _kill_worker_and_nanny,
    RESULT: None,
}


def train(
    epochs: int = 2,
    samples: int = 103,
    batch_size: int = 16,
    every_steps: int = 3,
    dropout: float = 0.5,
    pause: float = 0.0,
    leaves_early: int | None = None,
    on_error: str = "warn",
    file_limit: int | None = None,
    mark: str | Path = os.devnull,
):
    """Train a small network with dropout: 7 steps an epoch, a checkpoint every third.

    Returns its weights as one tensor. `pause` is in seconds per step. `leaves_early` is a rank
    that ends the last epoch one batch too soon. `file_limit` (bytes) is the size beyond which no
    file can grow: a full disk. Both leave the time at which they strike in `mark`.
    """
    import resource  # not on every system

    import torch  # the client that sends this function does without
    from torch.nn.parallel import DistributedDataParallel

    from ddp_common import Checkpoint, ElasticSampler, rank, report

    torch.manual_seed(0)
    data = torch.randn(samples, 8)
    targets = data.square().sum(1, keepdim=True)
    network = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Dropout(dropout), torch.nn.Linear(16, 1)
    )
    model = DistributedDataParallel(network)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    sampler = ElasticSampler(samples, batch_size, seed=1)
    checkpoint = Checkpoint(
        model=model,
        optimizer=optimizer,
        sampler=sampler,
        every_steps=every_steps,
        on_error=on_error,
    )
    checkpoint.restore()
    if file_limit is not None:
        Path(mark).write_text(repr(time.time()))
        _, hard_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, hard_limit))
    for epoch in sampler.epochs(epochs):
        for indices in sampler:
            if leaves_early == rank() and sampler.steps_done == epochs * len(sampler):
                Path(mark).write_text(repr(time.time()))
                return None
            loss = torch.nn.functional.mse_loss(model(data[indices]), targets[indices])
            loss = loss * sampler.weight
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            report(loss=loss)
            time.sleep(pause)
    checkpoint.save()
    return torch.cat([parameter.detach().flatten() for parameter in network.parameters()])


def struck_at(mark: str | Path) -> float | None:
    """When the fault struck (s since 1970), None if it did not."""
    if not Path(mark).exists():
        return None
    return float(Path(mark).read_text())
