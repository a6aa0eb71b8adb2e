"""The same program under torchrun: the same weights and files as on Dask, one message on failure.

`program` is run by torchrun once for all tests; on Dask its function runs in this process.
"""

import contextlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys

import cloudpickle
import psutil
import pytest
import torch
from patience import PATIENCE
from processes import log_of, saved_steps, wait_until

import ddp_common as ddp

PROGRAM = """
import sys

import torch
import torch.distributed as dist

import ddp_common as ddp
from ddp_common.teaching import faults


def train(epochs, ends_group=False):
    weights = faults.train(epochs=epochs)
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
    """(the folder of the run, its weights, what was printed)."""
    folder = tmp_path_factory.mktemp("torchrun")
    (folder / "program.py").write_text(PROGRAM)
    command = "-m torch.distributed.run --standalone --nproc-per-node 2 program.py run weights.pt"
    done = subprocess.run(
        [sys.executable, *command.split()],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=3 * PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    return folder / "run", torch.load(folder / "weights.pt"), done.stdout


def test_torchrun_trains_to_the_same_weights_and_leaves_the_same_files_as_dask(
    client, train, under_torchrun
):
    directory, weights, _ = under_torchrun
    run = ddp.launch(client, train, workers=2, epochs=2)
    assert torch.equal(weights, run.result)
    names = {path.name for path in run.directory.iterdir()}
    assert {path.name for path in directory.iterdir()} == names
    assert saved_steps(directory) == saved_steps(run.directory)
    assert directory.stat().st_mode & 0o777 == 0o700, "for its owner alone"


def test_under_torchrun_all_ranks_have_the_records_of_all_and_what_they_print_is_shown_once(
    under_torchrun,
):
    _, _, said = under_torchrun
    assert said.count("after the launch 2 [0, 1]") == 1


def test_a_run_begun_under_torchrun_goes_on_with_dask(client, train, under_torchrun, tmp_path):
    shutil.copytree(under_torchrun[0], tmp_path / "run")
    run = ddp.launch(client, train, workers=2, directory=tmp_path / "run", epochs=3)
    undisturbed = ddp.launch(client, train, workers=2, epochs=3)
    assert torch.equal(run.result, undisturbed.result)
    assert "Resumed from step-00000014" in log_of(run.directory)


def test_a_process_that_no_launcher_has_started_says_so():
    with pytest.raises(ddp.Error, match="was not started by torchrun"):
        ddp.connect("torchrun")


def in_no_hurry(repository, checkpoint, *options, **variables):
    """The command of `make run` with a training under torchrun that waits until it is resumed.

    It is the tutorial of `repository`.
    """
    command = "-m ddp_common run in_no_hurry --cluster torchrun --workers 2 --checkpoint"
    return subprocess.Popen(
        [sys.executable, *command.split(), checkpoint, *options],
        cwd=repository,
        env={**os.environ, "SET": "pause=1", **variables},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def ranks_of(process):
    """The processes that torchrun has started, in rank order."""
    numbers = {}
    for child in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            variables = child.environ()
            if "RANK" in variables:
                numbers[child] = int(variables["RANK"])
    return sorted(numbers, key=numbers.__getitem__)


def test_a_killed_rank_is_named_in_one_message_and_nothing_is_left(repository, tmp_path):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    process = in_no_hurry(repository, tmp_path / "run", TMPDIR=str(temporary))
    wait_until(lambda: saved_steps(tmp_path / "run") or process.poll() is not None)
    ranks = ranks_of(process)
    ranks[1].kill()
    _, error = process.communicate(timeout=3 * PATIENCE)
    assert process.returncode == 1
    assert re.search(r"Error: Rank [01] failed", error) and "ChildFailedError" not in error
    assert not any(rank.is_running() for rank in ranks)
    left = [path.name for path in temporary.iterdir()]
    assert not [name for name in left if not name.startswith("torchinductor_")]
