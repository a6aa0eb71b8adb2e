"""CLUSTER=saturn against a stand-in of the service.

Real dask-saturn, and a real scheduler and workers that know nothing of this package.
"""

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

import cloudpickle
import pytest
import torch
from children import children
from processes import log_of, wait_until
from saturn_here import can_hide, running_saturn

import ddp_common as ddp
from ddp_common.ranks.checkpoint_files import checkpoints, fault, step_of
from ddp_common.teaching import faults

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


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """Another account, without a cluster."""
    with running_saturn(tmp_path / "saturn") as saturn:
        for name, value in saturn.environment.items():
            monkeypatch.setenv(name, value)
        yield saturn


def home_of_the_package():
    return ddp.__file__


def train():
    """Two steps with all that a rank may leave; returns where rank 0 has this package from."""
    model, sampler = torch.nn.Linear(1, 1), ddp.ElasticSampler(8, 4)
    checkpoint = ddp.Checkpoint(model=model, sampler=sampler)
    checkpoint.restore()
    for _ in sampler.epochs(1):
        for indices in sampler:
            total = torch.tensor([float(len(indices))])
            torch.distributed.all_reduce(total)
            ddp.report(samples=total.item())
    checkpoint.save()
    ddp.save_file(f"{ddp.rank()}/home.txt", ddp.__file__)
    return ddp.__file__


def start_pets(**variables):
    """`make run TUTORIAL=pets` as quickly as it goes."""
    environment = {**os.environ, "SET": "epochs=1 hidden=8 batch_size=8192", **variables}
    return subprocess.Popen(
        [sys.executable, "-m", "ddp_common", "run", "pets"],
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def run_pets(**variables):
    """(exit code, stdout, stderr) of it."""
    process = start_pets(**variables)
    said = process.communicate()
    return process.returncode, *said


def test_without_the_client_the_workers_python_has_torch_and_not_this_package(saturn):
    program = "import torch; print(torch.__version__, flush=True); import ddp_common"
    done = subprocess.run(
        [saturn.python, "-c", program], cwd="/", env={}, capture_output=True, text=True
    )
    assert done.stdout.strip() == torch.__version__
    assert "No module named 'ddp_common'" in done.stderr


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
    (saved,) = checkpoints(run.directory / "checkpoints")
    assert step_of(saved) == 2 and fault(saved) is None


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
    code, out, error = run_pets(OPTIONS=f"{SIZES} shutdown_on_close=false", RUNS=str(saturn.runs))
    assert code == 0, error
    (line,) = [line for line in out.splitlines() if "Run directory:" in line]
    directory = Path(line.split()[-1])
    names = {path.name for path in directory.iterdir()}
    assert {"config.json", "metrics.jsonl", "loss.png", "names.txt"} <= names
    assert checkpoints(directory / "checkpoints")
    assert '"rank": 1' in (directory / "metrics.jsonl").read_text()
    said = [line for line in error.splitlines() if not line.startswith("epoch ")]
    assert said == ["Saturn starts a scheduler and 2 instance(s) of tiny; that may take minutes."]
    assert not saturn.clusters[0].closed and len(saturn.clusters[0].alive()) == 3


def test_a_cluster_is_closed_with_its_client(elsewhere):
    with ddp.connect() as client:
        assert client.ranks == 2 and len(elsewhere.clusters[-1].alive()) == 3
    assert elsewhere.clusters[-1].closed and not elsewhere.clusters[-1].alive()
    assert elsewhere.asked[-1][:2] == ("POST", f"{elsewhere.clusters[-1].name}/close")


def test_a_cluster_that_is_told_to_stay_is_there_for_the_next_client(elsewhere, monkeypatch):
    monkeypatch.setenv("OPTIONS", f"{SIZES} shutdown_on_close=false")
    ddp.connect().close()
    assert len(elsewhere.clusters) == 1 and not elsewhere.clusters[-1].closed
    monkeypatch.setenv("OPTIONS", SIZES)
    ddp.connect().close()
    assert len(elsewhere.clusters) == 1 and elsewhere.clusters[-1].closed


def test_ctrl_c_while_saturn_starts_the_cluster_closes_it(elsewhere):
    elsewhere.starting = 1
    process = start_pets()
    wait_until(lambda: elsewhere.clusters and not elsewhere.starting)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 130 and "Stopped." in error and "Traceback" not in error
    assert [cluster.closed for cluster in elsewhere.clusters] == [True]


def test_instances_with_several_workers_each_are_counted_in_workers(elsewhere, monkeypatch):
    monkeypatch.setenv("OPTIONS", f"{SIZES} nprocs=2")
    with ddp.connect() as client:
        assert client.ranks == 2
    posted = [body for method, _, body in elsewhere.asked if method == "POST"]
    assert [body for body in posted if "n_workers" in body][0]["n_workers"] == 1
    assert {"n": 1} in [body for *_, body in elsewhere.asked]


REFUSED = {
    "token_missing": (
        {"SATURN_TOKEN": None},
        ["CLUSTER=saturn needs SATURN_TOKEN, which is not set", "take them from Saturn's page"],
    ),
    "url_missing": (
        {"SATURN_BASE_URL": None},
        ["CLUSTER=saturn needs SATURN_BASE_URL, which is not set", "take them from Saturn's page"],
    ),
    "url_is_none": (
        {"SATURN_BASE_URL": "saturn"},
        ['no Saturn answers there ("saturn" is not a valid URL)'],
    ),
    "wrong_token": (
        {"SATURN_TOKEN": "wrong"},
        ["refuses SATURN_TOKEN (Invalid token)", "get a new one"],
    ),
    "nobody_there": (
        {"SATURN_BASE_URL": "http://127.0.0.1:9"},
        [
            "SATURN_BASE_URL=http://127.0.0.1:9: no Saturn answers there (Connection refused)",
            "Is the address right",
        ],
    ),
    "no_such_host": (
        {"SATURN_BASE_URL": "http://no-such-host.invalid"},
        ["no Saturn answers there", "does this host have a way to it?"],
    ),
    "no_such_size": (
        {"OPTIONS": "worker_size=huge scheduler_size=tiny"},
        ["huge is not a valid option. Options are: ['tiny', 'small']", 'OPTIONS="worker_size='],
    ),
    "no_such_option": (
        {"OPTIONS": f"{SIZES} worker_sise=tiny"},
        ["no option worker_sise", "worker_size"],
    ),
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
    with pytest.raises(ddp.Error) as caught:
        ddp.connect().close()
    assert all(each in str(caught.value) for each in words), caught.value
    assert "Traceback" not in capfd.readouterr().err
    assert children() <= before and len(saturn.clusters) == clusters


def test_make_run_says_what_is_wrong_without_a_traceback(saturn):
    code, _, error = run_pets(SATURN_TOKEN="wrong")
    is_one_line = error.startswith("\nError: Saturn at http://") and error.count("\n") == 2
    assert code == 1 and is_one_line, error


def test_a_web_site_that_is_no_saturn_is_said_to_be_none(saturn, monkeypatch):
    monkeypatch.setenv("SATURN_BASE_URL", f"{saturn.url}/somewhere/else/")
    with pytest.raises(ddp.Error, match="what answers there is no Saturn"):
        ddp.connect()


def test_a_cluster_that_cannot_be_used_is_not_left_to_run(elsewhere, monkeypatch):
    """From outside dask-saturn asks for a certificate, which this Saturn does not give."""
    monkeypatch.setenv("SATURN_IS_INTERNAL", "false")
    with pytest.raises(ddp.Error, match="Saturn did not start the cluster: 404"):
        ddp.connect()
    assert [cluster.closed for cluster in elsewhere.clusters] == [True]


def test_a_cluster_that_saturn_does_not_close_is_reported(elsewhere, capfd):
    client = ddp.connect(workers=1)
    elsewhere.out_of_order = True
    client.close()
    said = capfd.readouterr().err
    assert f"Saturn did not close the cluster {elsewhere.clusters[-1].name}: out of order" in said
    assert "Stop it on Saturn's page" in said and "Traceback" not in said
