"""A table as a rank sees it: rows by their number, tensors, and what is refused."""

import datetime
import io
import mmap
import os
import pickle
from multiprocessing.connection import Connection

import numpy as np
import pandas as pd
import pytest
import torch

from ddp_common import DataLoader, ElasticSampler, Error, EvalSampler, Rows
from ddp_common.ranks import handover
from ddp_common.ranks.dealing import Placement
from ddp_common.worker.handover import _Pickler

LENGTHS = [4, 3, 0, 5, 6]
FRAME = pd.DataFrame(
    {
        "number": np.arange(18),
        "share": np.arange(18) / 2,
        "flag": np.arange(18) % 2 == 0,
        "kind": pd.Categorical([*"abc"] * 6),
        "text": [f"row {number}" for number in range(18)],
    },
    index=np.arange(100, 118),
)


def split(whole):
    bounds = np.cumsum([0, *LENGTHS])
    return [whole[start:end] for start, end in zip(bounds, bounds[1:])]


def table(whole, held=(0, 1, 2, 3, 4), **options):
    parts = dict(enumerate(split(whole)))
    placement = Placement(LENGTHS, held, options.pop("row", None))
    return Rows("table", placement, {number: parts[number] for number in held}, **options)


@pytest.mark.parametrize("rows", [[0], [17, 0, 9], [3, 4, 3], [], range(18)], ids=str)
def test_rows_are_taken_by_their_numbers_in_that_order(rows):
    rows = list(rows)
    pd.testing.assert_frame_equal(table(FRAME).take(rows), FRAME.iloc[rows])
    pd.testing.assert_series_equal(table(FRAME.text).take(rows), FRAME.text.iloc[rows])
    array = np.arange(36).reshape(18, 2)
    np.testing.assert_array_equal(table(array).take(rows), array[rows])
    samples = FRAME.text.to_list()
    assert table(samples).take(rows) == [samples[row] for row in rows]


def test_a_rank_has_its_own_partitions_and_counts_the_rows_of_all():
    rows = table(FRAME, held=(1, 2, 3))
    assert len(rows) == 18
    assert rows.rows.tolist() == [4, 5, 6, 7, 8, 9, 10, 11]
    assert [len(part) for part in rows.parts] == [3, 0, 5]
    pd.testing.assert_frame_equal(rows.take(rows.rows), FRAME.iloc[4:12])
    assert rows[7].text == "row 7"


@pytest.mark.parametrize("row", [3, 12])
def test_a_row_of_another_rank_is_refused(row):
    with pytest.raises(Error, match=rf"Row {row} .* not on this rank: .* partitions 1, 2, 3\."):
        table(FRAME, held=(1, 2, 3)).take([5, row])


@pytest.mark.parametrize("row", [-1, 18])
def test_a_row_that_is_none_is_refused(row):
    with pytest.raises(Error, match=f"has rows 0 to 17, and no row {row}"):
        table(FRAME)[row]


def test_a_rank_without_rows_has_one_of_another_rank_to_take_part_with():
    rows = table(FRAME, held=(2,), borrowed=FRAME.iloc[4:5], row=4)
    assert (len(rows), rows.rows.tolist()) == (18, [])
    assert rows.take([]).columns.tolist() == FRAME.columns.tolist()
    batches = list(ElasticSampler(rows, 6))
    assert batches == [[4]] * 3
    assert rows.take(batches[0]).text.to_list() == ["row 4"]
    assert rows.tensors("number").take([4]).tolist() == [4]
    assert list(EvalSampler(rows, 5)) == []


def test_evaluation_takes_every_row_once():
    shares = [EvalSampler(table(FRAME, held=held), 4) for held in ((0, 3), (1, 2, 4))]
    assert [len(share) for share in shares] == [3, 3]
    dealt = [batch for share in shares for batch in share]
    assert max(map(len, dealt)) == 4
    assert sorted(row for batch in dealt for row in batch) == list(range(18))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_gives_what_take_gives(workers):
    def batches(data):
        sampler = ElasticSampler(data, 5)
        return list(DataLoader(data, batch_sampler=sampler, num_workers=workers))

    dealt = list(ElasticSampler(table(FRAME), 5))
    for rows, frame in zip(dealt, batches(table(FRAME))):
        pd.testing.assert_frame_equal(frame, FRAME.iloc[rows])
    array = np.arange(36).reshape(18, 2)
    for rows, tensor in zip(dealt, batches(table(array))):
        assert tensor.tolist() == array[rows].tolist()
    for rows, samples in zip(dealt, batches(table(FRAME.share.to_list()))):
        assert samples.tolist() == FRAME.share.iloc[rows].to_list()
    for rows, (x, y) in zip(dealt, batches(table(FRAME).tensors(["share", "flag"], "number"))):
        assert x.tolist() == FRAME[["share", "flag"]].iloc[rows].astype(float).values.tolist()
        assert y.tolist() == rows


def test_a_function_that_collates_gets_the_frame_in_a_list():
    loader = DataLoader(
        table(FRAME),
        batch_sampler=ElasticSampler(table(FRAME), 9),
        collate_fn=lambda frames: frames[0].number.sum(),
    )
    assert sum(loader) == FRAME.number.sum()


def test_tensors_have_the_types_that_losses_want():
    x, y, kind, flag = table(FRAME).tensors(["share", "number"], "number", "kind", "flag").tensors
    assert (x.dtype, tuple(x.shape)) == (torch.float32, (18, 2))
    assert (y.dtype, y.tolist()) == (torch.int64, list(range(18)))
    assert (kind.dtype, kind.tolist()) == (torch.int64, [0, 1, 2] * 6)
    assert flag.dtype == torch.float32
    assert table(FRAME[["number"]]).tensors().take([3]).tolist() == [[3]]
    assert table(np.ones((18, 2, 2))).tensors().take([3, 1]).shape == (2, 2, 2)
    (one,) = table(FRAME.astype({"number": "Int64"})).tensors("number").tensors
    assert one.dtype == torch.int64


def test_missing_values_are_counted_by_column():
    frame = FRAME.copy()
    frame.loc[103:105, "share"] = np.nan
    frame["number"] = frame.number.astype("Int64")
    frame.loc[117, "number"] = pd.NA
    frame.loc[100, "kind"] = np.nan
    with pytest.raises(Error, match=r"share \(3\), number \(1\), kind \(1\), of 18 rows"):
        table(frame).tensors(["share", "number", "kind"])


@pytest.mark.parametrize(
    "values",
    [
        [f"row {number}" for number in range(18)],
        [object()] * 18,
        [datetime.datetime(2013, 1, 1)] * 18,
        pd.array(["a"] * 18, dtype="string[python]"),
    ],
    ids=["texts", "objects", "dates", "strings"],
)
def test_columns_that_are_no_numbers_are_named(values):
    with pytest.raises(Error, match=r"no numbers: odd \(.*Make categories"):
        table(FRAME.assign(odd=values)).tensors(["odd", "share"])


@pytest.mark.parametrize(
    ("whole", "columns", "words"),
    [
        (FRAME, ["shares"], "no column shares; it has number, share"),
        (FRAME, [["number", "shares"]], "no column shares"),
        (np.ones(18), ["share"], "no columns"),
        (FRAME.text.to_list(), [], "are lists"),
    ],
    ids=["name", "name in a list", "array", "list"],
)
def test_columns_that_are_not_there_are_refused(whole, columns, words):
    with pytest.raises(Error, match=words):
        table(whole).tensors(*columns)


def test_columns_on_which_partitions_differ_are_refused():
    rows = table(FRAME, uneven={"kind": "3 categories in partition 0, object in partition 3"})
    rows.tensors("number")
    with pytest.raises(Error, match="do not agree .*kind: 3 categories in partition 0"):
        rows.tensors("number", "kind")


# Handing over


def handed_over(*parts):
    """What arrives in a rank of tables with one partition each; and how large their file was."""
    tables = [handover.Table("table", [len(part)], {0: part}) for part in parts]
    with open(os.memfd_create("test"), "w+b") as file:
        size = handover.write(tables, file, _Pickler)
        handover.receive(Connection(os.dup(file.fileno())))
    return [handover.given(number).parts[0] for number in range(len(parts))], size


def test_what_is_handed_over_arrives_as_it_was_and_may_be_written_into():
    array = np.arange(100_000).reshape(1000, 100)
    (frame, same, view, texts), size = handed_over(FRAME, array, array[:, ::2], ["a", {"b": 1}])
    pd.testing.assert_frame_equal(frame, FRAME)
    np.testing.assert_array_equal(same, array)
    np.testing.assert_array_equal(view, array[:, ::2])
    assert texts == ["a", {"b": 1}]
    assert size < 1.1 * 1.5 * array.nbytes
    same += 1
    frame["number"] += 1
    np.testing.assert_array_equal(array[0, :3], [0, 1, 2])


def test_arrays_lie_in_the_memory_that_was_handed_over():
    (array, view), _ = handed_over(np.ones((1000, 10)), np.ones((1000, 20))[:, ::2])
    for each in (array, view):
        base = each
        while not isinstance(base, memoryview):
            base = base.base
        assert isinstance(base.obj, mmap.mmap)
        assert each.ctypes.data % handover.ALIGNMENT == 0


def test_a_stand_in_becomes_the_table_wherever_it_stands():
    handed_over(FRAME, np.ones(3))
    arguments = {"data": [handover.StandIn(1), (handover.StandIn(0), 5)]}
    (array, (frame, five)) = pickle.load(io.BytesIO(pickle.dumps(arguments)))["data"]
    assert (len(array), len(frame), five) == (3, 18, 5)
