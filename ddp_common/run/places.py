"""Where run directories are: on this machine, or at a URL with a mirror on this machine.

Promises: two launches never get the same new directory, and one that is made is private to its
owner.
"""

import os
import time
import uuid
from pathlib import Path

from ddp_common.errors import Error
from ddp_common.files import absolute, make_private
from ddp_common.run.mirror import Mirror

REPOSITORY = Path(__file__).parents[2]
IS_CLONE = (REPOSITORY / "pyproject.toml").is_file()  # not a wheel

mirrors: dict[str, Mirror] = {}  # URL -> Mirror


def local(location: str | Path) -> Path:
    """The path of a run directory on this machine.

    For a URL that is the path of its mirror, which is made and filled the first time it is asked
    for. Raises `Error` if there can be no such directory, or if the URL cannot be reached.
    """
    if "://" not in str(location):
        return Path(absolute(location))
    url = str(location)
    if url not in mirrors:
        mirrors[url] = Mirror(url)
    return mirrors[url].path


def shown(path: str | Path) -> str:
    """A run directory as a person would type it.

    For a mirror, and for what is in it, that is a URL; a path below the working directory is shown
    relative to it.
    """
    for url, mirror in mirrors.items():
        if Path(path).is_relative_to(mirror.path):
            return "/".join([url.rstrip("/"), *Path(path).relative_to(mirror.path).parts])
    try:
        if Path(path).resolve().is_relative_to(Path.cwd()):
            return os.path.relpath(path)
    except FileNotFoundError:  # the working directory is gone
        pass
    return str(path)


def new_directory(name: str, local: bool = False) -> Path | str:
    """A directory under RUNS that no other run has: a path, which is made, or a URL.

    With `local` it is a path even if RUNS is a URL. The default of RUNS is `runs/` in the
    repository, or in the working directory if the package is installed elsewhere. Raises `Error`
    if it cannot be made.
    """
    root = os.environ.get("RUNS")
    if not root or (local and "://" in root):
        root = str(_default_root())
    stamp = time.strftime("%Y-%m-%dT%H-%M-%S")
    if "://" in root:
        return f"{root.rstrip('/')}/{name}/{stamp}-{uuid.uuid4().hex[:4]}"

    folder = Path(absolute(root)) / name
    path = folder / stamp
    number = 1
    while not _make_new(path):
        number += 1
        path = folder / f"{stamp}-{number}"
    return path


def _default_root():
    return REPOSITORY / "runs" if IS_CLONE else absolute(".") / "runs"


def _make_new(path):
    """Make the folder `path`; False if it exists. Of two launches in one second, one makes it."""
    try:
        make_private(path.parent)
    except (OSError, ValueError) as error:
        raise _cannot_make(path, error) from None
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        return False
    except OSError as error:
        raise _cannot_make(path, error) from None
    return True


def _cannot_make(path, error):
    why = getattr(error, "strerror", None) or error
    return Error(f"Cannot make the run directory {path}: {why}. Choose another place with RUNS=…")
