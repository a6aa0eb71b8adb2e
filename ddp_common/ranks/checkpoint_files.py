"""The files of a folder of checkpoints: their names, their digests, which of them are good, which may go.

`step-00000120.pt` has beside it its SHA-256, which was there first. Imports no torch: client and worker look at these files too.
"""

import errno
import hashlib
import os
import sys
from pathlib import Path

from ddp_common.errors import Error


def remove_all_but(keep, newest):
    """Retention: of the files up to `newest`, the one just written, the last `keep` stay; later ones can only be damaged, and go."""
    known = checkpoints(newest.parent)
    if newest not in known:
        raise FileNotFoundError(
            errno.ENOENT, "something else has removed it. Is another run writing in that folder?"
        )
    position = known.index(newest) + 1
    for old in [*known[: max(0, position - keep)], *known[position:]]:
        old.unlink(missing_ok=True)
        digest_file(old).unlink(missing_ok=True)


def checkpoints(directory):
    """The checkpoint files of a directory, oldest first."""
    return sorted(Path(directory).glob("step-*.pt"))


def step_of(path):
    return int(path.stem.removeprefix("step-"))


def digest_file(path):
    return path.with_suffix(".sha256")


def install(temporary, path):
    """Give a whole, synced file its name, its digest first."""
    present = stated_digests(path)[:1] if path.exists() else []
    digest = digest_file(path).with_suffix(".sha256.tmp")
    digest.write_text("".join(f"{each}  {path.name}\n" for each in [sha256(temporary), *present]))
    os.replace(digest, digest_file(path))
    os.replace(temporary, path)
    folder = os.open(path.parent, os.O_RDONLY)  # the names, too, shall outlive a power cut
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def sha256(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def stated_digests(path):
    try:
        return [
            line.split()[0] for line in digest_file(path).read_text().splitlines() if line.split()
        ]
    except (OSError, UnicodeDecodeError):
        return []


def fault(path):
    """What is wrong with a checkpoint file, in words; None if it is good."""
    stated = stated_digests(path)
    if not stated:
        return f"its digest {digest_file(path).name} is missing or none"
    return None if sha256(path) in stated else "its SHA-256 is not the one it was written with"


def newest(directory, quiet=False):
    """The newest good checkpoint in `directory`, None if there is no checkpoint at all. Raises `Error` if all are damaged.

    Damaged ones are named on stderr, unless `quiet`.
    """
    found = checkpoints(directory)
    for path in reversed(found):
        if (what := fault(path)) is None:
            return path
        if not quiet:
            print(
                f"Checkpoint {path} is damaged: {what}. Trying the one before it.",
                file=sys.stderr,
                flush=True,
            )
    if found:
        raise Error(
            f"No checkpoint in {directory} is good: all {len(found)} are damaged. Start a new run without RESUME."
        )
    return None
