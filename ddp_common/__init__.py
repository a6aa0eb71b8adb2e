"""Train PyTorch models with DistributedDataParallel on the workers of a Dask cluster.

    import ddp_common as ddp

    with ddp.connect() as client:
        run = ddp.launch(client, train, epochs=5, batch_size=256)
    run.metrics, run.result, run.directory

Most names are imported when first used: torch runs an entry point of this package at the end of its own import (see
`_torchvision`), which must stay quick. `launch` and `settings` are functions that live in modules of the same name, so they are
bound here, before an import of such a module can take the name.
"""

import importlib

from ddp_common.launch import Run, launch
from ddp_common.settings import settings

_HOME = {
    "connect": "clusters",
    "process_group": "rendezvous",
    "device": "rendezvous",
    "rank": "rendezvous",
    "world_size": "rendezvous",
    "ElasticSampler": "sampling",
    "EvalSampler": "sampling",
    "split": "sampling",
    "stratified_split": "sampling",
    "Checkpoint": "checkpoint",
    "report": "reporting",
    "save_file": "reporting",
    "fetch": "datasets",
    "ImageFolder": "images",
    "Augmented": "images",
    "inject": "faults",
    "judge": "exercises",
    "Error": "errors",
    "RankFailed": "errors",
    "RankStalled": "errors",
    "RunStopped": "errors",
    "SchedulerLost": "errors",
}
__all__ = ["Run", "launch", "settings", *_HOME]


def __getattr__(name):
    if name not in _HOME:
        raise AttributeError(f"ddp_common has no name {name!r}; it has {', '.join(sorted(__all__))}")
    return getattr(importlib.import_module(f"ddp_common.{_HOME[name]}"), name)
