"""What comes from the client's program into a rank: tables, and what is in its `__main__`.

The worker pickles tables into a file in memory (memfd_create(2)). What pickle can leave out of its
stream, the buffers of arrays and frames (protocol 5), follows behind, each at an address that
suits any type; the rank maps the file, and its arrays lie in it. So the data are copied once, in
the worker. Promises: a rank may write into what it gets, which nobody else sees, and the memory is
free again with the rank; also where Dask forgets a file that no rank has got. Arguments that were
tables are found while the training function's arguments are unpickled: in their place stands a
call of `given`.

Cloudpickle sends functions and classes of a script or a notebook by value. Pickle, which sends
them on between a DataLoader and its workers and back to the client, looks for them by their name
in `__main__`. Relies on cloudpickle filling a class or a function that it has made by one of
`FILLS`, as versions 2 and 3 do.
"""

import contextlib
import io
import mmap
import os
import pickle
import struct
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any, BinaryIO

import cloudpickle
from dask.tokenize import tokenize
from dask.typing import Key

from ddp_common.errors import Error

ALIGNMENT = 64  # bytes
TRAILER = struct.Struct("!q")  # the size of the pickled contents before it
FILLS = ("_class_setstate", "_function_setstate")

# Of a partition: how many rows it has, and its columns in their order: name, and what it holds
Look = tuple[int, list[tuple[str, str]]]

_arguments: list[Any] = []  # the tables of this rank, as the training function gets them


@dataclass
class Table:
    """What a rank gets of a table."""

    name: str  # of the argument
    lengths: list[int]  # rows of all partitions
    parts: dict[int, Any]  # this rank's, by their number


# In the worker


def look_at(keys: list[Key], dask_worker: Any) -> dict[Key, Look | str]:
    """Of each partition on this worker, its `Look`; of what is no partition, its type.

    A column of categories holds these very ones, in this order.
    """
    return {key: _look(dask_worker.data[key]) for key in keys if key in dask_worker.data}


def _look(part: Any) -> Look | str:
    is_none = isinstance(part, str | bytes | dict | set) or hasattr(part, "toarray")  # sparse
    if is_none or not hasattr(part, "__len__") or getattr(part, "shape", None) == ():
        return type(part).__name__
    if hasattr(part, "columns"):
        names = map(str, part.columns)
        return len(part), list(zip(names, map(_kind, part.dtypes)))
    if hasattr(part, "dtype"):
        return len(part), [("", f"{_kind(part.dtype)} {part.shape[1:] or ''}".rstrip())]
    return len(part), []


def _kind(dtype: Any) -> str:
    categories = getattr(dtype, "categories", None)
    if categories is None:
        return str(dtype)
    return f"{len(categories)} categories ({tokenize(list(categories))[:8]})"


def hand_over(tables: list[Table], partitions: list[list]) -> BinaryIO:
    """Write what a rank gets into a file in memory, which the rank's agent closes.

    A Dask task: Dask has seen to it that the partitions are on this worker. They are, for each of
    `tables`, those whose numbers are the keys of its `parts`.
    """
    filled = [
        replace(table, parts=dict(zip(table.parts, parts)))
        for table, parts in zip(tables, partitions)
    ]
    file = open(os.memfd_create("ddp-tables"), "w+b", buffering=2**20)
    try:
        _write(filled, file)
    except BaseException:
        file.close()
        raise
    return file


def _write(tables: list[Table], file: BinaryIO) -> None:
    buffers: list[pickle.PickleBuffer] = []
    cloudpickle.Pickler(file, protocol=5, buffer_callback=buffers.append).dump(tables)
    contents = [(0, file.tell())]  # where the stream, and each buffer, begins and ends
    for buffer in buffers:
        file.write(bytes(-file.tell() % ALIGNMENT))
        begin = file.tell()
        file.write(buffer.raw())
        contents.append((begin, file.tell()))
    pickled = pickle.dumps(contents)
    file.write(pickled + TRAILER.pack(len(pickled)))
    file.flush()


# In the rank


def receive(descriptor: int, as_argument: Callable[[Table], Any]) -> None:
    """Take the tables that the worker has written into this file.

    `as_argument` makes of each what the training function gets.
    """
    mapped = memoryview(mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY))
    os.close(descriptor)
    (size,) = TRAILER.unpack(mapped[-TRAILER.size :])
    contents = pickle.loads(mapped[-TRAILER.size - size : -TRAILER.size])
    stream, *buffers = [mapped[begin:end] for begin, end in contents]
    try:
        _arguments[:] = map(as_argument, loads(stream, buffers))
    except Exception as error:
        raise Error(
            "The tables cannot be unpickled in the rank: "
            f"{type(error).__name__}: {error}. Their classes must be importable there."
        ) from error


def given(number: int) -> Any:
    """The table of that number, as the training function gets it."""
    return _arguments[number]


class StandIn:
    """Stands for a table among the arguments while they travel; unpickled it is the table."""

    def __init__(self, number: int):
        self.number = number

    def __reduce__(self) -> tuple:
        return given, (self.number,)


# The client's `__main__`, its arguments and its folder, in the rank


def loads(pickled: bytes | memoryview, buffers: Iterable = ()) -> Any:
    """As `pickle.loads`; classes and functions that are made of `__main__` are put there."""
    return _Unpickler(io.BytesIO(pickled), buffers=buffers).load()


def code_of_file(file: str, parts: tuple) -> CodeType:
    """The code that `CodeType` makes of `parts`, and which says that it is from `file`."""
    return CodeType(*parts).replace(co_filename=file)


def be_as_in(argv: list[str], folder: str) -> None:
    """Have the arguments of the client's program, and its folder where this host has that."""
    sys.argv[:] = argv
    with contextlib.suppress(OSError):
        os.chdir(folder)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        if module.partition(".")[0] != "cloudpickle" or name not in FILLS:
            return found

        def fill_and_publish(made: Any, state: Any) -> Any:
            found(made, state)
            if made.__module__ == "__main__" and made.__qualname__.isidentifier():
                setattr(sys.modules["__main__"], made.__qualname__, made)
            return made

        return fill_and_publish
