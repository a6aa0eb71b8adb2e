"""What all benchmarks share: taking turns, comparing, printing, and the file that they leave.

A result is a dict: `name` of the measure, `what` with its unit at the end, `ours`, `other` and
what the other is (`alternative`), `ratio` with its `quartiles`, `goal`, and whether it is `met`.
What does not apply is None. The files are what docs/evidence.py makes the tables of the docs from.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import time
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
COLUMNS = "{:<10} {:<58} {:>9} {:>9} {:>7} {:>15} {:>8}  {}"


# Taking turns


def timed(function, *arguments):
    began = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - began


def take_turns(ours, other, turns):
    """Two lists with what `ours()` and `other()` returned, in the order AB BA AB …

    So neither profits from the machine's drift.
    """
    values = {ours: [], other: []}
    for turn in range(turns):
        order = (ours, other) if turn % 2 == 0 else (other, ours)
        for measure in order:
            values[measure].append(measure())
    return values[ours], values[other]


# Results


def compared(
    name, what, ours, other, *, alternative, at_least=None, at_most=None, is_speed_up=False
):
    """A result with its alternative, from as many values of each as there were turns.

    The ratio is ours / other. Where seconds shall become fewer (`is_speed_up`) it is other / ours:
    how many times less ours takes. A goal is a limit of the ratio.
    """

    def ratio(mine, theirs):
        return theirs / mine if is_speed_up else mine / theirs

    low, middle, high = statistics.quantiles(map(ratio, ours, other), n=4, method="inclusive")
    return {
        "name": name,
        "what": what,
        "ours": statistics.median(ours),
        "alternative": alternative,
        "other": statistics.median(other),
        "ratio": middle,
        "quartiles": [low, high],
        **_judged(middle, at_least, at_most),
        "all_ours": list(ours),
        "all_other": list(other),
    }


def single(name, what, value, *, at_least=None, at_most=None):
    """A result without another way beside it: a number, or a few words."""
    return {
        "name": name,
        "what": what,
        "ours": value,
        "alternative": None,
        "other": None,
        "ratio": None,
        "quartiles": None,
        **_judged(value, at_least, at_most),
    }


def _judged(value, at_least, at_most):
    if at_least is not None:
        return {"goal": f">= {at_least}", "met": value >= at_least}
    if at_most is not None:
        return {"goal": f"<= {at_most}", "met": value <= at_most}
    return {"goal": "", "met": None}


def describe_machine():
    """Where and when: what figures depend on beside the code."""
    import torch

    return {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "cores": os.cpu_count(),
        "system": platform.system(),
        "processor": _processor(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load": os.getloadavg(),
    }


def _processor():
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not on Linux
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


# Printing


def number(value):
    """As a table has it: four digits, all of an integer, words as they are."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def line(result):
    spread = ""
    if result["quartiles"] is not None:
        spread = "{:.3g} to {:.3g}".format(*result["quartiles"])
    return COLUMNS.format(
        result["name"],
        result["what"],
        number(result["ours"]),
        number(result["other"]),
        number(result["ratio"]),
        spread,
        result["goal"],
        {True: "met", False: "missed", None: ""}[result["met"]],
    ).rstrip()


def show(results):
    print("\n".join(map(line, results)), flush=True)


def show_head(machine):
    print(f"{machine['cores']} cores, torch {machine['torch']}, {machine['date']}", end=", ")
    print(f"load {machine['load'][0]:.1f}\n")
    print(
        COLUMNS.format("", "what", "ours", "other", "ratio", "quartiles", "goal", "").rstrip(),
        flush=True,
    )


# The command line


def command_line(about, measures, name):
    """A parser with --output, by default runs/bench-<name>.json, and --only, one of `measures`."""
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument(
        "--output",
        type=Path,
        default=REPOSITORY / "runs" / f"bench-{name}.json",
        metavar="FILE.json",
    )
    parser.add_argument(
        "--only", choices=list(measures), metavar="NAME", help="one of %(choices)s"
    )
    return parser


def take(measures, only, *arguments):
    """The results of all `measures`, or of the one that is named; each is shown as it comes.

    A measure is a function that returns a list of results; it is given the arguments.
    """
    results = []
    for name, measure in measures.items():
        if only in (None, name):
            new = measure(*arguments)
            show(new)
            results += new
    return results


def write(path, machine, results):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine, "results": results}, indent=2) + "\n")


def main(about, measures, name):
    options = command_line(about, measures, name).parse_args()
    machine = describe_machine()
    show_head(machine)
    write(options.output, machine, take(measures, options.only))
