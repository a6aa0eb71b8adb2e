"""A table in the memory of Dask's workers, on its way into two ranks."""

import shutil
import tempfile
import time

import dask.dataframe as dd
import numpy as np
import pandas as pd
from distributed import wait
from measuring import compared, launched, take_turns
from with_ddp import see_arrays, see_parquet, see_table

import ddp_common as ddp
from dask_ranks.client.rpc import known_workers

WIDTH, PARTITIONS = 50, 8


def measure(quick):
    size = 0.05 if quick else 1.0  # GB
    with ddp.connect("local", workers=2) as client:
        for way in ways(client, table_of(client, 0.01)):
            way()  # imports
        futures = table_of(client, size)
        ours, parquet, gather = take_turns(*ways(client, futures), turns=2 if quick else 3)
    what = f"{size:g} GB of a Dask table into two ranks, s"
    beside = "written as Parquet, read in the ranks"
    yield compared(what, ours, parquet, beside=beside, speed_up=True, at_least=5)
    beside = "gathered to the client, sent as arguments"
    yield compared(what, ours, gather, beside=beside, speed_up=True, at_least=3)


def ways(client, futures):
    """Three functions that return the seconds until both ranks have seen all their rows."""

    def ours():
        return until_seen(see_table, table=futures)

    def parquet():
        folder = tempfile.mkdtemp()
        began = time.time()
        try:
            dd.from_delayed(futures).to_parquet(folder)
            return until_seen(see_parquet, began, path=folder)
        finally:
            shutil.rmtree(folder)

    def gather():
        began = time.time()
        arrays = [each.to_numpy() for each in client.gather(futures)]
        return until_seen(see_arrays, began, arrays=arrays)

    def until_seen(function, began=None, **arguments):
        began = began or time.time()
        return max(rank["seen"] for rank in launched(client, function, **arguments)) - began

    return ours, parquet, gather


def table_of(client, size):
    """A table of `size` GB in the memory of both workers, half of it on each, as futures."""
    rows = int(size * 1e9 / 8 / WIDTH / PARTITIONS)
    workers = sorted(known_workers(client))
    futures = [
        client.submit(part, number, rows, workers=[workers[number % 2]], pure=False)
        for number in range(PARTITIONS)
    ]
    wait(futures)
    return futures


def part(number, rows):
    values = np.random.default_rng(number).random((rows, WIDTH))
    return pd.DataFrame(values, columns=[f"column {column}" for column in range(WIDTH)])
