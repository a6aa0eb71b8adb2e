"""How long a rank's steps wait for its peers: samples, from which the client finds slow ranks.

A rank waits from the moment at which it begins the last collective of a step until its optimizer
steps. The rank that comes last waits least: it only communicates. Every rank measures this on its
own clock, so hosts need not agree on the time. Relies on torch's flight recorder (see `recorder`)
and on gloo, whose collectives make Python wait; with NCCL the GPU waits, and nothing is sampled.
"""

import bisect
import collections
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ddp_common.messages import Pace
from ddp_common.ranks import recorder, reporting

STEPS_OF_A_SAMPLE = 50
# Seconds between two samples. One takes some 10 ms of processor time, 0.1 % of this.
INTERVAL = 10.0


def watch() -> None:
    """From now on, sample the steps of this process's optimizers; alone there is nothing to see.

    Call it when the process group is formed.
    """
    if dist.is_initialized() and dist.get_world_size() > 1 and dist.get_backend() == "gloo":
        register_optimizer_step_pre_hook(Watch().before_step)


class Watch:
    """When the last steps began, and when the next sample is due."""

    def __init__(self) -> None:
        self.count = 0  # of optimizer steps
        self.began: collections.deque[int] = collections.deque(maxlen=STEPS_OF_A_SAMPLE)  # ns
        # A sample is taken whenever the count is a multiple of this. It is doubled until samples
        # are rare enough. So all ranks sample the same steps, without a word between them, even
        # if one of them doubles it earlier than another.
        self.every = STEPS_OF_A_SAMPLE
        self.sampled = time.monotonic()

    def before_step(self, *_: object) -> None:
        if torch.compiler.is_compiling():  # the clock is no part of a graph
            return
        self.began.append(time.time_ns())
        self.count += 1
        if self.count % self.every == 0:
            count, began = self.count, list(self.began)
            reporting.post(lambda: _sample(count, began))
            now = time.monotonic()
            if now - self.sampled < INTERVAL:
                self.every *= 2
            self.sampled = now


def _sample(count: int, began: list[int]) -> Pace | None:
    """What is known of the latest steps, which began at these times (ns since 1970).

    None if torch has recorded nothing of them.
    """
    try:
        waited = _waits(began, recorder.beginnings())
    except Exception as error:  # whatever another torch's recorder is like, training goes on
        _say_once(f"slow ranks are not looked for: torch's flight recorder said {error!r}")
        return None
    if len(waited) < 2:
        return None
    between = [(later - earlier) / 1e6 for earlier, later in zip(began, began[1:])]
    return Pace(
        count=count,
        step=reporting.position().get("step", count),
        step_ms=round(statistics.median(between), 3),
        collectives=list(waited),
        waited_ms=list(waited.values()),
        load=os.getloadavg()[0],
    )


def _waits(began: list[int], collectives: list[tuple[int, int]]) -> dict[int, float]:
    """From a step's last collective to the optimizer's step, in ms, by the collective's number."""
    times = [created for _, created in collectives]
    waited: dict[int, float] = {}
    for step in began:
        index = bisect.bisect(times, step) - 1
        if index >= 0:
            number, created = collectives[index]
            # A second optimizer that steps after the same collective has waited for nobody.
            waited.setdefault(number, round((step - created) / 1e6, 3))
    return waited


_said: set[str] = set()


def _say_once(what: str) -> None:
    if what not in _said:
        _said.add(what)
        print(what, file=sys.stderr, flush=True)
