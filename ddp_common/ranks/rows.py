"""A table that Dask prepared, as a rank sees it: the partitions that lie on its worker.

A Dask DataFrame, Array or Bag, or a list of futures, that was an argument of `launch` arrives as
`Rows`. Its rows have the numbers that they have in the whole table, on every rank: a sampler deals
these numbers, and each rank is dealt those of its own partitions. Promises: the partitions lie in
memory once, as the worker handed them over; `take` copies no more than the rows that it gives.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset
from torch.utils.data._utils.collate import default_collate_fn_map

from ddp_common.errors import Error
from ddp_common.ranks.dealing import Placement

NOT_NUMBERS = "OSUMm"  # kinds of NumPy: objects, texts, bytes, dates, times
NAMED = 5  # columns in a message, of those that are meant


class Partitioned(Dataset):
    """What a sampler can deal by where its rows lie."""

    placement: Placement
    name: str  # of the argument, for messages
    _where: "_Pieces"

    def __len__(self) -> int:
        """Rows of all ranks."""
        return self.placement.total

    @property
    def rows(self) -> np.ndarray:
        """The numbers of the rows that this rank holds, in order: int64."""
        return self.placement.rows

    def take(self, rows: Sequence[int]) -> Any:
        raise NotImplementedError

    def __getitems__(self, rows: Sequence[int]) -> Sequence:
        """For a `DataLoader`: what `take` gives, in a list, from which torch takes it out."""
        taken = self.take(rows)
        return taken if isinstance(taken, list) else [_whole(taken)]

    def _find(self, rows: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Of each row, in which of the pieces in this rank's memory it lies, and where there.

        Raises `Error` for a row that is not on this rank, and for one that is none.
        """
        numbers = np.asarray(rows, dtype=np.int64)
        if numbers.ndim != 1:
            raise Error(f"take wants a list of row numbers, not {rows!r:.60}.")
        pieces = self._where
        place = np.searchsorted(pieces.starts, numbers, side="right") - 1
        is_here = (place >= 0) & (numbers < pieces.ends[place])
        if not is_here.all():
            raise self._not_here(int(numbers[~is_here][0]))
        return place, numbers - pieces.starts[place]

    def _not_here(self, row: int) -> Error:
        if not 0 <= row < len(self):
            return Error(f"{self.name!r} has rows 0 to {len(self) - 1}, and no row {row}.")
        number = int(np.searchsorted(self.placement.starts, row, side="right")) - 1
        held = _some(self.placement.held)
        return Error(
            f"Row {row} of {self.name!r} is in partition {number}, which is not on this rank: it "
            f"holds the partitions {held or '(none)'}. Take rows that a sampler over this very "
            f"table deals, ElasticSampler({self.name}, …) or EvalSampler({self.name}, …). Tables "
            "that are used together, row by row, need partitions of the same lengths."
        )


class _Pieces:
    """Where the rows begin and end that are in this rank's memory, piece by piece."""

    def __init__(self, placement: Placement):
        filled = [number for number in placement.held if placement.lengths[number]]
        self.starts = placement.starts[filled]
        self.ends = self.starts + placement.lengths[filled]
        if not filled:
            assert placement.borrowed is not None, "the launch gives such a rank a row"
            self.starts = np.array([placement.borrowed])
            self.ends = self.starts + 1


class Rows(Partitioned):
    """This rank's partitions of a table that was an argument of `launch`.

    `len()` counts the rows of all ranks, `rows` are the numbers of those that are here, and
    `parts` are this rank's partitions as they were: pandas, NumPy, lists of a Bag. A rank may have
    none. `ElasticSampler(table, …)` and `EvalSampler(table, …)` deal each rank rows that it holds;
    `take(rows)` gives them, and so does a `DataLoader(table, batch_sampler=sampler)`.

    The memory of the partitions is given back when nobody refers to them any more.
    """

    def __init__(
        self,
        name: str,
        placement: Placement,
        parts: dict[int, Any],
        borrowed: Any = None,
        uneven: dict[str, str] | None = None,
    ):
        """`parts`: partitions by their number; `borrowed`: a piece of one row, if it has no rows.

        `uneven`: columns whose kind is not the same in all partitions of the table, and how.
        """
        self.name = name
        self.placement = placement
        self.parts = [parts[number] for number in placement.held]
        self._uneven = uneven or {}
        self._where = _Pieces(placement)
        filled = [part for part in self.parts if len(part)]
        self._data = filled or [borrowed]

    def __getitem__(self, row: int) -> Any:
        """One row: a Series of a DataFrame, an element of anything else."""
        (place,), (index,) = self._find([row])
        piece = self._data[place]
        return piece.iloc[index] if _is_pandas(piece) else piece[index]

    def take(self, rows: Sequence[int]) -> Any:
        """Rows by their numbers, in that order: one DataFrame, Series, array or list.

        Raises `Error` for a row that is not on this rank.
        """
        places, indices = self._find(rows)
        if isinstance(self._data[0], list):
            return [self._data[place][index] for place, index in zip(places, indices)]
        if len(places) == 0:
            return _taken(self._data[0], indices)
        if (places == places[0]).all():
            return _taken(self._data[places[0]], indices)
        order = np.argsort(places, kind="stable")
        bounds = np.flatnonzero(np.diff(places[order])) + 1
        pieces = [
            _taken(self._data[places[group[0]]], indices[group])
            for group in np.split(order, bounds)
        ]
        together = _joined(pieces)
        if (np.diff(order) > 0).all():  # they were in the order of partitions already
            return together
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        return _taken(together, back)

    def tensors(self, *columns: str | Sequence[str]) -> "RowTensors":
        """This rank's rows as tensors, made once, to be indexed by the same row numbers.

        Each of `columns` makes one tensor: a name one of shape (rows,), a list of names one of
        shape (rows, columns). Without any, all columns make one; so for arrays and Series. Whole
        numbers become int64, categories their codes (int64), anything else float32. The result
        stands where the table stands:

            data = table.tensors(["distance", "hour"], "late")
            sampler = ddp.ElasticSampler(data, batch_size)
            for x, y in DataLoader(data, batch_sampler=sampler): …

        Raises `Error` for what is no number, and where numbers are missing: how many, in which
        columns.
        """
        first = self._data[0]
        if isinstance(first, list):
            raise Error(
                f"The partitions of {self.name!r} are lists. Make tensors of what take(rows) "
                f"gives, or a DataFrame or Array of it before: {self.name}.to_dataframe()."
            )
        if not hasattr(first, "columns"):
            if columns:
                raise Error(f"{self.name!r} has no columns; write {self.name}.tensors().")
            return RowTensors(self, [self._tensor(None)])
        chosen = columns or (list(first.columns),)
        self._check_columns(chosen)
        return RowTensors(self, [self._tensor(each) for each in chosen])

    def _check_columns(self, chosen):
        names = [name for each in chosen for name in _as_list(each)]
        known = list(self._data[0].columns)
        missing = [name for name in names if name not in known]
        if missing:
            raise Error(f"{self.name!r} has no column {_some(missing)}; it has {_some(known)}.")
        uneven = [name for name in names if name in self._uneven]
        if uneven:
            which = "; ".join(f"{name}: {self._uneven[name]}" for name in uneven[:NAMED])
            raise Error(
                f"Partitions of {self.name!r} do not agree about their columns, so tensors of one "
                f"rank would mean something else than those of another ({which}). Give the "
                "column one type, with astype, or the same categories everywhere: "
                f"{self.name}.categorize(), before launch."
            )

    def _tensor(self, columns):
        """One tensor of this rank's rows. `columns`: a name, a list of names, or None for all."""
        names = [self.name] if columns is None else _as_list(columns)
        pieces = []
        wrong: dict[str, str] = {}  # column -> what it holds
        missing: dict[str, int] = {}  # column -> how many rows
        for piece in self._data:
            numbers = {}
            for name in names:
                values = piece if columns is None else piece[name]
                numbers[name], lacking = _numbers(values)
                if numbers[name] is None:
                    wrong[name] = str(values.dtype)
                elif lacking:
                    missing[name] = missing.get(name, 0) + lacking
            if not wrong:
                pieces.append(list(numbers.values()))
        if wrong:
            listed = _some([f"{name} ({kind})" for name, kind in wrong.items()])
            raise Error(
                f"{self.name!r} has columns that are no numbers: {listed}. Make categories of "
                "texts, whose codes are numbers (astype('category'), then categorize()), numbers "
                "of dates, or leave these columns out."
            )
        if missing:
            listed = _some([f"{name} ({missing[name]:,})" for name in names if name in missing])
            raise Error(
                f"{self.name!r} lacks values on this rank, NaN or the like, in {listed}, of "
                f"{len(self.rows):,} rows. A loss of them is NaN. Fill them (fillna) or drop "
                "their rows (dropna) before launch."
            )
        return _tensor_of(pieces, is_matrix=isinstance(columns, list | tuple))


class RowTensors(Partitioned):
    """Tensors of this rank's rows; `take(rows)` gives those of each, by the table's row numbers.

    A `DataLoader` gives the same: a tuple of tensors, or the one tensor if there is one only.
    """

    def __init__(self, table: Rows, tensors: list[torch.Tensor]):
        self.name = table.name
        self.placement = table.placement
        self.tensors = tuple(tensors)
        self._where = table._where
        lengths = self._where.ends - self._where.starts
        self._offsets = np.cumsum(lengths) - lengths

    def take(self, rows: Sequence[int]) -> Any:
        """Rows by their numbers, in that order: a tensor, or a tuple of them.

        Raises `Error` for a row that is not on this rank.
        """
        places, indices = self._find(rows)
        index = torch.from_numpy(self._offsets[places] + indices)
        taken = tuple(tensor[index] for tensor in self.tensors)
        return taken if len(taken) > 1 else taken[0]

    def __getitem__(self, row: int) -> Any:
        taken = self.take([row])
        return tuple(each[0] for each in taken) if isinstance(taken, tuple) else taken[0]


# Numbers


def _numbers(values):
    """A column, or an array, as numbers: (array or None, how many are missing)."""
    dtype = values.dtype
    if hasattr(values, "cat"):
        codes = values.cat.codes.to_numpy()
        return codes.astype(np.int64), int((codes < 0).sum())
    if isinstance(dtype, np.dtype):
        if dtype.kind in NOT_NUMBERS:
            return None, 0
        array = np.asarray(values)
    else:  # pandas' own: nullable numbers, numbers of Arrow, texts, dates
        kind = getattr(dtype, "numpy_dtype", np.dtype(object)).kind
        if kind in NOT_NUMBERS:
            return None, 0
        lacking = int(values.isna().sum())
        if lacking:
            return np.empty(0), lacking
        array = values.to_numpy(dtype=np.int64 if kind in "iu" else np.float32)
    lacking = int(np.isnan(array).sum()) if array.dtype.kind in "fc" else 0
    return array, lacking


def _tensor_of(pieces, is_matrix):
    """One tensor of the columns of all pieces; each is copied once, into its place."""
    kinds = {array.dtype.kind for piece in pieces for array in piece}
    dtype = np.int64 if kinds <= {"i", "u"} else np.float32
    lengths = [len(piece[0]) for piece in pieces]
    shape = (len(pieces[0]),) if is_matrix else pieces[0][0].shape[1:]
    whole = np.empty((sum(lengths), *shape), dtype=dtype)
    start = 0
    for piece, length in zip(pieces, lengths):
        for column, array in enumerate(piece):
            target = whole[start : start + length]
            (target[:, column] if is_matrix else target)[...] = array
        start += length
    return torch.from_numpy(whole)


# Pieces


def _is_pandas(piece):
    return hasattr(piece, "iloc")


def _taken(piece, indices):
    return piece.take(indices) if _is_pandas(piece) else piece[indices]


def _joined(pieces):
    if not _is_pandas(pieces[0]):
        return np.concatenate(pieces)
    import pandas as pd  # not at the top: a rank without a table does without it

    return pd.concat(pieces)


def _as_list(columns):
    return list(columns) if isinstance(columns, list | tuple) else [columns]


def _some(names):
    listed = ", ".join(map(str, names[:NAMED]))
    return f"{listed}, …" if len(names) > NAMED else listed


# What a DataLoader makes of a batch. It is fetched whole, and torch's `default_collate` would take
# it for one sample and put it into a batch of one.


class _Tensors(tuple):
    """A batch of several tensors."""


class _Array(np.ndarray):
    """A batch of rows of an array."""


def _whole(taken):
    if isinstance(taken, tuple):
        return _Tensors(taken)
    if isinstance(taken, np.ndarray):
        return taken.view(_Array)
    if isinstance(taken, torch.Tensor):
        return _Tensors([taken])
    default_collate_fn_map.setdefault(type(taken), _the_frame)
    return taken


def _the_tensors(batch, *, collate_fn_map=None):
    return tuple(batch[0]) if len(batch[0]) > 1 else batch[0][0]


def _the_array(batch, *, collate_fn_map=None):
    return torch.from_numpy(np.asarray(batch[0]))


def _the_frame(batch, *, collate_fn_map=None):
    if len(batch) > 1:
        raise TypeError("a batch of several DataFrames: give your DataLoader a collate_fn")
    return batch[0]


default_collate_fn_map[_Tensors] = _the_tensors
default_collate_fn_map[_Array] = _the_array
