"""The values of settings: what a text says, and the types and ranges that a setting takes.

Promises: a wrong value is refused in the same words wherever it came from, the command line, the
environment or a run's config.json.
"""

import sys

from ddp_common.errors import Error

KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
YES = ("true", "1", "yes")
NO = ("false", "0", "no")
ABOVE_0 = sys.float_info.min  # the least number above 0
MOST = 10**12  # no setting counts further; beyond, steps and samples no longer fit into 64 bits


def convert(text: str, kind: type):
    """The value of type `kind` (bool, int or float) that `text` says, else the text itself."""
    if kind is bool and text.lower() in YES + NO:
        return text.lower() in YES
    try:
        if kind is int:
            return int(text.replace("_", ""))
        if kind is float:
            return float(text)
    except ValueError:
        return text
    return text


def of_kind(name: str, value, default, limits: dict[str, tuple], source: str = ""):
    """`value` as the setting `name` with this default may have it: a whole number becomes a float.

    `limits` maps a name to (least, greatest); `source` is a sentence about where the value came
    from. Raises `Error` for another type, and for a number out of its range.
    """
    kind = type(default)
    if kind not in KINDS:
        return value
    if kind is float and type(value) is int and abs(value) <= MOST:
        value = float(value)
    if type(value) is not kind:
        fits = False
    elif kind in (int, float):
        least, greatest = range_of(default, *limits.get(name, (None, None)))
        fits = least <= value <= greatest  # False for nan
    else:
        fits = True
    if not fits:
        takes = wanted(name, value, default, limits)
        raise Error(f"The setting {name} takes {takes}, not {repr(value):.60}.{source}")
    return value


def range_of(default: float, least=None, greatest=None) -> tuple:
    """The least and the greatest value of a number with this default, where none is given."""
    if least is None and default < 0:
        least = -MOST
    elif least is None and default == 0:
        least = 0
    elif least is None:
        least = 1 if type(default) is int else ABOVE_0
    if greatest is None:
        greatest = MOST
    return least, greatest


def wanted(name: str, value, default, limits: dict[str, tuple]) -> str:
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
