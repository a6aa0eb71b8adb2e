"""Files and folders: private to their owner, whole or not there at all.

Promises: a file that `save_whole` writes is never seen half-written, and never lies outside of its
folder.
"""

import errno
import os
import re
import uuid
from pathlib import Path

from ddp_common.errors import Error


def absolute(location: str | Path) -> Path | str:
    """The place that a path means now, whatever the working directory is later.

    `~` is the home directory; a URL stays as it is. Raises `Error` for what can be no path.
    """
    if "://" in str(location):
        return location
    try:
        return Path(location).expanduser().absolute()
    except (TypeError, RuntimeError, OSError) as error:
        # In this order: no path at all; no such user; the working directory is gone.
        raise Error(
            f"{location!r} cannot be a run directory: {error}.\nGive the full path of a folder."
        ) from None


def make_private(path: Path):
    """Make a folder, and those above it that are missing, for nobody but its owner.

    One that exists stays as it is. Raises OSError if it cannot be made.
    """
    if path.is_dir():
        return
    if path.parent != path:
        make_private(path.parent)
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        if not path.is_dir():
            raise
        # else another process was quicker


def save_whole(directory: Path, name: str, content: bytes):
    """Write bytes to `name` in `directory`, whole or not at all.

    Raises `Error` for a name that leads out of the directory, OSError for a full disk.
    """
    check_name(name)
    path = directory / name
    target = path.resolve()
    if not target.is_relative_to(directory.resolve()):
        raise Error(
            f"The file name {name!r} leads out of the run directory through a link ({target}).\n"
            "Choose another name."
        )
    if not directory.is_dir():  # a run directory that was removed is not made again
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(directory))
    path.parent.mkdir(parents=True, exist_ok=True)
    # Of its own for each writer: under torchrun every rank may save the same file
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)  # it is there after a full disk, half-written


def check_name(name: str):
    """Raise `Error` unless `name` is a relative path of plain names, on any system."""
    parts = re.split(r"[/\\]", name)
    has_drive = ":" in parts[0]
    has_odd_part = any(part in ("", ".", "..") for part in parts)
    if not name.isprintable() or has_drive or has_odd_part:
        raise Error(
            f"The file name {name!r} would leave the run directory.\n"
            "Use a relative name such as 'samples/epoch-1.txt'."
        )


# What a run itself writes in its directory: files, and folders with all that is in them
OF_THE_RUN = ("config.json", "metrics.jsonl", "log.txt", "checkpoints", ".lock")
RESULT = ".result.pt"  # under torchrun: rank 0's result, until all ranks have read it
METRICS_OF_A_RANK = re.compile(r"metrics-(\d+)\.jsonl")  # under torchrun: until the run has ended


def metrics_of(rank: int) -> str:
    """The file of a rank's own reports, where torchrun or srun has started the ranks."""
    return f"metrics-{rank}.jsonl"


def refuse_name_of_the_run(name: str):
    """Raise `Error` for a relative path that a run itself writes to."""
    first = re.split(r"[/\\]", name)[0]
    if first in OF_THE_RUN or first == RESULT or METRICS_OF_A_RANK.fullmatch(first):
        raise Error(
            f"save_file({name!r}, …) would overwrite what the run itself keeps there.\n"
            f"Choose another name than {', '.join(OF_THE_RUN)}, {RESULT}, metrics-0.jsonl, …"
        )


def is_file(path: Path) -> bool:
    """Whether there is such a file; False also for what cannot be the name of one."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False
