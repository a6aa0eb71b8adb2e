"""Records kept in columns are what was appended."""

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
