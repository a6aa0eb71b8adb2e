"""The secret of a run: what its ranks know and nobody else does, so that they can tell each other from strangers.

Whoever starts ranks makes one and hands it on in the environment (`DDP_SECRET`): our agents, `make
run`, the batch scripts. Ranks that somebody else has started, with a plain `torchrun` say, agree on
one through a file that only their user can read. It is never on a command line, which everybody on
a host can see.
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

_said = False


def new():
    """A secret, str of 64 hexadecimal digits."""
    return secrets.token_hex(32)


def of_this_run():
    """The secret that this rank shares with its peers (bytes); empty where none can be agreed on, which rank 0 says."""
    given = os.environ.get(VARIABLE)
    if given:
        return given.encode()
    for folder in _folders():
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if found := _from_file(folder / FILE):
                return found
    _say_that_there_is_none()
    return b""


def remove_from_run_directory():
    """All ranks are in: nobody needs the file in the run's folder any more."""
    folder = _run_directory()
    if folder is not None and VARIABLE not in os.environ:
        with contextlib.suppress(OSError):
            (folder / FILE).unlink()


def _folders():
    """Where all ranks may see one file: the run's own folder, the user's home, a folder of the user's on this host."""
    run, own = _run_directory(), Path(tempfile.gettempdir()) / f"ddp-{os.geteuid()}"
    return [*([run] if run is not None else []), Path(os.path.expanduser("~")), own]


def _run_directory():
    chosen = os.environ.get("CHECKPOINT") or os.environ.get("RESUME")
    return Path(chosen).absolute() if chosen and "://" not in chosen else None


def _from_file(path):
    """What the file says (bytes), made if it is not there: who comes first wins. Empty if others may read it. Raises OSError."""
    if not path.exists():
        handle, temporary = tempfile.mkstemp(prefix=f"{FILE}-", dir=path.parent)  # mode 0600
        try:
            with open(handle, "w") as file:
                file.write(new())
            with contextlib.suppress(FileExistsError):  # a peer was first, and its file is whole
                os.link(temporary, path)
        finally:
            os.unlink(temporary)
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        status = os.fstat(file.fileno())
        readable = status.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
        return b"" if readable or status.st_uid != os.geteuid() else file.read()


def _say_that_there_is_none():
    global _said
    if not _said and os.environ.get("RANK", os.environ.get("SLURM_PROCID")) == "0":
        print(
            f"The ranks could not agree on a secret: no file could be made in {', '.join(map(str, _folders()))}. Whoever reaches "
            f"their ports can disturb them. Set {VARIABLE} to the same random text for every rank.",
            file=sys.stderr,
            flush=True,
        )
    _said = True
