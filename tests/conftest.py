"""What all tests share: a clean environment, one Dask cluster of four workers, and a look at the processes that a run leaves behind."""

import os

import pytest

import ddp_common as ddp
from ddp_common.settings import current

OUTSIDE_SETTINGS = ("RESUME", "PRESET", "SET", "CLUSTER", "WORKERS", "DDP_PROGRESS", "DDP_CHECKPOINTS",
                    "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch, tmp_path):
    """Run directories go to the test's own folder, and what the caller has set outside does not reach the test."""
    for name in OUTSIDE_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RUNS", str(tmp_path / "runs"))
    for name, value in vars(type(current)(name=None, values={}, resume=None)).items():
        monkeypatch.setattr(current, name, value)


@pytest.fixture(scope="session")
def client():
    """A client of four workers on this machine."""
    os.environ.pop("DDP_CHECKPOINTS", None)
    with ddp.connect("local", workers=4) as client:
        yield client
