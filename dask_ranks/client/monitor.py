"""Follow the ranks of an attempt until it is known how it ends, and end them.

Promises: the first failure ends the attempt, and the rank that caused it is the one that is named;
a rank that makes no progress is found; after `end` the ranks are gone, and checkpoints are here.
"""

import contextlib
import io
import math
import time
from typing import Any

from distributed import CancelledError

from dask_ranks.client import outcome, signals, stalls
from dask_ranks.client.attempt import CAUSE_TIMEOUT, Attempt
from dask_ranks.client.outcome import Failed, Outcome
from dask_ranks.client.rank import RankState, numbers
from dask_ranks.client.rpc import ask_each
from dask_ranks.run.job import LaunchEnded, RunStopped
from dask_ranks.worker import agent
from ddp_common.errors import Error

LOOK_INTERVAL = 0.5  # seconds
SIGTERM_TIMEOUT = 30  # seconds that a script has to end
START_TIMEOUT = 600  # seconds that a rank may take to start
CAUSE_TIMEOUT_WHEN_RETURNED = 0.2  # where a peer whose function has returned is the likely cause
RETURNED_TIMEOUT = 10  # seconds that others may make no progress once a function has returned
QUIET_TIMEOUT = 30  # the same before; then it is looked for ranks that wait for ever
GONE_TIMEOUT = 7  # seconds to wait for ranks to be gone: an agent takes longer if one stays
UNSTARTED_TIMEOUT = 1  # the same for ranks that have not started, which may say nothing
WHEREABOUTS_TIMEOUT = 20  # seconds that ranks have to say where they are, on a busy machine
SHORT_WHEREABOUTS_TIMEOUT = 5  # the same where it is not the end


def follow(attempt: Attempt) -> Any:
    """Take in messages until every rank is done; returns rank 0's result.

    Raises at the first failure.
    """
    looked = time.monotonic()
    decision = outcome.outcome(attempt.state)
    while decision is Outcome.GOES_ON:
        attempt.recorder.call_on_report()  # which may take long: before others are judged
        attempt.take_in(LOOK_INTERVAL)
        if time.monotonic() - looked > LOOK_INTERVAL:
            looked = time.monotonic()
            _look_around(attempt)
        decision = outcome.outcome(attempt.state)
        if isinstance(decision, Failed) and decision.is_consequence:
            decision = _wait_for_the_cause(attempt)
    if isinstance(decision, Failed):
        raise attempt.failure_of(decision.rank)
    if decision is Outcome.CANCELLED:
        raise attempt.cancelled()
    if decision is Outcome.STOPPED:
        stopped = outcome.run_stopped(attempt.state)
        attempt.directory.log(str(stopped))
        raise stopped
    return _result(attempt)


def _wait_for_the_cause(attempt: Attempt) -> Failed | Outcome:
    """All ranks that failed have lost a peer: wait a moment for the one that did not."""
    timeout = CAUSE_TIMEOUT_WHEN_RETURNED if attempt.state.returned() else CAUSE_TIMEOUT

    def is_known() -> bool:
        decision = outcome.outcome(attempt.state)
        return not isinstance(decision, Failed) or not decision.is_consequence

    attempt.wait_until(is_known, timeout)
    return outcome.outcome(attempt.state)


def _look_around(attempt: Attempt) -> None:
    """Act on what no message says: this program shall stop, or a rank makes no progress."""
    stall_timeout = attempt.job.stall_timeout
    now = time.monotonic()
    state = attempt.state
    if signals.interrupted:
        raise KeyboardInterrupt
    unstarted = state.unstarted()
    some_have_started = len(unstarted) < len(state.ranks)
    if attempt.job.is_script:
        if some_have_started and (signals.stop_requested or state.stopped()):
            _stop_script(attempt, now)
    elif signals.stop_requested and some_have_started and not state.stopped():
        # To one at work, which has the others leave with it; again until it is heard
        at_work = [rank.address for rank in state.ranks if not rank.has_returned]
        ask_each(attempt.client, agent.tell_to_stop, workers=at_work[:1])
    if unstarted and now - attempt.submitted > attempt.job.timeout:
        _refuse_busy(attempt, unstarted[0])
    if unstarted and now - max(attempt.submitted, state.last_started) > START_TIMEOUT:
        why = "It has not started: is its host overloaded, or the disk slow that has torch?"
        raise outcome.rank_stalled(state, unstarted[0], why, START_TIMEOUT, {}, {})
    stuck = state.stalled(stall_timeout, now)
    if stuck:
        _ask_where_ranks_are(attempt)
        # A rank that has failed meanwhile is the cause
        if outcome.outcome(state) is Outcome.GOES_ON:
            raise _stalled(attempt, stuck, stall_timeout or math.inf)
    elif stall_timeout and len(state.ranks) > 1:
        quiet = RETURNED_TIMEOUT if state.returned() else QUIET_TIMEOUT
        stuck = state.stalled(quiet, now) if now > attempt.asked + quiet else []
        if stuck:
            is_first = not attempt.asked
            attempt.asked = now
            _ask_where_ranks_are(attempt, SHORT_WHEREABOUTS_TIMEOUT)
            is_undecided = outcome.outcome(state) is Outcome.GOES_ON
            if is_undecided and stalls.is_for_good(state.ranks, stuck):
                raise _stalled(attempt, stuck, quiet)
            if is_first:
                attempt.recorder.progress.note(
                    f"No progress for {quiet} s: rank {numbers(stuck)}. The run goes on, and ends "
                    f"after {stall_timeout:g} s without progress (stall_timeout)."
                )


def _stop_script(attempt: Attempt, now: float) -> None:
    """Send SIGTERM to all ranks, once: each may have a handler of its own.

    They have `SIGTERM_TIMEOUT` seconds to end, as under torchrun.
    """
    if attempt.told_to_stop is None:
        attempt.told_to_stop = now
        ask_each(attempt.client, agent.tell_to_stop, workers=attempt.addresses)
    elif now > attempt.told_to_stop + SIGTERM_TIMEOUT:
        raise RunStopped(
            f"The run was told to stop, and ranks were ended as they did not end within "
            f"{SIGTERM_TIMEOUT} s of SIGTERM.",
            step=0,
            directory=attempt.directory.path,
        )


def _refuse_busy(attempt: Attempt, rank: RankState) -> None:
    """Raise `Error` if the worker of this rank, which has not started, executes other tasks."""
    assert rank.task is not None, "it was submitted"
    with contextlib.suppress(OSError):  # a lost scheduler is heard of otherwise
        there = attempt.client.processing().get(rank.address, ())
        tasks = [str(key) for key in there if key != rank.task.key]
        if tasks:
            raise Error(
                f"The worker at {rank.address} was busy for {attempt.job.timeout:g} s with "
                f"{', '.join(tasks)}, so rank {rank.number} could not start. Wait for these "
                "tasks, or start more workers; where they are to run beside ranks, give workers "
                "more threads (threads_per_worker)."
            )


def _ask_where_ranks_are(attempt: Attempt, timeout: float = WHEREABOUTS_TIMEOUT) -> None:
    """Have all ranks that live say where they are, and their workers how their processes are."""
    for rank in attempt.ranks:
        rank.whereabouts = None  # to an earlier question
    asked = [rank for rank in attempt.ranks if rank.how is None]
    workers = [rank.address for rank in asked]
    answers = ask_each(attempt.client, agent.ask_where, workers=workers)

    def have_answered() -> bool:
        for rank in asked:
            rank.process_state = answers.get(rank.address)
        return all(
            rank.how is not None
            or rank.whereabouts is not None
            or rank.process_state in stalls.SUSPENDED
            for rank in asked
        )

    attempt.wait_until(have_answered, timeout)


def _stalled(attempt: Attempt, stuck: list[RankState], timeout: float) -> Exception:
    ranks = attempt.ranks
    rank, why = stalls.name_culprit(ranks, stuck)
    waits = stalls.where_ranks_wait(ranks)
    stacks = {each.number: each.whereabouts.stack for each in ranks if each.whereabouts}
    attempt.directory.log(
        f"rank {rank.number} stalled: {why}\n{outcome.where_all_are(waits, stacks)}"
    )
    return outcome.rank_stalled(attempt.state, rank, why, timeout, waits, stacks)


def _result(attempt: Attempt) -> Any:
    import torch  # not at the top: it takes a second, and only a result needs it

    task = attempt.ranks[0].task
    assert task is not None, "it has ended"
    pickled = attempt.wait_for(task.result, math.inf)
    try:
        # Our own ranks' pickle; None of a script that left by `os._exit(0)`
        result = pickled and torch.load(io.BytesIO(pickled), "cpu", weights_only=False)
    except Exception as error:  # whatever the classes in it do when they are made again
        attempt.directory.log(
            f"all ranks finished; the result of rank 0 cannot be loaded here: {error!r}"
        )
        raise LaunchEnded(
            f"All ranks finished, but what rank 0 returned cannot be loaded in this process: "
            f"{type(error).__name__}: {error}. What was saved is in {attempt.directory.path}.\n"
            "Return tensors, numbers, a state_dict, or what can be imported here too.",
            directory=attempt.directory.path,
        ) from None
    seconds = time.monotonic() - attempt.began
    attempt.directory.log(f"finished: {len(attempt.addresses)} rank(s), {seconds:.1f} s")
    return result


def end(attempt: Attempt) -> None:
    """Cancel what still runs, wait until every rank is gone, and fetch the last checkpoints."""
    try:
        if attempt.client.status == "running":
            _end_ranks(attempt)
            lost = {rank.address for rank in attempt.ranks if rank.is_lost}
            problem = attempt.checkpoints.close(lost)
            if problem:
                attempt.directory.problem(
                    f"The newest checkpoint could not be fetched: {problem}", "fetch"
                )
    except (OSError, CancelledError, Error) as error:
        attempt.directory.problem(f"After the run had ended: {error}", "end")
    finally:
        # Let go of all tasks, and so of their results: one that hands over tables may still wait
        # for a worker that is gone.
        for task in attempt.tasks():
            task.release()
        attempt.recorder.close()


def _end_ranks(attempt: Attempt) -> None:
    """Cancel what still runs and wait until every rank says that it is gone."""
    running = [rank.task for rank in attempt.ranks if rank.task and not rank.task.done()]
    if running:
        attempt.client.cancel(running, force=True)
    pending = [rank for rank in attempt.ranks if rank.task]

    def are_gone() -> bool:
        return all(rank.how is not None for rank in pending)

    attempt.wait_until(are_gone, UNSTARTED_TIMEOUT)
    if any(rank.has_started for rank in pending):
        attempt.wait_until(are_gone, GONE_TIMEOUT - UNSTARTED_TIMEOUT)
