"""Of ranks that wait for each other, the one that keeps the others waiting: a plain function."""

import re
from dataclasses import dataclass

from ddp_common.hangs import collectives
from ddp_common.hangs.collectives import Records
from ddp_common.messages import SUSPENDED

COLLECTIVE = re.compile(r"_engine_run_backward|torch/distributed/|torch/nn/parallel/distributed")
INNERMOST_CALLS = 6  # lines of a stack that say whether a rank waits in a collective


@dataclass
class Standstill:
    """What is known of ranks that have stopped making progress, everything by rank."""

    places: list[str]  # who is silent if a rank does not answer: 'worker at tcp://…', 'process'
    stuck: list[int]  # ranks that live, have work to do and make no progress
    steps: dict[int, int]  # the last step that is known
    moved: dict[int, float]  # when it last made progress, in any one clock (s)
    returned: dict[int, int]  # its function has returned, at this step
    states: dict[int, str | None]  # of the process, in psutil's words; None: no answer
    stacks: dict[int, str]  # of Python, innermost call first
    records: Records  # the latest collectives of those that have said them


def blame(standstill: Standstill) -> tuple[int, str]:
    """The rank that keeps the others waiting, and why, in a sentence or two.

    First come ranks that are suspended or gone, then one whose function has returned, one that
    called another collective than its peers, one that is not where the others wait, one that is
    behind.
    """
    records = standstill.records
    # Also ranks that are not stuck: the others may wait for one that does something of its own.
    elsewhere = [
        rank
        for rank, state in sorted(standstill.states.items())
        if state is not None
        and rank not in standstill.returned
        and not is_in_collective(standstill.stacks[rank])
    ]
    found = _cannot_go_on(standstill)
    if found is None and standstill.returned and not elsewhere:
        found = _returned_early(standstill)
    if found is None:
        difference = collectives.differ(records)
        if difference is None and not elsewhere:
            difference = collectives.in_different_groups(records)
        if difference is not None:
            return difference  # it names the collectives itself
        found = _is_late(standstill, elsewhere)
    rank, why = found
    return rank, why + _who_waits_where(rank, records)


def _cannot_go_on(standstill: Standstill) -> tuple[int, str] | None:
    others = _what_others_do(standstill)
    for rank in standstill.stuck:
        if standstill.states[rank] is None:
            return rank, f"Its {standstill.places[rank]} does not answer; {others}."
    # Also one that is not stuck yet: its last progress may have come a moment after its peers'.
    for rank, state in sorted(standstill.states.items()):
        if state in SUSPENDED and rank not in standstill.returned:
            return rank, f"Its process is stopped (SIGSTOP, or a debugger); {others}."
    return None


def _returned_early(standstill: Standstill) -> tuple[int, str]:
    rank = min(standstill.returned)
    step = standstill.returned[rank]
    peers = ", ".join(map(str, standstill.stuck))
    return rank, (
        f"Its function returned at step {step}, while rank {peers} went on and waits for it. "
        "Every rank must run the same number of steps."
    )


def _is_late(standstill: Standstill, elsewhere: list[int]) -> tuple[int, str]:
    others = _what_others_do(standstill)
    if elsewhere and len(elsewhere) < len(standstill.places):
        rank = elsewhere[0]
        return (
            rank,
            f"It is not in a collective at step {_step(standstill, rank)}; {others} there.",
        )

    steps = {rank: _step(standstill, rank) for rank in standstill.stuck}
    rank = min(standstill.stuck, key=lambda each: (steps[each], standstill.moved[each]))
    is_behind = steps[rank] < max(steps.values())
    return rank, f"It is at step {steps[rank]}; " + (
        f"{others}." if is_behind else "all ranks wait."
    )


def _step(standstill: Standstill, rank: int) -> int:
    return standstill.steps.get(rank, 0)


def _what_others_do(standstill: Standstill) -> str:
    return "the others wait for it" if len(standstill.places) > 1 else "nothing goes on"


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


def where_all_are(records: Records, stacks: dict[int, str]) -> tuple[dict[int, str], str]:
    """In which collective each rank waits, as far as it has said, and that with all stacks."""
    waits = {
        rank: collectives.of_rank(record, is_in_collective(stacks[rank]))
        for rank, record in records.items()
    }
    listed = "\n".join(f"[rank {rank}]\n{stack}" for rank, stack in stacks.items())
    text = f"Where each rank is, innermost call first:\n{listed}"
    if waits:
        lines = "\n".join(f"  rank {rank} {what}" for rank, what in waits.items())
        text = f"Collectives:\n{lines}\n\n{text}"
    return waits, text
