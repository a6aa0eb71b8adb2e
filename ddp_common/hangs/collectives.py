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
Numbered = dict[int, Collective]  # of one rank in one process group, by their numbers


def waits_in(record: list[Collective]) -> Collective | None:
    """The first collective that a rank has begun and not finished."""
    for each in record:
        if not each.is_finished and not each.is_between_two:
            return each
    return None


def call(collective: Collective) -> str:
    """A collective in words, as 'all_reduce #41 of 4,096 floats (train.py:88)'."""
    text = f"{collective.kind} #{collective.number}"
    if collective.sizes:
        kind = "halves" if collective.dtype == "Half" else f"{collective.dtype.lower()}s"
        text += f" of {_elements(collective):,} {kind}"
    if collective.line:
        text += f" ({collective.line})"
    return text


def _elements(collective: Collective) -> int:
    return sum(math.prod(size) for size in collective.sizes)


def of_rank(record: list[Collective], is_in_torch: bool) -> str:
    """Which collective a rank has begun and not finished, or has finished last, in words.

    `is_in_torch`: by its stack it is in a call of torch.distributed, or in a backward.
    """
    current = waits_in(record)
    if current is not None:
        return f"has begun {call(current)} {current.seconds_ago:.0f} s ago, and not finished it"
    finished = [each for each in record if each.is_finished]
    last = f"; the last it has finished is {call(finished[-1])}" if finished else ""
    if is_in_torch:
        return f"is in a call that torch does not record, such as send or recv{last}"
    return f"is in no collective{last}"


def differ(records: Records) -> tuple[int, str] | None:
    """The rank that has called another collective than its peers, and that in a sentence.

    None where what was recorded shows no such call.
    """
    waiting = [waits_in(record) for record in records.values()]
    groups = {(each.group, *each.members) for each in waiting if each is not None}
    for group in sorted(groups):
        of_group = {rank: _numbered(record, group) for rank, record in records.items()}
        of_group = {rank: numbered for rank, numbered in of_group.items() if numbered}
        number = _first_difference(of_group)
        if number is not None:
            return _name(of_group, number)
    return None


def _numbered(record: list[Collective], group: tuple) -> Numbered:
    return {
        each.number: each
        for each in record
        if (each.group, *each.members) == group and not each.is_between_two
    }


def _first_difference(of_group: dict[int, Numbered]) -> int | None:
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
    return collective.kind, collective.dtype, _elements(collective)


def _name(of_group: dict[int, Numbered], number: int) -> tuple[int, str]:
    calls = {rank: numbered[number] for rank, numbered in of_group.items() if number in numbered}
    alike = Counter(_shape(each) for each in calls.values())
    since = max(min(numbered) for numbered in of_group.values())  # from here on all are known

    def how_usual(rank: int) -> tuple:
        return alike[_shape(calls[rank])], *_times_before(of_group[rank], since, number)

    odd = min(calls, key=how_usual)
    others = [rank for rank in calls if _shape(calls[rank]) != _shape(calls[odd])]
    peer = max(others, key=how_usual)
    peers = [rank for rank in others if _shape(calls[rank]) == _shape(calls[peer])]
    sentence = (
        f"It has called {call(calls[odd])}, while rank {', '.join(map(str, peers))} called "
        f"{call(calls[peer])}. {_what_to_do(calls[odd], calls[peer])}"
    )
    if how_usual(odd) == how_usual(peer):
        sentence += " Which of them is wrong cannot be told from the calls before."
    return odd, sentence


def _what_to_do(one: Collective, other: Collective) -> str:
    if one.kind != other.kind:
        return (
            "Every rank must call the same collectives in the same order; look for a condition on "
            "the rank."
        )
    if one.dtype != other.dtype:
        return "It is one collective with different dtypes: give all ranks tensors of one dtype."
    return "It is one collective with different sizes: give all ranks tensors of one size."


def _times_before(numbered: Numbered, since: int, number: int) -> list[int]:
    """How often a call and the few before it have come in this order before.

    For the longest order first, down to the call alone; collectives before `since` do not count.
    """
    shapes = [_shape(numbered[each]) for each in sorted(numbered) if since <= each <= number]
    times = []
    for length in range(CONTEXT + 1, 0, -1):
        order = shapes[-length:]
        earlier = range(len(shapes) - length)
        times.append(sum(shapes[start : start + length] == order for start in earlier))
    return times


def in_different_groups(records: Records) -> tuple[int, str] | None:
    """Of two ranks that wait for each other in two process groups, one, and that in a sentence.

    Both are members of both groups: otherwise each may rightly wait for somebody else.
    """
    waiting = {rank: waits_in(record) for rank, record in records.items()}
    for rank, one in sorted(waiting.items()):
        for peer, other in sorted(waiting.items()):
            if one is None or other is None or one.group == other.group:
                continue
            if {rank, peer} <= set(one.members) & set(other.members):
                return rank, (
                    f"It waits in {call(one)} of the process group {one.description}, and rank "
                    f"{peer} in {call(other)} of {other.description}. Ranks that are in several "
                    "groups must use these in the same order."
                )
    return None
