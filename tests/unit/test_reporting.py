"""What a rank reports travels to the client, and back from its file, or is refused in words."""

import math
from decimal import Decimal
from fractions import Fraction

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp_common import Error, report, save_file
from ddp_common.messages import Report
from ddp_common.ranks import reporting
from ddp_common.run.run_directory import RunDirectory

MODEST = settings(max_examples=50, deadline=None, derandomize=True)
NO_SCALARS = [None, "1.0", b"1", 1j, [1], object(), float, Fraction(10**400), 10**5000]
NO_SCALARS += [np.zeros(3), np.array("x"), np.datetime64("2026-01-01"), Decimal("sNaN")]
NO_SCALARS += [torch.zeros(2), torch.empty(1, device="meta"), torch.tensor([1j])]

scalars = st.one_of(
    st.booleans(),
    st.integers(),
    st.floats(),
    st.decimals(),
    st.fractions(),
    st.floats(width=32).map(np.float32),
    st.integers(-(2**63), 2**63 - 1).map(np.int64),
    st.floats(width=32).map(torch.tensor),
    st.floats(width=32).map(lambda value: torch.tensor([[value]], requires_grad=True)),
    st.floats(width=16).map(lambda value: torch.tensor(value, dtype=torch.bfloat16)),
)
names = st.text(min_size=1, max_size=20)


@pytest.fixture(autouse=True)
def no_outbox(monkeypatch):
    monkeypatch.setattr(reporting, "_outbox", None)


def delivered(values):
    """What the agent gets of a report."""
    messages = []
    finish = reporting.start(messages.append)
    try:
        report(**values)
    finally:
        finish()
        reporting.stop()
    return next(message.values for message in messages if isinstance(message, Report))


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


def test_the_columns_that_every_record_has_cannot_be_overwritten():
    with pytest.raises(Error, match="Choose another name"):
        report(rank=1.0)


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
