"""A tutorial under torchrun: one command, the same files and weights as on Dask.

And one message when it fails.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from processes import PATIENCE, log_of, wait_until

from ddp_common.ranks.checkpoint_files import checkpoints, newest, step_of

ROOT = Path(__file__).parents[2]
QUICK = "epochs=1 hidden=16 batch_size=2048"


def command(cluster, checkpoint, *options, tutorial="pets", cwd=ROOT, settings=QUICK, **variables):
    arguments = [
        sys.executable,
        "-m",
        "ddp_common",
        "run",
        tutorial,
        "--cluster",
        cluster,
        "--workers",
        "2",
        "--checkpoint",
        checkpoint,
        *options,
    ]
    return subprocess.Popen(
        arguments,
        cwd=cwd,
        env={**os.environ, "SET": settings, **variables},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def in_no_hurry(repository, checkpoint, *options, pause=1, **variables):
    """The same of a training under torchrun that takes 200 s, unless it is resumed before.

    Meanwhile the cores are free. It is the tutorial of `repository`.
    """
    chosen = {"tutorial": "in_no_hurry", "cwd": repository, "settings": f"pause={pause}"}
    return command("torchrun", checkpoint, *options, **chosen, **variables)


def finish(process):
    out, error = process.communicate(timeout=200)
    return process.returncode, out, error


def ranks_of(process):
    """The processes that torchrun has started, in rank order, once they train."""
    import psutil

    numbers = {}
    for child in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            variables = child.environ()
            if "RANK" in variables:
                numbers[child] = int(variables["RANK"])
    return sorted(numbers, key=numbers.__getitem__)


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """Trains with a launcher, once for all tests: returns the run directory and what was said."""
    folder, said = tmp_path_factory.mktemp("quick"), {}

    def train(cluster):
        if cluster not in said:
            code, said[cluster], error = finish(command(cluster, folder / cluster))
            assert code == 0, error
        return folder / cluster, said[cluster]

    return train


def test_torchrun_trains_to_the_same_loss_and_leaves_the_same_files_as_dask(quick):
    losses, names = {}, {}
    for cluster in ("torchrun", "local"):
        directory, out = quick(cluster)
        assert out.count("Invented:") == 1 and f"Run directory: {directory}" in out
        assert directory.stat().st_mode & 0o777 == 0o700, "for its owner alone"
        names[cluster] = {path.name for path in directory.iterdir()}
        lines = (directory / "metrics.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        last_step = max(record["step"] for record in records)
        last = [record for record in records if record["step"] == last_step]
        assert sorted(record["rank"] for record in last) == [0, 1]
        losses[cluster] = sum(record["loss"] for record in last) / 2
    assert abs(losses["torchrun"] / losses["local"] - 1) < 1e-6
    only_with_dask = {"pace.jsonl"}  # of runs with as many steps as a sample has
    assert names["torchrun"] == names["local"] - only_with_dask


@pytest.mark.parametrize(("first", "second"), [("torchrun", "local"), ("local", "torchrun")])
def test_a_run_begun_with_one_launcher_goes_on_with_another(quick, tmp_path, first, second):
    begun, _ = quick(first)
    shutil.copytree(begun, tmp_path / "run")
    code, out, error = finish(command(second, tmp_path / "run", "--set", "epochs=2"))
    assert code == 0, error
    assert "Resumed from step-00000049." in out + log_of(tmp_path / "run")
    assert step_of(checkpoints(tmp_path / "run" / "checkpoints")[-1]) == 98


@pytest.fixture
def temporary(tmp_path):
    """A folder for temporary files, in which nothing may be left but torch's own cache."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    yield folder
    left = [path.name for path in folder.iterdir()]
    assert not [name for name in left if not name.startswith("torchinductor_")]


def test_a_killed_rank_is_named_in_one_message(repository, tmp_path, temporary):
    process = in_no_hurry(repository, tmp_path / "run", TMPDIR=str(temporary))
    wait_until(lambda: checkpoints(tmp_path / "run" / "checkpoints"))
    ranks = ranks_of(process)
    began = time.monotonic()
    ranks[1].kill()
    code, _, error = finish(process)
    assert code == 1 and time.monotonic() - began < PATIENCE
    assert re.search(r"Error: Rank [01] failed", error) and "ChildFailedError" not in error
    assert not any(rank.is_running() for rank in ranks)


def test_restarts_go_on_from_the_newest_checkpoint(repository, tmp_path):
    undisturbed = in_no_hurry(repository, tmp_path / "undisturbed", pause=0)
    assert finish(undisturbed)[0] == 0
    process = in_no_hurry(repository, tmp_path / "run", "--restarts", "1")
    wait_until(lambda: checkpoints(tmp_path / "run" / "checkpoints"))
    ranks_of(process)[1].kill()
    code, out, error = finish(process)
    assert code == 0, error
    assert "Resumed from step-" in out
    states = [
        torch.load(newest(tmp_path / name / "checkpoints"))["model"]
        for name in ("run", "undisturbed")
    ]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_ctrl_c_ends_all_ranks(repository, tmp_path, temporary):
    process = in_no_hurry(repository, tmp_path / "run", TMPDIR=str(temporary))
    wait_until(lambda: checkpoints(tmp_path / "run" / "checkpoints"))
    ranks = ranks_of(process)
    os.killpg(process.pid, signal.SIGINT)
    assert finish(process)[0] != 0
    assert not any(rank.is_running() for rank in ranks)


def test_bad_input_is_one_message(tmp_path):
    code, _, error = finish(command("torchrun", tmp_path / "run", settings="epoch=1"))
    assert code == 1
    assert "pets has no setting 'epoch'" in error and "Traceback" not in error


def test_a_process_that_no_launcher_has_started_says_so(monkeypatch):
    import ddp_common as ddp

    with pytest.raises(ddp.Error, match="was not started by torchrun"):
        ddp.connect("torchrun")


def test_without_srun_the_message_says_so(tmp_path):
    code, _, error = finish(command("srun", tmp_path / "run", PATH="/nowhere"))
    assert code == 1 and "There is no srun here" in error


@pytest.mark.parametrize("restarts", ["x", "-1"])
def test_a_number_of_restarts_that_is_none_is_one_message(tmp_path, restarts):
    code, _, error = finish(command("torchrun", tmp_path / "run", "--restarts", restarts))
    assert code == 1
    assert "RESTARTS is a whole number of at least 0" in error and "Traceback" not in error
