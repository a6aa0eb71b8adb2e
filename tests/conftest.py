"""What all tests share: a clean environment, one Dask cluster of four workers, one server that speaks S3."""

import os
import signal
import subprocess
import sys

import pytest

import ddp_common as ddp
from ddp_common.settings import current

OUTSIDE_SETTINGS = ("RESUME", "PRESET", "SET", "CLUSTER", "WORKERS", "OPTIONS", "DRY", "DDP_PROGRESS", "DDP_CHECKPOINTS",
                    "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")

# A shell starts background jobs deaf to Ctrl-C, and so would be every program that a test interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)


LONGEST_FIRST = ("hpc", "notebooks", "distributed", "unit")


def pytest_xdist_auto_num_workers(config):
    """How many files `make test` runs at once: two on one core, since tests wait more than they compute; at most four, each with up to four ranks."""
    return min(4, max(2, os.cpu_count()))


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items):
    """Begin with what takes longest, or it runs alone at the end. A file's tests stay together, those of all notebooks a tutorial at a time."""
    items.sort(key=lambda item: LONGEST_FIRST.index(item.path.parent.name))
    for item in items:
        tutorial = getattr(item, "callspec", None) and item.path.parent.name == "notebooks" and item.callspec.params.get("name")
        item.add_marker(pytest.mark.xdist_group(tutorial or item.path.stem))


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch, tmp_path):
    """Run directories go to the test's own folder, and what the caller has set outside does not reach the test."""
    for name in OUTSIDE_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RUNS", str(tmp_path / "runs"))
    for name, value in vars(type(current)(name=None, values={}, resume=None)).items():
        monkeypatch.setattr(current, name, value)


@pytest.fixture(scope="session")
def client(tmp_path_factory):
    """A client of four workers on this machine, which have launched once and are therefore quick from now on."""
    directory = tmp_path_factory.mktemp("first-launch") / "run"
    with ddp.connect("local", workers=4) as client:
        ddp.launch(client, ddp.rank, directory=directory)
        yield client


S3_SERVER = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
server.start()
print(*server.get_host_and_port(), flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="session")
def endpoint():
    """The URL of an S3 server (moto), a process of its own."""
    with subprocess.Popen([sys.executable, "-c", S3_SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                          text=True) as server:
        line = ""
        while not line.startswith("127.0.0.1"):  # it introduces itself first
            line = server.stdout.readline()
        yield "http://{}:{}".format(*line.split())
        server.stdin.close()
