"""What all tests share: a clean environment, one Dask cluster of four workers, one S3 server."""

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.request

import fsspec
import hypothesis
import pytest
from command_line import ROOT, SET_OUTSIDE
from distributed import Client
from patience import PATIENCE
from processes import can_hide, environment_for, hiding, separate_cluster
from s3_here import s3_server

import ddp_common as ddp
from tutorials.kit import parameters

# Tests run side by side. Threads of OpenMP that spin while they wait take the cores from each
# other: a rank of two threads gets 20 times slower.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

# Where Python is told to write no bytecode, each of many processes would compile this package.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# A shell starts background jobs deaf to Ctrl-C, and so would be every program that a test
# interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)


# A property that holds on an idle machine holds on a busy one, and today as tomorrow: no time
# limits, and the same examples in every run. `--hypothesis-profile search` draws others.
hypothesis.settings.register_profile("steady", deadline=None, derandomize=True)
hypothesis.settings.register_profile("search", deadline=None)
hypothesis.settings.load_profile("steady")


def pytest_sessionstart(session):
    """Where matplotlib is new it makes a list of fonts, and says so in whatever cell is first."""
    is_worker = hasattr(session.config, "workerinput")
    if not is_worker:
        subprocess.run([sys.executable, "-c", "import matplotlib.font_manager"], check=True)


CELL_TIMEOUT = 15 * PATIENCE  # seconds; a cell trains, and others may train beside it


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.suffix == ".ipynb":
            item.add_marker(pytest.mark.timeout(CELL_TIMEOUT))


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch, tmp_path):
    """Run directories go to the test's own folder; what is set outside does not reach the test."""
    for name in SET_OUTSIDE:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr(parameters, "chosen", None)


SHARED_WORKERS = 4


@pytest.fixture(scope="session")
def client(tmp_path_factory):
    """A client of four workers here, which have launched once and so are quick from now on."""
    directory = tmp_path_factory.mktemp("first-launch") / "run"
    client = ddp.connect("local", workers=SHARED_WORKERS)
    try:
        client.is_shared = True
        ddp.launch(client, ddp.rank, directory=directory)
        yield client
    finally:
        # Dask gives a worker that it has killed five seconds to end, and a busy machine may not
        with contextlib.suppress(TimeoutError):
            client.close()


@pytest.fixture
def joining(client, tmp_path):
    """Variables with which another program takes these workers in place of starting its own."""
    given = environment_for(client, tmp_path).items()
    of_tls = {name: value for name, value in given if name not in os.environ}
    return {"CLUSTER": client.scheduler.address} | of_tls


@pytest.fixture(scope="module")
def apart(tmp_path_factory):
    """A client of two workers, and a folder of its own that they see empty and cannot write."""
    if not can_hide():
        pytest.skip("needs the right to make a mount namespace (root)")
    folder, hidden = tmp_path_factory.mktemp("cluster"), tmp_path_factory.mktemp("hidden")
    with separate_cluster(folder, *hiding(hidden)) as (_, address), Client(address) as client:
        client.wait_for_workers(2, timeout=2 * PATIENCE)
        yield client, hidden


@pytest.fixture(autouse=True)
def killed_workers_are_back(request):
    """Dask brings a killed worker back, but not one that is killed a second time while it starts.

    So the next test must not be that early.
    """
    yield
    client = request.node.funcargs.get("client")
    if not getattr(client, "is_shared", False):
        return
    nannies = client.cluster.workers
    deadline = time.monotonic() + 2 * PATIENCE
    while len(client.workers()) < SHARED_WORKERS or any(
        nanny.status.name != "running" for nanny in nannies.values()
    ):
        in_time = time.monotonic() < deadline
        assert in_time, "a worker that this test has killed did not come back"
        if len(nannies) < SHARED_WORKERS:  # Dask has given one up
            client.cluster.scale(SHARED_WORKERS)
        time.sleep(0.1)


@pytest.fixture(scope="session")
def s3_log(tmp_path_factory):
    """The file in which the S3 server writes a line for each request."""
    return tmp_path_factory.mktemp("s3") / "requests.log"


@pytest.fixture(scope="session")
def endpoint(s3_log):
    """The URL of an S3 server."""
    with s3_server(s3_log) as url:
        yield url


@pytest.fixture
def s3(endpoint, monkeypatch):
    """A file system on that server, without buckets.

    Credentials are there for this process and those that it starts.
    """
    values = {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    reset = urllib.request.Request(f"{endpoint}/moto-api/reset", method="POST")
    urllib.request.urlopen(reset).close()
    fsspec.filesystem("s3").invalidate_cache()
    return fsspec.filesystem("s3", skip_instance_cache=True)


@pytest.fixture(scope="session")
def repository(tmp_path_factory):
    """A repository whose one tutorial is `in_no_hurry`: `make run`'s command trains it there."""
    folder = tmp_path_factory.mktemp("repository")
    for name in ("ddp_common", "dask_ranks", "clusters", "pyproject.toml"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "tutorials").mkdir()
    for name in ("__init__.py", "__main__.py", "kit"):
        (folder / "tutorials" / name).symlink_to(ROOT / "tutorials" / name)
    script = (ROOT / "tests" / "train_in_no_hurry.py").read_text()
    (folder / "tutorials" / "in_no_hurry.py").write_text(f"# ---\n# jupyter:\n# ---\n{script}")
    return folder


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a disk of half a megabyte."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", disk]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("only root may mount a small disk")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)
