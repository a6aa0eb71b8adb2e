"""The process group that ranks form, started by the agent or by torchrun."""

import json
import os
import subprocess
import sys

import psutil
import pytest
import torch
import torch.distributed as dist

import ddp_common as ddp

ONE_GPU_PER_RANK = torch.cuda.device_count() >= 2


def test_ranks_know_their_place_and_reach_each_other(client):
    def train():
        place = torch.tensor([[ddp.rank(), ddp.world_size()]], device=ddp.device())
        places = [torch.zeros_like(place) for _ in range(ddp.world_size())]
        dist.all_gather(places, place)
        return torch.cat(places).cpu()

    assert ddp.launch(client, train, workers=3).result.tolist() == [[0, 3], [1, 3], [2, 3]]


@pytest.mark.skipif(ONE_GPU_PER_RANK, reason="each rank may have a GPU here")
def test_without_a_gpu_for_each_rank_the_backend_is_gloo(client):
    assert ddp.launch(client, lambda: (dist.get_backend(), str(ddp.device())), workers=2).result == ("gloo", "cpu")


def test_everything_listens_only_on_the_address_of_the_worker(client):
    def train():
        dist.barrier()
        listening = [entry.laddr for entry in psutil.Process().net_connections() if entry.status == psutil.CONN_LISTEN]
        return [(address.ip, address.port) for address in listening], int(os.environ["MASTER_PORT"])

    listening, store_port = ddp.launch(client, train, workers=2).result
    assert ("127.0.0.1", store_port) in listening
    assert {ip for ip, _ in listening} == {"127.0.0.1"}


def test_each_launch_has_a_port_of_its_own(client):
    ports = [ddp.launch(client, lambda: os.environ["MASTER_PORT"], workers=1).result for _ in range(3)]
    assert len(set(ports)) == 3


SCRIPT = """
import json
import torch
import torch.distributed as dist
import ddp_common as ddp

with ddp.process_group() as device:
    total = torch.tensor([ddp.rank() + 1.0], device=device)
    dist.all_reduce(total)
    sampler = ddp.ElasticSampler(11, 4)
    share = [index for _ in sampler.epochs(1) for batch in sampler for index in batch]
    ddp.report(loss=1.0)  # nobody listens
    said = {"rank": ddp.rank(), "size": ddp.world_size(), "total": total.item(), "share": share}
    print(json.dumps(said) + "\\n", end="", flush=True)
"""


def test_torchrun_starts_the_same_process_group(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d",
                           "--rdzv-endpoint=localhost:0", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = sorted(map(json.loads, done.stdout.splitlines()), key=lambda line: line["rank"])
    assert [(line["rank"], line["size"], line["total"]) for line in said] == [(0, 2, 3.0), (1, 2, 3.0)]
    assert sorted(index for line in said for index in line["share"]) == list(range(11))
