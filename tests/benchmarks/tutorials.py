"""What `make run` takes for each tutorial, and what it says at the end.

    python tests/benchmarks/tutorials.py [--output FILE.json] [--only NAME]

The tutorials run one after the other as `make run TUTORIAL=…` runs them, with no settings of their
own. `setup` clones the repository, sets it up from nothing, and counts what is on the disk then;
packages come from where pip finds them.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import measuring
from measuring import REPOSITORY, single

# What the last lines of a tutorial say of its result. The first group is the figure.
RESULTS = {
    "mnist": {
        "held-out digits, mean squared error": r"autoencoder\D*(\d\.\d+)",
    },
}
LAUNCHERS = ("RANK", "WORLD_SIZE", "SLURM_JOB_ID", "MAKEFLAGS", "MAKELEVEL")


def environment(runs):
    kept = {key: value for key, value in os.environ.items() if key not in LAUNCHERS}
    return {**kept, "RUNS": str(runs)}


def measure_run(tutorial):
    with tempfile.TemporaryDirectory() as runs:
        began = time.time()
        done = subprocess.run(
            [sys.executable, "-m", "ddp_common", "run", tutorial],
            cwd=REPOSITORY,
            env=environment(runs),
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        seconds = time.time() - began
    return [
        single(tutorial, f"`make run TUTORIAL={tutorial}`, s", seconds),
        *[
            single(tutorial, f"{tutorial}: {what}", float(re.search(form, done.stdout)[1]))
            for what, form in RESULTS[tutorial].items()
        ],
    ]
