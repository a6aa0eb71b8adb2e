"""How fast and how small `ddp_common` is, each time beside what one would use without it, both measured in this run.

    python tests/benchmarks/bench.py [--output FILE.json] [--only NAME]

| name    | ours                                                   | other                                              |
|---------|--------------------------------------------------------|----------------------------------------------------|
| launch  | `ddp.launch` on a warm cluster until both ranks have   | the same from starting `torchrun`                  |
|         | finished their first backward (s)                      |                                                    |
| step    | mean training step under `ddp.launch`, reports sent    | the same code under `torchrun`, reports dropped    |
| windows | (8 characters -> next) windows of all pet names, NumPy | the same tensors from Python lists, item by item   |
| loader  | one epoch over them, one index operation per batch     | one per item and the default collate               |
| memory  | a rank after its first backward                        | a process that has only imported torch             |
| lines   | the lines of `ddp_common`                              | the limit that the project has set itself          |

Time repetitions of ours and other take turns, and the medians are compared; all single values are in the JSON file. `ratio` is
other / ours for speed-ups (more is better), ours / other for what we add (less is better). A goal is `met` or `missed` and does
not change the exit code. The machine should have nothing else to do: look at `load` in the JSON file when a number surprises.

Memory: USS is what a process has for itself alone, PSS adds its part of what it shares. Ranks share torch's pages with the
forkserver they come from, and a bare process shares torch's files with everybody, so PSS is the fair one; USS is what one more
process costs.
"""

import argparse
import ast
import contextlib
import csv
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

import ranks  # in the folder of this script

import ddp_common as ddp

REPOSITORY = Path(__file__).parents[2]
NAMES = REPOSITORY / "data" / "pets" / "names.csv"
ALPHABET = "*+abcdefghijklmnopqrstuvwxyz-. "  # '*' pads the beginning, '+' ends a name
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d",
            "--rdzv-endpoint", "localhost:0", ranks.__file__]
STEPS = 200
LOADER_BATCH = 16_384
MODULE_LINES, FUNCTION_LINES, ALL_LINES = 300, 60, 1_500
