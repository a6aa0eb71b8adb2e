"""What the tests of the exercises share."""

import functools
import tempfile

import pytest

import ddp_common as ddp


@pytest.fixture
def script_runs(monkeypatch):
    """What `ddp.run_script` has returned in this test: a list that grows."""
    original = ddp.run_script
    runs = []

    @functools.wraps(original)
    def run_script(*arguments, **named):
        runs.append(original(*arguments, **named))
        return runs[-1]

    monkeypatch.setattr(ddp, "run_script", run_script)
    return runs


@pytest.fixture(scope="module")
def folder_for_sockets():
    """The path of a folder for a Jupyter server's kernels (`kernels`): sockets need short ones."""
    with tempfile.TemporaryDirectory(prefix="jupyter-") as folder:
        yield folder
