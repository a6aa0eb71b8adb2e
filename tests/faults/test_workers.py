"""Workers that are suspended, killed, paused, or told to end."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

import cloudpickle
import faults_on_purpose as faults
import pytest
from distributed import Client, LocalCluster, wait
from patience import PATIENCE
from processes import Background, log_of, saved_steps, separate_cluster, wait_until

import ddp_common as ddp
from dask_ranks.client import rpc
from dask_ranks.client.rpc import known_workers
from dask_ranks.clusters import doctor

cloudpickle.register_pickle_by_value(sys.modules[__name__])
SMALL = {"dashboard_address": "127.0.0.1:0", "threads_per_worker": 1, "memory_limit": 0}


@pytest.fixture
def two_workers():
    with LocalCluster(n_workers=2, **SMALL) as cluster, Client(cluster) as client:
        yield client


def pid_of_one(client):
    address = min(known_workers(client))
    return address, client.run(os.getpid, workers=[address])[address]


def test_a_suspended_worker_is_named_and_holds_neither_launch_nor_connect_nor_the_doctor(
    two_workers, monkeypatch
):
    monkeypatch.setattr(rpc, "SILENCE_TIMEOUT", 3)
    address, pid = pid_of_one(two_workers)
    table = two_workers.map(list, [range(9)] * 4, pure=False)
    wait(table)
    checks = (doctor.check_workers, doctor.check_addresses, doctor.check_run_directory)
    os.kill(pid, signal.SIGSTOP)
    try:
        for arguments in ({}, {"table": table}):
            with pytest.raises(ddp.Error, match=f"{address}.* did not answer for 8 s.*suspended"):
                ddp.launch(two_workers, lambda table=0: table, workers=2, timeout=8, **arguments)
        silent = f"The worker at {address} did not answer for 3 s"
        connecting = Background(ddp.connect, two_workers.scheduler.address, workers=2)
        with pytest.raises(ddp.Error, match=silent):
            connecting.outcome(within=PATIENCE)
        for check in checks:
            with pytest.raises(ddp.Error, match=silent):
                check(two_workers)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert ddp.launch(two_workers, ddp.world_size, workers=2).result == 2


def test_a_worker_that_is_killed_just_before_a_launch_does_not_keep_it_from_starting(two_workers):
    _, pid = pid_of_one(two_workers)
    os.kill(pid, signal.SIGKILL)
    run = ddp.launch(two_workers, ddp.world_size, workers=2, restarts=1)
    assert run.result == 2


def test_a_paused_worker_gets_no_rank_and_a_warning_says_so(two_workers):
    address, _ = pid_of_one(two_workers)
    two_workers.run(pause, workers=[address])
    wait_until(lambda: status_of(two_workers, address) == "paused")
    with pytest.warns(UserWarning, match=f"{address} is paused.*memory_limit"):
        run = ddp.launch(two_workers, ddp.world_size)
    assert run.result == 1
    with pytest.raises(ddp.Error, match=f"No 2 worker.*{address} are paused"):
        ddp.launch(two_workers, ddp.world_size, workers=2, timeout=1)


def test_a_busy_worker_is_named_with_its_task_after_timeout(two_workers):
    address, _ = pid_of_one(two_workers)
    busy = two_workers.submit(time.sleep, PATIENCE, workers=[address], key="long-computation")
    wait_until(lambda: "long-computation" in two_workers.processing()[address])
    with pytest.raises(ddp.Error, match=f"{address} was busy for 2 s with long-computation"):
        ddp.launch(two_workers, ddp.world_size, workers=2, timeout=2)
    busy.cancel(force=True)


def test_who_waits_for_workers_is_told_so(two_workers, capsys):
    with pytest.raises(ddp.Error, match="No 5 worker"):
        ddp.launch(two_workers, ddp.world_size, workers=5, timeout=3)
    said = capsys.readouterr().err
    assert "Waiting for workers, up to 3 s: the cluster has 2 workers." in said


def grows(dask_worker):
    """In a moment, so that a rank has started."""

    def grow():
        dask_worker.too_much = b"x" * 10**9

    threading.Timer(2, grow).start()


def test_a_worker_whose_nanny_killed_it_for_its_memory_is_said_to_be():
    limited = {**SMALL, "memory_limit": "800 MB"}
    with LocalCluster(n_workers=1, **limited) as cluster, Client(cluster) as client:
        client.run(grows)
        with pytest.raises(ddp.RankFailed, match="its nanny killed it, as it had .* of memory"):
            ddp.launch(client, waits)


def waits():
    time.sleep(PATIENCE)


def pause(dask_worker):
    dask_worker.memory_manager.memory_monitor = lambda: None  # it would let it go on at once
    dask_worker.status = type(dask_worker.status).paused


def status_of(client, address):
    def look(dask_scheduler):
        return dask_scheduler.workers[address].status.name

    return client.run_on_scheduler(look)


@contextlib.contextmanager
def worker_without_nanny(folder):
    """(process, address of its scheduler) of the one worker of a cluster."""
    with separate_cluster(folder, workers=0) as (_, address):
        command = [sys.executable, "-m", "dask", "worker", address, "--nthreads", "1"]
        worker = subprocess.Popen(
            [*command, "--no-nanny", "--no-dashboard", "--local-directory", folder],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        try:
            yield worker, address
        finally:
            worker.kill()
            worker.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_worker_without_a_nanny_ends_by_a_signal_once_its_rank_has_saved(tmp_path, number):
    def train_in_no_hurry():
        return faults.train(epochs=100, pause=0.1)

    with worker_without_nanny(tmp_path) as (worker, address):
        with ddp.connect(address, workers=1) as client:
            directory = tmp_path / "run"
            running = Background(ddp.launch, client, train_in_no_hurry, directory=directory)
            wait_until(lambda: saved_steps(directory))
            worker.send_signal(number)
            with pytest.raises(ddp.RunStopped) as stopped:
                running.outcome()
            assert saved_steps(directory)[-1] == stopped.value.step
            assert worker.wait(PATIENCE) == 0


def hold_back(is_held):
    """On a worker: a rank cannot start, as if its fork server still imported torch."""
    from dask_ranks.worker.rank_host import HOST

    if is_held:
        HOST.one_rank.acquire()
    else:
        HOST.one_rank.release()


def test_a_worker_without_a_nanny_ends_by_a_signal_while_its_rank_starts(tmp_path):
    with worker_without_nanny(tmp_path) as (worker, address):
        with ddp.connect(address, workers=1) as client:
            client.run(hold_back, True)
            running = Background(ddp.launch, client, faults.train, workers=1, pause=PATIENCE)
            wait_until(lambda: any(client.processing().values()))
            worker.terminate()
            time.sleep(1)
            client.run(hold_back, False)
            with pytest.raises(ddp.RankFailed):
                running.outcome()
            assert worker.wait(PATIENCE) == 0


def test_a_worker_that_is_suspended_in_training_is_named_and_its_peers_are_asked(
    two_workers, tmp_path
):
    addresses = sorted(known_workers(two_workers))
    pids = two_workers.run(os.getpid)
    directory = tmp_path / "run"

    def train():
        print(f"ready {os.getpid()}", flush=True)
        time.sleep(10 * PATIENCE)

    running = Background(
        ddp.launch, two_workers, train, workers=2, directory=directory, stall_timeout=5
    )
    wait_until(lambda: log_of(directory).count("ready") == 2)
    os.kill(pids[addresses[1]], signal.SIGSTOP)
    try:
        with pytest.raises(ddp.RankStalled) as stalled:
            running.outcome()
    finally:
        os.kill(pids[addresses[1]], signal.SIGCONT)
    assert stalled.value.rank == 1
    assert f"Its worker at {addresses[1]} does not answer" in str(stalled.value)
    assert "in train" in stalled.value.stacks[0]


def test_a_slow_on_report_does_not_keep_a_stall_from_being_found(two_workers):
    def train():
        for number in range(100):
            ddp.report(number=number)
        time.sleep(10 * PATIENCE)

    with pytest.raises(ddp.RankStalled):
        ddp.launch(
            two_workers,
            train,
            workers=1,
            stall_timeout=3,
            on_report=lambda record: time.sleep(0.1),
        )
