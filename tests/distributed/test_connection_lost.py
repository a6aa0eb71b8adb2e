"""A client that loses its connection, though both it and the scheduler live.

And a program that is told to stop.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fault_lab import processes_of, separate_cluster
from processes import PATIENCE, Background, assert_nothing_left, held_back, log_of, wait_until

import ddp_common as ddp
from ddp_common.ranks.checkpoint_files import checkpoints, step_of
from ddp_common.teaching import faults

ROOT = Path(__file__).parents[2]


def test_a_broken_connection_ends_the_run_and_another_client_goes_on(tmp_path):
    """As the message says: connect again.

    Dask mostly connects the same client anew, but asserts that the scheduler's first message
    comes alone (`_ensure_connected`), which from a busy one it does not always: then that client
    stays without a connection, and raises the AssertionError when it is closed.
    """
    from distributed import Client

    with separate_cluster(tmp_path) as (_, address):
        client = Client(address)
        client.wait_for_workers(2, timeout=120)
        undisturbed = ddp.launch(
            client, faults.train, workers=2, directory=tmp_path / "undisturbed"
        ).result
        with held_back(faults.train, tmp_path / "gate") as train:
            running = Background(ddp.launch, client, train, workers=2, directory=tmp_path / "run")
            wait_until(lambda: checkpoints(tmp_path / "run" / "checkpoints"))
            client.loop.add_callback(client.scheduler_comm.comm.abort)
            words = "connect again and launch with directory="
            with pytest.raises(ddp.SchedulerLost, match=words):
                running.outcome(within=PATIENCE)
            assert_nothing_left(tmp_path / "run", ranks=2)
        with contextlib.suppress(AssertionError):
            client.close()
        with Client(address) as another:
            resumed = ddp.launch(another, faults.train, workers=2, directory=tmp_path / "run")
            assert (resumed.result == undisturbed).all()


def test_a_worker_that_vanishes_while_a_launch_asks_it_is_a_failed_rank_and_restarts_answer_it(
    tmp_path,
):
    from distributed import Client

    with separate_cluster(tmp_path) as (_, address), Client(address) as client:
        client.wait_for_workers(2, timeout=120)
        pid = client.run(os.getpid).popitem()[1]
        os.kill(pid, signal.SIGSTOP)
        running = Background(
            ddp.launch, client, faults.train, workers=2, restarts=1, directory=tmp_path / "run"
        )
        wait_until(lambda: list((tmp_path / "run" / "checkpoints").glob(".seen-*")))
        os.kill(pid, signal.SIGKILL)  # its nanny brings another one
        run = running.outcome()
        assert run.world_size == 2
        assert "its worker died or cannot be reached" in str(run.failures[0])


def test_make_run_that_gets_sigterm_has_its_ranks_save_and_leave(tmp_path):
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "ddp_common",
            "run",
            "pets",
            "--workers",
            "2",
            "--checkpoint",
            tmp_path / "run",
            "--restarts",
            "3",
            "--set",
            "epochs=100 hidden=16 batch_size=512",
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_until(lambda: checkpoints(tmp_path / "run" / "checkpoints"), within=120)
    began = time.monotonic()
    os.kill(process.pid, signal.SIGTERM)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 143 and time.monotonic() - began < PATIENCE
    assert "The run was told to stop" in error and "make run TUTORIAL=pets RESUME=" in error
    assert "Traceback" not in error
    step = int(error.split("All ranks left after step ")[1].split(";")[0])
    assert step_of(checkpoints(tmp_path / "run" / "checkpoints")[-1]) == step
    assert "Restart" not in log_of(tmp_path / "run") and not processes_of(tmp_path / "run")
