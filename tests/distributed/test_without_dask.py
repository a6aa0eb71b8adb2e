"""The same program under torchrun and other launchers: the same weights and files as on Dask.

`PROGRAM` is run by torchrun once for all tests; on Dask its function runs in this process.
"""

import importlib.util
import os
import shutil
import socket
import sys

import cloudpickle
import numpy
import pandas
import pytest
import torch
from ports import free_port
from processes import TESTS, can_hide, finished, log_of, saved_steps
from ranks_here import Rank
from test_pages import blocks

import ddp_common as ddp

PROGRAM = """
import sys

import torch
import torch.distributed as dist

import ddp_common as ddp
import faults_on_purpose


def train(epochs, ends_group=False):
    weights = faults_on_purpose.train(epochs=epochs)
    ddp.save_file(f"rank-{ddp.rank()}.txt", "here")
    print("rank", ddp.rank(), "of", ddp.world_size())
    if ends_group:  # as scripts for torchrun do
        dist.destroy_process_group()
    ddp.report(last=ddp.rank())
    return weights


if __name__ == "__main__":
    heard = []
    with ddp.connect() as client:
        run = ddp.launch(
            client, train, directory=sys.argv[1], on_report=heard.append, epochs=2, ends_group=True
        )
        if ddp.rank() == 0:
            assert heard == list(run.records), heard
            torch.save(run.result, sys.argv[2])
        print("after the launch", run.world_size, sorted({each["rank"] for each in run.records}))
"""


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """The function of the program."""
    path = tmp_path_factory.mktemp("module") / "program_for_torchrun.py"
    path.write_text(PROGRAM)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    cloudpickle.register_pickle_by_value(module)
    yield module.train
    del sys.modules[path.stem]


@pytest.fixture(scope="module")
def under_torchrun(tmp_path_factory):
    """(the folder of the run, its weights, what was printed, on stdout and on stderr)."""
    folder = tmp_path_factory.mktemp("torchrun")
    (folder / "program.py").write_text(PROGRAM)
    command = "-m torch.distributed.run --standalone --nproc-per-node 2 program.py run weights.pt"
    done = finished(*command.split(), cwd=folder, env={**os.environ, "PYTHONPATH": TESTS})
    return folder / "run", torch.load(folder / "weights.pt"), done.stdout, done.stderr


def test_torchrun_trains_to_the_same_weights_and_leaves_the_same_files_as_dask(
    client, train, under_torchrun
):
    directory, weights, *_ = under_torchrun
    run = ddp.launch(client, train, workers=2, epochs=2)
    assert torch.equal(weights, run.result)
    names = {path.name for path in run.directory.iterdir()}
    assert {path.name for path in directory.iterdir()} == names
    assert saved_steps(directory) == saved_steps(run.directory)
    assert directory.stat().st_mode & 0o777 == 0o700, "for its owner alone"


def test_under_torchrun_all_ranks_have_the_records_of_all_and_what_they_print_is_shown_once(
    under_torchrun,
):
    _, _, said, _ = under_torchrun
    assert said.count("after the launch 2 [0, 1]") == 1


def test_the_line_of_an_epoch_says_that_it_is_rank_0s_whose_numbers_it_shows(under_torchrun):
    directory, _, _, said = under_torchrun
    table = pandas.read_json(directory / "metrics.jsonl", lines=True)
    last = table[table["epoch"] == 1].dropna(subset="loss")
    of_rank_0 = last[last["rank"] == 0]
    mean = numpy.average(of_rank_0["loss"], weights=of_rank_0["batch"])
    assert f"2 of 2 epochs  rank 0: loss {mean:#.4g}  last 0.000" in said
    assert mean != pytest.approx(numpy.average(last["loss"], weights=last["batch"]), rel=1e-3)


def test_a_run_begun_under_torchrun_goes_on_with_dask(client, train, under_torchrun, tmp_path):
    shutil.copytree(under_torchrun[0], tmp_path / "run")
    run = ddp.launch(client, train, workers=2, directory=tmp_path / "run", epochs=3)
    undisturbed = ddp.launch(client, train, workers=2, epochs=3)
    assert torch.equal(run.result, undisturbed.result)
    assert "Resumed from step-00000014" in log_of(run.directory)


def test_a_process_that_no_launcher_has_started_says_so():
    with pytest.raises(ddp.Error, match="was not started by torchrun"):
        ddp.connect("torchrun")


# Ranks that a launcher of another kind has started

LAUNCHES = """
import sys
import torch
import torch.distributed as dist

def train():
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item()

with ddp.connect() as client:
    run = ddp.launch(client, train, directory="run")
    print(ddp.rank(), run.result, file=sys.stderr)
"""


def start(code, folder, where=True):
    """Two ranks that execute `code`. Without `where`, nothing says where rank 0 is."""
    port = free_port()
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)} if where else {}
    code = f"import os; os.chdir({str(folder)!r})\n{code}"
    ranks = []
    for rank in range(2):
        own = {"RANK": str(rank), "WORLD_SIZE": "2"}
        ranks.append(Rank(code, folder, {**own, **place}))
    return ranks


def test_ranks_of_another_launcher_train_together(tmp_path):
    ranks = start(LAUNCHES, tmp_path)
    first, second = [rank.said() for rank in ranks]
    assert first.endswith("0 2.0\n") and second == "1 2.0\n"


def test_a_launcher_that_does_not_say_where_rank_0_is_is_refused_with_what_to_do(tmp_path):
    for rank in start(LAUNCHES, tmp_path, where=False):
        assert "but not MASTER_ADDR, MASTER_PORT. Start the ranks with" in rank.complaint()


# What may go wrong with some of the ranks

DRIFTS_APART = """
from test_replicas import saves_nothing
with ddp.connect() as client:
    run = ddp.launch(client, saves_nothing, returns=lambda model: model, directory="run")
    print(run.problems)
"""
TRAIN_ALONE = """
from test_training import trains_alone
with ddp.connect() as client:
    print(ddp.launch(client, trains_alone, directory="run").problems)
"""
SAVES_WHERE_NOTHING_CAN_BE = """
import os
os.makedirs("run/a_folder", exist_ok=True)
if os.environ["RANK"] == "0":
    os.symlink(os.getcwd(), "run/link")

def train():
    if ddp.rank() == 1:
        ddp.save_file("a_folder", b"x")
        ddp.save_file("link/outside", b"x")
        ddp.save_file("good", b"x")

with ddp.connect() as client:
    run = ddp.launch(client, train, directory="run")
    print("PROBLEMS", *run.problems, file=sys.stderr)
"""
LEAVES = """
import datetime
import sys
from dask_ranks.without_dask import ranks

ranks.STORE_INTERVAL = datetime.timedelta(seconds=1)

def train():
    if ddp.rank() == 1:
        sys.exit(0)

with ddp.connect() as client:
    ddp.launch(client, train, directory="run")
"""


@pytest.mark.parametrize(
    "program, words",
    [
        (DRIFTS_APART, "ranks have returned have drifted apart"),
        (TRAIN_ALONE, "Each rank has trained alone"),
    ],
)
def test_what_is_odd_of_the_ranks_is_a_problem_of_rank_0(tmp_path, program, words):
    first, _ = start(program, tmp_path)
    assert words in first.said()


def test_what_another_rank_could_not_write_is_a_problem_on_every_rank(tmp_path):
    for rank in start(SAVES_WHERE_NOTHING_CAN_BE, tmp_path):
        problems = rank.said().partition("PROBLEMS")[2]
        assert "a_folder cannot be written: Is a directory" in problems
        assert "leads out of the run directory through a link" in problems
    assert (tmp_path / "run" / "good").exists() and not (tmp_path / "outside").exists()


def test_a_rank_that_leaves_in_the_function_is_named_and_not_waited_for(tmp_path):
    first, other = start(LEAVES, tmp_path)
    assert "Rank 1 ended before it had told" in first.complaint()
    assert other.said() == "" and other.process.exitcode == 0


HIDES = """
import ctypes, os, subprocess
os.makedirs("shared", exist_ok=True)
if os.environ["RANK"] == "1":
    ctypes.CDLL(None).unshare(0x20000)  # CLONE_NEWNS
    for words in ("--make-rprivate /", "-t tmpfs tmpfs shared"):
        subprocess.run(["mount", *words.split()], check=True)
"""


def test_a_host_that_does_not_see_the_run_directory_is_named(tmp_path):
    if not can_hide():
        pytest.skip("needs the right to make a mount namespace (root)")
    for rank in start(HIDES + LAUNCHES.replace('"run"', '"shared/run"'), tmp_path):
        assert f"is not visible on {socket.gethostname()}" in rank.said()


PORTED = """
import torch.distributed as dist
with ddp.connect() as client:
    ddp.launch(client, lambda: dist.init_process_group("gloo"), directory="run")
"""


def test_a_function_that_makes_the_process_group_joins_the_one_that_is_there(tmp_path):
    for rank in start(PORTED, tmp_path):
        rank.said()
        assert rank.process.exitcode == 0
    for rank in start(PORTED.replace("gloo", "mpi"), tmp_path):
        assert "Remove that line; docs/coming-from-elsewhere.md" in rank.complaint()


def test_a_collection_is_refused_with_what_to_do(tmp_path):
    code = "import dask.array\nwith ddp.connect() as client:\n"
    code += "    ddp.launch(client, lambda x: x, x=dask.array.ones(4))"
    for rank in start(code, tmp_path):
        assert "to_parquet" in rank.complaint()
        assert "The argument x is a Dask collection" in rank.said()


WITHOUT_DISTRIBUTED = """
import sys, time
sys.modules["distributed"] = sys.modules["dask_ranks"] = None  # to import one is an error
import torch, torch.distributed as dist
from mine import train

dist.init_process_group("gloo")
x = torch.randn(1000, 8, generator=torch.manual_seed(0))
weights = train(x, x.sum(1, keepdim=True), epochs=int(sys.argv[1]))
torch.save(weights, f"{sys.argv[2]}-{dist.get_rank()}.pt")
time.sleep(1)  # torch may abort where its group ends right after a backward
"""


def test_the_function_of_the_readme_trains_and_resumes_where_there_is_no_distributed(tmp_path):
    (tmp_path / "mine.py").write_text(blocks("README.md")[0])
    (tmp_path / "alone.py").write_text(WITHOUT_DISTRIBUTED)
    said = []
    for name, epochs in [("resumed", "2"), ("resumed", "5"), ("whole", "5")]:
        command = "-m torch.distributed.run --nproc-per-node=2 --standalone alone.py"
        variables = {"DDP_CHECKPOINTS": str(tmp_path / name), "PYTHONHASHSEED": "0"}
        options = dict(cwd=tmp_path, env={**os.environ, **variables})
        said.append(finished(*command.split(), epochs, name, **options).stdout)
    assert ["Resumed from step-00000032" in each for each in said] == [False, True, False]
    names = ("resumed-0", "resumed-1", "whole-0")
    first, second, whole = (torch.load(tmp_path / f"{name}.pt")["weight"] for name in names)
    assert torch.equal(first, second) and torch.equal(first, whole)
