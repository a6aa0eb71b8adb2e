"""One real Slurm for all tests of this folder."""

import os
import sys

import pytest
from slurm_here import running_slurm, why_not

SETTINGS = "epochs=4 hidden=16 batch_size=512"  # 776 steps


@pytest.fixture(scope="session")
def slurm(tmp_path_factory):
    """The environment of Slurm's commands, for a cluster of one node."""
    if why_not() is not None:
        pytest.skip(f"no Slurm here: {why_not()}")
    folder = tmp_path_factory.mktemp("slurm")
    folder.chmod(0o755)
    with running_slurm(folder) as variables:
        yield {
            **os.environ,
            **variables,
            "PYTHON": sys.executable,
            "TUTORIAL": "pets",
            "SET": SETTINGS,
            "DDP_PROGRESS": "lines",
        }
