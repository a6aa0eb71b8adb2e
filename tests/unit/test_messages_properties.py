"""Whatever a rank reports travels to the client, and back from its file, or is refused.

It comes unchanged; a refusal is an `Error`.
"""

import json
import math
from decimal import Decimal
from fractions import Fraction

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp_common import Error
from ddp_common.messages import Report
from ddp_common.ranks import reporting
from ddp_common.run.run_directory import RunDirectory

MODEST = settings(max_examples=100, deadline=None, derandomize=True)

finite = st.floats(allow_nan=False, allow_infinity=False)
scalars = st.one_of(
    st.booleans(),
    st.integers(),
    st.floats(),
    st.decimals(),
    st.fractions(),
    st.floats(width=32).map(np.float32),
    st.floats(width=16).map(np.float16),
    st.integers(-(2**63), 2**63 - 1).map(np.int64),
    st.integers(0, 2**64 - 1).map(np.uint64),
    st.booleans().map(np.bool_),
    st.floats(width=32).map(torch.tensor),
    st.integers(-(2**63), 2**63 - 1).map(torch.tensor),
    st.booleans().map(torch.tensor),
    st.floats(width=16).map(lambda value: torch.tensor([[value]], dtype=torch.bfloat16)),
)
others = st.one_of(
    st.none(),
    st.text(),
    st.binary(),
    st.complex_numbers(),
    st.lists(st.integers(), max_size=3),
    st.sampled_from(
        [
            torch.empty(1, device="meta"),
            torch.zeros(2),
            np.zeros(()),
            np.zeros(1),
            np.array("x"),
            np.array(None, dtype=object),
            np.datetime64("2026-01-01"),
            np.timedelta64(3, "s"),
            object(),
            float,
            Fraction(10**400),
            10**5000,
            Decimal("sNaN"),
            torch.zeros(1).to_sparse(),
            torch.tensor([1j]),
        ]
    ),
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
        reporting.report(**values)
    finally:
        finish()
        reporting.stop()
    return next(message.values for message in messages if isinstance(message, Report))


def same(one, other):
    return one == other or (math.isnan(one) and math.isnan(other))


@MODEST
@given(st.dictionaries(names, st.one_of(scalars, others), max_size=4))
def test_a_report_travels_or_is_refused(values):
    try:
        arrived = delivered(values)
    except Error as refused:
        assert "report(" in str(refused)
        return
    assert set(values) <= set(arrived)
    for name in values:
        assert type(arrived[name]) in (bool, int, float)
    travelled = msgpack.unpackb(msgpack.packb(arrived), strict_map_key=False)
    for name, value in travelled.items():
        assert same(value, arrived[name])


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


@pytest.mark.parametrize("name", ["rank", "time", "event"])
def test_the_columns_that_every_record_has_cannot_be_overwritten(name):
    with pytest.raises(Error, match="Choose another name"):
        reporting.report(**{name: 1.0})


@MODEST
@given(st.lists(st.text(), max_size=5))
def test_any_text_can_be_logged(tmp_path_factory, lines):
    directory = RunDirectory(tmp_path_factory.mktemp("run"))
    for line in lines:
        directory.log(line)
    directory.close()
    assert (directory.path / "log.txt").read_text(encoding="utf-8", errors="surrogatepass").count(
        "\n"
    ) >= len(lines)
    for line in (directory.path / "metrics.jsonl").read_text().splitlines():
        json.loads(line)
