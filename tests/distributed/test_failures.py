"""A rank that fails ends the run: the caller learns which one and why, and no process stays."""

import os
import signal
import sys
import threading
import time

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from distributed import Client, LocalCluster
from torch.utils.data import DataLoader
from processes import PATIENCE, assert_gone, assert_nothing_left, is_alive, log_of, members, rank_pids, wait_until

import ddp_common as ddp

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def raise_an_error():
    raise ValueError("the answer is 41")


ENDINGS = {  # how a rank ends: what it does, exit code, signal
    "raises": (raise_an_error, 1, None),
    "sys_exit": (lambda: sys.exit(3), 3, None),
    "leaves_with_zero": (lambda: os._exit(0), 0, None),
    "killed": (lambda: os.kill(os.getpid(), signal.SIGKILL), -9, "SIGKILL"),
    "crashes": (lambda: os.kill(os.getpid(), signal.SIGSEGV), -11, "SIGSEGV"),
}


def fail(how, failing_rank, peer):
    dist.barrier()
    print(f"rank {ddp.rank()} is about to {how}", flush=True)
    if ddp.rank() == failing_rank:
        time.sleep(0.2)  # the peer waits by now
        ENDINGS[how][0]()
    elif peer == "in_all_reduce":
        dist.all_reduce(torch.ones(1))
    else:
        time.sleep(600)


def ranks_and_sizes():
    return ddp.rank(), ddp.world_size(), int(total(1))


def total(value):
    tensor = torch.tensor(float(value))
    dist.all_reduce(tensor)
    return tensor.item()


def assert_usable(client, workers=2):
    assert ddp.launch(client, ranks_and_sizes, workers=workers).result == (0, workers, workers)


def failure(client, function, workers=2, **arguments):
    with pytest.raises(ddp.RankFailed) as caught:
        ddp.launch(client, function, workers=workers, **arguments)
    return caught.value


@pytest.mark.parametrize("peer", ["in_all_reduce", "sleeping"])
@pytest.mark.parametrize("failing_rank", [0, 1], ids=["rank_0", "rank_1"])
@pytest.mark.parametrize("how", ENDINGS)
def test_a_failed_rank_is_reported_at_once_with_its_cause_and_leaves_nothing(client, how, failing_rank, peer):
    assert_usable(client)
    began = time.monotonic()
    failed = failure(client, fail, how=how, failing_rank=failing_rank, peer=peer)
    assert time.monotonic() - began < PATIENCE
    _, exitcode, signal_name = ENDINGS[how]
    assert (failed.rank, failed.exitcode, failed.signal) == (failing_rank, exitcode, signal_name)
    assert f"Rank {failing_rank} of 2 on {failed.host} failed" in str(failed)
    assert f"on {failed.host}" in log_of(failed.directory)
    assert failed.logs[failing_rank][0] == f"rank {failing_rank} is about to {how}"
    assert_nothing_left(failed.directory, ranks=2, within=1)
    if how == "raises":
        assert 'raise ValueError("the answer is 41")' in failed.traceback
        assert "ValueError: the answer is 41" in str(failed)
    else:
        assert failed.traceback == ""


def test_after_every_failure_the_cluster_is_usable(client):
    failure(client, fail, workers=4, how="killed", failing_rank=3, peer="in_all_reduce")
    assert_usable(client, workers=4)


def test_where_a_rank_crashed_is_in_its_last_lines(client):
    failed = failure(client, fail, how="crashes", failing_rank=1, peer="sleeping")
    assert any("Segmentation fault" in line for line in failed.logs[1])
    assert "Segmentation fault" in str(failed)


def with_children():
    loader = iter(DataLoader(range(1000), num_workers=1))
    next(loader)
    dist.barrier()
    if ddp.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def test_the_children_of_ranks_are_gone_after_a_failure(client):
    failed = failure(client, with_children)
    assert_nothing_left(failed.directory, ranks=2, within=1)


def test_a_worker_that_dies_ends_the_run(client, tmp_path):
    def kill_own_worker():
        loader = iter(DataLoader(range(1000), num_workers=1))
        next(loader)
        dist.barrier()
        ddp.report(ready=1)
        if ddp.rank() == 0:
            time.sleep(1)
            os.kill(worker_pids[1], signal.SIGKILL)
        time.sleep(600)

    pids = client.run(os.getpid)
    addresses = client.scheduler_info(n_workers=-1)["workers"]
    worker_pids = []

    def placed():
        return ddp.launch(client, note_worker, workers=2, pids=pids)

    assert len(pids) == len(addresses) == 4
    worker_pids.extend(workers_of(placed().directory, pids))
    began = time.monotonic()
    failed = failure(client, kill_own_worker)
    assert time.monotonic() - began < PATIENCE
    assert failed.rank == 1
    assert "its worker died" in str(failed)
    assert_nothing_left(failed.directory, ranks=2)
    client.wait_for_workers(4)
    assert_usable(client, workers=4)
