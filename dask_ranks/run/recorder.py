"""Takes what the ranks say, once: into the run's folder, onto the screen, to `on_report`.

The same for Dask, where the client hears all ranks, and for torchrun, where each rank has one of
these. Promises: what a screen or a pipe cannot take is nobody's failure; the log has it.
"""

import contextlib
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

from dask_ranks.messages import Line, Started, shows_training
from dask_ranks.run.folders import shown
from dask_ranks.run.progress import Mode, Progress, say
from dask_ranks.run.run_directory import RunFiles
from ddp_common.checkpoint_files import checkpoints
from ddp_common.files import open_file
from ddp_common.reporting import CheckpointFailed, File, Message, Position, Problem, Report


class Recorder:
    """What is taken goes into `files`: a `RunDirectory`, or what a rank of torchrun has of it."""

    def __init__(
        self,
        files: RunFiles,
        on_report: Callable[[dict], Any] | None = None,
        draws: bool = True,
        shows_all: bool = False,
    ):
        self.files = files
        self.on_report = on_report
        self.told = len(files.records)  # so many `on_report` has had, or is not to
        self.shows_all = shows_all  # lines of other ranks, too
        self.progress = Progress()
        if not draws:
            self.progress.mode = Mode.OFF
        self.config: dict | None = None  # to be written into config.json once training has begun
        self.lines_not_shown = 0

    def describe(self, config: dict) -> None:
        """Have `config` in config.json: of a run that is resumed, once ranks train on.

        Until then it says how its checkpoints were made.
        """
        self.config = config
        if not checkpoints(self.files.path / "checkpoints"):
            self._write_config()

    def _write_config(self) -> None:
        if self.config is not None:
            text = json.dumps(self.config, indent=2, default=str) + "\n"
            self.files.save("config.json", text.encode())
            self.config = None

    def take(self, rank: int, message: Message) -> None:
        """Take a message. What cannot be written is a problem of `files`."""
        if shows_training(message):
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
                self.files.log(f"[rank {rank}] {message.text}")
                if rank == 0:
                    say(message.text, sys.stdout)
                elif self.shows_all:
                    say(f"[rank {rank}] {message.text}", sys.stdout)
                else:
                    self.lines_not_shown += 1
            case File():
                self.files.save(message.name, message.content())
            case CheckpointFailed():
                self.files.problem(message.why, "checkpoints")
            case Problem():
                self.files.problem(message.text, message.text)

    def call_on_report(self) -> None:
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
        """Draw the last state, and say where the lines of other ranks are."""
        _draw(self.progress.close)
        if self.lines_not_shown:
            log = shown(self.files.path / "log.txt")
            where = "" if self.files.is_temporary else f": see {log}"
            self.progress.note(f"Other ranks printed {self.lines_not_shown} line(s){where}")


def _draw(draw: Callable[..., None], *arguments: Any) -> None:
    with contextlib.suppress(OSError, ValueError):  # of a screen that is gone, or a closed stream
        draw(*arguments)


# config.json


def describe(
    folder: Path, run_config: dict, addresses: Iterable[str], function: str | None
) -> dict:
    """The content of config.json for the run in `folder`.

    That is versions, the git revision of the program's folder, the workers of the ranks
    (`addresses`), the name of the function that they call, and `run_config`, which the program has
    given to `launch` and which has the last word. What an earlier launch in this folder has said
    of itself stays, where this one says nothing.
    """
    return {
        **_earlier(folder / "config.json"),
        "workers": list(addresses),
        "versions": _versions(),
        "platform": platform.platform(),
        "git": _git_revision(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "function": function,
        **run_config,
    }


def _earlier(path: Path) -> dict[str, Any]:
    try:
        with open(path, opener=open_file) as file:
            return dict(json.load(file))
    except (OSError, ValueError, TypeError, RecursionError):
        return {}  # there is none, or it is damaged: it is written anew


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in ("torch", "distributed", "numpy", "ddp-common"):
        with contextlib.suppress(metadata.PackageNotFoundError):  # a checkout on PYTHONPATH
            versions[name] = metadata.version(name)
    return versions


def _git_revision() -> str | None:
    """That of the folder in which the program's script lies; in a notebook, of this folder."""
    script = getattr(sys.modules["__main__"], "__file__", None)
    try:
        git = subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            cwd=Path(script).absolute().parent if script else None,
            capture_output=True,
            text=True,
        )
    except OSError:  # there is no git here
        return None
    return git.stdout.strip() or None
