"""Which rows of each global batch a rank gets: its share, and how it is found without asking.

Two deals. Where every rank can read every sample, rank r takes every world_size-th of a batch
(`EvenDeal`). Where rows lie in partitions, each on one rank, a rank takes those rows of a batch
that it holds (`PlacedDeal`). In both, what a batch consists of follows from the seed, the epoch
and the lengths alone: it is the same for any number of ranks, and wherever the partitions lie.

How rows of partitions are put in order: row number k of a partition's own permutation, of n rows,
gets the key (k + u) / n, where u is between 0 and 1, drawn once for the partition. Sorted by this
key, and cut into batches, every partition gives each batch its proportional share, to about one
row; and a batch takes from a partition a run of consecutive k. So a rank needs the permutations of
its own partitions only.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import ArrayLike

from ddp_common.rendezvous import rank, world_size


class Placement:
    """How many rows each partition of a table has, and which of the partitions this rank holds."""

    def __init__(self, lengths: ArrayLike, held: Iterable[int]):
        self.lengths = np.asarray(lengths, dtype=np.int64)
        self.held = sorted(int(number) for number in held)
        self.starts = np.cumsum(self.lengths) - self.lengths  # the first row of each partition
        self.total = int(self.lengths.sum())

    @property
    def rows(self) -> np.ndarray:
        """The rows that this rank holds, in order: int64."""
        ranges = [self.starts[each] + np.arange(self.lengths[each]) for each in self.held]
        return np.concatenate(ranges)


class EvenDeal:
    """This rank's shares of an epoch whose samples every rank can read."""

    def __init__(self, order: range | np.ndarray, batch_size: int):
        self.order = order  # of the whole epoch
        self.batch_size = batch_size

    def share(self, step: int) -> list[int]:
        """This rank's samples of a step; one, to be given weight 0, if there is none for it."""
        batch = self.order[step * self.batch_size : (step + 1) * self.batch_size]
        share = batch[rank() :: world_size()]
        return np.asarray(share if len(share) else batch[:1]).tolist()

    def samples(self, step: int) -> int:
        """How many of a step's samples are this rank's, without one of weight 0."""
        batch_length = min(self.batch_size, len(self.order) - step * self.batch_size)
        return len(range(rank(), batch_length, world_size()))


class PlacedDeal:
    """This rank's shares of an epoch whose rows lie in partitions."""

    def __init__(
        self, placement: Placement, batch_size: int, seed: int, epoch: int, shuffle: bool
    ):
        rows = placement.rows
        self.idle_row = int(rows[0])  # with which it takes part, with weight 0, without its rows
        places, self.rows = _at_random(placement, seed, epoch) if shuffle else (rows, rows)
        # Of each step's part of `rows`
        self.bounds = np.searchsorted(places, range(0, placement.total + batch_size, batch_size))

    def share(self, step: int) -> list[int]:
        """This rank's rows of a step, sorted; one, to be given weight 0, if it holds none."""
        rows = np.sort(self.rows[self.bounds[step] : self.bounds[step + 1]])
        return rows.tolist() or [self.idle_row]

    def samples(self, step: int) -> int:
        """How many of a step's rows are this rank's, without one of weight 0."""
        return int(self.bounds[step + 1] - self.bounds[step])


def _at_random(placement: Placement, seed: int, epoch: int) -> tuple[np.ndarray, np.ndarray]:
    """The places in the epoch of the rows that this rank holds, and these rows, in that order."""
    lengths, starts = placement.lengths, placement.starts
    offsets = np.random.default_rng([seed, epoch]).random(len(lengths))
    partitions = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)  # of every row
    k = np.arange(placement.total) - np.repeat(starts, lengths)
    keys = (k + offsets[partitions]) / lengths[partitions]
    partitions = partitions[np.argsort(keys, kind="stable")]
    places = np.flatnonzero(np.isin(partitions, placement.held))
    rows = np.empty(len(places), dtype=np.int64)
    orders = []
    for number in placement.held:
        # One more than its number: numpy takes no notice of a 0 at the end
        generator = np.random.default_rng([seed, epoch, number + 1])
        orders.append(starts[number] + generator.permutation(lengths[number]))
    rows[np.argsort(partitions[places], kind="stable")] = np.concatenate(orders)
    return places, rows
