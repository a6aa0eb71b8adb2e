"""A profile in, a connected client out.

A profile is a YAML file in `clusters/`: the cluster class, the number of workers, its keyword arguments. Promises: when `connect`
returns, the wanted number of workers is there and importing torch ahead of the first launch; when its client is closed, so is
the cluster.
"""

import contextlib
import importlib
import os
import signal
import threading
import time
from pathlib import Path

import dask
import psutil
import yaml
from dask.system import CPU_COUNT
from distributed import Client

from ddp_common.agent import Preload
from ddp_common.errors import Error

PROFILES = Path(__file__).parent.parent / "clusters"
WAIT_TIMEOUT = 60  # seconds that workers have to appear
SILENCE_TIMEOUT = "11s"  # after which a connection to a host that has vanished counts as closed; Dask takes no less


class ClusterClient(Client):
    """A `distributed.Client` that takes its cluster down with it."""

    @property
    def ranks(self):
        """How many ranks a launch would have: the number of workers."""
        return len(self.scheduler_info(n_workers=-1)["workers"])

    def close(self, *args, **kwargs):
        cluster, self.cluster = self.cluster, None
        closed = super().close(*args, **kwargs)
        if cluster is not None:
            cluster.close()
        return closed


def connect(profile=None, workers=None):
    """Start the cluster of a profile and return a client to it; use it in a `with` block or close it.

    Under torchrun or srun (CLUSTER unset or naming them) it joins their ranks instead and returns a `without_dask.Ranks`.

    `profile` is a name in `clusters/` or the path of a YAML file (default: CLUSTER from the environment, else `local`). `workers` is
    their number (default: WORKERS from the environment, else the profile's). Raises `Error` for an unknown or faulty profile, a
    number that is none, and workers that do not appear in time.
    """
    from ddp_common.without_dask import LAUNCHERS, Ranks, started_by

    name = profile or os.environ.get("CLUSTER") or started_by() or "local"
    if name in LAUNCHERS:
        if started_by() != name:
            raise Error(f"CLUSTER={name}: this process was not started by {name}. Use `make run TUTORIAL=… CLUSTER={name}`, which does so, or "
                        f"start the script with {name} yourself.")
        return Ranks()
    settings = read_profile(name)
    count = number_of_workers(workers if workers is not None else os.environ.get("WORKERS") or settings["workers"])
    dask.config.set({"distributed.worker.daemon": False,  # ranks are children of workers
                     "distributed.comm.timeouts.tcp": SILENCE_TIMEOUT})
    client = None
    try:
        with interrupts_held():
            client = ClusterClient(_make_cluster(settings, count))
        client.register_plugin(Preload())
        _wait(client, count)
    except BaseException:
        if client is not None:
            client.close()
        raise
    return client


@contextlib.contextmanager
def interrupts_held():
    """Ctrl-C waits until the cluster stands: Dask cannot close half of one."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pressed = []
    handler = signal.signal(signal.SIGINT, lambda *_: pressed.append(True))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if pressed:  # whatever became of the cluster: its workers have heard it too
            raise KeyboardInterrupt from None


def read_profile(profile):
    """The content of a profile (dict). Raises `Error` with the names there are, or with what is wrong in the file."""
    path = Path(profile) if profile.endswith((".yaml", ".yml")) else PROFILES / f"{profile}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in PROFILES.glob("*.yaml")))
        raise Error(f"There is no cluster profile {profile!r}. CLUSTER takes one of {known}, torchrun, srun, or the path of a .yaml file.")
    try:
        content = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise Error(f"The profile {path} is no valid YAML: {error}") from None
    if not isinstance(content, dict) or "cluster" not in content:
        raise Error(f"The profile {path} names no cluster class. It needs a line such as 'cluster: distributed.LocalCluster'.")
    profile = {"workers": "auto", **content, "options": content.get("options") or {}}
    if not isinstance(profile["cluster"], str) or not isinstance(profile["options"], dict):
        raise Error(f"The profile {path} has cluster: {profile['cluster']!r} and options: {profile['options']!r}. 'cluster' is the name of "
                    "a class, 'options' maps its keyword arguments to values.")
    return profile


def number_of_workers(wanted):
    """An int of at least 1. 'auto': the number of GPUs if dask-cuda can use them, else of physical cores, from 2 to 4."""
    if wanted == "auto":
        return gpus() or max(2, min(4, psutil.cpu_count(logical=False) or 1, CPU_COUNT))
    try:
        count = int(wanted)
    except (TypeError, ValueError):
        count = 0
    if count < 1:
        raise Error(f"WORKERS={wanted}: the number of workers is a whole number of at least 1. Each of them trains one rank.")
    return count


def gpus():
    """The number of GPUs that a local cluster can use: 0 without dask-cuda."""
    if importlib.util.find_spec("dask_cuda") is None:
        return 0
    import torch

    return torch.cuda.device_count()


def _make_cluster(settings, count):
    options = dict(settings["options"])
    name = settings["cluster"]
    if gpus() and settings.get("gpu_cluster"):
        name = settings["gpu_cluster"]
    module, _, attribute = name.rpartition(".")
    try:
        cluster_class = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise Error(f"The profile's cluster class {name} cannot be imported: {error}. Is its package installed?") from None
    if "LocalCluster" in name:
        options = {"threads_per_worker": max(1, CPU_COUNT // count), **options}
    try:
        return cluster_class(n_workers=count, **options)
    except (TypeError, ValueError, RuntimeError) as error:  # some clusters hand their options on to workers, which then fail to start
        raise Error(f"{name} could not be started with the profile's options: {error.__cause__ or error}.") from None


def _wait(client, count):
    deadline = time.monotonic() + WAIT_TIMEOUT
    while (there := len(client.scheduler_info(n_workers=-1)["workers"])) < count:
        if time.monotonic() > deadline:
            raise Error(f"{there} of {count} workers came within {WAIT_TIMEOUT} s. Look at the workers' log, or ask for fewer: WORKERS={max(there, 1)}.")
        time.sleep(0.05)
