"""The secret of a run: its ranks know it and nobody else, so that they recognize each other.

Whoever starts ranks makes one and passes it on in the environment (`DDP_SECRET`): our agents,
`make run`, the batch scripts. Ranks that something else has started, a plain `torchrun` say, agree
on one through a file that only their user can read. It is never on a command line, which
everybody on a host can see.
"""

import contextlib
import os
import secrets
import stat
import sys
import tempfile
from pathlib import Path

VARIABLE = "DDP_SECRET"
FILE = ".ddp-secret"

_has_warned = False


def new() -> str:
    """A secret: 64 hexadecimal digits."""
    return secrets.token_hex(32)


def of_this_run() -> bytes:
    """The secret that this rank shares with its peers.

    Empty if they could not agree on one; rank 0 then prints a warning.
    """
    given = os.environ.get(VARIABLE)
    if given:
        return given.encode()
    for folder in _folders():
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = _from_file(folder / FILE)
            if found:
                return found
    _warn_that_there_is_none()
    return b""


def remove_from_run_directory() -> None:
    """All ranks are in: nobody needs the file in the run's folder any more."""
    folder = _run_directory()
    if folder is not None and VARIABLE not in os.environ:
        with contextlib.suppress(OSError):
            (folder / FILE).unlink()


def _folders():
    """Where all ranks may see the same file, the most likely place first."""
    run = _run_directory()
    home = Path(os.path.expanduser("~"))
    on_this_host = Path(tempfile.gettempdir()) / f"ddp-{os.geteuid()}"
    if run is None:
        return [home, on_this_host]
    return [run, home, on_this_host]


def _run_directory():
    chosen = os.environ.get("CHECKPOINT") or os.environ.get("RESUME")
    if not chosen or "://" in chosen:
        return None
    return Path(chosen).absolute()


def _from_file(path):
    """The secret in a file, made if it is not there: the first rank to come wins.

    Returns bytes, empty if others may read the file or own it. Raises OSError.
    """
    if not path.exists():
        _make_file(path)
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        status = os.fstat(file.fileno())
        others_may_read = status.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
        is_ours = status.st_uid == os.geteuid()
        if others_may_read or not is_ours:
            return b""
        return file.read()


def _make_file(path):
    descriptor, temporary = tempfile.mkstemp(prefix=f"{FILE}-", dir=path.parent)  # mode 0600
    try:
        with open(descriptor, "w") as file:
            file.write(new())
        with contextlib.suppress(FileExistsError):  # a peer was first, and its file is whole
            os.link(temporary, path)
    finally:
        os.unlink(temporary)


def _warn_that_there_is_none():
    global _has_warned
    rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID"))
    if rank == "0" and not _has_warned:
        folders = ", ".join(map(str, _folders()))
        print(
            f"The ranks could not agree on a secret: no file could be made in {folders}. Whoever "
            f"reaches their ports can disturb them. Set {VARIABLE} to the same random text for "
            "every rank.",
            file=sys.stderr,
            flush=True,
        )
    _has_warned = True
