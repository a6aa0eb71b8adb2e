"""What became of an attempt: plain functions of what is known of its ranks.

The headline is the rank that failed on its own, not the peer that noticed. A peer whose
connection broke is heard of first as often as not, and is known by its words (`CONSEQUENCE`).
"""

import re
from dataclasses import dataclass

from ddp_common.client.known import Known
from ddp_common.hangs.blame import COLLECTIVE

CONSEQUENCE = re.compile(
    r"Connection (closed|reset) by peer|Connection was likely closed|Broken pipe"
    r"|remote process exited|ncclRemoteError|Failed to recv|Socket closed|failed to connect"
)


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
