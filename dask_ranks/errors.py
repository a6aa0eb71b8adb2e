"""What ends a launch, put to a person: a message says what happened, why, and what to do now."""

from pathlib import Path
from typing import Any

from ddp_common.errors import Error


class LaunchEnded(Error):
    """What ends a launch; `directory` (Path) is that of the run, with what was saved."""

    directory: Path

    def __init__(self, message: str, **attributes: Any):
        super().__init__(message)
        vars(self).update(attributes)


class RankFailed(LaunchEnded):
    """A rank ended the run.

    Attributes: `rank` (int), `host` (str), `exitcode` (int, or None), `signal` (a name such as
    'SIGKILL', or None), `traceback` (str, empty if the rank died without one), `logs` (dict: rank
    -> its last lines), `directory` (Path of the run).
    """

    rank: int
    host: str
    exitcode: int | None = None
    signal: str | None = None
    traceback: str = ""
    logs: dict[int, list[str]] = {}


class RankStalled(RankFailed):
    """A rank lives and makes no progress.

    Of each rank, `stacks` (dict: rank -> str) shows where it is, and `collectives` (the same) says
    in which collective it waits, or which it has finished last; ranks that did not answer are not
    in it.
    """

    stacks: dict[int, str]
    collectives: dict[int, str]


class RunStopped(LaunchEnded):
    """The ranks were told to leave (SIGTERM), and did so after `step` steps. Not a failure."""

    step: int


class SchedulerLost(LaunchEnded):
    """The client lost its connection to Dask's scheduler; the ranks end on their own."""
