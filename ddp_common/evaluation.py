"""Which samples each rank evaluates: each exactly once, in order and without padding."""

from collections.abc import Iterator

import numpy as np

from ddp_common import reporting
from ddp_common.errors import Error
from ddp_common.rendezvous import rank, world_size
from ddp_common.rows import Partitioned
from ddp_common.sampling import whole_or_none


class EvalSampler:
    """Deals each of `length` samples to exactly one rank, in order and without padding.

    `length` may be a table, as for an `ElasticSampler`: each rank is dealt all rows that it holds.
    A rank may get none. Iterating yields lists of at most `batch_size` indices. Evaluate on
    `model.module`: a forward pass of the DDP wrapper may wait for ranks that have fewer batches.
    """

    def __init__(self, length: int | Partitioned, batch_size: int):
        self.batch_size = batch_size
        self.indices: range | np.ndarray
        if not whole_or_none(batch_size):
            raise Error(f"EvalSampler needs a whole batch size of at least 1, not {batch_size!r}.")
        if isinstance(length, Partitioned):
            self.indices = length.rows
        elif whole_or_none(length) is None:
            raise Error(f"EvalSampler takes the number of samples, or a table, not {length!r}.")
        else:
            self.indices = range(rank(), length, world_size())

    def __len__(self) -> int:
        """Batches of this rank."""
        return -(-len(self.indices) // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        for start in range(0, len(self.indices), self.batch_size):
            reporting.made_progress()
            yield np.asarray(self.indices[start : start + self.batch_size]).tolist()
