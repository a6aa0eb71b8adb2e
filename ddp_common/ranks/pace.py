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
# Collectives in which every rank waits for every other one, without torch's underscores
ALL_WAIT = ("allreduce", "allgather", "reducescatter", "alltoall", "barrier")


def watch() -> None:
    """From now on, sample the steps of this process's optimizers; alone there is nothing to see.

    Call it when the process group is formed.
    """
    if dist.is_initialized() and dist.get_world_size() > 1 and dist.get_backend() == "gloo":
        group = dist.group.WORLD
        assert group is not None, "the process group is formed"
        register_optimizer_step_pre_hook(Watch(group.group_name).before_step)


class Watch:
    """When the last steps began, and when the next sample is due."""

    def __init__(self, group: str) -> None:
        self.group = group  # torch's name for the process group of all ranks
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
            reporting.post(lambda: _sample(self.group, count, began))
            now = time.monotonic()
            if now - self.sampled < INTERVAL:
                self.every *= 2
            self.sampled = now


def _sample(group: str, count: int, began: list[int]) -> Pace | None:
    """What is known of the latest steps, which began at these times (ns since 1970).

    None if torch has recorded nothing of them.
    """
    try:
        steps, waited = _waits(began, recorder.beginnings(group))
        if len(steps) < 2:
            return None
        between = [(later - earlier) / 1e6 for earlier, later in zip(steps, steps[1:])]
        return Pace(
            count=count,
            step=reporting.position().get("step", count),
            step_ms=round(statistics.median(between), 3),
            collectives=list(waited),
            waited_ms=list(waited.values()),
            load=os.getloadavg()[0],
        )
    except Exception as error:  # whatever another torch's recorder is like, training goes on
        _say_once(f"slow ranks are not looked for: torch's flight recorder said {error!r}")
        return None


def _waits(
    began: list[int], collectives: list[tuple[int, int, str]]
) -> tuple[list[int], dict[int, float]]:
    """When the steps with a collective of their own began, and how long each waited in it.

    The wait is from a step's last collective to the optimizer's step, in ms, by the collective's
    number. Left out are second optimizers after the same collective, and collectives in which not
    everybody waits for everybody, such as a broadcast.
    """
    times = [created for _, created, _ in collectives]
    steps: list[int] = []
    waited: dict[int, float] = {}
    for step in began:
        index = bisect.bisect(times, step) - 1
        if index < 0:
            continue
        number, created, kind = collectives[index]
        if number not in waited and kind.replace("_", "").startswith(ALL_WAIT):
            steps.append(step)
            waited[number] = round((step - created) / 1e6, 3)
    return steps, waited


_said: set[str] = set()


def _say_once(what: str) -> None:
    if what not in _said:
        _said.add(what)
        print(what, file=sys.stderr, flush=True)
