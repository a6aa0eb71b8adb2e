"""Where training is, drawn while it goes on: a bar on a terminal, one line that updates in a notebook.

A notebook that is executed to be kept (nbclient, nbconvert, papermill, nbval) must print the same every time: there nothing is drawn.
What tells it from JupyterLab or VS Code is whether the cell may ask a person for input. Whoever executes notebooks by program forbids
it (`allow_stdin` of the request is false), since nobody could answer; where a person sits, it is allowed.
"""

import os
import sys
import time

from tqdm import tqdm

from ddp_common.ranks.checkpoint_files import checkpoints, step_of
from ddp_common.run.places import shown

REDRAW_INTERVAL = 0.2  # seconds between two states of the line in a notebook
RECENT = 50  # reports whose mean is the loss that is shown


def kernel():
    """The Jupyter kernel that this program is, None elsewhere. Nothing is imported: who runs in IPython has it already."""
    if "IPython" not in sys.modules:
        return None
    return getattr(sys.modules["IPython"].get_ipython(), "kernel", None)


def a_person_watches():
    """Whether the cell that runs was sent by a front end with a person before it, such as JupyterLab or VS Code."""
    if not hasattr(kernel(), "get_parent"):
        return False
    request = kernel().get_parent("shell") or {}
    return bool(request.get("content", {}).get("allow_stdin"))


class Progress:
    """Draws where training is: a bar on a terminal or in a live notebook, a line per epoch where DDP_PROGRESS=lines says so, else nothing.

    DDP_PROGRESS may be off, bar or lines, and has the last word.
    """

    def __init__(self):
        by_itself = "bar" if sys.stderr.isatty() or a_person_watches() else "off"
        self.mode = os.environ.get("DDP_PROGRESS") or by_itself
        self.in_notebook = kernel() is not None
        self.bar, self.losses, self.epoch, self.mark, self.place = None, [], None, None, {}

    def position(self, place):
        """`place`: epoch, step, samples, epochs, total_samples, as the sampler counts them; the fastest rank leads."""
        if (
            self.mode == "off"
            or not place.get("total_samples")
            or place["samples"] < self.place.get("samples", 0)
        ):
            return
        if self.mode == "bar" and self.in_notebook:
            if self.bar is None:
                self.bar = NotebookLine(place)
            self.bar.update(place, self._loss())
        elif self.mode == "bar":
            if self.bar is None:
                self.bar = tqdm(
                    total=place["total_samples"],
                    initial=place["samples"],
                    unit=" samples",
                    unit_scale=True,
                    dynamic_ncols=True,
                    mininterval=0.1,
                )
            self.bar.set_description(
                f"epoch {place['epoch'] + 1}/{place['epochs']}", refresh=False
            )
            self.bar.update(place["samples"] - self.bar.n)
        elif place["epoch"] != self.epoch:
            self._epoch_line()
            self.epoch, self.mark = place["epoch"], (time.monotonic(), place["samples"])
        self.place = place

    def record(self, values):
        if "loss" not in values:
            return
        self.losses.append(values["loss"])
        if self.bar is not None and not self.in_notebook:
            self.bar.set_postfix_str(f"loss {self._loss():.4f}", refresh=False)

    def note(self, text):
        """Say something in between, where progress is drawn at all."""
        if self.mode != "off":
            on_stderr = self.mode == "bar" and not self.in_notebook
            tqdm.write(text, file=sys.stderr if on_stderr else sys.stdout)

    def _loss(self):
        recent = self.losses[-RECENT:]
        return sum(recent) / len(recent) if recent else None

    def _epoch_line(self):
        if self.epoch is not None and self.losses:
            started, samples = self.mark
            rate = (self.place["samples"] - samples) / max(time.monotonic() - started, 1e-9)
            loss = sum(self.losses) / len(self.losses)
            print(
                f"epoch {self.epoch + 1}/{self.place['epochs']}  loss {loss:.4f}  {rate:,.0f} samples/s",
                flush=True,
            )
        self.losses = []

    def close(self):
        if self.mode == "lines":
            self._epoch_line()
        if isinstance(self.bar, NotebookLine):
            self.bar.close(self._loss())
        elif self.bar is not None:
            self.bar.close()


class NotebookLine:
    """One output of a cell that is replaced by its next state: a bar while training goes on, a line of text when it has ended."""

    def __init__(self, place):
        self.place, self.first, self.began, self.drawn, self.handle = (
            place,
            place["samples"],
            time.monotonic(),
            0.0,
            None,
        )

    def update(self, place, loss):
        self.place = place
        if time.monotonic() < self.drawn + REDRAW_INTERVAL:
            return
        self.drawn = time.monotonic()
        done, total, rate = place["samples"], place["total_samples"], self._rate()
        words = f"epoch {place['epoch'] + 1}/{place['epochs']} · {done / total:.0%}{_loss_in_words(loss)}"
        if rate > 0:
            words += (
                f" · {rate:,.0f} samples/s · {tqdm.format_interval((total - done) / rate)} to go"
            )
        bar = f'<progress value="{done}" max="{total}" style="width: 16em; vertical-align: middle"></progress>'
        self._show(words, f'<div style="white-space: nowrap">{bar} {words}</div>')

    def close(self, loss):
        """Leave one line: what was done, or where it ended."""
        place, seconds = self.place, time.monotonic() - self.began
        if place["samples"] >= place["total_samples"]:
            words = "1 epoch" if place["epochs"] == 1 else f"{place['epochs']} epochs"
        else:
            words = f"ended in epoch {place['epoch'] + 1}/{place['epochs']}, at {place['samples'] / place['total_samples']:.0%}"
        words += f" · {place['samples']:,} samples · {tqdm.format_interval(seconds)}"
        if (rate := self._rate()) > 0:
            words += f" · {rate:,.0f} samples/s"
        words += _loss_in_words(loss)
        self._show(words, f"<div>{words}</div>")

    def _rate(self):
        """Samples per second since the first position that was heard of."""
        return (self.place["samples"] - self.first) / max(time.monotonic() - self.began, 1e-9)

    def _show(self, text, html):
        from IPython.display import display

        content = {"text/plain": text, "text/html": html}
        if self.handle is None:
            self.handle = display(content, raw=True, display_id=True)
        else:
            self.handle.update(content, raw=True)


def _loss_in_words(loss):
    return "" if loss is None else f" · loss {loss:.4f}"


def explain_interrupt(interrupt, function, directory):
    """In a notebook or an IPython shell: say how to go on, and spare the reader a traceback through this package.

    Elsewhere nothing: a program has its own last words. `directory` is the run's `RunDirectory`.
    """
    if "IPython" not in sys.modules or sys.modules["IPython"].get_ipython() is None:
        return
    place, saved = shown(directory.path), checkpoints(directory.path / "checkpoints")
    step = max((record.get("step", 0) for record in directory.records), default=0)
    where = f"Interrupted after step {step}." if step else "Interrupted."
    if saved:
        name = getattr(function, "__name__", "train")
        print(
            f"{where} The newest checkpoint is that of step {step_of(saved[-1])}. Go on from there with the same arguments and the run's directory:\n"
            f"  ddp.launch(client, {name}, …, directory={str(place)!r})",
            flush=True,
        )
    else:
        print(
            f"{where} There is no checkpoint to go on from; what there is lies in {place}.",
            flush=True,
        )
    interrupt.__traceback__ = None
