"""Measure what docs/measured.md claims, each figure beside its alternative in the same run.

    make bench                                               # all: ten minutes on two cores
    .venv/bin/python benchmarks/bench.py --only tables       # one part
    .venv/bin/python benchmarks/bench.py --quick             # does it work? Figures mean nothing

The table, in Markdown, goes to standard output. On standard error each row is shown as it comes,
and the load average before each part: nothing else should run on the machine. A part that fails
is told with its traceback; the others are measured, and the exit status is 1.
"""

import argparse
import os
import sys
import time
import traceback

import images
import launch
import measuring
import pets
import tables
import training

PARTS = {
    "launch": launch.measure,
    "training": training.measure,
    "pets": pets.measure,
    "tables": tables.measure,
    "images": images.measure,
}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog=__doc__.partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", choices=PARTS, metavar="PART", help="one of %(choices)s")
    parser.add_argument("--quick", action="store_true", help="few turns, small sizes")
    options = parser.parse_args()
    rows, loads, failed = [], [], []
    for name in [options.only] if options.only else PARTS:
        load, began = f"{os.getloadavg()[0]:.1f}", time.monotonic()
        say(f"{name}: load average {load}")
        loads.append(f"{name} {load}")
        try:
            for row in PARTS[name](options.quick):
                say(row)
                rows.append(row)
        except Exception:  # of any kind: the parts know nothing of each other
            traceback.print_exc()
            failed.append(name)
        say(f"{name}: {time.monotonic() - began:.0f} s\n")
    print(measuring.HEAD, *rows, sep="\n")
    quick = " With --quick: these figures mean nothing." if options.quick else ""
    print(f"\n*Measured {measuring.machine()}. Load before: {', '.join(loads)}.{quick}*")
    if failed:
        sys.exit(f"Not measured to its end: {', '.join(failed)}. The traceback stands above.")


def say(words):
    print(words, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
