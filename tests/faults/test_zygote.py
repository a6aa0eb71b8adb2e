"""One process has torch imported for all workers of a host, and nothing depends on its life."""

import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path

import cloudpickle
import psutil
import pytest
from processes import Background, assert_gone, is_alive, wait_until

import ddp_common as ddp
from ddp_common.clusters import warm_start
from ddp_common.worker import zygote

cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = pytest.mark.skipif(
    not hasattr(os, "pidfd_open") or sys.version_info >= (3, 14),
    reason="needs Linux 5.3, and a Python whose forkserver wants no secret",
)


def ancestors():
    """Of a rank: the numbers of its forkserver, of the guard, and of what that was forked from."""
    forkserver, guard, origin = psutil.Process().parents()[:3]
    return {"forkserver": forkserver.pid, "guard": guard.pid, "origin": origin.pid}


def guards(client):
    def of_this_worker():
        from ddp_common.worker import forkserver

        return forkserver.guard()

    return list(client.run(of_this_worker).values())


def forkservers_of(guards):
    return [child.pid for pid in guards for child in psutil.Process(pid).children()]


def zygote_of(client):
    return client.zygote._process.pid


@pytest.fixture
def cluster():
    with ddp.connect("local", workers=2) as client:
        yield client


def test_all_ranks_stem_from_the_zygote_each_by_a_forkserver_of_its_own(cluster):
    ranks = ddp.launch(cluster, lambda: ddp.report(**ancestors())).metrics.to_dict("records")
    assert len({record["forkserver"] for record in ranks}) == 2
    assert {record["guard"] for record in ranks} == set(guards(cluster))
    assert {record["origin"] for record in ranks} == {zygote_of(cluster)}


def test_it_ends_with_the_cluster_and_so_does_what_was_forked_from_it():
    with ddp.connect("local", workers=2) as client:
        ddp.launch(client, ddp.rank)
        pids = [zygote_of(client), *guards(client)]
        path = Path(client.zygote.address.path)
        assert path.exists() and all(map(is_alive, pids))
    assert_gone(lambda: [pid for pid in pids if is_alive(pid)])
    assert not path.exists()


CLIENT = """
import sys, time
import ddp_common as ddp

if __name__ == "__main__":
    with ddp.connect("local", workers=1) as client:
        if sys.argv[1] == "after a launch":
            ddp.launch(client, ddp.rank)
        print(client.zygote._process.pid, client.zygote.address.path, flush=True)
        time.sleep(600)
"""


@pytest.mark.parametrize("when", ["before a launch", "after a launch"])
def test_it_ends_with_a_client_that_is_killed(when):
    process = subprocess.Popen(
        [sys.executable, "-c", CLIENT, when], stdout=subprocess.PIPE, text=True
    )
    try:
        pid, path = process.stdout.readline().split()
        started = psutil.Process(int(pid)).children(recursive=True)
        assert is_alive(int(pid))
    finally:
        process.kill()
        process.communicate()
    assert_gone(lambda: [each for each in (int(pid), *started) if still_there(each)])
    assert not Path(path).exists()


def still_there(process):
    return is_alive(process if isinstance(process, int) else process.pid)


def test_a_worker_that_is_killed_takes_its_guard_and_forkserver_along(cluster):
    ddp.launch(cluster, ddp.rank)
    victim = next(iter(cluster.run(os.getpid).values()))
    before = guards(cluster)
    forkservers = forkservers_of(before)
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: sum(map(is_alive, before)) == 1)
    wait_until(lambda: sum(map(is_alive, forkservers)) == 1)
    # Dask has the nanny start another worker, which asks the zygote again.
    cluster.wait_for_workers(2, timeout=120)
    wait_until(lambda: len(cluster.workers()) == 2)
    records = ddp.launch(cluster, lambda: ddp.report(**ancestors())).metrics.to_dict("records")
    assert {record["origin"] for record in records} == {zygote_of(cluster)}


def test_without_it_workers_start_forkservers_of_their_own(cluster):
    ddp.launch(cluster, ddp.rank)
    killed = guards(cluster)
    forkservers = forkservers_of(killed)
    os.kill(zygote_of(cluster), signal.SIGKILL)
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not any(map(is_alive, [*killed, *forkservers])))
    workers = set(cluster.run(os.getpid).values())
    records = ddp.launch(cluster, lambda: ddp.report(**ancestors())).metrics.to_dict("records")
    assert {record["origin"] for record in records} == workers


def waits_for_a_forkserver():
    """Whether a thread of this process has asked for a process and waits for its number."""
    names = [
        frame.f_code.co_name
        for thread in sys._current_frames().values()
        for frame, _ in traceback.walk_stack(thread)
    ]
    return "read_signed" in names


def test_a_forkserver_that_ends_while_it_starts_a_rank_is_replaced(cluster):
    ddp.launch(cluster, ddp.rank)
    forkservers = forkservers_of(guards(cluster))
    for pid in forkservers:
        os.kill(pid, signal.SIGSTOP)
    launch = Background(ddp.launch, cluster, ddp.world_size)
    wait_until(lambda: all(cluster.run(waits_for_a_forkserver).values()))
    for pid in forkservers:
        os.kill(pid, signal.SIGKILL)
    assert launch.outcome().result == 2


def test_one_that_is_killed_while_it_imports_torch_is_not_waited_for(monkeypatch):
    started = []

    def start_and_kill():
        made = zygote.Zygote(str(warm_start.private_folder()), dict(os.environ))
        os.kill(made._process.pid, signal.SIGSTOP)
        started.append(made._process.pid)
        return made

    monkeypatch.setattr("ddp_common.clusters.connect.start_zygote", start_and_kill)
    with ddp.connect("local", workers=1) as client:
        time.sleep(0.5)  # the worker has asked by now, or will find nobody
        os.kill(started[0], signal.SIGKILL)
        assert ddp.launch(client, ddp.world_size).result == 1


def test_workers_with_another_environment_do_not_take_it(monkeypatch):
    environment = warm_start._environment_of_workers()

    def start_with_other_threads():
        folder = str(warm_start.private_folder())
        return zygote.Zygote(folder, {**environment, "OMP_NUM_THREADS": "7"})

    monkeypatch.setattr("ddp_common.clusters.connect.start_zygote", start_with_other_threads)
    with ddp.connect("local", workers=1) as client:
        (record,) = ddp.launch(client, lambda: ddp.report(**ancestors())).metrics.to_dict(
            "records"
        )
        assert record["origin"] in client.run(os.getpid).values()


def test_a_rank_has_the_environment_the_folder_and_the_cores_of_its_worker(cluster, tmp_path):
    def as_in_the_worker():
        return os.getcwd(), sorted(os.sched_getaffinity(0)), os.environ.get("OMP_NUM_THREADS")

    expected = next(iter(cluster.run(as_in_the_worker).values()))
    assert ddp.launch(cluster, as_in_the_worker).result == expected


A_WORKER_THAT_LEAVES = """
import os, socket, sys
from ddp_common.clusters.warm_start import private_folder
from ddp_common.worker import guard, zygote

made = zygote.Zygote(str(private_folder()), dict(os.environ))
alive_read, alive_write = os.pipe()
with socket.socket(socket.AF_UNIX) as listener:
    listener.bind(sys.argv[1])
    listener.listen()
    answer = zygote.request(made.address, listener, alive_read)
its_guard = os.pidfd_open(zygote.guard(answer))
os.close(alive_read)
os.close(alive_write)
if guard.has_ended(its_guard, 60_000):
    print("ended")
"""


def test_a_forkserver_whose_worker_leaves_says_nothing(tmp_path):
    command = [sys.executable, "-c", A_WORKER_THAT_LEAVES, tmp_path / "socket"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("ended\n", "")


STRANGER = """
import os, socket, sys

os.setgroups([])
os.setgid(65534)
os.setuid(65534)
try:
    socket.socket(socket.AF_UNIX).connect(sys.argv[1])
except PermissionError:
    print("refused")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_another_user_cannot_reach_it(cluster):
    command = [sys.executable, "-c", STRANGER, cluster.zygote.address.path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout == "refused\n", done.stderr


def test_requests_that_are_none_do_no_harm(cluster):
    for content in (
        b"",
        b"x",
        b"\0" * 8,
        zygote.LENGTH.pack(2**60),
        zygote.LENGTH.pack(4) + b"no",
    ):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(cluster.zygote.address.path)
            connection.sendall(content)
            connection.shutdown(socket.SHUT_WR)
    test_all_ranks_stem_from_the_zygote_each_by_a_forkserver_of_its_own(cluster)
    assert is_alive(zygote_of(cluster))
