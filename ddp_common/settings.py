"""The settings of a tutorial: stated once, at its top, with defaults for a laptop; overridden from outside by name.

Variables of the environment override them, in this order: `RESUME=runs/…` takes the settings of that run (so does `CHECKPOINT=…`, a
folder in which a run begins or goes on), `PRESET=full` the values the tutorial defines under that name, `SET="epochs=25
batch_size=16384"` single values. An unknown name or a value of the
wrong type is an error that lists what exists.
"""

import json
import os
import platform
import shlex
import subprocess
import time
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

from ddp_common.errors import Error

current = SimpleNamespace(name=None, values={}, resume=None)  # what `launch` writes into config.json, and the run to go on with


def settings(tutorial, *, presets=None, **defaults):
    """Return a namespace with the values of `defaults`, overridden as the environment says.

    `tutorial` names the run directory, `runs/<tutorial>/…`. `presets` maps a preset's name to the values that differ in it.
    Types are those of the defaults: bool, int, float or str. Raises `Error` for an unknown name, preset or a value of the wrong type.
    """
    presets = {"laptop": {}, **(presets or {})}
    values = dict(defaults)
    checkpoint = os.environ.get("CHECKPOINT") or None
    if resumed := os.environ.get("RESUME") or (checkpoint if checkpoint and has_run(checkpoint) else None):
        saved = resumed_config(resumed).get("settings", {})
        values.update({name: value for name, value in saved.items() if name in defaults})
    if preset := os.environ.get("PRESET"):
        if preset not in presets:
            raise Error(f"{tutorial} has no preset {preset!r}. It has: {', '.join(presets)}.")
        values.update(presets[preset])
    for word in split_words(os.environ.get("SET", "")):
        name, equals, text = word.partition("=")
        if not equals:
            raise Error(f"SET takes name=value pairs; {word!r} has no '='. Example: SET=\"{example(defaults)}\".")
        if name not in defaults:
            listing = ", ".join(f"{n}={v!r}" for n, v in values.items())
            raise Error(f"{tutorial} has no setting {name!r}. It has: {listing}.")
        values[name] = convert(name, text, type(defaults[name]))
    from ddp_common.run_directory import absolute

    resume = os.environ.get("RESUME") or checkpoint
    current.name, current.values, current.resume = tutorial, values, resume and str(absolute(resume))
    return SimpleNamespace(**values)


def split_words(text):
    try:
        return shlex.split(text)
    except ValueError as error:
        raise Error(f"SET={text}: {error}. Quote values as in a shell.") from None


def example(defaults):
    return next((f"{name}={value}" for name, value in defaults.items()), "")


def convert(name, text, kind):
    if kind is bool and text.lower() in ("true", "false", "1", "0", "yes", "no"):
        return text.lower() in ("true", "1", "yes")
    try:
        if kind is int:
            return int(text.replace("_", ""))
        if kind is float:
            return float(text)
    except ValueError:
        pass  # falls through to the one message below
    if kind is str:
        return text
    wanted = {bool: "true or false", int: "a whole number", float: "a number"}[kind]
    raise Error(f"The setting {name} takes {wanted}, not {text!r}.")


def has_run(directory):
    """Whether a run has begun in `directory`."""
    from ddp_common.run_directory import local

    return (local(directory) / "config.json").is_file()


def resumed_config(directory):
    """The `config.json` of the run in `directory` (dict). Raises `Error` if there is no run."""
    from ddp_common.run_directory import local

    path = local(directory) / "config.json"
    if not path.is_file():
        raise Error(f"RESUME={directory}: there is no run in that folder ({path.name} is missing). Name a folder that `make run` "
                    "printed, such as runs/pets/2026-01-31T10-00-00.")
    try:
        config = json.loads(path.read_text())
        if isinstance(config, dict) and isinstance(config.get("settings", {}), dict):
            return config
        error = "it does not hold the settings of a run"
    except ValueError as reason:
        error = reason
    raise Error(f"RESUME={directory}: {path} is damaged ({error}). Start a new run, or repair the file.")


def describe(addresses):
    """What config.json says of a run: its settings, versions, profile, git revision and the workers of its ranks."""
    versions = {"python": platform.python_version(), **{name: metadata.version(name) for name in ("torch", "distributed", "numpy")}}
    git = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=Path(__file__).parent, capture_output=True, text=True)
    return {"tutorial": current.name, "settings": current.values, "preset": os.environ.get("PRESET", "laptop"),
            "profile": os.environ.get("CLUSTER", "local"), "workers": list(addresses), "versions": versions,
            "platform": platform.platform(), "git": git.stdout.strip() or None, "started": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
