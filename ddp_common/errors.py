"""What can go wrong, said to a person: every message tells what happened, why, and what to do."""


class Error(Exception):
    """Something the reader can put right: bad input, missing data, no workers. The command line prints it without a traceback."""


class RankFailed(Error):
    """A rank ended the run.

    Attributes: `rank` (int), `host` (str), `exitcode` (int, or None), `signal` (name such as 'SIGKILL', or None),
    `traceback` (str, empty if the rank died without one), `logs` (dict: rank -> its last lines), `directory` (Path of the run).
    """

    def __init__(self, message, *, rank, host, exitcode=None, signal=None, traceback="", logs=None, directory=None):
        super().__init__(message)
        self.rank, self.host, self.exitcode, self.signal = rank, host, exitcode, signal
        self.traceback, self.logs, self.directory = traceback, logs or {}, directory
