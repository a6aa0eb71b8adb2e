"""Which rank the others wait for, step after step: from the samples that all ranks send.

Of each sampled step every rank says how long it waited in the step's last collective. Who waited
least came last, and the others waited for it. Promises: a rank is called slow only if it came last
to most steps of several samples in a row, by more than chance and more than a little.
"""

import statistics
from dataclasses import dataclass

from ddp_common.messages import Pace

MOST = 0.8  # of the steps: a slow rank comes last to so many
LEAST_LATE = 2.0  # ms that it comes late at least: less is the noise of a machine
LEAST_SHARE = 0.1  # of a step that it comes late at least: less is not worth a word
LEAST_COMPARED = 20  # steps that all ranks have sampled, in one sample
LEAST_SAMPLES = 2  # in a row, of all of which it is true
KEPT_COUNTS = 8  # samples for which some ranks are waited for
LEAST_SECONDS = 5.0  # between the first of them and the last: no short disturbance

Named = tuple[int, str]  # a rank, and how a sentence on it goes on
Waits = dict[int, dict[int, float]]  # of each rank: ms, by the number of the collective


@dataclass
class Lateness:
    """How a rank comes to the collectives that end its steps."""

    last: float  # share of the steps to which it came last
    late_ms: float  # the median of how long it kept the next to last waiting then; 0 if never
    waited_ms: float  # the median of how long it waited for the last one
    communicated_ms: float  # the median of what the last one needed: nobody needs less


def compare(waits: Waits) -> dict[int, Lateness]:
    """Of each rank, how it came to those collectives that all ranks have sampled.

    Empty if there are none.
    """
    common = set.intersection(*(set(each) for each in waits.values()))
    if not common:
        return {}
    late: dict[int, list[float]] = {rank: [] for rank in waits}
    least = {}
    for number in common:
        order = sorted(waits, key=lambda rank: waits[rank][number])
        least[number] = waits[order[0]][number]
        if len(order) > 1:
            late[order[0]].append(waits[order[1]][number] - least[number])
    return {
        rank: Lateness(
            last=len(late[rank]) / len(common),
            late_ms=statistics.median(late[rank]) if late[rank] else 0.0,
            waited_ms=statistics.median(waits[rank][number] - least[number] for number in common),
            communicated_ms=statistics.median(least.values()),
        )
        for rank in waits
    }


def is_slow(lateness: Lateness, step_ms: float) -> bool:
    """Whether the others wait for a rank that comes like this to most of the steps."""
    least = max(LEAST_LATE, LEAST_SHARE * step_ms)
    return lateness.last >= MOST and lateness.late_ms >= least


class Paces:
    """The samples of one attempt, and what they show."""

    def __init__(self, ranks: int):
        self.ranks = ranks
        self.samples: dict[int, dict[int, Pace]] = {}  # by their counts, of each rank
        self.since: dict[int, tuple[float, int]] = {}  # slow ranks: first seen, in how many since
        self.named: set[int] = set()

    def take(self, rank: int, sample: Pace, now: float) -> tuple[list[dict], list[Named]]:
        """Take note of a rank's sample at the time `now` (s, monotonic).

        With the last rank's it returns rows, one for each rank, and the ranks that have proved
        slow, each rank once.
        """
        together = self.samples.setdefault(sample.count, {})
        together[rank] = sample
        for count in sorted(self.samples)[:-KEPT_COUNTS]:  # a rank may have said nothing then
            del self.samples[count]
        if len(together) < self.ranks:
            return [], []
        for count in [count for count in self.samples if count <= sample.count]:
            del self.samples[count]
        waits = {
            each: dict(zip(pace.collectives, pace.waited_ms)) for each, pace in together.items()
        }
        found = compare(waits)
        rows = [_row(each, together[each], found[each]) for each in sorted(found)]
        compared = len(set.intersection(*(set(each) for each in waits.values())))
        if compared < LEAST_COMPARED:
            return rows, []
        return rows, self._judge(together, found, now)

    def _judge(
        self, together: dict[int, Pace], found: dict[int, Lateness], now: float
    ) -> list[Named]:
        named = []
        for rank, lateness in found.items():
            pace = together[rank]
            if not is_slow(lateness, pace.step_ms):
                self.since.pop(rank, None)
                continue
            first, samples = self.since.get(rank, (now, 0))
            self.since[rank] = first, samples + 1
            is_proved = samples + 1 >= LEAST_SAMPLES and now - first >= LEAST_SECONDS
            if is_proved and rank not in self.named:
                self.named.add(rank)
                sentence = (
                    f"comes last to {lateness.last:.0%} of the steps, {lateness.late_ms:.0f} ms "
                    f"late in steps of {pace.step_ms:.0f} ms: the others wait for it. The load of "
                    f"its host is {pace.load:.1f}."
                )
                named.append((rank, sentence))
        return named


def _row(rank: int, pace: Pace, lateness: Lateness) -> dict:
    """What a sample says of a rank, as a line of pace.jsonl."""
    own = pace.step_ms - lateness.waited_ms - lateness.communicated_ms
    return {
        "rank": rank,
        "step": pace.step,
        "step_ms": round(pace.step_ms, 3),
        "own_ms": round(max(0.0, own), 3),
        "waited_ms": round(lateness.waited_ms, 3),
        "communicated_ms": round(lateness.communicated_ms, 3),
        "last": round(lateness.last, 3),
        "late_ms": round(lateness.late_ms, 3),
        "load": round(pace.load, 2),
    }
