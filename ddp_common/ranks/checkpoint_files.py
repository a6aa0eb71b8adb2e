"""The files of a folder of checkpoints: names, digests, which are good, which may go.

`step-00000120.pt` has its SHA-256 beside it, which was there first. Imports no torch: client and
worker look at these files too.
"""

import errno
import hashlib
import os
import sys
from pathlib import Path

from ddp_common.errors import Error


def remove_all_but(keep: int, newest: Path) -> None:
    """Retention: of the files up to `newest`, the one just written, keep the last `keep`.

    Later ones can only be damaged, and go. Raises FileNotFoundError if `newest` has gone.
    """
    known = checkpoints(newest.parent)
    if newest not in known:
        raise FileNotFoundError(
            errno.ENOENT, "something else has removed it. Is another run writing in that folder?"
        )
    after_newest = known.index(newest) + 1
    first_kept = max(0, after_newest - keep)
    for old in [*known[:first_kept], *known[after_newest:]]:
        old.unlink(missing_ok=True)
        digest_file(old).unlink(missing_ok=True)


def checkpoints(directory: str | Path) -> list[Path]:
    """The checkpoint files of a directory, oldest first."""
    return sorted(Path(directory).glob("step-*.pt"))


def step_of(path: Path) -> int:
    return int(path.stem.removeprefix("step-"))


def digest_file(path: Path) -> Path:
    return path.with_suffix(".sha256")


def install(temporary: Path, path: Path) -> None:
    """Give a whole, synced file its name, its digest first.

    Where there is a file of that name, its digest stays valid until the new file has replaced it.
    """
    digests = [sha256(temporary)]
    if path.exists():
        digests += stated_digests(path)[:1]
    temporary_digest = digest_file(path).with_suffix(".sha256.tmp")
    temporary_digest.write_text("".join(f"{digest}  {path.name}\n" for digest in digests))
    os.replace(temporary_digest, digest_file(path))
    os.replace(temporary, path)
    _sync_folder(path.parent)


def _sync_folder(path):
    """The names, too, are to survive a power cut."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def stated_digests(path: Path) -> list[str]:
    """The digests written beside a checkpoint file; empty if there are none to be read."""
    try:
        lines = digest_file(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return []
    return [line.split()[0] for line in lines if line.split()]


def fault(path: Path) -> str | None:
    """What is wrong with a checkpoint file, in words; None if it is good."""
    stated = stated_digests(path)
    if not stated:
        return f"its digest {digest_file(path).name} is missing or none"
    try:
        digest = sha256(path)
    except FileNotFoundError:
        return "it has been removed"
    if digest not in stated:
        return "its SHA-256 is not the one it was written with"
    return None


def newest_good(directory: str | Path) -> Path | None:
    """The newest good checkpoint in `directory`, None if there is none; says nothing of others."""
    found = checkpoints(directory)
    for path in reversed(found):
        if fault(path) is None:
            return path
    return newest_good(directory) if _some_are_gone(found) else None


def _some_are_gone(found):
    """Whether some of the files have been removed: then a run has just written a newer one."""
    return not all(os.path.lexists(path) for path in found)


def newest(directory: str | Path, quiet: bool = False) -> Path | None:
    """The newest good checkpoint in `directory`, None if there is no checkpoint at all.

    Damaged ones are named on stderr, unless `quiet`. Raises `Error` if all are damaged.
    """
    found = checkpoints(directory)
    for path in reversed(found):
        problem = fault(path)
        if problem is None:
            return path
        if not quiet and os.path.lexists(path):
            print(
                f"Checkpoint {path} is damaged: {problem}. Trying the one before it.",
                file=sys.stderr,
                flush=True,
            )
    if _some_are_gone(found):
        return newest(directory, quiet)
    if found:
        raise Error(
            f"No checkpoint in {directory} is good: all {len(found)} are damaged. Start a new run "
            "without RESUME."
        )
    return None
