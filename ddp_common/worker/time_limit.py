"""The time limit of the batch job that a worker is in: how long it still has, and a word to its rank before the end.

Relies on what the job's script has set: DDP_JOB_END, in seconds since 1970, and DDP_JOB_WARNING, in seconds before it.
"""

import os
import sys
import threading
import time

UNLIMITED = 10**10  # seconds: no limit known


def time_left():
    """Seconds until the job's time limit; infinite without one, or without one that is a number."""
    try:
        end = float(os.environ.get("DDP_JOB_END", "inf"))
    except ValueError:
        end = float("inf")
    return end - time.time() if end < UNLIMITED else float("inf")


def watch_time_limit(tell):
    """Call `tell` when the job's time limit is near, and again until its end: a thread, which needs no word from the batch system."""
    warning = float(os.environ.get("DDP_JOB_WARNING", 0))

    def watch():
        while (left := time_left()) > warning:
            time.sleep(min(left - warning, 60))
        print(
            f"{left:.0f} s before this job's time limit: the rank is told to save and leave",
            file=sys.stderr,
            flush=True,
        )
        while True:
            tell()
            time.sleep(2)

    if time_left() < float("inf"):
        threading.Thread(target=watch, daemon=True, name="ddp-time-limit").start()
