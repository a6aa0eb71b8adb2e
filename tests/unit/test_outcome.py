"""What is made of what is known of the ranks: without a process or a cluster."""

import signal
from pathlib import Path

import pytest

from dask_ranks.client import stalls
from dask_ranks.client.outcome import (
    AttemptState,
    Failed,
    Outcome,
    outcome,
    rank_failed,
    run_stopped,
)
from dask_ranks.messages import (
    CheckpointSaved,
    Collective,
    Ended,
    Line,
    Position,
    Started,
    Whereabouts,
)

LOST_PEER = Ended("raised", 1, "RuntimeError: [gloo] Connection closed by peer", lost_peer=True)
ABORTED = Ended("exited", -signal.SIGABRT)
IN_COLLECTIVE = Whereabouts("", None, in_collective=True)
ELSEWHERE = Whereabouts("", None)


def state_of(ranks, **ended):
    """So many ranks have started; `rank_1=Ended(…)` says how one of them has ended."""
    addresses = [f"tcp://10.0.0.{rank}:5000" for rank in range(ranks)]
    state = AttemptState(addresses, Path("runs/demo"))
    for rank in range(ranks):
        state.take(rank, Started(100 + rank, f"n{rank:02}"), now=0.0)
    for name, end in ended.items():
        state.take(int(name.removeprefix("rank_")), end, now=1.0)
    return state


def raised(message):
    return Ended("raised", 1, message=message, traceback=f"Traceback …\n{message}")


def test_the_rank_that_failed_on_its_own_is_named_and_not_the_peer_that_was_heard_of_first():
    state = state_of(2, rank_0=LOST_PEER)
    assert outcome(state) == Failed(state.ranks[0], is_consequence=True)
    state.take(1, Ended("exited", -signal.SIGKILL), now=2.0)
    assert outcome(state) == Failed(state.ranks[1], is_consequence=False)


def test_a_rank_that_aborts_as_it_has_lost_a_peer_is_known_by_what_it_has_printed():
    state = state_of(2, rank_0=ABORTED)
    state.take(0, Line("  what():  [gloo/pair.cc:553] Connection closed by peer"), now=1.0)
    assert outcome(state) == Failed(state.ranks[0], is_consequence=True)


def test_peers_that_lose_a_rank_which_left_have_not_failed():
    left = Ended("stopped", got_sigterm=True, step=3)
    assert outcome(state_of(2, rank_0=LOST_PEER, rank_1=left)) is Outcome.STOPPED


def test_a_failure_comes_before_the_loss_of_the_scheduler():
    state = state_of(2)
    state.cancel("scheduler-connection-lost")
    assert outcome(state) is Outcome.CANCELLED
    state.take(0, raised("ValueError: no"), now=2.0)
    assert outcome(state) == Failed(state.ranks[0], False)


def test_a_lost_worker_is_a_failed_rank_unless_that_had_ended_and_has_no_result():
    state = state_of(2, rank_1=Ended("done"))
    state.lose_worker("tcp://10.0.0.1:5000")
    assert outcome(state) is Outcome.GOES_ON and state.ranks[1].is_lost
    state.take(0, Ended("done"), now=2.0)
    state.lose_worker("tcp://10.0.0.0:5000")
    assert outcome(state) == Failed(state.ranks[0], False)


def test_a_failure_names_rank_host_cause_consequences_step_lines_and_log():
    state = state_of(2, rank_0=LOST_PEER, rank_1=Ended("exited", -signal.SIGKILL))
    state.take(1, Position(step=12), now=1.0)
    state.take(1, Line("loading"), now=1.0)
    failure = rank_failed(state, state.ranks[1])
    assert str(failure) == (
        "Rank 1 of 2 on n01 failed: killed by SIGKILL, often because memory ran out\n"
        "As a consequence, rank 0 lost the connection to it.\n"
        "Its last known step is 12.\n\n"
        "The whole log: runs/demo/log.txt\n\n"
        "Last lines of the ranks:\n  [rank 1] loading"
    )
    assert (failure.rank, failure.host, failure.exitcode) == (1, "n01", -9)
    assert failure.signal == "SIGKILL" and failure.logs == {0: [], 1: ["loading"]}


def test_the_last_known_step_is_not_before_the_newest_checkpoint():
    state = state_of(2, rank_1=Ended("exited", -signal.SIGKILL))
    state.take(1, Position(step=1), now=1.0)
    state.take(0, CheckpointSaved("step-00000005.0123456789abcdef.pt", keep=3), now=1.0)
    assert "Its last known step is 5." in str(rank_failed(state, state.ranks[1]))


def test_a_failure_ends_with_its_cause():
    state = state_of(2, rank_0=raised("ValueError: no"))
    state.take(1, Line("loading"), now=1.0)
    assert str(rank_failed(state, state.ranks[0])).endswith(
        "Last lines of the ranks:\n  [rank 1] loading\n\nTraceback …\nValueError: no"
    )


def test_ranks_that_fail_each_on_its_own_are_no_consequence_of_each_other():
    state = state_of(2, rank_0=raised("ValueError: no"), rank_1=raised("ValueError: no"))
    said = str(rank_failed(state, state.ranks[0]))
    assert "Rank 1 failed, too" in said and "As a consequence" not in said


def test_a_signal_without_a_name_is_named_by_its_number():
    state = state_of(1, rank_0=Ended("exited", -35))
    assert rank_failed(state, state.ranks[0]).signal == "signal 35"


DUMP = """before
Fatal Python error: Aborted

Thread 0x00007f3e (most recent call first):
  File "/lib/threading.py", line 331 in wait

Thread 0x00007f3f (most recent call first):
  File "/torch/distributed/distributed_c10d.py", line 2 in all_reduce
  File "train.py", line 8 in train
  File "/x/dask_ranks/rank/life.py", line 148 in _call
  File "/x/dask_ranks/rank/process.py", line 69 in main
"""


def test_of_a_rank_that_a_signal_has_killed_the_line_of_the_program_is_shown_and_no_other_thread():
    state = state_of(2, rank_0=Ended("exited", -signal.SIGABRT))
    for line in DUMP.splitlines():
        state.take(0, Line(line), now=1.0)
    said = str(rank_failed(state, state.ranks[0]))
    assert said.endswith('  File "train.py", line 8 in train')
    assert "[rank 0] before" in said
    assert "threading.py" not in said and "life.py" not in said and "process.py" not in said


def test_the_end_after_sigterm_names_who_was_told_and_the_step():
    told = Ended("stopped", got_sigterm=True, step=8)
    other = Ended("stopped", got_sigterm=False, step=8)
    state = state_of(2, rank_0=other, rank_1=told)
    stopped = run_stopped(state)
    assert stopped.step == 8
    assert "rank 1 on n01 got SIGTERM. All ranks left after step 8" in str(stopped)


# Stalls


def test_a_rank_without_progress_is_stalled_once_all_have_started_and_only_then():
    state = AttemptState(["tcp://a:1", "tcp://b:1"], Path("run"))
    state.take(0, Started(1, "a"), now=0.0)
    assert state.stalled(10, now=100.0) == []
    state.take(1, Started(2, "b"), now=100.0)
    assert state.stalled(10, now=105.0) == []
    state.take(1, Position(step=1), now=108.0)
    assert state.stalled(10, now=111.0) == state.ranks[:1]
    assert state.stalled(None, now=10**6) == []


def standstill(states=("sleeping", "sleeping"), answers=(), records=(), returned=()):
    """All ranks, whose states, answers and collectives are in their order, and those at work."""
    ranks = state_of(max(2, len(records))).ranks
    ranks[0].step, ranks[1].step = 3, 2
    for rank, state in zip(ranks, states):
        rank.process_state = state
    for rank, answer in zip(ranks, answers):
        rank.take(answer, now=1.0)
    for rank, record in zip(ranks, records):
        said = Whereabouts("", [vars(each) for each in record], in_collective=True)
        rank.take(said, now=1.0)
    for number in returned:
        ranks[number].take(Position(step=5, has_returned=True), now=1.0)
    return ranks, [rank for rank in ranks if rank.number not in returned]


@pytest.mark.parametrize(
    ("known", "rank", "why"),
    [
        (standstill(states=[None, "sleeping"]), 0, "worker at tcp://10.0.0.0:5000 does not"),
        (standstill(states=[None, None], answers=[ELSEWHERE, IN_COLLECTIVE]), 0, "not in a coll"),
        (standstill(states=["sleeping", "stopped"], answers=[IN_COLLECTIVE]), 1, "is stopped"),
        (standstill(answers=[IN_COLLECTIVE]), 1, "keeps Python's lock"),
        (
            standstill(answers=[IN_COLLECTIVE, IN_COLLECTIVE]),
            1,
            "It is behind the others at step 2.",
        ),
        (
            standstill(answers=[ELSEWHERE, IN_COLLECTIVE], returned=[0]),
            0,
            "came to its end at step 5",
        ),
    ],
    ids=["silent_worker", "answer_before_state", "stopped", "no_answer", "behind", "returned"],
)
def test_of_stalled_ranks_the_one_that_keeps_the_others_waiting_is_named(known, rank, why):
    named, sentence = stalls.name_culprit(*known)
    assert named.number == rank and why in sentence


REDUCE = ("all_reduce", 36)
OTHER = ("all_reduce", 4)
BARRIER = ("barrier", 0)


def record(*calls):
    """Collectives (kind, size) in their order; the last of them is not finished."""
    return [
        Collective(
            kind,
            number,
            group="0",
            description="default_pg",
            members=[0, 1],
            sizes=[[size]] if size else [],
            dtype="Float",
            is_between_two=False,
            is_finished=number < len(calls),
            seconds_ago=3.0,
            line="train.py:8",
        )
        for number, (kind, size) in enumerate(calls, 1)
    ]


@pytest.mark.parametrize(
    ("before", "calls", "odd"),
    [([REDUCE] * 3, [REDUCE, REDUCE, OTHER], 2), ([], [BARRIER, BARRIER, REDUCE, BARRIER], 2)],
    ids=["size", "majority"],
)
def test_the_rank_whose_call_breaks_the_pattern_is_named(before, calls, odd):
    known = standstill(
        states=["sleeping"] * len(calls), records=[record(*before, last) for last in calls]
    )
    rank, why = stalls.name_culprit(*known)
    assert rank.number == odd
    assert f"It has called {calls[odd][0]} #{len(before) + 1}" in why
    assert "(train.py:8), while rank" in why
