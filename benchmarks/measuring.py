"""What the parts of the benchmark share: taking turns, rows of a table, and running ranks."""

import datetime
import functools
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


def seconds_in_turns(*calls, turns):
    """The same for functions that are to be timed: seconds."""

    def timed(call):
        began = time.perf_counter()
        call()
        return time.perf_counter() - began

    return take_turns(*(functools.partial(timed, call) for call in calls), turns=turns)


# Rows of the table, as text. `what` ends with the unit.

HEAD = "| | here | alternative | ratio | goal |\n|---|---|---|---|---|"


def compared(
    what, here, other, *, beside, speed_up=False, at_least=None, at_most=None, limit=None
):
    """A row with its alternative, `beside`, from one value of each way for each turn.

    The ratio is here / alternative. With `speed_up`, for seconds, it is alternative / here: how
    many times as fast. It is the median over the turns, since what else the machine does falls
    on both halves of a turn; the quartiles tell how far to trust it. `at_least` and `at_most` are
    goals for the ratio, `limit` is one for our own figure.
    """
    pairs = zip(other, here) if speed_up else zip(here, other)
    ratios = [upper / lower for upper, lower in pairs]
    ratio, ours = statistics.median(ratios), statistics.median(here)
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
    goals = []
    if at_least is not None:
        goals.append(f"at least {at_least}: {verdict(ratio >= at_least)}")
    if at_most is not None:
        goals.append(f"at most {at_most}: {verdict(ratio <= at_most)}")
    if limit is not None:
        goals.append(f"here at most {limit}: {verdict(ours <= limit)}")
    words = f"{number(ratio)} times as fast" if speed_up else number(ratio)
    return row(
        what,
        number(ours),
        f"{beside}: {number(statistics.median(other))}",
        words if low == high else f"{words} ({number(low)} to {number(high)})",
        "; ".join(goals),
    )


def row(*cells):
    return f"| {' | '.join(cells)} |"


def verdict(is_met):
    return "met" if is_met else "**missed**"


def number(value):
    """Three digits, and all of a large number."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


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
