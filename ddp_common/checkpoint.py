"""Save where training is, and continue from there.

When? `step()`, in the loop, says that what the batches so far were for is done. Before the next
batch is taken, the sampler then has the checkpoint save, if it is due or if the ranks leave
(`moments.before_batch`). `save()` saves at once. Nothing is saved at any other moment.

A checkpoint is one file, whose name says the digest of its content (`checkpoint_files`). It is
written under a temporary name, synced and renamed: a file that verifies is a good one, whatever
happened. The first one of a process is read back before it gets its name. At each save the ranks
compare what they have (`replicas`). One rank writes, in a thread of its own while training goes
on: training waits for the comparison, the copy, and an earlier write. Rank 0 chooses the newest
good file, and every rank loads that one (`parts`), without executing code (`weights_only=True`).
"""

import contextlib
import itertools
import os
import pickle
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import torch
from dask.tokenize import tokenize

from ddp_common import exchange, moments, replicas, reporting
from ddp_common.checkpoint_files import (
    TEMPORARY,
    checkpoints,
    fault,
    hold,
    install,
    new_temporary,
    newest,
    remove_all_but,
    remove_unfinished,
    step_of,
)
from ddp_common.errors import Error, first_line
from ddp_common.files import make_folder
from ddp_common.parts import (
    WRITTEN_BY,
    ModulePart,
    OptimizerPart,
    Part,
    SchedulePart,
    copy_of,
    load_into,
    parts_of,
)
from ddp_common.rendezvous import rank
from ddp_common.sampling import ElasticSampler, whole_or_none

RUN_FOLDER = "DDP_CHECKPOINTS"  # the variable that says where the run's checkpoints are

# Of this process's run: which checkpoint saves in which folder
_saving: dict[Path, "Checkpoint"] = {}
_writing = threading.Lock()  # one file at a time: two Checkpoints may save in one folder
# Nothing is forked meanwhile: what C++ sets up at first use it registers under a lock of glibc's,
# for which a loader worker that was forked at this moment would wait for ever.
_first_use = threading.Lock()
os.register_at_fork(
    before=_first_use.acquire,
    after_in_parent=_first_use.release,
    after_in_child=_first_use.release,
)


class Checkpoint:
    """Saves and restores anything that has `state_dict` and `load_state_dict`::

        checkpoint = ddp.Checkpoint(model=model, optimizer=optimizer, sampler=sampler)
        checkpoint.restore()
        for epoch in sampler.epochs(n):
            for batch in ddp.DataLoader(data, batch_sampler=sampler):
                …
                optimizer.step()
                checkpoint.step()  # this batch is trained
            checkpoint.save()

    `save()` saves when it is called. `step()` says that what the batches taken so far were for is
    done, to all Checkpoints of its samplers: before the next batch of one of them is taken, the
    checkpoint saves if it is due, and the ranks leave if they were told to. What stands below the
    call in the loop is done by then, such as a schedule. It is due after `every_steps` calls of
    `step()`. Where gradients of several batches are added up, call it after the optimizer's step
    only.

    A model is saved without DDP and torch.compile around it: `torch.load(path,
    weights_only=True)["model"]` loads into the plain one. Random states are not stored: the
    sampler derives them from its position. The number in a file's name is the sum of its samplers'
    steps. A Checkpoint without a sampler saves only when `save()` is called, not before a rank
    leaves: so the best model stays the best (docs/recipes.md).

    `directory` defaults to the run's `checkpoints/`. A second Checkpoint of a run, for the best
    model so far, say, needs a folder of its own: `directory="best"` is `checkpoints/best/`.
    Without a run, `directory` is relative to the working directory; if there is none, nothing is
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
        self.parts = parts_of(parts)
        self._writer: threading.Thread | None = None  # the thread that writes
        self._problem: Error | None = None  # the `Error` of the last save
        self._state: dict[str, Any] = {}  # what goes into the file: copies at the last save
        self._buffers: dict[str, torch.Tensor] = {}  # its tensors, by their places
        self._trained: list[tuple[str, str]] = []  # weights in it: the part, and the entry
        self._was_read_back = False  # the first file, which shows that such files can be loaded
        self._was_restored = False
        self._is_checked = False  # its parts, once
        self._steps = 0  # calls of `step()`, of this process
        self._steps_at_save = 0
        self._schedules_at_save: dict[str, str] = {}  # tokens of their states
        self._options_at_head: dict[str, str] = {}  # of optimizers, where an epoch is resumed
        self._samplers = [part for part in parts.values() if isinstance(part, ElasticSampler)]
        self._check_options()
        for sampler in self._samplers:
            sampler.checkpoints.append(self)

    def _check_options(self) -> None:
        steps = self.every_steps
        is_right = (
            self.on_error in ("warn", "stop")
            and whole_or_none(self.keep)
            and (steps is None or (whole_or_none(steps) and self._samplers))
        )
        if not is_right:
            raise Error(
                "Checkpoint takes on_error='warn' or 'stop'; keep and every_steps are whole "
                "numbers of at least 1, and every_steps needs the sampler, before whose batches "
                f"it saves; not on_error={self.on_error!r}, keep={self.keep!r}, "
                f"every_steps={steps!r}."
            )

    # In the loop

    def step(self) -> None:
        """Say that what the batches taken so far were for is done: they may be saved.

        Call it in the loop, after the optimizer's step, on every rank. Raises `Error` without a
        sampler among the parts, before `restore()`, and for an optimizer that a schedule drives
        and of which none is a part.
        """
        if not self._samplers:
            raise Error(
                "step() is for a Checkpoint that has the sampler, whose batches are done: "
                "Checkpoint(sampler=sampler, …). Without one, call save()."
            )
        if self._steps == 0:
            self._check_parts()
        self._steps += 1
        for sampler in self._samplers:
            sampler.open_batches = 0

    def has_open_batches(self) -> bool:
        """Whether a batch was taken of which `step()` has not said that it is done."""
        return any(sampler.open_batches for sampler in self._samplers)

    def save_if_due(self) -> None:
        """What the sampler calls before a batch, when those before it are done.

        Raises `Error` if the head of a resumed epoch has changed an optimizer's options.
        """
        before, self._options_at_head = self._options_at_head, {}
        now = self._options() if before else {}
        for name, value in now.items():
            if before.get(name) != value:
                raise Error(
                    f"The head of an epoch has changed {name} from {before.get(name)} to {value}, "
                    "and this run was resumed within that epoch: the run before had changed it "
                    "already. Set what follows from the epoch alone, such as rate * 0.5**epoch, "
                    "or step a schedule that is a part above checkpoint.save()."
                )
        if self.every_steps and self._steps - self._steps_at_save >= self.every_steps:
            self._save()

    def begin_rest_of_epoch(self) -> None:
        """What the sampler calls at the head of an epoch in which a run was resumed."""
        self._options_at_head = self._options()

    def _options(self) -> dict[str, str]:
        optimizers = [part for part in self.parts.values() if isinstance(part, OptimizerPart)]
        settings = [setting for part in optimizers for setting in part.settings().items()]
        return {option: repr(value) for option, value in settings}

    def refuse_what_came_after_save(self) -> None:
        """Raise `Error` if a schedule has stepped between `save()` and the end of its epoch."""
        is_saved = bool(self._schedules_at_save) and self._steps == self._steps_at_save
        for name, token in self._schedules().items():
            if is_saved and token != self._schedules_at_save[name]:
                raise Error(
                    f"{name} has stepped after save(), at the end of an epoch: a run that goes on "
                    "from that checkpoint would be one step behind. Call its step() above "
                    "checkpoint.save()."
                )

    def _schedules(self) -> dict[str, str]:
        """Of each schedule among the parts a token of its state."""
        schedules = [part for part in self.parts.values() if isinstance(part, SchedulePart)]
        return {part.name: tokenize(part.state()) for part in schedules}

    def save_and_wait(self) -> None:
        """Save before this rank leaves."""
        self._save()
        self.wait()

    # Saving

    def save(self) -> None:
        """Copy the current state, then write it in the background.

        A collective: every rank calls it, at the same place, and rank 0 saves. It belongs after
        the last batch of an epoch, below what is done once in an epoch. With a sampler among the
        parts the ranks leave then, if they were told to. Waits for the previous write if that is
        still going on. Raises `Error` if a batch was taken since the last `step()`, before
        `restore()` where a sampler is among the parts, if the ranks do not have the same, for an
        optimizer that a schedule drives and of which none is a part, for a state that could not be
        loaded again, for a second Checkpoint in one folder, and for an earlier failure if
        `on_error` is 'stop'.
        """
        self._check_parts()
        if self.has_open_batches():
            raise Error(
                "checkpoint.save() after a batch without checkpoint.step(): its gradients would "
                f"be lost. {moments.STEP}\nWhere gradients of k batches are added up, the "
                "optimizer steps after the last batch of an epoch, too: if sampler.step % k == 0 "
                "or sampler.step == len(sampler). Call step() for a batch without gradients, too."
            )
        self._save()
        if self._samplers:
            moments.after_save(self)

    def _save(self) -> None:
        if self.directory is None:
            return
        found = {name: part.state() for name, part in self.parts.items()}
        pairs = ((part, found[name]) for name, part in self.parts.items())
        of_parts = (part.fingerprint(state).items() for part, state in pairs)
        raise_if_apart = replicas.begin_check(lambda: dict(itertools.chain(*of_parts)))
        self.wait()
        step = self._step()
        self._steps_at_save = self._steps
        self._schedules_at_save = self._schedules()
        if rank() == 0:  # it copies while the ranks compare
            copies = {name: copy_of(state, name, self._buffers) for name, state in found.items()}
            written_by = {name: part.description(found[name]) for name, part in self.parts.items()}
            self._state = {**copies, WRITTEN_BY: written_by}
            modules = [part for part in self.parts.values() if isinstance(part, ModulePart)]
            self._trained = [(part.name, entry) for part in modules for entry in part.trained()]
        raise_if_apart()
        if rank() != 0:
            return
        self._writer = threading.Thread(
            target=self._write, args=(self.directory, step), name="ddp-checkpoint"
        )
        self._writer.start()

    def _check_parts(self) -> None:
        """Raise `Error` for what would be wrong after a resume; tell what else may surprise."""
        if self._samplers and not self._was_restored:
            raise Error(
                "This Checkpoint has a sampler, and restore() was not called: a run that starts "
                "again would begin from scratch, and remove what was saved. Call "
                "checkpoint.restore() before the loop; in a new run it does nothing. A second "
                "Checkpoint, for the best model, say, is made without sampler=."
            )
        for part in self.parts.values():
            part.refuse_unfit()
        if self.directory is not None:
            self._take_folder(self.directory)
        if not self._is_checked and rank() == 0:
            for problem in self._problems():
                reporting.post(reporting.Problem(problem))
        self._is_checked = True

    def _problems(self) -> list[str]:
        """What is not wrong here, and ends otherwise than a user may expect."""
        parts = self.parts.values()
        found = []
        may_be_one = any(
            isinstance(part, OptimizerPart)
            or (type(part) is Part and not isinstance(part.value, ElasticSampler))
            for part in parts
        )
        trains = self._samplers and any(isinstance(part, ModulePart) for part in parts)
        if trains and not may_be_one:
            found.append(
                "No optimizer is a part of the Checkpoint: what it remembers, such as Adam's "
                "means, is not saved. (SGD without momentum remembers nothing.)"
            )
        of_partitions = any(sampler.placement is not None for sampler in self._samplers)
        for part in parts:
            found += part.problems(of_partitions)
        return found

    def _take_folder(self, directory: Path) -> None:
        """From now on nothing else of this run may save in this folder."""
        if self._run_folder is not None and _saving.setdefault(directory, self) is not self:
            raise Error(
                f"Two Checkpoints of this run save in {directory}: each would remove the "
                "other's files. Make it once, before the loop, or give one a folder of its own: "
                "Checkpoint(directory='best', …)."
            )

    def wait(self) -> None:
        """Return when the last save is on disk.

        Raises `Error` if it failed and `on_error` is 'stop'.
        """
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        problem, self._problem = self._problem, None
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
            is_first = not self._was_read_back
            with _writing, _first_use if is_first else contextlib.nullcontext():
                self._refuse_nan()
                make_folder(directory.parent)
                mode = 0o755 if self._run_folder in directory.parents else 0o700
                directory.mkdir(mode=mode, exist_ok=True)
                path = write(self._state, directory, step, read_back=is_first)
            self._was_read_back = True
            remove_all_but(self.keep, path)
            reporting.post(reporting.CheckpointSaved(self._name_in_run(path), self.keep))
        except BaseException as error:  # of any kind: this thread has nobody to raise it to
            if path is not None and path.exists():
                reporting.post(reporting.CheckpointSaved(self._name_in_run(path), self.keep))
                what = f"Old checkpoints in {directory} were not removed"
            else:
                what = f"The checkpoint of step {step} in {directory} was not saved"
            self._note_failure(error, what, directory)
        reporting.made_progress()

    def _refuse_nan(self) -> None:
        """Raise `Error` if a weight that is trained has a NaN: a resume wants the file before."""
        for name, entry in self._trained:
            weight = self._state[name].get(entry)
            is_plain = isinstance(weight, torch.Tensor) and weight.layout == torch.strided
            if is_plain and weight.dtype.itemsize > 1 and weight.isnan().any():
                raise Error(f"{name}.{entry} has a NaN")

    def _name_in_run(self, path: Path) -> str:
        """A file's name for the client: relative to the run's checkpoints, if it is there."""
        if self._run_folder is not None and path.is_relative_to(self._run_folder):
            return str(path.relative_to(self._run_folder))
        return str(path)

    def _note_failure(self, error: BaseException, what: str, directory: Path) -> None:
        """Keep it for `wait`, and report it to the client, which shows it to the user."""
        last_good = None
        with contextlib.suppress(OSError, Error):  # a disk that cannot be read either
            last_good = newest(directory)
        advice = "" if isinstance(error, Error) else " Make room, or choose another directory."
        self._problem = Error(
            f"{what}: {_cause_of(error)}. The last good one is "
            f"{last_good.name if last_good else 'none'}.{advice}"
        )
        reporting.post(reporting.CheckpointFailed(str(self._problem)))
        consequence = " Training goes on." if self.on_error == "warn" else ""
        print(f"{self._problem}{consequence}", file=sys.stderr, flush=True)

    # Restoring

    def restore(self) -> Path | None:
        """Load the newest checkpoint that verifies; returns its path, None if there is none.

        A collective: every rank calls it, before the loop, and loads the file that rank 0 has
        chosen. Damaged ones are named on stderr and skipped. Options of an optimizer that the
        program has set otherwise than the run that saved are named, too, and the saved ones win.
        Parameters are frozen as they were, in a model that DDP has not wrapped yet. Raises `Error`
        if there are checkpoints but none is good, if the newest cannot be read, if this rank does
        not see the chosen one, and if that was written by another model, optimizer or schedule, or
        with other data.
        """
        self.wait()
        self._was_restored = True
        if self.directory is None:
            return None
        path = chosen_file(self.directory)
        if path is None:
            return None
        load_into(self.parts, load(path), path)
        for sampler in self._samplers:
            of_epoch = min(sampler.length, len(sampler) * sampler.batch_size)
            done = sampler.epoch * of_epoch + sampler.step * sampler.batch_size
            counts = {"step": sampler.steps_done, "samples": done, "total_samples": done}
            reporting.set_done(sampler._reporting_key, counts)
        if rank() == 0:
            print(f"Resumed from {path.name}", flush=True)
            if not self._samplers and not any(each._samplers for each in _saving.values()):
                print(
                    "No ElasticSampler is a part of this Checkpoint: the loop itself has to go on "
                    "where it was.",
                    flush=True,
                )
        return path


def finish_writing() -> None:
    """Wait for every checkpoint of this process's run that is still being written.

    Raises an `Error` of those with `on_error='stop'`.
    """
    with contextlib.ExitStack() as each:
        while _saving:
            _, checkpoint = _saving.popitem()
            each.callback(checkpoint.wait)


def _cause_of(error: BaseException) -> str:
    if isinstance(error, Error):
        return str(error).rstrip(".")
    # torch raises an error of its own in the context of what the disk says.
    while not isinstance(error, OSError) and error.__context__ is not None:
        error = error.__context__
    return getattr(error, "strerror", None) or first_line(error)


# Files


def chosen_file(directory: Path) -> Path | None:
    """The newest good file in `directory` that rank 0 sees, None if there is no checkpoint.

    A collective. Raises `Error` if there are checkpoints but none is good, and if this rank does
    not see the chosen one.
    """

    def ask() -> str | None:
        remove_unfinished(directory)
        path = newest(directory)
        return None if path is None else path.name

    name = exchange.asked_of_rank_0(ask)
    if name is None:
        return None
    path = directory / name
    if rank() != 0:
        _check_seen(path)
    return path


def _check_seen(path: Path) -> None:
    """Raise `Error` unless this rank sees the file that rank 0 has chosen, and it is good."""
    try:
        problem = fault(path)
    except FileNotFoundError:
        problem = "it does not see that file"
    except Error as error:
        problem = str(error)
    if problem is not None:
        raise Error(
            f"Rank {rank()} on {socket.gethostname()} cannot resume from {path}, which rank 0 has "
            f"chosen: {problem}. The folder must be the same on every host."
        )


def load(path: Path) -> Any:
    """The state in a checkpoint file, on the CPU: `load_state_dict` moves what belongs on a GPU.

    An optimizer's count of steps does not belong there: each step would wait for the GPU.

    Raises `Error` rather than execute anything that is no plain state, and whatever else is wrong
    with the content.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        lines = str(error).splitlines()
        reasons = [line.strip() for line in lines if "Unpickler error" in line]
        reason = reasons[0] if reasons else f"{type(error).__name__}: {first_line(error)}"
        what = "cannot be loaded"
        if isinstance(error, pickle.UnpicklingError):
            what = "cannot be loaded without executing code, so it was not"
        raise Error(
            f"{path} {what} ({reason}). Keep states to tensors and plain Python values, and load "
            "no files of strangers."
        ) from error


def write(state: dict[str, Any], directory: Path, step: int, read_back: bool) -> Path:
    """Save `state` in `directory`: a file that is whole or not there at all; returns its path.

    With `read_back`, it is loaded before it gets its name. Nothing half-written stays, except
    after a kill until the next save. Raises whatever the disk does, and `Error` for a file that
    cannot be loaded.
    """
    with new_temporary(directory) as file:
        hold(file)
        torch.save(state, file)
        file.flush()
        sync(file.fileno())
        if read_back:
            load(directory / TEMPORARY)
        return install(directory / TEMPORARY, step)


sync = os.fsync  # replaced where a test or the fault lab needs a save that takes its time
