"""What config.json says of a run."""

import json
import platform
import subprocess
import time
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path


def describe(
    folder: Path, run_config: dict, addresses: Iterable[str], function: str | None
) -> dict:
    """The content of config.json for the run in `folder`.

    That is `run_config`, which the program has given to `launch`, with versions, git revision, the
    workers of the ranks (`addresses`) and the name of the function that they call. What an earlier
    launch in this folder has said of itself stays, where this one says nothing.
    """
    return {
        **_earlier(folder / "config.json"),
        **run_config,
        "workers": list(addresses),
        "versions": _versions(),
        "platform": platform.platform(),
        "git": _git_revision(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "function": function,
    }


def _earlier(path):
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError, RecursionError):
        return {}  # there is none, or it is damaged: it is written anew


def _versions():
    versions = {"python": platform.python_version()}
    for name in ("torch", "distributed", "numpy"):
        versions[name] = metadata.version(name)
    return versions


def _git_revision():
    try:
        git = subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
        )
    except OSError:  # there is no git here
        return None
    return git.stdout.strip() or None
