"""`launch(restarts=…)`: training goes on from the newest checkpoint, on the workers there are."""

import json
import os
import re
import signal
import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from fault_lab import processes_of, separate_cluster, survive_kills
from processes import Background, assert_nothing_left, held_back, log_of, rank_pids, wait_until

import ddp_common as ddp
from ddp_common.ranks import rendezvous
from ddp_common.teaching import faults

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def test_a_killed_rank_is_answered_with_a_restart_from_the_newest_checkpoint(client, tmp_path):
    undisturbed = ddp.launch(client, faults.train, workers=2).result
    run = ddp.launch(
        client,
        faults.inject(faults.train, "SIGKILL", step=8, mark=tmp_path / "mark"),
        workers=2,
        restarts=1,
        pause=0.1,
    )
    assert (run.result == undisturbed).all()
    assert [failure.signal for failure in run.failures] == ["SIGKILL"]
    (event,) = [record for record in run.records if record.get("event") == "restart"]
    assert (event["rank"], event["attempt"], event["ranks"]) == (1, 2, 2)
    assert event["step"] in (3, 6)  # a save may still be on its way when the rank dies
    assert "killed by SIGKILL" in event["reason"]
    lines = (run.directory / "metrics.jsonl").read_text().splitlines()
    assert event in map(json.loads, lines)
    log = log_of(run.directory)
    assert f"Restart 1 on 2 rank(s) from step {event['step']}. Why: Rank 1 of 2" in log
    assert f"[rank 0] Resumed from step-{event['step']:08d}." in log
    assert_nothing_left(run.directory, ranks=4)


def test_the_terminal_says_what_restarted_and_why(client, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("DDP_PROGRESS", "lines")
    ddp.launch(
        client,
        faults.inject(faults.train, "SIGKILL", step=8, mark=tmp_path / "mark"),
        workers=2,
        restarts=1,
    )
    assert re.search(
        r"Restart 1 on 2 rank\(s\) from step \d. Why: Rank 1 of 2", capfd.readouterr().out
    )


def test_the_environment_may_ask_for_restarts(client, tmp_path, monkeypatch):
    monkeypatch.setenv("RESTARTS", "1")
    fails_once = faults.inject(faults.train, "raise", mark=tmp_path / "mark")
    assert len(ddp.launch(client, fails_once, workers=2).failures) == 1


def test_restarts_come_to_an_end(client):
    with pytest.raises(ddp.RankFailed, match="a fault on purpose") as caught:
        ddp.launch(client, faults.inject(faults.train, "raise", step=8), workers=2, restarts=2)
    assert len(rank_pids(caught.value.directory)) == 6


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"restarts": -1}, "at least 0"),
        ({"restarts": "many"}, "at least 0"),
        ({"min_workers": 0}, "at least 1"),
    ],
)
def test_numbers_that_are_none_are_refused(client, arguments, words):
    with pytest.raises(ddp.Error, match=words):
        ddp.launch(client, faults.train, workers=2, **arguments)


def test_a_run_told_to_stop_goes_on_where_restarts_allow(client, tmp_path):
    undisturbed = ddp.launch(client, faults.train, workers=2).result
    sigterm = faults.inject(faults.train, "SIGTERM", step=3, mark=tmp_path / "mark")
    run = ddp.launch(client, sigterm, workers=2, restarts=1, pause=0.1)
    assert (run.result == undisturbed).all()
    assert isinstance(run.failures[0], ddp.RunStopped)
    assert not run.metrics.dropna(subset="loss").duplicated(["rank", "step"]).any()


def add_up_over_four_steps(told):
    """Ranks meet in every fourth step only; `told` gets SIGTERM in the second.

    Rank 1 stays in the first until rank 0 is three steps ahead, and waits there.
    """
    store = rendezvous.current_store()
    sampler = ddp.ElasticSampler(400, 10)
    for _ in sampler.epochs(1):
        for number, _ in enumerate(sampler, start=1):
            if number == 2 and ddp.rank() == told:
                os.kill(os.getpid(), signal.SIGTERM)
            if number == 1 and ddp.rank() == 1:
                store.wait(["ahead"])
            if number == 4 and ddp.rank() == 0:
                store.set("ahead", "")
            if number % 4 == 0:
                dist.all_reduce(torch.ones(1))
            ddp.report(number=number)


@pytest.mark.parametrize("told", [0, 1])
def test_ranks_that_are_steps_apart_leave_before_the_same_step(client, told):
    with pytest.raises(ddp.RunStopped) as stopped:
        ddp.launch(client, add_up_over_four_steps, workers=2, told=told)
    lines = (stopped.value.directory / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    last = [
        max(record["number"] for record in records if record["rank"] == rank) for rank in (0, 1)
    ]
    assert last == [stopped.value.step] * 2 and stopped.value.step >= 4


def test_fewer_workers_after_a_loss_and_a_launch_that_waits_for_enough(tmp_path):
    """One of two workers is killed together with its nanny: nobody brings it back."""
    from distributed import Client

    with separate_cluster(tmp_path) as (_, address), Client(address) as client:
        client.wait_for_workers(2, timeout=120)
        alone = ddp.launch(
            client, faults.train, workers=1, dropout=0.0, directory=tmp_path / "alone"
        ).result
        lost = faults.inject(
            faults.train, "worker and nanny killed", rank=1, step=8, mark=tmp_path / "mark"
        )
        run = ddp.launch(
            client,
            lost,
            workers=2,
            min_workers=1,
            restarts=1,
            dropout=0.0,
            directory=tmp_path / "run",
        )
        assert run.world_size == 1
        assert ((run.result - alone).norm() / alone.norm()).item() < 1e-6
        with pytest.raises(ddp.Error, match="No 2 .* the cluster has 1"):
            ddp.launch(
                client,
                faults.train,
                workers=3,
                min_workers=2,
                timeout=0.5,
                directory=tmp_path / "none",
            )
        never = faults.inject(faults.train, "worker and nanny killed", rank=0, step=8)
        words = "(?s)No free worker.*It was to restart because: Rank 0 of 1 .* its worker died"
        with pytest.raises(ddp.Error, match=words) as caught:
            ddp.launch(client, never, restarts=1, timeout=1, directory=tmp_path / "second")
        assert caught.value.directory == tmp_path / "second"


def test_more_workers_than_before_are_used_after_a_restart(tmp_path):
    with ddp.connect("local", workers=1) as client:
        undisturbed = ddp.launch(
            client, faults.train, dropout=0.0, directory=tmp_path / "alone"
        ).result

        dies = faults.inject(faults.train, "SIGKILL", rank=0, step=8, mark=tmp_path / "mark")
        with held_back(dies, tmp_path / "gate", rank=0, step=7) as train:
            running = Background(
                ddp.launch, client, train, restarts=1, dropout=0.0, directory=tmp_path / "run"
            )
            # the second worker comes while the first attempt runs on the first
            wait_until(lambda: "rank 0 started" in log_of(tmp_path / "run"))
            client.cluster.scale(2)
            client.wait_for_workers(2, timeout=120)
        run = running.outcome()
    assert run.world_size == 2
    assert ((run.result - undisturbed).norm() / undisturbed.norm()).item() < 1e-6


@pytest.mark.parametrize("ranks", [(2,), (1, 2, 3)], ids=["two_ranks", "changing_ranks"])
def test_killed_at_random_times_it_ends_with_the_weights_of_the_undisturbed_run(
    client, tmp_path, ranks
):
    survived = survive_kills(client, tmp_path, kills=5, ranks=ranks)
    assert survived.kills >= 5 and not processes_of(tmp_path / "disturbed")
    if len(ranks) == 1:
        assert survived.identical
    assert survived.difference < 1e-6
