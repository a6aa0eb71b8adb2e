"""The settings of a tutorial, and how an earlier run gives them back.

Settings are stated once, at the top of a tutorial, with defaults for a laptop. Environment
variables override them by name, in this order:

- `RESUME=runs/…` takes the settings of that run; so does `CHECKPOINT=…`, a folder in which a run
  begins or goes on.
- `PRESET=full` takes the values that the tutorial defines under that name. `PRESET=original` takes
  another program, which trains what the tutorial's article trained, with the numbers of
  originals.yaml.
- `SET="epochs=25 batch_size=16384"` takes single values.

Promises: an unknown name, a value of the wrong type or out of its range, the run of another
tutorial, and a resume that would train nothing of what was changed are errors that say what is
expected, raised here, before a cluster starts. A config.json that is missing or damaged is an
`Error` only where somebody asked to resume that run.
"""

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import yaml

from dask_ranks.clusters.profiles import pairs
from dask_ranks.run.folders import local
from dask_ranks.run.job import whole_number
from dask_ranks.run.run_directory import read_records
from ddp_common.checkpoint_files import checkpoints
from ddp_common.errors import Error
from tutorials.kit.values import KINDS, convert, of_kind

# What a run is started with besides its settings: a resume wants the same
OF_THE_COMMAND = ("CLUSTER", "OPTIONS", "WORKERS", "RESTARTS")
TUTORIALS = Path(__file__).parents[1]
ORIGINAL: dict[str, dict] = {"original": {}}  # the only preset of a program in originals/


@dataclass
class Chosen:
    """What a call of `settings` has found."""

    tutorial: str
    values: dict
    directory: str | None  # the run's, as RESUME or CHECKPOINT names it
    changed: dict  # where a run goes on: name -> (its value, the new one)
    preset: str


chosen: Chosen | None = None  # by the latest call: a program is one tutorial


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
    RESTARTS that is no number, a RESUME or CHECKPOINT that is no run of this tutorial, and for
    changes to a run whose epochs are all trained. Raises KeyError for a preset with a name that is
    not among the defaults.
    """
    global chosen
    presets = presets if presets == ORIGINAL else {"laptop": {}, **(presets or {})}
    limits = limits or {}
    values = dict(defaults)
    directory, config = _chosen_run(tutorial)
    saved = config.get("settings", {})
    for name in set(saved) & set(defaults):
        source = f" {directory} was run with it."
        values[name] = of_kind(name, saved[name], defaults[name], limits, source)
    earlier = {name: values[name] for name in values if name in saved}

    preset = os.environ.get("PRESET") or config.get("preset") or next(iter(presets))
    if preset not in presets:
        raise Error(f"{tutorial} has no preset {preset!r}. It has: {', '.join(presets)}.")
    if os.environ.get("PRESET"):
        source = f" The preset {preset} has it."
        for name, value in presets[preset].items():
            values[name] = of_kind(name, value, defaults[name], limits, source)

    example = "".join(f"{name}={value}" for name, value in list(defaults.items())[:1])
    for name, text in pairs("SET", os.environ.get("SET", ""), example):
        _refuse_unless_setting(name, tutorial, defaults, values)
        default = defaults[name]
        values[name] = of_kind(name, convert(text, type(default)), default, limits)

    whole_number("RESTARTS", os.environ.get("RESTARTS") or 0, least=0)
    changed = {name: (was, values[name]) for name, was in earlier.items() if values[name] != was}
    if directory and changed:
        _refuse_if_all_is_trained(directory, values)
    path = str(local(directory)) if directory else None
    chosen = Chosen(tutorial, dict(values), path, changed, preset)
    return SimpleNamespace(**values)


def original(tutorial: str, **defaults) -> SimpleNamespace:
    """The settings of what the article behind `tutorial` trained: `PRESET=original`.

    Its numbers are in originals.yaml; `defaults` are the others, and `limits` may be among them.
    Raises what `settings` raises.
    """
    numbers = yaml.safe_load((TUTORIALS / "originals.yaml").read_text())[tutorial]
    return settings(tutorial, presets=ORIGINAL, **numbers, **defaults)


def program_of(path: Path) -> Path:
    """The file that trains: `path`, a tutorial's, or that of its original.

    It is the original where PRESET says so, or the run that goes on.
    """
    directory = os.environ.get("RESUME") or os.environ.get("CHECKPOINT")
    config = config_of(directory) if directory and has_run(directory) else {}
    preset = os.environ.get("PRESET") or config.get("preset")
    program = path.parent / "originals" / path.name
    # Where there is none, the tutorial says which presets it has
    return program if preset in ORIGINAL and program.exists() else path


def launch_options() -> dict:
    """What `launch` is to know of the tutorial: `ddp.launch(client, train, **launch_options())`.

    The folder of its runs, the run that goes on, and what config.json says for a resume. It
    follows from the latest call of `settings`.
    """
    assert chosen is not None, "settings come first"
    command = {name: os.environ[name] for name in OF_THE_COMMAND if os.environ.get(name)}
    config = {"tutorial": chosen.tutorial, "settings": chosen.values, "command": command}
    return {
        "directory": chosen.directory,
        "run_name": chosen.tutorial,
        "run_config": {**config, "preset": chosen.preset},
    }


def _refuse_unless_setting(name, tutorial, defaults, values):
    if name not in defaults:
        listing = ", ".join(f"{known}={value!r}" for known, value in values.items())
        raise Error(f"{tutorial} has no setting {name!r}. It has: {listing}.")
    if type(defaults[name]) not in KINDS:
        raise Error(
            f"The setting {name} cannot be changed with SET: its default is {defaults[name]!r}, "
            "not a number, a text, True or False."
        )


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
            "Give RESUME to go on from a run, CHECKPOINT to begin in a folder of your choice."
        )
    directory = resume or checkpoint
    if directory is None:
        return None, {}
    if not resume and not has_run(directory):
        return directory, {}

    variable = "RESUME" if resume else "CHECKPOINT"
    config = config_of(directory, variable)
    trained = config.get("tutorial")
    if trained != tutorial:
        if trained:
            whose, how = trained, f"make run TUTORIAL={trained} {variable}={directory}"
        else:
            whose = "a program of your own"
            how = f"launch(…, directory={str(directory)!r}) in that program"
        raise Error(
            f"{variable}={directory}: that is a run of {whose}, not of {tutorial}. "
            f"Go on from it with\n  {how}"
        )
    return directory, config


def _refuse_if_all_is_trained(directory, values):
    """Raise `Error` if the run has trained as many epochs as are wanted now.

    Nothing would be trained, and config.json would say of it what it was not trained with.
    """
    wanted = sum(value for name, value in values.items() if name.endswith("epochs"))
    trained = epochs_trained(local(directory))
    if 0 < wanted <= trained and checkpoints(local(directory) / "checkpoints"):
        raise Error(
            f"{directory} has trained {trained} epochs, so nothing of what was changed would be "
            f'trained. Ask for more of them, such as SET="epochs={2 * trained}", or start a new '
            "run without RESUME."
        )


def epochs_trained(directory: Path) -> int:
    """The epochs that the run in this folder has completed, as its metrics and its log say."""
    path = directory / "metrics.jsonl"
    records = read_records(path) if os.path.isfile(path) else ()
    numbers = [record["epoch"] for record in records if isinstance(record.get("epoch"), int)]
    begun = 1 + max(numbers, default=-1)
    return begun if has_finished(directory) else max(0, begun - 1)


def has_finished(directory: Path) -> bool:
    """Whether training in this folder came to its end, and nobody went on with it."""
    try:
        lines = (directory / "log.txt").read_text(errors="replace").splitlines()
    except OSError:
        return False
    for line in reversed(lines):
        if re.match(r"\S+ finished: \d+ rank", line):
            return True
        if re.match(r"\S+ (\[rank 0\] Resumed from step|\d+ ranks of )", line):
            return False
    return False


def has_run(directory: str | Path) -> bool:
    """Whether a run has begun in `directory`."""
    return os.path.isfile(local(directory) / "config.json")


def config_of(directory: str | Path, variable: str = "RESUME") -> dict:
    """The config.json of the run in `directory`, which the user has named with `variable`.

    Raises `Error` if there is no run, or if the file is damaged.
    """
    path = local(directory) / "config.json"
    if not os.path.isfile(path):
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
