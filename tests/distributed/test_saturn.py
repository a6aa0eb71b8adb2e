"""CLUSTER=saturn against a stand-in of the service.

Real dask-saturn, and a real scheduler and workers that know nothing of this package.
"""

import importlib.util
import os
import sys

import cloudpickle
import pytest
import torch
from processes import can_hide, saved_steps
from saturn_here import running_saturn

import ddp_common as ddp

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("dask_saturn") is None,
    reason="needs dask-saturn (pip install -e '.[saturn]')",
)
cloudpickle.register_pickle_by_value(sys.modules[__name__])
SIZES = "worker_size=tiny scheduler_size=tiny nthreads=1"
ZIP = ".zip/ddp_common/__init__.py"  # the end of the path of a package that was sent


@pytest.fixture(scope="module")
def saturn(tmp_path_factory):
    """The service, with `runs`, a directory that what it starts cannot see."""
    hidden = tmp_path_factory.mktemp("hidden")
    with running_saturn(tmp_path_factory.mktemp("saturn"), hidden) as saturn:
        saturn.runs = hidden
        yield saturn


@pytest.fixture(autouse=True)
def account(saturn, monkeypatch):
    """This program is one that may use it, and wants two small workers."""
    wanted = {"OPTIONS": SIZES, "WORKERS": "2", "CLUSTER": "saturn"}
    for name, value in {**saturn.environment, **wanted}.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def client(saturn):
    """A client of a cluster of two workers."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**saturn.environment, "OPTIONS": SIZES}.items():
            patch.setenv(name, value)
        with ddp.connect("saturn", workers=2) as client:
            yield client
    assert saturn.clusters[0].closed


def home_of_the_package():
    return ddp.__file__


def train():
    """Two steps with all that a rank may leave; returns where rank 0 has this package from."""
    torch.manual_seed(0)
    model, sampler = torch.nn.Linear(1, 1), ddp.ElasticSampler(8, 4)
    checkpoint = ddp.Checkpoint(model=model, sampler=sampler)
    checkpoint.restore()
    for _ in sampler.epochs(1):
        for indices in sampler.batches():
            total = torch.tensor([float(len(indices))])
            torch.distributed.all_reduce(total)
            ddp.report(samples=total.item())
            checkpoint.step()
    checkpoint.save()
    ddp.save_file(f"{ddp.rank()}/home.txt", ddp.__file__)
    return ddp.__file__


def test_the_package_travels_to_the_scheduler_the_workers_and_the_ranks(client):
    homes = [
        client.run_on_scheduler(home_of_the_package),
        *client.run(home_of_the_package).values(),
        ddp.launch(client, train).result,
    ]
    assert len(homes) == 4 and all(home.endswith(ZIP) for home in homes)


def test_reports_files_and_checkpoints_come_home_from_workers_that_share_no_files(client, saturn):
    run = ddp.launch(client, train, directory=saturn.runs / "home")
    if can_hide():
        assert list(client.run(os.listdir, str(saturn.runs)).values()) == [[], []]
    assert run.world_size == 2 and [record["samples"] for record in run.records] == [4.0] * 4
    homes = [(run.directory / rank / "home.txt").read_text() for rank in "01"]
    assert [home.endswith(ZIP) for home in homes] == [True, True]
    assert saved_steps(run.directory) == [2]
