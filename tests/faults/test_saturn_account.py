"""CLUSTER=saturn against a stand-in of the service.

Real dask-saturn, and a real scheduler and workers that know nothing of this package.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import cloudpickle
import faults_on_purpose as faults
import pytest
import torch
from children import children
from patience import PATIENCE
from processes import log_of, saved_steps
from saturn_here import running_saturn

import ddp_common as ddp

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("dask_saturn") is None,
    reason="needs dask-saturn (pip install -e '.[saturn]')",
)
cloudpickle.register_pickle_by_value(sys.modules[__name__])
ROOT = Path(__file__).parents[2]
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


def start_pets(**variables):
    """`make run TUTORIAL=pets` as quickly as it goes."""
    environment = {**os.environ, "SET": "epochs=1 hidden=8 batch_size=512", **variables}
    return subprocess.Popen(
        [sys.executable, "-m", "tutorials", "run", "pets"],
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_a_killed_worker_comes_back_gets_the_package_again_and_training_goes_on(
    client, saturn, tmp_path
):
    undisturbed = ddp.launch(client, faults.train, directory=saturn.runs / "undisturbed").result
    dies = faults.inject(faults.train, "worker killed", step=8, mark=tmp_path / "mark")
    run = ddp.launch(
        client, dies, workers=2, restarts=1, directory=saturn.runs / "killed", pause=0.1
    )
    assert torch.equal(run.result, undisturbed)
    assert "its worker died" in str(run.failures[0])
    assert "Resumed from step-0000000" in log_of(run.directory)
    assert all(home.endswith(ZIP) for home in client.run(home_of_the_package).values())


def test_make_run_trains_and_says_nothing_but_that_it_takes_minutes(saturn, client):
    """On the cluster of another program: a resource has one, which this program is to leave."""
    pets = start_pets(OPTIONS=f"{SIZES} shutdown_on_close=false", RUNS=str(saturn.runs))
    out, error = pets.communicate(timeout=4 * PATIENCE)
    assert pets.returncode == 0, error
    (line,) = [line for line in out.splitlines() if "Run directory:" in line]
    directory = Path(line.split()[-1])
    assert saved_steps(directory)
    assert '"rank": 1' in (directory / "metrics.jsonl").read_text()
    said = [line for line in error.splitlines() if " epochs  loss " not in line]
    assert said == ["Saturn starts a scheduler and 2 instance(s) of tiny; that may take minutes."]
    assert not saturn.clusters[0].closed and len(saturn.clusters[0].alive()) == 3


REFUSED = {
    "token_missing": ({"SATURN_TOKEN": None}, "environment variable SATURN_TOKEN"),
    "wrong_token": ({"SATURN_TOKEN": "wrong"}, "Saturn did not start the cluster: Invalid token"),
    "nobody_there": ({"SATURN_BASE_URL": "http://127.0.0.1:9"}, "did not start .*refused"),
    "no_such_size": ({"OPTIONS": "worker_size=huge"}, "huge is not a valid option"),
}


@pytest.mark.parametrize(("changed", "words"), REFUSED.values(), ids=REFUSED)
def test_what_is_wrong_is_one_error_with_what_to_do_and_nothing_is_started(
    saturn, monkeypatch, capfd, changed, words
):
    for name, value in changed.items():
        if value is None:
            monkeypatch.delenv(name)
        else:
            monkeypatch.setenv(name, value)
    before, clusters = children(), len(saturn.clusters)
    with pytest.raises(ddp.Error, match=words):
        ddp.connect().close()
    assert "Traceback" not in capfd.readouterr().err
    assert children() <= before and len(saturn.clusters) == clusters
