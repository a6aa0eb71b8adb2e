"""`launch(restarts=…)`: training goes on from the newest checkpoint, on the workers there are."""

import re
import sys

import cloudpickle
import faults_on_purpose as faults
import pytest
from distributed import Client
from patience import PATIENCE
from processes import assert_nothing_left, log_of, rank_pids, separate_cluster

import ddp_common as ddp

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def test_a_killed_rank_is_answered_with_a_restart_from_the_newest_checkpoint(client, tmp_path):
    undisturbed = ddp.launch(client, faults.train, workers=2).result
    dies = ddp.inject(faults.train, "kill", step=8, mark=tmp_path / "mark")
    run = ddp.launch(client, dies, workers=2, restarts=1, pause=0.1)
    assert (run.result == undisturbed).all()
    assert [failure.signal for failure in run.failures] == ["SIGKILL"]
    (event,) = [record for record in run.records if record.get("event") == "restart"]
    assert (event["rank"], event["attempt"], event["ranks"]) == (1, 2, 2)
    assert event["step"] in (3, 6)  # a save may still be on its way when the rank dies
    assert "killed by SIGKILL" in event["reason"]
    log = log_of(run.directory)
    assert f"Restart 1 on 2 rank(s) from step {event['step']}. Why: Rank 1 of 2" in log
    assert f"[rank 0] Resumed from step-{event['step']:08d}." in log
    assert_nothing_left(run.directory, ranks=4)


def test_each_step_is_in_the_metrics_once_after_restarts_and_launches_in_the_same_folder(
    client, tmp_path
):
    def train(**arguments):
        faults.train(**arguments)
        ddp.report(last=True)  # a second report of that step

    options = {"workers": 2, "directory": tmp_path / "run", "pause": 0.05}
    dies = ddp.inject(train, "kill", step=8, mark=tmp_path / "first")
    dies, heard = ddp.inject(dies, "kill", step=11, mark=tmp_path / "second"), []
    run = ddp.launch(client, dies, restarts=2, on_report=heard.append, **options)
    with pytest.raises(ddp.RankFailed) as caught:
        ddp.launch(client, ddp.inject(train, "kill", step=20), epochs=3, **options)
    (how,) = caught.value.__notes__
    assert re.match(r"The newest checkpoint is that of step (17|20)\. Go on", how), how
    assert how.endswith(f"ddp.launch(client, train, …, directory={str(tmp_path / 'run')!r})")
    heard_again = []
    again = ddp.launch(client, train, epochs=3, on_report=heard_again.append, **options)
    for metrics, steps in ((run.metrics, [*range(1, 15)]), (again.metrics, [*range(1, 22)])):
        seconds = [step for step in (14, 21) if step in steps]
        assert all(
            sorted(of["step"]) == sorted(steps + seconds) for _, of in metrics.groupby("rank")
        )
    assert heard == run.records == again.records[: len(heard)]
    assert heard_again == again.records[-len(heard_again) :]
    assert [*dict.fromkeys(record["restart"] for record in again.records)] == [0, 1, 2, 3, 4]
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == len(again.records)


def test_a_restart_goes_on_with_the_workers_left_unless_so_many_were_asked_for(tmp_path):
    def loses_a_worker(name):
        return faults.inject(faults.train, "worker and nanny killed", mark=tmp_path / name)

    with separate_cluster(tmp_path, workers=3) as (_, address), Client(address) as client:
        client.wait_for_workers(3, timeout=2 * PATIENCE)
        with pytest.raises(ddp.Error, match="No 3 worker(?s:.*)to restart because: Rank 1 of 3"):
            ddp.launch(client, loses_a_worker("first"), workers=3, restarts=1, timeout=1)
        run = ddp.launch(client, loses_a_worker("second"), restarts=1)
    assert run.world_size == 1
    (event,) = [record for record in run.records if record.get("event") == "restart"]
    assert event["ranks"] == 1


def test_restarts_that_the_environment_asks_for_come_to_an_end(client, monkeypatch):
    monkeypatch.setenv("RESTARTS", "2")
    with pytest.raises(ddp.RankFailed, match="a fault on purpose") as caught:
        ddp.launch(client, ddp.inject(faults.train, "raise", step=8), workers=2)
    assert len(rank_pids(caught.value.directory)) == 6


def test_a_fault_for_a_rank_that_there_is_not_is_warned_of(client, capsys):
    ddp.launch(client, ddp.inject(faults.train, "raise", rank=5), workers=2, directory=False)
    assert "rank=5) strikes nobody: this run has 2 rank(s)" in capsys.readouterr().out
