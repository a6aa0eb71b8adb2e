"""What the tests of the notebooks share."""

import sys
import tempfile

import cloudpickle
import pytest


@pytest.fixture(autouse=True, scope="module")
def functions_travel_by_value(request):
    """Functions of a test's file reach the ranks as if they were defined in a notebook."""
    module = sys.modules[request.module.__name__]
    cloudpickle.register_pickle_by_value(module)
    yield
    cloudpickle.unregister_pickle_by_value(module)


@pytest.fixture(scope="module")
def folder_for_sockets():
    """The path of a folder for a Jupyter server's kernels (`kernels`): sockets need short ones."""
    with tempfile.TemporaryDirectory(prefix="jupyter-") as folder:
        yield folder
