"""What `launch` is asked for, what it returns, and what ends it.

The same on Dask's workers and under torchrun. A message says what happened, why, and what to do.
"""

import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dask_ranks.rank.scripts import Script
from ddp_common.errors import Error

if TYPE_CHECKING:
    import pandas


@dataclass
class Job:
    """The arguments of `launch`, which explains them."""

    function: Callable
    arguments: dict[str, Any]  # of the function, with stand-ins for tables
    tables: list[Any]  # the Dask collections among them, each with its `name`
    workers: int | None
    restarts: int  # at most
    stall_timeout: float | None
    directory: str | Path | Literal[False] | None
    timeout: float
    on_report: Callable[[dict], Any] | None
    run_name: str | None
    run_config: dict

    def __post_init__(self) -> None:
        """Raises `Error` for what `launch` cannot take."""
        if not _is_seconds(self.timeout):
            raise Error(f"timeout={self.timeout!r} is to be seconds, and not negative.")
        limit = self.stall_timeout
        if limit is not None and (limit == 0 or not _is_seconds(limit)):
            raise Error(f"stall_timeout={limit!r} is to be seconds above 0, or None.")

    @property
    def is_script(self) -> bool:
        """Whether the ranks run a script, as torchrun does: their lines are shown as they come."""
        return isinstance(self.function, Script)

    @property
    def function_name(self) -> str:
        """That of the training function; 'run' for a callable without one."""
        return getattr(self.function, "__name__", "run")

    @property
    def folder_name(self) -> str:
        """What a new run directory is called by: `run_name`, the script, or the function."""
        if self.run_name:
            return self.run_name
        # Of the script that this program is; there is none in a notebook or a shell
        file = getattr(sys.modules["__main__"], "__file__", None)
        if file is None:
            return self.function_name
        path = Path(file).absolute()
        return path.parent.name if path.stem == "__main__" else path.stem


def whole_number(name: str, value: Any, least: int) -> int:
    """`value`, a number or a text, as an int.

    Raises `Error` unless it is whole and at least `least`.
    """
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        if int(value) == float(value) >= least:
            return int(value)
    raise Error(f"{name}={value!r}: {name} is a whole number of at least {least}.")


def _is_seconds(value: Any) -> bool:
    return isinstance(value, (int, float)) and value >= 0  # NaN is not


@dataclass
class Run:
    """What a launch leaves.

    `result` is what rank 0's function returned, `directory` the run directory (None where `launch`
    was to keep none), `world_size` the number of ranks, `seconds` how long the launch took.
    `records` are all reports and restarts, a dict for each. `failures` are the exceptions that
    restarts have answered, in order. `problems` says what a user must know although training went
    on: checkpoints that a full disk did not take, ranks that drifted apart.
    """

    result: Any = field(repr=False)  # it may be large
    directory: Path | None
    world_size: int
    records: list = field(repr=False)  # of dict
    seconds: float
    failures: list = field(default_factory=list)  # of exceptions
    problems: list = field(default_factory=list)  # of str

    @property
    def metrics(self) -> "pandas.DataFrame":
        """The reports as a pandas DataFrame, a row for each; each step is there once.

        The columns are restart, rank, time (s since 1970), epoch, step and what was reported.
        `restart` says which start of the ranks has reported it, from 0 on. A later start may do
        steps again: of those before it, this has the steps before the first that it has reported.
        """
        import pandas  # it takes its time, and not every run is asked for a table

        table = pandas.DataFrame([record for record in self.records if "event" not in record])
        if "step" not in table:
            return table
        first = table.groupby("restart")["step"].min().dropna()
        first_of_later = first[::-1].cummin()[::-1].shift(-1)
        is_done_again = table["step"] >= table["restart"].map(first_of_later)
        return table[~is_done_again].reset_index(drop=True)


# What ends a launch


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
