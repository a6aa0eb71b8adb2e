"""Workers of a local cluster that are killed: which come back, and which are given up."""

import contextlib
import os
import signal
import time

import dask
from processes import wait_until

import ddp_common as ddp


@contextlib.contextmanager
def one_worker(lost_worker_timeout):
    with (
        dask.config.set({"distributed.deploy.lost-worker-timeout": lost_worker_timeout}),
        ddp.connect("local", workers=1) as client,
    ):
        yield client


def kill_the_worker(client):
    """Kill it and wait until the scheduler knows; returns when that was, by `time.monotonic()`."""
    (address,) = client.workers()
    (nanny,) = client.cluster.workers.values()
    os.kill(nanny.pid, signal.SIGKILL)
    wait_until(lambda: address not in client.workers())
    return time.monotonic()


def dies_again_and_comes_back(timeout):
    """Whether the worker could be killed again before Dask looked at its first loss.

    Dask looks `timeout` seconds after a loss. A busy machine may take longer to start a worker.
    """
    with one_worker(f"{timeout} s") as client:
        (nanny,) = client.cluster.workers.values()
        lost = kill_the_worker(client)
        wait_until(lambda: client.workers() and nanny.status.name == "running")
        time.sleep(max(0, lost + timeout - 0.15 - time.monotonic()))
        again = kill_the_worker(client)
        if again > lost + timeout:
            return False
        wait_until(client.workers)
        assert list(client.cluster.workers.values()) == [nanny]
        return True


def test_a_worker_that_dies_again_when_the_first_loss_is_looked_at_comes_back():
    assert any(dies_again_and_comes_back(timeout) for timeout in (5, 15, 45))


def test_a_nanny_that_has_ended_is_forgotten_and_can_be_replaced():
    with one_worker("1 s") as client:
        (nanny,) = client.cluster.workers.values()
        client.cluster.sync(nanny.close)  # as it does where its worker cannot start
        wait_until(lambda: not client.cluster.workers)
        client.cluster.scale(1)
        wait_until(client.workers)
        assert list(client.cluster.workers.values()) != [nanny]
