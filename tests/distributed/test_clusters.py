"""Clusters that `connect` starts, and what is left of them after they were closed."""

import logging
import os
import sys

import cloudpickle
import psutil
import pytest
import torch
from processes import assert_gone, assert_nothing_left, is_alive
from torch.utils.data import DataLoader, Dataset

import ddp_common as ddp

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def processes_of(client):
    """The workers, the fork server, and all that these have started."""
    pids = [client.fork_server.pid, *client.run(os.getpid).values()]
    started = set()
    for pid in pids:
        process = psutil.Process(pid)
        started |= {process.pid, *(child.pid for child in process.children(recursive=True))}
    return sorted(started)


def test_the_number_of_workers_comes_from_the_environment_and_closing_leaves_no_process(
    monkeypatch,
):
    monkeypatch.setenv("WORKERS", "2")
    with ddp.connect() as client:
        assert len(client.scheduler_info(n_workers=-1)["workers"]) == 2
        run = ddp.launch(client, ddp.world_size)
        started = processes_of(client)
    assert (run.result, run.world_size) == (2, 2)
    assert len(started) >= 3  # each worker, and the process with torch
    assert_gone(lambda: [pid for pid in started if is_alive(pid)])


def test_a_cluster_closed_while_it_still_imports_torch_leaves_no_process():
    with ddp.connect("local", workers=1) as client:
        started = processes_of(client)
    assert_gone(lambda: [pid for pid in started if is_alive(pid)], within=60)


def heartbeats_that_fail():
    for error in (OSError("the scheduler was closed"), ValueError("something else")):
        try:
            raise error
        except Exception:
            logging.getLogger("distributed.worker").exception("heartbeat")


def test_a_worker_whose_scheduler_is_closed_first_prints_no_traceback(capfd):
    with ddp.connect("local", workers=1) as client:
        client.run(heartbeats_that_fail)
    said = capfd.readouterr().err
    assert "ValueError: something else" in said and "the scheduler was closed" not in said


class Squares(Dataset):
    """As a notebook would define it: no module that a worker could import holds it."""

    def __len__(self):
        return 100

    def __getitem__(self, index):
        return index * index


@pytest.mark.parametrize(
    "data", [torch.arange(100).square(), Squares()], ids=["tensor", "own_data_set"]
)
def test_a_data_loader_of_a_rank_may_have_workers(client, data):
    def train():
        return sum(int(batch.sum()) for batch in DataLoader(data, batch_size=10, num_workers=1))

    run = ddp.launch(client, train, workers=2)
    assert run.result == sum(number * number for number in range(100))
    assert_nothing_left(run.directory, ranks=2)


def test_torchvision_works_in_a_rank(client):
    def train():
        import torchvision

        return tuple(torchvision.models.resnet18().eval()(torch.zeros(1, 3, 32, 32)).shape)

    assert ddp.launch(client, train, workers=1).result == (1, 1000)
