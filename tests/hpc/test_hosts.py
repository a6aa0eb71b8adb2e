"""Training over several hosts, and cables that are pulled in the middle of it.

Dask's scheduler and the client are on one host, a worker on each of two others. All were started
with the shortest time that Dask takes for a silent connection; who notices a silence, notices it
by that alone, because nothing on the way says that a host is out of reach.
"""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from fault_lab import members
from hosts_here import running_hosts, why_not

from ddp_common.ranks.checkpoint_files import checkpoints, newest, step_of

ROOT = Path(__file__).parents[2]
# seconds: Dask's `comm.timeouts.tcp`, which it hands to the kernel as TCP_USER_TIMEOUT
SILENCE = 11
MARGIN = 15  # seconds more, for a busy machine; both are less than Dask's own 30
PATIENCE = 120  # seconds for a program to start or end on a busy machine
PYTHON, DASK = sys.executable, [sys.executable, "-m", "dask"]
ENVIRONMENT = {
    "DASK_DISTRIBUTED__COMM__TIMEOUTS__TCP": f"{SILENCE}s",
    "OMP_NUM_THREADS": "1",
    "DDP_PROGRESS": "lines",
}
RUN = [PYTHON, "-m", "ddp_common", "run", "in_no_hurry"]

pytestmark = pytest.mark.skipif(why_not() is not None, reason=f"no hosts here: {why_not()}")


class Cluster:
    """A scheduler on the first of `hosts`, a worker on each other one, as a person starts them."""

    def __init__(self, hosts, folder, repository):
        self.hosts, self.folder, self.repository = hosts, folder, repository
        self.workers = {}
        self.address = f"tcp://{hosts[0].address}:8786"
        options = f"--host {hosts[0].address} --port 8786 --no-dashboard"
        self._start(hosts[0], *DASK, "scheduler", *options.split())
        self.make_whole()

    def make_whole(self):
        """Start a worker wherever there is none: that of a host which was cut off has ended."""
        for host in self.hosts[1:]:
            if host.name not in self.workers or self.workers[host.name].poll() is not None:
                options = f"--interface {host.interface} --nthreads 1 --no-dashboard".split()
                options += ["--local-directory", self.folder]
                worker = self._start(host, *DASK, "worker", self.address, *options)
                self.workers[host.name] = worker

    def _start(self, host, *command):
        with open(self.folder / f"{host.name}.log", "a") as log:
            return host.start(
                *command, cwd=ROOT, env={**os.environ, **ENVIRONMENT}, stdout=log, stderr=log
            )

    def train(self, run, **variables):
        """`make run TUTORIAL=in_no_hurry` on the first host; returns the process.

        Training takes 200 s, unless the file `run`.until is there or it is resumed: then it
        hurries.
        """
        return self.hosts[0].start(
            *RUN,
            cwd=self.repository,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                **ENVIRONMENT,
                "CLUSTER": self.address,
                "WORKERS": "2",
                "CHECKPOINT": str(run),
                "SET": f"pause=1 until={until(run)}",
                **variables,
            },
        )

    def train_until_saved(self, run, **variables):
        """The same in the middle of training.

        Returns the process and the ranks, number -> (process number, host).
        """
        process = self.train(run, **variables)
        wait_until(lambda: checkpoints(run / "checkpoints") or process.poll() is not None)
        if process.poll() is not None:
            pytest.fail(f"it ended too early: {process.communicate()[1]}")
        named = {host.name: host for host in self.hosts}
        started = re.findall(
            r"rank (\d+) started: process (\d+) on (\S+)", (run / "log.txt").read_text()
        )
        return process, {int(rank): (int(pid), named[host]) for rank, pid, host in started}

    def mend(self, host):
        """The link is up again, and a worker that had to end has ended and been replaced."""
        host.mend()
        if host.name in self.workers:
            self.workers[host.name].wait(PATIENCE)
            self.make_whole()


def until(run):
    """The file that has the run in this directory hurry from now on."""
    return run.with_suffix(".until")


@pytest.fixture(scope="module")
def cluster(repository, tmp_path_factory):
    with running_hosts(3) as hosts:
        yield Cluster(hosts, tmp_path_factory.mktemp("cluster"), repository)


@pytest.fixture(scope="module")
def undisturbed(repository, tmp_path_factory):
    """The weights of a run with two workers on one host, which nothing happened to."""
    folder = tmp_path_factory.mktemp("one-host")
    done = subprocess.run(
        [*RUN, "--cluster", "local", "--workers", "2"],
        cwd=repository,
        capture_output=True,
        text=True,
        env={
            **os.environ,
            **ENVIRONMENT,
            "CHECKPOINT": str(folder / "run"),
            "RUNS": str(folder),
            "OPTIONS": "threads_per_worker=1",
        },
    )
    assert done.returncode == 0, done.stderr
    return weights(folder / "run")


def weights(directory):
    return torch.load(newest(directory / "checkpoints"))["model"]


def equal(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


def wait_until(condition, within=PATIENCE):
    deadline = time.monotonic() + within
    while not (value := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return value


def finish(process):
    out, error = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, out + error
    return out


def peers_of(pid, host):
    """The addresses at both ends of a process's connections."""
    lines = [
        line.split()
        for line in host.run("ss", "-Htnp").stdout.splitlines()
        if f"pid={pid}," in line
    ]
    return {
        end.rpartition(":")[0].strip("[]").removeprefix("::ffff:")
        for line in lines
        for end in line[3:5]
    }


def seconds_until_gone(pids, since, within):
    """When each of the processes was gone, counted from `since` (of time.monotonic)."""
    gone = {}
    while len(gone) < len(pids):
        in_time = time.monotonic() - since < within
        assert in_time, f"of {pids}, {list(gone)} are gone after {within} s"
        for pid in pids:
            if pid not in gone and not members([pid]):
                gone[pid] = time.monotonic() - since
        time.sleep(0.02)
    return [round(gone[pid], 2) for pid in pids]


def records(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_table_is_trained_where_it_lies_on_two_hosts(cluster, tmp_path):
    script = str(Path(__file__).with_name("train_on_table.py"))
    environment = {**os.environ, **ENVIRONMENT, "RUNS": str(tmp_path), "WORKERS": "2"}
    local = {**environment, "CLUSTER": "local"}
    here = subprocess.run([PYTHON, script], env=local, capture_output=True, text=True)
    assert here.returncode == 0, here.stderr
    process = cluster.hosts[0].start(
        PYTHON,
        script,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**environment, "CLUSTER": cluster.address},
    )
    said, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    one_host, two_hosts = (json.loads(each.splitlines()[-1]) for each in (here.stdout, said))
    assert two_hosts["moved"] == 0
    assert sorted(two_hosts["hosts"]) == sorted(host.name for host in cluster.hosts[1:])
    for losses in two_hosts["losses"]:
        assert losses == pytest.approx(one_host["losses"][0], rel=1e-6)


def test_two_hosts_end_with_the_weights_of_one_and_ranks_talk_by_the_hosts_addresses(
    cluster, undisturbed, tmp_path
):
    process, ranks = cluster.train_until_saved(tmp_path / "run")
    hosts = [host for _, host in ranks.values()]
    assert {host.name for host in hosts} == {"host-2", "host-3"}
    for pid, host in ranks.values():
        assert peers_of(pid, host) == {host.address for host in hosts}
    until(tmp_path / "run").touch()
    finish(process)
    assert equal(weights(tmp_path / "run"), undisturbed)


def test_a_link_that_is_down_for_three_seconds_is_waited_for(cluster, undisturbed, tmp_path):
    process, ranks = cluster.train_until_saved(tmp_path / "run")
    ranks[1][1].cut()
    time.sleep(3)
    assert process.poll() is None
    ranks[1][1].mend()
    until(tmp_path / "run").touch()
    finish(process)
    assert equal(weights(tmp_path / "run"), undisturbed)


@pytest.mark.parametrize(
    ("rank", "silently"), [(0, True), (1, False)], ids=["rank_0_silently", "rank_1_by_its_cable"]
)
def test_a_host_that_is_cut_off_is_named_and_the_run_goes_on_without_it(
    cluster, tmp_path, rank, silently
):
    """Rank 0's host holds the store.

    The rank that is cut off ends without being told, since nobody can reach it; a new worker there
    trains again.
    """
    run = tmp_path / "run"
    process, ranks = cluster.train_until_saved(run, RESTARTS="1")
    ranks[rank][1].cut(silently)
    cut, cut_time = time.monotonic(), time.time()
    gone = seconds_until_gone(
        [ranks[number][0] for number in (rank, 1 - rank)], since=cut, within=PATIENCE
    )
    finish(process)
    (event,) = [record for record in records(run) if record.get("event") == "restart"]
    steps = [record["time"] for record in records(run) if "loss" in record]
    first = min(step for step in steps if step > event["time"])
    print(
        f"told {event['time'] - cut_time:.2f} s after the cut; gone: its rank {gone[0]} s, "
        f"the other {gone[1]} s; first step after the restart {first - event['time']:.2f} s later"
    )
    assert event["time"] - cut_time < SILENCE + MARGIN
    assert event["ranks"] == 1 and event["step"] > 0
    assert (
        f"Rank {rank} of 2 on {ranks[rank][1].name} failed: its worker died or cannot be reached"
        in event["reason"]
    )
    assert step_of(checkpoints(run / "checkpoints")[-1]) == 200
    cluster.mend(ranks[rank][1])


def test_ranks_end_when_scheduler_and_client_are_cut_off_and_the_caller_gets_one_message(
    cluster, tmp_path
):
    # they reach each other, and train on
    process, ranks = cluster.train_until_saved(tmp_path / "run")
    cluster.hosts[0].cut(silently=True)
    cut = time.monotonic()
    gone = seconds_until_gone([pid for pid, _ in ranks.values()], since=cut, within=PATIENCE)
    _, error = process.communicate(timeout=PATIENCE)
    ended = time.monotonic() - cut
    print(f"ranks gone {gone} s after the cut; the program ended after {ended:.2f} s")
    assert re.search(
        r"Error: Rank [01] of 2 on host-[23] failed: its worker died or cannot be reached", error
    )
    assert "make run TUTORIAL=in_no_hurry RESUME=" in error and "Traceback" not in error
    assert "finished" not in (tmp_path / "run" / "log.txt").read_text()


def test_torchrun_on_two_hosts_ends_with_the_same_weights(repository, undisturbed, tmp_path):
    """README's line. The first host goes by the name that it has for itself.

    torchrun takes no address for its own if that name leads to 127.0.1.1.
    """
    with running_hosts(2) as hosts:
        torchrun = "-m torch.distributed.run --nnodes 2 --nproc-per-node 1".split()
        meeting = f"--rdzv-backend c10d --rdzv-endpoint {hosts[0].name}:29400".split()
        program = RUN[1:]
        processes = [
            host.start(
                PYTHON,
                *torchrun,
                *meeting,
                *program,
                cwd=repository,
                env={**os.environ, **ENVIRONMENT, "CHECKPOINT": str(tmp_path / "run")},
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            for host in hosts
        ]
        said = "".join(finish(process) for process in processes)
    assert said.count("Trained in no hurry.") == 1
    assert equal(weights(tmp_path / "run"), undisturbed)
