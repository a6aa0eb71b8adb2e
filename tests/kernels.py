"""Kernels of notebooks that listen at no port, and what nbval needs besides.

Jupyter chooses five ports that are free, and the kernel opens them a second or two later: in
between, another program may take one. Through files of its user there is no such race.

As a plugin of pytest (`python -m pytest -p tests.kernels --nbval …`) this has nbval start its
kernels so, in a clean environment: what is set outside does not reach a notebook, and its runs go
to a temporary folder.
"""

import atexit
import functools
import os
import shutil
import tempfile

import jupyter_client.manager
import nbval.kernel
from traitlets.config import Config

SETTINGS = {"TUTORIAL", "RESUME", "PRESET", "SET", "CLUSTER", "OPTIONS", "RESTARTS"}

# On another processor, floating-point sums come in another order: what a notebook compares must
# not depend on it. The stored outputs come from one with AVX-512; the oldest instructions
# (ATEN_CPU_CAPABILITY=default, ONEDNN_MAX_CPU_ISA=SSE41) make ResNet18 3.7 times slower.
ANOTHER_PROCESSOR = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}


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


def pytest_configure(config):
    """Have nbval start its kernels so, in an environment in which nothing else is set."""
    runs = tempfile.TemporaryDirectory(prefix="runs-")
    config.add_cleanup(runs.cleanup)
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in SETTINGS and not name.startswith("DDP_")
    }
    environment |= {**ANOTHER_PROCESSOR, "WORKERS": "2", "RUNS": runs.name}
    # Threads of OpenMP that spin while they wait take the cores from other programs and from each
    # other: on a busy machine a fit of scikit-learn takes minutes in place of seconds.
    environment.setdefault("GOMP_SPINCOUNT", "1000")

    def manager_for_nbval(**options):
        manager = kernel_manager(**options)
        manager.start_kernel = functools.partial(manager.start_kernel, env=environment)
        return manager

    nbval.kernel.KernelManager = manager_for_nbval
