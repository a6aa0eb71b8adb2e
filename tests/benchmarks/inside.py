"""What it costs to look inside a run, and whether what is said of it is right.

    python tests/benchmarks/inside.py [--output FILE.json] [--only NAME]

| name   | what                                                                                 |
|--------|--------------------------------------------------------------------------------------|
| record | processor time of a training step, with collectives recorded and slow ranks looked   |
|        | for, against the same with neither (TORCH_FR_BUFFER_SIZE=0)                          |
| slow   | runs in which one rank sleeps 20 ms in each step: it is named; quiet runs of about   |
|        | the same length: somebody is named                                                   |
| stall  | a collective under a condition: seconds from the stall's time-out to the exception   |
| growth | seconds without a step when a run on one worker goes on with three                   |
"""

import contextlib
import functools
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import measuring
import torch
from bench import under_launch
from measuring import REPOSITORY, compared, single, take_turns
from torch.nn.parallel import DistributedDataParallel

import ddp_common as ddp

sys.path.insert(0, str(REPOSITORY / "tests"))

import fault_lab

STEPS = 300  # of a repetition of `record`
RUNS = 10  # of each kind, of `slow`
DELAY = 0.02  # seconds a step by which a rank is slow there
SLOW_STEPS, QUIET_STEPS = 420, 3200  # steps of these runs: seven seconds or more
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
            "processor time of a step, recorded and looked at for slow ranks, ms",
            *turns,
            alternative="neither",
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


def measure_slow():
    with ddp.connect("local", workers=2) as client, tempfile.TemporaryDirectory() as folder:
        right = others = in_quiet = 0
        for number in range(RUNS):
            slow = number % 2
            named = _named(client, f"{folder}/slow-{number}", slow, SLOW_STEPS)
            right += slow in named
            others += 1 - slow in named
            in_quiet += len(_named(client, f"{folder}/quiet-{number}", None, QUIET_STEPS))
    of_slow = f"of {RUNS} runs with a rank that is slow by {DELAY * 1e3:.0f} ms a step, "
    return [
        single("slow", f"{of_slow}those that name it", right, at_least=RUNS),
        single("slow", f"{of_slow}those that name the other one", others, at_most=0),
        single("slow", f"of {RUNS} quiet runs, ranks that are named", in_quiet, at_most=0),
    ]


def _named(client, directory, slow, steps):
    """The ranks that the log calls slow."""
    function = functools.partial(train, slow, steps)
    ddp.launch(client, function, workers=2, directory=directory)
    lines = (Path(directory) / "log.txt").read_text().splitlines()
    return [rank for rank in range(2) for line in lines if f" rank {rank} on" in line]


def train(slow, steps):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = DistributedDataParallel(torch.nn.Linear(256, 256))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        if ddp.rank() == slow:
            time.sleep(DELAY)
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
    train(None, STEPS_BEFORE)
    if ddp.rank() == 1:
        mark.write_text(repr(time.time()))
        torch.distributed.barrier()
    train(None, 1)


def measure_growth():
    with ddp.connect("local", workers=3) as client, tempfile.TemporaryDirectory() as folder:
        pauses = [
            fault_lab.growth(client, Path(folder) / f"run-{number}") for number in range(REPEATS)
        ]
    return [
        single(
            "growth",
            "without a step while a run goes on with three workers instead of one, s",
            statistics.median(pauses),
            at_most=1,
        )
    ]


MEASURES = {
    "record": measure_record,
    "slow": measure_slow,
    "stall": measure_stall,
    "growth": measure_growth,
}


if __name__ == "__main__":
    measuring.main(__doc__, MEASURES, "inside")
