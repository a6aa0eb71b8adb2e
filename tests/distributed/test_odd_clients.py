"""Clients and clusters that are not what `launch` expects, or change under it: one message."""

import asyncio
import sys

import cloudpickle
import faults_on_purpose as faults
import pytest
from distributed import Client, LocalCluster

import ddp_common as ddp

cloudpickle.register_pickle_by_value(sys.modules[__name__])
SMALL = {"dashboard_address": ":0", "threads_per_worker": 1, "memory_limit": 0}


def test_an_asynchronous_client_is_refused_and_works_in_a_thread(client, tmp_path):
    async def use(address, security):
        async with Client(address, security=security, asynchronous=True) as client:
            with pytest.raises(
                ddp.Error, match="This client is asynchronous(?s:.*)asyncio.to_thread"
            ):
                ddp.launch(client, faults.train)
            return await asyncio.to_thread(
                ddp.launch, client, ddp.world_size, directory=tmp_path / "run"
            )

    assert asyncio.run(use(client.scheduler.address, client.security)).result == 4


def test_a_cluster_in_place_of_a_client_no_workers_and_a_closed_client(tmp_path):
    with LocalCluster(n_workers=0, **SMALL) as cluster:
        with pytest.raises(ddp.Error, match=r"not LocalCluster.\nMake one .* Client\(cluster\)"):
            ddp.launch(cluster, faults.train)
        with Client(cluster) as client:
            with pytest.raises(
                ddp.Error, match=r"the cluster has no workers.\nStart more .*cluster.scale"
            ):
                ddp.launch(client, faults.train, timeout=0.2)
        with pytest.raises(ddp.Error, match="this client is closed"):
            ddp.launch(client, faults.train)
