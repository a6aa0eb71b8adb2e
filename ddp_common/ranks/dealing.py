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

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from ddp_common.ranks.rendezvous import rank, world_size

WINDOW = 2**20  # rows that are sorted at once: it bounds the memory, 30 bytes for each


class Placement:
    """How many rows each partition of a table has, and which of the partitions this rank holds."""

    def __init__(self, lengths: ArrayLike, held: Sequence[int], borrowed: int | None = None):
        """`borrowed`: a row of another rank, of which a rank without any has a copy."""
        self.lengths = np.asarray(lengths, dtype=np.int64)
        self.held = sorted(int(number) for number in held)
        self.starts = np.cumsum(self.lengths) - self.lengths  # the first row of each partition
        self.total = int(self.lengths.sum())
        self.borrowed = borrowed

    @property
    def rows(self) -> np.ndarray:
        """The rows that this rank holds, in order: int64."""
        ranges = [self._range(number) for number in self.held]
        return np.concatenate([np.empty(0, np.int64), *ranges])

    def _range(self, number):
        start = self.starts[number]
        return np.arange(start, start + self.lengths[number])

    @property
    def idle_row(self) -> int:
        """The row with which this rank takes part, with weight 0, in a batch without its rows."""
        for number in self.held:
            if self.lengths[number]:
                return int(self.starts[number])
        assert self.borrowed is not None, "the launch gives a rank without rows a copy of one"
        return self.borrowed


class EvenDeal:
    """This rank's shares of an epoch whose samples every rank can read."""

    def __init__(self, order: range | np.ndarray, batch_size: int):
        self.length = len(order)
        self.batch_size = batch_size
        self.order: range | None = (
            None  # of the epoch, if that is a range, which need not be kept as numbers
        )
        # Else: its share of each full batch, one row per step
        self.shares = np.empty((0, 0), np.int64)
        self.ragged_share = np.empty(0, np.int64)  # and of the ragged last batch
        self._keep_share(order)

    def _keep_share(self, order):
        """Keep this rank's share of an epoch's order, and let go of the rest."""
        if isinstance(order, range):
            self.order = order
            return
        mine = rank()
        ranks = world_size()
        batch_size = self.batch_size
        in_full_batches = len(order) // batch_size * batch_size
        batches = order[:in_full_batches].reshape(-1, batch_size)
        has_a_share = mine < batch_size
        shares = batches[:, mine::ranks] if has_a_share else batches[:, :1]
        self.shares = np.ascontiguousarray(shares)
        self.ragged_share = _share_of(order[in_full_batches:], mine, ranks).copy()

    def share(self, step: int) -> list[int]:
        """This rank's samples of a step; one, to be given weight 0, if there is none for it."""
        if self.order is not None:
            first_sample = step * self.batch_size
            batch = self.order[first_sample : first_sample + self.batch_size]
            return list(_share_of(batch, rank(), world_size()))
        if step < len(self.shares):
            return self.shares[step].tolist()
        return self.ragged_share.tolist()

    def samples(self, step: int) -> int:
        """How many of a step's samples are this rank's, without one of weight 0."""
        batch_length = min(self.batch_size, self.length - step * self.batch_size)
        return len(range(rank(), batch_length, world_size()))


def _share_of(batch, mine, ranks):
    """This rank's part of a batch; one sample, to be given weight 0, if there is none for it."""
    share = batch[mine::ranks]
    return share if len(share) else batch[:1]


class PlacedDeal:
    """This rank's shares of an epoch whose rows lie in partitions."""

    def __init__(
        self, placement: Placement, batch_size: int, seed: int, epoch: int, shuffle: bool
    ):
        self.placement = placement
        steps = -(-placement.total // batch_size)
        if shuffle:
            self.rows, in_step = _at_random(placement, batch_size, steps, seed, epoch)
        else:
            self.rows = placement.rows
            in_step = np.bincount(self.rows // batch_size, minlength=steps)
        self.bounds = np.concatenate([[0], np.cumsum(in_step)])  # of each step's part of `rows`

    def share(self, step: int) -> list[int]:
        """This rank's rows of a step, sorted; one, to be given weight 0, if it holds none."""
        rows = np.sort(self.rows[self.bounds[step] : self.bounds[step + 1]])
        return rows.tolist() or [self.placement.idle_row]

    def samples(self, step: int) -> int:
        """How many of a step's rows are this rank's, without one of weight 0."""
        return int(self.bounds[step + 1] - self.bounds[step])


def _at_random(placement, batch_size, steps, seed, epoch):
    """The rows that this rank holds, in the order of the epoch, and how many are in each step.

    The keys of all rows are sorted, in windows, one after the other.
    """
    lengths = placement.lengths
    offsets = np.random.default_rng([seed, epoch]).random(len(lengths))
    is_held = np.zeros(len(lengths), dtype=bool)
    is_held[placement.held] = True
    in_step = np.zeros(steps, dtype=np.int64)
    mine = [np.empty(0, np.int32)]  # the partition of each row
    begin = np.zeros_like(lengths)
    done = 0  # rows
    windows = -(-placement.total // WINDOW)
    for number in range(1, windows + 1):
        end = lengths
        if number < windows:
            below = np.ceil(number / windows * lengths - offsets).astype(np.int64)
            end = np.clip(below, begin, lengths)
        partitions = _sorted_by_key(begin, end, offsets, lengths)
        places = np.flatnonzero(is_held[partitions])
        mine.append(partitions[places])
        in_step += np.bincount((done + places) // batch_size, minlength=steps)
        done += len(partitions)
        begin = end
    by_partition = np.argsort(np.concatenate(mine), kind="stable")
    rows = np.empty(len(by_partition), dtype=np.int64)
    orders = [_order_of(placement, number, seed, epoch) for number in placement.held]
    rows[by_partition] = np.concatenate([np.empty(0, np.int64), *orders])
    return rows, in_step


def _sorted_by_key(begin, end, offsets, lengths):
    """The partition of each row whose k is at least `begin` and below `end`, sorted by key."""
    counts = end - begin
    partitions = np.repeat(np.arange(len(lengths), dtype=np.int32), counts)
    first = np.cumsum(counts) - counts
    k = np.arange(len(partitions)) - np.repeat(first - begin, counts)
    keys = (k + offsets[partitions]) / lengths[partitions]
    return partitions[np.argsort(keys, kind="stable")]


def _order_of(placement, number, seed, epoch):
    """A partition's rows in its own permutation."""
    # One more than the number of the partition: numpy takes no notice of a 0 at the end
    generator = np.random.default_rng([seed, epoch, number + 1])
    return placement.starts[number] + generator.permutation(placement.lengths[number])
