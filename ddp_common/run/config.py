"""A run's config.json: what it was started with, and what a resumed run takes from it."""

import json
import os
import platform
import subprocess
import time
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

from ddp_common.errors import Error
from ddp_common.files import is_file
from ddp_common.run.places import local

current = SimpleNamespace(
    name=None, values={}, resume=None
)  # what `launch` writes into config.json, and the run to go on with


def chosen_run(tutorial):
    """The directory that RESUME or CHECKPOINT names, None without; and the settings that a run in it has had, {} for a new one.

    Raises `Error` if they name two, if RESUME names no run, and if the run is one of another tutorial.
    """
    resume, checkpoint = os.environ.get("RESUME") or None, os.environ.get("CHECKPOINT") or None
    if resume and checkpoint and resume.rstrip("/") != checkpoint.rstrip("/"):
        raise Error(
            f"RESUME={resume} and CHECKPOINT={checkpoint} name two folders, and a run has one. Give RESUME to go on from a run, or "
            "CHECKPOINT to begin in a folder of your choice (or to go on, if a run has begun there)."
        )
    directory = resume or checkpoint
    if directory is None or not (resume or has_run(directory)):
        return directory, {}
    variable = "RESUME" if resume else "CHECKPOINT"
    config = resumed_config(directory, variable)
    if config.get("tutorial") not in (None, tutorial):
        raise Error(
            f"{variable}={directory}: that is a run of {config['tutorial']}, not of {tutorial}. Nothing was changed. Go on from it with\n"
            f"  make run TUTORIAL={config['tutorial']} {variable}={directory}\nor name a run of {tutorial}."
        )
    return directory, config.get("settings", {})


def run_to_resume(function):
    """For a launch of the function of this name: the directory that RESUME or CHECKPOINT names, or None.

    It is for one launch, the first. Where config.json knows which function the run has called, a lesson's launch of another one
    gets a directory of its own.
    """
    directory = current.resume
    if directory is None:
        return None
    trained = read_config(directory).get("function")
    if trained not in (None, function):
        return None
    current.resume = None
    return directory


def has_run(directory):
    """Whether a run has begun in `directory`."""
    return is_file(local(directory) / "config.json")


def resumed_config(directory, variable="RESUME"):
    """The `config.json` of the run in `directory` (dict). Raises `Error` if there is no run."""
    path = local(directory) / "config.json"
    if not is_file(path):
        raise Error(
            f"{variable}={directory}: there is no run in that folder ({path.name} is missing). {no_run(directory, path.parent)}"
        )
    try:
        config = json.loads(path.read_text())
        if isinstance(config, dict) and isinstance(config.get("settings", {}), dict):
            return config
        error = "it does not hold the settings of a run"
    except (OSError, ValueError, RecursionError) as reason:
        error = reason
    raise Error(
        f"{variable}={directory}: {path} is damaged ({error}). Start a new run, or repair the file."
    )


def no_run(directory, path):
    """What to do about a folder without config.json."""
    folder = path.parent if path.suffix == ".pt" else path
    if folder.name == "checkpoints" and is_file(folder.parent / "config.json"):
        return f"Name the folder of the run: {folder.parent}."
    if os.path.isdir(path) and any(path.glob("checkpoints/step-*.pt")):
        return (
            f'It has checkpoints, but with which settings they were made is not known. If you know: CHECKPOINT={directory} SET="…" goes on '
            "from the newest of them."
        )
    return "Name a folder that `make run` printed, such as runs/pets/2026-01-31T10-00-00."


def read_config(directory):
    """The content of a run's config.json, {} if there is none that can be read."""
    try:
        config = json.loads((local(directory) / "config.json").read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}


def may_be_written(config, path):
    """Whether `config` may become the config.json of the folder `path` before its ranks train.

    Where they are to go on from a checkpoint with other settings, config.json keeps saying how that was made until they have begun:
    if they fail before, nothing has changed.
    """
    previous = read_config(path)
    return (
        not previous
        or identity(previous) == identity(config)
        or not any(path.glob("checkpoints/step-*.pt"))
    )


def describe(addresses, directory=None, function=None):
    """What config.json says of a run: its settings, versions, profile, git revision, the workers of its ranks and the function they call.

    If there is a run in `directory`, `earlier` lists what was said of its earlier attempts, as far as they were others.
    """
    versions = {
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in ("torch", "distributed", "numpy")},
    }
    git = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
    )
    config = {
        "tutorial": current.name,
        "settings": current.values,
        "preset": os.environ.get("PRESET", "laptop"),
        "profile": os.environ.get("CLUSTER", "local"),
        "workers": list(addresses),
        "versions": versions,
        "platform": platform.platform(),
        "git": git.stdout.strip() or None,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "function": function,
    }
    previous = read_config(directory) if directory is not None else {}
    earlier = previous.pop("earlier", [])
    if previous and identity(previous) != identity(config):
        earlier = [*earlier, previous]
    if earlier:
        config["earlier"] = earlier
    return config


def identity(config):
    """What makes an attempt another one than that before it: everything but where and when."""
    return {
        key: value
        for key, value in config.items()
        if key not in ("workers", "started", "function", "earlier")
    }
