"""A rank that goes no further in the middle of a long message does not hold up its agent."""

import contextlib
import fcntl
import os
import signal
import stat
import sys
import termios
import time
from pathlib import Path

import cloudpickle
import psutil
import pytest
from processes import Background, assert_nothing_left, wait_until

import ddp_common as ddp
from ddp_common.client import told

cloudpickle.register_pickle_by_value(sys.modules[__name__])

PIPE_HOLDS = 65_536  # bytes
MUCH = 10_000_000  # bytes


def say_much(sign, numbers):
    """Send a file to an agent that is suspended, and get the signal `sign` in the middle of it.

    The agent goes on after that, so it finds the beginning of a message whose rest may never come.
    """
    rank = psutil.Process()
    worker = psutil.Process(int(os.environ["DDP_WORKER_PROCESS"]))
    if os.fork() == 0:  # this process holds the rank's end of the pipe open
        disturb(rank, worker, sign)
        time.sleep(1_000)
    while worker.status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)
    Path(numbers).write_text(f"{rank.pid} {worker.pid}")
    ddp.save_file("much.bin", bytes(MUCH))
    time.sleep(1_000)


def disturb(rank, worker, sign):
    worker.suspend()
    while not a_pipe_is_full():
        time.sleep(0.01)
    rank.send_signal(sign)
    with contextlib.suppress(psutil.NoSuchProcess):  # dead, and waited for
        while rank.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE):
            time.sleep(0.01)
    worker.resume()


def a_pipe_is_full():
    """One of those that this process shares with the rank."""
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
                unread = fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4))
                if int.from_bytes(unread, sys.byteorder) >= PIPE_HOLDS:
                    return True
    return False


def test_a_rank_that_is_suspended_ends_when_the_launch_is_interrupted(
    client, tmp_path, monkeypatch
):
    numbers = tmp_path / "numbers"
    run = tmp_path / "run"
    launch = Background(
        ddp.launch,
        client,
        say_much,
        workers=1,
        directory=run,
        sign=signal.SIGSTOP,
        numbers=numbers,
    )
    words = wait_until(lambda: numbers.exists() and numbers.read_text().split())
    rank, worker = [psutil.Process(int(word)) for word in words]
    wait_until(lambda: rank.status() == psutil.STATUS_STOPPED)
    # The worker goes on then, and takes in what the pipe holds.
    wait_until(lambda: worker.status() != psutil.STATUS_STOPPED)
    monkeypatch.setattr(told, "interrupted", True)
    with pytest.raises(KeyboardInterrupt):
        launch.outcome()
    monkeypatch.undo()
    assert_nothing_left(run, ranks=1)
    assert ddp.launch(client, ddp.rank, workers=4).world_size == 4, "the worker is free again"


def test_a_rank_that_is_killed_is_named_although_a_child_holds_its_pipe(client, tmp_path):
    run = tmp_path / "run"
    with pytest.raises(ddp.RankFailed, match="killed by SIGKILL"):
        ddp.launch(
            client,
            say_much,
            workers=1,
            directory=run,
            sign=signal.SIGKILL,
            numbers=tmp_path / "numbers",
        )
    assert not (run / "much.bin").exists()
    assert_nothing_left(run, ranks=1)
