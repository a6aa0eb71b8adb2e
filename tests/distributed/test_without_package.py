"""Workers and a scheduler that have everything but this package: refused, or sent it as told.

They have a Python environment of their own, and own working, home and temporary folders. Where
mount namespaces may be made, they see the client's run folder empty.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import cloudpickle
import dask.array
import pytest
import torch
from distributed import Client
from patience import PATIENCE
from processes import can_hide, hiding, saved_steps, wait_until
from test_pages import blocks

import ddp_common as ddp

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder that workers and scheduler see empty."""
    return tmp_path_factory.mktemp("hidden")


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """The Python of an environment with what is installed here, except for this project."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (target,) = folder.glob("lib/python*/site-packages")
    for source in {sysconfig.get_paths()[kind] for kind in ("purelib", "platlib")}:
        for path in Path(source).iterdir():
            is_ours = "ddp_common" in path.name or "dask_ranks" in path.name
            if not is_ours and path.suffix != ".pth" and not (target / path.name).exists():
                (target / path.name).symlink_to(path)
    return folder / "bin" / "python"


@pytest.fixture
def cluster(python, runs, tmp_path):
    """(address, function that starts a third worker) of a scheduler with two workers."""
    file = tmp_path / "scheduler.json"
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "LANG": "C.UTF-8"}
    elsewhere = hiding(runs) if can_hide() else []

    def start(name, *words):
        (tmp_path / name).mkdir()
        process = subprocess.Popen(
            [*elsewhere, python, "-m", "dask", *words, "--scheduler-file", file],
            cwd=tmp_path / name,
            env={**environment, "TMPDIR": str(tmp_path / name)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        started.callback(process.wait)
        started.callback(os.killpg, process.pid, signal.SIGKILL)

    def start_worker(name):
        start(name, *"worker --nthreads 1 --no-dashboard --memory-limit 0".split())

    with contextlib.ExitStack() as started:
        ports = "--host 127.0.0.1 --port 0 --dashboard-address 127.0.0.1:0"
        start("scheduler", "scheduler", *ports.split())
        start_worker("first")
        start_worker("second")
        # it is not written at once
        wait_until(lambda: file.exists() and file.read_text().endswith("}"))
        yield json.loads(file.read_text())["address"], lambda: start_worker("third")


def train(table=None):
    """Two steps with all that a rank may leave."""
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


def test_it_is_refused_in_a_sentence_and_nothing_stays_on_the_scheduler(cluster):
    address, _ = cluster
    with pytest.raises(ddp.Error, match="(?s)have no ddp_common.*clusters/README.md"):
        ddp.connect(address, workers=2)
    with Client(address) as client:
        for arguments in ({}, {"table": dask.array.zeros(4)}):
            with pytest.raises(ddp.Error, match="have no ddp_common.\nInstall it"):
                ddp.launch(client, train, **arguments)
        plugins = client.run_on_scheduler(lambda dask_scheduler: [*dask_scheduler.worker_plugins])
        assert plugins == ["shuffle"]  # Dask's own


def test_it_is_sent_by_the_recipe_also_to_workers_that_come_later_and_files_come_home(
    cluster, runs
):
    address, start_third_worker = cluster
    (recipe,) = blocks("clusters/README.md")
    with Client(address) as client:
        client.wait_for_workers(2, timeout=2 * PATIENCE)
    exec(compile(recipe.replace("tcp://that-one:8786", address), "recipe", "exec"), {})
    with ddp.connect(address, workers=2) as client:
        if can_hide():
            assert list(client.run(os.listdir, str(runs)).values()) == [[], []]
        trains_and_files_come_home(client, runs / "first")
        (pid, *_) = client.run(os.getpid).values()
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: pid not in (there := pids(client)) and len(there) == 2)
        trains_and_files_come_home(client, runs / "after-a-kill")
    start_third_worker()
    with ddp.connect(address, workers=3) as client:
        trains_and_files_come_home(client, runs / "with-a-third", ranks=3)


def pids(client):
    return [*client.run(os.getpid, on_error="ignore").values()]


def trains_and_files_come_home(client, folder, ranks=2):
    run = ddp.launch(client, train, directory=folder)
    assert [record["samples"] for record in run.records] == [4.0] * 2 * ranks
    assert saved_steps(run.directory) == [2]
    homes = [(run.directory / str(rank) / "home.txt").read_text() for rank in range(ranks)]
    assert ddp.__file__ not in homes
