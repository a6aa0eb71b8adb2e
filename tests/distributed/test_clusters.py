"""Clusters that `connect` starts, and what is left of them after they were closed."""

import sys

import cloudpickle
import torch
from children import children
from processes import assert_gone, assert_nothing_left, is_alive
from torch.utils.data import DataLoader, Dataset

import ddp_common as ddp

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def test_the_number_of_workers_comes_from_the_environment_and_closing_leaves_no_process(
    monkeypatch, capfd
):
    monkeypatch.setenv("WORKERS", "2")
    monkeypatch.setenv("DDP_PROGRESS", "bar")
    before = children()
    with ddp.connect() as client:
        assert len(client.scheduler_info(n_workers=-1)["workers"]) == 2
        run = ddp.launch(client, ddp.world_size)
        started = children() - before
        assert f"Dask's dashboard: {client.dashboard_link}" in capfd.readouterr().err
    assert (run.result, run.world_size) == (2, 2)
    assert len(started) >= 3  # each worker, and the process that has torch imported
    assert_gone(lambda: [pid for pid in started if is_alive(pid)])


class Squares(Dataset):
    """As a notebook would define it: no module that a worker could import holds it."""

    def __len__(self):
        return 100

    def __getitem__(self, index):
        return index * index


def test_a_data_loader_of_a_rank_may_have_workers(client):
    def train():
        loader = DataLoader(Squares(), batch_size=10, num_workers=1)
        return sum(int(batch.sum()) for batch in loader)

    run = ddp.launch(client, train, workers=2)
    assert run.result == sum(number * number for number in range(100))
    assert_nothing_left(run.directory, ranks=2)


def test_torchvision_works_in_a_rank(client):
    def train():
        import torchvision

        return tuple(torchvision.models.resnet18().eval()(torch.zeros(1, 3, 32, 32)).shape)

    assert ddp.launch(client, train, workers=1).result == (1, 1000)
