"""One real Slurm for all tests of this folder. They run in one process, one after another."""

import sys
from pathlib import Path

import pytest
from patience import PATIENCE
from slurm_here import running_slurm, why_not

FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items):
    """A test's own time-outs come first: they say what was waited for."""
    for item in items:
        if FOLDER in item.path.parents:
            item.add_marker(pytest.mark.timeout(15 * PATIENCE))


@pytest.fixture(scope="session")
def slurm(tmp_path_factory):
    """A Slurm of four nodes and a login host."""
    if why_not() is not None:
        pytest.skip(f"no Slurm here: {why_not()}")
    folder = tmp_path_factory.mktemp("slurm")
    folder.chmod(0o755)
    with running_slurm(folder) as slurm:
        slurm.environment |= {"PYTHON": sys.executable, "DDP_PROGRESS": "lines"}
        yield slurm
