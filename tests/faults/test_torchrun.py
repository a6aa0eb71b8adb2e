"""Under torchrun: restarts, Ctrl-C, SIGTERM to all processes, a stall, tables, bad input."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from patience import PATIENCE
from processes import is_alive, saved_steps, wait_until

TESTS = Path(__file__).parents[1]


def run(repository, checkpoint, *options, settings="pause=1", **variables):
    """The command of `make run` with a training under torchrun that waits until it is resumed."""
    command = "-m ddp_common run in_no_hurry --cluster torchrun --workers 2 --checkpoint"
    return subprocess.Popen(
        [sys.executable, *command.split(), checkpoint, *options],
        cwd=repository,
        env={**os.environ, "SET": settings, **variables},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def torchrun(tmp_path, script):
    return subprocess.Popen(
        [
            sys.executable,
            *"-m torch.distributed.run --standalone --nproc-per-node 2".split(),
            script,
        ],
        env={**os.environ, "RUN_DIRECTORY": str(tmp_path / "run")},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process):
    out, error = process.communicate(timeout=3 * PATIENCE)
    return process.returncode, out, error


def ranks_of(process):
    children = psutil.Process(process.pid).children(recursive=True)
    return [child for child in children if "RANK" in child.environ()]


def weights_of(directory):
    step = saved_steps(directory)[-1]
    (path,) = (directory / "checkpoints").glob(f"step-{step:08d}*.pt")
    return torch.load(path)["model"]


def test_restarts_go_on_from_the_newest_checkpoint(repository, tmp_path):
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


def test_ctrl_c_ends_all_ranks(repository, tmp_path):
    process = run(repository, tmp_path / "run")
    wait_until(lambda: saved_steps(tmp_path / "run"))
    ranks = ranks_of(process)
    os.killpg(process.pid, signal.SIGINT)
    assert finish(process)[0] != 0
    assert not any(rank.is_running() for rank in ranks)


def test_ranks_with_loader_workers_save_and_leave_after_the_same_step(tmp_path):
    process = torchrun(tmp_path, TESTS / "trains_with_loader_workers.py")
    wait_until(lambda: saved_steps(tmp_path / "run") or process.poll() is not None)
    started = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=3 * PATIENCE)
    assert process.returncode != 0
    step = re.search(r"told to stop \(SIGTERM\). They left after step (\d+)", said)
    assert step, said
    assert saved_steps(tmp_path / "run")[-1] == int(step[1])
    assert "DataLoader worker" not in said
    wait_until(lambda: not any(is_alive(each.pid) for each in started))


TABLE = """
import dask.array as da
import ddp_common as ddp

with ddp.connect() as client:
    ddp.launch(client, lambda x: x, x=da.ones(4))
"""


def test_a_collection_is_refused_with_what_to_do(tmp_path):
    (tmp_path / "script.py").write_text(TABLE)
    process = torchrun(tmp_path, tmp_path / "script.py")
    said, _ = process.communicate(timeout=3 * PATIENCE)
    assert process.returncode != 0
    assert "x is a Dask collection" in said and "to_parquet" in said


@pytest.mark.parametrize(
    ("options", "variables", "words"),
    [
        ((), {"SET": "epoch=1"}, "in_no_hurry has no setting 'epoch'"),
        (("--restarts", "x"), {}, "RESTARTS is a whole number of at least 0"),
        (("--cluster", "srun"), {"PATH": "/nowhere"}, "There is no srun here"),
    ],
)
def test_bad_input_is_one_message(repository, tmp_path, options, variables, words):
    code, _, error = finish(run(repository, tmp_path / "run", *options, **variables))
    assert code == 1
    assert words in error and "Traceback" not in error
