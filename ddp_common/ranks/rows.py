"""A table that Dask prepared, as a rank sees it: the partitions that lie on its worker.

A Dask DataFrame, Array or Bag, or a list of futures, that was an argument of `launch` arrives as
`Rows`. Its rows have the numbers that they have in the whole table, on every rank: a sampler deals
these numbers, and each rank is dealt those of its own partitions. Promises: the partitions are in
memory once, as the worker handed them over; `take` copies no more than the rows that it gives;
numbers become tensors as they are, or not at all. What a mask of NumPy hides is a missing value.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset
from torch.utils.data._utils.collate import default_collate_fn_map

from ddp_common.errors import Error
from ddp_common.ranks.dealing import Placement

NAMED = 5  # columns in a message, of those that are meant
LARGEST = {np.int64: 2**63 - 1, np.float32: 2**24}  # whole number of which none is skipped


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
            raise self._not_here(int(numbers[~is_here][0]))
        return places, indices

    def _not_here(self, row: int) -> Error:
        if not 0 <= row < len(self):
            return Error(f"{self.name!r} has rows 0 to {len(self) - 1}, and no row {row}.")
        number = int(np.searchsorted(self.placement.starts, row, side="right")) - 1
        return Error(
            f"Row {row} of {self.name!r} is in partition {number}, which is not on this rank: it "
            f"holds the partitions {_some(self.placement.held)}. Take rows that a sampler over "
            f"this table deals: ElasticSampler({self.name}, …)."
        )


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
        """Rows by their numbers, in that order: one DataFrame, Series, array or list.

        Raises `Error` for a row that is not on this rank.
        """
        places, indices = self._find(rows)
        if isinstance(self._pieces[0], list):
            return [self._pieces[place][index] for place, index in zip(places, indices)]
        if len(places) == 0:
            return _picked(self._pieces[0], indices)
        picked = [
            _picked(self._pieces[place], indices[places == place]) for place in np.unique(places)
        ]
        together = picked[0] if len(picked) == 1 else _joined(picked)
        if (np.diff(places) >= 0).all():  # they were in the order of partitions already
            return together
        return _picked(together, np.argsort(np.argsort(places, kind="stable")))

    def tensors(self, *columns: str | Sequence[str]) -> "RowTensors":
        """This rank's rows as tensors, made once, to be indexed by the same row numbers.

        Each of `columns` makes one tensor: a name one of shape (rows,), a list of names one of
        shape (rows, columns). Without any, all columns make one; so for arrays and Series. Whole
        numbers become int64, categories their codes (int64), anything else float32. The result
        stands where the table stands:

            data = table.tensors(["distance", "hour"], "late")
            sampler = ddp.ElasticSampler(data, batch_size)
            for x, y in ddp.DataLoader(data, batch_sampler=sampler): …

        Raises `Error`, with the columns' names, for what is no real number, what would not keep
        its value, and where values are missing.
        """
        first = self._pieces[0]
        if isinstance(first, list):
            raise Error(
                f"The partitions of {self.name!r} are lists. Make tensors of what take(rows) "
                f"gives, or launch with {self.name}.to_dataframe()."
            )
        if not hasattr(first, "columns"):
            if columns:
                raise Error(f"{self.name!r} has no columns; write {self.name}.tensors().")
            return RowTensors(self, [self._tensor(None)])
        chosen = columns or (list(first.columns),)
        self._check_names([name for each in chosen for name in _as_list(each)])
        return RowTensors(self, [self._tensor(each) for each in chosen])

    def _check_names(self, names: list) -> None:
        there = list(self._pieces[0].columns)
        wrong = [name for name in dict.fromkeys(names) if there.count(name) != 1]
        if wrong:
            raise Error(
                f"{self.name!r} has no column, or several, of the name {_some(wrong)}; it has "
                f"{_some(there)}."
            )

    def _tensor(self, columns: str | Sequence[str] | None) -> torch.Tensor:
        """One tensor of this rank's rows. `columns`: a name, a list of names, or None for all."""
        names = [self.name] if columns is None else _as_list(columns)
        by_name = {
            name: [piece if columns is None else piece[name] for piece in self._pieces]
            for name in names
        }
        self._refuse_missing(by_name)
        kinds = {_kind(values) for pieces in by_name.values() for values in pieces}
        dtype = np.int64 if kinds <= {"i", "u"} else np.float32
        is_matrix = isinstance(columns, list | tuple)
        shape = (len(names),) if is_matrix else by_name[names[0]][0].shape[1:]
        whole = np.empty((len(self.rows), *shape), dtype=dtype)
        wrong = {}
        for column, name in enumerate(names):
            target = whole[:, column] if is_matrix else whole
            what = _fill(target, by_name[name])
            if what:
                wrong[name] = what
        if wrong:
            listed = _some([f"{name} ({what})" for name, what in wrong.items()])
            raise Error(
                f"{self.name!r} has columns whose numbers would change in a tensor of "
                f"{np.dtype(dtype)}, or are none: {listed}. Before launch, make categories of "
                "texts and identifiers, numbers of anything else, and scale what is too large. "
                "Whole numbers without floats in the same tensor become int64."
            )
        return torch.from_numpy(whole)

    def _refuse_missing(self, by_name: dict[str, list]) -> None:
        missing = {name: sum(map(_missing, pieces)) for name, pieces in by_name.items()}
        listed = _some([f"{name} ({count:,})" for name, count in missing.items() if count])
        if listed:
            raise Error(
                f"{self.name!r} lacks values on this rank, NaN or masked, in {listed}, of "
                f"{len(self.rows):,} rows. Fill them (fillna, filled) or drop their rows (dropna) "
                "before launch."
            )


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


# A column, or an array, of one partition


def _kind(values: Any) -> str:
    """NumPy's letter for what it holds; codes of categories are integers."""
    return "i" if hasattr(values, "cat") else values.dtype.kind


def _missing(values: Any) -> int:
    """How many values are NaN, None or the like, or masked."""
    if hasattr(values, "isna"):
        return int(values.isna().sum())
    masked = np.ma.getmask(values)
    if values.dtype.kind == "f":
        masked = masked | np.isnan(np.ma.getdata(values))
    return int(np.count_nonzero(masked))


def _fill(target: np.ndarray, pieces: list) -> str | None:
    """Copy the pieces of a column into `target`, one after the other.

    Returns what would not be the same there, a number or what is none; else None.
    """
    start = 0
    for piece in pieces:
        if _kind(piece) not in "biuf":
            return str(piece.dtype)
        array = _array(piece)
        if array.dtype.kind in "iu":
            largest = max(int(array.max()), -int(array.min()))
            if largest > LARGEST[target.dtype.type]:
                return str(largest)
        part = target[start : start + len(array)]
        with np.errstate(over="ignore"):
            part[...] = array
        if array.dtype.kind == "f" and (np.isinf(part) != np.isinf(array)).any():
            return f"{np.abs(array[np.isfinite(array)]).max():g}"
        start += len(array)
    return None


def _array(piece: Any) -> np.ndarray:
    if hasattr(piece, "cat"):
        return piece.cat.codes.to_numpy()
    if hasattr(piece.dtype, "numpy_dtype"):  # pandas' own: nullable numbers, numbers of Arrow
        return piece.to_numpy(dtype=piece.dtype.numpy_dtype)
    return np.asarray(piece)


# Partitions, and parts of them


def _is_pandas(piece: Any) -> bool:
    return hasattr(piece, "iloc")


def _picked(piece: Any, indices: np.ndarray) -> Any:
    return piece.take(indices) if _is_pandas(piece) else piece[indices]


def _joined(pieces: list) -> Any:
    if not _is_pandas(pieces[0]):
        are_masked = any(isinstance(piece, np.ma.MaskedArray) for piece in pieces)
        return np.ma.concatenate(pieces) if are_masked else np.concatenate(pieces)
    import pandas as pd  # not at the top: a rank without a table does without it

    return pd.concat(pieces)


# Columns by their names


def _as_list(columns: Any) -> list:
    return list(columns) if isinstance(columns, list | tuple) else [columns]


def _some(names: Sequence) -> str:
    listed = ", ".join(map(str, names[:NAMED]))
    return f"{listed}, …" if len(names) > NAMED else listed


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
