"""What is made of the collectives that ranks have recorded: without a process."""

import pytest

from ddp_common.client.collectives import call, differ, of_rank
from ddp_common.messages import Collective


def collective(kind, number, size=36, group="default_pg", **others):
    values = {
        "sizes": [[size]] if size else [],
        "dtype": "Float",
        "is_between_two": False,
        "is_finished": True,
        "seconds_ago": 3.0,
        "line": "train.py:8",
    }
    return Collective(kind, number, group, **{**values, **others})


def record(*calls, group="default_pg"):
    """Collectives (kind, size) in their order; the last of them is not finished."""
    numbered = [
        collective(kind, number, size, group) for number, (kind, size) in enumerate(calls, 1)
    ]
    numbered[-1].is_finished = False
    return numbered


REDUCE = ("all_reduce", 36)
OTHER = ("all_reduce", 4)
BARRIER = ("barrier", 0)


@pytest.mark.parametrize(
    ("before", "calls", "odd"),
    [
        ([REDUCE] * 5, [BARRIER, REDUCE], 0),
        ([REDUCE] * 5, [REDUCE, BARRIER], 1),
        ([REDUCE, REDUCE, BARRIER] * 3, [REDUCE, BARRIER], 1),  # it leaves one REDUCE out
        ([REDUCE, REDUCE, BARRIER] * 3 + [REDUCE] * 2, [BARRIER, REDUCE], 1),
        ([REDUCE, OTHER] * 3, [OTHER, REDUCE], 0),
        ([REDUCE] * 3, [REDUCE, REDUCE, OTHER], 2),
        ([], [BARRIER, BARRIER, REDUCE, BARRIER], 2),
    ],
    ids=["extra", "extra_on_1", "left_out", "barrier_left_out", "order", "size", "majority"],
)
def test_the_rank_whose_call_breaks_the_pattern_is_named(before, calls, odd):
    records = {rank: record(*before, last) for rank, last in enumerate(calls)}
    rank, why = differ(records)
    assert rank == odd
    number = len(before) + 1
    assert f"It has called {calls[odd][0]} #{number}" in why
    assert ("other sizes" if calls[odd] == OTHER and odd == 2 else "called") in why


def test_a_difference_counts_though_one_rank_has_finished_it():
    """A broadcast is done for the one who sends before others have come to it."""
    ahead = record(REDUCE, ("broadcast", 4), REDUCE)
    behind = record(REDUCE, REDUCE)
    rank, why = differ({0: ahead, 1: behind})
    assert rank == 0 and "broadcast #2 of 4 floats" in why and "all_reduce #2 of 36" in why


def test_ranks_that_have_called_the_same_do_not_differ():
    assert differ({0: record(REDUCE, BARRIER), 1: record(REDUCE)}) is None
    assert differ({0: [], 1: record(REDUCE)}) is None
    assert differ({}) is None


def test_sizes_may_differ_where_each_rank_has_its_own():
    assert differ({0: record(("all_gather", 3)), 1: record(("all_gather", 4))}) is None


def test_what_two_ranks_send_each_other_is_no_difference():
    sends = [collective("send", 1, is_between_two=True), *record(REDUCE)]
    assert differ({0: sends, 1: record(REDUCE)}) is None


def test_ranks_that_wait_in_different_process_groups_are_told_apart():
    rank, why = differ({0: record(REDUCE, group="left"), 1: record(REDUCE, group="right")})
    assert rank == 0
    assert "of the process group left, and rank 1 in all_reduce #1" in why and "of right" in why


def test_a_collective_in_words():
    assert (
        call(collective("all_reduce", 41, 4096)) == "all_reduce #41 of 4,096 floats (train.py:8)"
    )
    assert call(collective("barrier", 2, 0, line="")) == "barrier #2"
    assert call(collective("broadcast", 2, dtype="Half", line="")) == "broadcast #2 of 36 halves"


def test_what_a_rank_waits_in_or_has_finished_last():
    assert of_rank(record(REDUCE, BARRIER)) == "waits in barrier #2 (train.py:8), for 3 s now"
    finished = [collective("barrier", 7, 0)]
    assert of_rank(finished) == (
        "is in no collective; the last it has finished is barrier #7 (train.py:8)"
    )
    assert of_rank([]) == "has begun no collective"
