"""Kernels of notebooks that listen at no port.

Jupyter chooses five ports that are free, and the kernel opens them a second or two later: in
between, another program may take one. Through files of its user there is no such race. As a plugin
of pytest (`-p kernels`) this does the same for nbval.
"""

import atexit
import shutil
import tempfile

import jupyter_client.manager
import nbval.kernel
from traitlets.config import Config


def through_files():
    """Options of one `KernelManager`: its kernel is reached through a folder of its own."""
    folder = tempfile.mkdtemp(prefix="kernel-")  # paths of sockets have to be short
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return {"transport": "ipc", "connection_file": f"{folder}/kernel.json"}


def kernel_manager(**options):
    """A `KernelManager` whose kernel is reached through files of this user."""
    return jupyter_client.manager.KernelManager(**through_files(), **options)


def configuration():
    """The same for one call of what takes a configuration, such as `NotebookClient`."""
    return Config(KernelManager=through_files())


def pytest_configure():
    """Have nbval start its kernels so."""
    nbval.kernel.KernelManager = kernel_manager
