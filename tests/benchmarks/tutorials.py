"""How long the tutorials take and what comes out, and two of them on one and two ranks.

    python tests/benchmarks/tutorials.py [--output FILE.json] [--only NAME]

| name     | what                                                                               |
|----------|------------------------------------------------------------------------------------|
| job      | `make run` of each tutorial on two ranks: seconds, and the lines that tell how good |
|          | its model is                                                                       |
| notebook | all cells of its notebook, exercises solved: seconds                               |
| scaling  | `make scaling WORKERS="1 2"` of two tutorials: the tables that it writes            |

Everything takes place in a folder of its own, with the tutorials' defaults.
"""

import csv
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import measuring
from measuring import REPOSITORY, single, timed

sys.path.insert(0, str(REPOSITORY / "tutorials"))
import sync

# Which lines of a job tell how good its model is
QUALITY = {
    "mnist": r"^(?:mean digit|PCA|autoencoder) .*",
    "pets": r"^LSTM .*",
    "ucmerced": r"^  (?:the largest class|linear on pixels|small) .*",
    "dogs": r"^best model: .*they have chosen the epoch\)",
    "flights": r"^(?:frequency|logistic|trees|network) +\d[.\d]* \(.*?\)",
}
SCALED = ("pets", "ucmerced")
RANKS = "1 2"
DEFAULTS = ("CLUSTER", "PRESET", "SET", "RESUME", "CHECKPOINT", "RESTARTS")


def python(folder, *words, **variables):
    """Run Python with its runs in `folder`; returns what it prints."""
    kept = {name: value for name, value in os.environ.items() if name not in DEFAULTS}
    return subprocess.run(
        [sys.executable, *words],
        env={**kept, "RUNS": str(folder), "PYTHONPATH": str(REPOSITORY), **variables},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout


def quality(tutorial, printed):
    """The lines that tell how good the model is, on one line."""
    found = re.findall(QUALITY[tutorial], printed, flags=re.MULTILINE)
    if not found:
        raise SystemExit(f"{tutorial} says nothing of its model any more:\n{printed}")
    return "; ".join(re.sub(r" +", " ", line.strip()) for line in found)


def measure_job():
    """What a person waits for, and gets, after `make run`."""
    results = []
    for tutorial in QUALITY:
        with tempfile.TemporaryDirectory() as folder:
            printed = []
            seconds = timed(
                lambda: printed.append(
                    python(folder, "-m", "ddp_common", "run", tutorial, WORKERS="2")
                )
            )
        results += [
            single("job", f"{tutorial}: `make run`, s", seconds),
            single("job", f"{tutorial}: what it says of its model", quality(tutorial, printed[0])),
        ]
    return results


def measure_notebook():
    """Every cell of the notebook, with the exercises' solutions."""
    results = []
    for tutorial in QUALITY:
        notebook = sync.from_script(sync.HERE / f"{tutorial}.py")
        seconds = timed(sync.execute, notebook)
        results.append(single("notebook", f"{tutorial}: all cells, s", seconds))
    return results


def measure_scaling():
    """The rows of the tables that the studies write."""
    return [
        single("scaling", f"{tutorial}, ranks {row['ranks']}: {column}", float(row[column]))
        for tutorial in SCALED
        for row in study(tutorial)
        for column in ("samples/s", "efficiency", "steps", "loss")
    ]


def study(tutorial):
    """The table of a study of this tutorial: a dict for each number of ranks."""
    with tempfile.TemporaryDirectory() as folder:
        python(folder, str(sync.HERE / "scaling.py"), TUTORIAL=tutorial, WORKERS=RANKS)
        (table,) = Path(folder).glob(f"scaling/{tutorial}/*/scaling.csv")
        with open(table) as file:
            return list(csv.DictReader(file))


MEASURES = {"job": measure_job, "notebook": measure_notebook, "scaling": measure_scaling}

if __name__ == "__main__":
    measuring.main(__doc__, MEASURES, "tutorials")
