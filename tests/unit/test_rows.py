"""A table as a rank sees it: rows by their number, tensors, and what is refused."""

import os

import numpy as np
import pandas as pd
import pytest
import torch

from dask_ranks import handover
from dask_ranks.rank import life
from ddp_common import DataLoader, ElasticSampler, Error, EvalSampler, Rows
from ddp_common.dealing import Placement

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


def table(whole, held=(0, 1, 2, 3, 4)):
    return Rows("table", Placement(LENGTHS, held), dict(enumerate(split(whole))))


@pytest.mark.parametrize("rows", [[17, 0, 9], [3, 4, 3], []], ids=str)
def test_rows_are_taken_by_their_numbers_in_that_order(rows):
    pd.testing.assert_frame_equal(table(FRAME).take(rows), FRAME.iloc[rows])
    pd.testing.assert_series_equal(table(FRAME.text).take(rows), FRAME.text.iloc[rows])
    array = np.arange(36).reshape(18, 2)
    np.testing.assert_array_equal(table(array).take(rows), array[rows])
    masked = np.ma.masked_equal(array, 19)
    assert str(table(masked).take(rows)) == str(masked[rows])
    samples = FRAME.text.to_list()
    assert table(samples).take(rows) == [samples[row] for row in rows]


@pytest.mark.parametrize(
    ("row", "words"),
    [(12, "Row 12 .* not on this rank. Take"), (18, "and no row 18")],
)
def test_a_row_of_another_rank_and_one_that_is_none_are_refused(row, words):
    with pytest.raises(Error, match=words):
        table(FRAME, held=(1, 2, 3)).take([5, row])


def test_a_rank_has_its_own_partitions_and_counts_the_rows_of_all():
    rows = table(FRAME, held=(1, 2, 3))
    assert len(rows) == 18
    assert rows.rows.tolist() == [4, 5, 6, 7, 8, 9, 10, 11]
    assert [len(part) for part in rows.parts] == [3, 0, 5]
    pd.testing.assert_frame_equal(rows.take(rows.rows), FRAME.iloc[4:12])
    assert rows[7].text == "row 7"


def test_evaluation_takes_every_row_once():
    shares = [EvalSampler(table(FRAME, held=held), 4) for held in ((0, 3), (1, 2, 4))]
    assert [len(share) for share in shares] == [3, 3]
    dealt = [batch for share in shares for batch in share]
    assert max(map(len, dealt)) == 4
    assert sorted(row for batch in dealt for row in batch) == list(range(18))


def test_a_loader_gives_what_take_gives():
    def batches(data):
        sampler = ElasticSampler(data, 5)
        loader = DataLoader(data, batch_sampler=sampler, num_workers=1)
        return [batch for _ in sampler.epochs(1) for batch in loader]

    sampler = ElasticSampler(table(FRAME), 5)
    dealt = [rows for _ in sampler.epochs(1) for rows in sampler.batches()]
    for rows, frame in zip(dealt, batches(table(FRAME))):
        pd.testing.assert_frame_equal(frame, FRAME.iloc[rows])
    for rows, (x, _) in zip(dealt, batches(table(FRAME).tensors(pairs))):
        assert x[:, 1].tolist() == rows


def test_a_batch_with_masked_values_becomes_no_tensor():
    data = table(np.ma.masked_equal(np.arange(18), 7))
    with pytest.raises(Error, match="masked values.*da.ma.filled"):
        list(DataLoader(data, batch_sampler=EvalSampler(data, 5)))


# Tensors


def pairs(frame):
    """Two columns as one tensor, and the codes of a third one."""
    x = torch.tensor(frame[["share", "number"]].to_numpy("float32"))
    return x, torch.tensor(frame.kind.cat.codes.to_numpy("int64"))


def test_tensors_are_what_a_function_makes_of_each_partition():
    data = table(FRAME).tensors(pairs)
    x, kind = data.take([17, 3])
    assert x.tolist() == [FRAME.iloc[row][["share", "number"]].tolist() for row in (17, 3)]
    assert kind.tolist() == [2, 0] and data[4][1] == 1
    array = table(np.arange(36.0).reshape(18, 2)).tensors(torch.from_numpy)
    assert array.take([5, 4]).tolist() == [[10, 11], [8, 9]]
    texts = table(FRAME.text.to_list()).tensors(lambda part: torch.tensor([*map(len, part)]))
    assert texts.take([3, 12]).tolist() == [5, 6]


GAPS = FRAME.assign(share=FRAME.share.where(FRAME.share > 1))
MIXED = FRAME.number.astype("object")


@pytest.mark.parametrize(
    ("whole", "function", "words"),
    [
        (np.ma.masked_less(FRAME.share, 3), torch.from_numpy, "masked values.*da.ma.filled"),
        (FRAME, lambda part: part.share.to_numpy(), "gave a ndarray. Give a tensor, or a tuple"),
        (FRAME, lambda part: [torch.ones(len(part))], "gave a list. Give a tensor, or a tuple"),
        (FRAME, lambda part: torch.ones(2, len(part)), r"shape \(2, 4\) for the 4 rows of"),
        (FRAME, lambda part: torch.tensor(1.0), r"shape \(\) for the 4 rows of Partition 0"),
        (GAPS, pairs, "Partition 0 of 'table' has 3 NaN.*allow_nan=True"),
        (
            FRAME,
            lambda part: torch.ones(len(part), dtype=[torch.float32, torch.int64][len(part) % 2]),
            "different types or shapes: .*Name the type",
        ),
    ],
    ids=["masked", "array", "list", "other length", "a number", "NaN", "other types"],
)
def test_what_becomes_no_tensor_is_named(whole, function, words):
    with pytest.raises(Error, match=words):
        table(whole).tensors(function)


def test_nan_may_be_said_to_be_right():
    x, _ = table(GAPS).tensors(pairs, allow_nan=True).tensors
    assert int(x.isnan().sum()) == 3


# Handing over


def handed_over(*parts):
    """What arrives in a rank of tables with one partition each; and how large their file was."""
    tables = [handover.Table("table", [len(part)], {0: None}) for part in parts]
    with handover.hand_over(tables, [[part] for part in parts]) as file:
        size = os.fstat(file.fileno()).st_size
        handover.receive(os.dup(file.fileno()), life._rows_of)
    return [handover.given(number).parts[0] for number in range(len(parts))], size


def test_what_is_handed_over_arrives_as_it_was_once_and_may_be_written_into():
    array = np.arange(100_000).reshape(1000, 100)
    (frame, same, texts), size = handed_over(FRAME, array, ["a", {"b": 1}])
    pd.testing.assert_frame_equal(frame, FRAME)
    np.testing.assert_array_equal(same, array)
    assert texts == ["a", {"b": 1}] and size < 1.1 * array.nbytes
    same += 1
    np.testing.assert_array_equal(array[0, :3], [0, 1, 2])
