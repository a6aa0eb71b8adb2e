"""What TLS adds to the start of a local cluster and its first launch.

    python tests/benchmarks/tls.py [--output FILE.json] [--only NAME]

The same with `security=false`, as it would be without: plain TCP. Each start is a program of its
own, timed from `connect` to the end of its first launch on two ranks; the two kinds take turns.
"""

import os
import statistics
import subprocess
import sys

import measuring
from measuring import REPOSITORY, compared, single, take_turns

OPTIONS = {"tls": "", "tcp": "security=false"}
STARTS = 12
# Imports are the same with and without, and take longer than all the rest.
PROGRAM = """
import sys, tempfile, time
import ddp_common as ddp
import distributed, torch

with tempfile.TemporaryDirectory() as folder:
    began = time.perf_counter()
    with ddp.connect("local", workers=2) as client:
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
        env={
            **os.environ,
            "PYTHONPATH": str(REPOSITORY),
            "OMP_NUM_THREADS": "1",
            "OPTIONS": OPTIONS[protocol],
        },
        check=True,
        capture_output=True,
        text=True,
    )
    (line,) = [each for each in done.stdout.splitlines() if each.startswith("took ")]
    return float(line.removeprefix("took "))


MEASURES = {"start": measure_start}

if __name__ == "__main__":
    measuring.main(__doc__, MEASURES, "tls")
