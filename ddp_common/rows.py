"""A table that Dask prepared, as a rank sees it: the partitions that lie on its worker.

A Dask DataFrame, Array or Bag, or a list of futures, that was an argument of `launch` arrives as
`Rows`. Its rows have the numbers that they have in the whole table, on every rank: a sampler deals
these numbers, and each rank is dealt those of its own partitions. Promises: the partitions are in
memory once, as the worker handed them over; `take` copies no more than the rows that it gives.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset
from torch.utils.data._utils.collate import default_collate_fn_map

from ddp_common.dealing import Placement
from ddp_common.errors import Error


class Partitioned(Dataset):
    """What a sampler can deal by where its rows lie."""

    def __init__(self, name: str, placement: Placement):
        """`name`: of the argument, for messages."""
        self.name = name
        self.placement = placement
        self._filled = [number for number in placement.held if placement.lengths[number]]

    def __len__(self) -> int:
        """Rows of all ranks."""
        return self.placement.total

    @property
    def rows(self) -> np.ndarray:
        """The numbers of the rows that this rank holds, in order: int64."""
        return self.placement.rows

    def take(self, rows: Sequence[int]) -> Any:
        """Rows by their numbers. Raises `Error` for a row that is not on this rank."""
        raise NotImplementedError

    def __getitems__(self, rows: Sequence[int]) -> list:
        """For a `DataLoader`: what `take` gives, to be collated."""
        taken = self.take(rows)
        return taken if isinstance(taken, list) else [_Whole([taken])]

    def _find(self, rows: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Of each row, in which of the partitions that have rows it is, and where there.

        Raises `Error` for a row that is not on this rank, and for one that is none.
        """
        numbers = np.asarray(rows, dtype=np.int64).reshape(-1)
        starts = self.placement.starts[self._filled]
        places = np.searchsorted(starts, numbers, side="right") - 1
        indices = numbers - starts[places]
        is_here = (places >= 0) & (indices < self.placement.lengths[self._filled][places])
        if not is_here.all():
            row = numbers[~is_here][0]
            if not 0 <= row < len(self):
                raise Error(f"{self.name!r} has rows 0 to {len(self) - 1}, and no row {row}.")
            number = np.searchsorted(self.placement.starts, row, side="right") - 1
            raise Error(
                f"Row {row} of {self.name!r} is in partition {number}, which is not on this rank. "
                f"Take rows that a sampler over this table deals: ElasticSampler({self.name}, …)."
            )
        return places, indices


class Rows(Partitioned):
    """This rank's partitions of a table that was an argument of `launch`.

    `len()` counts the rows of all ranks, `rows` are the numbers of those that are here, and
    `parts` are this rank's partitions as they were: pandas, NumPy, lists of a Bag.
    `ElasticSampler(table, …)` and `EvalSampler(table, …)` deal each rank rows that it holds;
    `take(rows)` gives them, and so does a `ddp.DataLoader(table, batch_sampler=sampler)`.
    """

    def __init__(self, name: str, placement: Placement, parts: dict[int, Any]):
        """`parts`: this rank's partitions by their number."""
        super().__init__(name, placement)
        self.parts = [parts[number] for number in placement.held]
        self._pieces = [parts[number] for number in self._filled]

    def __getitem__(self, row: int) -> Any:
        """One row: a Series of a DataFrame, an element of anything else."""
        (place,), (index,) = self._find([row])
        piece = self._pieces[place]
        return piece.iloc[index] if _is_pandas(piece) else piece[index]

    def take(self, rows: Sequence[int]) -> Any:
        """Rows by their numbers, in that order: one DataFrame, Series, array or list."""
        places, indices = self._find(rows)
        if isinstance(self._pieces[0], list):
            return [self._pieces[place][index] for place, index in zip(places, indices)]
        picked = [
            _picked(self._pieces[place], indices[places == place]) for place in np.unique(places)
        ]
        together = _joined(picked or [_picked(self._pieces[0], indices)])
        if (np.diff(places) >= 0).all():  # they were in the order of partitions already
            return together
        return _picked(together, np.argsort(np.argsort(places, kind="stable")))

    def tensors(self, function: Callable[[Any], Any], *, allow_nan: bool = False) -> "RowTensors":
        """This rank's rows as tensors, made once, to be indexed by the same row numbers.

        `function` gets a partition, as pandas or NumPy or a list, and gives a tensor, or a tuple
        of them, each with a row for each row of the partition. The result stands where the table
        stands:

            def to_tensors(frame):
                x = torch.tensor(frame[["distance", "hour"]].to_numpy("float32"))
                return x, torch.tensor(frame["carrier"].cat.codes.to_numpy("int64"))

            data = table.tensors(to_tensors)
            sampler = ddp.ElasticSampler(data, batch_size)
            for x, carrier in ddp.DataLoader(data, batch_sampler=sampler): …

        Raises `Error` for anything else that `function` gives, for values that NumPy masks, and
        for NaN, unless `allow_nan`.
        """
        made = [
            self._made_of(part, function, allow_nan, number)
            for number, part in zip(self._filled, self._pieces)
        ]
        kinds = {tuple((each.dtype, each.shape[1:]) for each in tensors) for tensors in made}
        if len(kinds) > 1:
            raise Error(
                f"The tensors of the partitions of {self.name!r} are of different types or "
                f"shapes: {' and '.join(map(str, kinds))}. Name the type: to_numpy('float32')."
            )
        return RowTensors(self, [torch.cat(pieces) for pieces in zip(*made)])

    def _made_of(
        self, part: Any, function: Callable[[Any], Any], allow_nan: bool, number: int
    ) -> tuple[torch.Tensor, ...]:
        """What `function` makes of a partition."""
        partition = f"Partition {number} of {self.name!r}"
        if np.ma.is_masked(part):
            raise Error(
                f"{partition} has masked values, which a tensor cannot have. Fill them before "
                "launch: da.ma.filled."
            )
        given = function(part)
        tensors = given if isinstance(given, tuple) else (given,)
        for tensor in tensors:
            if not isinstance(tensor, torch.Tensor):
                raise Error(
                    f"The function that makes tensors of {partition} gave a "
                    f"{type(tensor).__name__}. Give a tensor, or a tuple of them: "
                    "torch.tensor(array)."
                )
            if tensor.dim() == 0 or len(tensor) != len(part):
                raise Error(
                    f"The function that makes tensors gave one of shape {tuple(tensor.shape)} for "
                    f"the {len(part)} rows of {partition}. Give a row for each row."
                )
            lacks = 0 if allow_nan else int(tensor.isnan().sum())
            if lacks:
                raise Error(
                    f"{partition} has {lacks:,} NaN in its tensors. Fill them (fillna) or drop "
                    "their rows (dropna) before launch, or say tensors(…, allow_nan=True)."
                )
        return tensors


class RowTensors(Partitioned):
    """Tensors of this rank's rows; `take(rows)` gives those of each, by the table's row numbers.

    A `DataLoader` gives the same: a tuple of tensors, or the one tensor if there is one only.
    """

    def __init__(self, table: Rows, tensors: list[torch.Tensor]):
        super().__init__(table.name, table.placement)
        self.tensors = tuple(tensors)
        lengths = self.placement.lengths[self._filled]
        self._offsets = np.cumsum(lengths) - lengths

    def take(self, rows: Sequence[int]) -> Any:
        """Rows by their numbers, in that order: a tensor, or a tuple of them."""
        places, indices = self._find(rows)
        index = torch.from_numpy(self._offsets[places] + indices)
        taken = tuple(tensor[index] for tensor in self.tensors)
        return taken if len(taken) > 1 else taken[0]

    def __getitem__(self, row: int) -> Any:
        taken = self.take([row])
        return tuple(each[0] for each in taken) if isinstance(taken, tuple) else taken[0]


# Partitions, and parts of them


def _is_pandas(piece: Any) -> bool:
    return hasattr(piece, "iloc")


def _picked(piece: Any, indices: np.ndarray) -> Any:
    return piece.take(indices) if _is_pandas(piece) else piece[indices]


def _joined(pieces: list) -> Any:
    if len(pieces) == 1:
        return pieces[0]
    if not _is_pandas(pieces[0]):
        are_masked = any(isinstance(piece, np.ma.MaskedArray) for piece in pieces)
        return np.ma.concatenate(pieces) if are_masked else np.concatenate(pieces)
    import pandas as pd  # not at the top: a rank without a table does without it

    return pd.concat(pieces)


# What a DataLoader makes of a batch. It is fetched whole, and torch's `default_collate` would take
# it for one sample and put it into a batch of one.


class _Whole(tuple):
    """One element: what `take` gave."""


def _unpacked(batch: Any, *, collate_fn_map: Any = None) -> Any:
    ((taken,),) = batch
    if np.ma.is_masked(taken):
        raise Error(
            "A batch has masked values, which a tensor cannot have. Fill them before launch "
            "(da.ma.filled), or give the DataLoader a collate_fn."
        )
    return torch.from_numpy(np.asarray(taken)) if isinstance(taken, np.ndarray) else taken


default_collate_fn_map[_Whole] = _unpacked
