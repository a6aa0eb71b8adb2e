"""Folders and files in which nobody but their owner writes, and names that a rank may save."""

import os
import re
import stat
from pathlib import Path

from ddp_common.errors import Error


def make_folder(path: Path, mode: int = 0o700) -> None:
    """Make a folder, and those above it that are missing, by default for nobody but its owner.

    One that exists stays as it is. Raises OSError if it cannot be made.
    """
    for folder in (*reversed(path.parents), path):
        folder.mkdir(mode=mode, exist_ok=True)


def open_file(path: str | Path, flags: int) -> int:
    """What `open` takes as its `opener`, for a file of a run: follows no link, waits for nobody.

    Nobody but its owner writes in one that is made, whatever the umask. Raises `Error` for what is
    there and is no file.
    """
    if os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode):
        raise Error(
            f"{path} is a link or something else that is no file, and the run keeps a file there. "
            "Find out who has put it there, and remove it."
        )
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)


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


def refuse_name_of_the_run(name: str):
    """Raise `Error` for a relative path that a run itself writes to."""
    first = re.split(r"[/\\]", name)[0]
    if first in OF_THE_RUN or first == RESULT or METRICS_OF_A_RANK.fullmatch(first):
        raise Error(
            f"save_file({name!r}, …) would overwrite what the run itself keeps there.\n"
            f"Choose another name than {', '.join(OF_THE_RUN)}, {RESULT}, metrics-0.jsonl, …"
        )
