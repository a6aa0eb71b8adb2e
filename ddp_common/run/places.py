"""Where run directories are: on this machine, or at a URL with a mirror here."""

import itertools
import os
import time
import uuid
from pathlib import Path

from ddp_common.errors import Error
from ddp_common.files import absolute, make_private
from ddp_common.run.mirror import Mirror

mirrors = {}  # URL -> Mirror


def local(location):
    """The path on this machine of a run directory; for a URL that of its mirror, which is filled from it when first asked for."""
    if "://" not in str(location):
        return absolute(location)
    if str(location) not in mirrors:
        mirrors[str(location)] = Mirror(str(location))
    return mirrors[str(location)].path


def shown(path):
    """A run directory as a person would type it: the URL of a mirror, a path relative to here where that is shorter."""
    for url, mirror in mirrors.items():
        if mirror.path == Path(path):
            return url
    try:
        return (
            os.path.relpath(path) if Path(path).resolve().is_relative_to(Path.cwd()) else str(path)
        )
    except FileNotFoundError:  # the working directory is gone
        return str(path)


def new_directory(name, local=False):
    """A path (or URL, unless it must be `local`) that no other run has, under RUNS (default: `runs/` of the repository, or of the working directory)."""
    repository = Path(__file__).parents[2]
    root = os.environ.get("RUNS")
    if not root or (local and "://" in root):
        root = (repository if (repository / "tutorials").is_dir() else absolute(".")) / "runs"
    stamp = time.strftime("%Y-%m-%dT%H-%M-%S")
    if "://" in str(root):
        return f"{str(root).rstrip('/')}/{name}/{stamp}-{uuid.uuid4().hex[:4]}"
    for suffix in itertools.chain([""], (f"-{n}" for n in itertools.count(2))):
        path = absolute(root) / name / f"{stamp}{suffix}"
        try:
            make_private(path.parent)
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise Error(
                f"Cannot make the run directory {path}: {why}. Choose another place with RUNS=…"
            ) from None
        try:
            path.mkdir(
                mode=0o700
            )  # the one who makes it owns it, also when two launches share a second
        except FileExistsError:
            continue
        except OSError as error:
            raise Error(
                f"Cannot make the run directory {path}: {error.strerror}. Choose another place with RUNS=…"
            ) from None
        return path
