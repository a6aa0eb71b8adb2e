"""The process group that ranks form, started by the agent, by torchrun or by srun."""

import os
import re
import shutil
import socket
import subprocess
import sys
import time

import psutil
import pytest
import torch
import torch.distributed as dist
from ports import free_port
from processes import wait_until
from ranks_here import Rank, slurm_variables, torchrun_variables

import ddp_common as ddp
from dask_ranks.without_dask import launchers

ONE_GPU_PER_RANK = torch.cuda.device_count() >= 2
JOIN = """
from ddp_common.rendezvous import process_group
with process_group():
    print('in', ddp.rank())
"""


@pytest.mark.skipif(ONE_GPU_PER_RANK, reason="each rank may have a GPU here")
def test_without_a_gpu_for_each_rank_the_backend_is_gloo(client):
    def train():
        return dist.get_backend(), str(ddp.device())

    assert ddp.launch(client, train, workers=2).result == ("gloo", "cpu")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_rank_with_a_gpu_of_its_own_has_nccl_bound_to_it(tmp_path):
    code = """
import torch
import torch.distributed as dist
from ddp_common.rendezvous import process_group
with process_group() as device:
    dist.all_reduce(torch.ones(1, device=device))
    print(dist.get_backend(), dist.group.WORLD.bound_device_id == device, device)
"""
    rank = Rank(code, tmp_path, torchrun_variables(0, 1, free_port()))
    assert "nccl True cuda:0" in rank.said()


def test_store_and_gloo_listen_only_on_the_address_of_the_worker(client):
    def train():
        dist.barrier()
        listening = [
            entry.laddr
            for entry in psutil.Process().net_connections()
            if entry.status == psutil.CONN_LISTEN
        ]
        places = [(address.ip, address.port) for address in listening]
        interface = os.environ["GLOO_SOCKET_IFNAME"]
        return places, int(os.environ["MASTER_PORT"]), interface

    listening, store_port, interface = ddp.launch(client, train, workers=2).result
    assert ("127.0.0.1", store_port) in listening
    assert {ip for ip, _ in listening} == {"127.0.0.1"}
    assert "127.0.0.1" in [each.address for each in psutil.net_if_addrs()[interface]]


# torchrun


def torchrun(script, tmp_path, *options, before=()):
    (tmp_path / "script.py").write_text(script)
    return subprocess.run(
        [*before, sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", *options]
        + [tmp_path / "script.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=250,
    )


RETURNS = """
import sys
import torch
import torch.distributed as dist
import ddp_common as ddp

class Answer:
    def __init__(self, total):
        self.weights = torch.full([6_000_000], total.item())

def train():
    dist.all_reduce(total := torch.ones(1))
    ddp.report(loss=0.5)
    return Answer(total)

for turn in ("one", "two"):
    with ddp.connect() as client:
        run = ddp.launch(client, train, directory=turn)
        # torchrun starts `python -u`: what print writes in pieces, two ranks write into each other
        sys.stderr.write(f"{turn} {run.result.weights.sum().item()} {len(run.metrics)}\\n")
"""


def test_torchrun_starts_the_same_ranks_and_a_result_of_any_class_and_size_is_on_each(tmp_path):
    """24 MB are more than torch's store takes. A program may connect again."""
    done = torchrun(RETURNS, tmp_path, "--standalone")
    for turn in ("one", "two"):
        assert done.stderr.count(f"{turn} 12000000.0 2") == 2, done.stderr
        names = {path.name for path in (tmp_path / turn).iterdir()}
        assert names == {".lock", "config.json", "metrics.jsonl", "log.txt", "checkpoints"}


HANGS = """
import time
import torch.distributed as dist
import ddp_common as ddp

def train():
    if ddp.rank() == 0:
        dist.barrier()
    else:
        time.sleep(1000)

with ddp.connect() as client:
    ddp.launch(client, train, directory="run", stall_timeout=2)
"""


def test_a_stall_ends_by_the_time_out_of_the_process_group(tmp_path):
    done = torchrun(HANGS, tmp_path, "--standalone")
    assert done.returncode == 1
    assert "Timed out waiting 2000ms" in done.stderr and "in train" in done.stderr


def test_run_script_needs_no_name_of_the_host(tmp_path):
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("only root may rename a host")
    code = (
        "import socket; socket.sethostname('no-such-name')\n"
        "from tutorials.checks.common import run_script\n"
        "done = run_script('import torch.distributed as dist\\n"
        'dist.init_process_group("gloo"); dist.barrier()\', timeout=100)\n'
        "print(done.ok, done.output)"
    )
    done = subprocess.run(
        ["unshare", "--uts", sys.executable, "-c", code], capture_output=True, text=True
    )
    assert done.stdout.startswith("True"), done.stdout + done.stderr


# What goes wrong before there is a process group.


def test_a_rank_that_nobody_starts_is_named_and_a_lost_store_said_in_words(tmp_path):
    port = free_port()
    first, other = (
        Rank(JOIN, tmp_path, torchrun_variables(rank, 4, port), join_timeout=timeout)
        for rank, timeout in [(0, 6), (2, 60)]
    )
    assert "waited 6 s for all 4 ranks; still missing: rank 1, 3" in first.complaint()
    assert "Rank 2 lost the store while it waited for other ranks" in other.complaint()


def test_a_rank_that_starts_late_is_awaited_as_long_as_the_launcher_says(tmp_path):
    port = free_port()
    variables = [torchrun_variables(rank, 2, port) for rank in (0, 1)]
    first = Rank(JOIN, tmp_path, {**variables[0], "DDP_JOIN_TIMEOUT": "100"}, join_timeout=0.1)
    time.sleep(1)
    Rank(JOIN, tmp_path, variables[1])
    assert "waited" not in first.said() and first.process.exitcode == 0


def test_a_store_that_nobody_opens_is_an_error_with_its_address(tmp_path):
    port = free_port()
    rank = Rank(JOIN, tmp_path, torchrun_variables(1, 2, port), join_timeout=1)
    where = f"could not reach the store of rank 0 at 127.0.0.1, port {port}, within 1 s"
    assert where in rank.complaint()


def test_a_second_process_that_claims_a_rank_is_told_who_has_it(tmp_path):
    port, gate = free_port(), tmp_path / "gate"
    waits = f"    import os, time\n    while not os.path.exists({str(gate)!r}): time.sleep(0.1)"
    code = f"{JOIN}\n{waits}"
    ranks = [Rank(code, tmp_path, torchrun_variables(rank, 2, port)) for rank in (0, 1, 1)]
    wait_until(lambda: any(rank.process.exitcode is not None for rank in ranks))
    gate.touch()
    (said,) = [said for said in (rank.said() for rank in ranks) if "is taken" in said]
    assert re.search(r"Rank 1 is taken: process \d+ on \S+ has it, and process \d+ on \S+ c", said)


# How it ends.

WORKS_ON_ALONE = """
import datetime
import time
from ddp_common.rendezvous import process_group

with process_group(timeout=datetime.timedelta(seconds=1)):
    time.sleep(4 * ddp.rank())
    if ddp.rank() == 1:
        print("done")
print("left")
"""
RAISES = """
from ddp_common.rendezvous import process_group
with process_group():
    if ddp.rank() == 1:
        raise ValueError("broken")
print("left")
"""


def test_rank_0_waits_for_a_rank_that_works_on_alone_longer_than_a_collective_may_take(tmp_path):
    port = free_port()
    ranks = [Rank(WORKS_ON_ALONE, tmp_path, torchrun_variables(rank, 2, port)) for rank in (0, 1)]
    wait_until(lambda: ranks[0].process.exitcode is not None)
    assert ranks[1].output.read_text().startswith("done\n")
    assert [rank.said() for rank in ranks] == ["left\n", "done\nleft\n"]


def test_rank_0_does_not_wait_for_a_rank_that_has_raised(tmp_path):
    port = free_port()
    ranks = [Rank(RAISES, tmp_path, torchrun_variables(rank, 2, port)) for rank in (0, 1)]
    assert ranks[0].said() == "left\n"
    assert ranks[1].complaint() == "ValueError: broken"


# Slurm

CONNECT = """
with ddp.connect():
    print('in', ddp.rank(), file=sys.stderr)
"""


def test_ranks_of_a_slurm_step_meet_at_a_port_that_they_derive(tmp_path):
    job = 1000 + os.getpid()
    ranks = [Rank(CONNECT, tmp_path, slurm_variables(rank, 2, job)) for rank in (1, 0)]
    assert [rank.said() for rank in ranks] == ["in 1\n", "in 0\n"]


def test_a_derived_port_that_is_taken_is_an_error_and_master_port_chooses_another(tmp_path):
    variables = slurm_variables(0, 1, 1_000_000 + os.getpid()) | {"DDP_LAUNCHER": "srun"}
    port = launchers.port(int(variables["SLURM_JOB_ID"]), 0)
    with socket.create_server(("", port)):
        error = Rank(CONNECT, tmp_path, variables).complaint()
        assert f"port {port}," in error and "choose another MASTER_PORT" in error
        elsewhere = {**variables, "MASTER_PORT": str(free_port())}
        assert Rank(CONNECT, tmp_path, elsewhere).said() == "in 0\n"


def test_half_the_variables_of_slurm_are_an_error_that_names_the_others(tmp_path):
    variables = slurm_variables(0, 2, job=1)
    del variables["SLURM_STEP_NODELIST"]
    error = Rank(CONNECT, tmp_path, variables).complaint()
    assert "srun has started this process, but SLURM_STEP_NODELIST is not set" in error


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n07", "n07"),
        ("n[07-09,12]", "n07"),
        ("gpu-a,gpu-b", "gpu-a"),
        ("r[1,2]n[3-5]s2,n1", "r1n3s2"),
    ],
)
def test_the_first_host_of_a_node_list(nodes, first):
    assert launchers.first_host(nodes) == first
