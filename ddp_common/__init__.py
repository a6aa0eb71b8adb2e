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

# The public names, by the module that they live in.
_NAMES = {
    "dask_ranks.client.launch": ["launch"],
    "dask_ranks.rank.scripts": ["script"],
    "dask_ranks.clusters.connect": ["connect"],
    "ddp_common.rendezvous": ["device", "rank", "world_size"],
    "ddp_common.sampling": ["ElasticSampler"],
    "ddp_common.evaluation": ["EvalSampler"],
    "ddp_common.loaders": ["DataLoader"],
    "ddp_common.rows": ["Rows"],
    "ddp_common.splits": ["split"],
    "ddp_common.checkpoint": ["Checkpoint"],
    "ddp_common.replicas": ["check_replicas"],
    "ddp_common.reporting": ["report", "save_file"],
    "ddp_common.images": ["ImageFolder"],
    "ddp_common.faults": ["inject"],
    "ddp_common.errors": ["Error"],
    "dask_ranks.run.job": ["RankFailed", "RankStalled", "RunStopped", "SchedulerLost"],
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}
__all__ = list(_HOME)


def __getattr__(name):
    if name not in _HOME:
        raise AttributeError(f"ddp_common has no name {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_HOME[name]), name)
