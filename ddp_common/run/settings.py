"""The settings of a tutorial: stated once, at its top, with defaults for a laptop.

Environment variables override them by name, in this order:

- `RESUME=runs/…` takes the settings of that run; so does `CHECKPOINT=…`, a folder in which a run
  begins or goes on.
- `PRESET=full` takes the values that the tutorial defines under that name.
- `SET="epochs=25 batch_size=16384"` takes single values.

Promises: an unknown name, a value of the wrong type or out of its range, and the run of another
tutorial are errors that say what is expected, raised here, before a cluster starts.
"""

import os
from types import SimpleNamespace

from ddp_common.errors import Error
from ddp_common.files import absolute
from ddp_common.run.config import chosen_run, current
from ddp_common.values import KINDS, convert, example, of_kind, split_words, whole_number


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
    RESTARTS that is no number, a RESUME or CHECKPOINT that is no run of this tutorial, and a
    preset with a name that is not among the defaults.
    """
    presets = {"laptop": {}, **(presets or {})}
    _check_presets(tutorial, presets, defaults)
    limits = limits or {}
    values = dict(defaults)
    directory, saved = chosen_run(tutorial)
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
    resume = str(absolute(directory)) if directory else None
    current.name = tutorial
    current.values = values
    current.resume = resume
    current.changed = {
        name: (was, values[name]) for name, was in earlier.items() if values[name] != was
    }
    return SimpleNamespace(**values)


def _check_presets(tutorial, presets, defaults):
    """Raise `Error` for a misspelled name in a preset, whichever preset is chosen."""
    for preset, values in presets.items():
        for name in values:
            if name not in defaults:
                raise Error(
                    f"The preset {preset!r} of {tutorial} sets {name!r}, which is no setting. "
                    f"The settings are: {', '.join(defaults)}."
                )


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
