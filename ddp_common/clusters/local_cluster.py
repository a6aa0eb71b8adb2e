"""Local clusters: the environment of their workers, and that one which dies twice is kept.

Dask's nannies bring a worker back within a second. Its `SpecCluster` looks 15 s after a loss
(`distributed.deploy.lost-worker-timeout`) whether the worker is there, and closes the nanny if
not, for good: also when the worker has been back and has died again a moment ago. Relies on
`SpecCluster` being told of losses in `_update_worker_status`. Promises: a nanny is given up only
once it has given up itself.
"""

import asyncio
import os
from typing import Any

import dask
from dask.utils import parse_timedelta
from distributed import LocalCluster, SpecCluster
from distributed.core import Status
from distributed.deploy.cluster import Cluster

GIVEN_UP = (Status.failed, Status.closing, Status.closed)
HASH_SEED = "6640"  # what Dask's nanny gives its workers, so that they hash alike


def environment_of_workers(options: dict[str, Any]) -> dict[str, str]:
    """What Dask's nanny makes of this process's environment; `options` are the cluster's."""
    environment = {**os.environ, **(options.get("env") or {})}
    for key in ("pre-spawn-environ", "environ"):
        for name, value in dask.config.get(f"distributed.nanny.{key}").items():
            if value is not None:
                environment.setdefault(name, str(value))
    if environment.get("PYTHONHASHSEED", "0") == "0":
        environment["PYTHONHASHSEED"] = HASH_SEED
    return environment


class KeepsNannies:
    """Before a `LocalCluster` among the bases, it has it trust its nannies."""

    workers: dict[Any, Any]  # nannies by their names; the `SpecCluster` behind it has them
    scheduler_info: dict[str, Any]
    _futures: set

    def _update_worker_status(self, op, msg):
        if op == "remove":
            name = self.scheduler_info["workers"][msg]["name"]
            delay = parse_timedelta(dask.config.get("distributed.deploy.lost-worker-timeout"))
            asyncio.get_running_loop().call_later(delay, self._forget_if_given_up, name)
        # Not `super()`: that is what would close the nanny.
        Cluster._update_worker_status(self, op, msg)

    def _forget_if_given_up(self, name):
        nanny = self.workers.get(name)
        if nanny is not None and nanny.status in GIVEN_UP:
            self._futures.add(asyncio.ensure_future(nanny.close()))
            del self.workers[name]


def keeping_nannies(cls: type) -> type:
    """The cluster class with `KeepsNannies`, if it is one of Dask's local ones, as dask-cuda's is.

    The class itself if not, or if it does with losses something of its own.
    """
    takes_losses = getattr(cls, "_update_worker_status", None)
    if not issubclass(cls, LocalCluster) or takes_losses is not SpecCluster._update_worker_status:
        return cls
    return type(cls.__name__, (KeepsNannies, cls), {"__module__": cls.__module__})
