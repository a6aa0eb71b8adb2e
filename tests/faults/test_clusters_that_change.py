"""Clients and clusters that are not what `launch` expects, or change under it: one message."""

import sys
import threading
import time

import cloudpickle
import dask
import faults_on_purpose as faults
import pytest
from distributed import Client, LocalCluster
from patience import PATIENCE
from processes import Background, assert_nothing_left, held_back, saved_steps, wait_until

import ddp_common as ddp

cloudpickle.register_pickle_by_value(sys.modules[__name__])
SMALL = {"dashboard_address": ":0", "threads_per_worker": 1, "memory_limit": 0}


@pytest.fixture(autouse=True, scope="module")
def a_lost_worker_has_time_to_come_back():
    """A plain `LocalCluster` gives up one that a busy machine does not bring back in 15 s."""
    with dask.config.set({"distributed.deploy.lost-worker-timeout": f"{2 * PATIENCE} s"}):
        yield


def test_a_restart_of_the_cluster_during_a_launch_is_called_so(tmp_path):
    with LocalCluster(n_workers=2, **SMALL) as cluster, Client(cluster) as client:
        with held_back(faults.train, tmp_path / "gate") as train:
            running = Background(ddp.launch, client, train, workers=2, directory=tmp_path / "run")
            wait_until(lambda: saved_steps(tmp_path / "run"))
            client.restart()
            words = r"The cluster was restarted \(client.restart\)"
            with pytest.raises(ddp.Error, match=words) as caught:
                running.outcome()
            assert not isinstance(caught.value, ddp.SchedulerLost)
            assert caught.value.directory == tmp_path / "run"
            assert_nothing_left(tmp_path / "run", ranks=2)
        again = ddp.launch(client, faults.train, workers=2, directory=tmp_path / "run")
        assert again.world_size == 2


@pytest.mark.parametrize("is_busy", [False, True], ids=["listens", "is busy with a record"])
def test_tasks_that_somebody_cancels_are_called_so(client, tmp_path, is_busy):
    """Also where the client hears of it only when the ranks have told that they are ended."""
    from distributed import Future

    may_go_on = threading.Event()
    if not is_busy:
        may_go_on.set()
    options = dict(workers=2, restarts=1, on_report=lambda record: may_go_on.wait(PATIENCE))
    with held_back(faults.train, tmp_path / "gate") as train:
        running = Background(ddp.launch, client, train, directory=tmp_path / "run", **options)
        wait_until(lambda: saved_steps(tmp_path / "run"))
        futures = [key for key in client.futures if str(key).startswith("ddp-rank-")]
        client.cancel([Future(key, client) for key in futures], force=True)
        if is_busy:
            time.sleep(1)
            may_go_on.set()
        with pytest.raises(ddp.Error, match="were cancelled from outside"):
            running.outcome()
        assert_nothing_left(tmp_path / "run", ranks=2)


def test_a_cluster_that_adapts_needs_a_minimum_and_does_not_shrink_during_a_launch(tmp_path):
    with LocalCluster(n_workers=0, **SMALL) as cluster, Client(cluster) as client:
        cluster.adapt(minimum=0, maximum=2, interval="200ms")
        with pytest.raises(ddp.Error, match=r"no workers.\n.*cluster.adapt\(minimum="):
            ddp.launch(client, faults.train, workers=2, timeout=0.5)
        cluster.adapt(minimum=2, maximum=2, interval="200ms")
        run = ddp.launch(client, faults.train, workers=2, directory=tmp_path / "run", pause=0.2)
        assert run.world_size == 2


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
