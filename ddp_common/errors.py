"""What can go wrong, said to a person: every message tells what happened, why, and what to do."""


class Error(Exception):
    """Something the reader can put right: bad input, missing data, no workers. The command line prints it without a traceback."""


class RankFailed(Error):
    """A rank ended the run.

    Attributes: `rank` (int), `host` (str), `exitcode` (int, or None), `signal` (name such as 'SIGKILL', or None),
    `traceback` (str, empty if the rank died without one), `logs` (dict: rank -> its last lines), `directory` (Path of the run).
    """

    def __init__(
        self,
        message,
        *,
        rank,
        host,
        exitcode=None,
        signal=None,
        traceback="",
        logs=None,
        directory=None,
    ):
        super().__init__(message)
        self.rank, self.host, self.exitcode, self.signal = rank, host, exitcode, signal
        self.traceback, self.logs, self.directory = traceback, logs or {}, directory


class RankStalled(RankFailed):
    """A rank lives and makes no progress. `stacks` (dict: rank -> str) says where each of them is."""

    def __init__(self, message, *, stacks, **attributes):
        super().__init__(message, **attributes)
        self.stacks = stacks


class RunStopped(Error):
    """The ranks were told to leave (SIGTERM) and did so after `step` steps; `directory` holds what they saved. Not a failure."""

    def __init__(self, message, *, step, directory):
        super().__init__(message)
        self.step, self.directory = step, directory


class SchedulerLost(Error):
    """The client lost its connection to Dask's scheduler; the ranks end by themselves. `directory` holds what was saved."""

    def __init__(self, message, *, directory):
        super().__init__(message)
        self.directory = directory
