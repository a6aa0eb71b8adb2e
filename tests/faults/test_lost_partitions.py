"""Dask collections as arguments of `launch`, and workers that are lost, or take no tasks."""

import os
import signal
import sys
import threading
import time

import cloudpickle
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
import torch
import torch.distributed as dist
from distributed import Status
from processes import Background, log_of, wait_until
from tables_here import everyone, placed

import ddp_common as ddp

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def part(number, length=6):
    return pd.DataFrame({"row": np.arange(length) + 6 * number})


def train(table):
    """Twenty epochs of steps in which all ranks meet, each of them saved."""
    sampler = ddp.ElasticSampler(table, 8, seed=1)
    torch.manual_seed(0)
    checkpoint = ddp.Checkpoint(model=torch.nn.Linear(1, 1), sampler=sampler, every_steps=1)
    checkpoint.restore()
    for _ in sampler.epochs(20):
        for rows in sampler.batches():
            table.take(rows)
            dist.all_reduce(torch.ones(1))
            checkpoint.step()


def describe(x):
    return everyone(len(x))


class SlowToMove(list):
    """Samples that say when they move to another worker, and wait for the file `gate` there."""

    def __init__(self, samples, folder):
        super().__init__(samples)
        self.folder = folder

    def __reduce__(self):
        is_in_a_task = threading.current_thread().name.startswith("Dask-Default-Threads")
        if not is_in_a_task:  # but in what sends it
            (self.folder / "moving").touch()
            while not (self.folder / "gate").exists():
                time.sleep(0.02)
        return SlowToMove, (list(self), self.folder)


def seen_by_all(table):
    return sorted(sum(everyone([sample for part in table.parts for sample in part]), []))


def test_a_worker_lost_while_partitions_move_costs_one_restart(client, tmp_path):
    futures = placed(
        client, [0] * 4, lambda number: SlowToMove(range(10 * number, 10 * number + 10), tmp_path)
    )
    (holder,) = {address for where in client.who_has(futures).values() for address in where}
    (pid,) = client.run(os.getpid, workers=[holder]).values()
    launching = Background(
        ddp.launch,
        client,
        seen_by_all,
        workers=2,
        restarts=1,
        directory=tmp_path / "run",
        table=futures,
    )
    wait_until((tmp_path / "moving").exists)
    os.kill(pid, signal.SIGKILL)
    (tmp_path / "gate").touch()
    run = launching.outcome()
    assert len(run.failures) == 1 and "worker" in str(run.failures[0])
    assert run.result == list(range(40))


def test_scattered_partitions_that_are_lost_cannot_come_back(client):
    futures = client.scatter([part(0), part(1)], hash=False)
    (holder,) = client.who_has(futures[:1])[futures[0].key]
    client.run(os._exit, 1, workers=[holder], on_error="ignore")
    wait_until(lambda: futures[0].status != "finished")
    with pytest.raises(ddp.Error, match="Partition [01] of 'x' is lost"):
        ddp.launch(client, describe, workers=1, x=futures)


def test_where_all_workers_are_paused_it_says_so_instead_of_waiting_for_ever(client, tmp_path):
    def set_status(status, dask_worker):  # as a worker's memory monitor does
        dask_worker.status = status

    def statuses(dask_scheduler):
        return {worker.status for worker in dask_scheduler.workers.values()}

    # now: Dask computes a little of it to know its columns
    table = dd.from_map(part, range(4))
    client.run(set_status, Status.paused)
    try:
        wait_until(lambda: client.run_on_scheduler(statuses) == {Status.paused})
        with pytest.raises(ddp.Error, match="for 2 s none of the cluster's 4 workers(?s:.*)full"):
            ddp.launch(client, describe, workers=1, directory=tmp_path / "run", timeout=2, x=table)
    finally:
        client.run(set_status, Status.running)
    wait_until(lambda: client.run_on_scheduler(statuses) == {Status.running})
    assert "started: process" not in log_of(tmp_path / "run")
