"""Save where training is and go on from there.

A checkpoint is one file `step-00000120.pt` with, beside it, its SHA-256. The digest is written first, the file under a temporary name,
synced, then renamed: whatever happens, a name that ends in `.pt` is a whole file, and one that verifies is a good one. One rank writes,
in a thread of its own while training goes on: training waits only for the copy. Every rank reads. Loading executes no code
(`weights_only=True`).
"""

import contextlib
import os
import pickle
import sys
import threading
import time
from pathlib import Path

import torch

from ddp_common.errors import Error
from ddp_common.files import make_private
from ddp_common.messages import CheckpointFailed, CheckpointSaved
from ddp_common.ranks import reporting
from ddp_common.ranks.checkpoint_files import (
    checkpoints,
    fault,
    install,
    newest,
    remove_all_but,
    step_of,
)
from ddp_common.ranks.rendezvous import device, rank

PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    torch.Size,
    torch.dtype,
    torch.device,
)  # what loads without executing code

_unfinished = set()  # checkpoints of this process that are being written


class Checkpoint:
    """Saves and restores anything that has `state_dict` and `load_state_dict`: `Checkpoint(model=…, optimizer=…, sampler=…)`.

    `save()` writes when it is called; with `every_steps` or `every_seconds` the sampler also has it write between two steps. The
    weights of a DDP model are stored without the wrapper's `module.` prefix, so that they load into the plain model too. Random
    states are not stored: the sampler derives them from its position. `directory` defaults to the run's `checkpoints/`; without a run
    there is none and nothing is saved. `keep` is how many of the newest files stay. When a file cannot be written (disk full, no
    permission), the last good one stays and `on_error` decides: 'warn' says so and training goes on, 'stop' raises `Error`.
    """

    def __init__(
        self,
        *,
        directory=None,
        keep=2,
        every_steps=None,
        every_seconds=None,
        on_error="warn",
        **parts,
    ):
        directory = directory or os.environ.get("DDP_CHECKPOINTS")
        self.directory, self.keep, self.on_error = (
            Path(directory).absolute() if directory else None,
            keep,
            on_error,
        )
        self.every_steps, self.every_seconds = every_steps, every_seconds
        self.parts = {
            name: getattr(part, "module", part) if name == "model" else part
            for name, part in parts.items()
        }
        self._writer, self._problem, self._copies = None, None, {}
        self._saved_step, self._saved_at = None, time.monotonic()
        lacking = [
            name for name, part in self.parts.items() if not hasattr(part, "load_state_dict")
        ]
        if lacking:
            raise Error(f"Checkpoint cannot save {', '.join(lacking)}: it has no load_state_dict.")
        if on_error not in ("warn", "stop") or keep < 1:
            raise Error(
                f"Checkpoint takes on_error='warn' or 'stop' and keeps at least 1 file, not on_error={on_error!r}, keep={keep!r}."
            )
        sampler = parts.get("sampler")
        if hasattr(sampler, "between_steps"):
            sampler.between_steps.append(self._save_if_due)
            sampler.before_stopping.append(lambda: (self.save(), self.wait()))
        elif every_steps or every_seconds:
            raise Error(
                "every_steps and every_seconds need the sampler, which counts the steps: Checkpoint(sampler=…, model=…, …)."
            )

    def save(self):
        """Copy the current state, then write it in the background (rank 0; the others return at once).

        Call it after `optimizer.step()`, on every rank alike. Waits for the write before, if that still runs. Raises `Error` for a
        state that could not be loaded again, and for an earlier failure if `on_error` is 'stop'.
        """
        if self.directory is None or rank() != 0:
            return
        self.wait()
        self._copies = {
            name: copy_of(part.state_dict(), self._copies.get(name), name)
            for name, part in self.parts.items()
        }
        self._saved_step, self._saved_at = self._step(), time.monotonic()
        _unfinished.add(self)
        self._writer = threading.Thread(
            target=self._write,
            args=(self.directory / f"step-{self._saved_step:08d}.pt",),
            name="ddp-checkpoint",
        )
        self._writer.start()

    def wait(self):
        """Return when the last save is on disk. Raises `Error` if it failed and `on_error` is 'stop'."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        _unfinished.discard(self)
        problem, self._problem = self._problem, None
        if problem is not None and self.on_error == "stop":
            raise problem

    def _step(self):
        if (sampler := self.parts.get("sampler")) is not None:
            return sampler.steps_done
        earlier = checkpoints(self.directory)
        return step_of(earlier[-1]) + 1 if earlier else 0

    def _save_if_due(self):
        step = self._step() if self.directory is not None and rank() == 0 else None
        if step in (None, 0, self._saved_step):
            return
        late = (
            self.every_seconds is not None
            and time.monotonic() - self._saved_at >= self.every_seconds
        )
        if late or (self.every_steps and step % self.every_steps == 0):
            self.save()

    def _write(self, path):
        """The background thread: the file, then retention. Whatever fails here leaves the files from before."""
        try:
            if not self.directory.is_dir():
                make_private(self.directory.absolute())
            write(self._copies, path)
            remove_all_but(self.keep, path)
            reporting.post(CheckpointSaved(path.name, self.keep))
        except BaseException as error:  # whatever it is: this thread has nobody to raise it to
            self._note_failure(error, path)
        reporting.made_progress()

    def _note_failure(self, error, path):
        """Keep it for `wait`, and tell the client, who shows it to a person."""
        while not isinstance(error, OSError) and error.__context__ is not None:
            error = error.__context__  # torch passes on what the disk says as one of several
        why = (
            getattr(error, "strerror", None)
            or (str(error).splitlines() or [""])[0]
            or type(error).__name__
        )
        kept = "none"
        with contextlib.suppress(OSError):  # a disk that cannot be read either
            kept = next(
                (
                    each.name
                    for each in reversed(checkpoints(self.directory))
                    if fault(each) is None
                ),
                kept,
            )
        self._problem = Error(
            f"The checkpoint {path} was not saved: {why}. The last good one is {kept}. Make room, or choose another directory."
        )
        reporting.post(CheckpointFailed(str(self._problem)))
        print(
            f"{self._problem}{' Training goes on.' if self.on_error == 'warn' else ''}",
            file=sys.stderr,
            flush=True,
        )

    def restore(self):
        """Load the newest checkpoint that verifies; damaged ones are named on stderr and passed over. Returns its path, or None.

        Raises `Error` when there are checkpoints but none is good, and when one was written by another model or other data.
        """
        self.wait()
        path = newest(self.directory, quiet=rank() != 0) if self.directory is not None else None
        if path is None:
            return None
        state = load(path)
        if set(state) != set(self.parts):
            raise Error(
                f"{path} holds {', '.join(state)}; this run saves {', '.join(self.parts)}. Resume with the code that wrote it."
            )
        try:
            for name, part in self.parts.items():
                part.load_state_dict(state[name])
        except (RuntimeError, ValueError, KeyError) as error:
            raise Error(
                f"{path} was written by another {name}: {error}. Resume with the settings in its run's config.json."
            ) from None
        self._saved_step = step_of(path)
        if rank() == 0:
            print(f"Resumed from {path.name}", flush=True)
        return path


def finish_writing():
    """Wait for every checkpoint of this process that is still being written."""
    for checkpoint in list(_unfinished):
        checkpoint.wait()


def copy_of(value, earlier, where):
    """A copy of a state on the CPU, into the tensors of an `earlier` copy where they fit: new memory costs more than copying.

    Raises `Error`, naming the place, for anything that `torch.load(weights_only=True)` would refuse.
    """
    if isinstance(value, torch.Tensor):
        fits = (
            isinstance(earlier, torch.Tensor)
            and earlier.shape == value.shape
            and earlier.dtype == value.dtype
        )
        return (
            earlier if fits else torch.empty_like(value, device="cpu", requires_grad=False)
        ).copy_(value.detach())
    if isinstance(value, dict):
        old = earlier if isinstance(earlier, dict) else {}
        return {
            copy_of(key, None, where): copy_of(each, old.get(key), f"{where}[{key!r}]")
            for key, each in value.items()
        }
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        old = (
            earlier
            if isinstance(earlier, type(value)) and len(earlier) == len(value)
            else [None] * len(value)
        )
        return type(value)(
            copy_of(each, before, f"{where}[{number}]")
            for number, (each, before) in enumerate(zip(value, old))
        )
    if type(value) in PLAIN:
        return value
    raise Error(
        f"The state {where} is a {type(value).__module__}.{type(value).__name__}, which cannot be loaded again without executing code. "
        "Keep states to tensors and plain Python values (a NumPy number becomes one with .item())."
    )


def load(path):
    """The state in a checkpoint file, on this rank's device. Raises `Error` rather than execute what is no plain state."""
    try:
        return torch.load(path, map_location=device(), weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError) as error:
        what = next(
            (line.strip() for line in str(error).splitlines() if "Unpickler error" in line),
            str(error).splitlines()[0],
        )
        raise Error(
            f"{path} cannot be loaded without executing code, so it was not. It may hold more than tensors and plain Python "
            f"values (NumPy numbers, say), or come from elsewhere. What torch says: {what}"
        ) from None


def write(state, path):
    """Save `state` to `path` so that at any moment the old or the new content is whole and verifies; nothing half-written stays.

    The digest comes first. Where the file exists already, the digest of its present content stays valid beside the new one.
    """
    temporary = path.with_suffix(".tmp")
    try:
        with open(temporary, "wb") as file:
            torch.save(state, file)
            file.flush()
            sync(file.fileno())
        install(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


sync = os.fsync  # replaced where a test or the fault lab needs a save that takes its time
