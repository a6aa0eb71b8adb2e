"""What TLS adds to the start of a local cluster and to a launch on it.

    python tests/benchmarks/tls.py [--output FILE.json] [--only NAME]

The same with `security=false`, as it would be without: plain TCP. Each start is a program of its
own, from its first line to the end of its first launch on two ranks; the two kinds take turns.
"""

import os
import statistics
import subprocess
import sys
import time

import measuring
from measuring import REPOSITORY, compared, single, take_turns, timed

import ddp_common as ddp

STARTS = 12
LAUNCHES = 10
# Imports are the same with and without, and take longer than all the rest.
PROGRAM = """
import sys, tempfile, time
import ddp_common as ddp
import distributed, torch

options = {"security": False} if sys.argv[1] == "tcp" else {}
with tempfile.TemporaryDirectory() as folder:
    began = time.perf_counter()
    with ddp.connect("local", workers=2, **options) as client:
        assert client.scheduler.address.startswith(sys.argv[1] + "://")
        ddp.launch(client, ddp.rank, directory=folder + "/run")
        print("took", time.perf_counter() - began)
"""


def measure_start():
    """From `connect` to the end of the first launch, in a program that has imported everything."""
    ours, other = take_turns(lambda: start("tls"), lambda: start("tcp"), turns=STARTS)
    added = [mine - theirs for mine, theirs in zip(ours, other)]
    return [
        compared("start", "connect and a first launch, s", ours, other, alternative="plain TCP"),
        single("start", "what TLS adds to that, median, s", statistics.median(added), at_most=0.3),
    ]


def start(protocol):
    """Seconds that such a program says it took."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, protocol],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        check=True,
        capture_output=True,
        text=True,
    )
    (line,) = [each for each in done.stdout.splitlines() if each.startswith("took ")]
    return float(line.removeprefix("took "))


def measure_launch():
    """A launch on a cluster that has launched before."""
    with (
        ddp.connect("local", workers=2) as ours,
        ddp.connect("local", workers=2, security=False) as other,
    ):
        for client in (ours, other):
            ddp.launch(client, ddp.rank)
            time.sleep(1)
        seconds = take_turns(
            lambda: timed(ddp.launch, ours, ddp.rank),
            lambda: timed(ddp.launch, other, ddp.rank),
            turns=LAUNCHES,
        )
    return [compared("launch", "a warm launch, s", *seconds, alternative="plain TCP")]


MEASURES = {"start": measure_start, "launch": measure_launch}

if __name__ == "__main__":
    measuring.main(__doc__, MEASURES, "tls")
