"""Of ranks that make no progress, the one that keeps the others waiting: a plain function.

`name_culprit` compares what the ranks have answered. Ranks must call the same collectives of a
process group in the same order. Where they have not, the first number at which they differ is
looked for, and the rank with the rarer call is named.
"""

import math
from collections import Counter

from dask_ranks.client.rank import RankState, numbers
from dask_ranks.messages import Collective

# Of psutil's words for a process, those of one that is suspended: by SIGSTOP, by a debugger
SUSPENDED = ("stopped", "tracing-stop")
FORKED = (
    "If the data set uses a library with threads (polars, h5py, some readers of zip files), that "
    'can hang in a forked worker: try ddp.DataLoader(…, multiprocessing_context="forkserver").'
)
CONTEXT = 2  # calls before one that tell a call that is usual there from one that is not
SAME_ON_ALL = ("all_reduce", "broadcast", "reduce", "allreduce_coalesced")  # sizes, that is


def name_culprit(ranks: list[RankState], stuck: list[RankState]) -> tuple[RankState, str]:
    """Of all ranks, the one that keeps the others waiting, and why, in a sentence or two.

    `stuck`: those that live, have work to do and make no progress. First come ranks that do not
    answer, then one whose function has returned, one that called another collective than its
    peers, one that is not where the others wait, one that is behind.
    """
    silent = _silent(ranks, stuck)
    if silent is not None:
        return silent
    # Also ranks that are not stuck: the others may wait for one that does something of its own.
    elsewhere = [
        rank
        for rank in ranks
        if (there := rank.whereabouts) and not (rank.has_returned or there.in_collective)
    ]
    returned = [rank for rank in ranks if rank.has_returned]
    different = _different_calls(ranks)
    if returned and not elsewhere:
        culprit, why = returned_early(returned, stuck, "waits for it")
    elif different is not None:
        return different  # it names the collectives itself
    else:
        some_are_elsewhere = bool(elsewhere) and len(elsewhere) < len(ranks)
        culprit = elsewhere[0] if some_are_elsewhere else min(stuck, key=lambda rank: rank.step)
        if culprit.whereabouts is not None and culprit.whereabouts.waits_for_loader:
            why = f"It waits for a worker of its DataLoader{_at_step(culprit)}. {FORKED}"
        elif some_are_elsewhere:
            why = f"It is not in a collective{_at_step(culprit)}."
        elif any(rank.step > culprit.step for rank in ranks):
            why = f"It is behind the others{_at_step(culprit)}."
        else:
            why = f"No rank is behind the others{_at_step(culprit)}."
    return culprit, why + _who_waits(culprit, ranks)


def _silent(ranks: list[RankState], stuck: list[RankState]) -> tuple[RankState, str] | None:
    for rank in ranks:
        has_answered = rank.whereabouts is not None  # maybe before its worker has
        if rank.how is not None or has_answered:
            continue
        if rank.process_state is None and rank in stuck:
            return rank, f"Its worker at {rank.address} does not answer."
        # Also one that is not stuck yet: its last progress may have come a moment after its peers'
        if rank.process_state in SUSPENDED and not rank.has_returned:
            return rank, "Its process is stopped (SIGSTOP, or a debugger)."
        if rank.process_state is not None and rank in stuck:
            return rank, (
                "Its process runs and does not answer: a call of C or C++ keeps Python's lock. "
                "`py-spy dump --native` on its host says which."
            )
    return None


def returned_early(
    returned: list[RankState], peers: list[RankState], what: str
) -> tuple[RankState, str]:
    """Of the ranks whose function has returned the one to blame, and why.

    `peers` went on, and `what` became of them then.
    """
    rank = returned[0]
    return rank, (
        f"It came to its end{_at_step(rank)}, while rank {numbers(peers)} went on and {what}. "
        "Every rank must run the same steps, and call checkpoint.save() and other collectives."
    )


def _calls(rank: RankState) -> list[Collective]:
    """The latest collectives of a rank, oldest first, as far as it has said them."""
    said = rank.whereabouts and rank.whereabouts.collectives
    return [Collective(**fields) for fields in said or []]


def _at_step(rank: RankState) -> str:
    """' at step 12'; '' where no step is known, as of a script that has steps of its own."""
    return f" at step {rank.step}" if rank.step else ""


def _different_calls(ranks: list[RankState]) -> tuple[RankState, str] | None:
    """The rank that has called another collective than its peers; None if no call differs.

    Of two, the one whose call has come less often after the same `CONTEXT` calls is named.
    """
    numbered, contexts = _by_number(ranks)
    usual = Counter(contexts.values())
    for key in sorted(numbered):
        calls = numbered[key]
        shapes = Counter(_shape(call) for call in calls.values())
        if len(shapes) == 1:
            continue
        rarest_first = sorted(
            calls, key=lambda rank: (shapes[_shape(calls[rank])], usual[contexts[rank, *key]])
        )
        rank, peer = rarest_first[0], rarest_first[-1]
        peers = [each for each in calls if _shape(calls[each]) == _shape(calls[peer])]
        return rank, (
            f"It has called {in_words(calls[rank])}, while rank {numbers(peers)} "
            f"called {in_words(calls[peer])}. Every rank must call the same collectives in the "
            "same order, with tensors of one size and dtype; look for a condition on the rank."
            + _forward_of_ddp(calls[rank], calls[peer])
        )
    return None


def _forward_of_ddp(*calls: Collective) -> str:
    """A sentence more where one is what DDP's forward calls; another may be a backward's."""
    if {call.kind for call in calls} not in ({"broadcast"}, {"broadcast", "all_reduce"}):
        return ""
    return (
        " A broadcast may be that of buffers in DDP's forward: to evaluate on some ranks only, "
        "call model.module."
    )


def _by_number(ranks: list[RankState]) -> tuple[dict, dict]:
    """Collectives by (process group, number in it), then by rank.

    And by (rank, process group, number) the shape of the call, after those of the calls before it.
    """
    numbered: dict[tuple, dict[RankState, Collective]] = {}
    contexts: dict[tuple, tuple] = {}
    for rank in ranks:
        before: dict[tuple, tuple] = {}
        for each in _calls(rank):
            if each.is_between_two:
                continue
            group = each.group, *each.members
            shapes = (*before.get(group, ()), _shape(each))[-CONTEXT - 1 :]
            before[group] = shapes
            numbered.setdefault((group, each.number), {})[rank] = each
            contexts[rank, group, each.number] = shapes
    return numbered, contexts


def _shape(collective: Collective) -> tuple:
    """What must be the same on all ranks."""
    if collective.kind not in SAME_ON_ALL:
        return (collective.kind,)
    return collective.kind, collective.dtype, _elements(collective)


def _elements(collective: Collective) -> int:
    return sum(math.prod(size) for size in collective.sizes)


def _waits_in(rank: RankState) -> Collective | None:
    """The first collective that a rank has begun and not finished."""
    going_on = (each for each in _calls(rank) if not each.is_finished and not each.is_between_two)
    return next(going_on, None)


def _who_waits(culprit: RankState, ranks: list[RankState]) -> str:
    """In which collective a peer waits for the culprit, as a sentence; '' if unknown."""
    for rank in ranks:
        current = _waits_in(rank)
        if rank is not culprit and current is not None:
            is_in_ddp = rank.whereabouts is not None and rank.whereabouts.in_forward
            more = _forward_of_ddp(current) if is_in_ddp else ""
            return f" Rank {rank.number} waits in {in_words(current)}.{more}"
    return ""


def is_for_good(ranks: list[RankState], stuck: list[RankState]) -> bool:
    """Whether no stuck rank can ever go on.

    Each waits in a collective for one whose function has returned, which has not begun it and
    never will; or all its ranks wait in it, and they have called different ones.
    """
    return all(
        current is not None and (_lacks_one(current, ranks) or _is_different(current, ranks))
        for current in map(_waits_in, stuck)
    )


def _lacks_one(current: Collective, ranks: list[RankState]) -> bool:
    """Whether a rank that should be in this collective has returned without it."""
    returned = [rank for rank in ranks if rank.has_returned and rank.whereabouts is not None]
    return any(
        peer.number in current.members
        and not any(
            each.group == current.group and each.number >= current.number for each in _calls(peer)
        )
        for peer in returned
    )


def _is_different(current: Collective, ranks: list[RankState]) -> bool:
    """Whether all ranks wait in the collective of this number, and not in the same one."""
    shapes = set()
    for rank in ranks:
        if rank.number in current.members:
            other = _waits_in(rank)
            if other is None or rank.whereabouts is None:
                return False
            is_there = (other.group, other.number) == (current.group, current.number)
            if not is_there or not rank.whereabouts.in_collective:
                return False
            shapes.add(_shape(other))
    return len(shapes) > 1


def in_words(collective: Collective) -> str:
    """A collective in words, as 'all_reduce #41 of 4,096 floats (train.py:88)'."""
    text = f"{collective.kind} #{collective.number}"
    if collective.sizes:
        kind = "halves" if collective.dtype == "Half" else f"{collective.dtype.lower()}s"
        text += f" of {_elements(collective):,} {kind}"
    if collective.description not in ("default_pg", "0", "undefined"):
        text += f" of the group {collective.description}"
    if collective.line:
        text += f" ({collective.line})"
    return text


def where_ranks_wait(ranks: list[RankState]) -> dict[int, str]:
    """Which collective each rank has begun and not finished, or has finished last, in words.

    By the number of the rank, of those that have said their collectives.
    """
    waits = {}
    for rank in ranks:
        answer = rank.whereabouts
        if answer is None or answer.collectives is None:
            continue
        current = _waits_in(rank)
        if current is not None:
            where = f"has begun {in_words(current)} {current.seconds_ago:.0f} s ago"
        elif answer.in_collective:
            where = "is in a call that torch does not record, such as send or recv"
        else:
            finished = [each for each in _calls(rank) if each.is_finished]
            last = f"; the last was {in_words(finished[-1])}" if finished else ""
            where = f"is in no collective{last}"
        waits[rank.number] = where
    return waits
