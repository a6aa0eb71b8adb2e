"""A run's config.json: what the run was started with, and what a resumed run takes from it.

Relies on `settings` for what it writes: a tutorial's call of it fills `current`. Promises: a
config.json that is missing or damaged is an `Error` only where somebody asked to resume that run;
everywhere else it counts as empty.
"""

import json
import os
import platform
import subprocess
import time
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

from ddp_common.errors import Error
from ddp_common.files import is_file
from ddp_common.run.places import local

# The tutorial's name and the values of its settings, which `launch` writes into config.json;
# `resume` is the directory of the run to go on with, `changed` maps the settings that differ from
# that run's to (its value, the new one).
current = SimpleNamespace(name=None, values={}, resume=None, changed={})

UNREADABLE = (OSError, ValueError, RecursionError)  # what reading a damaged config.json raises


def chosen_run(tutorial: str) -> tuple[str | None, dict]:
    """The directory that RESUME or CHECKPOINT names, and the settings of the run in it.

    The directory is None if neither is set; the settings are {} for a new run. Raises `Error` if
    they name two directories, if RESUME names no run, and if the run is one of another tutorial.
    """
    resume = os.environ.get("RESUME") or None
    checkpoint = os.environ.get("CHECKPOINT") or None
    if resume and checkpoint and resume.rstrip("/") != checkpoint.rstrip("/"):
        raise Error(
            f"RESUME={resume} and CHECKPOINT={checkpoint} name two folders, and a run has one. "
            "Give RESUME to go on from a run, or CHECKPOINT to begin in a folder of your choice "
            "(or to go on, if a run has begun there)."
        )
    directory = resume or checkpoint
    if directory is None:
        return None, {}
    if not resume and not has_run(directory):
        return directory, {}

    variable = "RESUME" if resume else "CHECKPOINT"
    config = resumed_config(directory, variable)
    trained = config.get("tutorial")
    if trained not in (None, tutorial):
        raise Error(
            f"{variable}={directory}: that is a run of {trained}, not of {tutorial}. "
            "Nothing was changed. Go on from it with\n"
            f"  make run TUTORIAL={trained} {variable}={directory}\n"
            f"or name a run of {tutorial}."
        )
    return directory, config.get("settings", {})


def run_to_resume(function: str) -> str | None:
    """The directory that RESUME or CHECKPOINT names, for a launch of the function of this name.

    None if neither is set. The directory is given to one launch, the first. If config.json says
    that the run called another function, this is another launch of the same lesson, which gets a
    directory of its own: None.
    """
    directory = current.resume
    if directory is None:
        return None
    trained = read_config(directory).get("function")
    if trained not in (None, function):
        return None
    current.resume = None
    return directory


def has_run(directory: str | Path) -> bool:
    """Whether a run has begun in `directory`."""
    return is_file(local(directory) / "config.json")


def resumed_config(directory: str | Path, variable: str = "RESUME") -> dict:
    """The config.json of the run in `directory`, which the user has named with `variable`.

    Raises `Error` if there is no run, or if the file is damaged.
    """
    path = local(directory) / "config.json"
    if not is_file(path):
        remedy = _remedy_without_config(directory, path.parent)
        raise Error(
            f"{variable}={directory}: there is no run in that folder "
            f"({path.name} is missing). {remedy}"
        )
    try:
        config = json.loads(path.read_text())
    except UNREADABLE as error:
        why = str(error)
    else:
        if isinstance(config, dict) and isinstance(config.get("settings", {}), dict):
            return config
        why = "it does not hold the settings of a run"
    raise Error(
        f"{variable}={directory}: {path} is damaged ({why}). Start a new run, or repair the file."
    )


def _remedy_without_config(directory, path):
    """What to do about a folder without config.json; `path` is its place on this machine."""
    folder = path.parent if path.suffix == ".pt" else path
    if folder.name == "checkpoints" and is_file(folder.parent / "config.json"):
        return f"Name the folder of the run: {folder.parent}."
    if os.path.isdir(path) and _has_checkpoints(path):
        return (
            "It has checkpoints, but with which settings they were made is not known. "
            f'If you know: CHECKPOINT={directory} SET="…" goes on from the newest of them.'
        )
    runs = []
    if os.path.isdir(path):
        runs = [file.parent for file in path.glob("*/config.json")]
    if runs:
        newest = max(runs, key=lambda run: os.stat(run / "config.json").st_mtime)
        return f"It is a folder of runs; name one of them. The newest is {newest}."
    return "Name a folder that `make run` printed, such as runs/pets/2026-01-31T10-00-00."


def _has_checkpoints(path):
    return any(path.glob("checkpoints/step-*.pt"))


def read_config(directory: str | Path) -> dict:
    """The content of a run's config.json, {} if there is none that can be read."""
    try:
        config = json.loads((local(directory) / "config.json").read_text())
    except UNREADABLE:
        return {}
    return config if isinstance(config, dict) else {}


def may_be_written(config: dict, path: Path) -> bool:
    """Whether `config` may become the config.json of the folder `path` before its ranks train.

    If they are to go on from a checkpoint with other settings, config.json keeps saying how that
    checkpoint was made until they have begun: if they fail before, nothing has changed.
    """
    previous = read_config(path)
    if not previous or _identity(previous) == _identity(config):
        return True
    return not _has_checkpoints(path)


def describe(
    addresses: Iterable[str],
    directory: str | Path | None = None,
    function: str | None = None,
) -> dict:
    """What config.json says about a run.

    That is its settings, versions, profile, git revision, the workers of its ranks (`addresses`)
    and the name of the function they call. If there is a run in `directory`, `earlier` lists what
    config.json said about its earlier attempts, as far as they differed.
    """
    config = {
        "tutorial": current.name,
        "settings": current.values,
        "preset": os.environ.get("PRESET", "laptop"),
        "profile": os.environ.get("CLUSTER", "local"),
        "workers": list(addresses),
        "versions": _versions(),
        "platform": platform.platform(),
        "git": _git_revision(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "function": function,
    }
    previous = read_config(directory) if directory is not None else {}
    earlier = previous.pop("earlier", [])
    if previous and _identity(previous) != _identity(config):
        earlier = [*earlier, previous]
    if earlier:
        config["earlier"] = earlier
    return config


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


def _identity(config):
    """What distinguishes an attempt from the one before: everything but where and when it ran."""
    varying = ("workers", "started", "function", "earlier")
    return {key: value for key, value in config.items() if key not in varying}
