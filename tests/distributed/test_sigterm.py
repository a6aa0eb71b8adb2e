"""SIGTERM, as at the end of a job: all ranks save and leave before the same step."""

import json
import os
import signal
import sys

import cloudpickle
import faults_on_purpose as faults
import pytest
import torch
import torch.distributed as dist
from processes import assert_nothing_left, saved_steps, wait_until

import ddp_common as ddp

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
