"""Ranks are forked from one process with torch, and nothing that they start outlives them.

However rank, launch, worker, client or cluster end.
"""

import contextlib
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import cloudpickle
import faults_on_purpose as faults
import numpy as np
import psutil
import pytest
import torch
from distributed import Client
from processes import (
    PATIENCE,
    Background,
    assert_gone,
    assert_nothing_left,
    is_alive,
    log_of,
    members,
    rank_pids,
    separate_cluster,
    wait_until,
)
from tables_here import everyone

import ddp_common as ddp
from dask_ranks.messages import ASK_WHERE
from dask_ranks.worker.rank_host import RankHost

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def ancestors():
    """Of this rank: the numbers of its supervisor, and of the fork server."""
    supervisor, fork_server = psutil.Process().parents()[:2]
    return supervisor.pid, fork_server.pid


def launched(client, function, **options):
    """What `function` returns on each of two ranks."""
    options.setdefault("workers", 2)
    return ddp.launch(client, lambda: everyone(function()), **options).result


# What ranks are forked from


def test_a_workers_ranks_have_one_supervisor_and_all_supervisors_one_fork_server(client):
    first = launched(client, ancestors)
    assert {server for _, server in first} == {client.fork_server.pid}
    assert launched(client, ancestors) == first
    for supervisor, _ in first:
        os.kill(supervisor, signal.SIGKILL)
        wait_until(lambda: not is_alive(supervisor))
    assert not {*first} & {*launched(client, ancestors)}


def test_without_that_process_workers_start_their_own():
    with ddp.connect("local", workers=2) as client:
        os.kill(client.fork_server.pid, signal.SIGKILL)
        wait_until(lambda: not is_alive(client.fork_server.pid))
        _, servers = zip(*launched(client, ancestors))
        workers = client.run(os.getpid).values()
        assert {psutil.Process(pid).ppid() for pid in servers} == set(workers)
    assert_gone(lambda: [pid for pid in servers if is_alive(pid)])


def test_a_rank_has_environment_cores_and_path_of_its_worker_and_the_program_s_folder(
    client, tmp_path
):
    def change(name, folder):
        os.environ[name] = "1"
        os.chdir(folder)
        sys.path.append(folder)

    def look():
        cores = sorted(os.sched_getaffinity(0))
        return os.environ.get("BY_RUN"), cores, sys.path, os.getcwd()

    before, *_, cwd = client.run(look, workers=list(client.workers())[:1]).popitem()[1]
    assert before is None
    client.run(change, "BY_RUN", str(tmp_path))
    try:
        ranks = launched(client, look, workers=4)
        of_workers = list(client.run(look).values())
        assert [rank[:3] for rank in ranks] == [worker[:3] for worker in of_workers]
        assert ranks[0][0] == "1" and str(tmp_path) in ranks[0][2]
        assert {rank[3] for rank in ranks} == {os.getcwd()}
    finally:
        client.run(lambda: (os.environ.pop("BY_RUN"), os.chdir(cwd), sys.path.pop()))


def test_unseeded_random_numbers_differ_between_ranks_and_launches(client):
    def draw():
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    drawn = launched(client, draw) + launched(client, draw)
    for numbers in zip(*drawn):
        assert len(set(numbers)) == 4, drawn


def test_a_rank_that_ends_with_its_fork_server_has_no_exit_code():
    host = RankHost()
    host.prepare()
    running = host.fork("time", "sleep", 1000, descriptors={})
    host.close()
    assert running.connection.poll(PATIENCE)
    running.take_note()
    assert running.connection.closed and running.exitcode is None
    assert running.end() == [] and not is_alive(running.pid)


def test_a_late_rank_of_an_earlier_attempt_does_not_take_the_store_of_the_next():
    host = RankHost()
    port = host.listen("second", "127.0.0.1")
    with pytest.raises(AssertionError, match="of another attempt"):
        host.take_store("first")
    with host.take_store("second") as store_socket:
        assert store_socket.getsockname()[1] == port


def test_a_hundred_questions_do_not_block_a_rank(client):
    def train():
        for _ in range(100):
            os.kill(os.getpid(), ASK_WHERE)
        return "went on"

    assert ddp.launch(client, train, workers=1).result == "went on"


def test_sigusr1_and_sigusr2_are_the_program_s_and_end_no_worker(client):
    def train():
        heard = []
        signal.signal(signal.SIGUSR1, lambda number, _: heard.append(number))
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            faults.worker_of_this_rank().send_signal(number)
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), heard[0] + 2)  # SIGUSR2, which has no handler

    with pytest.raises(ddp.RankFailed, match="killed by SIGUSR2"):
        ddp.launch(client, train, workers=1)


def test_a_supervisor_with_too_few_descriptors_is_a_failure_that_says_so(client):
    """It has those of the fork server, and none is left for the rank's."""
    for supervisor, _ in launched(client, ancestors, workers=4):
        os.kill(supervisor, signal.SIGKILL)  # others are forked for the next launch
    pid = client.fork_server.pid
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    is_open = {*map(int, os.listdir(f"/proc/{pid}/fd"))}
    free = min({*range(len(is_open) + 1)} - is_open)  # for the connection; none above is given out
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (free + 1, limits[1]))
    try:
        with pytest.raises(ddp.RankFailed, match="Too many open files.*\n.*ulimit -n 4096"):
            ddp.launch(client, ddp.rank, workers=4)
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
    assert ddp.launch(client, ddp.world_size, workers=4).result == 4


def loads():
    loader = torch.utils.data.DataLoader(range(4), num_workers=1)
    return sum(map(int, loader))


def test_ranks_go_on_where_something_has_cleaned_the_folder_of_temporary_files():
    with ddp.connect("local", workers=1) as client:
        assert ddp.launch(client, loads, stall_timeout=20).result == 6
        shutil.rmtree(os.path.dirname(client.fork_server.path))
        assert ddp.launch(client, loads, stall_timeout=20).result == 6


# What is left of them


def leave_behind(file):
    """Start three processes that the rank's process group does not hold; write their numbers.

    One in a session of its own, a daemon (its parent has ended, its session is its own), and one
    that ignores what can be ignored. `file` appears whole.
    """
    deaf = "trap '' TERM INT HUP; while true; do sleep 1; done"
    own_session = subprocess.Popen(["setsid", "sleep", "1000"]).pid
    daemon = (
        "import os, sys; os.fork() and os._exit(0); os.setsid(); os.fork() and os._exit(0); "
        "print(os.getpid(), flush=True); os.close(1); os.execlp('sleep', 'sleep', '1001')"
    )
    command = [sys.executable, "-S", "-c", daemon]
    daemon_pid = int(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    deaf_pid = subprocess.Popen(["setsid", "sh", "-c", deaf]).pid
    with open(f"{file}.tmp", "w") as opened:
        opened.write(f"{own_session} {daemon_pid} {deaf_pid}")
    os.rename(f"{file}.tmp", file)


def left_behind(file):
    return [pid for pid in map(int, Path(file).read_text().split()) if is_alive(pid)]


def raise_error():
    raise ValueError("after having started others")


ENDS = {
    "returns": lambda: None,
    "raises": raise_error,
    "is_killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "loses_its_supervisor": lambda: (os.kill(os.getppid(), signal.SIGKILL), time.sleep(600)),
    "loses_its_worker": lambda: (faults.worker_of_this_rank().kill(), time.sleep(600)),
    "stays": lambda: time.sleep(600),
}


def starts_others(file, end):
    if ddp.rank() == 1:
        leave_behind(file)
        wait_until(lambda: "rank 1 started" in log_of(Path(file).parent / "run"))
        ENDS[end]()
    elif end != "returns":
        time.sleep(600)


@pytest.mark.parametrize(
    "end", ["returns", "raises", "is_killed", "loses_its_supervisor", "loses_its_worker"]
)
def test_nothing_outlives_a_rank_that(client, tmp_path, end):
    file, run = tmp_path / "pids", tmp_path / "run"
    bystanders = client.run(lambda: subprocess.Popen(["sleep", "1002"]).pid).values()
    expected = contextlib.nullcontext() if end == "returns" else pytest.raises(ddp.RankFailed)
    with expected:
        ddp.launch(client, starts_others, workers=2, directory=run, file=str(file), end=end)
    if end.startswith("loses"):
        assert_gone(lambda: left_behind(file))
    else:
        assert not left_behind(file)  # at once: the launch has waited for it
    assert_nothing_left(run, ranks=2)
    assert all(map(is_alive, bystanders))
    for pid in bystanders:
        os.kill(pid, signal.SIGKILL)


def test_what_has_left_a_rank_and_ended_is_no_zombie_while_the_rank_goes_on(client):
    def train():
        supervisor = psutil.Process().parent()
        subprocess.run(["sh", "-c", "for i in 1 2 3; do (sleep 0.1 &) ; done"], check=True)
        wait_until(lambda: len(supervisor.children()) > 1)
        wait_until(lambda: len(supervisor.children()) == 1)
        return True

    assert ddp.launch(client, train, workers=1).result


RUNNER = """
import os, sys, time
while True:
    time.sleep(0.2)
    if os.fork():
        os._exit(0)
    os.setsid()
    with open(sys.argv[1], "a") as file:
        file.write(f"{os.getpid()}\\n")
"""


def test_processes_that_run_away_from_one_session_to_the_next_are_caught(client, tmp_path):
    def let_them_run(file):
        for _ in range(3):
            subprocess.Popen([sys.executable, "-S", "-c", RUNNER, file])
        wait_until(lambda: os.path.exists(file) and len(open(file).read().split()) > 9)
        raise_error()

    with pytest.raises(ddp.RankFailed, match="after having started others"):
        ddp.launch(client, let_them_run, workers=1, file=str(tmp_path / "pids"))
    assert not left_behind(tmp_path / "pids")


PROGRAM = f"""
import sys, time
sys.path[:0] = {[os.path.dirname(__file__), os.path.dirname(os.path.dirname(__file__))]!r}
import ddp_common as ddp
from test_supervisor import starts_others

if __name__ == "__main__":
    file, run = sys.argv[1:]
    with ddp.connect("local", workers=2) as client:
        print(client.fork_server.pid, client.fork_server.path, flush=True)
        ddp.launch(client, starts_others, directory=run, file=file, end="stays")
"""


def test_nothing_outlives_a_client_that_is_killed_with_its_cluster(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    file, run = tmp_path / "pids", tmp_path / "run"
    program = subprocess.Popen(
        [sys.executable, tmp_path / "program.py", file, run],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        pid, path = program.stdout.readline().split()
        wait_until(file.exists)
        started = {int(pid), *(each.pid for each in psutil.Process(program.pid).children(True))}
    finally:
        program.kill()
        program.communicate()
    assert_gone(lambda: [each for each in started if is_alive(each)])
    assert_gone(lambda: left_behind(file) + members(rank_pids(run)))
    assert not Path(path).exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_outlives_workers_and_nannies_that_are_ended(tmp_path, number):
    file, run = tmp_path / "pids", tmp_path / "run"
    cluster = separate_cluster(tmp_path, workers=1)
    with cluster as (_, address), Client(address) as client:
        client.wait_for_workers(1, timeout=120)
        (worker,) = map(psutil.Process, client.run(os.getpid).values())
        launch = Background(
            ddp.launch, client, lambda: (leave_behind(str(file)), time.sleep(600)), directory=run
        )
        wait_until(file.exists)
        started = worker.children(recursive=True)
        assert len(started) >= 3  # the fork server, the supervisor, the rank
        for process in (worker.parent(), worker):
            with contextlib.suppress(psutil.NoSuchProcess):  # a worker ends when its nanny does
                process.send_signal(number)
        with pytest.raises(ddp.Error):
            launch.outcome()
        assert_gone(lambda: [*filter(is_alive, [*left_behind(file), *(p.pid for p in started)])])
