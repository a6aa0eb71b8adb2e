"""Clients and clusters that are not what `launch` expects, or change under it: one message."""

import asyncio
import contextlib
import os
import re
import signal
import sys
import threading
import time

import cloudpickle
import dask
import pytest
from distributed import Client, LocalCluster
from fault_lab import separate_cluster
from processes import PATIENCE, Background, assert_nothing_left, held_back, wait_until, workers_of

import ddp_common as ddp
from ddp_common.client import attempt as attempts
from ddp_common.ranks.checkpoint_files import checkpoints
from ddp_common.teaching import faults

cloudpickle.register_pickle_by_value(sys.modules[__name__])
SMALL = {"dashboard_address": ":0", "threads_per_worker": 1, "memory_limit": 0}


@pytest.fixture(autouse=True, scope="module")
def a_lost_worker_has_time_to_come_back():
    """A plain `LocalCluster` gives up one that a busy machine does not bring back in 15 s."""
    with dask.config.set({"distributed.deploy.lost-worker-timeout": "120 s"}):
        yield


@contextlib.contextmanager
def ends_of_tasks_are_not_heard_of(client):
    """Hold up the one thread in which Dask tells that a future is done."""
    gate = threading.Event()
    client.submit(int).add_done_callback(lambda done: gate.wait(PATIENCE))
    try:
        yield
    finally:
        gate.set()


@pytest.mark.parametrize(
    "meanwhile",
    [
        pytest.param(lambda client: contextlib.nullcontext(), id="as_it_comes"),
        pytest.param(ends_of_tasks_are_not_heard_of, id="the_loss_of_workers_is_heard_of_first"),
    ],
)
def test_a_restart_of_the_cluster_during_a_launch_is_called_so(tmp_path, meanwhile):
    with LocalCluster(n_workers=2, **SMALL) as cluster, Client(cluster) as client:
        with held_back(faults.train, tmp_path / "gate") as train, meanwhile(client):
            running = Background(ddp.launch, client, train, workers=2, directory=tmp_path / "run")
            wait_until(lambda: checkpoints(tmp_path / "run" / "checkpoints"))
            client.restart()
            words = r"The cluster was restarted \(client.restart\)"
            with pytest.raises(ddp.Error, match=words) as caught:
                running.outcome()
            assert not isinstance(caught.value, ddp.SchedulerLost)
            assert caught.value.directory == tmp_path / "run"
            assert_nothing_left(tmp_path / "run", ranks=2)
        again = ddp.launch(client, faults.train, workers=2, directory=tmp_path / "run")
        assert again.world_size == 2


def test_tasks_that_somebody_cancels_are_called_so(client, tmp_path):
    from distributed import Future

    with held_back(faults.train, tmp_path / "gate") as train:
        running = Background(ddp.launch, client, train, workers=2, directory=tmp_path / "run")
        wait_until(lambda: checkpoints(tmp_path / "run" / "checkpoints"))
        futures = [key for key in client.futures if str(key).startswith("ddp-rank-")]
        client.cancel([Future(key, client) for key in futures], force=True)
        with pytest.raises(ddp.Error, match="were cancelled from outside"):
            running.outcome()
        assert_nothing_left(tmp_path / "run", ranks=2)


@pytest.mark.parametrize("thing", [None, "tcp://127.0.0.1:8786", 5], ids=repr)
def test_what_is_no_client_is_refused(thing):
    with pytest.raises(
        ddp.Error, match="takes a distributed.Client first, not (NoneType|str|int). Make one"
    ):
        ddp.launch(thing, faults.train)


def test_an_asynchronous_client_is_refused_and_works_in_a_thread(tmp_path):
    async def use(address):
        async with Client(address, asynchronous=True) as client:
            with pytest.raises(ddp.Error, match="This client is asynchronous.*asyncio.to_thread"):
                ddp.launch(client, faults.train)
            return await asyncio.to_thread(
                ddp.launch, client, ddp.world_size, directory=tmp_path / "run"
            )

    with LocalCluster(n_workers=1, **SMALL) as cluster:
        assert asyncio.run(use(cluster.scheduler_address)).result == 1


def test_a_cluster_in_place_of_a_client_no_workers_and_a_closed_client(tmp_path):
    with LocalCluster(n_workers=0, **SMALL) as cluster:
        with pytest.raises(
            ddp.Error, match=r"not LocalCluster. Make a client of it: Client\(cluster\)"
        ):
            ddp.launch(cluster, faults.train)
        with Client(cluster) as client:
            with pytest.raises(
                ddp.Error, match=r"the cluster has no workers. Start some: cluster.scale\(2\)"
            ):
                ddp.launch(client, faults.train, timeout=0.2)
        with pytest.raises(ddp.Error, match="this client is closed"):
            ddp.launch(client, faults.train)


def test_a_cluster_that_adapts_from_zero_grows_for_a_launch_and_shrinks_afterwards(tmp_path):
    with LocalCluster(n_workers=0, **SMALL) as cluster, Client(cluster) as client:
        adaptive = cluster.adapt(minimum=0, maximum=2, interval="200ms")
        run = ddp.launch(client, faults.train, workers=2, directory=tmp_path / "run", pause=0.2)
        assert run.world_size == 2 and adaptive.minimum == 0
        wait_until(lambda: not client.scheduler_info(n_workers=-1)["workers"])
        with pytest.raises(
            ddp.Error, match=r"adapts to 2 at most. Raise that: cluster.adapt\(maximum=3\)"
        ):
            ddp.launch(client, faults.train, workers=3, timeout=0.5)


def test_a_scheduler_that_is_gone_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules["ddp_common.client.connection"], "RECONNECT_TIMEOUT", 1)
    with separate_cluster(tmp_path, workers=1) as (scheduler, address):
        client = Client(address)
        scheduler.kill()
        began = time.monotonic()
        with pytest.raises(ddp.Error, match=f"scheduler at {re.escape(address)} does not answer"):
            ddp.launch(client, faults.train)
        assert time.monotonic() - began < PATIENCE
        client.close(timeout=1)


def return_what_only_ranks_know(folder):
    sys.path.insert(0, folder)
    import known_to_ranks

    return known_to_ranks.Thing()


def test_a_result_that_cannot_be_loaded_here_is_no_failure_of_a_rank(client, tmp_path):
    (tmp_path / "known_to_ranks.py").write_text("class Thing:\n    pass\n")
    words = (
        "All ranks finished, but what rank 0 returned cannot be loaded in this process: "
        ".*known_to_ranks"
    )
    with pytest.raises(ddp.Error, match=words) as caught:
        ddp.launch(
            client,
            return_what_only_ranks_know,
            workers=1,
            directory=tmp_path / "run",
            folder=str(tmp_path),
        )
    assert not isinstance(caught.value, ddp.RankFailed)
    assert caught.value.directory == tmp_path / "run"


def test_a_worker_that_dies_before_its_result_was_fetched_is_named_and_a_restart_answers_it(
    tmp_path, monkeypatch
):
    """Dask would wait for ever for a result whose worker is gone."""
    fetch = attempts.fetch_result
    killed = []

    def fetch_it_from_a_dead_worker(future, is_worth_waiting):
        if not killed:
            address = workers_of(tmp_path / "run")[0]
            killed.append(client.run(os.getpid, workers=[address])[address])
            os.kill(killed[0], signal.SIGKILL)
            wait_until(lambda: address not in client.scheduler_info(n_workers=-1)["workers"])
        return fetch(future, is_worth_waiting)

    monkeypatch.setattr(attempts, "open_result_here", lambda place: None)
    monkeypatch.setattr(attempts, "fetch_result", fetch_it_from_a_dead_worker)
    with LocalCluster(n_workers=2, **SMALL) as cluster, Client(cluster) as client:
        run = ddp.launch(client, faults.train, workers=2, restarts=1, directory=tmp_path / "run")
        assert "Rank 0 of 2" in str(run.failures[0]) and "its worker died" in str(run.failures[0])
        assert run.result.shape == (161,)
