"""What the collectives of ranks that wait for each other say: functions of what they recorded.

Ranks must call the same collectives of a process group in the same order. Where they have not, the
first number at which they differ is looked for, and the rank whose call breaks the pattern of the
collectives before it is named.
"""

import math
from collections import Counter

from ddp_common.messages import Collective

CONTEXT = 4  # collectives before one that make up a pattern
SAME_ON_ALL = ("all_reduce", "broadcast", "reduce", "allreduce_coalesced")  # sizes, that is

Records = dict[int, list[Collective]]  # of each rank, its latest collectives, oldest first


def waits_in(record: list[Collective]) -> Collective | None:
    """The first collective that a rank has begun and not finished."""
    for each in record:
        if not each.is_finished:
            return each
    return None


def last_finished(record: list[Collective]) -> Collective | None:
    finished = [each for each in record if each.is_finished]
    return finished[-1] if finished else None


def call(collective: Collective) -> str:
    """A collective in words, as 'all_reduce #41 of 4,096 floats (train.py:88)'."""
    text = f"{collective.kind} #{collective.number}"
    count = sum(math.prod(size) for size in collective.sizes)
    if collective.sizes:
        kind = "halves" if collective.dtype == "Half" else f"{collective.dtype.lower()}s"
        text += f" of {count:,} {kind}"
    if collective.line:
        text += f" ({collective.line})"
    return text


def of_rank(record: list[Collective]) -> str:
    """What a rank waits in, or has finished last, in words."""
    current = waits_in(record)
    if current is not None:
        return f"waits in {call(current)}, for {current.seconds_ago:.0f} s now"
    last = last_finished(record)
    if last is not None:
        return f"is in no collective; the last it has finished is {call(last)}"
    return "has begun no collective"


def differ(records: Records) -> tuple[int, str] | None:
    """The rank that has called another collective than its peers, and that in a sentence.

    None where what was recorded shows no such call.
    """
    waiting = {rank: waits_in(record) for rank, record in records.items()}
    groups = {each.group for each in waiting.values() if each is not None}
    for group in sorted(groups):
        of_group = {rank: _numbered(record, group) for rank, record in records.items()}
        of_group = {rank: numbered for rank, numbered in of_group.items() if numbered}
        number = _first_difference(of_group)
        if number is not None:
            return _name(of_group, number)
    return _wait_in_different_groups({r: each for r, each in waiting.items() if each is not None})


def _numbered(record: list[Collective], group: str) -> dict[int, Collective]:
    return {
        each.number: each for each in record if each.group == group and not each.is_between_two
    }


def _first_difference(of_group: dict[int, dict[int, Collective]]) -> int | None:
    """The first number at which two ranks of a process group have called different collectives."""
    numbers = set().union(*of_group.values())
    for number in sorted(numbers):
        shapes = {_shape(numbered[number]) for numbered in of_group.values() if number in numbered}
        if len(shapes) > 1:
            return number
    return None


def _shape(collective: Collective) -> tuple:
    """What must be the same on all ranks."""
    if collective.kind not in SAME_ON_ALL:
        return (collective.kind,)
    return collective.kind, collective.dtype, *map(tuple, collective.sizes)


def _name(of_group: dict[int, dict[int, Collective]], number: int) -> tuple[int, str]:
    calls = {rank: numbered[number] for rank, numbered in of_group.items() if number in numbered}
    alike = Counter(_shape(each) for each in calls.values())

    def how_usual(rank: int) -> tuple:
        return alike[_shape(calls[rank])], *_times_before(of_group[rank], number)

    odd = min(calls, key=how_usual)
    peers = [rank for rank in calls if _shape(calls[rank]) != _shape(calls[odd])]
    same_kind = calls[odd].kind == calls[peers[0]].kind
    what = "the same collective with other sizes" if same_kind else "different collectives"
    return odd, (
        f"It has called {call(calls[odd])}, while rank {', '.join(map(str, peers))} called "
        f"{call(calls[peers[0]])}: {what}. Every rank must call the same ones in the same order"
        + (", with tensors of one size." if same_kind else "; look for a condition on the rank.")
    )


def _times_before(numbered: dict[int, Collective], number: int) -> list[int]:
    """How often a call and the few before it have come in this order before.

    For the longest order first, down to the call alone.
    """
    shapes = [_shape(numbered[each]) for each in sorted(numbered) if each <= number]
    times = []
    for length in range(CONTEXT + 1, 0, -1):
        order = shapes[-length:]
        earlier = range(len(shapes) - length)
        times.append(sum(shapes[start : start + length] == order for start in earlier))
    return times


def _wait_in_different_groups(waiting: dict[int, Collective]) -> tuple[int, str] | None:
    if len({each.group for each in waiting.values()}) < 2:
        return None
    rank = min(waiting)
    others = [each for each in waiting if waiting[each].group != waiting[rank].group]
    peer = others[0]
    return rank, (
        f"It waits in {call(waiting[rank])} of the process group {waiting[rank].group}, and rank "
        f"{peer} in {call(waiting[peer])} of {waiting[peer].group}. Ranks that are in several "
        "groups must use these in the same order."
    )
