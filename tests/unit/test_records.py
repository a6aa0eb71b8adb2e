"""Records kept in columns are what was appended."""

import gc
import math
import tracemalloc

import pandas
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ddp_common.run.records import Records

QUIET = settings(deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
VALUES = st.one_of(
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.sampled_from(["", "restart", "nan", "ä"]),
    st.none(),
    st.lists(st.integers(), max_size=2),
)
RECORDS = st.lists(
    st.dictionaries(st.sampled_from(["rank", "time", "loss", "event", "x"]), VALUES, max_size=5),
    max_size=30,
)


@settings(QUIET, max_examples=200)
@given(RECORDS, st.slices(30))
def test_what_was_appended_comes_back_equal_of_the_same_types_and_in_its_order(wanted, some):
    records = Records(wanted)
    assert len(records) == len(wanted) and list(records) == wanted and records == wanted
    assert [[(name, type(value)) for name, value in record.items()] for record in records] == [
        [(name, type(value)) for name, value in record.items()] for record in wanted
    ]
    assert records[some] == wanted[some] and records + [{}] == wanted + [{}]
    if wanted:
        assert records[-1] == wanted[-1] and wanted[0] in records
    with pytest.raises(IndexError):
        records[len(wanted)]


NUMBERS = st.fixed_dictionaries(
    {"rank": st.integers(0, 3), "time": st.floats(0, 2e9)},
    optional={
        "step": st.integers(0, 10**6),
        "loss": st.floats(),
        "ok": st.booleans(),
        "event": st.sampled_from(["restart", "other"]),
    },
)


@settings(QUIET, max_examples=100)
@given(st.lists(NUMBERS, max_size=30))
def test_the_frame_is_the_one_that_pandas_makes_of_the_dicts(wanted):
    pandas.testing.assert_frame_equal(Records(wanted).frame(), pandas.DataFrame(wanted))


def test_a_report_takes_a_fifth_of_the_memory_of_a_dict():
    def reports():
        return (
            {
                "rank": 0,
                "time": 1e9 + step,
                "epoch": 1000 + step,
                "step": 1000 + step,
                "samples": 1000 + step,
                "loss": step / 3,
            }
            for step in range(20_000)
        )

    sizes = []
    for kind in (list, Records):
        gc.collect()
        tracemalloc.start()
        kept = kind(reports())
        sizes.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
        assert len(kept) == 20_000
    assert sizes[1] < sizes[0] / 5


def test_numbers_that_are_none_are_kept():
    losses = [record["loss"] for record in Records([{"loss": math.nan}, {"loss": -math.inf}])]
    assert math.isnan(losses[0]) and losses[1] == -math.inf
