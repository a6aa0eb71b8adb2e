"""What it costs to look inside a run, and whether what is said of it is right.

    python tests/benchmarks/inside.py [--output FILE.json] [--only NAME]

| name   | what                                                                                 |
|--------|--------------------------------------------------------------------------------------|
| record | processor time of a training step, with collectives recorded, against the same       |
|        | without (TORCH_FR_BUFFER_SIZE=0)                                                     |
| stall  | a collective under a condition: seconds from the stall's time-out to the exception   |
"""

import contextlib
import functools
import os
import statistics
import tempfile
import time
from pathlib import Path

import measuring
import torch
from bench import under_launch
from measuring import compared, single, take_turns
from torch.nn.parallel import DistributedDataParallel

import ddp_common as ddp

STEPS = 300  # of a repetition of `record`
STALL_TIMEOUT = 3.0  # seconds
STEPS_BEFORE = 200  # steps before a rank stalls: enough to fill the recorder
REPEATS = 5


def measure_record():
    """Two clusters, whose ranks have their workers' environment."""
    with _cluster() as ours, _cluster(TORCH_FR_BUFFER_SIZE="0") as other:
        turns = take_turns(lambda: _processor_time(ours), lambda: _processor_time(other), turns=12)
    return [
        compared(
            "record",
            "processor time of a step, its collectives recorded, ms",
            *turns,
            alternative="not recorded",
            at_most=1.01,
        )
    ]


@contextlib.contextmanager
def _cluster(**variables):
    os.environ.update(variables)
    try:
        with ddp.connect("local", workers=2) as client:
            yield client
    finally:
        for name in variables:
            del os.environ[name]


def _processor_time(client):
    """The mean over both ranks, in ms."""
    ranks = under_launch(client, "steps", count=STEPS)
    return statistics.mean(rank["cpu"] for rank in ranks) * 1e3


def train(steps):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = DistributedDataParallel(torch.nn.Linear(256, 256))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(64, 256)).square().mean().backward()
        optimizer.step()


def measure_stall():
    with ddp.connect("local", workers=2) as client, tempfile.TemporaryDirectory() as folder:
        seconds = [_to_exception(client, Path(folder), number) for number in range(REPEATS)]
    return [
        single(
            "stall",
            "from a stall's time-out to the exception that names the collective, s",
            statistics.median(seconds),
            at_most=1,
        )
    ]


def _to_exception(client, folder, number):
    mark = folder / f"mark-{number}"
    try:
        ddp.launch(
            client,
            functools.partial(stall, mark),
            workers=2,
            directory=folder / f"run-{number}",
            stall_timeout=STALL_TIMEOUT,
        )
    except ddp.RankStalled as error:
        assert "It has called barrier" in str(error), error
        return time.time() - float(mark.read_text()) - STALL_TIMEOUT
    raise AssertionError("the ranks did not stall")


def stall(mark):
    train(STEPS_BEFORE)
    if ddp.rank() == 1:
        mark.write_text(repr(time.time()))
        torch.distributed.barrier()
    train(1)


MEASURES = {
    "record": measure_record,
    "stall": measure_stall,
}


if __name__ == "__main__":
    measuring.main(__doc__, MEASURES, "inside")
