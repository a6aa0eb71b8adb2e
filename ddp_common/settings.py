"""The settings of a tutorial: stated once, at its top, with defaults for a laptop; overridden from outside by name.

Variables of the environment override them, in this order: `RESUME=runs/…` takes the settings of that run (so does `CHECKPOINT=…`, a
folder in which a run begins or goes on), `PRESET=full` the values the tutorial defines under that name, `SET="epochs=25
batch_size=16384"` single values. An unknown name, a value of the wrong type or out of its range, and the run of another
tutorial are errors that say what is expected. They are found here, before a cluster starts.
"""

import json
import os
import platform
import shlex
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

from ddp_common.errors import Error

current = SimpleNamespace(name=None, values={}, resume=None)  # what `launch` writes into config.json, and the run to go on with


KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
ABOVE_0 = sys.float_info.min
MOST = 10**12  # no setting counts further; beyond, steps and samples no longer fit into 64 bits


def settings(tutorial, *, presets=None, limits=None, **defaults):
    """Return a namespace with the values of `defaults`, overridden as the environment says.

    `tutorial` names the run directory, `runs/<tutorial>/…`. `presets` maps a preset's name to the values that differ in it.
    Types are those of the defaults: bool, int, float or str. A number whose default is positive must stay positive, one whose
    default is 0 must not be negative; `limits` says otherwise where that is wrong or too little: name -> (least, greatest), either
    of them None where there is none. Raises `Error` for an unknown name or preset, a value of the wrong type or out of its range,
    a RESTARTS that is no number, and a RESUME or CHECKPOINT that is no run of this tutorial.
    """
    from ddp_common.launch import whole_number
    from ddp_common.run_directory import absolute

    presets = {"laptop": {}, **(presets or {})}
    limits = limits or {}
    values = dict(defaults)
    directory, saved = chosen_run(tutorial)
    for name in set(saved) & set(defaults):
        values[name] = of_kind(name, saved[name], defaults[name], limits, f" {directory} was run with it.")
    if preset := os.environ.get("PRESET"):
        if preset not in presets:
            raise Error(f"{tutorial} has no preset {preset!r}. It has: {', '.join(presets)}.")
        for name, value in presets[preset].items():
            values[name] = of_kind(name, value, defaults.get(name, value), limits, f" The preset {preset} has it.")
    for word in split_words(os.environ.get("SET", "")):
        name, equals, text = word.partition("=")
        if not equals:
            raise Error(f"SET takes name=value pairs; {word!r} has no '='. Example: SET=\"{example(defaults)}\".")
        if name not in defaults:
            listing = ", ".join(f"{n}={v!r}" for n, v in values.items())
            raise Error(f"{tutorial} has no setting {name!r}. It has: {listing}.")
        if type(defaults[name]) not in KINDS:
            raise Error(f"The setting {name} cannot be changed with SET: its default is {defaults[name]!r}, not a number, a text, True or False.")
        values[name] = of_kind(name, convert(text, type(defaults[name])), defaults[name], limits)
    whole_number("RESTARTS", os.environ.get("RESTARTS") or 0, least=0)
    current.name, current.values, current.resume = tutorial, values, directory and str(absolute(directory))
    return SimpleNamespace(**values)


def split_words(text):
    try:
        return shlex.split(text)
    except ValueError as error:
        raise Error(f"SET={text}: {error}. Quote values as in a shell.") from None


def example(defaults):
    return next((f"{name}={value}" for name, value in defaults.items()), "")


def convert(text, kind):
    """The value that `text` says in a `kind` of its own: bool, int, float. The text itself if it says none."""
    if kind is bool and text.lower() in ("true", "false", "1", "0", "yes", "no"):
        return text.lower() in ("true", "1", "yes")
    try:
        if kind is int:
            return int(text.replace("_", ""))
        if kind is float:
            return float(text)
    except ValueError:
        return text
    return text


def of_kind(name, value, default, limits, whence=""):
    """`value` as a setting with this default may have it. Raises `Error` for another type, and for a number out of its range."""
    kind = type(default)
    if kind not in KINDS:
        return value
    if kind is float and type(value) is int and abs(value) <= MOST:
        value = float(value)
    if type(value) is not kind:
        fits = False
    elif kind in (int, float):
        least, greatest = range_of(default, *limits.get(name, (None, None)))
        fits = least <= value <= greatest  # nan is not
    else:
        fits = True
    if not fits:
        raise Error(f"The setting {name} takes {wanted(name, value, default, limits)}, not {repr(value):.60}.{whence}")
    return value


def range_of(default, least=None, greatest=None):
    """The least and the greatest value of a number with this default, unless `least` and `greatest` say so."""
    if least is None and default < 0:
        least = -MOST
    elif least is None and default == 0:
        least = 0
    elif least is None:
        least = 1 if type(default) is int else ABOVE_0
    if greatest is None:
        greatest = MOST
    return least, greatest


def wanted(name, value, default, limits):
    """What such a setting takes, in words; its greatest value only if that matters."""
    words = KINDS[type(default)]
    if type(default) not in (int, float):
        return words
    least, greatest = range_of(default, *limits.get(name, (None, None)))
    if least == ABOVE_0:
        words += " above 0"
    elif least > -MOST:
        words += f" of at least {least}"
    if greatest < MOST or (type(value) in (int, float) and value > MOST):
        words += f" and at most {greatest:,}"
    return words


def chosen_run(tutorial):
    """The directory that RESUME or CHECKPOINT names, None without; and the settings that a run in it has had, {} for a new one.

    Raises `Error` if they name two, if RESUME names no run, and if the run is one of another tutorial.
    """
    resume, checkpoint = os.environ.get("RESUME") or None, os.environ.get("CHECKPOINT") or None
    if resume and checkpoint and resume.rstrip("/") != checkpoint.rstrip("/"):
        raise Error(f"RESUME={resume} and CHECKPOINT={checkpoint} name two folders, and a run has one. Give RESUME to go on from a run, or "
                    "CHECKPOINT to begin in a folder of your choice (or to go on, if a run has begun there).")
    directory = resume or checkpoint
    if directory is None or not (resume or has_run(directory)):
        return directory, {}
    variable = "RESUME" if resume else "CHECKPOINT"
    config = resumed_config(directory, variable)
    if config.get("tutorial") not in (None, tutorial):
        raise Error(f"{variable}={directory}: that is a run of {config['tutorial']}, not of {tutorial}. Nothing was changed. Go on from it with\n"
                    f"  make run TUTORIAL={config['tutorial']} {variable}={directory}\nor name a run of {tutorial}.")
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


def is_file(path):
    """Whether there is such a file; False also for what cannot be the name of one."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def has_run(directory):
    """Whether a run has begun in `directory`."""
    from ddp_common.run_directory import local

    return is_file(local(directory) / "config.json")


def resumed_config(directory, variable="RESUME"):
    """The `config.json` of the run in `directory` (dict). Raises `Error` if there is no run."""
    from ddp_common.run_directory import local

    path = local(directory) / "config.json"
    if not is_file(path):
        raise Error(f"{variable}={directory}: there is no run in that folder ({path.name} is missing). {no_run(directory, path.parent)}")
    try:
        config = json.loads(path.read_text())
        if isinstance(config, dict) and isinstance(config.get("settings", {}), dict):
            return config
        error = "it does not hold the settings of a run"
    except (OSError, ValueError, RecursionError) as reason:
        error = reason
    raise Error(f"{variable}={directory}: {path} is damaged ({error}). Start a new run, or repair the file.")


def no_run(directory, path):
    """What to do about a folder without config.json."""
    folder = path.parent if path.suffix == ".pt" else path
    if folder.name == "checkpoints" and is_file(folder.parent / "config.json"):
        return f"Name the folder of the run: {folder.parent}."
    if os.path.isdir(path) and any(path.glob("checkpoints/step-*.pt")):
        return (f"It has checkpoints, but with which settings they were made is not known. If you know: CHECKPOINT={directory} SET=\"…\" goes on "
                "from the newest of them.")
    return "Name a folder that `make run` printed, such as runs/pets/2026-01-31T10-00-00."


def read_config(directory):
    """The content of a run's config.json, {} if there is none that can be read."""
    from ddp_common.run_directory import local

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
    return not previous or identity(previous) == identity(config) or not any(path.glob("checkpoints/step-*.pt"))


def has_begun(message):
    """Whether a rank's message shows that it trains: a step, a report, or that it had nothing left to do."""
    return bool(message.get("position")) or "report" in message or "returned" in message


def describe(addresses, directory=None, function=None):
    """What config.json says of a run: its settings, versions, profile, git revision, the workers of its ranks and the function they call.

    If there is a run in `directory`, `earlier` lists what was said of its earlier attempts, as far as they were others.
    """
    versions = {"python": platform.python_version(), **{name: metadata.version(name) for name in ("torch", "distributed", "numpy")}}
    git = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=Path(__file__).parent, capture_output=True, text=True)
    config = {"tutorial": current.name, "settings": current.values, "preset": os.environ.get("PRESET", "laptop"),
              "profile": os.environ.get("CLUSTER", "local"), "workers": list(addresses), "versions": versions,
              "platform": platform.platform(), "git": git.stdout.strip() or None, "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
              "function": function}
    previous = read_config(directory) if directory is not None else {}
    earlier = previous.pop("earlier", [])
    if previous and identity(previous) != identity(config):
        earlier = [*earlier, previous]
    if earlier:
        config["earlier"] = earlier
    return config


def identity(config):
    """What makes an attempt another one than that before it: everything but where and when."""
    return {key: value for key, value in config.items() if key not in ("workers", "started", "function", "earlier")}
