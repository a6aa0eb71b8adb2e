"""Save where training is and go on from there.

A checkpoint is one file `step-00000120.pt` with, beside it, its SHA-256. The digest is written first, the file under a temporary name,
synced, then renamed: whatever happens, a name that ends in `.pt` is a whole file, and one that verifies is a good one. One rank writes;
every rank reads. Loading executes no code (`weights_only=True`).
"""

import hashlib
import os
import pickle
import sys
from pathlib import Path

import torch

from ddp_common.errors import Error
from ddp_common.rendezvous import device, rank


class Checkpoint:
    """Saves and restores anything that has `state_dict` and `load_state_dict`: `Checkpoint(model=…, optimizer=…, sampler=…)`.

    The weights of a DDP model are stored without the wrapper's `module.` prefix, so that they load into the plain model too. Random
    states are not stored: the sampler derives them from its position. `directory` defaults to the run's `checkpoints/`; without a run
    there is none and nothing is saved. `keep` is how many of the newest files stay.
    """

    def __init__(self, *, directory=None, keep=2, **parts):
        directory = directory or os.environ.get("DDP_CHECKPOINTS")
        self.directory, self.keep = Path(directory) if directory else None, keep
        self._loads = False
        self.parts = {name: getattr(part, "module", part) if name == "model" else part for name, part in parts.items()}
        lacking = [name for name, part in self.parts.items() if not hasattr(part, "load_state_dict")]
        if lacking:
            raise Error(f"Checkpoint cannot save {', '.join(lacking)}: it has no load_state_dict.")

    def save(self):
        """Write the current state (rank 0; the others return at once). Call it after `optimizer.step()`, on every rank alike."""
        if self.directory is None or rank() != 0:
            return
        sampler = self.parts.get("sampler")
        self.directory.mkdir(parents=True, exist_ok=True)
        earlier = checkpoints(self.directory)
        step = sampler.epoch * len(sampler) + sampler.step if sampler is not None else step_of(earlier[-1]) + 1 if earlier else 0
        path = self.directory / f"step-{step:08d}.pt"
        write({name: part.state_dict() for name, part in self.parts.items()}, path)
        if not self._loads:  # better now than when it is needed
            try:
                self._load(path)
            except Error:
                path.unlink()
                raise
            self._loads = True
        for old in checkpoints(self.directory)[:-self.keep]:
            old.unlink()
            digest_file(old).unlink(missing_ok=True)

    def restore(self):
        """Load the newest checkpoint that verifies; damaged ones are named on stderr and passed over. Returns its path, or None.

        Raises `Error` when there are checkpoints but none is good, and when one was written by another model or other data.
        """
        path = newest(self.directory) if self.directory is not None else None
        if path is None:
            return None
        state = self._load(path)
        if set(state) != set(self.parts):
            raise Error(f"{path} holds {', '.join(state)}; this run saves {', '.join(self.parts)}. Resume with the code that wrote it.")
        try:
            for name, part in self.parts.items():
                part.load_state_dict(state[name])
        except (RuntimeError, ValueError, KeyError) as error:
            raise Error(f"{path} was written by another {name}: {error}. Resume with the settings in its run's config.json.") from None
        if rank() == 0:
            print(f"Resumed from {path.name}", flush=True)
        return path

    def _load(self, path):
        try:
            return torch.load(path, map_location=device(), weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError) as error:
            what = next((line.strip() for line in str(error).splitlines() if "Unpickler error" in line), str(error).splitlines()[0])
            raise Error(f"{path} cannot be loaded without executing code, so it was not. It may hold more than tensors and plain Python "
                        f"values (NumPy numbers, say), or come from elsewhere. What torch says: {what}") from None


def checkpoints(directory):
    """The checkpoint files of a directory, oldest first."""
    return sorted(Path(directory).glob("step-*.pt"))


def step_of(path):
    return int(path.stem.removeprefix("step-"))


def digest_file(path):
    return path.with_suffix(".sha256")


def write(state, path):
    """Save `state` to `path` so that at any moment the file is absent or whole; its SHA-256 comes first."""
    temporary = path.with_suffix(".tmp")
    try:
        with open(temporary, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        digest_file(path).write_text(f"{sha256(temporary)}  {path.name}\n")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def sha256(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fault(path):
    """What is wrong with a checkpoint file, in words; None if it is good."""
    try:
        stated = digest_file(path).read_text().split()[0]
    except (OSError, IndexError, UnicodeDecodeError):
        return f"its digest {digest_file(path).name} is missing or none"
    return None if sha256(path) == stated else "its SHA-256 is not the one it was written with"


def newest(directory):
    """The newest good checkpoint in `directory`, None if there is no checkpoint at all. Raises `Error` if all are damaged."""
    found = checkpoints(directory)
    for path in reversed(found):
        if (what := fault(path)) is None:
            return path
        if rank() == 0:
            print(f"Checkpoint {path} is damaged: {what}. Trying the one before it.", file=sys.stderr, flush=True)
    if found:
        raise Error(f"No checkpoint in {directory} is good: all {len(found)} are damaged. Start a new run without RESUME.")
    return None
