"""Tables that Dask prepared, on their way into two ranks, measured.

    python tests/benchmarks/tables.py [--output FILE.json] [--only NAME]

GIGABYTES sets the size of the table (default 1); below 1 everything is smaller by it.

| name     | ours                                     | other                             |
|----------|------------------------------------------|-----------------------------------|
| handover | `launch(table=…)` until both ranks have  | the same, by writing Parquet and  |
|          | seen all their rows (s)                  | reading it in the ranks; by       |
|          |                                          | `client.gather` and arguments     |
| moved    | bytes that workers sent for it           | limit 0                           |
| memory   | what a rank, and its worker, hold while  | the table's share of that rank    |
|          | the rank has seen its rows (bytes, PSS)  |                                   |
| first    | a million rows and 50 columns, from      | limit 1 s                         |
|          | `launch` to the first step, warm (s)     |                                   |
| loader   | a `DataLoader` over `tensors` (us a row) | a data set that takes row by row  |
|          |                                          | from the same DataFrame; a loader |
|          |                                          | over plain tensors; no loader     |
"""

import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import cloudpickle
import dask.dataframe as dd
import measuring
import numpy as np
import pandas as pd
import psutil
import torch
from distributed import wait
from measuring import compared, single, take_turns
from torch.utils.data import DataLoader, Dataset

import ddp_common as ddp

cloudpickle.register_pickle_by_value(sys.modules[__name__])

GIGABYTES = float(os.environ.get("GIGABYTES", 1))
WIDTH, PARTITIONS, TURNS = 50, 8, 3
FIRST_ROWS = int(1_000_000 * min(1, GIGABYTES))
LOADER_ROWS, LOADER_BATCH = int(400_000 * min(1, GIGABYTES)), 1024
NAMES = [f"column {number}" for number in range(WIDTH)]


def part(number, rows):
    values = np.random.default_rng(number).random((rows, WIDTH))
    return pd.DataFrame(values, columns=NAMES)


def table_of(client, rows):
    """A table in the memory of both workers, half of it on each."""
    addresses = sorted(client.scheduler_info(n_workers=-1)["workers"])
    futures = [
        client.submit(
            part, number, rows // PARTITIONS, workers=[addresses[number % 2]], pure=False
        )
        for number in range(PARTITIONS)
    ]
    wait(futures)
    return futures


# On the ranks


def note(folder, **found):
    path = Path(folder) / f"{ddp.rank()}.json"
    path.write_text(json.dumps({"finished": time.time(), **found}))


def see(table, folder):
    """Look at every value: a page that nobody has read was not handed over."""
    total = sum(float(each.to_numpy().sum()) for each in table.parts)
    worker = int(os.environ["DDP_WORKER_PROCESS"])
    note(folder, total=total, memory=memory_of(os.getpid()), worker=memory_of(worker))


def see_parquet(path, folder):
    files = sorted(Path(path).glob("*.parquet"))[ddp.rank() :: ddp.world_size()]
    note(folder, total=sum(float(pd.read_parquet(each).to_numpy().sum()) for each in files))


def see_arrays(arrays, folder):
    mine = arrays[ddp.rank() :: ddp.world_size()]
    note(folder, total=sum(float(each.sum()) for each in mine))


def first_step(table, folder):
    data = table.tensors(NAMES[1:], NAMES[0])
    sampler = ddp.ElasticSampler(data, 1024)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(WIDTH - 1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in DataLoader(data, batch_sampler=sampler):
        loss = ((model(x)[:, 0] - y) ** 2).mean() * sampler.weight
        loss.backward()
        optimizer.step()
        break
    note(folder)


def load(table, folder):
    """Rows per second of the three ways, in turns."""
    torch.set_num_threads(1)
    data = table.tensors(NAMES[1:], NAMES[0])
    features, target = data.tensors
    frame = pd.concat(table.parts)

    def ours():
        sampler = ddp.ElasticSampler(data, LOADER_BATCH)
        return sum(len(y) for _, y in DataLoader(data, batch_sampler=sampler))

    def plain():
        """A loader over plain tensors, which also takes a batch at once."""
        loader = DataLoader(
            Batches(features, target), LOADER_BATCH, shuffle=True, collate_fn=lambda batch: batch
        )
        return sum(len(y) for _, y in loader)

    def bare():
        """No loader: the order of an epoch, cut into batches, taken from tensors."""
        seen = 0
        for rows in torch.randperm(len(target)).split(LOADER_BATCH):
            x, y = features[rows], target[rows]
            seen += len(y) * (len(x) == len(y))
        return seen

    few = len(frame) // 20  # a twentieth is slow enough

    def by_row():
        return sum(len(y) for _, y in DataLoader(Items(frame[:few]), LOADER_BATCH, shuffle=True))

    def rate(way):
        began = time.perf_counter()
        return way() / (time.perf_counter() - began)

    ways = (ours, plain, bare, by_row)
    rates = {way.__name__: [] for way in ways}
    for turn in range(TURNS + 1):
        for way in ways:
            if turn:  # the first one warms up
                rates[way.__name__].append(rate(way))
            else:
                way()
    note(folder, rates=rates)


class Items(Dataset):
    """What a data set over a DataFrame usually is."""

    def __init__(self, frame):
        self.frame = frame

    def __len__(self):
        return len(self.frame)

    def __getitem__(self, index):
        row = self.frame.iloc[index]
        return torch.tensor(row[1:].to_numpy(dtype=np.float32)), torch.tensor(row.iloc[0])


class Batches(Dataset):
    """What a data set over tensors can be, if it is written with care."""

    def __init__(self, *tensors):
        self.tensors = tensors

    def __len__(self):
        return len(self.tensors[0])

    def __getitems__(self, rows):
        return tuple(tensor[rows] for tensor in self.tensors)


def memory_of(pid):
    """Bytes of a process, those that it shares with others divided among them (PSS)."""
    return psutil.Process(pid).memory_full_info().pss


# Measured


def launched(client, function, workers=2, **arguments):
    """Run a function on ranks; returns when it began, and what each rank has noted."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.time()
        ddp.launch(
            client,
            function,
            workers=workers,
            directory=f"{folder}/run",
            folder=folder,
            **arguments,
        )
        return began, [
            json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(workers)
        ]


def seconds(client, function, began=None, **arguments):
    launch_began, ranks = launched(client, function, **arguments)
    return max(rank["finished"] for rank in ranks) - (began or launch_began)


def measure_handover():
    rows = int(GIGABYTES * 1e9 / 8 / WIDTH) // PARTITIONS * PARTITIONS
    with ddp.connect("local", workers=2) as client:
        futures = table_of(client, rows)
        frame = dd.from_delayed(futures)

        def ours():
            return seconds(client, see, table=futures)

        def parquet():
            folder = tempfile.mkdtemp()
            try:
                began = time.time()
                frame.to_parquet(folder)
                return seconds(client, see_parquet, began, path=folder)
            finally:
                shutil.rmtree(folder)

        def gathered():
            began = time.time()
            arrays = [each.to_numpy() for each in client.gather(futures)]
            return seconds(client, see_arrays, began, arrays=arrays)

        for way in (ours, parquet, gathered):
            way()
        before = sent_by(client)
        _, ranks = launched(client, see, table=futures)
        moved = sent_by(client) - before
        size = rows * WIDTH * 8
        share = [size / 2] * 2
        what = f"{size / 1e9:.2g} GB into two ranks, s"
        return [
            compared(
                "handover",
                what,
                *take_turns(ours, parquet, TURNS),
                alternative="Parquet, read in the ranks",
                at_least=5,
                is_speed_up=True,
            ),
            compared(
                "handover",
                what,
                *take_turns(ours, gathered, TURNS),
                alternative="gather and arguments",
                at_least=3,
                is_speed_up=True,
            ),
            single("moved", "between workers, bytes", moved, at_most=0),
            *[
                compared(
                    "memory",
                    f"of a {whose}, bytes",
                    [rank[key] for rank in ranks],
                    share,
                    alternative="its share of the table",
                )
                for whose, key in (("rank", "memory"), ("worker", "worker"))
            ],
        ]


def sent_by(client):
    return sum(client.run(lambda dask_worker: dask_worker.transfer_outgoing_bytes_total).values())


def measure_first():
    with ddp.connect("local", workers=2) as client:
        futures = table_of(client, FIRST_ROWS)
        taken = [seconds(client, first_step, table=futures) for _ in range(TURNS + 2)][2:]
    what = f"{FIRST_ROWS:,} rows x {WIDTH}, launch to first step, s"
    return [single("first", what, statistics.median(taken), at_most=1.0)]


def measure_loader():
    with ddp.connect("local", workers=2) as client:
        _, (rank,) = launched(client, load, workers=1, table=table_of(client, LOADER_ROWS))
    per_row = {way: [1e6 / rate for rate in rates] for way, rates in rank["rates"].items()}
    what = "of the loader, us a row"
    ours = per_row["ours"]
    return [
        compared(
            "loader",
            what,
            ours,
            per_row["by_row"],
            alternative="row by row",
            at_least=20,
            is_speed_up=True,
        ),
        compared(
            "loader", what, ours, per_row["plain"], alternative="plain tensors", at_most=1.25
        ),
        compared("loader", what, ours, per_row["bare"], alternative="no loader"),
    ]


MEASURES = {"handover": measure_handover, "first": measure_first, "loader": measure_loader}

if __name__ == "__main__":
    measuring.main(__doc__, MEASURES, "tables")
