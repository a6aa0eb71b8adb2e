"""One real Slurm for all tests of this folder, and what they train there."""

import os
import sys
from pathlib import Path

import pytest
from slurm_here import running_slurm, why_not

ROOT = Path(__file__).parents[2]
NAMES = 300  # of pets: a run on all of them computes for longer than its processes take to start
SETTINGS = "epochs=4 hidden=16 batch_size=128"


@pytest.fixture(scope="session")
def slurm(tmp_path_factory):
    """The environment of Slurm's commands, for a cluster of one node.

    Its settings of pets train on few names.
    """
    if why_not() is not None:
        pytest.skip(f"no Slurm here: {why_not()}")
    folder = tmp_path_factory.mktemp("slurm")
    folder.chmod(0o755)
    names = (ROOT / "data" / "pets" / "names.csv").read_text().splitlines()
    (folder / "names.csv").write_text("\n".join(names[: NAMES + 1]))
    with running_slurm(folder) as variables:
        yield {
            **os.environ,
            **variables,
            "PYTHON": sys.executable,
            "TUTORIAL": "pets",
            "SET": f"data={folder}/names.csv {SETTINGS}",
            "DDP_PROGRESS": "lines",
        }
