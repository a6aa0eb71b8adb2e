"""Training progress: a bar on a terminal, one line that updates in a notebook.

A notebook that is executed to be kept (nbclient, nbconvert, papermill, nbval) must print the same
every time: nothing is drawn there. What tells it from JupyterLab or VS Code is whether the cell
may ask a person for input. A program that executes notebooks forbids it (`allow_stdin` of the
request is false), since nobody could answer; where a person sits, it is allowed.
"""

import contextlib
import os
import sys
import time
from collections import deque
from pathlib import Path
from typing import TextIO

from tqdm import tqdm

from ddp_common.ranks.checkpoint_files import checkpoints, step_of
from ddp_common.run.places import shown

REDRAW_INTERVAL = 0.2  # seconds between two states of the line in a notebook
# Fits into 80 columns, with a bar of 10
BAR = "{desc} {percentage:3.0f}%|{bar}| {rate_fmt} · {remaining} to go{postfix}"
RECENT = 50  # reports whose mean is the loss that is shown


def kernel():
    """The Jupyter kernel that this program is, None elsewhere.

    Nothing is imported: a program that runs in IPython has imported it already.
    """
    if "IPython" not in sys.modules:
        return None
    return getattr(sys.modules["IPython"].get_ipython(), "kernel", None)


def a_person_watches() -> bool:
    """Whether a person at a front end such as JupyterLab or VS Code has sent this cell."""
    if not hasattr(kernel(), "get_parent"):
        return False
    request = kernel().get_parent("shell") or {}
    return bool(request.get("content", {}).get("allow_stdin"))


def say(text: str, stream: TextIO | None) -> None:
    """Print a line, above the bar if there is one.

    What the stream cannot take is escaped, or not shown: a letter that its encoding lacks, a disk
    that is full, a pipe that nobody reads, a stream that is closed.
    """
    if stream is None:  # closed before the program began
        return
    encoding = getattr(stream, "encoding", None) or "utf-8"
    with contextlib.suppress(OSError, ValueError):
        tqdm.write(text.encode(encoding, "backslashreplace").decode(encoding), file=stream)
        stream.flush()


class Progress:
    """Draws how far training is.

    A bar on a terminal or in a live notebook, else nothing. DDP_PROGRESS has the last word: off,
    bar, or lines, which prints a line for each epoch.
    """

    def __init__(self):
        on_terminal = sys.stderr is not None and sys.stderr.isatty()
        default = "bar" if on_terminal or a_person_watches() else "off"
        self.mode = os.environ.get("DDP_PROGRESS") or default
        self.in_notebook = kernel() is not None
        self.bar = None
        self.losses = deque(maxlen=RECENT)
        self.place = {}  # the position of the rank that leads
        # For the line of an epoch: its number, and the (time, samples) at its start.
        self.epoch = None
        self.mark = None
        self.losses_of = {}  # epoch -> losses
        self.reported = {}  # rank -> the epoch of its latest loss
        self.ended = None  # an epoch whose line is to come: its number and samples per second

    def position(self, place: dict):
        """Draw a rank's position, unless another rank is further: the fastest one leads.

        `place` has epoch, step, samples, epochs and total_samples, as the sampler counts them.
        """
        if self.mode == "off" or not place.get("total_samples"):
            return
        if place["samples"] < self.place.get("samples", 0):
            return
        if self.mode == "bar" and self.in_notebook:
            self._update_notebook(place)
        elif self.mode == "bar":
            self._update_terminal(place)
        elif place["epoch"] != self.epoch:
            self._end_epoch()
            self.epoch = place["epoch"]
            self.mark = (time.monotonic(), place["samples"])
        self.place = place

    def _update_notebook(self, place):
        if self.bar is None:
            self.bar = NotebookLine(place)
        self.bar.update(place, self._loss())

    def _update_terminal(self, place):
        if self.bar is None:
            self.bar = tqdm(
                total=place["total_samples"],
                initial=place["samples"],
                unit=" samples",
                unit_scale=True,
                dynamic_ncols=True,
                bar_format=BAR,
                mininterval=0.1,
            )
        self.bar.set_description(_epochs_done(place), refresh=False)
        self.bar.update(place["samples"] - self.bar.n)

    def record(self, values: dict, rank: int = 0):
        """Take note of the loss that a rank has reported, if it did."""
        if "loss" not in values:
            return
        self.losses.append(values["loss"])
        if self.mode == "lines" and "epoch" in values:
            self.losses_of.setdefault(values["epoch"], []).append(values["loss"])
            self.reported[rank] = values["epoch"]
            # the last reports of an epoch come after the first step of the next
            if self.ended and min(self.reported.values()) > self.ended[0]:
                self._epoch_line()
        if self.bar is not None and not self.in_notebook:
            self.bar.set_postfix_str(f"loss {self._loss():#.4g}", refresh=False)

    def note(self, text: str, also_in_logs: bool = False):
        """Print something between two states of the bar, if progress is drawn at all.

        With `also_in_logs` also where it is not, as in a batch job: to stderr, in no notebook.
        """
        if self.mode == "off" and also_in_logs and not self.in_notebook:
            say(text, sys.stderr)
        elif self.mode != "off":
            on_stderr = self.mode == "bar" and not self.in_notebook
            say(text, sys.stderr if on_stderr else sys.stdout)

    def print(self, text: str):
        """Print what a rank has printed: above the bar, or under the cell of a notebook."""
        say(text, sys.stdout)

    def _loss(self):
        return sum(self.losses) / len(self.losses) if self.losses else None

    def _end_epoch(self):
        """The rank that leads has ended the epoch: its line comes when all have reported."""
        self._epoch_line()
        if self.epoch is None:
            return
        started, samples = self.mark
        seconds = max(time.monotonic() - started, 1e-9)
        self.ended = self.epoch, (self.place["samples"] - samples) / seconds

    def _epoch_line(self):
        """Print the line of the epoch that has ended, if there is one with losses."""
        if self.ended is None:
            return
        epoch, rate = self.ended
        self.ended = None
        losses = self.losses_of.pop(epoch, None)
        if losses:
            loss = sum(losses) / len(losses)
            words = f"{epoch + 1} of {self.place['epochs']} epochs"
            say(f"{words}  loss {loss:#.4g}  {rate:,.0f} samples/s", sys.stdout)

    def close(self):
        """Draw the last state."""
        if self.mode == "lines":
            self._end_epoch()
            self._epoch_line()
        if isinstance(self.bar, NotebookLine):
            self.bar.close(self._loss())
        elif self.bar is not None:
            self.bar.close()


def say_place(path: Path):
    """On a terminal, say where a run is, and whether it is new."""
    progress = Progress()
    if progress.mode != "bar" or progress.in_notebook:
        return
    saved = checkpoints(path / "checkpoints")
    how = f"goes on from step {step_of(saved[-1])}" if saved else "begins"
    progress.note(f"The run {how}, in {path}")


class NotebookLine:
    """One output of a cell, replaced by its next state.

    It is a bar while training goes on, and a line of text when it has ended.
    """

    def __init__(self, place: dict):
        self.place = place
        self.first = place["samples"]
        self.began = time.monotonic()
        self.drawn = 0.0
        self.handle = None

    def update(self, place: dict, loss: float | None):
        self.place = place
        if time.monotonic() < self.drawn + REDRAW_INTERVAL:
            return
        self.drawn = time.monotonic()
        done = place["samples"]
        total = place["total_samples"]
        rate = self._rate()
        words = f"{_epochs_done(place)} · {done / total:.0%}"
        words += _loss_in_words(loss)
        if rate > 0:
            to_go = tqdm.format_interval((total - done) / rate)
            words += f" · {rate:,.0f} samples/s · {to_go} to go"
        style = "width: 16em; vertical-align: middle"
        bar = f'<progress value="{done}" max="{total}" style="{style}"></progress>'
        self._show(words, f'<div style="white-space: nowrap">{bar} {words}</div>')

    def close(self, loss: float | None):
        """Leave one line: what was done, or where it ended."""
        place = self.place
        seconds = time.monotonic() - self.began
        if place["samples"] >= place["total_samples"]:
            words = "1 epoch" if place["epochs"] == 1 else f"{place['epochs']} epochs"
        else:
            words = f"ended after {_epochs_done(place)}"
        words += f" · {place['samples']:,} samples · {tqdm.format_interval(seconds)}"
        rate = self._rate()
        if rate > 0:
            words += f" · {rate:,.0f} samples/s"
        words += _loss_in_words(loss)
        self._show(words, f"<div>{words}</div>")

    def _rate(self):
        """Samples per second since the first known position."""
        return (self.place["samples"] - self.first) / max(time.monotonic() - self.began, 1e-9)

    def _show(self, text, html):
        from IPython.display import display  # not installed everywhere; in a notebook it is

        content = {"text/plain": text, "text/html": html}
        if self.handle is None:
            self.handle = display(content, raw=True, display_id=True)
        else:
            self.handle.update(content, raw=True)


def _epochs_done(place):
    """Epochs that are done, as metrics and messages count them: the first one is epoch 0."""
    done = place["epochs"] * place["samples"] / place["total_samples"]
    return f"{done:.1f} of {place['epochs']} epochs"


def _loss_in_words(loss):
    return "" if loss is None else f" · loss {loss:#.4g}"


def explain_interrupt(interrupt: KeyboardInterrupt, function, directory):
    """In a notebook or an IPython shell, print how to go on, and drop the traceback.

    It would lead through this package. Elsewhere the interrupt gets a note that says it, below
    its traceback. `directory` is the run's `RunDirectory`.
    """
    in_ipython = "IPython" in sys.modules and sys.modules["IPython"].get_ipython() is not None
    place = shown(directory.path) if in_ipython else str(directory.path)
    saved = checkpoints(directory.path / "checkpoints")
    step = max((record.get("step", 0) for record in directory.records), default=0)
    where = f"Interrupted after step {step}." if step else "Interrupted."
    if saved:
        name = getattr(function, "__name__", "train")
        words = (
            f"{where} The newest checkpoint is that of step {step_of(saved[-1])}. "
            "Go on from there with the same arguments and the run's directory:\n"
            f"  ddp.launch(client, {name}, …, directory={str(place)!r})"
        )
    else:
        words = f"{where} There is no checkpoint to go on from; what there is lies in {place}."
    if in_ipython:
        say(words, sys.stdout)
        interrupt.__traceback__ = None
    else:
        interrupt.add_note(words)
