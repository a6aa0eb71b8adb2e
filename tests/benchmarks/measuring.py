"""The command line of a benchmark: which of its measures to take, and where to write them."""

import argparse
import json
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def main(about, measures, name):
    """Take all of `measures` (dict of functions), or the one of --only, and write the results.

    They go to --output, by default runs/bench-<name>.json.
    """
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument(
        "--output",
        type=Path,
        default=REPOSITORY / "runs" / f"bench-{name}.json",
        metavar="FILE.json",
    )
    parser.add_argument("--only", choices=measures, metavar="NAME", help="one of %(choices)s")
    options = parser.parse_args()
    results = {key: measure() for key, measure in measures.items() if options.only in (None, key)}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(results, indent=2) + "\n")
