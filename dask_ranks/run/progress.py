"""Training progress: tqdm's bar where a user watches, else a line for each epoch.

A notebook that is executed to be kept (nbclient, nbconvert, papermill, nbval) must print the same
every time: nothing is drawn there. What tells it from JupyterLab or VS Code is whether the cell
may ask a user for input. A program that executes notebooks forbids it (`allow_stdin` of the
request is false), since nobody could answer; where a user sits, it is allowed.

Promises: what cannot be shown (a closed pipe, a full disk, a letter that the terminal lacks) ends
nothing.
"""

import contextlib
import math
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Collection
from enum import StrEnum
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

from dask_ranks.run.folders import shown
from ddp_common.checkpoint_files import checkpoints, step_of
from ddp_common.errors import Error

BAR = "{desc} {percentage:3.0f}%|{bar}| {rate_fmt} · {remaining} to go{postfix}"
NARROW = BAR.replace("{rate_fmt} · ", "")  # where numbers need the room
AROUND = {BAR: 61, NARROW: 41}  # columns of what is no number, with a bar of 4 or 2
RECENT = 50  # reports whose mean is the loss that is shown
OTHERS = 3  # so many numbers stand beside the loss, those first whose first report came last
NOT_BESIDE_THE_LOSS = {"loss", "time", "epoch", "step", "samples", "batch"}


class Mode(StrEnum):
    """How progress is drawn. DDP_PROGRESS may name one."""

    OFF = "off"
    BAR = "bar"
    LINES = "lines"  # one for each epoch


def kernel() -> Any:
    """The Jupyter kernel that this program is, None elsewhere.

    Nothing is imported: a program that runs in IPython has imported it already.
    """
    if "IPython" not in sys.modules:
        return None
    return getattr(sys.modules["IPython"].get_ipython(), "kernel", None)


def mode() -> Mode:
    """How progress is drawn in this program."""
    chosen = os.environ.get("DDP_PROGRESS")
    if chosen in list(Mode):
        return Mode(chosen)
    if chosen:
        names = ", ".join(Mode)
        raise Error(f"DDP_PROGRESS={chosen} is none of {names}.\nTake one, or leave it out.")
    request: dict = {}  # that of this cell
    if hasattr(kernel(), "get_parent"):
        request = kernel().get_parent("shell") or {}
    # A user at a front end such as JupyterLab or VS Code has sent it
    a_user_watches = bool(request.get("content", {}).get("allow_stdin"))
    if is_terminal(sys.stderr) or a_user_watches:
        return Mode.BAR
    return Mode.LINES if kernel() is None else Mode.OFF


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a stream is one; a program may have closed it, or put an object in its place."""
    try:
        return stream is not None and stream.isatty()
    except (AttributeError, ValueError):
        return False


def say(text: str, stream: TextIO | None) -> None:
    """Print `text` above a bar if there is one. What cannot be shown is left out."""
    if stream is None:  # closed before the program began
        return
    encoding = getattr(stream, "encoding", None) or "utf-8"
    text = text.encode(encoding, "backslashreplace").decode(encoding)
    # A notebook's bar is no text. `tqdm.write` fails if Ctrl-C came while one was being made
    write = tqdm.write if kernel() is None else print
    with contextlib.suppress(OSError, ValueError):  # a closed pipe, a full disk; a closed stream
        write(text, file=stream)
        stream.flush()


class Progress:
    """Draws how far training is, as `mode` says, and the numbers that ranks have reported.

    The loss is a mean over all ranks' latest reports, in the line of an epoch over all in it, each
    as often as its step has samples. Any other number is the mean over ranks of what each has
    reported last; in a line, last in that epoch, which ends with the first batch of the next.
    """

    def __init__(self) -> None:
        self.mode = mode()
        self.in_notebook = kernel() is not None
        self.whose = ""  # the numbers are, if not all ranks are heard
        self.bar: tqdm | None = None
        self.losses: deque[float] = deque(maxlen=RECENT)
        self.leading: dict = {}  # the position of the rank that leads, and the moment it came
        # Other numbers: epoch (None for a bar) -> name -> rank -> the latest
        self.latest: dict[int | None, dict[str, dict[int, float]]] = {}
        # For the lines of epochs
        self.losses_of: dict[int, list[tuple]] = {}  # epoch -> (loss, samples of the step)
        self.epoch_of: dict[int, int] = {}  # rank -> the epoch of its latest loss
        self.last_line = (0.0, 0)  # its time, and the samples until then

    def position(self, position: dict) -> None:
        """Draw a rank's position, unless another rank is further: the fastest one leads.

        `position` has epoch, step, samples, epochs and total_samples, as the sampler counts them.
        """
        is_behind = position.get("samples", 0) < self.leading.get("samples", 0)
        if self.mode == Mode.OFF or is_behind or not position.get("total_samples"):
            return
        position = {**position, "moment": time.monotonic()}
        if not self.leading:
            self.last_line = position["moment"], position["samples"]
        self.leading = position
        if self.mode == Mode.LINES:
            return
        # Epochs that are done, as metrics and messages count them: the first one is epoch 0
        epochs = self.leading["epochs"]
        done = epochs * self.leading["samples"] / self.leading["total_samples"]
        words = f"{done:.1f} of {epochs} epochs"
        if self.bar is None:
            from tqdm.auto import tqdm  # here: in a notebook it imports ipywidgets

            self.bar = tqdm(
                desc=words,
                total=self.leading["total_samples"],
                initial=self.leading["samples"],
                unit=" samples",
                unit_scale=True,
                dynamic_ncols=True,
                bar_format=BAR,
                mininterval=0.1,
            )
        self.bar.set_description_str(words, refresh=False)
        self.bar.update(self.leading["samples"] - self.bar.n)

    def record(self, values: dict, rank: int = 0) -> None:
        """Take note of the numbers that a rank has reported."""
        epoch = values.get("epoch") if self.mode == Mode.LINES else None
        known = NOT_BESIDE_THE_LOSS | self.latest.setdefault(epoch, {}).keys()
        new: dict = {name: {} for name in values if name not in known}
        latest = self.latest[epoch] = new | self.latest[epoch]
        for name in latest.keys() & values.keys():
            latest[name][rank] = values[name]
        if "loss" in values:
            self.losses.append(values["loss"])
        if self.bar is not None:
            columns = 1000 if self.in_notebook else self.bar.format_dict["ncols"] or 80
            words = self._numbers(self.losses, latest, columns - AROUND[NARROW])
            self.bar.bar_format = BAR if len(words) <= columns - AROUND[BAR] else NARROW
            self.bar.set_postfix_str(words, refresh=False)
        if "loss" in values and epoch is not None:
            self.losses_of.setdefault(epoch, []).append((values["loss"], values.get("batch") or 1))
            self.epoch_of[rank] = epoch
            # A rank's last reports of an epoch come after the first step of the next
            self._print_lines(before=min(self.epoch_of.values()))

    def _numbers(self, losses: Collection[float], latest: dict, room: int) -> str:
        """`loss 0.1234  accuracy 0.8100`: the loss, and as many others as have room."""
        numbers = {"loss": losses, **{name: of.values() for name, of in latest.items()}}
        said = [f"{name} {sum(of) / len(of):#.4g}" for name, of in numbers.items() if of]
        del said[1 + OTHERS :]
        while len(said) > 1 and len(self.whose + "  ".join(said)) > room:
            del said[-1]
        return self.whose + "  ".join(said)

    def _print_lines(self, before: float) -> None:
        """Print a line for each epoch, up to `before`, whose losses have arrived."""
        for epoch in sorted(self.losses_of):
            if epoch < before and self.leading:
                then, samples = self.last_line
                self.last_line = self.leading["moment"], self.leading["samples"]
                seconds = self.last_line[0] - then
                rate = (self.last_line[1] - samples) / max(seconds, 1e-9)
                # A shorter epoch is over before its steps are heard of
                speed = f"  {rate:,.0f} samples/s" if seconds > 0.5 and rate > 0 else ""
                epochs, total = self.leading["epochs"], self.leading["total_samples"]
                reached = round(epochs * self.leading["samples"] / total, 1)
                done = epoch + 1 if before < math.inf else min(epoch + 1, reached)
                words = f"{done:g} of {epochs} epochs  "
                latest = self.latest.pop(epoch, {})
                losses, samples_of_steps = zip(*self.losses_of.pop(epoch))
                mean = statistics.fmean(losses, weights=samples_of_steps)
                words += self._numbers([mean], latest, 80 - len(words + speed))
                say(f"{words}{speed}", sys.stderr)

    def note(self, text: str, also_in_logs: bool = False) -> None:
        """Say something to who watches; with `also_in_logs` also where nothing is drawn.

        It is on stderr; in a notebook, where that looks like an error, on stdout.
        """
        if self.mode != Mode.OFF or (also_in_logs and not self.in_notebook):
            say(text, sys.stdout if self.in_notebook else sys.stderr)

    def close(self) -> None:
        """Draw the last state."""
        self._print_lines(before=math.inf)
        if self.bar is not None:
            self.bar.close()


def say_folder(path: Path, ranks: int) -> None:
    """Say where a run is, and whether it is new; a notebook shows nothing."""
    if mode() != Mode.OFF and kernel() is None:
        saved = checkpoints(path / "checkpoints")
        how = f"goes on from step {step_of(saved[-1])}" if saved else "begins"
        say(f"The run {how} on {ranks} rank(s), in {shown(path)}", sys.stderr)


def how_to_go_on(path: Path, function: Callable) -> str:
    """Of the run in `path`: its newest checkpoint, and the call that goes on from there."""
    saved = checkpoints(path / "checkpoints")
    if not saved:
        return f"There is no checkpoint to go on from; what there is lies in {shown(path)}."
    return (
        f"The newest checkpoint is that of step {step_of(saved[-1])}. "
        "Go on from there with the same arguments and the run's directory:\n"
        f"  ddp.launch(client, {getattr(function, '__name__', 'train')}, …, "
        f"directory={shown(path)!r})"
    )


def explain_interrupt(
    interrupt: KeyboardInterrupt, function: Callable, path: Path, records: list[dict]
) -> None:
    """In a notebook or an IPython shell, print how to go on, and drop the traceback.

    It would lead through this package. Elsewhere the interrupt gets a note that says it, below
    its traceback. `path` is the run directory, `records` are what was reported.
    """
    in_ipython = "IPython" in sys.modules and sys.modules["IPython"].get_ipython() is not None
    saved = [step_of(saved) for saved in checkpoints(path / "checkpoints")]
    step = max([*saved, *(record.get("step", 0) for record in records)], default=0)
    after = f" after step {step}" if step else ""
    words = f"Interrupted{after}. {how_to_go_on(path, function)}"
    if in_ipython:
        say(words, sys.stdout)
        interrupt.__traceback__ = None
        interrupt.__suppress_context__ = True  # an exception that was being handled meanwhile
    else:
        interrupt.add_note(words)
