"""Save where training is, and continue from there.

A checkpoint is one file, whose name says the digest of its content (`checkpoint_files`). It is
written under a temporary name, synced and renamed: a file that verifies is a good one, whatever
happened. The first one of a process is read back before it gets its name. One rank writes, in a
thread of its own while training goes on: training only waits for the copy. Every rank reads.
Loading executes no code (`weights_only=True`).
"""

import contextlib
import os
import pickle
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
from ddp_common.ranks.checkpoint_files import (
    checkpoints,
    install,
    newest,
    newest_good,
    remove_all_but,
    step_of,
)
from ddp_common.ranks.rendezvous import device, rank, world_size

GROUPS = (
    " If the run called add_param_group on its way, make all groups from the beginning: "
    "parameters that are frozen (requires_grad=False) stay as they are in a group. To go on with "
    "this file, call add_param_group before restore()."
)
RUN_FOLDER = "DDP_CHECKPOINTS"  # the variable that says where the run's checkpoints are

# Of this process's run: which checkpoint saves in which folder
_saving: dict[Path, "Checkpoint"] = {}


class Checkpoint:
    """Saves and restores anything that has `state_dict` and `load_state_dict`.

    `Checkpoint(model=…, optimizer=…, sampler=…)`: `save()` writes when it is called; with
    `every_steps` or `every_seconds` the sampler also has it write between two steps. A model is
    saved without the wrappers of DDP and `torch.compile`, so that it loads into the plain one too.
    Random states are not stored: the sampler derives them from its position.

    `directory` defaults to the run's `checkpoints/`. A second Checkpoint of a run, for the best
    model so far, say, needs a folder of its own: `directory="best"` is `checkpoints/best/`.
    Without a run, `directory` is relative to the working directory; if there is none, nothing is
    saved. `keep` is how many of the newest files stay. If a file cannot be written (disk full, no
    permission), the last good one stays and `on_error` decides: with 'warn' a message is printed
    and training goes on, with 'stop' an `Error` is raised.

    At a save each rank also tells the client the norms of its model's parameters: ranks whose
    models have drifted apart are named in `run.problems`.
    """

    def __init__(
        self,
        *,
        directory: str | Path | None = None,
        keep: int = 2,
        every_steps: int | None = None,
        every_seconds: float | None = None,
        on_error: str = "warn",
        **parts,
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
        self._copies: dict[str, Any] = {}  # of the parts' states at the last save
        self._was_read_back = False  # the first file, which shows that such files can be loaded
        self._saved_step: int | None = None
        self._saved_at = time.monotonic()
        self._check_options()
        self._listen_to_sampler()

    def _check_options(self):
        lacking = [
            name for name, part in self.parts.items() if not hasattr(part, "load_state_dict")
        ]
        if lacking:
            raise Error(f"Checkpoint cannot save {', '.join(lacking)}: it has no load_state_dict.")
        if self.on_error not in ("warn", "stop") or self.keep < 1:
            raise Error(
                "Checkpoint takes on_error='warn' or 'stop' and keeps at least 1 file, "
                f"not on_error={self.on_error!r}, keep={self.keep!r}."
            )

    def _listen_to_sampler(self):
        sampler = self.parts.get("sampler")
        if hasattr(sampler, "listeners"):
            sampler.listeners.append(self)
        elif self.every_steps or self.every_seconds:
            raise Error(
                "every_steps and every_seconds need the sampler, which counts the steps: "
                "Checkpoint(sampler=…, model=…, …)."
            )

    # Saving

    def save(self) -> None:
        """Copy the current state, then write it in the background.

        Call it after `optimizer.step()`, on every rank alike: rank 0 saves, the others return at
        once. Waits for the previous write if that is still going on. Raises `Error` for a state
        that could not be loaded again, for a second Checkpoint in one folder, and for an earlier
        failure if `on_error` is 'stop'.
        """
        if self.directory is None:
            return
        self._take_folder()
        self._tell_norms()
        self.wait()
        self._saved_step = self._step()
        self._saved_at = time.monotonic()
        if rank() != 0:
            return
        self._copies = {
            name: states.copy_of(part.state_dict(), self._copies.get(name), name)
            for name, part in self.parts.items()
        }
        self._writer = threading.Thread(
            target=self._write, args=(self._saved_step,), name="ddp-checkpoint"
        )
        self._writer.start()

    def _take_folder(self):
        """From now on nothing else of this run may save in this folder."""
        if self._run_folder is not None and _saving.setdefault(self.directory, self) is not self:
            raise Error(
                f"Two Checkpoints of this run save in {self.directory}: each would remove the "
                "other's files, and a resume would find those of either. Give one of them a "
                "folder of its own in the run: Checkpoint(directory='best', …)."
            )

    def _tell_norms(self):
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

    def batch_taken(self):
        pass

    def is_at_boundary(self):
        return True

    def save_and_wait(self):
        self.save()
        self.wait()

    def save_if_due(self):
        step = self._step()
        if self.directory is None or step in (0, self._saved_step):
            return
        is_late = False
        if self.every_seconds is not None and rank() == 0:
            is_late = time.monotonic() - self._saved_at >= self.every_seconds
        if is_late or (self.every_steps and step % self.every_steps == 0):
            self.save()

    def _step(self):
        sampler = self.parts.get("sampler")
        if sampler is not None:
            return sampler.steps_done
        earlier = checkpoints(self.directory)
        return step_of(earlier[-1]) + 1 if earlier else 0

    def _write(self, step):
        """The background thread: write the file, then remove old ones.

        Whatever fails here leaves the earlier files as they are.
        """
        try:
            make_private(self.directory)
            path = write(self._copies, self.directory, step, read_back=not self._was_read_back)
            self._was_read_back = True
            remove_all_but(self.keep, path)
            reporting.post(CheckpointSaved(self._name_in_run(path), self.keep))
        except BaseException as error:  # of any kind: this thread has nobody to raise it to
            self._note_failure(error, step)
        reporting.made_progress()

    def _name_in_run(self, path):
        """A file's name for the client: relative to the run's checkpoints, if it is there."""
        is_in_run = self._run_folder is not None and path.is_relative_to(self._run_folder)
        return str(path.relative_to(self._run_folder) if is_in_run else path)

    def _note_failure(self, error, step):
        """Keep it for `wait`, and report it to the client, which shows it to the user."""
        self._problem = Error(
            f"The checkpoint of step {step} in {self.directory} was not saved: "
            f"{_cause_of(error)}. The last good one is {self._name_of_last_good()}. Make room, or "
            "choose another directory."
        )
        reporting.post(CheckpointFailed(str(self._problem)))
        consequence = " Training goes on." if self.on_error == "warn" else ""
        print(f"{self._problem}{consequence}", file=sys.stderr, flush=True)

    def _name_of_last_good(self):
        with contextlib.suppress(OSError):  # a disk that cannot be read either
            last = newest_good(self.directory)
            if last is not None:
                return last.name
        return "none"

    # Restoring

    def restore(self) -> Path | None:
        """Load the newest checkpoint that verifies; returns its path, None if there is none.

        Damaged ones are named on stderr and skipped. So is what the program has set otherwise
        than the run that saved: the saved learning rate is gone on with. Raises `Error` if there
        are checkpoints but none is good, and if the checkpoint was written by another model, by
        another kind of optimizer or schedule, or with other data.
        """
        self.wait()
        if self.directory is None:
            return None
        path = newest(self.directory, quiet=rank() != 0)
        if path is None:
            return None
        state = load(path, device())
        if set(state) != set(self.parts):
            raise Error(
                f"{path} holds {', '.join(state)}; this run saves {', '.join(self.parts)}. Resume "
                "with the code that wrote it."
            )
        for name in self.parts:
            self._restore_part(name, state[name], path)
        self._saved_step = step_of(path)
        if rank() == 0:
            print(f"Resumed from {path.name}", flush=True)
        return path

    def _restore_part(self, name, state, path):
        part = self.parts[name]
        before = states.settings(part)
        try:
            part.load_state_dict(state)
        except (RuntimeError, ValueError, KeyError) as error:
            said = str(error).rstrip(".")
            advice = GROUPS if isinstance(part, torch.optim.Optimizer) else ""
            raise Error(
                f"{path} was written by another {name}: {said}. Resume with the settings in "
                f"its run's config.json.{advice}"
            ) from None
        after = states.settings(part)
        if not states.are_of_one_kind(before, after):
            there = ", ".join(sorted(after.keys() - before.keys())) or "nothing"
            here = ", ".join(sorted(before.keys() - after.keys())) or "nothing"
            raise Error(
                f"{path} was written by another kind of {name} than {type(part).__name__}: only "
                f"there is {there}, only here {here}. Resume with the {name} that wrote it."
            )
        has_schedule = any(
            getattr(other, "optimizer", None) is part for other in self.parts.values()
        )
        for setting in states.differences(before, after, has_schedule):
            if rank() == 0:
                print(
                    f"Resumed with {name}.{setting} = {after[setting]!r}, as it was saved; this "
                    f"program has made it with {before[setting]!r}. To change it on purpose, set "
                    "it after restore().",
                    file=sys.stderr,
                    flush=True,
                )


def finish_writing() -> None:
    """Wait for every checkpoint of this process's run that is still being written."""
    saving = list(_saving.values())
    _saving.clear()
    for checkpoint in saving:
        checkpoint.wait()


def _cause_of(error):
    if isinstance(error, Error):
        return str(error).rstrip(".")
    # torch raises an error of its own in the context of what the disk says.
    while not isinstance(error, OSError) and error.__context__ is not None:
        error = error.__context__
    return getattr(error, "strerror", None) or first_line(error)


# Files


def load(path: Path, device: torch.device | str):
    """The state in a checkpoint file, its tensors on `device`.

    Raises `Error` rather than execute anything that is no plain state.
    """
    try:
        return torch.load(path, map_location=device, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError) as error:
        lines = str(error).splitlines()
        reasons = [line.strip() for line in lines if "Unpickler error" in line]
        reason = reasons[0] if reasons else first_line(error)
        raise Error(
            f"{path} cannot be loaded without executing code, so it was not. It may hold more "
            "than tensors and plain Python values (NumPy numbers, say), or come from elsewhere. "
            f"What torch says: {reason}"
        ) from None


def write(state, directory: Path, step: int, read_back: bool) -> Path:
    """Save `state` in `directory`: a file that is whole or not there at all; returns its path.

    With `read_back`, it is loaded before it gets its name. Nothing half-written stays. Raises
    whatever the disk does, and `Error` for a file that cannot be loaded.
    """
    temporary = directory / f"step-{step:08d}.tmp"
    try:
        with open(temporary, "wb") as file:
            torch.save(state, file)
            file.flush()
            sync(file.fileno())
        if read_back:
            load(temporary, "cpu")
        return install(temporary, step)
    finally:
        temporary.unlink(missing_ok=True)


sync = os.fsync  # replaced where a test or the fault lab needs a save that takes its time
