"""Train PyTorch models with DistributedDataParallel on the workers of a Dask cluster.

    import ddp_common as ddp

    with ddp.connect() as client:
        run = ddp.launch(client, train, epochs=5, batch_size=256)
    run.metrics, run.result, run.directory

Here is what a training function calls: rendezvous, sampling, checkpoints, reports. It needs torch,
and of Dask no more than `tokenize`. What starts the ranks is the package `dask_ranks`; only this
file names it. Names are imported when they are first used: torch runs an entry point of this
package at the end of its own import (see `_torchvision`), which must stay quick.
"""

import importlib

# The public names, and the module that each lives in.
_HOME = {
    "launch": "dask_ranks.client.launch",
    "script": "dask_ranks.rank.scripts",
    "connect": "dask_ranks.clusters.connect",
    "device": "ddp_common.rendezvous",
    "rank": "ddp_common.rendezvous",
    "world_size": "ddp_common.rendezvous",
    "ElasticSampler": "ddp_common.sampling",
    "EvalSampler": "ddp_common.evaluation",
    "DataLoader": "ddp_common.loaders",
    "Rows": "ddp_common.rows",
    "split": "ddp_common.splits",
    "Checkpoint": "ddp_common.checkpoint",
    "check_replicas": "ddp_common.replicas",
    "report": "ddp_common.reporting",
    "save_file": "ddp_common.reporting",
    "ImageFolder": "ddp_common.images",
    "inject": "ddp_common.faults",
    "Error": "ddp_common.errors",
    "RankFailed": "dask_ranks.run.job",
    "RankStalled": "dask_ranks.run.job",
    "RunStopped": "dask_ranks.run.job",
    "SchedulerLost": "dask_ranks.run.job",
}
__all__ = list(_HOME)


def __getattr__(name):
    if name not in _HOME:
        known = ", ".join(sorted(__all__))
        raise AttributeError(f"ddp_common has no name {name!r}; it has {known}")
    return getattr(importlib.import_module(_HOME[name]), name)
