"""A plot that grows in JupyterLab while training runs.

It is made of what any notebook has: `on_report` of `launch`, matplotlib, and IPython's display.
Where nobody sees it, nothing is drawn: in a script, and in a notebook that is executed to be kept.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from ddp_common.clusters.notebooks import is_watched
from ddp_common.run.progress import kernel

INTERVAL = 1.0  # seconds between two drawings, which take about a tenth of one


class LivePlot:
    """What rank 0 reports as `name`, against the step: give it to `launch` as `on_report`.

    `show` is IPython's `display`, or what takes the same arguments.
    """

    def __init__(self, name: str, show: Callable[..., Any]):
        # Not above: whoever imports this module may draw nothing.
        import matplotlib.pyplot as plt

        self.name = name
        self.figure, self.axes = plt.subplots(figsize=(6, 2.5))
        plt.close(self.figure)  # else the notebook shows it once more
        self.axes.set(xlabel="step", ylabel=name)
        (self.line,) = self.axes.plot([], [])
        self.steps: list[int] = []
        self.values: list[float] = []
        self.shown = show(self.figure, display_id=True)
        self.due = 0.0  # when to draw again, on the clock of time.monotonic()

    def __call__(self, record: dict) -> None:
        """Take note of a record, and draw if the last drawing is a while ago."""
        if record["rank"] == 0 and self.name in record:
            self.steps.append(record["step"])
            self.values.append(record[self.name])
        if time.monotonic() >= self.due:
            self.draw()

    def draw(self) -> None:
        """Replace the picture by one of all records so far."""
        self.line.set_data(self.steps, self.values)
        self.axes.relim()
        self.axes.autoscale_view()
        self.shown.update(self.figure)
        self.due = time.monotonic() + INTERVAL


@contextlib.contextmanager
def live_plot(name: str = "loss") -> Iterator[LivePlot | None]:
    """For a launch in a `with` block: yields what to give it as `on_report`.

        with live_plot("loss") as watch:
            run = ddp.launch(client, train, on_report=watch)

    At the end the picture has all records and stays. It yields None, which is `on_report` of a
    launch that nobody watches, where no person would see the plot.
    """
    if kernel() is None or not is_watched():
        yield None
        return
    from IPython.display import display

    plot = LivePlot(name, display)
    try:
        yield plot
    finally:
        plot.draw()
