"""Which rank the others wait for, from samples of how long each waited."""

import random

import pytest

from ddp_common.client.pace import Paces, compare
from ddp_common.messages import Pace
from ddp_common.ranks.pace import _waits

STEPS = range(100, 150)  # numbers of collectives


def waits_where(late, by=20.0, communicated=3.0, ranks=3, jitter=0.5):
    """Of each rank: how long it waited in each step, to which `late(step)` came `by` ms late."""
    draw = random.Random(0)
    return {
        rank: {
            step: communicated + draw.uniform(0, jitter) + (0 if rank == late(step) else by)
            for step in STEPS
        }
        for rank in range(ranks)
    }


def samples_of(waits, count=50, step_ms=40.0):
    return [
        (rank, Pace(count, 7 * count, step_ms, list(waited), list(waited.values()), 1.5))
        for rank, waited in waits.items()
    ]


def take_all(paces, samples, now):
    """Rows, and named ranks, of the last rank's sample; nothing before that."""
    for rank, sample in samples[:-1]:
        assert paces.take(rank, sample, now) == ([], [])
    rank, sample = samples[-1]
    return paces.take(rank, sample, now)


# Comparing


def test_the_rank_that_waits_least_came_last_and_by_how_much_it_kept_the_next_waiting():
    found = compare(waits_where(lambda step: 1))
    assert found[1].last == 1
    assert found[1].late_ms == pytest.approx(20, abs=1)
    assert found[1].waited_ms == 0
    assert found[0].last == found[2].last == found[0].late_ms == 0
    assert found[0].waited_ms == pytest.approx(20, abs=1)
    assert found[0].communicated_ms == pytest.approx(3, abs=1)


# Naming


def test_a_slow_rank_is_named_once_when_it_has_been_slow_for_long_enough():
    paces = Paces(3)
    slow = waits_where(lambda step: 1)
    assert take_all(paces, samples_of(slow, 50), 100.0)[1] == []
    assert take_all(paces, samples_of(slow, 100), 102.0)[1] == []  # only two seconds
    ((rank, sentence),) = take_all(paces, samples_of(slow, 200), 106.0)[1]
    assert rank == 1
    assert sentence == (
        "comes last to 100% of the steps, 20 ms late in steps of 40 ms: the others wait for it. "
        "The load of its host is 1.5."
    )
    assert take_all(paces, samples_of(slow, 400), 112.0)[1] == []


# In a rank

MILLISECOND = 10**6  # ns


def test_a_step_waits_from_its_last_collective_to_its_optimizer():
    begun = [(1, 0), (2, 5), (3, 20), (4, 22)]
    collectives = [(number, at * MILLISECOND, "all_reduce") for number, at in begun]
    steps = [8 * MILLISECOND, 25 * MILLISECOND]
    assert _waits(steps, collectives) == (steps, {2: 3.0, 4: 3.0})


# The table
