"""What ends a launch, put to a person: a message says what happened, why, and what to do now."""

from pathlib import Path

from ddp_common.errors import Error


class RankFailed(Error):
    """A rank ended the run.

    Attributes: `rank` (int), `host` (str), `exitcode` (int, or None), `signal` (a name such as
    'SIGKILL', or None), `traceback` (str, empty if the rank died without one), `logs` (dict: rank
    -> its last lines), `directory` (Path of the run).
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int,
        host: str,
        exitcode: int | None = None,
        signal: str | None = None,
        traceback: str = "",
        logs: dict | None = None,
        directory: Path | None = None,
    ):
        super().__init__(message)
        self.rank = rank
        self.host = host
        self.exitcode = exitcode
        self.signal = signal
        self.traceback = traceback
        self.logs = logs or {}
        self.directory = directory


class RankStalled(RankFailed):
    """A rank lives and makes no progress.

    Of each rank, `stacks` (dict: rank -> str) shows where it is, and `collectives` (the same) says
    in which collective it waits, or which it has finished last; ranks that did not answer are not
    in it.
    """

    def __init__(self, message: str, *, stacks: dict, collectives: dict, **attributes):
        super().__init__(message, **attributes)
        self.stacks = stacks
        self.collectives = collectives


class RunStopped(Error):
    """The ranks were told to leave (SIGTERM), and did so after `step` steps. Not a failure.

    `directory` holds what they saved.
    """

    def __init__(self, message: str, *, step: int, directory: Path):
        super().__init__(message)
        self.step = step
        self.directory = directory


class SchedulerLost(Error):
    """The client lost its connection to Dask's scheduler; the ranks end on their own.

    `directory` holds what was saved.
    """

    def __init__(self, message: str, *, directory: Path):
        super().__init__(message)
        self.directory = directory
