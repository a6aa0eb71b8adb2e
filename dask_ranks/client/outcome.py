"""What became of an attempt: from what is known of its ranks to an exception in words.

Plain functions of an `AttemptState`, which takes in events. The headline is the rank that failed
on its own, not the peer that noticed: a peer whose connection broke is heard of first as often as
not. It says so itself (`Ended.lost_peer`), unless its process is gone before it could.
"""

import base64
import contextlib
import pickle
import re
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from dask_ranks.client import signals
from dask_ranks.client.rank import RankState, numbers
from dask_ranks.client.rpc import CONNECTION_LOST, RESTARTED
from dask_ranks.client.stalls import returned_early
from dask_ranks.messages import CheckpointSaved, Ended, Message, Started
from dask_ranks.rank.last_word import LOST_PEER
from dask_ranks.run.job import LaunchEnded, RankFailed, RankStalled, RunStopped, SchedulerLost
from ddp_common.checkpoint_files import step_of
from ddp_common.errors import Error

WORKER_ENDED = {  # a job that is cancelled comes as either
    "lost": "its worker died or cannot be reached",
    "cancelled": "its worker was closed",
}
PROGRESS_IS = (
    "Progress is a step of a sampler or an optimizer, a batch of an evaluation, a collective that "
    "ends, a report, a saved file. For work that takes longer: launch(…, stall_timeout=3600), or "
    "ddprun --stall-timeout 3600."
)
# What C++ prints of an exception that nobody catches, before it aborts
UNCAUGHT = re.compile(r"\s*what\(\):\s*(.+)")
OTHER_SIZE = "op.preamble.length <= op.nbytes"  # gloo's words for a tensor of another size
# What faulthandler prints of a thread of a rank that a signal kills
DUMP_OF_THREAD = re.compile(r"(Current thread|Thread) 0x\w+ .*\(most recent call first\):")
OUTERMOST_OF_RANK = re.compile(r'rank/(life|process)\.py", line \d+ in (_call|main)$')


class AttemptState:
    """What is known of an attempt. Times are those of `time.monotonic()` on the client."""

    def __init__(self, addresses: list[str], directory: Path, is_script: bool = False):
        self.ranks = [RankState(*each, each[1]) for each in enumerate(addresses)]
        self.directory = directory  # of the run
        self.is_script = is_script  # what the ranks run, whose lines are shown as they come
        self.last_started = 0.0  # when the last of them did
        self.ended: list[RankState] = []  # in the order in which it was heard of
        self.is_cancelled = False  # its tasks were, and not by us
        self.why_cancelled: str | None = None  # Dask's word for it

    def take(self, number: int, message: Message, now: float) -> None:
        """Take note of a message of a rank."""
        if self.is_script and message == Ended("exited", exitcode=0):
            message.how = "done"  # it left by `os._exit(0)`, which torchrun takes for its end
        self.ranks[number].take(message, now)
        match message:
            case Started():
                self.last_started = now
            case CheckpointSaved():
                for rank in self.ranks:  # all have done what it holds
                    rank.step = max(rank.step, step_of(Path(message.name)))
            case Ended():
                self._note_end(self.ranks[number])

    def lose_worker(self, address: str) -> None:
        """Take note that the scheduler has lost a worker, whoever's it is."""
        for rank in self.ranks:
            if rank.address == address:
                rank.lose_worker()
                self._note_end(rank)

    def _note_end(self, rank: RankState) -> None:
        if rank not in self.ended:
            self.ended.append(rank)

    def cancel(self, reason: str | None) -> None:
        """Take note that the tasks were cancelled, not by us; `reason` is Dask's word for why."""
        self.is_cancelled = True
        self.why_cancelled = reason

    def failed(self) -> list[RankState]:
        no_failure = {"done", "stopped"} | ({"cancelled"} if self.is_cancelled else set())
        return [rank for rank in self.ended if rank.how not in no_failure]

    def stopped(self) -> list[RankState]:
        return [rank for rank in self.ended if rank.how == "stopped"]

    def returned(self) -> list[RankState]:
        return [rank for rank in self.ranks if rank.has_returned]

    def unstarted(self) -> list[RankState]:
        return [rank for rank in self.ranks if not rank.has_started]

    def stalled(self, timeout: float | None, now: float) -> list[RankState]:
        """Ranks that live, have work to do, and have made no progress for `timeout` seconds.

        Without a timeout there are none. While one is yet to start, the others rightly wait.
        """
        if not timeout or self.unstarted() or self.last_started > now - timeout:
            return []
        at_work = [rank for rank in self.ranks if rank.how is None and not rank.has_returned]
        return [rank for rank in at_work if (rank.moved or 0) < now - timeout]


class Outcome(Enum):
    """What is to be said of an attempt that has not failed."""

    GOES_ON = "nothing is decided yet"
    FINISHED = "every rank has done its work"
    STOPPED = "ranks have left because one was told to"
    CANCELLED = "the scheduler is lost, or somebody else has cancelled the tasks"


@dataclass
class Failed:
    """A rank has failed.

    `is_consequence`: it has lost a peer, and why that one is gone is not known yet.
    """

    rank: RankState
    is_consequence: bool


def outcome(state: AttemptState) -> Outcome | Failed:
    """What is to be said of an attempt now: a failure comes before everything else."""
    failed = state.failed()
    if failed:
        rank = min(failed, key=_is_consequence)
        is_consequence = _is_consequence(rank)
        has_only_seen_peers_leave = is_consequence and state.stopped()
        if not has_only_seen_peers_leave:
            return Failed(rank, is_consequence)
    if state.is_cancelled:
        return Outcome.CANCELLED
    # Ranks that left before training had begun: the others may wait for ever. Those of a script
    # have time to end.
    left_before_training = [rank for rank in state.stopped() if not rank.ended.has_begun]
    is_over = left_before_training and not state.is_script
    if len(state.ended) < len(state.ranks) and not is_over:
        return Outcome.GOES_ON
    return Outcome.STOPPED if state.stopped() else Outcome.FINISHED


def _is_consequence(rank: RankState) -> bool:
    """Whether a rank that failed says no more than that it has lost a peer."""
    return rank.ended.lost_peer or bool(LOST_PEER.search(_uncaught(rank)))


def _uncaught(rank: RankState) -> str:
    """What a rank that has aborted printed of an exception of C++; '' for any other rank."""
    if rank.ended.exitcode != -signal.SIGABRT:
        return ""
    found = [match[1] for match in map(UNCAUGHT.match, rank.lines) if match]
    return found[-1] if found else ""


# In words


def rank_failed(state: AttemptState, rank: RankState) -> RankFailed:
    """The exception for a rank that failed, with the traceback and the last lines of all ranks."""
    end = rank.ended
    returned = state.returned()
    if returned and _is_consequence(rank):
        culprit, why = returned_early(returned, [rank], "lost the connection to it")
        where = f"Where rank {rank.number} was:\n{end.traceback}"
        text = _full_text(state, culprit, f"failed. {why}", where)
        return RankFailed(text, **_attributes(state, culprit))
    what = f"failed: {_cause(rank)}"
    # On a line of its own: how many of them are heard of in time differs.
    failed = state.failed()
    peers = [peer for peer in state.ranks if peer in failed and peer is not rank]
    consequences = numbers([peer for peer in peers if _is_consequence(peer)])
    if consequences:
        what += f"\nAs a consequence, rank {consequences} lost the connection to it."
    others = numbers([peer for peer in peers if not _is_consequence(peer)])
    if others:
        what += f"\nRank {others} failed, too: see the log."
    if rank.step:
        what += f"\nIts last known step is {rank.step}."
    where, lines = end.traceback, list(rank.lines)
    if end.exitcode is not None and end.exitcode < 0:
        lines, where = _without_dump(lines)
    failure = RankFailed(
        _full_text(state, rank, what, where, lines),
        exitcode=end.exitcode,
        signal=_signal_name(end),
        traceback=end.traceback,
        **_attributes(state, rank),
    )
    if end.exception:
        # A class that the client cannot import, a tensor on a GPU that it does not have
        with contextlib.suppress(Exception):
            failure.__cause__ = pickle.loads(base64.b64decode(end.exception))
    return failure


def _without_dump(lines: list[str]) -> tuple[list[str], str]:
    """What a rank printed before a signal killed it, and where it was: the frames of its own.

    Of what faulthandler prints, the stacks of other threads and of the launcher are left out.
    """
    headers = [number for number, line in enumerate(lines) if DUMP_OF_THREAD.match(line)]
    for header, following in zip(headers, [*headers[1:], len(lines)]):
        stack = lines[header + 1 : following]
        outermost = [number for number, line in enumerate(stack) if OUTERMOST_OF_RANK.search(line)]
        if outermost:
            frames = "\n".join(stack[: outermost[0]])
            return lines[: headers[0]], f"Where it was, innermost call first:\n{frames}"
    return lines, ""


def _cause(rank: RankState) -> str:
    """Why a rank has failed: in the headline, and in the log."""
    end = rank.ended
    if end.how == "raised":
        return end.message
    if end.how in WORKER_ENDED:
        why = f" ({end.message})" if end.message else ""
        return f"{WORKER_ENDED[end.how]}{why}"
    if end.exitcode is None:
        return "the process that forked it was killed, often as memory ran out, and it with that"
    if end.exitcode >= 0:
        return f"it left with exit code {end.exitcode} before it had finished"
    why = _uncaught(rank)
    if OTHER_SIZE in why:
        why = (
            "it got a tensor of another size than it waits for. Ranks have called different "
            f"collectives, or the same one with tensors of different sizes. ({why})"
        )
    why = f": {why}" if why else ""
    if end.exitcode == -signal.SIGKILL:
        why = ", often because memory ran out"
    return f"killed by {_signal_name(end)}{why}"


def in_log(rank: RankState) -> str:
    """How a rank ended, as a line of the log; with a traceback, lines."""
    end = rank.ended
    if end.how == "cancelled":
        return "was ended: another rank had failed, the launch was ended, or its worker closed"
    if end.how == "stopped":
        why = ": it got SIGTERM" if end.got_sigterm else ", as the others did"
        return f"left after step {end.step}{why}"
    verb = "failed:" if _signal_name(end) is None else "was"  # … killed by SIGTERM
    return f"{verb} {_cause(rank)}\n{end.traceback}".rstrip()


def _signal_name(end: Ended) -> str | None:
    if end.exitcode is None or end.exitcode >= 0:
        return None
    try:
        return signal.Signals(-end.exitcode).name
    except ValueError:  # a realtime signal, which has no name
        return f"signal {-end.exitcode}"


def rank_stalled(
    state: AttemptState,
    rank: RankState,
    why: str,
    timeout: float,
    waits: dict[int, str],
    stacks: dict[int, str],
) -> RankStalled:
    """The exception for a rank that makes no progress.

    `waits` says in which collective each rank waits, `stacks` where it is.
    """
    what = f"stalled: no progress for {timeout:g} s. {why}"
    if rank.has_started:
        what += f"\n{PROGRESS_IS}"
    return RankStalled(
        _full_text(state, rank, what, where_all_are(waits, stacks)),
        collectives=waits,
        stacks=stacks,
        **_attributes(state, rank),
    )


def where_all_are(waits: dict[int, str], stacks: dict[int, str]) -> str:
    """The collectives and the stacks of all ranks that have answered."""
    parts = []
    if waits:
        lines = "\n".join(f"  rank {rank} {what}" for rank, what in waits.items())
        parts.append(f"Collectives:\n{lines}")
    listed = "\n".join(f"[rank {rank}]\n{stack}" for rank, stack in stacks.items())
    parts.append(f"Where each rank is, innermost call first:\n{listed}")
    return "\n\n".join(parts)


def _full_text(
    state: AttemptState, rank: RankState, what: str, where: str, own_lines: list[str] | None = None
) -> str:
    """The headline first, the cause last: a terminal shows the end.

    `own_lines`: those of the rank itself, where not all are to be shown.
    """
    parts = [
        f"Rank {rank.number} of {len(state.ranks)} on {rank.host} {what}",
        f"The whole log: {state.directory / 'log.txt'}",
    ]
    lines: dict[int, Iterable[str]] = {each.number: each.lines for each in state.ranks}
    if own_lines is not None:
        lines[rank.number] = own_lines
    said = [f"\n  [rank {number}] {line}" for number in lines for line in lines[number]]
    if said and not state.is_script:
        parts.append(f"Last lines of the ranks:{''.join(said)}")
    parts.append(where.strip("\n"))
    return "\n\n".join(part for part in parts if part)


def _attributes(state: AttemptState, rank: RankState) -> dict[str, Any]:
    return {
        "rank": rank.number,
        "host": rank.host,
        "logs": {each.number: list(each.lines) for each in state.ranks},
        "directory": state.directory,
    }


def run_stopped(state: AttemptState) -> RunStopped:
    """The exception for ranks that left because they were told to."""
    step = max(rank.ended.step for rank in state.stopped())
    left = f" after step {step}" if step else ""
    asked = [rank for rank in state.ranks if rank in state.stopped() and rank.ended.got_sigterm]
    who = "no rank that has left says that it got SIGTERM itself"
    if asked:
        why = " ".join(["got SIGTERM", asked[0].ended.message]).rstrip()
        who = f"rank {numbers(asked)} on {asked[0].host} {why}"
    if signals.stop_requested:
        who = "this program got SIGTERM"
    return RunStopped(
        f"The run was told to stop: {who}. All ranks left{left}.",
        step=step,
        directory=state.directory,
    )


def cancelled(state: AttemptState, scheduler: str, is_connected: bool) -> Error:
    """The exception for an attempt that lost its scheduler, or that somebody else has ended."""
    if not is_connected or state.why_cancelled == CONNECTION_LOST:
        return SchedulerLost(
            f"The connection to Dask's scheduler at {scheduler} was lost or closed. The ranks end "
            f"by themselves.\nWhat was saved is in {state.directory}: connect again, and launch "
            "with directory= to go on.",
            directory=state.directory,
        )
    what = "The tasks of the ranks were cancelled from outside (client.cancel)"
    if state.why_cancelled == RESTARTED:
        what = "The cluster was restarted (client.restart)"
    return LaunchEnded(
        f"{what} while this launch was running, which ended its ranks.\nWhat was saved is in "
        f"{state.directory}: launch with directory= to go on.",
        directory=state.directory,
    )
