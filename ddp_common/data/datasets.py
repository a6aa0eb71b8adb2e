"""Data sets: what the repository ships or draws works with nothing downloaded; `download` brings the whole, verified.

`data/datasets.yaml` says for each where it comes from and whose it is. Downloads go to `data/cache/<name>/` under a temporary name
and are renamed when they are whole: a file or folder that is there is a good one (see `downloads`). Pictures are drawn into
`data/cache/<name>-drawn/`, in a folder named after the programs that drew them: they are never those of another version.
"""

import gzip
import importlib.util
import math
import os
import shutil
import tempfile
import zlib
from pathlib import Path
from types import SimpleNamespace

import pandas
import pooch
import yaml

from ddp_common.data import downloads
from ddp_common.data.drawing import draw_all, edition
from ddp_common.errors import Error

DATA = Path(__file__).parents[2] / "data"


def registry():
    """The content of data/datasets.yaml: a dict of name -> entry."""
    return yaml.safe_load((DATA / "datasets.yaml").read_text())


def entry_of(name):
    known = registry()
    if name not in known:
        raise Error(f"There is no data set {name!r}. There is: {', '.join(known)}.")
    return known[name]


def fetch(name, data="shipped"):
    """Where a data set lies. Nothing is downloaded.

    `data` is 'shipped' (in the repository, or drawn by it), 'full' (in DDP_DATA/<name>/ or in data/cache/<name>/, after `make data`),
    a path, or a URL such as s3://bucket/prefix. Returns a namespace: path (Path, or the URL as a str), origin (a phrase for the
    reader), licence, title. Raises `Error` if it is missing or empty; a URL is not looked at.
    """
    entry = entry_of(name)
    licence = entry["licence"]
    if data == "shipped" and entry["shipped"].endswith(".py"):
        path, origin, licence = (
            drawn(name, DATA / entry["shipped"]),
            "drawn stand-in, not photographs",
            "that of this repository",
        )
    elif data == "shipped":
        path, origin = DATA / entry["shipped"], "shipped with the repository"
    elif data == "full":
        places = [Path(os.environ["DDP_DATA"]) / name] if os.environ.get("DDP_DATA") else []
        found = [
            place
            for place in [*places, cache(name)]
            if all((place / each).exists() for each in full_files(entry))
        ]
        if not found:
            raise Error(
                f"The full data set {name} is not here. Run `make data TUTORIAL={name}` first, or use data=shipped."
            )
        path, origin = full_path(entry, found[0]), f"full set in {found[0]}"
    else:
        path, origin = data if "://" in str(data) else Path(data), f"your own, {data}"
    if isinstance(path, str):
        return SimpleNamespace(path=path, origin=origin, licence=licence, title=entry["title"])
    if not path.exists():
        raise Error(
            f"There is no file {path} to read {name} from. Use data=shipped, data=full, or the path of your own."
        )
    if path.is_file() and path.stat().st_size == 0:
        raise Error(
            f"{path} is empty. Restore it (git checkout for shipped data, `make data TUTORIAL={name}` for the full set)."
        )
    one_file = (
        Path(entry["shipped"]).suffix not in ("", ".py") if "shipped" in entry else path.is_file()
    )
    if one_file and path.is_dir():
        raise Error(
            f"{path} is a folder. {entry['title']}: that is one file. Use data=shipped, data=full, or the path of your own file."
        )
    if not one_file and not path.is_dir():
        raise Error(
            f"{path} is a file. {entry['title']}: that is a folder. Use data=shipped, data=full, or the path of your own folder."
        )
    if name in CHECK and data not in ("shipped", "full"):
        CHECK[name](path)
    return SimpleNamespace(path=path, origin=origin, licence=licence, title=entry["title"])


def cache(name):
    return DATA / "cache" / name


def full_files(entry):
    """The names of the files that a full data set consists of."""
    return entry["full"] if isinstance(entry["full"], list) else [entry["full"]]


def full_path(entry, folder):
    """The path of a full data set in `folder`: its one file, or the folder of its files."""
    return folder if isinstance(entry["full"], list) else folder / entry["full"]


def drawn(name, script):
    """The folder of pictures that `script` draws (it has `draw`, CLASSES and PER_CLASS): in seconds, once, whole or not at all."""
    folder = cache(f"{name}-drawn") / edition(script)
    if folder.is_dir() and any(folder.iterdir()):
        return folder
    specification = importlib.util.spec_from_file_location(f"draw_{name}", script)
    specification.loader.exec_module(module := importlib.util.module_from_spec(specification))
    with downloads.only_one(folder.parent, wait=True):
        return draw_all(module.draw, module.CLASSES, module.PER_CLASS, folder)


def download(name, progressbar=True):
    """Bring the full data set `name` to data/cache/; returns the path. What is there already is kept, unless it is a live list.

    Raises `Error` without a network, when a checksum differs, when the content is not what was expected, and when the disk is full.
    """
    entry, folder = entry_of(name), cache(name)
    with downloads.only_one(folder):
        for left in folder.glob(".download-*"):  # by a program that was killed
            shutil.rmtree(left)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".download-") as temporary:
            for file in entry["files"]:
                if is_here(folder, file):
                    continue
                path = downloads.retrieve(file, Path(temporary), folder, progressbar)
                if "unpack" in file:
                    downloads.unpack(path, folder / path.stem, progressbar, **file["unpack"])
                    path.unlink()
            if name in CONVERT:
                CONVERT[name](Path(temporary))
            for path in Path(temporary).iterdir():
                if path.name in full_files(entry):
                    os.replace(path, folder / path.name)
    return full_path(entry, folder)


def is_here(folder, file):
    """Whether a file of the registry lies in `folder`: unpacked, or with its digest."""
    if "unpack" in file:
        return (folder / Path(file["name"]).stem).is_dir()
    return (
        bool(file["sha256"])
        and (folder / file["name"]).exists()
        and pooch.file_hash(folder / file["name"]) == file["sha256"]
    )


def count_names(names):
    """Count a column of names as they were typed: lower case, spaces trimmed, only those of the alphabet [a-z\\-. ] with a letter.

    Returns a DataFrame with the columns name (sorted) and count.
    """
    tidy = names.dropna().astype(str).str.lower().str.strip()
    tidy = tidy[tidy.str.fullmatch(r"[a-z\-. ]+") & tidy.str.contains("[a-z]")]
    return (
        tidy.value_counts()
        .rename_axis("name")
        .reset_index(name="count")
        .sort_values("name", ignore_index=True)
    )


def check_names(path):
    """Raise `Error` unless the file is a table of names: CSV, the columns name and count, at least `LEAST_NAMES` rows, all of use."""
    try:
        table = pandas.read_csv(path, keep_default_na=False, dtype=str)
    except (ValueError, pandas.errors.ParserError, UnicodeDecodeError, OSError) as error:
        why = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        raise Error(f"{path} is no table of names: {why}. {NAMES_FORMAT}") from None
    if list(table.columns) != ["name", "count"]:
        columns = ", ".join(f"{str(column):.40}" for column in table.columns[:5])
        raise Error(
            f"{path} has the columns {columns}{', …' * (len(table.columns) > 5)}. {NAMES_FORMAT}"
        )
    if len(table) < LEAST_NAMES:
        raise Error(
            f"{path} holds {len(table)} name(s), and {LEAST_NAMES} are needed: a tenth of them is held out to judge by. Add names."
        )
    for faulty, what in (
        (~table["name"].str.fullmatch(r"[a-z\-. ]{1,100}"), "name"),
        (~table["count"].str.fullmatch(r"0*[1-9][0-9]{0,8}"), "count"),
    ):
        if faulty.any():
            row = faulty.idxmax()
            raise Error(
                f"{path} has the {what} {table[what][row]!r:.60} in row {row + 1}. {NAMES_FORMAT}"
            )


LEAST_NAMES = 10
NAMES_FORMAT = (
    "It is CSV in UTF-8 with the columns name and count: names of small letters a to z, '-', '.' and spaces, at most 100 of them, "
    "and how often each was given."
)
CHECK = {"pets": check_names}  # what can be wrong with a file of somebody's own


def _convert_pets(folder):
    column = "Animal's Name"
    try:
        names = count_names(
            pandas.read_csv(folder / "rows.csv", usecols=[column], keep_default_na=False)[column]
        )
    except (ValueError, pandas.errors.ParserError, UnicodeDecodeError) as error:
        raise Error(
            f"The list that came has no column {column!r} ({error}). The city may have changed its format; use data=shipped."
        ) from None
    if names.empty:
        raise Error(
            "The list that came holds no names. Try again later; data=shipped needs no download."
        )
    names.to_csv(folder / "names.csv", index=False, lineterminator="\n")


CONVERT = {
    "pets": _convert_pets
}  # what has to be made of the files that came, where they are not used as they are


def read_idx(path):
    """The content of a gzipped IDX file of bytes (MNIST's format): a uint8 tensor of the shape that its header states.

    Raises `Error` for a file that is missing, not gzip, damaged, of another type, or of another length than it states.
    """
    import torch

    remedy = "Restore it: git checkout for shipped data, `make data` for the full set."
    try:
        with gzip.open(path) as file:
            content = file.read()
    except (
        OSError,
        EOFError,
        zlib.error,
    ) as error:  # OSError: also what is no gzip, or has a wrong CRC
        raise Error(
            f"{path} cannot be read: {getattr(error, 'strerror', None) or error}. {remedy}"
        ) from None
    axes = content[3] if len(content) > 3 else 0
    if content[:3] != b"\0\0\x08" or not axes or len(content) < 4 + 4 * axes:
        raise Error(
            f"{path} is no IDX file of bytes: it begins with {content[:4].hex(' ') or 'nothing'}, not with 00 00 08 and the number of axes. {remedy}"
        )
    shape = [int.from_bytes(content[4 + 4 * axis : 8 + 4 * axis]) for axis in range(axes)]
    if (there := len(content) - 4 - 4 * axes) != math.prod(shape) or not there:
        raise Error(
            f"{path} states {' x '.join(map(str, shape))} = {math.prod(shape):,} bytes and holds {there:,}. {remedy}"
        )
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)[4 + 4 * axes :].reshape(shape)
