"""Save where training is, and continue from there.

A checkpoint is one file `step-00000120.pt` with its SHA-256 beside it. The digest is written
first, then the file under a temporary name, synced and renamed: whatever happens, a name that ends
in `.pt` is a whole file, and one that verifies is a good one. One rank writes, in a thread of its
own while training goes on: training only waits for the copy. Every rank reads. Loading executes no
code (`weights_only=True`).
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

from ddp_common.errors import Error, first_line
from ddp_common.files import make_private
from ddp_common.messages import CheckpointFailed, CheckpointSaved
from ddp_common.ranks import reporting
from ddp_common.ranks.checkpoint_files import (
    checkpoints,
    install,
    newest,
    newest_good,
    remove_all_but,
    step_of,
)
from ddp_common.ranks.rendezvous import device, rank

# What loads without executing code, beside tensors and containers.
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
)

_unfinished: set["Checkpoint"] = set()  # checkpoints of this process that are being written


class Checkpoint:
    """Saves and restores anything that has `state_dict` and `load_state_dict`.

    `Checkpoint(model=…, optimizer=…, sampler=…)`: `save()` writes when it is called; with
    `every_steps` or `every_seconds` the sampler also has it write between two steps. The weights
    of a DDP model are stored without the wrapper's `module.` prefix, so that they load into the
    plain model too. Random states are not stored: the sampler derives them from its position.

    `directory` defaults to the run's `checkpoints/`; without a run there is none, and nothing is
    saved. `keep` is how many of the newest files stay. If a file cannot be written (disk full, no
    permission), the last good one stays and `on_error` decides: with 'warn' a message is printed
    and training goes on, with 'stop' an `Error` is raised.
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
        directory = directory or os.environ.get("DDP_CHECKPOINTS")
        self.directory = Path(directory).absolute() if directory else None
        self.keep = keep
        self.on_error = on_error
        self.every_steps = every_steps
        self.every_seconds = every_seconds
        self.parts = dict(parts)
        if "model" in parts:
            self.parts["model"] = getattr(parts["model"], "module", parts["model"])
        self._writer: threading.Thread | None = None  # the thread that writes
        self._problem: Error | None = None  # the `Error` of the last save
        self._copies: dict[str, Any] = {}  # of the parts' states at the last save
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
        if hasattr(sampler, "between_steps"):
            sampler.between_steps.append(self._save_if_due)
            sampler.before_stopping.append(self._save_and_wait)
        elif self.every_steps or self.every_seconds:
            raise Error(
                "every_steps and every_seconds need the sampler, which counts the steps: "
                "Checkpoint(sampler=…, model=…, …)."
            )

    def save(self) -> None:
        """Copy the current state, then write it in the background.

        Call it after `optimizer.step()`, on every rank alike: rank 0 saves, the others return at
        once. Waits for the previous write if that is still going on. Raises `Error` for a state
        that could not be loaded again, and for an earlier failure if `on_error` is 'stop'.
        """
        if self.directory is None or rank() != 0:
            return
        self.wait()
        self._copies = {
            name: copy_of(part.state_dict(), self._copies.get(name), name)
            for name, part in self.parts.items()
        }
        self._saved_step = self._step()
        self._saved_at = time.monotonic()
        path = self.directory / f"step-{self._saved_step:08d}.pt"
        _unfinished.add(self)
        self._writer = threading.Thread(target=self._write, args=(path,), name="ddp-checkpoint")
        self._writer.start()

    def wait(self) -> None:
        """Return when the last save is on disk.

        Raises `Error` if it failed and `on_error` is 'stop'.
        """
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        _unfinished.discard(self)
        problem = self._problem
        self._problem = None
        if problem is not None and self.on_error == "stop":
            raise problem

    def _save_and_wait(self):
        self.save()
        self.wait()

    def _save_if_due(self):
        if self.directory is None or rank() != 0:
            return
        step = self._step()
        if step in (0, self._saved_step):
            return
        is_late = False
        if self.every_seconds is not None:
            is_late = time.monotonic() - self._saved_at >= self.every_seconds
        if is_late or (self.every_steps and step % self.every_steps == 0):
            self.save()

    def _step(self):
        sampler = self.parts.get("sampler")
        if sampler is not None:
            return sampler.steps_done
        earlier = checkpoints(self.directory)
        return step_of(earlier[-1]) + 1 if earlier else 0

    def _write(self, path):
        """The background thread: write the file, then remove old ones.

        Whatever fails here leaves the earlier files as they are.
        """
        try:
            if not self.directory.is_dir():
                make_private(self.directory.absolute())
            write(self._copies, path)
            remove_all_but(self.keep, path)
            reporting.post(CheckpointSaved(path.name, self.keep))
        except BaseException as error:  # of any kind: this thread has nobody to raise it to
            self._note_failure(error, path)
        reporting.made_progress()

    def _note_failure(self, error, path):
        """Keep it for `wait`, and report it to the client, which shows it to the user."""
        self._problem = Error(
            f"The checkpoint {path} was not saved: {_cause_of(error)}. The last good one is "
            f"{self._name_of_last_good()}. Make room, or choose another directory."
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

    def restore(self) -> Path | None:
        """Load the newest checkpoint that verifies; returns its path, None if there is none.

        Damaged ones are named on stderr and skipped. Raises `Error` if there are checkpoints but
        none is good, and if the checkpoint was written by another model or with other data.
        """
        self.wait()
        if self.directory is None:
            return None
        path = newest(self.directory, quiet=rank() != 0)
        if path is None:
            return None
        state = load(path)
        if set(state) != set(self.parts):
            raise Error(
                f"{path} holds {', '.join(state)}; this run saves {', '.join(self.parts)}. Resume "
                "with the code that wrote it."
            )
        for name, part in self.parts.items():
            try:
                part.load_state_dict(state[name])
            except (RuntimeError, ValueError, KeyError) as error:
                said = str(error).rstrip(".")
                raise Error(
                    f"{path} was written by another {name}: {said}. Resume with the settings in "
                    "its run's config.json."
                ) from None
        self._saved_step = step_of(path)
        if rank() == 0:
            print(f"Resumed from {path.name}", flush=True)
        return path


def finish_writing() -> None:
    """Wait for every checkpoint of this process that is still being written."""
    for checkpoint in list(_unfinished):
        checkpoint.wait()


def _cause_of(error):
    # torch raises an error of its own in the context of what the disk says.
    while not isinstance(error, OSError) and error.__context__ is not None:
        error = error.__context__
    return getattr(error, "strerror", None) or first_line(error)


def copy_of(value, earlier, where: str):
    """A copy of a state on the CPU.

    Uses the tensors of an `earlier` copy where they fit: new memory costs more than copying.
    Raises `Error` for anything that `torch.load(weights_only=True)` would refuse, and for a
    tensor of which a rank has only a part; `where` names its place in the state.
    """
    if isinstance(value, torch.Tensor):
        if hasattr(value, "full_tensor"):  # a DTensor; to import its class takes time
            raise Error(
                f"The state {where} is a DTensor (fully_shard makes them): each rank has only a "
                "part of it, and rank 0 would save its own. Gather the whole first, on all ranks, "
                "as docs/when-ddp-is-not-enough.md shows, or use torch.distributed.checkpoint."
            )
        return _copy_of_tensor(value, earlier)
    if isinstance(value, dict):
        known = earlier if isinstance(earlier, dict) else {}
        return {
            copy_of(key, None, where): copy_of(each, known.get(key), f"{where}[{key!r}]")
            for key, each in value.items()
        }
    if type(value) in (list, tuple):
        fits = isinstance(earlier, type(value)) and len(earlier) == len(value)
        old = earlier if fits else [None] * len(value)
        return type(value)(
            copy_of(each, before, f"{where}[{number}]")
            for number, (each, before) in enumerate(zip(value, old))
        )
    if type(value) in PLAIN:
        return value
    raise Error(
        f"The state {where} is a {type(value).__module__}.{type(value).__name__}, which cannot be "
        "loaded again without executing code. Keep states to tensors and plain Python values (a "
        "NumPy number becomes one with .item())."
    )


def _copy_of_tensor(value, earlier):
    fits = (
        isinstance(earlier, torch.Tensor)
        and earlier.shape == value.shape
        and earlier.dtype == value.dtype
    )
    if fits:
        copy = earlier
    else:
        copy = torch.empty_like(value, device="cpu", requires_grad=False)
    return copy.copy_(value.detach())


def load(path: Path):
    """The state in a checkpoint file, on this rank's device.

    Raises `Error` rather than execute anything that is no plain state.
    """
    try:
        return torch.load(path, map_location=device(), weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError) as error:
        lines = str(error).splitlines()
        reasons = [line.strip() for line in lines if "Unpickler error" in line]
        reason = reasons[0] if reasons else first_line(error)
        raise Error(
            f"{path} cannot be loaded without executing code, so it was not. It may hold more "
            "than tensors and plain Python values (NumPy numbers, say), or come from elsewhere. "
            f"What torch says: {reason}"
        ) from None


def write(state, path: Path) -> None:
    """Save `state` to `path`; at any moment the old or the new content is whole and verifies.

    The digest comes first. If the file exists already, the digest of its present content stays
    valid beside the new one. Nothing half-written stays. Raises whatever the disk does.
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
