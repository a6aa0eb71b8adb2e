"""What a rank reports travels to the client, and back from its file, or is refused in words."""

import enum
import math

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_ranks.messages import Report
from dask_ranks.rank import reporter
from dask_ranks.run.run_directory import RunDirectory
from ddp_common import Error, report, reporting, save_file


class Level(enum.IntEnum):
    LOW = 1


class Metric(enum.StrEnum):
    LOSS = "loss"


MODEST = settings(max_examples=50, deadline=None, derandomize=True)
NO_SCALARS = [None, "1.0", b"1", 1j, [1], object(), float, 10**5000]
NO_SCALARS += [np.zeros(3), np.array("x"), np.datetime64("2026-01-01"), np.array([1j])]
NO_SCALARS += [torch.zeros(2), torch.empty(1, device="meta"), torch.tensor([1j])]

scalars = st.one_of(
    st.booleans(),
    st.integers(),
    st.floats(),
    st.floats(width=32).map(np.float32),
    st.integers(-(2**63), 2**63 - 1).map(np.int64),
    st.integers(-(2**63), 2**63 - 1).map(lambda value: np.array([[value]])),
    st.floats().map(np.array),
    st.sampled_from(Level),
    st.floats(width=32).map(torch.tensor),
    st.floats(width=32).map(lambda value: torch.tensor([[value]], requires_grad=True)),
    st.floats(width=16).map(lambda value: torch.tensor(value, dtype=torch.bfloat16)),
)
names = st.one_of(st.text(min_size=1, max_size=20), st.sampled_from(Metric))


@pytest.fixture(autouse=True)
def nobody_listens():
    reporter.stop()


def received(act):
    """The messages that the agent gets of what `act` does."""
    messages = []
    own = reporter.Reporter(messages.append)
    try:
        act()
    finally:
        own.finish()
    return messages


def delivered(values):
    """What the agent gets of a report."""
    (record,) = received(lambda: report(**values))
    return record.values


def same(one, other):
    return one == other or (math.isnan(one) and math.isnan(other))


@MODEST
@given(st.dictionaries(names, st.one_of(scalars, st.sampled_from(NO_SCALARS)), max_size=4))
def test_a_report_travels_or_is_refused(values):
    try:
        arrived = delivered(values)
    except Error as refused:
        assert "report(" in str(refused)
        return
    assert set(values) <= set(arrived)
    assert {type(name) for name in arrived} == {str}
    travelled = msgpack.unpackb(msgpack.packb(arrived), strict_map_key=False)
    for name in values:
        assert type(arrived[name]) in (bool, int, float)
        assert same(travelled[name], arrived[name])


@MODEST
@given(st.lists(st.dictionaries(names, scalars, min_size=1, max_size=3), min_size=1, max_size=5))
def test_what_the_client_writes_is_what_it_reads_when_the_run_goes_on(tmp_path_factory, reports):
    directory = RunDirectory(tmp_path_factory.mktemp("run"))
    for number, values in enumerate(reports):
        try:
            directory.record(number, delivered(values))
        except Error:
            continue
    directory.close()
    again = RunDirectory(directory.path)
    again.close()
    assert len(again.records) == len(directory.records)
    for before, after in zip(directory.records, again.records):
        assert list(before) == list(after)
        assert all(same(before[name], after[name]) for name in before)


def test_a_column_that_every_record_has_is_refused():
    with pytest.raises(Error, match="Choose another name"):
        report(rank=1.0)


def test_a_report_that_fails_on_its_way_is_told_once_and_later_ones_arrive(capsys):
    def act():
        reporting.post(lambda: Report({"loss": 1 / 0}))
        report(loss=1.0)
        reporting.post(lambda: Report({"loss": 1 / 0}))
        report(loss=2.0)

    assert [message.values["loss"] for message in received(act)] == [1.0, 2.0]
    said = capsys.readouterr().err
    assert said == (
        "Warning: not all that this rank reports arrives: ZeroDivisionError: division by zero\n"
    )


@pytest.mark.parametrize("content", [5, [1, 2], None, 1.5])
def test_a_file_of_something_else_than_bytes_or_a_string_is_refused(content):
    with pytest.raises(Error, match=f"takes a string or bytes, not {type(content).__name__}"):
        save_file("x", content)


def test_alone_reports_and_files_are_checked_and_dropped(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert report(loss=1.0) is None
    assert save_file("samples/one.txt", "text") is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "metrics-1.jsonl", "checkpoints/step-00000099.pt"]
)
def test_a_name_that_the_run_itself_uses_is_refused(name):
    with pytest.raises(Error, match=f"{name}.* would overwrite what the run itself keeps"):
        save_file(name, b"x")
