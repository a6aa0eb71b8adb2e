"""Training over several hosts, which fall silent or lose a rank in the middle of it.

Dask's scheduler and the client are on one host, a worker on each of two others. All are started
with the shortest time that Dask takes for a silent connection: nothing on the way says that a
host is out of reach.
"""

import json
import os
import re
import signal
import subprocess
import sys

import psutil
import pytest
from hosts_here import running_hosts, why_not
from runs_here import (
    A_RUN,
    LAST_STEP,
    ROOT,
    RUN,
    finish,
    last_step,
    same_weights,
    started_ranks,
    train,
    wait_until_saved,
)

DASK = [sys.executable, "-m", "dask"]
ENVIRONMENT = {
    **os.environ,
    "DASK_DISTRIBUTED__COMM__TIMEOUTS__TCP": "11s",  # the kernel's TCP_USER_TIMEOUT
    "OMP_NUM_THREADS": "1",
    "DDP_PROGRESS": "lines",
}

pytestmark = pytest.mark.skipif(why_not() is not None, reason=f"no hosts here: {why_not()}")


@pytest.fixture
def cluster(tmp_path):
    """Three hosts with a scheduler and two workers on them, as a person starts them."""
    with running_hosts("host-1", "host-2", "host-3") as hosts:
        scheduler = f"--host {hosts[0].address} --port 8786 --no-dashboard"
        start_dask(hosts[0], tmp_path, "scheduler", *scheduler.split())
        for host in hosts[1:]:
            options = f"--interface {host.interface} --nthreads 1 --no-dashboard"
            options += f" --local-directory {tmp_path}"
            start_dask(host, tmp_path, "worker", address_of(hosts), *options.split())
        yield hosts


def start_dask(host, folder, *command):
    with open(folder / f"{host.name}.log", "w") as log:
        host.start([*DASK, *command], cwd=ROOT, env=ENVIRONMENT, stdout=log, stderr=log)


def address_of(hosts):
    return f"tcp://{hosts[0].address}:8786"


@pytest.fixture
def train_until_saved(cluster, repository, tmp_path):
    """Start a training on the two workers that takes its time.

    Returns its process, and the ranks: number -> (process, host).
    """

    def start(**variables):
        variables |= {"CLUSTER": address_of(cluster), "OPTIONS": "", "SET": "pause=1"}
        here = (ENVIRONMENT, tmp_path, "in_no_hurry", repository, cluster[0].start)
        process = train(*here, **variables)
        wait_until_saved(tmp_path)
        named = {host.name: host for host in cluster}
        ranks = started_ranks(tmp_path).items()
        return process, {rank: (psutil.Process(pid), named[host]) for rank, (pid, host) in ranks}

    return start


@pytest.fixture(scope="module")
def undisturbed(repository, tmp_path_factory):
    """The folder of a run on one host to which nothing happened."""
    folder = tmp_path_factory.mktemp("one-host")
    options = "threads_per_worker=1"
    finish(train(ENVIRONMENT, folder, "in_no_hurry", repository, OPTIONS=options), folder)
    return folder


def test_two_hosts_train_by_their_own_addresses_and_a_rank_that_dies_is_named_with_its_host(
    train_until_saved, undisturbed, tmp_path
):
    process, ranks = train_until_saved(RESTARTS="1")
    hosts = [host for _, host in ranks.values()]
    assert {host.name for host in hosts} == {"host-2", "host-3"}
    for rank, host in ranks.values():
        assert host.peers_of(rank.pid) == {host.address for host in hosts}
    ranks[1][0].send_signal(signal.SIGKILL)
    said = finish(process, tmp_path)
    why = rf"Why: Rank 1 of 2 on {ranks[1][1].name} failed: .*SIGKILL"
    assert re.search(rf"Restart 1 on 2 rank\(s\) from step [1-9]\d*\. {why}", said), said
    assert same_weights(tmp_path, undisturbed)


def test_a_host_that_is_cut_off_is_named_and_the_run_goes_on_without_it(
    train_until_saved, tmp_path
):
    """Rank 0's host holds the store. Its rank ends without a word, since nobody can reach it."""
    process, ranks = train_until_saved(RESTARTS="1")
    rank, host = ranks[0]
    host.cut()
    finish(process, tmp_path)
    rank.wait(A_RUN)
    records = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    (event,) = [record for record in map(json.loads, records) if record.get("event") == "restart"]
    assert event["ranks"] == 1 and event["step"] > 0
    why = f"Rank 0 of 2 on {host.name} failed: its worker died or cannot be reached"
    assert why in event["reason"]
    assert last_step(tmp_path) == LAST_STEP


def test_ranks_end_when_scheduler_and_client_are_cut_off_and_the_caller_gets_one_message(
    cluster, train_until_saved, tmp_path
):
    """The ranks reach each other, and could train on."""
    process, ranks = train_until_saved()
    cluster[0].cut()
    for rank, _ in ranks.values():
        rank.wait(A_RUN)
    said = finish(process, tmp_path, code=1)
    why = r"Error: Rank [01] of 2 on host-[23] failed: its worker died or cannot be reached"
    assert re.search(why, said) and "make run TUTORIAL=in_no_hurry RESUME=" in said, said
    assert "finished" not in (tmp_path / "run" / "log.txt").read_text()


def test_torchrun_on_two_hosts_ends_with_the_same_weights(repository, undisturbed, tmp_path):
    """The line of clusters/README.md. The first host goes by the name that it has for itself.

    torchrun takes no address for its own if that name leads to 127.0.1.1.
    """
    with running_hosts("host-1", "host-2") as hosts:
        torchrun = "-m torch.distributed.run --nnodes 2 --nproc-per-node 1".split()
        meeting = f"--rdzv-backend c10d --rdzv-endpoint {hosts[0].name}:29400".split()
        environment = {**ENVIRONMENT, "CHECKPOINT": str(tmp_path / "run")}
        processes = [
            host.start(
                [sys.executable, *torchrun, *meeting, *RUN, "in_no_hurry"],
                cwd=repository,
                env=environment,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            for host in hosts
        ]
        said = [process.communicate(timeout=A_RUN)[0] for process in processes]
        assert [process.returncode for process in processes] == [0, 0], said
    assert "".join(said).count("Trained in no hurry.") == 1
    assert same_weights(tmp_path, undisturbed)
