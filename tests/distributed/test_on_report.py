"""`on_report`: called with every record while training runs; what it raises reaches the caller."""

import os
import subprocess
import sys
import threading
import time

import cloudpickle
import pytest
from processes import PATIENCE, Background, log_of

import ddp_common as ddp
from ddp_common.teaching import faults

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def wait_for(path):
    deadline = time.monotonic() + PATIENCE
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not come"
        time.sleep(0.01)


def report_some(count):
    for number in range(count):
        ddp.report(number=number)


def test_every_record_is_told_once_in_order_in_the_callers_thread(client):
    told, threads = [], set()

    def listen(record):
        told.append(record)
        threads.add(threading.current_thread())

    run = ddp.launch(client, report_some, workers=2, on_report=listen, count=500)
    assert len(told) == 1000 and told == list(run.records)
    assert threads == {threading.current_thread()}


def test_a_record_is_told_while_its_rank_trains(client, tmp_path):
    def train(mark):
        ddp.report(loss=1.0)
        wait_for(mark)

    mark = tmp_path / "told"
    run = ddp.launch(client, train, workers=2, mark=mark, on_report=lambda record: mark.touch())
    assert len(run.records) == 2


def test_training_does_not_wait_for_it_and_no_record_is_lost(client, tmp_path):
    trained = tmp_path / "trained"

    def train(mark):
        report_some(3000)
        mark.touch()

    told = []

    def listen(record):
        if not told:
            wait_for(trained)  # this would never end if training waited
            time.sleep(1.2)
        told.append(record["number"])

    run = ddp.launch(client, train, workers=1, on_report=listen, mark=trained)
    assert told == list(range(3000))
    assert "on_report took" in log_of(run.directory)


class Pruned(Exception):
    """As a study of hyperparameters raises it."""


@pytest.mark.parametrize("kind", [Pruned, OSError, SystemExit])
def test_what_it_raises_ends_the_ranks_and_reaches_the_caller_as_itself(client, tmp_path, kind):
    error = kind("enough")

    def train():
        while True:
            ddp.report(loss=1.0)
            time.sleep(0.05)

    def listen(record):
        raise error

    with pytest.raises(kind) as raised:
        ddp.launch(
            client, train, workers=2, on_report=listen, restarts=3, directory=tmp_path / "run"
        )
    assert raised.value is error
    assert "launch with directory= to go on" in error.__notes__[0]
    assert "on_report raised" in (tmp_path / "run" / "log.txt").read_text()
    assert ddp.launch(client, lambda: "free", workers=2).result == "free"


def test_what_it_raises_keeps_its_cause(client):
    def train():
        while True:
            ddp.report(loss=1.0)
            time.sleep(0.05)

    cause = OSError("no server")

    def listen(record):
        raise Pruned("cannot be told") from cause

    with pytest.raises(Pruned) as raised:
        ddp.launch(client, train, workers=2, on_report=listen)
    assert raised.value.__cause__ is cause
    assert raised.value.__context__ is None


def test_a_rank_that_fails_has_been_heard_before_the_failure_is_raised(client):
    def train():
        report_some(50)
        raise ValueError("on purpose")

    told = []
    with pytest.raises(ddp.RankFailed, match="on purpose"):
        ddp.launch(client, train, workers=1, on_report=told.append)
    assert [record["number"] for record in told] == list(range(50))


def test_restarts_are_told_too_and_the_records_of_an_earlier_run_are_not(client, tmp_path):
    dies = faults.inject(faults.train, "raise", rank=0, step=8, mark=tmp_path / "mark")
    told = []
    options = {"workers": 2, "directory": tmp_path / "run"}
    run = ddp.launch(client, dies, restarts=1, on_report=told.append, **options)
    assert [record["event"] for record in told if "event" in record] == ["restart"]
    assert told == list(run.records)

    again = []
    more = ddp.launch(client, faults.train, epochs=3, on_report=again.append, **options)
    assert again == list(more.records)[len(told) :] and len(again) == 14


def test_a_launch_inside_is_refused(client):
    def listen(record):
        ddp.launch(client, report_some, workers=1, count=1)

    with pytest.raises(ddp.Error, match="from on_report of another launch"):
        ddp.launch(client, report_some, workers=1, on_report=listen, count=1)


def test_another_thread_may_launch_meanwhile(client):
    other = []

    def listen(record):
        if not other:
            launching = Background(ddp.launch, client, report_some, workers=1, count=2)
            other.append(launching.outcome())

    run = ddp.launch(client, report_some, workers=1, on_report=listen, count=1)
    assert len(run.records) == 1 and len(other[0].records) == 2


def test_what_cannot_be_called_is_refused(client):
    with pytest.raises(ddp.Error, match="a function of one record"):
        ddp.launch(client, report_some, workers=1, on_report="print", count=1)


SCRIPT = """
import ddp_common as ddp

def train():
    ddp.report(number=ddp.rank())

with ddp.connect() as client:
    ddp.launch(client, train, on_report=lambda record: print("told", record["number"], flush=True))
"""


def test_under_torchrun_rank_0_is_told_of_all_ranks(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    command = "-m torch.distributed.run --standalone --nproc-per-node 2 script.py".split()
    done = subprocess.run(
        [sys.executable, *command],
        cwd=tmp_path,
        env=os.environ | {"RUNS": str(tmp_path / "runs")},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["told 0", "told 1"]
