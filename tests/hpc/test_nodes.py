"""Training on four nodes of a real Slurm, and what becomes of it when one of them fails.

All runs have four ranks, on four nodes, and end with the weights of a run on one machine: bit for
bit, or up to rounding after a restart, for gloo's sum of four depends on their order, which is
another one in the first step of each start.
"""

import re
import signal
import sys
import time

import pytest
import torch
from hosts_here import SECOND
from runs_here import (
    finish,
    last_step,
    same_weights,
    started_ranks,
    wait_until,
    wait_until_saved,
    weights,
)
from slurm_here import JOB, jobs, partition_down, said_by, state, submit, train, why_not

WHERE = """
import os, torch.distributed as dist
names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
mine = [os.environ[name] for name in names] + [os.uname().nodename]
dist.init_process_group("gloo")
seen = [None] * dist.get_world_size()
dist.all_gather_object(seen, mine)
if dist.get_rank() == 0:
    print(*map(" ".join, seen), sep="\\n")
dist.destroy_process_group()
"""

pytestmark = pytest.mark.skipif(why_not() is not None, reason=f"no Slurm here: {why_not()}")


@pytest.fixture(scope="module")
def undisturbed(slurm, repository, tmp_path_factory):
    """The folder of a run on one machine to which nothing happened."""
    folder = tmp_path_factory.mktemp("undisturbed")
    options = {"WORKERS": "4", "OPTIONS": "threads_per_worker=1"}
    finish(train(slurm, folder, "in_no_hurry", repository, **options), folder)
    return folder


@pytest.fixture
def on_four_nodes(slurm, repository, tmp_path):
    """Start a training in four jobs, which takes its time until `tmp_path`/hurry is there.

    All nodes are idle before. Returns its process, and the node of rank 1.
    """

    def start(**variables):
        pause = f"pause=1 until={tmp_path / 'hurry'}"
        variables = {"CLUSTER": "slurm", "WORKERS": "4", "SET": pause, **variables}
        process = train(slurm, tmp_path, "in_no_hurry", repository, **variables)
        wait_until_saved(tmp_path)
        name = started_ranks(tmp_path)[1][1]
        return process, next(node for node in slurm.nodes if node.name == name)

    slurm.repair()
    return start


def job_on(slurm, node):
    on_it = ["--states=RUNNING", "--nodelist", node.name]
    return said_by(slurm, "squeue", "--noheader", "--format=%i", *on_it).strip()


def assert_close(folder, other):
    torch.testing.assert_close(weights(folder), weights(other), rtol=1e-5, atol=1e-5)


def nothing_is_left(slurm):
    """Whether no job is there, and no process on a node but Slurm's daemon."""
    daemons = {daemon.pid for daemon in slurm.daemons.values()}
    return not jobs(slurm) and all(set(node.pids()) <= daemons for node in slurm.nodes)


def test_ranks_on_four_nodes_train_as_on_one_machine_also_over_a_second_network(
    slurm, on_four_nodes, undisturbed, tmp_path
):
    process, _ = on_four_nodes(OPTIONS=JOB.replace("link0", SECOND))
    second = {node.second_address for node in slurm.nodes}
    named = {node.name: node for node in slurm.nodes}
    ranks = started_ranks(tmp_path).values()
    assert sorted(host for _, host in ranks) == sorted(named)
    peers = [named[host].peers_of(pid) for pid, host in ranks]
    (tmp_path / "hurry").touch()
    finish(process, tmp_path)
    assert same_weights(tmp_path, undisturbed)
    assert all(each and each <= second for each in peers)
    wait_until(lambda: nothing_is_left(slurm))


def test_sbatch_and_srun_train_on_four_nodes_without_dask(
    slurm, repository, undisturbed, tmp_path
):
    chosen = {"TUTORIAL": "in_no_hurry", "CHECKPOINT": str(tmp_path / "run")}
    script = tmp_path / "on_four.sbatch"
    lines = (repository / "clusters/batch/mnist.sbatch").read_text()
    script.write_text(lines.replace("--ntasks=2", "--ntasks=4 --nodes=4"))
    job = submit(slurm, tmp_path, script, repository, **chosen)
    wait_until(lambda: job not in jobs(slurm))
    log = (tmp_path / f"{job}.log").read_text()
    assert state(slurm, job) == "COMPLETED", log
    assert "NumNodes=4" in said_by(slurm, "scontrol", "show", "job", job)
    assert same_weights(tmp_path, undisturbed)


def test_a_script_of_torchrun_has_its_variables_for_two_ranks_on_each_of_two_nodes(
    slurm, tmp_path
):
    script = tmp_path / "where.py"
    script.write_text(WHERE)
    two = JOB.replace("cores=1", "cores=2 processes=2")
    variables = {"CLUSTER": "slurm", "WORKERS": "4", "OPTIONS": two, "RUNS": str(tmp_path)}
    with open(tmp_path / "output", "w") as output:
        process = slurm.login.start(
            [sys.executable, "-m", "dask_ranks", "run", script],
            cwd=tmp_path,
            env={**slurm.environment, **variables},
            stdout=output,
            stderr=output,
        )
    said = finish(process, tmp_path)
    ranks = [line.split() for line in said.splitlines() if re.match(r"\d \d \d 2 ", line)]
    assert [each[:3] for each in ranks] == [
        ["0", "0", "0"],
        ["1", "1", "0"],
        ["2", "0", "1"],
        ["3", "1", "1"],
    ]
    assert ranks[0][5] == ranks[1][5] != ranks[2][5] == ranks[3][5]
    (address,) = {each[4] for each in ranks}
    assert address in {node.address for node in slurm.nodes if node.name == ranks[0][5]}


# A node or a job that is lost: the run goes on in a new job


def preempt(slurm, node):
    alone = ["--partition=urgent", "--exclusive", f"--nodelist={node.name}"]
    said_by(slurm, "srun", *alone, "true")


FAULTS = {
    "dies": (lambda slurm, node: node.kill(), "NODE_FAIL"),
    "is_cut_off": (lambda slurm, node: node.cut(), "NODE_FAIL"),
    "has_its_job_preempted": (preempt, "PREEMPTED"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_node_that(slurm, on_four_nodes, undisturbed, tmp_path, fault):
    process, node = on_four_nodes(RESTARTS="2")
    job = job_on(slurm, node)
    break_it, word = FAULTS[fault]
    break_it(slurm, node)
    said = finish(process, tmp_path)
    why = rf"Why: Rank \d of 4 on {node.name} failed: its worker (died|was closed)"
    assert re.search(rf"Restart 1 on 4 rank\(s\) from step [1-9]\d*\. {why}", said), said
    assert state(slurm, job) == word
    assert_close(tmp_path, undisturbed)
    node.mend()
    wait_until(lambda: nothing_is_left(slurm))


def test_a_cable_that_is_out_for_ten_seconds_as_ranks_start_again_costs_a_restart_at_most(
    slurm, on_four_nodes, undisturbed, tmp_path
):
    process, node = on_four_nodes(RESTARTS="3")
    other = next(each for each in slurm.nodes if each is not node)
    said_by(slurm, "scancel", job_on(slurm, node))
    wait_until(lambda: "Restart 1" in (tmp_path / "output").read_text())
    other.cut()
    time.sleep(10)
    other.mend()
    finish(process, tmp_path)
    assert_close(tmp_path, undisturbed)


# What a run survives without a restart


def drain(slurm, node):
    update = ["scontrol", "update", f"NodeName={node.name}", "State=DRAIN", "Reason=disk"]
    said_by(slurm, *update)


def requeue(slurm, node):
    """Slurm refuses it: a job of ours has a replacement, not a second life."""
    again = ["scontrol", "requeue", job_on(slurm, node)]
    assert slurm.login.start(again, env=slurm.environment).wait() == 1


def let_controller_sleep(slurm, node):
    daemon = slurm.daemons["slurmctld login"]
    daemon.send_signal(signal.SIGSTOP)
    time.sleep(5)
    daemon.send_signal(signal.SIGCONT)


def cut_for_a_moment(slurm, node):
    node.cut()
    time.sleep(5)
    node.mend()


@pytest.mark.parametrize("event", [drain, requeue, let_controller_sleep, cut_for_a_moment])
def test_a_run_goes_on_undisturbed_when_somebody_does(
    slurm, on_four_nodes, undisturbed, tmp_path, event
):
    process, node = on_four_nodes()
    event(slurm, node)
    before = last_step(tmp_path)
    wait_until(lambda: last_step(tmp_path) > before)
    (tmp_path / "hurry").touch()
    assert "Restart" not in finish(process, tmp_path)
    assert same_weights(tmp_path, undisturbed)


def test_jobs_that_are_held_end_the_wait_with_slurms_own_word(slurm, repository, tmp_path):
    with partition_down(slurm):
        variables = {"OPTIONS": f"{JOB} timeout=12", "CLUSTER": "slurm", "WORKERS": "4"}
        process = train(slurm, tmp_path, "in_no_hurry", repository, **variables)
        # Not all that squeue lists: jobs of an earlier test may be about to end
        wait_until(lambda: len(jobs(slurm, "--states=PENDING")) == 4)
        said_by(slurm, "scontrol", "hold", ",".join(jobs(slurm, "--states=PENDING")))
        said = finish(process, tmp_path, code=1)
    assert "Slurm says of the jobs: 4 pending (JobHeldAdmin). They were cancelled." in said
    wait_until(lambda: nothing_is_left(slurm))
