"""The settings of a tutorial, and the config.json that keeps them with a run.

Settings are stated once, at the top of a tutorial, with defaults for a laptop. Environment
variables override them by name, in this order:

- `RESUME=runs/…` takes the settings of that run; so does `CHECKPOINT=…`, a folder in which a run
  begins or goes on.
- `PRESET=full` takes the values that the tutorial defines under that name.
- `SET="epochs=25 batch_size=16384"` takes single values.

Promises: an unknown name, a value of the wrong type or out of its range, and the run of another
tutorial are errors that say what is expected, raised here, before a cluster starts. A config.json
that is missing or damaged is an `Error` only where somebody asked to resume that run.
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
from ddp_common.files import absolute, is_file
from ddp_common.run.places import local
from ddp_common.values import KINDS, convert, example, of_kind, split_words, whole_number

# What the last call of `settings` has found: the tutorial's name and the values of its settings;
# the directory of the run to go on with, and the function that this run called; the settings that
# differ from that run's, as name -> (its value, the new one).
current = SimpleNamespace(name=None, values={}, resume=None, function=None, changed={})


def settings(
    tutorial: str,
    *,
    presets: dict[str, dict] | None = None,
    limits: dict[str, tuple] | None = None,
    **defaults,
) -> SimpleNamespace:
    """Return a namespace with the values of `defaults`, overridden as the environment says.

    `tutorial` names the run directory, `runs/<tutorial>/…`. `presets` maps a preset's name to the
    values that differ in it. Types are those of the defaults: bool, int, float or str.

    A number whose default is positive must stay positive, one whose default is 0 must not be
    negative. Where that is wrong or not enough, `limits` maps a name to (least, greatest); either
    may be None.

    Raises `Error` for an unknown name or preset, a value of the wrong type or out of its range, a
    RESTARTS that is no number, and a RESUME or CHECKPOINT that is no run of this tutorial. Raises
    KeyError for a preset with a name that is not among the defaults.
    """
    presets = {"laptop": {}, **(presets or {})}
    limits = limits or {}
    values = dict(defaults)
    directory, config = _chosen_run(tutorial)
    saved = config.get("settings", {})
    for name in set(saved) & set(defaults):
        source = f" {directory} was run with it."
        values[name] = of_kind(name, saved[name], defaults[name], limits, source)
    earlier = {name: values[name] for name in values if name in saved}

    preset = os.environ.get("PRESET")
    if preset:
        if preset not in presets:
            raise Error(f"{tutorial} has no preset {preset!r}. It has: {', '.join(presets)}.")
        source = f" The preset {preset} has it."
        for name, value in presets[preset].items():
            values[name] = of_kind(name, value, defaults[name], limits, source)

    for word in split_words(os.environ.get("SET", "")):
        name, text = _name_and_text(word, tutorial, defaults, values)
        default = defaults[name]
        values[name] = of_kind(name, convert(text, type(default)), default, limits)

    whole_number("RESTARTS", os.environ.get("RESTARTS") or 0, least=0)
    current.name = tutorial
    current.values = values
    current.resume = str(absolute(directory)) if directory else None
    current.function = config.get("function")
    current.changed = {
        name: (was, values[name]) for name, was in earlier.items() if values[name] != was
    }
    return SimpleNamespace(**values)


def _name_and_text(word, tutorial, defaults, values):
    """Split a word of SET, name=value, at its '='. Raises `Error` unless it names a setting."""
    name, equals, text = word.partition("=")
    if not equals:
        raise Error(
            f"SET takes name=value pairs; {word!r} has no '='. "
            f'Example: SET="{example(defaults)}".'
        )
    if name not in defaults:
        listing = ", ".join(f"{known}={value!r}" for known, value in values.items())
        raise Error(f"{tutorial} has no setting {name!r}. It has: {listing}.")
    if type(defaults[name]) not in KINDS:
        raise Error(
            f"The setting {name} cannot be changed with SET: its default is {defaults[name]!r}, "
            "not a number, a text, True or False."
        )
    return name, text


# Runs that are there already


def _chosen_run(tutorial: str) -> tuple[str | None, dict]:
    """The directory that RESUME or CHECKPOINT names, and the config.json of the run in it.

    The directory is None if neither is set; the other is {} for a new run. Raises `Error` if
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
    trained = config.get("tutorial", tutorial)
    if trained != tutorial:
        how = f"make run TUTORIAL={trained} {variable}={directory}"
        if trained is None:
            trained = "a program of your own"
            how = f"launch(…, directory={str(directory)!r}) in that program"
        raise Error(
            f"{variable}={directory}: that is a run of {trained}, not of {tutorial}. "
            f"Nothing was changed. Go on from it with\n  {how}\nor name a run of {tutorial}."
        )
    return directory, config


def run_to_resume(function: str) -> str | None:
    """The directory that RESUME or CHECKPOINT names, for a launch of the function of this name.

    None if neither is set. The directory is given to one launch, the first. If the run in it
    called another function, this is another launch of the same lesson, which gets a directory of
    its own: None.
    """
    if current.function not in (None, function):
        return None
    directory = current.resume
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
        raise Error(
            f"{variable}={directory}: there is no run in that folder ({path.name} is missing). "
            "Name a folder that `make run` printed, such as runs/pets/2026-01-31T10-00-00."
        )
    try:
        config = json.loads(path.read_text())
        if not isinstance(config, dict) or not isinstance(config.get("settings", {}), dict):
            raise ValueError("it does not hold the settings of a run")
    except (OSError, ValueError, RecursionError) as error:
        raise Error(
            f"{variable}={directory}: {path} is damaged ({error}). "
            "Start a new run, or repair the file."
        ) from None
    return config


def describe(addresses: Iterable[str], function: str | None = None) -> dict:
    """What config.json says about a run.

    That is its settings, versions, profile, git revision, the workers of its ranks (`addresses`)
    and the name of the function they call.
    """
    return {
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
