"""SIGTERM, as at the end of a job: all ranks save and leave before the same step."""

import sys
import time

import cloudpickle
import faults_on_purpose as faults
import pytest
import torch
import torch.distributed as dist
from patience import PATIENCE
from processes import Background, assert_nothing_left, log_of, saved_steps, wait_until

import ddp_common as ddp
from dask_ranks.client import signals
from dask_ranks.worker import agent
from ddp_common import exchange, stopping

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def test_sigterm_lets_all_ranks_finish_their_step_save_and_leave(client, tmp_path):
    undisturbed = ddp.launch(client, faults.train, workers=2).result
    sigterm = faults.inject(faults.train, "SIGTERM", rank=1, step=4, mark=tmp_path / "mark")
    with pytest.raises(ddp.RunStopped, match="rank 1 on .* got SIGTERM") as caught:
        ddp.launch(client, sigterm, workers=2, directory=tmp_path / "run", pause=0.3)
    assert 4 <= caught.value.step < 14  # more where rank 0 was ahead when the signal came
    assert saved_steps(tmp_path / "run")[-1] == caught.value.step
    assert_nothing_left(tmp_path / "run", ranks=2)
    resumed = ddp.launch(client, faults.train, workers=2, directory=tmp_path / "run")
    assert torch.equal(resumed.result, undisturbed)
    assert not resumed.metrics.duplicated(["rank", "step"]).any()  # nothing was done twice


def test_a_run_told_to_stop_goes_on_where_restarts_allow(client, tmp_path):
    sigterm = faults.inject(faults.train, "SIGTERM", rank=0, step=3, mark=tmp_path / "mark")
    run = ddp.launch(client, sigterm, workers=2, restarts=1, pause=0.2)
    assert isinstance(run.failures[0], ddp.RunStopped)
    assert set(run.metrics["step"].dropna()) == set(range(1, 15))


def test_sigterm_before_the_first_step_ends_the_run_at_once(client):
    early = faults.inject(faults.train, "SIGTERM", rank=0, when="start")
    with pytest.raises(ddp.RunStopped, match="All ranks left\\."):
        ddp.launch(client, early, workers=2)


def rank_1_goes_on():
    if ddp.rank() == 1:
        print("alone", flush=True)
        time.sleep(10 * PATIENCE)


def test_a_client_that_is_told_to_stop_tells_a_rank_that_still_works(
    client, tmp_path, monkeypatch
):
    running = Background(ddp.launch, client, rank_1_goes_on, workers=2, directory=tmp_path / "run")
    wait_until(lambda: "alone" in log_of(tmp_path / "run"))
    monkeypatch.setattr(signals, "stop_requested", True)
    with pytest.raises(ddp.RunStopped):
        running.outcome()


HEARS = """
import os, signal, time
def save(number, frame):
    with open("heard-" + os.environ["RANK"], "a") as file:
        file.write("SIGTERM ")
signal.signal(signal.SIGTERM, save)
open("started-" + os.environ["RANK"], "w").close()
while not os.path.exists("go on"):
    time.sleep(0.1)
"""


def test_a_script_hears_sigterm_once_however_often_its_job_is_near_its_end(
    client, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hears.py").write_text(HEARS)
    running = Background(ddp.launch, client, ddp.script("hears.py"), workers=2)
    for name in ("started", "heard"):
        wait_until(lambda: len(list(tmp_path.glob(f"{name}-*"))) == 2)
        client.run(agent.tell_to_stop)
    (tmp_path / "go on").touch()
    running.outcome()
    assert [(tmp_path / f"heard-{rank}").read_text() for rank in (0, 1)] == ["SIGTERM "] * 2


def end_alone():
    """Which ranks train, as each says, where rank 0 has come to its end."""
    stopping.state.is_training.value = ddp.rank() != 0
    dist.barrier()
    return exchange.gather(stopping.state.is_training.value)


def test_loader_workers_stay_for_their_own_rank_only(client):
    assert ddp.launch(client, end_alone, workers=2).result == [False, True]
