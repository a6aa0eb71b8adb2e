"""The time limit of the batch job that a worker is in.

How long it still has, and a warning to its rank before the end. Relies on what the job's script
has set: DDP_JOB_END, in seconds since 1970, and DDP_JOB_WARNING, in seconds before it.
"""

import math
import os
import sys
import threading
import time
from collections.abc import Callable

UNLIMITED = 10**10  # seconds: no limit known
LONGEST_SLEEP = 60  # seconds; clocks are set now and then
REPEAT_INTERVAL = 2  # seconds between two warnings: a rank may not listen yet


def time_left() -> float:
    """Seconds until the job's time limit.

    Infinite without one, or without one that is a number.
    """
    try:
        end = float(os.environ.get("DDP_JOB_END", "inf"))
    except ValueError:
        return math.inf
    if not end < UNLIMITED:
        return math.inf
    return end - time.time()


def warning() -> float:
    """Seconds before the time limit at which ranks are told."""
    return float(os.environ.get("DDP_JOB_WARNING", 0))


def watch_time_limit(tell: Callable[[], None]) -> threading.Event:
    """Call `tell` when the job's time limit is near, and again until its end.

    A thread does it, which needs no word from the batch system, until the event that this returns
    is set. Without a limit nothing happens.
    """
    is_over = threading.Event()
    if time_left() < math.inf:
        watch = threading.Thread(
            target=_watch, args=(tell, is_over), daemon=True, name="ddp-time-limit"
        )
        watch.start()
    return is_over


def _watch(tell: Callable[[], None], is_over: threading.Event) -> None:
    left = time_left()
    while left > warning():
        if is_over.wait(min(left - warning(), LONGEST_SLEEP)):
            return
        left = time_left()
    words = f"{left:.0f} s before this job's time limit: the rank is told to save and leave"
    print(words, file=sys.stderr, flush=True)
    while not is_over.is_set():
        tell()
        is_over.wait(REPEAT_INTERVAL)
