"""The exercises of `mnist` judge rightly, and digits of one's own are checked."""

import gzip
import os
import re
import shutil
import socket
import subprocess
import sys

import jupytext
import numpy as np
import pytest
import torch
from tutorials_here import ROOT

import ddp_common as ddp
from tutorials.checks import mnist as checks
from tutorials.helpers import read_digits

# What is typed in a terminal

LESSON = "\n".join(
    cell.source
    for cell in jupytext.read(ROOT / "tutorials" / "mnist.py").cells
    if cell.cell_type == "markdown"
)
PATH = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])


def typed(begins):
    """The lines of the lesson's text that a student types, from the one that begins so."""
    block = LESSON[LESSON.index(begins) :].split("\n\n")[0]
    return re.sub(r"(?m)^ +", "", block)


@pytest.fixture
def my_work(tmp_path):
    """A copy of the repository's parts that are typed about, as JupyterLab would show them."""
    for name in ("tutorials/scripts", "data/mnist"):
        shutil.copytree(ROOT / name, tmp_path / name)
    (tmp_path / "tutorials" / "my-work").mkdir()
    return tmp_path / "tutorials" / "my-work"


def shell(lines, my_work, **variables):
    """A terminal in which these lines are typed."""
    root = str(my_work.parent)
    return subprocess.Popen(
        ["bash", "-ec", lines],
        cwd=root,
        env={**os.environ, "PATH": PATH, "JUPYTER_SERVER_ROOT": root, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.timeout(300)
def test_a_script_that_torchrun_starts_unchanged_trains_twice_and_the_port_once(my_work):
    start = typed('cd "$JUPYTER_SERVER_ROOT/my-work"')
    printed, errors = shell(start, my_work).communicate()
    # the ranks share the pipe: a line's end may come late
    lines = re.findall(r"(?:epoch \d|held out): loss \d\.\d{4}", printed)
    assert len(lines) == 2 * 4 and len(set(lines)) == 4, printed + errors
    assert "scripts/plain_loop.py" in start
    solved = start.replace("scripts/plain_loop.py", "scripts/solutions/plain_loop.py")
    printed, errors = shell(solved, my_work).communicate()
    assert len(printed.splitlines()) == 4, printed + errors


# What Slurm does on each node; the environment is that of this process
A_NODE = """cd my-work
SLURM_JOB_ID=7
source() { :; }
scontrol() { printf '127.0.0.1\\nanother\\n'; }
srun() { "${@:3}"; }
"""


@pytest.mark.timeout(300)
def test_the_batch_job_for_two_nodes_trains_one_model(my_work):
    job = typed("#!/bin/bash")
    for line in ("--nodes=2", "--ntasks-per-node=1", "--gres=gpu:4"):
        assert f"#SBATCH {line}\n" in job
    assert "srun --cpus-per-task=16 --kill-on-bad-exit=1 \\\n" in job  # what srun() leaves out
    chosen = "$((20000 + SLURM_JOB_ID % 10000))"
    assert chosen in job and "--nproc-per-node 4" in job
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    job = job.replace(chosen, port).replace("node 4", "node 1")
    solution = ROOT / "tutorials" / "scripts" / "solutions" / "plain_loop.py"
    shutil.copy(solution, my_work / "my_port.py")
    nodes = [shell(A_NODE + job, my_work) for _ in range(2)]
    said = [node.communicate() for node in nodes]
    assert sorted(len(printed.splitlines()) for printed, _ in said) == [0, 4], said
    assert torch.load(my_work / "model.pt", weights_only=True)


def test_the_table_of_the_batch_job_is_true_to_its_file():
    job = (ROOT / "clusters" / "batch" / "mnist.sbatch").read_text()
    lines = [line for line in job.splitlines() if re.match(r"#SBATCH|[^#]", line)]
    table = LESSON[LESSON.index("| in the job |") :].split("\n\n")[0]
    named = re.findall(r"`([^`]+)`", " ".join(row.split("|")[1] for row in table.splitlines()))
    assert len(named) == 8
    for word in named:
        assert any(word in line for line in lines), f"{word} is not in mnist.sbatch"


def test_the_figures_of_resnet18_are_the_measured_ones():
    page = (ROOT / "docs" / "measured.md").read_text()
    row = r"two ranks, 8 steps of ResNet18.*? \| (\S+) \| one rank: (\S+) \| (\S+) times as fast"
    two, one, ratio = re.search(row, page).groups()
    said = f"take {one} s on one rank and {two} s on two, {ratio} times as fast"
    assert said in " ".join(LESSON.split())


# The prediction


@pytest.mark.parametrize(
    ("meant", "spellings"),
    [
        (
            "'same'. Right",
            ["same", "Same", " SAME.", "the same", "equal", "Identical", 1, "as far: same"],
        ),
        ("'half'", ["half", "Half", "halved", "half as far", 0.5, "1/2"]),
        ("'double'", ["double", "DOUBLE", "twice as far", 2]),
        ("is that half, double", ["not the same", "half or double", "", "none", "twelve"]),
        ("no prediction", [None]),
    ],
)
def test_a_prediction_is_read_in_any_spelling(meant, spellings):
    for said in spellings:
        assert meant in checks.prediction(said), said


# Digits of one's own


def write_idx(path, array):
    sizes = b"".join(length.to_bytes(4) for length in array.shape)
    path.write_bytes(gzip.compress(bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes()))


@pytest.mark.parametrize(
    ("parts", "read"),
    [({"digits": 50}, [45, 45, 5, 5]), ({"train": 30, "t10k": 20}, [30, 30, 20, 20])],
)
def test_digits_of_ones_own_come_with_a_test_set_or_a_tenth_is_held_out(tmp_path, parts, read):
    for part, count in parts.items():
        write_idx(tmp_path / f"{part}-images-idx3-ubyte.gz", np.zeros((count, 28, 28), np.uint8))
        write_idx(tmp_path / f"{part}-labels-idx1-ubyte.gz", np.arange(count, dtype=np.uint8))
    assert [len(tensor) for tensor in read_digits(tmp_path)] == read


def test_digits_without_a_label_each_are_refused(tmp_path):
    write_idx(tmp_path / "digits-images-idx3-ubyte.gz", np.zeros((5, 28, 28), np.uint8))
    write_idx(tmp_path / "digits-labels-idx1-ubyte.gz", np.zeros(4, np.uint8))
    with pytest.raises(ddp.Error, match="not digits of 28 x 28 with one label each"):
        read_digits(tmp_path)
