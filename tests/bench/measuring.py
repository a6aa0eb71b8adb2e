"""What the parts of the benchmark share: taking turns, rows of a table, and running ranks."""

import dataclasses
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import ddp_common as ddp

HERE = Path(__file__).parent
# One thread a rank. `connect` gives its workers the same.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}

# Taking turns


def take_turns(*ways, turns):
    """What each of these functions returned: a list of `turns` values for each.

    The order is reversed in every second turn, so that no way profits from the machine's drift.
    """
    found = [[] for _ in ways]
    for turn in range(turns):
        order = list(zip(ways, found))
        for way, values in order if turn % 2 == 0 else reversed(order):
            values.append(way())
    return found


def seconds_of(function, *arguments):
    """How long a call takes."""
    began = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - began


# Rows of the table


@dataclasses.dataclass
class Row:
    """A line of the table, as text. `what` ends with the unit."""

    what: str
    here: str
    alternative: str = ""
    ratio: str = ""
    goal: str = ""

    def __str__(self):
        return f"| {self.what} | {self.here} | {self.alternative} | {self.ratio} | {self.goal} |"


HEAD = "| | here | alternative | ratio | goal |\n|---|---|---|---|---|"


def compared(what, here, other, *, beside, speed_up=False, at_least=None, at_most=None):
    """A row with its alternative, `beside`, from one value of each way for each turn.

    The ratio is here / alternative. With `speed_up`, for seconds, it is alternative / here: how
    many times as fast. It is the median over the turns, since what else the machine does falls
    on both halves of a turn; the quartiles tell how far to trust it. A goal limits the ratio.
    """
    pairs = zip(other, here) if speed_up else zip(here, other)
    ratios = [upper / lower for upper, lower in pairs]
    ratio = statistics.median(ratios)
    words = f"{number(ratio)} times as fast" if speed_up else number(ratio)
    if len(ratios) > 1:
        low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
        words += f" ({number(low)} to {number(high)})"
    return Row(
        what,
        number(statistics.median(here)),
        f"{beside}: {number(statistics.median(other))}",
        words,
        verdict(ratio, at_least, at_most),
    )


def alone(what, value, *, at_most=None):
    """A row of one figure that has no alternative: a number, or a word."""
    return Row(what, number(value), goal=verdict(value, None, at_most))


def verdict(value, at_least, at_most):
    """The goal, and whether `value` meets it; '' without a goal."""
    if at_least is not None:
        return f"at least {at_least}: {'met' if value >= at_least else '**missed**'}"
    if at_most is not None:
        return f"at most {at_most}: {'met' if value <= at_most else '**missed**'}"
    return ""


def number(value):
    """Three digits of a number, all of a large one; words as they are."""
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if value >= 1000 or value == 0 else f"{value:.3g}"


def machine():
    """Date, processor and versions, which figures depend on beside the code."""
    return (
        f"{datetime.date.today()}, {os.cpu_count()} cores ({_processor()}), "
        f"Python {platform.python_version()}, torch {torch.__version__}"
    )


def _processor():
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not on Linux
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


# Running ranks. Each leaves what it has measured in a file: all are on this host.


def launched(client, function, ranks=2, **arguments):
    """Run a function on ranks, with `folder` among its arguments; returns what each left."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        ddp.launch(client, function, workers=ranks, directory=run, folder=folder, **arguments)
        return left_in(folder, ranks)


def with_torchrun(name, *numbers, ranks=2, starts=1):
    """Run a function of `plain_torch` under torchrun; returns what each rank left.

    `starts` is how often the command is given, one time after the other, in the same folder.
    """
    torchrun = f"-m torch.distributed.run --standalone --nproc-per-node={ranks}".split()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *torchrun, HERE / "plain_torch.py", name, folder]
        for _ in range(starts):
            done = subprocess.run(
                [*command, *map(str, numbers)], env=ENVIRONMENT, stderr=subprocess.PIPE, text=True
            )
        try:
            return left_in(folder, ranks)
        except OSError:
            raise SystemExit(f"torchrun has measured nothing:\n{done.stderr}") from None


def left_in(folder, ranks):
    """The dicts that `plain_torch.leave` has written, in the order of ranks."""
    return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(ranks)]
