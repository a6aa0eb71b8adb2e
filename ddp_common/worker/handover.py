"""The worker's side of tables that a rank gets: look at partitions, and write them for the rank.

`hand_over` is a Dask task whose arguments are the partitions: Dask has seen to it that they are on
this worker, and fetched those that were not. Its result stays here, until the rank's agent takes
it. Promises: the memory of what is written belongs to the rank once it runs, and is free when Dask
forgets a result that no agent has taken.
"""

import hashlib
import os
import tempfile
from multiprocessing.connection import Connection
from typing import Any, BinaryIO

import cloudpickle
import numpy as np
import psutil
from dask.typing import Key
from distributed import Worker

from ddp_common.errors import Error
from ddp_common.ranks.handover import Table, write

# Called by the client, with `client.run`


def look_at(keys: list[Key], dask_worker: Worker) -> dict[Key, tuple[int, dict] | str]:
    """Of each partition on this worker, (rows, kinds of its columns).

    Or a sentence, for one that is no partition.
    """
    return {key: _look(dask_worker.data[key]) for key in keys if key in dask_worker.data}


def _look(part):
    if not hasattr(part, "__len__") or isinstance(part, str | bytes | dict | set):
        return f"a {type(part).__name__}"
    if getattr(part, "shape", None) == ():
        return "a single number"
    return len(part), _kinds(part)


def _kinds(part):
    """What a column holds, for each: its type, and of categories which they are."""
    if hasattr(part, "dtypes") and hasattr(part, "columns"):
        kinds = dict(zip(map(str, part.columns), part.dtypes))
    elif hasattr(part, "dtype"):
        kinds = {"": part.dtype}
    else:
        return {}
    return {name: _kind(dtype) for name, dtype in kinds.items()}


def _kind(dtype):
    categories = getattr(dtype, "categories", None)
    if categories is None:
        return str(dtype)
    digest = hashlib.sha256("\0".join(map(str, categories)).encode()).hexdigest()
    return f"{len(categories)} categories ({digest[:6]})"


def room(dask_worker: Worker) -> tuple[float, float]:
    """Bytes: the worker's memory limit (0: none), and what its host has left."""
    limit = dask_worker.memory_manager.memory_limit or 0
    return limit, psutil.virtual_memory().available


# The Dask task


class Handover:
    """The tables of a rank, in memory, until its agent takes them. It stays on its worker."""

    def __init__(self, file: BinaryIO):
        self._file: BinaryIO | None = file

    def take(self) -> Connection:
        """The file as a connection, which can be sent to a process; from now on it is yours."""
        assert self._file is not None, "it is taken once"
        with self._file:
            taken = Connection(os.dup(self._file.fileno()))
        self._file = None
        return taken

    def __reduce__(self):
        raise TypeError("the tables of a rank stay on its worker")


def hand_over(tables: list[Table], partitions: list[list], borrowed: list) -> Handover | Error:
    """Write what the rank gets.

    `partitions` are, for each of `tables`, those whose numbers are the keys of its `parts`;
    `borrowed`, for each, a row of which a rank without rows gets a copy, or None. Returns an
    `Error` for partitions that have changed since they were counted, and for tables used together
    whose indices differ: Dask would log it, if it were raised.
    """
    for table, parts, piece in zip(tables, partitions, borrowed):
        table.parts = dict(zip(table.parts, parts))
        if table.borrowed is not None:
            row, _ = table.borrowed
            table.borrowed = row, piece
    try:
        for table in tables:
            _check_lengths(table)
        _check_indices(tables)
    except Error as error:
        return error
    file = _open_file()
    try:
        write(tables, file, _Pickler)
    except BaseException:
        file.close()
        raise
    return Handover(file)


def _check_lengths(table: Table) -> None:
    """Raise `Error` for a partition that is not as long as it was."""
    for number, part in table.parts.items():
        if len(part) != table.lengths[number]:
            raise Error(
                f"Partition {number} of {table.name!r} had {table.lengths[number]:,} rows and has "
                f"{len(part):,} now that it was computed again. Which rows a step has would "
                "depend on when a worker was lost. Make what it is computed from reproducible: a "
                "seed, sorted input, a file that does not change."
            )


def _check_indices(tables: list[Table]) -> None:
    """Raise `Error` for pandas tables that belong together and have different indices."""
    first_of: dict[tuple[int, int], tuple[str, Any]] = {}  # by group and partition
    for table in tables:
        for number, part in table.parts.items():
            if not hasattr(part, "iloc"):
                continue  # not of pandas
            name, first = first_of.setdefault((table.group, number), (table.name, part))
            if not part.index.equals(first.index):
                raise Error(
                    f"The index of {name!r} and that of {table.name!r} differ in partition "
                    f"{number}: their rows belong to different samples. Join them into one table "
                    "(merge), or, if only the order counts, reset_index(drop=True) on both. If "
                    "they have nothing to do with each other, give one in a list of its own: "
                    f"{table.name}=[{table.name}]."
                )


def _open_file() -> BinaryIO:
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("ddp-tables"), "w+b", buffering=2**20)
    return tempfile.TemporaryFile()


class _Pickler(cloudpickle.Pickler):
    """Leaves also those arrays out of the stream that are a view of larger ones."""

    def reducer_override(self, thing: Any) -> Any:
        if type(thing) is np.ndarray and not thing.flags.forc and not thing.dtype.hasobject:
            return thing.copy().__reduce_ex__(5)
        return super().reducer_override(thing)


def first_row(part: Any) -> Any:
    """A copy of a partition's first row, of which a rank without rows is given one."""
    return part.iloc[:1].copy() if hasattr(part, "iloc") else part[:1]
