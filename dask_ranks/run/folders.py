"""Where run directories are: folders on a disk that this program sees.

Promises: two launches never get the same new directory, and one that is made is private to its
owner.
"""

import contextlib
import itertools
import os
import time
from pathlib import Path

from ddp_common.errors import Error
from ddp_common.files import make_folder

REPOSITORY = Path(__file__).parents[2]
IS_CLONE = (REPOSITORY / "pyproject.toml").is_file()  # not a wheel


def local(location: str | Path) -> Path:
    """The absolute path of a run directory, whatever the working directory is later.

    `~` is the home directory. Raises `Error` for what can be no such path.
    """
    if "://" in str(location):
        raise Error(
            f"{location}: a run directory is a folder on a disk, not an address.\n"
            "Give a folder. docs/recipes.md copies it to a bucket, and back, in a line each."
        )
    try:
        return Path(location).expanduser().absolute()
    except (TypeError, RuntimeError, OSError) as error:
        # In this order: no path at all; no such user; the working directory is gone.
        raise Error(
            f"{location!r} cannot be a run directory: {error}.\nGive the full path of a folder."
        ) from None


def check_folder(location: str | Path | None) -> None:
    """Raise `Error` unless a run can write in the folder `location`, or make it; None is RUNS."""
    path = local(location or _root())
    there = path  # or the first folder around it that is there: what `path` would be made in
    while not os.path.lexists(there) and there != there.parent:
        there = there.parent
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        why = "you may not write there" if there.is_dir() else "it is no folder"
        raise Error(
            f"{path} cannot be a run directory: {there}: {why}.\n"
            "Choose a folder that you may write to, with directory= or RUNS=."
        )


def shown(path: str | Path) -> str:
    """A run directory as a user would type it: below the working directory, a relative path."""
    try:
        if Path(path).resolve().is_relative_to(Path.cwd()):
            return os.path.relpath(path)
    except FileNotFoundError:  # the working directory is gone
        pass
    return str(path)


def new_directory(name: str) -> Path:
    """Make a directory under RUNS that no other run has.

    The default of RUNS is `runs/` in the repository, or in the working directory if the package is
    installed elsewhere. Raises `Error` if it cannot be made.
    """
    folder = local(_root()) / name
    stamp = time.strftime("%Y-%m-%dT%H-%M-%S")
    try:
        make_folder(folder)
        for number in itertools.count(1):
            path = folder / (stamp if number == 1 else f"{stamp}-{number}")
            with contextlib.suppress(FileExistsError):  # of another launch in this second
                path.mkdir(mode=0o700)
                break
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise Error(
            f"Cannot make the run directory in {folder}: {why}.\nChoose another place with RUNS=…"
        ) from None
    return path


def _root() -> str | Path:
    return os.environ.get("RUNS") or (REPOSITORY / "runs" if IS_CLONE else "runs")
