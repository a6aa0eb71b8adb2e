"""What can go wrong, put to a person: a message says what happened, why, and what to do now."""

from pathlib import Path


class Error(Exception):
    """Something the reader can put right: bad input, missing data, no workers.

    The command line prints it without a traceback. `directory` is the run's, where there is one.
    """

    directory: Path | None = None


def first_line(error: BaseException) -> str:
    """The first line of what an exception says; the name of its type if it says nothing."""
    lines = str(error).splitlines()
    return lines[0] if lines and lines[0] else type(error).__name__
