"""Save where training is, and continue from there.

A checkpoint is one file, whose name says the digest of its content (`checkpoint_files`). It is
written under a temporary name, synced and renamed: a file that verifies is a good one, whatever
happened. The first one of a process is read back before it gets its name. One rank writes, in a
thread of its own while training goes on: training only waits for the copy. Nothing is saved while
gradients are being added up (`boundaries`). Every rank reads (`restoring`).
"""

import contextlib
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch.optim.swa_utils import AveragedModel

from ddp_common.errors import Error, first_line
from ddp_common.files import make_private
from ddp_common.messages import CheckpointFailed, CheckpointSaved, ParameterNorms
from ddp_common.ranks import reporting, states
from ddp_common.ranks.boundaries import Boundaries
from ddp_common.ranks.checkpoint_files import (
    TEMPORARY,
    checkpoints,
    hold,
    install,
    newest_good,
    remove_all_but,
    step_of,
)
from ddp_common.ranks.descriptions import WRITTEN_BY, describe
from ddp_common.ranks.rendezvous import rank, world_size
from ddp_common.ranks.restoring import chosen_file, load, load_into
from ddp_common.ranks.sampling import ElasticSampler
from ddp_common.values import whole_or_none

OVERDUE = 1000  # steps at each of which it was to save and could not, before it says so
RUN_FOLDER = "DDP_CHECKPOINTS"  # the variable that says where the run's checkpoints are

# Of this process's run: which checkpoint saves in which folder
_saving: dict[Path, "Checkpoint"] = {}
_writing = threading.Lock()  # one file at a time: two Checkpoints may save in one folder


class Checkpoint:
    """Saves and restores anything that has `state_dict` and `load_state_dict`.

    `Checkpoint(model=…, optimizer=…, sampler=…)`: `save()` writes when it is called; with
    `every_steps` or `every_seconds` the sampler also has it write before the next batch is taken,
    at the first moment at which no gradients are being added up for an optimizer of this
    checkpoint. No batch follows the last one: call `save()` there. With a `GradScaler`, which
    skips steps, give it the scaler too. A model is saved without the wrappers of DDP and
    `torch.compile`: `torch.load(path, weights_only=True)["model"]` loads into the plain one.
    Random states are not stored: the sampler derives them from its position. Of several
    samplers in turns name the one first whose batch the loop takes first: it saves before that
    one's batches, and counts the steps of all. Without a sampler it saves only when `save()` is
    called, not before a rank leaves: so the best model stays the best (docs/recipes.md).

    `directory` defaults to the run's `checkpoints/`. A second Checkpoint of a run, for the best
    model so far, say, needs a folder of its own: `directory="best"` is `checkpoints/best/`.
    Without a run, `directory` is relative to the working directory; if there is none, nothing is
    saved. `keep` is how many of the newest files stay. If a file cannot be written (disk full, no
    permission), the last good one stays and `on_error` decides: with 'warn' a message is printed
    and training goes on, with 'stop' an `Error` is raised.

    At a save each rank also tells the client the norms of its model's parameters: ranks whose
    models have drifted apart are named in `run.problems`. `every_seconds` goes by the clock of
    rank 0, which then saves alone: nothing is compared.
    """

    def __init__(
        self,
        *,
        directory: str | Path | None = None,
        keep: int = 2,
        every_steps: int | None = None,
        every_seconds: float | None = None,
        on_error: str = "warn",
        **parts: Any,
    ):
        run_folder = os.environ.get(RUN_FOLDER)
        self._run_folder = Path(run_folder).absolute() if run_folder else None
        self.directory = self._run_folder
        if directory is not None:
            self.directory = Path(run_folder or "", directory).absolute()
        self.keep = keep
        self.on_error = on_error
        self.every_steps = every_steps
        self.every_seconds = every_seconds
        self.parts = {name: states.unwrapped(part) for name, part in parts.items()}
        self._writer: threading.Thread | None = None  # the thread that writes
        self._problem: Error | None = None  # the `Error` of the last save
        self._state: dict[str, Any] = {}  # what goes into the file: copies at the last save
        self._was_read_back = False  # the first file, which shows that such files can be loaded
        self._saved_step = 0
        self._saved_at = time.monotonic()
        self._check_options()
        self._boundaries = Boundaries(self.parts.values())
        self._samplers = [part for part in parts.values() if isinstance(part, ElasticSampler)]
        self._last_taken: ElasticSampler | None = None  # the one whose batch was
        self._missed = 0  # moments at which it was to save, and could not
        for sampler in self._samplers:
            sampler.listeners.append(self)
        if not self._samplers and (every_steps or every_seconds):
            raise Error(
                "every_steps and every_seconds need the sampler, which counts the steps: "
                "Checkpoint(sampler=…, model=…, …)."
            )

    def _check_options(self) -> None:
        for name, part in self.parts.items():
            if not hasattr(part, "load_state_dict") or name == WRITTEN_BY:
                raise Error(
                    f"Checkpoint cannot save {name}: a part has load_state_dict, and another name "
                    f"than {WRITTEN_BY}."
                )
            if hasattr(part, "consolidate_state_dict"):
                raise Error(
                    f"Checkpoint cannot save {name}: a {type(part).__name__} has only this rank's "
                    "share of its state. Use an optimizer that is whole on every rank, or "
                    "torch.distributed.checkpoint."
                )
        steps = self.every_steps
        seconds = self.every_seconds
        is_right = (
            self.on_error in ("warn", "stop")
            and whole_or_none(self.keep)
            and (steps is None or whole_or_none(steps))
            and (seconds is None or seconds > 0)
        )
        if not is_right:
            raise Error(
                "Checkpoint takes on_error='warn' or 'stop'; keep and every_steps are whole "
                "numbers of at least 1, every_seconds is a number above 0; not "
                f"on_error={self.on_error!r}, keep={self.keep!r}, every_steps={steps!r}, "
                f"every_seconds={seconds!r}."
            )

    # What the sampler calls

    def batch_taken(self, sampler: ElasticSampler) -> None:
        """Training takes a batch of `sampler` now."""
        if sampler in self._samplers:
            self._last_taken = sampler
            self._boundaries.batch_taken()

    def pass_is_over(self, sampler: ElasticSampler) -> None:
        """Training has done with the last batch of an epoch what it does with it."""
        if sampler is self._last_taken:
            self._boundaries.batch_is_over()

    def saves_before_batches_of(self, sampler: ElasticSampler) -> bool:
        """Whether it is the first of its samplers that train now."""
        training = [each for each in self._samplers if each.is_in_loop]
        return sampler is training[0]

    def is_at_boundary(self) -> bool:
        """Whether a checkpoint of this moment loses no gradients."""
        return self._boundaries.is_reached()

    def save_if_due(self) -> None:
        """Save if it is time for it, by steps or seconds, and at the next boundary if not now."""
        if self.directory is None:
            return
        step = self._step()
        if step == self._saved_step:
            return
        is_due = False
        if self.every_steps:
            is_due = step // self.every_steps > self._saved_step // self.every_steps
        is_late = False
        if self.every_seconds is not None and rank() == 0:
            is_late = time.monotonic() - self._saved_at >= self.every_seconds
        if not is_due and not is_late:
            return
        if self.is_at_boundary():
            self._missed = 0
            self.save()
        else:
            self._missed += 1
            if self._missed == OVERDUE:
                self._warn_that_it_never_saves()

    def _warn_that_it_never_saves(self) -> None:
        stuck = self._boundaries.with_unused_gradients()
        names = [name for name, part in self.parts.items() if any(part is each for each in stuck)]
        if names:
            why = (
                f"{', '.join(names)} had gradients that no step has used. Call zero_grad() where "
                "they are not needed"
            )
        else:
            why = (
                "no optimizer has stepped since a batch was taken. Of several samplers, name "
                "first that one whose batch the loop takes first"
            )
        print(
            f"Warning: nothing is saved, though it is {OVERDUE} steps late: before each of them "
            f"{why}.",
            file=sys.stderr,
            flush=True,
        )

    def save_and_wait(self) -> None:
        """Save before this rank leaves."""
        self.save()
        self.wait()

    # Saving

    def save(self) -> None:
        """Copy the current state, then write it in the background.

        Call it after `optimizer.step()`. Rank 0 saves; on the others it only sends norms, so that
        models can be compared. Waits for the previous write if that is still going on. Raises
        `Error` between batches whose gradients are added up for one step, for a state that could
        not be loaded again, for a second Checkpoint in one folder, and for an earlier failure if
        `on_error` is 'stop'.
        """
        if not self.is_at_boundary():
            raise Error(
                "save() before the optimizers of this Checkpoint have stepped: the gradients of "
                "the last batch would be lost. Call it after optimizer.step(), or zero_grad(); if "
                "a GradScaler makes the steps, after scaler.update(), and with "
                "Checkpoint(scaler=scaler, …)."
            )
        if self.directory is None:
            return
        self._take_folder(self.directory)
        self._tell_norms()
        self.wait()
        self._saved_step = self._step()
        self._saved_at = time.monotonic()
        if rank() != 0:
            return
        copies = {
            name: states.copy_of(part.state_dict(), self._state.get(name), name)
            for name, part in self.parts.items()
        }
        self._state = {**copies, WRITTEN_BY: describe(self.parts)}
        self._writer = threading.Thread(
            target=self._write, args=(self.directory, self._saved_step), name="ddp-checkpoint"
        )
        self._writer.start()

    def _take_folder(self, directory: Path) -> None:
        """From now on nothing else of this run may save in this folder."""
        if self._run_folder is not None and _saving.setdefault(directory, self) is not self:
            raise Error(
                f"Two Checkpoints of this run save in {directory}: each would remove the "
                "other's files. Make it once, before the loop, or give one a folder of its own: "
                "Checkpoint(directory='best', …)."
            )

    def _tell_norms(self) -> None:
        """Tell the client the norms of the models' parameters, if there are ranks to compare."""
        step = reporting.position().get("step")
        if step is None or world_size() == 1:
            return
        # An averaged model may be kept up to date by rank 0 alone.
        parameters = {
            f"{part_name}.{name}": parameter
            for part_name, part in self.parts.items()
            if isinstance(part, torch.nn.Module) and not isinstance(part, AveragedModel)
            for name, parameter in part.named_parameters()
        }
        norms = states.norms(list(parameters.values()))
        names = list(parameters) if rank() == 0 else []
        folder = str(self.directory)

        def message() -> ParameterNorms:
            return ParameterNorms(folder, step, norms.tolist(), names)

        reporting.post(message)  # the thread that delivers waits for a GPU

    def wait(self) -> None:
        """Return when the last save is on disk.

        Raises `Error` if it failed and `on_error` is 'stop'.
        """
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        problem = self._problem
        self._problem = None
        if problem is not None and self.on_error == "stop":
            raise problem

    def _step(self) -> int:
        if self._samplers:
            return sum(sampler.steps_done for sampler in self._samplers)
        assert self.directory is not None
        steps_of_samplers = reporting.position().get("step", 0)
        earlier = checkpoints(self.directory)
        return max(steps_of_samplers, step_of(earlier[-1]) + 1 if earlier else 0)

    def _write(self, directory: Path, step: int) -> None:
        """The background thread: write the file, then remove old ones.

        Whatever fails here leaves the earlier files as they are.
        """
        path = None
        try:
            make_private(directory)
            with _writing:
                path = write(self._state, directory, step, read_back=not self._was_read_back)
            self._was_read_back = True
            remove_all_but(self.keep, path)
            reporting.post(CheckpointSaved(self._name_in_run(path), self.keep))
        except BaseException as error:  # of any kind: this thread has nobody to raise it to
            if path is not None and path.exists():
                reporting.post(CheckpointSaved(self._name_in_run(path), self.keep))
                what = f"Old checkpoints in {directory} were not removed"
            else:
                what = f"The checkpoint of step {step} in {directory} was not saved"
            self._note_failure(error, what, directory)
        reporting.made_progress()

    def _name_in_run(self, path: Path) -> str:
        """A file's name for the client: relative to the run's checkpoints, if it is there."""
        if self._run_folder is not None and path.is_relative_to(self._run_folder):
            return str(path.relative_to(self._run_folder))
        return str(path)

    def _note_failure(self, error: BaseException, what: str, directory: Path) -> None:
        """Keep it for `wait`, and report it to the client, which shows it to the user."""
        last_good = None
        with contextlib.suppress(OSError):  # a disk that cannot be read either
            last_good = newest_good(directory)
        self._problem = Error(
            f"{what}: {_cause_of(error)}. The last good one is "
            f"{last_good.name if last_good else 'none'}. Make room, or choose another directory."
        )
        reporting.post(CheckpointFailed(str(self._problem)))
        consequence = " Training goes on." if self.on_error == "warn" else ""
        print(f"{self._problem}{consequence}", file=sys.stderr, flush=True)

    # Restoring

    def restore(self) -> Path | None:
        """Load the newest checkpoint that verifies; returns its path, None if there is none.

        A collective: every rank calls it, and loads the file that rank 0 has chosen. Damaged ones
        are named on stderr and skipped. So is what the program has set otherwise than the run
        that saved: the saved learning rate is gone on with. Raises `Error` if there are
        checkpoints but none is good, if this rank does not see the chosen one, and if that was
        written by another model, optimizer or schedule, or with other data.
        """
        self.wait()
        if self.directory is None:
            return None
        path = chosen_file(self.directory)
        if path is None:
            return None
        load_into(self.parts, path)
        self._saved_step = step_of(path)
        self._boundaries.restored()
        if rank() == 0:
            print(f"Resumed from {path.name}", flush=True)
        return path


def finish_writing() -> None:
    """Wait for every checkpoint of this process's run that is still being written.

    Raises the first `Error` of those with `on_error='stop'`.
    """
    problems = []
    while _saving:
        _, checkpoint = _saving.popitem()
        try:
            checkpoint.wait()
        except Error as error:
            problems.append(error)
    if problems:
        raise problems[0]


def _cause_of(error: BaseException) -> str:
    if isinstance(error, Error):
        return str(error).rstrip(".")
    # torch raises an error of its own in the context of what the disk says.
    while not isinstance(error, OSError) and error.__context__ is not None:
        error = error.__context__
    return getattr(error, "strerror", None) or first_line(error)


def write(state: dict[str, Any], directory: Path, step: int, read_back: bool) -> Path:
    """Save `state` in `directory`: a file that is whole or not there at all; returns its path.

    With `read_back`, it is loaded before it gets its name. Nothing half-written stays, except
    after a kill until the next save. Raises whatever the disk does, and `Error` for a file that
    cannot be loaded.
    """
    temporary = directory / TEMPORARY
    try:
        with open(temporary, "w+b") as file:  # to read, too: NFS locks no other for sharing
            hold(file)
            torch.save(state, file)
            file.flush()
            sync(file.fileno())
            if read_back:
                load(temporary)
            return install(temporary, step)
    finally:
        temporary.unlink(missing_ok=True)


sync = os.fsync  # replaced where a test or the fault lab needs a save that takes its time
