"""Train on a table that lies in Dask, on whatever cluster CLUSTER names, and say what came of it.

Prints a line of JSON: the loss of each step, the hosts of the ranks, and the bytes that workers
have fetched from each other meanwhile.
"""

import json
import socket

import dask.dataframe as dd
import distributed
import numpy as np
import pandas as pd
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

import ddp_common as ddp

ROWS = (400, 400, 400, 400)  # of each partition: two for each of two ranks


def partition(number):
    random = np.random.default_rng(number)
    features = random.normal(size=(ROWS[number], 4)).astype("float32")
    table = pd.DataFrame(features, columns=list("abcd"))
    table["y"] = table[list("abcd")].sum(axis=1) + number
    return table


def train(table):
    torch.manual_seed(0)
    model = DDP(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = table.tensors(list("abcd"), ["y"])
    sampler = ddp.ElasticSampler(data, 100, seed=1)
    loader = DataLoader(data, batch_sampler=sampler)
    for epoch in sampler.epochs(3):
        for x, y in loader:
            loss = torch.nn.functional.mse_loss(model(x), y) * sampler.weight
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ddp.report(loss=loss)
    hosts = [None] * ddp.world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    return hosts


def fetched(dask_worker):
    return sum(each["total"] for each in dask_worker.transfer_incoming_log)


def main():
    with ddp.connect() as client:
        client.wait_for_workers(2, timeout=200)
        addresses = sorted(client.workers())
        table = [
            client.submit(partition, number, workers=[addresses[number % 2]])
            for number in range(len(ROWS))
        ]
        distributed.wait(table)
        before = sum(client.run(fetched).values())
        run = ddp.launch(client, train, workers=2, table=table)
        moved = sum(client.run(fetched).values()) - before
        # the same rows as a DataFrame of Dask
        frame = dd.from_map(partition, range(len(ROWS)))
        again = ddp.launch(client, train, workers=2, table=frame)
    losses = [each.metrics.groupby("step")["loss"].mean().tolist() for each in (run, again)]
    print(json.dumps({"losses": losses, "hosts": run.result, "moved": moved}))


if __name__ == "__main__":
    main()
