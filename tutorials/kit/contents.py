"""What the files of each data set hold: checks of those of one's own, and how digits are read.

Promises: a file that is damaged, or is none of its kind, is an `Error` that says what it should
hold. pandas, pyarrow and torch are imported by the functions that need them: a command starts
without them.
"""

import gzip
import math
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_common.errors import Error

if TYPE_CHECKING:
    import pandas

# The names of pets

LEAST_NAMES = 10
NAMES_FORMAT = (
    "It is CSV in UTF-8 with the columns name and count: names of small letters a to z, '-', '.' "
    "and spaces, at most 100 of them, and how often each was given."
)


def count_names(names: "pandas.Series") -> "pandas.DataFrame":
    r"""Count a column of names as they were typed: in lower case, without spaces around them.

    Only those of the alphabet [a-z\-. ] with a letter count. Returns the columns name (sorted) and
    count.
    """
    tidy = names.dropna().astype(str).str.lower().str.strip()
    tidy = tidy[tidy.str.fullmatch(r"[a-z\-. ]+") & tidy.str.contains("[a-z]")]
    counts = tidy.value_counts().rename_axis("name").reset_index(name="count")
    return counts.sort_values("name", ignore_index=True)


def check_names(path: Path):
    """Raise `Error` unless the file is a table in `NAMES_FORMAT`, with `LEAST_NAMES` rows."""
    import pandas

    try:
        table = pandas.read_csv(path, keep_default_na=False, dtype=str)
    except (ValueError, OSError) as error:  # ValueError: also pandas' own
        why = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        raise Error(f"{path} is no table of names: {why}. {NAMES_FORMAT}") from None
    if list(table.columns) != ["name", "count"]:
        columns = ", ".join(f"{str(column):.40}" for column in table.columns[:5])
        if len(table.columns) > 5:
            columns += ", …"
        raise Error(f"{path} has the columns {columns}. {NAMES_FORMAT}")
    if len(table) < LEAST_NAMES:
        raise Error(
            f"{path} holds {len(table)} name(s), and {LEAST_NAMES} are needed: "
            "a tenth of them is held out to judge by. Add names."
        )
    for column, pattern in (("name", r"[a-z\-. ]{1,100}"), ("count", r"0*[1-9][0-9]{0,8}")):
        faulty = ~table[column].str.fullmatch(pattern)
        if faulty.any():
            row = faulty.idxmax()
            value = table[column][row]
            raise Error(f"{path} has the {column} {value!r:.60} in row {row + 1}. {NAMES_FORMAT}")


def convert_names(path: Path) -> Path:
    """Make names.csv, beside it, of the city's list; returns its path."""
    import pandas

    column = "Animal's Name"
    try:
        table = pandas.read_csv(path, usecols=[column], keep_default_na=False)
        names = count_names(table[column])
    except ValueError as error:
        raise Error(
            f"The list that came has no column {column!r} ({error}). "
            "The city may have changed its format; use data=shipped."
        ) from None
    if names.empty:
        raise Error(
            "The list that came holds no names. Try again later; data=shipped needs no download."
        )
    converted = path.with_name("names.csv")
    names.to_csv(converted, index=False, lineterminator="\n")
    return converted


# Flights, with weather and aircraft

FLIGHTS_TABLES = {
    "flights": (
        "time_hour month day sched_dep_time sched_arr_time dep_delay arr_delay "
        "carrier tailnum origin dest distance"
    ).split(),
    "weather": "origin time_hour temp dewp humid wind_speed precip pressure visib".split(),
    "planes": "tailnum year manufacturer seats".split(),
    "airlines": "carrier name".split(),
}


def check_flights(folder: Path):
    """Raise `Error` unless the folder has a Parquet file for each of `FLIGHTS_TABLES`.

    Each must have the columns that stand there, and rows. Only the files' metadata are read.
    """
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    for name, columns in FLIGHTS_TABLES.items():
        path = folder / f"{name}.parquet"
        needs = f"It is Parquet with the columns {', '.join(columns)}."
        if not path.is_file():
            raise Error(f"There is no table of {name}, {path}. {needs}")
        try:
            with ParquetFile(path) as file:
                schema, rows = file.schema_arrow, file.metadata.num_rows
        except (OSError, ArrowException) as error:
            why = str(error).partition("\n")[0]
            raise Error(f"{path} is no table of {name}: {why}. {needs}") from None
        missing = [column for column in columns if column not in schema.names]
        if missing:
            raise Error(f"{path} has no column {', '.join(missing)}. {needs}")
        if not rows:
            raise Error(f"{path} has no rows. {needs}")


# The digits of MNIST


def read_idx(path: Path):
    """The content of a gzipped IDX file of bytes, MNIST's format.

    Returns a uint8 tensor of the shape that the file's header states. Raises `Error` for a file
    that is missing, not gzip, damaged, of another type, or of another length than it states.
    """
    import torch  # slow to import, and only this function needs it

    remedy = "Restore it: git checkout for shipped data, `make data` for the full set."
    try:
        with gzip.open(path) as file:
            content = file.read()
    except (OSError, EOFError, zlib.error) as error:
        # OSError: also what is no gzip, or has a wrong CRC.
        why = getattr(error, "strerror", None) or error
        raise Error(f"{path} cannot be read: {why}. {remedy}") from None
    axes = content[3] if len(content) > 3 else 0
    header = 4 + 4 * axes  # bytes
    if content[:3] != b"\0\0\x08" or not axes or len(content) < header:
        beginning = content[:4].hex(" ") or "nothing"
        raise Error(
            f"{path} is no IDX file of bytes: it begins with {beginning}, "
            f"not with 00 00 08 and the number of axes. {remedy}"
        )
    shape = [int.from_bytes(content[4 + 4 * axis : 8 + 4 * axis]) for axis in range(axes)]
    stated = math.prod(shape)
    present = len(content) - header
    if present != stated or not present:
        sides = " x ".join(map(str, shape))
        raise Error(f"{path} states {sides} = {stated:,} bytes and holds {present:,}. {remedy}")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)[header:].reshape(shape)
