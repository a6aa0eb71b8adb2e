"""A rank that keeps the others waiting, on real ranks: it is named, and trains on."""

import functools
import sys
import time

import cloudpickle
import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import ddp_common as ddp

cloudpickle.register_pickle_by_value(sys.modules[__name__])

DELAY = 0.1  # seconds a step: more than what else a busy machine does to a rank
ENOUGH = 210  # steps until the third sample, which is more than five seconds after the first


def train(slow_rank, steps, delay=DELAY, optimizers=1):
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(32, 32))
    each = [torch.optim.SGD(model.parameters(), lr=0.01) for _ in range(optimizers)]
    for _ in range(steps):
        if ddp.rank() == slow_rank:
            time.sleep(delay)
        model(torch.randn(8, 32)).square().sum().backward()
        for optimizer in each:
            optimizer.step()
    return steps


def launch(client, tmp_path, *arguments, **options):
    function = functools.partial(train, *arguments, **options)
    return ddp.launch(client, function, workers=2, directory=tmp_path / "run")


def log_of(run):
    return (run.directory / "log.txt").read_text()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_slow_in_every_step_is_named(client, tmp_path, rank):
    run = launch(client, tmp_path, rank, ENOUGH)
    lines = [line for line in log_of(run).splitlines() if "comes last to" in line]
    assert len(lines) == 1
    assert f" rank {rank} on " in lines[0]
    assert "The load of its host is" in lines[0]

    table = run.pace
    steps = list(table["step"])
    assert steps[0::2] == steps[1::2]  # of two ranks
    # ever more rarely, where steps do not take too long for that
    assert steps[0::2] in ([50, 100, 200], [50, 100, 150, 200])
    slow, other = table[table["rank"] == rank], table[table["rank"] != rank]
    assert slow["last"].median() > 0.6
    assert slow["late_ms"].median() > 0.5 * DELAY * 1e3
    assert other["waited_ms"].median() > 0.5 * DELAY * 1e3
    assert slow["own_ms"].median() > 0.5 * DELAY * 1e3


def test_a_second_optimizer_counts_no_step_of_its_own(client, tmp_path):
    run = launch(client, tmp_path, 1, 60, optimizers=2)
    assert len(run.pace) == 4  # two samples of each: 120 steps of optimizers
    assert run.pace["step_ms"].min() > 0.7 * DELAY * 1e3
    assert run.pace[run.pace["rank"] == 1]["last"].median() > 0.6


def test_a_short_run_and_a_single_rank_have_no_samples(client, tmp_path):
    assert len(launch(client, tmp_path, None, 30).pace) == 0
    alone = ddp.launch(
        client, functools.partial(_alone, 60), workers=1, directory=tmp_path / "alone"
    )
    assert len(alone.pace) == 0


def _alone(steps):
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()


def _with_another_recorder(steps):
    from torch._C import _distributed_c10d

    def dump(*_):
        raise TypeError("another torch's recorder")

    _distributed_c10d._dump_fr_trace = dump
    return train(None, steps)


def test_a_recorder_that_is_not_as_expected_is_said_once_and_training_goes_on(client, tmp_path):
    run = ddp.launch(
        client,
        functools.partial(_with_another_recorder, 220),
        workers=2,
        directory=tmp_path / "run",
    )
    assert run.result == 220
    assert len(run.pace) == 0
    assert log_of(run).count("slow ranks are not looked for") == 2  # once from each rank


def _compiled(steps):
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step = torch.compile(optimizer.step, backend="eager")
    for _ in range(steps):
        model(torch.ones(1, 4)).sum().backward()
        step()
    return steps


def test_a_compiled_optimizer_works_as_it_did(client, tmp_path):
    run = ddp.launch(
        client, functools.partial(_compiled, 60), workers=2, directory=tmp_path / "run"
    )
    assert run.result == 60
