"""Several launches on one cluster at once: each has its workers to itself, or waits for them."""

import contextlib
import sys
import threading
import time
import uuid

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from distributed import Client
from processes import Background, assert_nothing_left, log_of, wait_until, workers_of

import ddp_common as ddp
from ddp_common.client.inbox import open_inbox
from ddp_common.client.placement import claimed_workers, give_back

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


@pytest.mark.parametrize("clients", [1, 2], ids=["from_one_client", "from_two_clients"])
def test_two_launches_at_once_have_workers_of_their_own(client, launches, clients):
    with contextlib.ExitStack() as stack:
        other = client
        if clients == 2:
            second = Client(client.scheduler.address, security=client.security)
            other = stack.enter_context(second)
        launches.start(client, 10, ranks=2)
        launches.start(other, 20, ranks=2)
        wait_until(lambda: launches.works(10) and launches.works(20))
        runs = [launches.let_end(10), launches.let_end(20)]
    assert not set(workers_of(runs[0].directory)) & set(workers_of(runs[1].directory))
    assert [run.result for run in runs] == [10 + 11, 20 + 21]
    assert [set(run.metrics["number"]) for run in runs] == [{10}, {20}]


CLAIMS = 250  # of each thread; with the mistake below the four of them met after 60 to 360


def claim(client, attempt_id, workers=2, kept=None, timeout=60.0):
    """So many workers, as `launch` claims them."""
    return claimed_workers(
        client, attempt_id, workers, None, timeout, {}, set() if kept is None else kept
    )


def new_id():
    return uuid.uuid4().hex[:12]


@pytest.fixture
def threads_switch_often():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


def test_launches_in_several_threads_never_claim_one_worker_twice(client, threads_switch_often):
    """A launch told the scheduler which ones there are; another began before that was heard."""
    in_use, taken_twice = set(), []
    one_at_a_time = threading.Lock()

    def claim_again_and_again():
        for _ in range(CLAIMS):
            attempt_id = new_id()
            with open_inbox(client, attempt_id), claim(client, attempt_id, workers=1) as addresses:
                with one_at_a_time:
                    taken_twice.extend(in_use & set(addresses))
                    in_use.update(addresses)
                time.sleep(0.002)
                with one_at_a_time:
                    in_use.difference_update(addresses)

    threads = [Background(claim_again_and_again) for _ in range(4)]
    for thread in threads:
        thread.outcome()
    assert not taken_twice


def test_workers_that_a_growing_run_keeps_are_not_taken_by_a_launch_beside_it(client):
    grows, beside = new_id(), new_id()
    kept = set()
    with open_inbox(client, grows), claim(client, grows, kept=kept) as its_own:
        kept.add(grows)  # as `launch` does when its ranks have left to begin again with more
    try:
        with open_inbox(client, beside), claim(client, beside) as others:
            assert not set(its_own) & set(others)
            with pytest.raises(ddp.Error, match="of which 4 run other launches"):
                with claim(client, new_id(), timeout=0.1):
                    pass
            with claim(client, new_id(), kept=kept) as again:
                assert set(again) == set(its_own)
    finally:
        give_back(client, kept)


def test_workers_that_could_not_be_given_back_are_free_for_the_next_launch(tmp_path):
    """The run ended while its client had no connection, and Dask has connected it again."""
    with ddp.connect("local", workers=2) as client:
        with claim(client, new_id()):
            status, client.status = client.status, "connecting"
        client.status = status
        with claim(client, new_id(), timeout=0.1) as addresses:
            assert len(addresses) == 2


def test_they_are_free_for_another_client_while_the_scheduler_takes_the_first_for_alive():
    """Dask could not connect the first one again, but the scheduler had answered it."""
    with ddp.connect("local", workers=2) as client:
        with claim(client, new_id()):
            status, client.status = client.status, "connecting"
        with Client(client.cluster) as another:
            with claim(another, new_id(), timeout=0.1) as addresses:
                assert len(addresses) == 2
        client.status = status


def test_a_client_that_was_closed_in_the_middle_of_a_launch_loses_no_error():
    with ddp.connect("local", workers=2) as client:
        with pytest.raises(ZeroDivisionError):
            with claim(client, new_id()):
                client.close()
                1 / 0  # noqa: B018


def test_a_third_launch_waits_for_free_workers_and_then_runs(client, launches):
    for number in (10, 20):
        launches.start(client, number, ranks=2)
        wait_until(lambda: launches.works(number))
    launches.start(client, 30, ranks=2)
    time.sleep(0.5)
    assert launches.running[30].is_running() and not launches.works(30)
    launches.let_end(20)
    wait_until(lambda: launches.works(30))
    assert launches.running[10].is_running()
    assert launches.let_end(30).result == 30 + 31
    assert launches.let_end(10).result == 10 + 11


def test_a_launch_that_wants_all_workers_waits_for_a_smaller_one(client, launches):
    launches.start(client, 10, ranks=2)
    wait_until(lambda: launches.works(10))
    launches.start(client, 40, ranks=4)
    time.sleep(0.5)
    assert launches.running[40].is_running() and not launches.works(40, ranks=4)
    assert launches.let_end(10).result == 10 + 11
    wait_until(lambda: launches.works(40, ranks=4))
    assert launches.let_end(40).result == 40 + 41 + 42 + 43


def test_waiting_for_workers_ends_with_an_error_that_says_who_has_them(client, launches):
    launches.start(client, 10, ranks=3)
    wait_until(lambda: launches.works(10, ranks=3))
    with pytest.raises(ddp.Error, match="the cluster has 4, of which 3 run other launches"):
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


def test_the_same_launch_twice_is_two_runs(client):
    first, second = (ddp.launch(client, ddp.rank, workers=1) for _ in range(2))
    assert first.directory != second.directory
    assert_nothing_left(second.directory, ranks=1)
