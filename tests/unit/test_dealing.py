"""How rows of partitions are dealt: the same batches wherever the partitions lie."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from dask_ranks.client.tables import assign
from ddp_common import ElasticSampler, Error
from ddp_common.dealing import PlacedDeal, Placement
from ddp_common.rows import Rows

UNEVEN = [1000, 1000, 400, 0, 37, 5000]


def placements(lengths, ranks, seed):
    """The placement of each rank that has rows, when the partitions lie anywhere."""
    anywhere = np.random.default_rng(seed).integers(ranks, size=len(lengths))
    held = [np.flatnonzero(anywhere == rank) for rank in range(ranks)]
    return [Placement(lengths, each) for each in held if np.take(lengths, each).sum()]


def batches(lengths, ranks, batch_size, *, where=0, seed=0, epoch=0, shuffle=True):
    """Every global batch, as a sorted list of rows, from what each rank has of it."""
    deals = [
        PlacedDeal(placement, batch_size, seed, epoch, shuffle)
        for placement in placements(lengths, ranks, where)
    ]
    found = []
    for step in range(-(-sum(lengths) // batch_size)):
        shares = [deal.share(step) for deal in deals if deal.samples(step)]
        assert [deal.samples(step) for deal in deals if deal.samples(step)] == list(
            map(len, shares)
        )
        found.append(sorted(row for share in shares for row in share))
    return found


@given(
    lengths=some.lists(some.integers(0, 40), min_size=1, max_size=8).filter(sum),
    ranks=some.integers(1, 5),
    where=some.integers(0, 1000),
    batch_size=some.integers(1, 50),
    shuffle=some.booleans(),
)
def test_batches_are_exact_and_the_same_wherever_partitions_lie(
    lengths, ranks, where, batch_size, shuffle
):
    alone = batches(lengths, 1, batch_size, shuffle=shuffle)
    assert sorted(row for batch in alone for row in batch) == list(range(sum(lengths)))
    assert {len(batch) for batch in alone[:-1]} <= {batch_size}
    assert batches(lengths, ranks, batch_size, where=where, shuffle=shuffle) == alone


def test_every_partition_gives_each_batch_its_share_to_about_one_row():
    starts = np.cumsum(UNEVEN)
    for batch in batches(UNEVEN, 1, 256)[:-1]:
        counts = np.bincount(np.searchsorted(starts, batch, side="right"), minlength=len(UNEVEN))
        expected = 256 * np.array(UNEVEN) / sum(UNEVEN)
        assert np.abs(counts - expected).max() < 2


def test_seed_and_epoch_change_the_order():
    orders = {
        tuple(map(tuple, batches(UNEVEN, 1, 256, seed=seed, epoch=epoch)))
        for seed in (0, 1)
        for epoch in (0, 1)
    }
    assert len(orders) == 4


def test_a_rank_without_a_row_of_the_batch_takes_part_with_one_that_it_has():
    placement = Placement([90, 0, 10], [1, 2])
    deal = PlacedDeal(placement, 3, seed=0, epoch=0, shuffle=True)
    idle = [step for step in range(34) if not deal.samples(step)]
    assert idle
    assert {tuple(deal.share(step)) for step in idle} == {(90,)}


def table(lengths):
    starts = np.cumsum(lengths) - lengths
    parts = {
        number: np.arange(start, start + length)
        for number, (start, length) in enumerate(zip(starts, lengths))
    }
    return Rows("table", Placement(lengths, list(parts)), parts)


def test_a_position_in_other_partitions_is_refused():
    saved = ElasticSampler(table(UNEVEN), 256).state_dict()
    with pytest.raises(Error, match="partitions"):
        ElasticSampler(table([1000, 1000, 400, 37, 0, 5000]), 256).load_state_dict(saved)


@pytest.mark.parametrize(
    ("lengths", "lies_on", "goes_to"),
    [
        ([5] * 6, [0, 1, 0, 1, 0, 1], [0, 1, 0, 1, 0, 1]),
        ([5, 5, 5], [1, 1, 0], [1, 1, 0]),  # another one would be as full
        ([5] * 4, [0] * 4, [0, 0, 1, 1]),
        ([10, 9, 1, 2, 2, 2], [0, 0, 0, 1, 1, 1], [0, 1, 0, 1, 1, 1]),
        ([90, 5, 5], [0, 0, 1], [0, 1, 1]),
        ([9, 8, 7, 0], [None] * 4, [0, 1, 1, 0]),
    ],
)
def test_partitions_stay_where_they_lie_until_that_rank_has_its_share(lengths, lies_on, goes_to):
    assert assign(lengths, lies_on, 2) == goes_to
