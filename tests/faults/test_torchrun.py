"""Under torchrun: a killed rank, restarts, Ctrl-C, SIGTERM to all processes, bad input."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pandas
import psutil
import pytest
import torch
from command_line import press_ctrl_c
from patience import PATIENCE
from processes import is_alive, saved_steps, wait_until
from train_in_no_hurry import STEPS

TESTS = Path(__file__).parents[1]


def run(repository, checkpoint, *options, settings="pause=1", **variables):
    """The command of `make run` with a training under torchrun that waits until it is resumed."""
    command = "-m tutorials run in_no_hurry --cluster torchrun --workers 2 --checkpoint"
    return subprocess.Popen(
        [sys.executable, *command.split(), checkpoint, *options],
        cwd=repository,
        env={**os.environ, "SET": settings, **variables},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def finish(process):
    out, error = process.communicate(timeout=3 * PATIENCE)
    return process.returncode, out, error


def ranks_of(process):
    """The processes that torchrun has started, in rank order."""
    numbers = {}
    for child in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            variables = child.environ()
            if "RANK" in variables:
                numbers[child] = int(variables["RANK"])
    return sorted(numbers, key=numbers.__getitem__)


def weights_of(directory):
    step = saved_steps(directory)[-1]
    (path,) = (directory / "checkpoints").glob(f"step-{step:08d}*.pt")
    return torch.load(path)["model"]


def test_a_killed_rank_is_named_in_one_message_and_nothing_is_left(repository, tmp_path):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    process = run(repository, tmp_path / "run", TMPDIR=str(temporary))
    wait_until(lambda: saved_steps(tmp_path / "run") or process.poll() is not None)
    ranks = ranks_of(process)
    ranks[1].kill()
    code, _, error = finish(process)
    assert code == 1
    assert re.search(r"Error: Rank [01] failed", error) and "ChildFailedError" not in error
    assert not any(rank.is_running() for rank in ranks)
    left = [path.name for path in temporary.iterdir()]
    assert not [name for name in left if not name.startswith("torchinductor_")]


def test_restarts_go_on_from_the_newest_checkpoint_and_keep_what_every_rank_had_reported(
    repository, tmp_path
):
    undisturbed = run(repository, tmp_path / "undisturbed", settings="pause=0")
    assert finish(undisturbed)[0] == 0
    process = run(repository, tmp_path / "run", "--restarts", "1")
    wait_until(lambda: saved_steps(tmp_path / "run"))
    ranks_of(process)[1].kill()
    code, out, error = finish(process)
    assert code == 0, error
    assert "Resumed from step-" in out
    one, other = weights_of(tmp_path / "run"), weights_of(tmp_path / "undisturbed")
    assert all(torch.equal(one[name], other[name]) for name in other)
    metrics = pandas.read_json(tmp_path / "run" / "metrics.jsonl", lines=True)
    steps_of_rank_1 = metrics[metrics["rank"] == 1]["step"].unique()
    assert sorted(steps_of_rank_1) == list(range(1, STEPS + 1))
    assert not list((tmp_path / "run").glob("metrics-*"))


@pytest.mark.parametrize("times", [1, 4])
def test_after_ctrl_c_ranks_save_and_leave_after_the_same_step(repository, tmp_path, times):
    process = run(repository, tmp_path / "run", settings="pause=0.1")
    wait_until(lambda: saved_steps(tmp_path / "run"))
    ranks = ranks_of(process)
    press_ctrl_c(process, times)
    code, _, error = finish(process)
    assert code == 128 + signal.SIGTERM and "Traceback" not in error
    assert left_after(error) == saved_steps(tmp_path / "run")[-1]
    assert error.count("They left after") == 1 and error.count("Stopped. Go on from") == 1
    assert not any(rank.is_running() for rank in ranks)


def left_after(said):
    """The step after which ranks that were told to stop say that they have left."""
    step = re.search(r"told to stop \(SIGTERM\). They left after step (\d+)", said)
    assert step, said
    return int(step[1])


@pytest.mark.parametrize("start_method, steps", [("fork", 1000), ("spawn", 1000), ("spawn", 5)])
def test_ranks_with_loader_workers_save_and_leave_after_the_same_step(
    tmp_path, start_method, steps
):
    """Under torchrun itself, which tells all processes of a rank."""
    torchrun = "-m torch.distributed.run --standalone --nproc-per-node 2".split()
    process = subprocess.Popen(
        [sys.executable, *torchrun, TESTS / "trains_with_loader_workers.py"],
        env={
            **os.environ,
            "RUN_DIRECTORY": str(tmp_path / "run"),
            "START_METHOD": start_method,
            "STEPS": str(steps),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    wait_until(lambda: saved_steps(tmp_path / "run") or process.poll() is not None)
    started = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    code, said, _ = finish(process)
    assert code != 0
    assert saved_steps(tmp_path / "run")[-1] == left_after(said)
    assert "DataLoader worker" not in said
    wait_until(lambda: not any(is_alive(each.pid) for each in started))


def test_srun_where_there_is_none_is_one_message(repository, tmp_path):
    process = run(repository, tmp_path / "run", "--cluster", "srun", PATH="/nowhere")
    code, _, error = finish(process)
    assert code == 1
    assert "There is no srun here" in error and "Traceback" not in error
