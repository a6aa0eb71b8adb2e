"""CLUSTER=tcp://… and tls://…: a scheduler of somebody else's, which stays when we leave."""

import sys
import time

import cloudpickle
import faults_on_purpose as faults
import pytest
import torch
from distributed import Client
from patience import PATIENCE
from processes import (
    Background,
    assert_nothing_left,
    held_back,
    saved_steps,
    separate_cluster,
    wait_until,
)

import ddp_common as ddp
from dask_ranks.client.rpc import answers_within, known_workers
from dask_ranks.worker import agent

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """(process, address) of a scheduler with two workers."""
    with separate_cluster(tmp_path_factory.mktemp("cluster")) as (scheduler, address):
        wait_until(lambda: workers_at(address) == 2)
        yield scheduler, address


@pytest.fixture
def address(cluster):
    return cluster[1]


def workers_at(address):
    with Client(address, set_as_default=False) as client:
        return len(known_workers(client))


def refusal(address):
    """What `connect` says of an address, and that it says so in time."""
    began = time.monotonic()
    with pytest.raises(ddp.Error) as caught:
        ddp.connect(address).close()
    assert time.monotonic() - began < PATIENCE
    return str(caught.value)


def test_fewer_workers_may_be_asked_for_and_the_others_stay(address, monkeypatch):
    monkeypatch.setenv("CLUSTER", address)
    monkeypatch.setenv("WORKERS", "1")
    with ddp.connect() as client:
        assert client.ranks == 1
        run = ddp.launch(client, ddp.world_size)
    assert (run.result, run.world_size) == (1, 1)
    assert workers_at(address) == 2


def test_more_workers_than_come_are_an_error_that_names_both_numbers(address, monkeypatch):
    monkeypatch.setenv("WORKERS", "3")
    monkeypatch.setenv("OPTIONS", "timeout=0.5")
    message = refusal(address)
    assert "2 of 3 workers came within 0.5 s" in message
    assert "WORKERS=2" in message and "dask worker tcp://" in message


def test_an_address_without_a_scheduler_is_one_error_that_says_why(capfd):
    message = refusal("tcp://127.0.0.1")
    assert "CLUSTER=tcp://127.0.0.1: no Dask scheduler could be reached" in message
    assert "missing port number" in message and "Is it running, is the port right" in message
    assert not capfd.readouterr().err


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_scheduler_that_is_killed_during_a_launch_is_called_lost_and_the_run_goes_on_elsewhere(
    client, cluster, tmp_path
):
    """The last test of this file: the others need that scheduler."""
    undisturbed = ddp.launch(client, faults.train, workers=2).result
    directory = tmp_path / "run"
    scheduler, address = cluster
    with ddp.connect(address) as other:
        with held_back(faults.train, tmp_path / "gate") as train:
            running = Background(ddp.launch, other, train, workers=2, directory=directory)
            wait_until(lambda: 6 in saved_steps(directory))
            scheduler.kill()
            with pytest.raises(ddp.SchedulerLost, match="connect again, and launch") as caught:
                running.outcome()
            assert caught.value.directory == directory
            assert_nothing_left(directory, ranks=2)
        unheard = answers_within(0.5, other, agent.ask_where, workers=["tcp://127.0.0.1:9"])
        assert unheard == {}, "asking through a lost scheduler is no error of its own"
    resumed = ddp.launch(client, faults.train, workers=2, directory=directory)
    assert torch.equal(resumed.result, undisturbed)
