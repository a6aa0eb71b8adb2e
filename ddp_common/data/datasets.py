"""Data sets: shipped or drawn by the repository, or downloaded in full and verified.

`data/datasets.yaml` says for each where it comes from and whose it is. Downloads go to
`data/cache/<name>/` under a temporary name and are renamed when they are whole. Pictures are drawn
into `data/cache/<name>-drawn/`, in a folder named after the programs that drew them, which are in
`data/`. Relies on `downloads`. Promises: a file or folder that is there is a good one; pictures
are never those of another version.
"""

import gzip
import hashlib
import math
import os
import shutil
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path
from types import SimpleNamespace

import pandas
import pooch
import yaml

from ddp_common.data import downloads
from ddp_common.errors import Error

DATA = Path(__file__).parents[2] / "data"


def registry() -> dict[str, dict]:
    """The content of data/datasets.yaml: name -> entry.

    Raises `Error` where there is no repository.
    """
    if not DATA.is_dir():
        raise Error(
            "The data of the tutorials are in a clone of the repository, and this ddp_common was "
            "installed from a wheel, which has none. Run this in a clone, or read data of your "
            "own: launch takes any training function."
        )
    return yaml.safe_load((DATA / "datasets.yaml").read_text())


def entry_of(name: str) -> dict:
    """The entry of a data set in the registry. Raises `Error` if there is none of this name."""
    known = registry()
    if name not in known:
        raise Error(f"There is no data set {name!r}. There is: {', '.join(known)}.")
    return known[name]


def fetch(name: str, data: str | Path = "shipped") -> SimpleNamespace:
    """Where a data set lies. Nothing is downloaded.

    `data` is 'shipped' (in the repository, or drawn by it), 'full' (in DDP_DATA/<name>/ or in
    data/cache/<name>/, after `make data`), a path, or a URL such as s3://bucket/prefix. Returns a
    namespace: path (Path, or the URL as a str), origin (a phrase for the reader), licence, title.
    Raises `Error` if it is missing or empty, or not what it should be; a URL is not looked at.
    """
    entry = entry_of(name)
    licence = entry["licence"]
    path: str | Path
    if data == "shipped" and entry["shipped"].endswith(".py"):
        path = drawn(name, DATA / entry["shipped"])
        origin = "drawn stand-in, not photographs"
        licence = "that of this repository"
    elif data == "shipped" or (data == "full" and ships_whole(entry)):
        path = DATA / entry["shipped"]
        origin = "shipped with the repository"
    elif data == "full":
        folder = _folder_of_full(name, entry)
        path = full_path(entry, folder)
        origin = f"full set in {folder}"
    else:
        path = data if "://" in str(data) else Path(data).expanduser()
        origin = f"your own, {data}"
    if not isinstance(path, str):
        _check_present(name, path)
        if data not in ("shipped", "full"):
            _check_own(name, entry, path)
    return SimpleNamespace(path=path, origin=origin, licence=licence, title=entry["title"])


def _folder_of_full(name, entry):
    """The folder that holds the full data set. Raises `Error` if there is none."""
    places = [cache(name)]
    if os.environ.get("DDP_DATA"):
        places.insert(0, Path(os.environ["DDP_DATA"]).expanduser() / name)
    for place in places:
        if all((place / file).exists() for file in full_files(entry)):
            return place
    raise Error(
        f"The full data set {name} is not here. "
        f"Run `make data TUTORIAL={name}` first, or use data=shipped."
    )


def _check_present(name, path):
    """Raise `Error` unless `path` is there, and not an empty file."""
    if not path.exists():
        raise Error(
            f"There is no file {path} to read {name} from. "
            "Use data=shipped, data=full, or the path of your own."
        )
    if path.is_file() and path.stat().st_size == 0:
        raise Error(
            f"{path} is empty. Restore it (git checkout for shipped data, "
            f"`make data TUTORIAL={name}` for the full set)."
        )


def _check_own(name, entry, path):
    """Raise `Error` unless a reader's own file or folder is what the data set consists of."""
    needs_file = Path(entry["shipped"]).suffix not in ("", ".py")
    if needs_file and path.is_dir():
        raise Error(
            f"{path} is a folder. {entry['title']}: that is one file. "
            "Use data=shipped, data=full, or the path of your own file."
        )
    if not needs_file and not path.is_dir():
        raise Error(
            f"{path} is a file. {entry['title']}: that is a folder. "
            "Use data=shipped, data=full, or the path of your own folder."
        )
    if name in CHECK:
        CHECK[name](path)


def cache(name: str) -> Path:
    return DATA / "cache" / name


def ships_whole(entry: dict) -> bool:
    """Whether the repository has all of the data set, so that nothing is left to download."""
    return "full" not in entry


def full_files(entry: dict) -> list[str]:
    """The names of the files that a full data set consists of."""
    return entry["full"] if isinstance(entry["full"], list) else [entry["full"]]


def full_path(entry: dict, folder: Path) -> Path:
    """The path of a full data set in `folder`: its one file, or the folder of its files."""
    return folder if isinstance(entry["full"], list) else folder / entry["full"]


def drawn(name: str, script: Path) -> Path:
    """The folder of pictures that `script` draws: python draw.py FOLDER.

    They are drawn once, in seconds, whole or not at all. Raises `Error` if that fails.
    """
    programs = script.read_bytes() + (DATA / "drawing.py").read_bytes()
    edition = hashlib.sha256(programs).hexdigest()[:8]
    folder = cache(f"{name}-drawn") / edition
    if folder.is_dir() and any(folder.iterdir()):
        return folder
    with downloads.only_one(folder.parent):
        done = subprocess.run([sys.executable, script, folder], stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise Error(f"The pictures of {name} were not drawn. {said[-1].removeprefix('Error: ')}")
    return folder


def download(name: str, progressbar: bool = True) -> Path:
    """Download the full data set `name` to data/cache/; returns the path.

    What is there already is kept, unless it is a live list. Raises `Error` without a network, when
    a checksum differs, when the content is not what was expected, and when the disk is full.
    """
    entry = entry_of(name)
    if ships_whole(entry):
        return DATA / entry["shipped"]
    folder = cache(name)
    with downloads.only_one(folder):
        for left in folder.glob(".download-*"):  # by a program that was killed
            shutil.rmtree(left)
        for file in entry["files"]:
            if is_here(folder, file):
                continue
            with tempfile.TemporaryDirectory(dir=folder, prefix=".download-") as temporary:
                path = downloads.retrieve(file, Path(temporary), progressbar)
                if name in CONVERT:
                    path = CONVERT[name](path)
                os.replace(path, folder / path.name)
    return full_path(entry, folder)


def is_here(folder: Path, file: dict) -> bool:
    """Whether a file of the registry lies in `folder`: unpacked, or with its digest."""
    path = folder / file["name"]
    if file.get("unpack"):
        return path.with_suffix("").is_dir()
    if not file["sha256"] or not path.exists():
        return False
    return pooch.file_hash(path) == file["sha256"]


# The names of pets

LEAST_NAMES = 10
NAMES_FORMAT = (
    "It is CSV in UTF-8 with the columns name and count: names of small letters a to z, '-', '.' "
    "and spaces, at most 100 of them, and how often each was given."
)
UNREADABLE_CSV = (ValueError, pandas.errors.ParserError, UnicodeDecodeError)


def count_names(names: pandas.Series) -> pandas.DataFrame:
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
    try:
        table = pandas.read_csv(path, keep_default_na=False, dtype=str)
    except (*UNREADABLE_CSV, OSError) as error:
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


def _convert_pets(path):
    """Make names.csv, beside it, of the city's list; returns its path."""
    column = "Animal's Name"
    try:
        table = pandas.read_csv(path, usecols=[column], keep_default_na=False)
        names = count_names(table[column])
    except UNREADABLE_CSV as error:
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


# What can be wrong with files of somebody's own
CHECK = {"pets": check_names, "flights": check_flights}
CONVERT = {"pets": _convert_pets}  # for files that are not used as they come


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
