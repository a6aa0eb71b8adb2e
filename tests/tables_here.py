"""Partitions on workers of one's choice, what a launch returns, and what all ranks say."""

import sys

import cloudpickle
import torch.distributed as dist
from distributed import wait

import ddp_common as ddp
from dask_ranks.client.rpc import known_workers

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def placed(client, places, function):
    """Partitions 0, 1, … as futures, each on the worker that `places` names by its number.

    One after the other: of tasks that wait on a worker, idle ones would steal some. Others are
    allowed, since the partitions of a worker that is lost are computed elsewhere.
    """
    addresses = list(known_workers(client))
    futures = []
    for number, place in enumerate(places):
        future = client.submit(
            function, number, workers=[addresses[place]], pure=False, allow_other_workers=True
        )
        wait(future)
        futures.append(future)
    return futures


def everyone(mine):
    """On a rank: what each of the ranks has given, in a list."""
    found = [None] * ddp.world_size()
    dist.all_gather_object(found, mine)
    return found


def on_ranks(client, size, function, **arguments):
    """What a function returns on so many ranks."""
    return ddp.launch(client, function, workers=size, **arguments).result
