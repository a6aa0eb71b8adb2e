"""Data sets: shipped or drawn by the repository, or downloaded in full and verified.

`data/datasets.yaml` says for each where it comes from and whose it is. Downloads go to
`data/cache/<name>/` under a temporary name and are renamed when they are whole. Pictures are drawn
into `data/cache/<name>-drawn/`, in a folder named after the programs that drew them, which are in
`data/`. Relies on `downloads` and `contents`. Promises: a file or folder that is there is a good
one; pictures are never those of another version.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import yaml

from ddp_common.errors import Error
from tutorials.kit import contents

CHECK = {"pets": contents.check_names, "flights": contents.check_flights}  # files of one's own
CONVERT = {"pets": contents.convert_names}  # files that are not used as they come

DATA = Path(__file__).parents[2] / "data"  # of the repository


def registry() -> dict[str, dict]:
    """The content of data/datasets.yaml: name -> entry."""
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
        advice = "Use data=shipped, data=full, or the path of your own."
        if path.is_relative_to(DATA):
            advice = "It is a part of the repository: `git checkout -- data` brings it back."
        raise Error(f"There is no file {path} to read {name} from. {advice}")
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
    from tutorials.kit import downloads  # not above: it imports what only downloads need

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
    from tutorials.kit import downloads  # not above: it imports what only downloads need

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
    with open(path, "rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest() == file["sha256"]
