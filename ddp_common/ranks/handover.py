"""How tables come from a worker into its rank: through memory that both have open.

The worker pickles them into a file in memory (memfd_create(2)). What pickle can leave out of its
stream, the buffers of arrays and frames (protocol 5), follows behind, each at an address that
suits any type; the rank maps the file, and its arrays lie in it. So the data are copied once, in
the worker. Promises: a rank may write into what it gets, and the memory is free again when nothing
of the rank refers to it.

In the rank, arguments that were tables are found while the training function's arguments are
unpickled: in their place stands a call of `given`.
"""

import mmap
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, BinaryIO

from ddp_common.errors import Error
from ddp_common.ranks import main_module

ALIGNMENT = 64  # bytes
TRAILER = struct.Struct("!qq")  # where the list of buffers begins, and how many there are
ENTRY = struct.Struct("!qq")  # of a buffer: where it begins, and how many bytes it has
LONGEST_WRITE = 2**30  # bytes; the kernel takes no more than 2 GiB at once

_tables: list["Table"] = []  # those of this rank


@dataclass
class Table:
    """What a rank gets of a table."""

    name: str  # of the argument
    lengths: list[int]  # rows of all partitions
    parts: dict[int, Any]  # this rank's, by their number
    group: int = 0  # tables with the same number belong together, row by row
    uneven: dict[str, str] = field(default_factory=dict)  # columns that differ, and how
    borrowed: tuple[int, Any] | None = None  # a row's number and the row, if the rank has none


# In the worker


def write(tables: Iterable[Table], file: BinaryIO, pickler: Callable) -> int:
    """Write tables into a file; returns its size in bytes.

    `pickler(file, protocol=…, buffer_callback=…)` makes what pickles them.
    """
    buffers: list[memoryview] = []
    pickler(file, protocol=5, buffer_callback=lambda buffer: buffers.append(buffer.raw())).dump(
        list(tables)
    )
    entries = []
    for buffer in buffers:
        file.write(bytes(-file.tell() % ALIGNMENT))
        entries.append(ENTRY.pack(file.tell(), buffer.nbytes))
        for start in range(0, buffer.nbytes, LONGEST_WRITE):
            file.write(buffer[start : start + LONGEST_WRITE])
    begins = file.tell()
    file.write(b"".join(entries))
    file.write(TRAILER.pack(begins, len(entries)))
    file.flush()
    return file.tell()


# In the rank


def receive(connection: Connection) -> None:
    """Take the tables that the worker has written; `connection` stands for its file."""
    with connection:
        mapped = memoryview(mmap.mmap(connection.fileno(), 0, access=mmap.ACCESS_COPY))
    begins, count = TRAILER.unpack(mapped[-TRAILER.size :])
    entries = list(ENTRY.iter_unpack(mapped[begins : begins + count * ENTRY.size]))
    buffers = [mapped[start : start + length] for start, length in entries]
    head = mapped[: min([begins, *(start for start, _ in entries)])]
    try:
        _tables[:] = main_module.loads(head, buffers)
    except Exception as error:
        raise Error(
            "The tables cannot be unpickled in the rank: "
            f"{type(error).__name__}: {error}. Their classes must be importable there; a column "
            "of plain numbers or texts always is."
        ) from error


def given(number: int) -> Any:
    """The table of that number, as the training function gets it."""
    # Not at the top: the worker imports this module too, and torch takes a second.
    from ddp_common.ranks.dealing import Placement
    from ddp_common.ranks.rows import Rows

    table = _tables[number]
    row, piece = table.borrowed or (None, None)
    placement = Placement(table.lengths, list(table.parts), row)
    return Rows(table.name, placement, table.parts, piece, table.uneven)


class StandIn:
    """Stands for a table among the arguments while they travel; unpickled it is the table."""

    def __init__(self, number: int):
        self.number = number

    def __reduce__(self) -> tuple:
        return given, (self.number,)
