"""Train PyTorch models with DistributedDataParallel on the workers of a Dask cluster.

    import ddp_common as ddp

    with ddp.connect() as client:
        run = ddp.launch(client, train, epochs=5, batch_size=256)
    run.metrics, run.result, run.directory

The package has a room for each place where code runs: `client` in your notebook, `worker` in a
Dask worker, `ranks` in the processes that train; `run` is what a run leaves behind. Names are
imported when they are first used: torch runs an entry point of this package at the end of its own
import (see `_torchvision`), which must stay quick.
"""

import importlib

# The public names, and the module that each lives in.
_HOME = {
    "launch": "client.launch",
    "script": "ranks.scripts",
    "connect": "clusters.connect",
    "device": "ranks.rendezvous",
    "rank": "ranks.rendezvous",
    "world_size": "ranks.rendezvous",
    "ElasticSampler": "ranks.sampling",
    "EvalSampler": "ranks.sampling",
    "DataLoader": "ranks.loaders",
    "Rows": "ranks.rows",
    "split": "data.splits",
    "Checkpoint": "ranks.checkpoint",
    "check_replicas": "ranks.replicas",
    "report": "ranks.reporting",
    "save_file": "ranks.reporting",
    "ImageFolder": "data.images",
    "inject": "faults",
    "Error": "errors",
    "RankFailed": "errors",
    "RankStalled": "errors",
    "RunStopped": "errors",
    "SchedulerLost": "errors",
}
__all__ = list(_HOME)


def __getattr__(name):
    if name not in _HOME:
        known = ", ".join(sorted(__all__))
        raise AttributeError(f"ddp_common has no name {name!r}; it has {known}")
    home = importlib.import_module(f"ddp_common.{_HOME[name]}")
    return getattr(home, name)
