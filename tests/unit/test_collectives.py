"""What is made of the collectives that ranks have recorded: without a process."""

import pytest

from ddp_common.hangs.collectives import call, differ, in_different_groups, of_rank
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
        ([REDUCE] * 5, [REDUCE, BARRIER], 1, "same order"),
        ([REDUCE, REDUCE, BARRIER] * 3, [REDUCE, BARRIER], 1, "same order"),
        ([REDUCE, REDUCE, BARRIER] * 3 + [REDUCE] * 2, [BARRIER, REDUCE], 1, "same order"),
        ([REDUCE, OTHER] * 3, [OTHER, REDUCE], 0, "different sizes"),
        ([REDUCE] * 3, [REDUCE, REDUCE, OTHER], 2, "different sizes"),
        ([], [BARRIER, BARRIER, REDUCE, BARRIER], 2, "same order"),
    ],
    ids=["extra", "extra_on_1", "left_out", "barrier_left_out", "order", "size", "majority"],
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


def test_what_only_one_rank_still_remembers_does_not_count():
    """Rank 0 keeps fewer: of the pattern, only what both have recorded is compared."""
    long = record(*[REDUCE, BARRIER] * 5, BARRIER)
    short = record(*[REDUCE, BARRIER] * 5, REDUCE)[6:]
    rank, _ = differ({0: short, 1: long})
    assert rank == 1


def test_only_the_ranks_that_called_the_same_are_said_to():
    before = [REDUCE] * 3
    calls = [REDUCE, REDUCE, BARRIER, ("broadcast", 2)]
    records = {rank: record(*before, last) for rank, last in enumerate(calls)}
    _, why = differ(records)
    assert "while rank 0, 1 called all_reduce" in why


def test_shapes_of_one_size_are_no_difference_and_dtypes_are():
    one, other = record(("all_reduce", 6)), record(("all_reduce", 6))
    other[0].sizes = [[2, 3]]
    assert differ({0: one, 1: other}) is None
    other[0].dtype = "Double"
    _, why = differ({0: one, 1: other})
    assert "different dtypes" in why


def test_groups_of_one_name_with_other_members_are_not_compared():
    one, other = record(REDUCE), record(BARRIER)
    other[0].members = [2, 3]
    assert differ({0: one, 2: other}) is None


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
    records = {0: record(REDUCE, group="left"), 1: record(REDUCE, group="right")}
    assert differ(records) is None
    rank, why = in_different_groups(records)
    assert rank == 0
    assert "of the process group left, and rank 1 in all_reduce #1" in why and "of right" in why
    records[1][0].members = [1, 2]
    assert in_different_groups(records) is None


def test_a_collective_in_words():
    assert (
        call(collective("all_reduce", 41, 4096)) == "all_reduce #41 of 4,096 floats (train.py:8)"
    )
    assert call(collective("barrier", 2, 0, line="")) == "barrier #2"
    assert call(collective("broadcast", 2, dtype="Half", line="")) == "broadcast #2 of 36 halves"


def test_what_a_rank_has_begun_or_has_finished_last():
    assert of_rank(record(REDUCE, BARRIER), is_in_torch=True) == (
        "has begun barrier #2 (train.py:8) 3 s ago, and not finished it"
    )
    finished = [collective("barrier", 7, 0)]
    last = "; the last it has finished is barrier #7 (train.py:8)"
    assert of_rank(finished, is_in_torch=False) == f"is in no collective{last}"
    assert of_rank(finished, is_in_torch=True) == (
        f"is in a call that torch does not record, such as send or recv{last}"
    )
    assert of_rank([], is_in_torch=False) == "is in no collective"
