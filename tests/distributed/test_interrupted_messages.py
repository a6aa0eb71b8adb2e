"""A rank that goes no further in the middle of a long message does not hold up its agent."""

import os
import subprocess
import sys
import time

import cloudpickle
import psutil
import pytest
from processes import Background, assert_nothing_left, log_of, wait_until

import ddp_common as ddp
from ddp_common.client import told

cloudpickle.register_pickle_by_value(sys.modules[__name__])

MUCH = 10_000_000  # bytes: a pipe holds 65,536


def say_much(sign, numbers):
    """Send a file to an agent that is suspended, and get the signal `sign` meanwhile.

    The agent goes on after that, so it finds the beginning of a message whose rest may never come.
    """
    me = os.getpid()
    worker = os.environ["DDP_WORKER_PROCESS"]
    with open(numbers, "w") as file:
        print(me, worker, file=file)
    words = f"kill -STOP {worker}; sleep 3; kill -{sign} {me}; sleep 1; kill -CONT {worker}"
    subprocess.Popen(["setsid", "sh", "-c", words])
    time.sleep(1)
    if os.fork() == 0:  # holds the rank's end of the pipe open
        time.sleep(1_000)
    ddp.save_file("much.bin", bytes(MUCH))
    time.sleep(1_000)


def test_a_rank_that_is_suspended_ends_when_the_launch_is_interrupted(
    client, tmp_path, monkeypatch
):
    numbers = tmp_path / "numbers"
    run = tmp_path / "run"
    launch = Background(
        ddp.launch, client, say_much, workers=1, directory=run, sign="STOP", numbers=numbers
    )
    words = wait_until(lambda: numbers.exists() and numbers.read_text().split())
    rank, worker = [psutil.Process(int(word)) for word in words]
    wait_until(lambda: rank.status() == psutil.STATUS_STOPPED)
    # The worker goes on a second later, and takes in what the pipe holds.
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
            sign="KILL",
            numbers=tmp_path / "numbers",
        )
    assert "much.bin" not in log_of(run)
    assert_nothing_left(run, ranks=1)
