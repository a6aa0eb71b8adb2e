"""A rank that fails ends the run: the caller learns which one and why, and no process stays."""

import contextlib
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import cloudpickle
import psutil
import pytest
import torch
import torch.distributed as dist
from distributed import Client, LocalCluster
from patience import PATIENCE
from processes import (
    Background,
    assert_gone,
    assert_nothing_left,
    environment_for,
    is_alive,
    log_of,
    members,
    rank_pids,
    wait_until,
    workers_of,
)
from torch.utils.data import DataLoader

import ddp_common as ddp
from dask_ranks.client import claims
from dask_ranks.client.rpc import known_workers

cloudpickle.register_pickle_by_value(sys.modules[__name__])


ENDINGS = {
    "exit": lambda: sys.exit(3),
    "leave with zero": lambda: os._exit(0),
    "be killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "crash": lambda: os.kill(os.getpid(), signal.SIGSEGV),
}


def fail(how, failing_rank, is_waited_for):
    dist.barrier()
    print(f"rank {ddp.rank()} is about to {how}", flush=True)
    if ddp.rank() == failing_rank:
        ENDINGS[how]()
    elif is_waited_for:
        dist.all_reduce(torch.ones(1))
    else:
        time.sleep(10 * PATIENCE)


def ranks_and_sizes():
    return ddp.rank(), ddp.world_size(), int(total(1))


def total(value):
    tensor = torch.tensor(float(value))
    dist.all_reduce(tensor)
    return tensor.item()


def assert_usable(client, workers=2):
    assert ddp.launch(client, ranks_and_sizes, workers=workers).result == (0, workers, workers)


def failure(client, function, workers=2, **arguments):
    with pytest.raises(ddp.RankFailed) as caught:
        ddp.launch(client, function, workers=workers, **arguments)
    return caught.value


@pytest.mark.parametrize(
    ("how", "rank", "is_waited_for", "exitcode", "signal_name", "words"),
    [
        ("exit", 1, True, 3, None, "left with exit code 3"),
        ("leave with zero", 0, False, 0, None, "left with exit code 0"),
        ("be killed", 0, True, -9, "SIGKILL", "killed by SIGKILL"),
        ("crash", 1, True, -11, "SIGSEGV", "Segmentation fault"),
    ],
)
def test_a_failed_rank_is_reported_at_once_with_its_cause_and_leaves_nothing(
    client, how, rank, is_waited_for, exitcode, signal_name, words
):
    failed = failure(client, fail, how=how, failing_rank=rank, is_waited_for=is_waited_for)
    assert (failed.rank, failed.exitcode, failed.signal) == (rank, exitcode, signal_name)
    assert f"Rank {rank} of 2 on {failed.host} failed" in str(failed)
    assert words in str(failed)
    assert f"[rank {rank}] rank {rank} is about to {how}" in str(failed)
    assert_nothing_left(failed.directory, ranks=2)


def lose_a_connection_of_its_own():
    """Rank 1, with that to its peer, which is heard of first."""
    dist.barrier()
    if ddp.rank() == 1:
        for each in psutil.Process().net_connections("tcp"):
            if each.status == psutil.CONN_ESTABLISHED:
                socket.socket(fileno=os.dup(each.fd)).shutdown(socket.SHUT_RDWR)
        time.sleep(1)
        raise ConnectionResetError(104, "Connection reset by peer")  # of a data set in S3
    total(1)


def test_a_rank_that_loses_a_connection_of_its_own_is_no_consequence_of_its_peer(client):
    failed = failure(client, lose_a_connection_of_its_own)
    assert failed.rank == 1 and "ConnectionResetError" in str(failed)
    assert "As a consequence, rank 0 lost the connection to it" in str(failed)


def test_a_worker_that_dies_ends_the_run(client, tmp_path):
    def train():
        next(iter(DataLoader(range(1000), num_workers=1)))
        dist.barrier()
        print("ready", flush=True)
        time.sleep(10 * PATIENCE)

    directory = tmp_path / "run"
    running = Background(ddp.launch, client, train, workers=2, directory=directory)
    wait_until(lambda: log_of(directory).count("ready") == 2)
    (victim,) = client.run(os.getpid, workers=[workers_of(directory)[1]]).values()
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(ddp.RankFailed, match="its worker died") as caught:
        running.outcome()
    assert (caught.value.rank, caught.value.exitcode, caught.value.signal) == (1, None, None)
    assert f"the worker at {workers_of(directory)[1]} was lost" in log_of(directory)
    # a DataLoader's worker looks for its parent every few seconds
    assert_nothing_left(directory, ranks=2)
    wait_until(lambda: len(known_workers(client)) == 4)
    assert_usable(client, workers=4)


def test_a_result_that_cannot_travel_is_reported_in_words_and_only_that_of_rank_0_must(client):
    failed = failure(client, threading.Lock)
    assert failed.rank == 0
    assert "cannot be pickled" in str(failed) and "Return tensors" in str(failed)
    of_rank_0 = ddp.launch(client, lambda: 5 if ddp.rank() == 0 else threading.Lock(), workers=2)
    assert of_rank_0.result == 5


def test_a_result_of_100_mib_arrives_whole(client):
    def large():
        return {"weights": torch.arange(25 * 2**20, dtype=torch.int32), "words": ["kept", None]}

    result = ddp.launch(client, large, workers=2).result
    assert torch.equal(result["weights"], large()["weights"])
    assert result["words"] == ["kept", None]


def test_a_function_that_cannot_travel_is_refused_before_anything_starts(client):
    lock = threading.Lock()
    with pytest.raises(ddp.Error, match="cannot be sent to the workers.*lock"):
        ddp.launch(client, lambda: lock.acquire())
    with pytest.raises(ddp.Error, match="cannot be sent to the workers"):
        ddp.launch(client, lambda file: None, file=lock)


def test_a_worker_whose_folder_was_removed_is_told_with_what_to_do(client, tmp_path):
    def move(folder):
        before = os.getcwd()
        os.makedirs(folder, exist_ok=True)
        os.chdir(folder)
        return before

    before = client.run(move, str(tmp_path / "gone"))
    try:
        os.rmdir(tmp_path / "gone")
        failed = failure(client, ddp.rank)
        assert "the folder in which its worker runs removed" in str(failed)
        assert "Traceback" not in str(failed)
    finally:
        client.run(os.chdir, before.popitem()[1])
    assert_usable(client)


def test_workers_that_are_threads_are_refused():
    threads = LocalCluster(n_workers=1, processes=False, dashboard_address="127.0.0.1:0")
    with threads as cluster, Client(cluster) as client:
        with pytest.raises(ddp.Error, match="processes=False"):
            ddp.launch(client, ddp.rank)


PROGRAM = """
import sys, time
import ddp_common as ddp
from distributed import Client
from torch.utils.data import DataLoader

def train():
    next(iter(DataLoader(range(1000), num_workers=1)))
    print("ready", flush=True)
    time.sleep(600)

if __name__ == "__main__":
    directory, address = sys.argv[1:]
    with Client(address) if address != "local" else ddp.connect("local", workers=2) as client:
        ddp.launch(client, train, workers=2, directory=directory)
"""


@contextlib.contextmanager
def program(tmp_path, address, environment=None):
    """A program that trains on two ranks for ever, in a session of its own.

    Yields it and the run's directory once it has begun.
    """
    script, directory = tmp_path / "program.py", tmp_path / "run"
    script.write_text(PROGRAM)
    process = subprocess.Popen(
        [sys.executable, script, directory, address],
        env=environment,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        wait_until(lambda: log_of(directory).count("ready") == 2 or process.poll() is not None)
        assert process.poll() is None, process.stdout.read()
        yield process, directory
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def has_claims(dask_scheduler):
    return claims.NAME in dask_scheduler.plugins


def test_the_ranks_of_a_killed_client_are_gone_and_their_workers_free(client, tmp_path):
    environment = environment_for(client, tmp_path)
    with program(tmp_path, client.scheduler.address, environment) as (process, directory):
        assert len(members(rank_pids(directory))) >= 2
        process.kill()
        assert_nothing_left(directory, ranks=2)
    wait_until(lambda: not client.run_on_scheduler(has_claims))
    assert_usable(client, workers=4)


def interrupt(process, kill, number=signal.SIGINT):
    """Send Ctrl-C to a program by `kill`; it and all that it has started come to an end.

    Or another signal. Returns what it said.
    """
    children = psutil.Process(process.pid).children(recursive=True)
    started = [process.pid, *(child.pid for child in children)]
    kill(process.pid, number)
    said, _ = process.communicate(timeout=2 * PATIENCE)
    assert_gone(lambda: [pid for pid in started if is_alive(pid)])
    return said


def test_ctrl_c_ends_the_program_its_ranks_and_its_cluster(tmp_path):
    with program(tmp_path, "local") as (process, directory):
        said = interrupt(process, os.kill)
        assert "\nKeyboardInterrupt\nInterrupted" in said and str(directory) in said
        assert "interrupted from the keyboard" in log_of(directory)
        assert_nothing_left(directory, ranks=2)


def test_sigterm_to_a_program_of_ones_own_has_its_ranks_leave(tmp_path):
    with program(tmp_path, "local") as (process, directory):
        said = interrupt(process, os.kill, signal.SIGTERM)
        assert "RunStopped: The run was told to stop: this program got SIGTERM" in said
        assert_nothing_left(directory, ranks=2)


TOLD_AT_THE_END = """
import os, signal, time
from dask_ranks.client import signals

with signals.heard(sigterm_too=True):
    signals.attempts_running = 1
    if os.fork() == 0:
        os.kill(os.getpid(), signal.SIGTERM)
    os.wait()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.2)
    print("the launch has returned", flush=True)
time.sleep(60)
"""


def test_sigterm_that_no_rank_has_heard_ends_the_program_after_the_launch():
    words = [sys.executable, "-c", TOLD_AT_THE_END]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, timeout=PATIENCE)
    assert done.returncode == -signal.SIGTERM
    assert done.stdout == "the launch has returned\n"


def reports_and_waits():
    ddp.report(loss=1.0)
    time.sleep(PATIENCE)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_ends_a_launch_also_where_python_swallows_it(client):
    """As it does in a callback of the garbage collector, of which Dask has one."""

    def interrupt(phase, info):
        gc.callbacks.remove(interrupt)
        signal.raise_signal(signal.SIGINT)

    def collect(record):
        gc.callbacks.append(interrupt)
        gc.collect()

    with pytest.raises(KeyboardInterrupt):
        ddp.launch(client, reports_and_waits, workers=2, on_report=collect)
    assert ddp.launch(client, ddp.world_size, workers=2).result == 2
