"""The files of a folder of checkpoints: their names, which are good, which may go.

A checkpoint is one file, `step-00000120.9f2c41d07b3e5a68.pt`: the steps that were done, then the
first 16 digits of the SHA-256 of its content (64 bits). It gets this name by a single rename when
it is whole and on the disk. So whatever happens, a file is good if its content has the digest that
its name says. Imports no torch: client and worker look at these files too.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from ddp_common.errors import Error
from ddp_common.files import open_file

DIGITS = 16  # of the SHA-256, in hexadecimal
TEMPORARY = "saving.tmp"  # a file that is being written; after a kill the next one replaces it

_installed: set[Path] = set()  # by this process: good, and not read again to see it


def checkpoints(directory: str | Path) -> list[Path]:
    """The checkpoint files of a directory, good or not, those of fewer steps first.

    Raises `Error` if the directory cannot be read.
    """
    try:
        found = [name for name in os.listdir(directory) if re.fullmatch(r"step-\d.*\.pt", name)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise Error(f"The folder {directory} cannot be read: {error.strerror}.") from None
    return sorted(map(Path(directory).joinpath, found), key=lambda path: (step_of(path), path))


def step_of(path: str | Path) -> int:
    """The number of steps in the name of a checkpoint file."""
    match = re.match(r"step-(\d+)", Path(path).name)
    assert match is not None, "it is the name of a checkpoint"
    return int(match[1])


def stated_digest(path: Path) -> str | None:
    """The digest in the name of a checkpoint file; None if there is none."""
    match = re.fullmatch(rf"step-\d+\.([0-9a-f]{{{DIGITS}}})\.pt", path.name)
    return match[1] if match else None


def digest(path: Path) -> str:
    """The digest of what is in a file."""
    with open(path, "rb", opener=open_file) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:DIGITS]


def install(temporary: Path, step: int) -> Path:
    """Give a whole file, which is on the disk, its name; returns that."""
    path = temporary.with_name(f"step-{step:08d}.{digest(temporary)}.pt")
    os.replace(temporary, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the name, too, is to survive a power cut
    finally:
        os.close(folder)
    _installed.add(path)
    return path


@contextlib.contextmanager
def new_temporary(directory: Path) -> Iterator[BinaryIO]:
    """A new temporary file, in place of one that a kill has left. It goes unless it is renamed."""
    temporary = directory / TEMPORARY
    if not temporary.is_symlink():  # else `open_file` says so
        temporary.unlink(missing_ok=True)
    with open(temporary, "x+b", opener=open_file) as file:  # NFS locks no other for sharing
        try:
            yield file
        finally:
            temporary.unlink(missing_ok=True)


def hold(file: BinaryIO) -> None:
    """Say that the temporary `file` is being written, as long as it is open."""
    with contextlib.suppress(OSError):  # a disk without locks
        fcntl.flock(file, fcntl.LOCK_SH)


def remove_unfinished(directory: Path) -> None:
    """Remove what a killed process has left half-written, unless somebody is writing there."""
    temporary = directory / TEMPORARY
    with contextlib.suppress(OSError):  # there is none, it is held, or the disk has no locks
        with open(temporary, "r+b", opener=open_file) as file:  # to write, too: NFS locks no other
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            temporary.unlink()


def remove_all_but(keep: int, newest: Path) -> None:
    """Retention: `newest`, which was just written, and the last good ones with fewer steps stay.

    `keep` is how many stay together. Others of its step are replaced by it. Of later ones those
    that are good stay: they are of a run that this one has not resumed. Raises FileNotFoundError
    if `newest` has gone.
    """
    found = checkpoints(newest.parent)
    if newest not in found:
        raise FileNotFoundError(
            errno.ENOENT, "something else has removed it. Is another run writing in that folder?"
        )
    left_to_keep = keep - 1
    for path in reversed(found):
        if step_of(path) > step_of(newest):
            stays = _may_be_good(path)
        elif step_of(path) == step_of(newest):
            stays = path == newest
        else:
            stays = left_to_keep > 0 and (path in _installed or _may_be_good(path))
            left_to_keep -= stays
        if not stays:
            path.unlink(missing_ok=True)
            _installed.discard(path)


def _may_be_good(path: Path) -> bool:
    try:
        return fault(path) is None
    except Error:  # what cannot be read is not damaged
        return True


def fault(path: Path) -> str | None:
    """What is wrong with a checkpoint file, in words; None if it is good.

    Raises FileNotFoundError if it has been removed, `Error` if it cannot be read.
    """
    stated = stated_digest(path)
    if stated is None:
        return "its name has no digest: was it renamed?"
    try:
        actual = digest(path)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise Error(
            f"The checkpoint {path} cannot be read: {error.strerror}. It may be good: see to it "
            "that you can read it; or move it away, to go on from the one before."
        ) from None
    if actual != stated:
        _installed.discard(path)
        return "its SHA-256 is not the one that it was written with"
    return None


def newest(directory: str | Path) -> Path | None:
    """The newest good checkpoint in `directory`, None if there is no checkpoint at all.

    Damaged ones are named on stderr. Raises `Error` if all are damaged, or one cannot be read.
    """
    faults = []
    for path in reversed(checkpoints(directory)):
        try:
            problem = fault(path)
        except FileNotFoundError:  # a run has just written a newer one, and removed this
            return newest(directory)
        if problem is None:
            return path
        faults.append(problem)
        text = f"Checkpoint {path} is damaged: {problem}. Trying the one before it."
        print(text, file=sys.stderr, flush=True)
    if faults:
        raise Error(
            f"No checkpoint in {directory} is good: all {len(faults)} are damaged "
            f"({faults[-1]}). Start a new run without RESUME."
        )
    return None
