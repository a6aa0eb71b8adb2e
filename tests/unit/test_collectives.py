"""What is made of the collectives that ranks have recorded: without a process."""

import pytest

from ddp_common.hangs.collectives import differ, in_different_groups
from ddp_common.messages import Collective


def collective(kind, number, size=36, group="default_pg", **others):
    values = {
        "description": group,
        "members": [0, 1],
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
    ("before", "calls", "odd", "what"),
    [
        ([REDUCE] * 5, [BARRIER, REDUCE], 0, "same order"),
        ([REDUCE, REDUCE, BARRIER] * 3, [REDUCE, BARRIER], 1, "same order"),
        ([REDUCE] * 3, [REDUCE, REDUCE, OTHER], 2, "different sizes"),
        ([], [BARRIER, BARRIER, REDUCE, BARRIER], 2, "same order"),
    ],
    ids=["extra", "left_out", "size", "majority"],
)
def test_the_rank_whose_call_breaks_the_pattern_is_named(before, calls, odd, what):
    records = {rank: record(*before, last) for rank, last in enumerate(calls)}
    rank, why = differ(records)
    assert rank == odd
    assert f"It has called {calls[odd][0]} #{len(before) + 1}" in why
    assert what in why and "cannot be told" not in why


def test_where_nothing_came_before_it_is_said_that_either_may_be_wrong():
    _, why = differ({0: record(REDUCE), 1: record(BARRIER)})
    assert "Which of them is wrong cannot be told" in why


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


def test_ranks_that_wait_in_different_process_groups_are_told_apart():
    records = {0: record(REDUCE, group="left"), 1: record(REDUCE, group="right")}
    assert differ(records) is None
    rank, why = in_different_groups(records)
    assert rank == 0
    assert "of the process group left, and rank 1 in all_reduce #1" in why and "of right" in why
    records[1][0].members = [1, 2]
    assert in_different_groups(records) is None
