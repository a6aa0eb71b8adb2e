"""What a person may write on the command line or in the environment: numbers, and name=value."""

import contextlib
import shlex

from ddp_common.errors import Error


def pairs(variable: str, text: str, example: str) -> list[tuple[str, str]]:
    """The words name=value of SET or OPTIONS, quoted as in a shell, as (name, value).

    Raises `Error`, which shows the `example`, for a word without '=' and a quote that is not
    closed.
    """
    example = f'Write {variable}="{example}", quotes around values with spaces.'
    try:
        words = [word.partition("=") for word in shlex.split(text)]
    except ValueError as error:
        raise Error(f"{variable}={text}: {error}. {example}") from None
    for name, equals, _ in words:
        if not equals:
            raise Error(f"{variable}={text}: {name!r} is no name=value. {example}")
    return [(name, value) for name, _, value in words]


def whole_number(name: str, value, least: int) -> int:
    """`value`, a number or a text, as an int.

    Raises `Error` unless it is whole and at least `least`.
    """
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        if int(value) == float(value) >= least:
            return int(value)
    raise Error(f"{name}={value!r}: {name} is a whole number of at least {least}.")
