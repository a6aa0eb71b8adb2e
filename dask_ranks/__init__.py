"""Start ranks on the workers of a Dask cluster, watch them, end them, start them again.

    import dask_ranks

    run = dask_ranks.launch(client, train, epochs=5)  # each rank calls train(epochs=5)

A rank is a process of its own. `train` may be any function that uses `torch.distributed`: the
process group is there when it begins. The package has a room for each place where code runs:
`client` in your program, `worker` in a Dask worker, `rank` in the process that trains; `run` is
what a run leaves behind, `clusters` starts Dask clusters, `without_dask` joins the ranks of
torchrun and srun. Names are imported when they are first used.
"""

import importlib

# The public names, and the module that each lives in.
_HOME = {
    "launch": "dask_ranks.client.launch",
    "script": "dask_ranks.rank.scripts",
    "connect": "dask_ranks.clusters.connect",
    "Error": "ddp_common.errors",
    "RankFailed": "dask_ranks.run.job",
    "RankStalled": "dask_ranks.run.job",
    "RunStopped": "dask_ranks.run.job",
    "SchedulerLost": "dask_ranks.run.job",
}
__all__ = list(_HOME)


def __getattr__(name):
    if name not in _HOME:
        raise AttributeError(f"dask_ranks has no name {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_HOME[name]), name)
