"""What is said to a person of how an attempt ended.

These are the exceptions that `launch` raises, and lines of the log.
"""

import signal
from pathlib import Path
from typing import Any

from ddp_common.client.known import RESTARTED, Known
from ddp_common.client.verdict import is_consequence, waited_in_collective
from ddp_common.errors import Error, RankFailed, RankStalled, RunStopped, SchedulerLost
from ddp_common.messages import Ended
from ddp_common.ranks.checkpoint_files import step_of
from ddp_common.ranks.process import unpickle_exception

OTHER_SIZE = "op.preamble.length <= op.nbytes"  # gloo's words for it


def rank_failed(known: Known, rank: int, directory: Path) -> RankFailed:
    """The exception for a rank that failed, with the traceback and the last lines of all ranks."""
    end = known.ended[rank]
    if known.returned and is_consequence(known, rank) and waited_in_collective(known, rank):
        return _returned_early(known, rank, directory)
    what = f"failed: {_cause(end, known.uncaught.get(rank))}"
    # On a line of its own: how many of them are heard of in time differs.
    consequences = [str(peer) for peer in sorted(known.failed()) if peer != rank]
    if consequences:
        what += f"\nAs a consequence, rank {', '.join(consequences)} lost the connection to it."
    if known.step_of(rank):
        what += f"\nIts last known step is {known.step_of(rank)}."
    failure = RankFailed(
        _full_text(known, rank, what, _where_it_was(end), directory),
        exitcode=end.exitcode,
        signal=_signal_name(end),
        traceback=end.traceback,
        **_attributes(known, rank, directory),
    )
    if end.exception:
        failure.__cause__ = unpickle_exception(end.exception)
    return failure


def _where_it_was(end: Ended) -> str:
    """The traceback of a rank that has raised.

    Python ends one with the message. That of an `Error` can be long, and stands above already.
    """
    frames, repeated, after = end.traceback.rpartition(f"ddp_common.errors.Error: {end.message}")
    if repeated and not after.strip():
        return frames
    return end.traceback


def _cause(end: Ended, uncaught: str | None) -> str:
    """`uncaught`: what it printed of an exception of C++ that nobody has caught."""
    if end.how == "lost":
        return "its worker died or cannot be reached"
    if end.how == "cancelled":
        return "its worker was closed"
    if end.how == "raised":
        return end.message
    killed_by = _signal_name(end)
    if killed_by == "SIGKILL":
        return f"killed by {killed_by}, often because memory ran out"
    if killed_by == "SIGABRT" and uncaught is not None:
        if OTHER_SIZE in uncaught:
            return (
                "it got a tensor of another size than it waits for. Ranks have called different "
                "collectives, or the same one with tensors of different sizes. (killed by "
                f"SIGABRT: {uncaught})"
            )
        return f"killed by SIGABRT: {uncaught}"
    if killed_by:
        return f"killed by {killed_by}"
    return f"it left with exit code {end.exitcode} before its function returned"


def _signal_name(end: Ended) -> str | None:
    if end.exitcode is None or end.exitcode >= 0:
        return None
    return signal.Signals(-end.exitcode).name


def _returned_early(known: Known, waiting: int, directory: Path) -> RankFailed:
    """For a rank that went on alone.

    Its peer is to blame, whose function has returned too soon.
    """
    rank = min(known.returned)
    step = known.returned[rank].get("step", 0)
    what = (
        f"failed: its function returned at step {step}, while rank {waiting} went on and lost the "
        "connection to it. Every rank must run the same number of steps."
    )
    details = f"Where rank {waiting} was:\n{known.ended[waiting].traceback}"
    return RankFailed(
        _full_text(known, rank, what, details, directory), **_attributes(known, rank, directory)
    )


def rank_stalled(
    known: Known,
    rank: int,
    why: str,
    details: str,
    waits: dict[int, str],
    stacks: dict[int, str],
    timeout: float,
    directory: Path,
) -> RankStalled:
    """The exception for a rank that makes no progress.

    `waits` says in which collective each rank waits, `stacks` where it is, `details` both.
    """
    what = f"stalled: no progress for {timeout:g} s. {why}"
    return RankStalled(
        _full_text(known, rank, what, details, directory),
        collectives=waits,
        stacks=stacks,
        **_attributes(known, rank, directory),
    )


def _full_text(known: Known, rank: int, what: str, details: str, directory: Path) -> str:
    host = known.hosts.get(rank, known.addresses[rank])
    parts = [f"Rank {rank} of {len(known.addresses)} on {host} {what}", details.strip()]
    said = [f"\n  [rank {peer}] {line}" for peer, lines in known.lines.items() for line in lines]
    if said:
        parts.append(f"Last lines of the ranks:{''.join(said)}")
    parts.append(f"The whole log: {directory / 'log.txt'}")
    return "\n\n".join(part for part in parts if part)


def _attributes(known: Known, rank: int, directory: Path) -> dict[str, Any]:
    host = known.hosts.get(rank, known.addresses[rank])
    return {"rank": rank, "host": host, "logs": known.lines, "directory": directory}


def who_was_told(known: Known) -> list[int]:
    """Of the ranks that have left, those that got SIGTERM themselves, in order."""
    return sorted(rank for rank in known.stopped() if known.ended[rank].told)


def last_step(known: Known) -> int:
    """The step after which the ranks have left."""
    return max(known.ended[rank].step for rank in known.stopped())


def run_stopped(known: Known, newest: Path | None, directory: Path) -> RunStopped:
    """The exception for ranks that left because they were told to.

    `newest` is the last good checkpoint.
    """
    step = last_step(known)
    left = "before the first step"
    if step:
        saved = "there is no checkpoint"
        if newest is not None:
            saved = f"the newest checkpoint is that of step {step_of(newest)}"
        left = f"after step {step}; {saved}"
    return RunStopped(
        f"The run was told to stop: {_who_got_sigterm(known)}. All ranks left {left}.",
        step=step,
        directory=directory,
    )


def _who_got_sigterm(known: Known) -> str:
    told = who_was_told(known)
    if not told:
        return "no rank that has left says that it got SIGTERM itself"
    return f"rank {', '.join(map(str, told))} on {known.hosts[told[0]]} got SIGTERM"


def in_log_of_a_stop(known: Known) -> str:
    """How ranks that were told to stop have left, as a line of the log."""
    return f"stopped after step {last_step(known)}: {_who_got_sigterm(known)}"


def scheduler_lost(address: str, directory: Path) -> SchedulerLost:
    return SchedulerLost(
        f"The connection to Dask's scheduler at {address} was lost or closed. The ranks end by "
        f"themselves. What was saved is in {directory}; connect again and launch with directory= "
        "to go on.",
        directory=directory,
    )


def what_was_cancelled(known: Known) -> str:
    if known.cancelled_by == RESTARTED:
        return "The cluster was restarted (client.restart)"
    return "The tasks of the ranks were cancelled from outside (client.cancel)"


def cancelled(known: Known, directory: Path) -> Error:
    """The exception for an attempt that somebody else has ended, through Dask."""
    error = Error(
        f"{what_was_cancelled(known)} while this launch was running, which ended its ranks. What "
        f"was saved is in {directory}; launch with directory= to go on. To end a launch, "
        "interrupt it."
    )
    error.directory = directory
    return error


def unreadable_result(reason: Exception, directory: Path) -> Error:
    """The exception for a result that cannot be loaded in this process."""
    error = Error(
        f"All ranks finished, but what rank 0 returned cannot be loaded in this process: "
        f"{type(reason).__name__}: {reason}. A class in it must be importable here too; tensors, "
        "numbers, a state_dict, lists and dicts of these always are. What was saved is in "
        f"{directory}."
    )
    error.directory = directory
    return error


def in_log(end: Ended) -> str:
    """How a rank ended, as a line of the log; with a traceback, lines."""
    if end.how == "raised":
        return f"failed: {end.message}\n{_where_it_was(end)}".rstrip()
    if end.how == "stopped":
        why = ": it got SIGTERM" if end.told else ", as the others did"
        return f"left after step {end.step}{why}"
    killed_by = _signal_name(end)
    if killed_by:
        return f"was killed by {killed_by}"
    return f"left with exit code {end.exitcode} before its function returned"
