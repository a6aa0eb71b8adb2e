"""The process group that ranks form, started by the agent or by torchrun."""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys

import psutil
import pytest
import torch
import torch.distributed as dist
from ports import free_port
from processes import wait_until

import ddp_common as ddp
from ddp_common.teaching.scripts import run_script

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
    def train():
        return dist.get_backend(), str(ddp.device())

    assert ddp.launch(client, train, workers=2).result == ("gloo", "cpu")


def test_everything_listens_only_on_the_address_of_the_worker(client):
    def train():
        dist.barrier()
        listening = [
            entry.laddr
            for entry in psutil.Process().net_connections()
            if entry.status == psutil.CONN_LISTEN
        ]
        places = [(address.ip, address.port) for address in listening]
        return places, int(os.environ["MASTER_PORT"])

    listening, store_port = ddp.launch(client, train, workers=2).result
    assert ("127.0.0.1", store_port) in listening
    assert {ip for ip, _ in listening} == {"127.0.0.1"}


def test_each_launch_has_a_port_of_its_own(client):
    ports = []
    with contextlib.ExitStack() as held:
        for _ in range(3):
            port = ddp.launch(client, lambda: os.environ["MASTER_PORT"], workers=1).result
            assert port not in ports
            ports.append(port)
            # Else the system may choose it again by chance
            held.enter_context(socket.create_server(("127.0.0.1", int(port))))


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
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node=2",
            "--rdzv-backend=c10d",
            "--rdzv-endpoint=localhost:0",
            script,
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    said = sorted(map(json.loads, done.stdout.splitlines()), key=lambda line: line["rank"])
    assert [(line["rank"], line["size"], line["total"]) for line in said] == [
        (0, 2, 3.0),
        (1, 2, 3.0),
    ]
    assert sorted(index for line in said for index in line["share"]) == list(range(11))


# What goes wrong before there is a process group. Every rank is a program of its own.

JOIN_TIMEOUT = 20  # seconds that ranks wait for each other, all of which have imported torch
JOIN = (
    "import ddp_common as ddp\nwith ddp.process_group():\n    print('in', ddp.rank(), flush=True)"
)
STAY = f"{JOIN}\n    sys.stdin.read()"
GATE = "import sys\nimport ddp_common as ddp\nddp.process_group\nprint(flush=True)\ninput()\n"


def start(code=JOIN, cwd=None, **variables):
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    return subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=cwd,
        env={**kept, "DDP_JOIN_TIMEOUT": str(JOIN_TIMEOUT), **variables},
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def start_together(*each_ones_variables, code=JOIN):
    """Processes that begin at once: when all of them have imported torch."""
    processes = [start(f"{GATE}{code}", **variables) for variables in each_ones_variables]
    try:
        for process in processes:
            assert process.stdout.readline() == "\n", process.communicate()
        for process in processes:
            process.stdin.write("\n")
            process.stdin.flush()
    except BaseException:
        for process in processes:
            process.kill()
        raise
    return processes


def errors(processes):
    """What each of the processes complains of last."""
    said = [process.communicate(timeout=200)[1] for process in processes]
    return [error.strip().splitlines()[-1] for error in said]


def torchrun_variables(rank, size, port):
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def slurm_variables(rank, size, job):
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_STEP_ID": "0",
        "SLURM_JOB_ID": str(job),
        "SLURM_STEP_NODELIST": "localhost",
    }


def test_ranks_that_nobody_starts_are_named_after_a_deadline():
    port = free_port()
    processes = start_together(*(torchrun_variables(rank, 4, port) for rank in (0, 2)))
    first, other = errors(processes)
    assert f"waited {JOIN_TIMEOUT}.0 s for all 4 ranks; still missing: rank 1, 3" in first
    assert "still missing: rank 1, 3" in other or "rank 0 has given up" in other


def test_a_store_that_nobody_opens_is_an_error_with_its_address():
    port = free_port()
    (error,) = errors([start(**torchrun_variables(1, 2, port))])
    where = f"the store of rank 0 at 127.0.0.1, port {port}"
    assert f"could not reach {where}, within {JOIN_TIMEOUT}.0 s: nothing answers" in error


def test_a_second_process_that_claims_a_rank_is_told_who_has_it():
    port = free_port()
    variables = (torchrun_variables(rank, 2, port) for rank in (0, 1, 1))
    processes = start_together(*variables, code=STAY)
    wait_until(lambda: any(process.poll() is not None for process in processes))
    for process in processes:  # the others may leave
        process.stdin.close()
        process.stdin = None
    said = [process.communicate(timeout=200)[1] for process in processes]
    taken = [error for error in said if "is taken" in error]
    assert len(taken) == 1
    assert re.search(
        r"Rank 1 is taken: process \d+ on \S+ has it, and process \d+ on \S+ claims it too",
        taken[0],
    )


WORKS_ON_ALONE = """
import datetime
import time

with ddp.process_group(timeout=datetime.timedelta(seconds=30)):
    time.sleep(40 * ddp.rank())
print("left", flush=True)
"""


def test_rank_0_waits_for_a_rank_that_works_on_alone_longer_than_a_collective_may_take():
    port = free_port()
    variables = (torchrun_variables(rank, 2, port) for rank in (0, 1))
    processes = start_together(*variables, code=WORKS_ON_ALONE)
    assert [process.communicate(timeout=200)[0] for process in processes] == ["left\n"] * 2


DIES = "import os\nwith ddp.process_group():\n    if ddp.rank() == 1: os._exit(3)\nprint('left')"


def test_rank_0_does_not_wait_for_a_rank_that_has_died():
    port = free_port()
    variables = (torchrun_variables(rank, 2, port) for rank in (0, 1))
    processes = start_together(*variables, code=DIES)
    assert [process.communicate(timeout=200)[0] for process in processes] == ["left\n", ""]


DIES_IN_A_LAUNCH = """
import os
import signal

def train():
    if ddp.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)

ddp.launch(ddp.connect(), train, directory=os.environ["RUN"])
"""


def test_a_launch_without_dask_names_a_rank_that_has_died_where_nobody_else_ends_it(tmp_path):
    """As with plain `srun`: it kills no other rank."""
    run = str(tmp_path / "run")
    job = os.getpid()
    variables = ({**slurm_variables(rank, 2, job), "RUN": run} for rank in (0, 1))
    first, _ = start_together(*variables, code=DIES_IN_A_LAUNCH)
    said = first.communicate(timeout=200)[1]
    assert first.returncode == 1
    assert "Rank 1 ended before it had told the other ranks what it has reported" in said


def test_a_port_that_another_program_holds_is_an_error_in_words():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        (error,) = errors([start(**torchrun_variables(0, 1, other.getsockname()[1]))])
    assert "could not open the store of rank 0" in error and "choose another MASTER_PORT" in error


TAKEN = """
import contextlib
import os
import socket
import ddp_common as ddp

with contextlib.suppress(OSError):  # somebody has it
    other = socket.create_server(("127.0.0.1", int(os.environ["MASTER_PORT"])))
with ddp.process_group():
    print(f"in {ddp.rank()}")
"""


def test_ranks_of_torchrun_need_no_port_that_was_chosen_before_they_started():
    """torchrun names a port that is free; once a rank has started, another program may have it."""
    done = run_script(TAKEN, timeout=200)
    assert done.ok, done.output
    assert sorted(re.findall("in [01]", done.output)) == ["in 0", "in 1"]


def test_ranks_that_rank_0_tells_no_port_say_where_they_look_for_it(tmp_path):
    (error,) = errors([start(**torchrun_variables(1, 2, 1), DDP_PORT_FOLDER=str(tmp_path))])
    where = f"at 127.0.0.1, at the port that {tmp_path}/port-0 says"
    assert f"could not reach the store of rank 0 {where}, within" in error


@pytest.mark.parametrize(
    "missing", ["SLURM_LOCALID", "SLURM_JOB_ID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST"]
)
def test_half_the_variables_of_slurm_are_an_error_that_names_the_others(missing):
    variables = slurm_variables(0, 2, job=1)
    del variables[missing]
    (error,) = errors([start(**variables)])
    assert f"srun has started this process, but {missing} is not set" in error


def test_ranks_of_a_slurm_step_pass_over_a_derived_port_that_somebody_else_holds(monkeypatch):
    """A stranger that says nothing holds the first, the store of another step the second."""
    from ddp_common.ranks import slurm

    job = 1000 + os.getpid()
    for name, value in slurm_variables(0, 2, job).items():
        monkeypatch.setenv(name, value)
    ports = slurm.candidates()
    with socket.socket() as stranger:
        stranger.bind(("0.0.0.0", ports[0]))
        stranger.listen()
        foreign = dist.TCPStore(
            "localhost", ports[1], None, is_master=True, wait_for_workers=False
        )
        assert foreign.port == ports[1]
        processes = [
            start(**slurm_variables(rank, 2, job), DDP_JOIN_TIMEOUT="150") for rank in (1, 0)
        ]
        said = [process.communicate(timeout=200) for process in processes]
    assert [out for out, _ in said] == ["in 1\n", "in 0\n"], said


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("n07", "n07"), ("n[07-09,12]", "n07"), ("gpu-a,gpu-b", "gpu-a"), ("r1n[3,5]s2", "r1n3s2")],
)
def test_the_first_host_of_a_node_list(nodes, first, monkeypatch):
    from ddp_common.ranks import slurm

    # as where scontrol is not installed
    monkeypatch.setattr(slurm.shutil, "which", lambda name: None)
    assert slurm.first_host(nodes) == first
