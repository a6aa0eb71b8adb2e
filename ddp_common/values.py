"""What a person may write as a value: numbers, texts, truth values, and the ranges that fit them.

Everything that is read from the command line, the environment or a run's config.json is checked here, so that a
wrong value is refused in the same words wherever it came from.
"""

import contextlib
import shlex
import sys

from ddp_common.errors import Error

KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
ABOVE_0 = sys.float_info.min
MOST = 10**12  # no setting counts further; beyond, steps and samples no longer fit into 64 bits


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
        raise Error(
            f"The setting {name} takes {wanted(name, value, default, limits)}, not {repr(value):.60}.{whence}"
        )
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


def whole_number(name, value, least):
    with contextlib.suppress(TypeError, ValueError):
        if int(value) == float(value) >= least:
            return int(value)
    raise Error(f"{name}={value!r}: {name} is a whole number of at least {least}.")
