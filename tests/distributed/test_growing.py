"""`launch(grow=True)`: begins with the workers that are there, goes on with more as they come."""

import os
import re
import signal
import subprocess
import sys
import time

import cloudpickle
import pytest
import torch
from fault_lab import separate_cluster
from processes import (
    Background,
    assert_nothing_left,
    held_back,
    log_of,
    rank_pids,
    wait_until,
    workers_of,
)

import ddp_common as ddp
from ddp_common.client.newcomers import LEAST_STRETCH, LOOK_INTERVAL
from ddp_common.ranks import stopping
from ddp_common.ranks.checkpoint_files import checkpoints
from ddp_common.teaching import faults

cloudpickle.register_pickle_by_value(sys.modules[__name__])

LONG = {"epochs": 4, "dropout": 0.0}  # 28 steps
PATIENCE = 100.0  # seconds that a worker has to come, on a busy machine


@pytest.fixture(scope="module")
def small():
    """A cluster of one worker, for others to come."""
    with ddp.connect("local", workers=1) as client:
        yield client


@pytest.fixture(scope="module")
def undisturbed(small):
    return ddp.launch(small, faults.train, **LONG).result


def wait_for_newcomers(mark, step=20):
    """`faults.train`, whose rank 0 waits at a step until it is asked to leave."""

    def wait():
        deadline = time.monotonic() + PATIENCE
        while not stopping.was_told() and time.monotonic() < deadline:
            time.sleep(0.02)

    return faults.inject(faults.train, wait, rank=0, step=step, mark=mark)


def events(run):
    return [record for record in run.records if "event" in record]


def close(one, other):
    return torch.allclose(one, other, rtol=1e-5, atol=1e-7)


def grown(client, train, tmp_path, **arguments):
    """The run of a launch that begins on one worker; then a second one comes."""
    directory = tmp_path / "run"
    running = Background(ddp.launch, client, train, grow=True, directory=directory, **arguments)
    wait_until(lambda: "rank 0 started" in log_of(directory))
    client.cluster.scale(2)
    try:
        return running.outcome()
    finally:
        # also where it came too late for the run: the next test must not see it come
        wait_until(lambda: len(client.workers()) == 2)
        client.cluster.scale(1)
        wait_until(lambda: len(client.workers()) == 1)


def test_a_run_begins_with_one_worker_and_goes_on_with_two(small, undisturbed, tmp_path):
    run = grown(small, wait_for_newcomers(tmp_path / "mark"), tmp_path, **LONG)
    assert run.world_size == 2
    assert run.failures == []
    assert close(run.result, undisturbed)
    (event,) = events(run)
    assert (event["event"], event["ranks"], event["attempt"]) == ("grow", 2, 2)
    steps = [record["step"] for record in run.records if "loss" in record and record["rank"] == 0]
    assert steps == list(range(1, 29))  # none twice, none left out
    log = log_of(run.directory)
    assert f"Going on with 2 rank(s) from step {event['step']}: more workers have come" in log
    assert_nothing_left(run.directory, ranks=3)


def test_where_nothing_is_saved_nobody_is_asked_to_leave(small, tmp_path):
    """It would begin anew each time that a worker comes."""

    gate = tmp_path / "gate"

    def train():
        for _ in ddp.ElasticSampler(1_000_000, 1):
            ddp.report(begins=1)
            time.sleep(0.02)
            if gate.exists():
                break
        return ddp.world_size()

    def open_gate():
        wait_until(lambda: len(small.workers()) == 2)
        time.sleep(LEAST_STRETCH + 3 * LOOK_INTERVAL)  # in which the free worker becomes ready
        gate.touch()

    opening = Background(open_gate)
    run = grown(small, train, tmp_path)
    opening.outcome()
    assert run.result == 1
    assert events(run) == []


def test_a_lost_worker_shrinks_a_run_and_counts_as_no_restart(client, tmp_path):
    train = faults.inject(faults.train, "worker killed", step=20, mark=tmp_path / "mark")
    run = ddp.launch(client, train, grow=True, pause=0.1, directory=tmp_path / "run", **LONG)
    first = events(run)[0]
    assert first["event"] == "restart"
    assert "its worker died" in first["reason"]
    assert first["step"] >= 3
    assert [failure.rank for failure in run.failures] == [1]
    assert close(run.result, ddp.launch(client, faults.train, workers=1, **LONG).result)


async def leave(dask_worker):
    await dask_worker.close_gracefully()


def test_a_worker_that_leaves_by_itself_shrinks_a_run_too(small, undisturbed, tmp_path):
    """As at the end of its --lifetime. Its agent may say so before the scheduler does."""
    small.cluster.scale(2)
    wait_until(lambda: len(small.workers()) == 2)
    directory = tmp_path / "run"
    with held_back(faults.train, tmp_path / "gate", step=20) as train:
        running = Background(ddp.launch, small, train, grow=True, directory=directory, **LONG)
        wait_until(lambda: checkpoints(directory / "checkpoints"))
        small.run(leave, workers=workers_of(directory)[1:], wait=False)
        wait_until(lambda: "Restart" in log_of(directory))
    run = running.outcome()
    assert events(run)[0]["event"] == "restart"
    assert re.search("its worker (was closed|died)", events(run)[0]["reason"])
    assert close(run.result, undisturbed)
    small.cluster.scale(1)
    wait_until(lambda: len(small.workers()) == 1)


def test_a_worker_that_is_lost_before_anything_was_saved_is_a_failure(client, tmp_path):
    train = faults.inject(faults.train, "worker killed", when="start", mark=tmp_path / "mark")
    with pytest.raises(ddp.RankFailed, match="its worker died"):
        ddp.launch(client, train, grow=True, **LONG)


def test_sigterm_from_outside_ends_a_run_that_may_grow(small, tmp_path):
    directory = tmp_path / "run"
    running = Background(
        ddp.launch, small, faults.train, grow=True, directory=directory, pause=0.1, epochs=40
    )
    wait_until(lambda: list(directory.glob("checkpoints/step-*.pt")))
    os.kill(wait_until(lambda: rank_pids(directory))[0], signal.SIGTERM)
    with pytest.raises(ddp.RunStopped, match="got SIGTERM"):
        running.outcome()


def test_the_environment_may_ask_for_it(small, tmp_path, monkeypatch):
    monkeypatch.setenv("GROW", "1")
    assert ddp.launch(small, faults.train).world_size == 1
    with pytest.raises(ddp.Error, match="workers=1 cannot be kept"):
        ddp.launch(small, faults.train, workers=1)
    assert ddp.launch(small, faults.train, workers=1, grow=False).world_size == 1
    monkeypatch.setenv("GROW", "yes")
    with pytest.raises(ddp.Error, match="GROW='yes': GROW is 1 or 0"):
        ddp.launch(small, faults.train)


def test_connect_returns_when_the_first_workers_are_there(tmp_path):
    with separate_cluster(tmp_path, workers=1) as (_, address):
        with ddp.connect(address, workers=3, min_workers=1) as client:
            assert client.most == 3
            assert len(client.workers()) == 1
        with pytest.raises(ddp.Error, match="min_workers"):
            ddp.connect(address, min_workers=0)


def test_under_torchrun_it_is_refused(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import ddp_common as ddp\n"
        "with ddp.connect('torchrun') as client:\n"
        "    ddp.launch(client, print, grow=True)\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode != 0
    assert "grow=True (GROW=1) needs a Dask cluster" in done.stderr
