"""`on_report`: called with every record while training runs; what it raises reaches the caller."""

import sys
import threading
import time

import cloudpickle
import pytest
from processes import wait_until

import ddp_common as ddp

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def report_some(count):
    for number in range(count):
        ddp.report(number=number)


def test_every_record_is_told_once_in_order_in_the_callers_thread(client):
    told, threads = [], set()

    def listen(record):
        told.append(record)
        threads.add(threading.current_thread())

    run = ddp.launch(client, report_some, workers=2, on_report=listen, count=100)
    assert len(told) == 200 and told == list(run.records)
    assert threads == {threading.current_thread()}


def test_a_record_is_told_while_its_rank_trains(client, tmp_path):
    def train(mark):
        ddp.report(loss=1.0)
        wait_until(mark.exists)

    mark = tmp_path / "told"
    run = ddp.launch(client, train, workers=2, mark=mark, on_report=lambda record: mark.touch())
    assert len(run.records) == 2


def test_training_does_not_wait_for_it_and_no_record_is_lost(client, tmp_path):
    trained = tmp_path / "trained"

    def train(mark):
        report_some(1000)
        mark.touch()

    told = []

    def listen(record):
        if not told:
            wait_until(trained.exists)  # this would never end if training waited
        told.append(record["number"])

    ddp.launch(client, train, workers=1, on_report=listen, mark=trained)
    assert told == list(range(1000))


class Pruned(Exception):
    """As a study of hyperparameters raises it."""


def test_what_it_raises_ends_the_ranks_and_reaches_the_caller_as_itself(client, tmp_path):
    error = Pruned("enough")

    def train():
        while True:
            ddp.report(loss=1.0)
            time.sleep(0.05)

    def listen(record):
        raise error

    with pytest.raises(Pruned) as raised:
        ddp.launch(
            client, train, workers=2, on_report=listen, restarts=3, directory=tmp_path / "run"
        )
    assert raised.value is error
    assert ddp.launch(client, lambda: "free", workers=2).result == "free"
