"""Several launches on one cluster at once: each has its workers to itself, or waits for them."""

import sys
import time

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from distributed import Client
from processes import Background, assert_nothing_left, log_of, wait_until, workers_of

import ddp_common as ddp

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def work(number, gate):
    """Says that it runs, works until the file `gate` is there, returns the sum over the ranks."""
    print("ready", flush=True)
    total, asked_to_end = torch.zeros(2)
    # the ranks decide together: one may see the file a step before the other
    while not asked_to_end:
        time.sleep(0.01)
        total_and_gate = torch.tensor([float(number + ddp.rank()), float(gate.exists())])
        dist.all_reduce(total_and_gate)
        total, asked_to_end = total_and_gate
    ddp.report(number=number)
    return int(total)


class Launches:
    """Starts launches that work until they are told to end."""

    def __init__(self, folder):
        self.folder, self.running = folder, {}

    def start(self, client, number, ranks):
        self.running[number] = Background(
            ddp.launch,
            client,
            work,
            workers=ranks,
            directory=self.directory(number),
            number=number,
            gate=self.gate(number),
        )

    def directory(self, number):
        return self.folder / f"run-{number}"

    def gate(self, number):
        return self.folder / f"gate-{number}"

    def works(self, number, ranks=2):
        """Whether all ranks work. Raises what the launch raised, if it has ended without that."""
        if not self.running[number].is_running():
            self.running[number].outcome()
        return log_of(self.directory(number)).count("ready") == ranks

    def let_end(self, number):
        self.gate(number).touch()
        return self.running[number].outcome()


@pytest.fixture
def launches(client, tmp_path):
    launches = Launches(tmp_path)
    yield launches
    for number, running in launches.running.items():
        launches.gate(number).touch()
        wait_until(lambda: not running.is_running())


def test_two_launches_of_two_clients_at_once_have_workers_of_their_own(client, launches):
    with Client(client.scheduler.address, security=client.security) as other:
        launches.start(client, 10, ranks=2)
        launches.start(other, 20, ranks=2)
        wait_until(lambda: launches.works(10) and launches.works(20))
        runs = [launches.let_end(10), launches.let_end(20)]
    assert not set(workers_of(runs[0].directory)) & set(workers_of(runs[1].directory))
    assert [run.result for run in runs] == [10 + 11, 20 + 21]
    assert [set(run.metrics["number"]) for run in runs] == [{10}, {20}]


def test_a_third_launch_waits_for_free_workers_and_then_runs(client, launches):
    for number in (10, 20):
        launches.start(client, number, ranks=2)
        wait_until(lambda: launches.works(number))
    launches.start(client, 30, ranks=2)
    # where it did not wait it would take a worker of those, and they would not end
    assert launches.running[30].is_running() and not launches.works(30)
    launches.let_end(20)
    wait_until(lambda: launches.works(30))
    assert launches.running[10].is_running()
    assert launches.let_end(30).result == 30 + 31
    assert launches.let_end(10).result == 10 + 11


def test_waiting_for_workers_ends_with_an_error_that_says_who_has_them(client, launches):
    launches.start(client, 10, ranks=3)
    wait_until(lambda: launches.works(10, ranks=3))
    with pytest.raises(
        ddp.Error, match="the cluster has 4 workers, of which 3 run other launches"
    ):
        ddp.launch(client, ddp.rank, workers=2, timeout=0.3)
    assert launches.let_end(10).result == 10 + 11 + 12


def test_a_failure_does_not_disturb_the_launch_beside_it(client, launches):
    launches.start(client, 10, ranks=2)
    wait_until(lambda: launches.works(10))
    with pytest.raises(ddp.RankFailed, match="ZeroDivisionError") as caught:
        ddp.launch(client, lambda: 1 / 0, workers=2)
    assert_nothing_left(caught.value.directory, ranks=2)
    assert launches.running[10].is_running()
    assert launches.let_end(10).result == 10 + 11
