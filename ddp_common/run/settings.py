"""The settings of a tutorial: stated once, at its top, with defaults for a laptop; overridden from outside by name.

Variables of the environment override them, in this order: `RESUME=runs/…` takes the settings of that run (so does `CHECKPOINT=…`, a
folder in which a run begins or goes on), `PRESET=full` the values the tutorial defines under that name, `SET="epochs=25
batch_size=16384"` single values. An unknown name, a value of the wrong type or out of its range, and the run of another
tutorial are errors that say what is expected. They are found here, before a cluster starts.
"""

import os
from types import SimpleNamespace

from ddp_common.errors import Error
from ddp_common.files import absolute
from ddp_common.run.config import chosen_run, current
from ddp_common.values import KINDS, convert, example, of_kind, split_words, whole_number


def settings(tutorial, *, presets=None, limits=None, **defaults):
    """Return a namespace with the values of `defaults`, overridden as the environment says.

    `tutorial` names the run directory, `runs/<tutorial>/…`. `presets` maps a preset's name to the values that differ in it.
    Types are those of the defaults: bool, int, float or str. A number whose default is positive must stay positive, one whose
    default is 0 must not be negative; `limits` says otherwise where that is wrong or too little: name -> (least, greatest), either
    of them None where there is none. Raises `Error` for an unknown name or preset, a value of the wrong type or out of its range,
    a RESTARTS that is no number, and a RESUME or CHECKPOINT that is no run of this tutorial.
    """
    presets = {"laptop": {}, **(presets or {})}
    limits = limits or {}
    values = dict(defaults)
    directory, saved = chosen_run(tutorial)
    for name in set(saved) & set(defaults):
        values[name] = of_kind(
            name, saved[name], defaults[name], limits, f" {directory} was run with it."
        )
    if preset := os.environ.get("PRESET"):
        if preset not in presets:
            raise Error(f"{tutorial} has no preset {preset!r}. It has: {', '.join(presets)}.")
        for name, value in presets[preset].items():
            values[name] = of_kind(
                name, value, defaults.get(name, value), limits, f" The preset {preset} has it."
            )
    for word in split_words(os.environ.get("SET", "")):
        name, equals, text = word.partition("=")
        if not equals:
            raise Error(
                f"SET takes name=value pairs; {word!r} has no '='. Example: SET=\"{example(defaults)}\"."
            )
        if name not in defaults:
            listing = ", ".join(f"{n}={v!r}" for n, v in values.items())
            raise Error(f"{tutorial} has no setting {name!r}. It has: {listing}.")
        if type(defaults[name]) not in KINDS:
            raise Error(
                f"The setting {name} cannot be changed with SET: its default is {defaults[name]!r}, not a number, a text, True or False."
            )
        values[name] = of_kind(name, convert(text, type(defaults[name])), defaults[name], limits)
    whole_number("RESTARTS", os.environ.get("RESTARTS") or 0, least=0)
    current.name, current.values, current.resume = (
        tutorial,
        values,
        directory and str(absolute(directory)),
    )
    return SimpleNamespace(**values)
