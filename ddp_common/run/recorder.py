"""Takes what the ranks say, once: into the run's folder, onto the screen, to `on_report`.

The same for Dask, where the client hears all ranks, and for torchrun, where each rank has one of
these. Promises: what a screen or a pipe cannot take is nobody's failure; the log has it.
"""

import contextlib
import json
import math
import platform
import re
import subprocess
import time
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

from ddp_common.messages import (
    CheckpointFailed,
    CheckpointSaved,
    File,
    Line,
    Message,
    ParameterNorms,
    Position,
    Report,
    Started,
    shows_training,
)
from ddp_common.ranks.checkpoint_files import checkpoints
from ddp_common.run.places import shown
from ddp_common.run.progress import Mode, Progress

WARNING = re.compile(r"\w*Warning: ")
TOLERANCE = 1e-5  # relative, of norms of parameters: float32 has 1e-7
KEPT = 50  # saves of which the norms of some ranks have not arrived yet


class Recorder:
    """What is taken goes into `files`: a `RunDirectory`, or what a rank of torchrun has of it."""

    def __init__(
        self,
        files: Any,
        world_size: int,
        on_report: Callable[[dict], Any] | None = None,
        draws: bool = True,
    ):
        self.files = files
        self.on_report = on_report
        self.told = len(files.records)  # so many `on_report` has had, or is not to
        self.progress = Progress()
        if not draws:
            self.progress.mode = Mode.OFF
        self.replicas = Replicas(world_size)
        self.config: dict | None = None  # to be written into config.json once training has begun
        self.shown: set[str] = set()  # lines of rank 0
        self.warnings: dict[str, int] = {}  # of other ranks, and the first that printed it
        self.lines_not_shown = 0

    def describe(self, config: dict) -> None:
        """Have `config` in config.json: of a run that is resumed, once ranks train on.

        Until then it says how its checkpoints were made.
        """
        self.config = config
        if not checkpoints(self.files.path / "checkpoints"):
            self._write_config()

    def _write_config(self) -> None:
        self.files.write_json("config.json", self.config)
        self.config = None

    def take(self, rank: int, message: Message) -> None:
        """Take a message. Raises OSError and `Error` where `files` do."""
        if self.config is not None and shows_training(message):
            self._write_config()
        match message:
            case Started():
                self.files.log(f"rank {rank} started: process {message.pid} on {message.host}")
            case Position():
                _draw(self.progress.position, message.known())
            case Report():
                self.files.record(rank, message.values)
                _draw(self.progress.record, message.values, rank)
            case Line():
                self._take_line(rank, message.text)
            case File():
                self.files.save(message.name, message.content())
            case CheckpointSaved():
                self.files.saved()
            case CheckpointFailed():
                self.files.not_saved(message.why)
            case ParameterNorms():
                problem = self.replicas.take(rank, message)
                if problem is not None:
                    self.files.problem(problem, "drifted apart")

    def _take_line(self, rank: int, text: str) -> None:
        """Write down a line that a rank has printed, and show rank 0's."""
        self.files.log(f"[rank {rank}] {text}")
        if rank == 0:
            self.shown.add(text)
            self.progress.print(text)
        else:
            self.lines_not_shown += 1
            if WARNING.search(text):
                self.warnings.setdefault(text, rank)

    def tell(self) -> None:
        """Call `on_report` with the records that it has not had, in order; raises what it does."""
        while self.on_report is not None and self.told < len(self.files.records):
            record = self.files.records[self.told]
            self.told += 1
            try:
                self.on_report(dict(record))  # it may change it
            except Exception as error:
                self.files.log(f"on_report raised {error!r}: the ranks were ended")
                error.add_note(
                    "on_report raised this, and the ranks were ended. What was saved is in "
                    f"{self.files.path}; launch with directory= to go on."
                )
                raise

    def close(self) -> None:
        """Draw the last state; show the warnings of other ranks, and say where their lines are."""
        _draw(self.progress.close)
        for text, rank in self.warnings.items():
            if text not in self.shown:
                self.progress.print(f"[rank {rank}] {text}")
        if self.lines_not_shown:
            where = ""
            if not self.files.is_temporary:
                where = f": see {shown(self.files.path / 'log.txt')}"
            self.progress.note(f"Other ranks printed {self.lines_not_shown} line(s){where}")


def _draw(draw: Callable[..., None], *arguments: Any) -> None:
    with contextlib.suppress(OSError, ValueError):  # of a screen that is gone, or a closed stream
        draw(*arguments)


# Drift


class Replicas:
    """Whether the ranks' models are still alike, by the norms that each rank sends at a save.

    Replicas start alike and get the same averaged gradients, so they stay alike. Where they do
    not, rank 0's are saved and returned, and nothing else says that the others trained something
    else. Norms and not a digest: on different kinds of processors the last bits may differ.
    """

    def __init__(self, world_size: int):
        self.world_size = world_size
        # By checkpoint and step, then by rank
        self.pending: dict[tuple[str, int], dict[int, ParameterNorms]] = {}

    def take(self, rank: int, message: ParameterNorms) -> str | None:
        """Take in the norms of a rank; returns a sentence if the ranks have drifted apart."""
        save = message.checkpoint, message.step
        by_rank = self.pending.setdefault(save, {})
        by_rank.setdefault(rank, message)  # the first, where one step is saved twice
        if len(by_rank) == self.world_size:
            return _apart(self.pending.pop(save))
        if len(self.pending) > KEPT:  # where not all ranks save
            self.pending.pop(next(iter(self.pending)))
        return None


def _apart(by_rank: dict[int, ParameterNorms]) -> str | None:
    first = by_rank[0]
    for rank in sorted(by_rank):
        for name, here, there in zip(first.names, first.norms, by_rank[rank].norms):
            both_diverged = math.isnan(here) and math.isnan(there)
            if not both_diverged and not math.isclose(here, there, rel_tol=TOLERANCE):
                return (
                    f"The models of the ranks have drifted apart: after step {first.step} the "
                    f"parameter {name} has the norm {here:.6g} on rank 0 and {there:.6g} on rank "
                    f"{rank}. Rank 0's is saved, and the others train something else. DDP "
                    "averages the gradients of its own forward pass, for parameters that had "
                    "requires_grad=True when it was made: call the wrapped model, not the one "
                    "inside; wrap it again after unfreezing; have schedules step by a value that "
                    "is the same on all ranks."
                )
    return None


# config.json


def describe(
    folder: Path, run_config: dict, addresses: Iterable[str], function: str | None
) -> dict:
    """The content of config.json for the run in `folder`.

    That is `run_config`, which the program has given to `launch`, with versions, git revision, the
    workers of the ranks (`addresses`) and the name of the function that they call. What an earlier
    launch in this folder has said of itself stays, where this one says nothing.
    """
    return {
        **_earlier(folder / "config.json"),
        **run_config,
        "workers": list(addresses),
        "versions": _versions(),
        "platform": platform.platform(),
        "git": _git_revision(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "function": function,
    }


def _earlier(path):
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError, RecursionError):
        return {}  # there is none, or it is damaged: it is written anew


def _versions():
    versions = {"python": platform.python_version()}
    for name in ("torch", "distributed", "numpy"):
        versions[name] = metadata.version(name)
    return versions


def _git_revision():
    try:
        git = subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
        )
    except OSError:  # there is no git here
        return None
    return git.stdout.strip() or None
