"""What a rank starts ends with it, in whatever session, through whatever chain of parents.

However rank, launch, worker or cluster end.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import cloudpickle
import fault_lab
import psutil
import pytest
from distributed import Client
from processes import assert_gone, assert_nothing_left, is_alive, log_of, wait_until

import ddp_common as ddp
from ddp_common.teaching import faults
from ddp_common.worker import descendants

cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has child subreapers")


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
    temporary = f"{file}.tmp"
    with open(temporary, "w") as opened:
        opened.write(f"{own_session} {daemon_pid} {deaf_pid}")
    os.rename(temporary, file)


def left_behind(file):
    return [pid for pid in map(int, file.read_text().split()) if is_alive(pid)]


def starts_others(file, end):
    if ddp.rank() == 1:
        leave_behind(file)
        if end is kill_worker:  # which takes along what has not been told yet
            wait_until(lambda: "rank 1 started" in log_of(Path(file).parent / "run"))
        end()
    elif end is not no_end:
        time.sleep(600)


def no_end():
    return None


def raise_error():
    raise ValueError("after having started others")


def kill_itself():
    os.kill(os.getpid(), signal.SIGKILL)


def kill_worker():
    faults.worker_of_this_rank().kill()


@pytest.mark.parametrize(
    "end", [no_end, raise_error, kill_itself, kill_worker], ids=lambda end: end.__name__
)
def test_nothing_outlives_a_rank_that(client, tmp_path, end):
    file = tmp_path / "pids"
    if end is no_end:
        ddp.launch(
            client, starts_others, workers=2, directory=tmp_path / "run", file=str(file), end=end
        )
        assert not left_behind(file)  # at once: the launch has waited for it
    else:
        with pytest.raises(ddp.RankFailed):
            ddp.launch(
                client,
                starts_others,
                workers=2,
                directory=tmp_path / "run",
                file=str(file),
                end=end,
            )
        assert_gone(lambda: left_behind(file))
    assert_nothing_left(tmp_path / "run", ranks=2)


def test_nothing_outlives_a_client_that_is_killed(client, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(f"""
import sys, time
sys.path.insert(0, {os.path.dirname(__file__)!r})
sys.path.insert(0, {os.path.dirname(os.path.dirname(__file__))!r})
from distributed import Client
from ddp_common import launch
from test_descendants import starts_others

if __name__ == "__main__":
    with Client({client.scheduler.address!r}) as client:
        launch(
            client,
            starts_others,
            workers=2,
            directory={str(tmp_path / "run")!r},
            file={str(tmp_path / "pids")!r},
            end=lambda: time.sleep(600),
        )
""")
    process = subprocess.Popen(
        [sys.executable, program], env=fault_lab.environment_for(client, tmp_path)
    )
    try:
        wait_until((tmp_path / "pids").exists)
        assert len(left_behind(tmp_path / "pids")) == 3
    finally:
        process.kill()
        process.wait()
    assert_gone(lambda: left_behind(tmp_path / "pids"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_outlives_a_cluster_whose_workers_and_nannies_are_ended(tmp_path, number):
    cluster = fault_lab.separate_cluster(tmp_path, workers=1)
    with cluster as (scheduler, address), Client(address) as other:
        other.wait_for_workers(1, timeout=120)
        (guard,) = other.run(start_and_leave, str(tmp_path / "pids")).values()
        wait_until(lambda: (tmp_path / "pids").exists() and left_behind(tmp_path / "pids"))
        worker = psutil.Process(guard).parent()
        for process in (worker.parent(), worker):
            with contextlib.suppress(psutil.NoSuchProcess):  # a worker ends when its nanny does
                process.send_signal(number)
    assert_gone(lambda: [pid for pid in (guard, *left_behind(tmp_path / "pids")) if is_alive(pid)])


def start_and_leave(file):
    """On a worker: a process of its forkserver leaves another behind. Returns the guard's pid."""
    from ddp_common.worker import forkserver

    context = forkserver.start_forkserver()
    starting = context.Process(target=os.system, args=(f"setsid sleep 1003 & echo $! > {file}",))
    starting.start()
    starting.join()
    return forkserver.guard()


def test_the_workers_other_children_are_left_alone(client, tmp_path):
    def start_bystander():
        return subprocess.Popen(["sleep", "1002"]).pid

    bystanders = client.run(start_bystander)
    try:
        with pytest.raises(ddp.RankFailed):
            ddp.launch(
                client, starts_others, workers=2, file=str(tmp_path / "pids"), end=raise_error
            )
        assert all(map(is_alive, bystanders.values()))
        forkservers = client.run(_forkserver_of_worker)
        assert all(map(is_alive, forkservers.values()))
    finally:
        for pid in bystanders.values():
            os.kill(pid, signal.SIGKILL)


def _forkserver_of_worker():
    from ddp_common.worker import forkserver

    return forkserver.guard()


def test_no_zombies_gather_under_a_guard(client, tmp_path):
    for number in range(3):
        ddp.launch(
            client, starts_others, workers=2, file=str(tmp_path / f"pids{number}"), end=no_end
        )
    guards = set(client.run(_forkserver_of_worker).values())

    def zombies():
        return [
            entry
            for entry in descendants.processes().values()
            if entry.parent in guards and entry.state == "Z"
        ]

    assert_gone(zombies)


RUNNER = """
import os, sys, time
for hop in range(3000):
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
    assert_gone(lambda: left_behind(tmp_path / "pids"))


def grow_in_children(mebibytes):
    """Memory in a child and its child; the rank itself stays small."""
    grow = f"import time; kept = bytearray({mebibytes} * 2**20); time.sleep(600)"
    also_in_a_child = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {grow!r}])"
    subprocess.Popen(["setsid", sys.executable, "-c", f"{also_in_a_child}; {grow}"])
    time.sleep(600)


def test_memory_of_what_a_rank_has_started_counts(client, tmp_path):
    client.run(fault_lab._limit_memory, fault_lab.MEMORY_LIMIT)
    try:
        words = "GiB of memory together with the 2 process.* that it has started"
        with pytest.raises(ddp.RankFailed, match=words):
            ddp.launch(
                client, grow_in_children, workers=1, directory=tmp_path / "run", mebibytes=600
            )
    finally:
        client.run(fault_lab._limit_memory, None)
    assert_nothing_left(tmp_path / "run", ranks=1)


def test_memory_that_forked_children_share_with_the_rank_counts_once(client):
    def share(mebibytes):
        import torch
        from torch.utils.data import DataLoader

        data = torch.ones(mebibytes, 2**18)

        def slowly(rows):
            time.sleep(0.1)
            return float(data[rows[0], 0])

        return sum(DataLoader(range(40), num_workers=3, collate_fn=slowly))

    client.run(fault_lab._limit_memory, 3 * 2**28)
    try:
        assert ddp.launch(client, share, workers=1, mebibytes=400).result == 40
    finally:
        client.run(fault_lab._limit_memory, None)
