"""SIGTERM, as at the end of a job: all ranks save and leave before the same step."""

import json
import os
import signal
import sys
import time

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from patience import PATIENCE
from processes import assert_nothing_left, saved_steps, wait_until
from torch.utils.data import DataLoader

import ddp_common as ddp
from ddp_common.teaching import faults

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def test_sigterm_lets_all_ranks_finish_their_step_save_and_leave(client, tmp_path):
    undisturbed = ddp.launch(client, faults.train, workers=2).result
    sigterm = faults.inject(faults.train, "SIGTERM", rank=1, step=4, mark=tmp_path / "mark")
    with pytest.raises(ddp.RunStopped, match="rank 1 on .* got SIGTERM") as caught:
        ddp.launch(client, sigterm, workers=2, directory=tmp_path / "run", pause=0.1)
    assert 4 < caught.value.step < 14
    assert saved_steps(tmp_path / "run")[-1] == caught.value.step
    assert_nothing_left(tmp_path / "run", ranks=2)
    resumed = ddp.launch(client, faults.train, workers=2, directory=tmp_path / "run")
    assert torch.equal(resumed.result, undisturbed)
    assert not resumed.metrics.duplicated(["rank", "step"]).any()  # nothing was done twice


def test_a_run_told_to_stop_goes_on_where_restarts_allow(client, tmp_path):
    sigterm = faults.inject(faults.train, "SIGTERM", rank=0, step=3, mark=tmp_path / "mark")
    run = ddp.launch(client, sigterm, workers=2, restarts=1, pause=0.1)
    assert isinstance(run.failures[0], ddp.RunStopped)
    assert set(run.metrics["step"].dropna()) == set(range(1, 15))


def add_up_over_four_steps(ahead):
    """Ranks meet in every fourth step only; rank 1 gets SIGTERM in the second.

    It stays in the first until rank 0 is three steps ahead, and waits there.
    """
    sampler = ddp.ElasticSampler(400, 10)
    for _ in sampler.epochs(1):
        for number, _ in enumerate(sampler, start=1):
            if number == 2 and ddp.rank() == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            if number == 1 and ddp.rank() == 1:
                wait_until(ahead.exists)
            if number == 4 and ddp.rank() == 0:
                ahead.touch()
            if number % 4 == 0:
                dist.all_reduce(torch.ones(1))
            ddp.report(number=number)


def test_ranks_that_are_steps_apart_leave_before_the_same_step(client, tmp_path):
    with pytest.raises(ddp.RunStopped) as stopped:
        ddp.launch(client, add_up_over_four_steps, workers=2, ahead=tmp_path / "ahead")
    lines = (stopped.value.directory / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    last = [
        max(record["number"] for record in records if record["rank"] == rank) for rank in (0, 1)
    ]
    assert last == [stopped.value.step] * 2 and stopped.value.step >= 4


def test_sigterm_before_the_first_step_ends_the_run_at_once(client):
    early = faults.inject(faults.train, "SIGTERM", rank=0, when="start")
    with pytest.raises(ddp.RunStopped, match="before the first step"):
        ddp.launch(client, early, workers=2)


def train_with_loader_workers():
    """Rank 1 gets SIGTERM in its second step, and so do its loader's workers."""
    sampler = ddp.ElasticSampler(400, 10)
    model = torch.nn.Linear(1, 1)
    ddp.Checkpoint(model=model, sampler=sampler, every_steps=1000)
    for _ in DataLoader(range(400), batch_sampler=sampler, num_workers=1):
        if sampler.steps_done == 2 and ddp.rank() == 1:
            os.killpg(os.getpgid(0), signal.SIGTERM)
        dist.all_reduce(torch.ones(1))
        time.sleep(0.05)
    time.sleep(10 * PATIENCE)


def test_sigterm_that_loader_workers_get_too_ends_the_run_in_the_same_way(client, tmp_path):
    """As Slurm and torchrun send it."""
    with pytest.raises(ddp.RunStopped) as stopped:
        ddp.launch(client, train_with_loader_workers, workers=2, directory=tmp_path / "run")
    assert saved_steps(tmp_path / "run") == [stopped.value.step]
    assert_nothing_left(tmp_path / "run", ranks=2)
