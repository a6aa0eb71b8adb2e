"""Which rank the others wait for, from samples of how long each waited."""

import random

import pytest

from ddp_common.client.pace import Paces, compare, is_slow
from ddp_common.messages import Pace
from ddp_common.ranks.pace import _waits
from ddp_common.run.result import PACE_COLUMNS, Run

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


def test_clocks_do_not_matter_but_only_common_collectives_do():
    waits = waits_where(lambda step: 2)
    waits[0] = {step: wait for step, wait in waits[0].items() if step >= 120}
    waits[1][999] = 0.0
    assert compare(waits)[2].last == 1
    assert compare({0: {1: 2.0}, 1: {2: 2.0}}) == {}


def test_one_rank_has_nobody_to_wait_for():
    assert compare({0: {1: 2.0, 2: 3.0}})[0].last == 0


@pytest.mark.parametrize(
    ("late", "by", "step_ms", "slow"),
    [
        (lambda step: 1, 20, 40, True),
        (lambda step: 1 if step % 10 else 0, 20, 40, True),  # nine of ten
        (lambda step: step % 3, 20, 40, False),  # in turns
        (lambda step: 1 if step % 4 else 0, 20, 40, False),  # three of four
        (lambda step: 1, 1.0, 5, False),  # within the noise
        (lambda step: 1, 20, 500, False),  # four per cent of a step
    ],
    ids=["always", "nearly always", "in turns", "often", "a little", "little of a step"],
)
def test_slow_is_who_comes_last_to_most_steps_by_enough(late, by, step_ms, slow):
    found = compare(waits_where(late, by))
    assert [rank for rank in found if is_slow(found[rank], step_ms)] == ([1] if slow else [])


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


def test_a_quiet_sample_in_between_begins_anew():
    paces = Paces(3)
    slow, quiet = waits_where(lambda step: 1), waits_where(lambda step: step % 3)
    for number, waits in enumerate([slow, quiet, slow, quiet, slow], 1):
        assert take_all(paces, samples_of(waits, 50 * number), 10.0 * number)[1] == []


def test_a_disturbance_that_is_long_but_seen_once_names_nobody():
    paces = Paces(3)
    assert take_all(paces, samples_of(waits_where(lambda step: 0), 50), 0.0)[1] == []
    assert take_all(paces, samples_of(waits_where(lambda step: 2), 100), 60.0)[1] == []


def test_ranks_that_sample_at_other_steps_meet_where_they_can():
    paces = Paces(2)
    slow = waits_where(lambda step: 1, ranks=2)
    (_, first), (_, second) = samples_of(slow, 50)
    assert paces.take(0, first, 0.0) == ([], [])
    assert paces.take(0, samples_of(slow, 100)[0][1], 1.0) == ([], [])
    rows, _ = paces.take(1, samples_of(slow, 100)[1][1], 1.0)  # the first was never sent
    assert len(rows) == 2
    assert not paces.samples  # what waits for nobody is not kept
    assert paces.take(1, second, 2.0) == ([], [])


def test_a_row_says_where_the_step_went():
    rows, _ = take_all(Paces(3), samples_of(waits_where(lambda step: 1)), 0.0)
    assert ["time", *rows[0]] == PACE_COLUMNS
    assert [row["rank"] for row in rows] == [0, 1, 2]
    for row in rows:
        assert row["step"] == 350
        parts = row["own_ms"] + row["waited_ms"] + row["communicated_ms"]
        assert parts == pytest.approx(row["step_ms"], abs=0.01)
    assert rows[1]["own_ms"] == pytest.approx(rows[0]["own_ms"] + 20, abs=1)


def test_samples_that_some_rank_never_sends_do_not_pile_up():
    paces = Paces(2)
    slow = waits_where(lambda step: 1, ranks=2)
    for count in range(50, 5000, 50):
        assert paces.take(0, samples_of(slow, count)[0][1], 0.0) == ([], [])
    assert len(paces.samples) < 10


# In a rank

MILLISECOND = 10**6  # ns


def test_a_step_waits_from_its_last_collective_to_its_optimizer():
    begun = [(1, 0), (2, 5), (3, 20), (4, 22)]
    collectives = [(number, at * MILLISECOND, "all_reduce") for number, at in begun]
    steps = [8 * MILLISECOND, 25 * MILLISECOND]
    assert _waits(steps, collectives) == (steps, {2: 3.0, 4: 3.0})


def test_a_second_optimizer_after_the_same_collective_is_no_step():
    began = [2 * MILLISECOND, 9 * MILLISECOND]
    assert _waits(began, [(1, 0, "all_reduce")]) == (began[:1], {1: 2.0})


@pytest.mark.parametrize("kind", ["broadcast", "reduce", "gather", "scatter"])
def test_who_does_not_wait_for_all_in_a_collective_does_not_come_last_to_it(kind):
    collectives = [(1, 0, "all_reduce"), (2, MILLISECOND, kind)]
    assert _waits([2 * MILLISECOND], collectives) == ([], {})


def test_steps_before_the_first_collective_that_is_known_are_left_out():
    assert _waits([5], [(7, 10, "allgather")]) == ([], {})
    assert _waits([5], []) == ([], {})


# The table


def run_in(folder):
    return Run(None, folder, 2, [], 1.0)


def test_without_samples_the_table_is_empty(tmp_path):
    table = run_in(tmp_path).pace
    assert list(table.columns) == PACE_COLUMNS
    assert len(table) == 0


def test_a_line_that_was_cut_off_is_left_out(tmp_path):
    (tmp_path / "pace.jsonl").write_text('{"rank": 1, "late_ms": 20.5}\n{"rank": 0, "late')
    assert list(run_in(tmp_path).pace.late_ms) == [20.5]
