"""What became of an attempt: plain functions of what is known of its ranks.

The headline is the rank that failed on its own, not the peer that noticed. A peer whose
connection broke is heard of first as often as not, and is known by its words (`CONSEQUENCE`).
"""

import re
from dataclasses import dataclass

from ddp_common.client import collectives
from ddp_common.client.collectives import Records
from ddp_common.client.known import Known

CONSEQUENCE = re.compile(
    r"Connection (closed|reset) by peer|Connection was likely closed|Broken pipe"
    r"|remote process exited|ncclRemoteError|Failed to recv|Socket closed|failed to connect"
)
COLLECTIVE = re.compile(r"_engine_run_backward|torch/distributed/|torch/nn/parallel/distributed")
INNERMOST_CALLS = 6  # lines of a stack that say whether a rank waits in a collective


@dataclass
class GoesOn:
    """Nothing is decided yet."""


@dataclass
class Finished:
    """Every rank has done its work."""


@dataclass
class Stopped:
    """Ranks have left because one was told to."""


@dataclass
class Failed:
    """A rank has failed.

    `is_consequence`: it has lost a peer, and why that one is gone is not known yet.
    """

    rank: int
    is_consequence: bool


@dataclass
class SchedulerGone:
    """The connection to the scheduler is lost, or somebody else has cancelled the tasks."""


Verdict = GoesOn | Finished | Stopped | Failed | SchedulerGone


def verdict(known: Known) -> Verdict:
    """What is to be said of an attempt now.

    A failure comes before everything else, then the scheduler's loss.
    """
    failed = known.failed()
    if failed:
        rank = min(failed, key=lambda each: is_consequence(known, each))
        consequence = is_consequence(known, rank)
        has_only_seen_peers_leave = consequence and known.stopped()
        if not has_only_seen_peers_leave:
            return Failed(rank, consequence)
    if known.scheduler_lost:
        return SchedulerGone()
    if not known.all_have_ended() and not known.left_before_training():
        return GoesOn()
    return Stopped() if known.stopped() else Finished()


def is_consequence(known: Known, rank: int) -> bool:
    """Whether a rank that failed says no more than that it has lost a peer."""
    said = f"{known.ended[rank].message} {known.uncaught.get(rank, '')}"
    return bool(CONSEQUENCE.search(said))


def waited_in_collective(known: Known, rank: int) -> bool:
    """Whether a rank that failed was in a collective, by its traceback."""
    return bool(COLLECTIVE.search(known.ended[rank].traceback))


# Ranks that make no progress


def stalled(known: Known, timeout: float | None, now: float) -> list[int]:
    """Ranks that live, have work to do, and have made no progress for `timeout` seconds.

    With a timeout of None there are none. While one is yet to start, the others rightly wait.
    """
    if timeout is None or timeout == 0:
        return []
    latest = now - timeout
    if not known.all_have_started() or known.last_started > latest:
        return []
    return [
        rank
        for rank, moved in known.moved.items()
        if moved < latest and rank not in known.ended and rank not in known.returned
    ]


def blame(
    known: Known,
    stuck: list[int],
    states: dict[int, str | None],
    stacks: dict[int, str],
    records: Records,
) -> tuple[int, str]:
    """Of ranks that are stalled, the one that keeps the others waiting, and why.

    The reason is a sentence or two. `states`: of the processes of all living ranks, None where a
    worker did not answer; `stacks`: where they are; `records`: the latest collectives of those
    that have said them. First come ranks that are stopped or gone, then one whose function has
    returned, one that called another collective than its peers, one that is not where the others
    wait, one that is behind.
    """
    elsewhere = [rank for rank in stuck if not is_in_collective(stacks[rank])]
    found = _cannot_go_on(known, stuck, states)
    if found is None and known.returned and not elsewhere:
        found = _returned_early(known, stuck)
    if found is None:
        difference = collectives.differ(records)
        if difference is None and not elsewhere:
            difference = collectives.in_different_groups(records)
        if difference is not None:
            return difference  # it names the collectives itself
        found = _is_late(known, stuck, elsewhere)
    rank, why = found
    return rank, why + _who_waits_where(rank, records)


def _cannot_go_on(
    known: Known, stuck: list[int], states: dict[int, str | None]
) -> tuple[int, str] | None:
    others = _what_others_do(known)
    for rank in stuck:
        if states[rank] is None:
            return rank, f"Its worker at {known.addresses[rank]} does not answer; {others}."
        if states[rank] in ("stopped", "tracing-stop"):
            return rank, f"Its process is stopped (SIGSTOP, or a debugger); {others}."
    return None


def _returned_early(known: Known, stuck: list[int]) -> tuple[int, str]:
    rank = min(known.returned)
    step = known.returned[rank].get("step", 0)
    peers = ", ".join(map(str, stuck))
    return rank, (
        f"Its function returned at step {step}, while rank {peers} went on and waits for it. "
        "Every rank must run the same number of steps."
    )


def _is_late(known: Known, stuck: list[int], elsewhere: list[int]) -> tuple[int, str]:
    others = _what_others_do(known)
    if elsewhere and len(elsewhere) < len(known.addresses):
        rank = elsewhere[0]
        step = known.step_of(rank)
        return rank, f"It is not in a collective at step {step}; {others} there."

    steps = {rank: known.step_of(rank) for rank in stuck}
    rank = min(stuck, key=lambda each: (steps[each], known.moved[each]))
    is_behind = steps[rank] < max(steps.values())
    return rank, f"It is at step {steps[rank]}; " + (
        f"{others}." if is_behind else "all ranks wait."
    )


def _what_others_do(known: Known) -> str:
    return "the others wait for it" if len(known.addresses) > 1 else "nothing goes on"


def _who_waits_where(blamed: int, records: Records) -> str:
    """In which collective a peer waits for the blamed rank, as a sentence; '' if unknown."""
    for rank, record in records.items():
        current = collectives.waits_in(record)
        if rank != blamed and current is not None:
            return f" Rank {rank} waits in {collectives.call(current)}."
    return ""


def is_in_collective(stack: str) -> bool:
    """Whether a rank is in a call of torch.distributed or in a backward, by its stack."""
    innermost = stack.splitlines()[:INNERMOST_CALLS]
    return bool(COLLECTIVE.search("\n".join(innermost)))
