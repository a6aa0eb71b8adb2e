"""What is made of what is known of the ranks: without a process or a cluster."""

import signal
from pathlib import Path

import pytest

from ddp_common.client import wording
from ddp_common.client.known import Known
from ddp_common.client.verdict import (
    Failed,
    Finished,
    GoesOn,
    SchedulerGone,
    Stopped,
    stalled,
    verdict,
)
from ddp_common.hangs.blame import Standstill, blame
from ddp_common.messages import Ended, Line, Position, Started

DIRECTORY = Path("runs/demo")
LOST_PEER = "RuntimeError: [gloo] Connection closed by peer [127.0.0.1]:4711"
IN_COLLECTIVE = '  File "…/torch/distributed/distributed_c10d.py", line 3 in all_reduce'
ELSEWHERE = '  File "train.py", line 8 in augment'


def known_of(ranks, **ended):
    """So many ranks have started; `rank_1=Ended(…)` says how one of them has ended."""
    known = Known([f"tcp://10.0.0.{rank}:5000" for rank in range(ranks)])
    for rank in range(ranks):
        known.take(rank, Started(100 + rank, f"n{rank:02}"), now=0.0)
    for name, end in ended.items():
        known.take(int(name.removeprefix("rank_")), end, now=1.0)
    return known


def standstill(stuck, states, stacks, steps=None, returned=None):
    """Of two ranks, whose states and stacks are lists."""
    return Standstill(
        places=["worker at tcp://10.0.0.0:5000", "worker at tcp://10.0.0.1:5000"],
        stuck=stuck,
        steps=steps or {},
        moved={0: 1.0, 1: 1.0},
        returned=returned or {},
        states=dict(enumerate(states)),
        stacks=dict(enumerate(stacks)),
        records={},
    )


def raised(message):
    return Ended("raised", 1, message=message, traceback=f"Traceback …\n{message}")


def test_the_rank_that_failed_on_its_own_is_named_and_not_the_peer_that_was_heard_of_first():
    known = known_of(2, rank_0=raised(LOST_PEER))
    assert verdict(known) == Failed(0, is_consequence=True)
    known.take(1, Ended("exited", -signal.SIGKILL), now=2.0)
    assert verdict(known) == Failed(1, is_consequence=False)


def test_peers_that_lose_a_rank_which_left_have_not_failed():
    left = Ended("stopped", told=True, step=3)
    assert verdict(known_of(2, rank_0=raised(LOST_PEER), rank_1=left)) == Stopped()


def test_a_failure_comes_before_the_loss_of_the_scheduler():
    known = known_of(2)
    known.scheduler_lost = True
    assert verdict(known) == SchedulerGone()
    known.take(0, raised("ValueError: no"), now=2.0)
    assert verdict(known) == Failed(0, False)


def test_a_lost_worker_is_a_failed_rank_unless_that_had_ended():
    known = known_of(2, rank_0=Ended("done"))
    known.lose_worker("tcp://10.0.0.0:5000")
    known.lose_worker("tcp://10.9.9.9:5000")  # another run's
    assert verdict(known) == GoesOn() and known.lost_late == {0}
    known.lose_worker("tcp://10.0.0.1:5000")
    assert verdict(known) == Failed(1, False)


def test_an_attempt_goes_on_until_all_are_done_or_one_has_failed():
    assert verdict(known_of(2)) == GoesOn()
    assert verdict(known_of(2, rank_0=Ended("done"))) == GoesOn()
    assert verdict(known_of(2, rank_0=Ended("done"), rank_1=Ended("done"))) == Finished()
    assert verdict(known_of(3, rank_2=raised("ValueError: no"))) == Failed(2, False)


# Stalls


def test_a_rank_without_progress_is_stalled_once_all_have_started_and_only_then():
    known = Known(["tcp://a:1", "tcp://b:1"])
    known.take(0, Started(1, "a"), now=0.0)
    assert stalled(known, 10, now=100.0) == []
    known.take(1, Started(2, "b"), now=100.0)
    assert stalled(known, 10, now=105.0) == []
    known.take(1, Position(step=1), now=108.0)
    assert stalled(known, 10, now=111.0) == [0]
    assert stalled(known, None, now=10**6) == []


@pytest.mark.parametrize(
    ("states", "stacks", "rank", "why"),
    [
        (
            [None, "sleeping"],
            [IN_COLLECTIVE, IN_COLLECTIVE],
            0,
            "Its worker at tcp://10.0.0.0:5000 does not answer",
        ),
        (["sleeping", "stopped"], [IN_COLLECTIVE, IN_COLLECTIVE], 1, "process is stopped"),
        (["sleeping", "running"], [IN_COLLECTIVE, ELSEWHERE], 1, "not in a collective at step 2"),
        (
            ["sleeping", "sleeping"],
            [IN_COLLECTIVE, IN_COLLECTIVE],
            1,
            "It is at step 2; the others",
        ),
    ],
    ids=["silent_worker", "stopped", "elsewhere", "behind"],
)
def test_of_stalled_ranks_the_one_that_keeps_the_others_waiting_is_named(
    states, stacks, rank, why
):
    named, sentence = blame(standstill([0, 1], states, stacks, steps={0: 3, 1: 2}))
    assert named == rank and why in sentence


def test_who_has_returned_too_soon_is_to_blame_for_a_peer_that_waits():
    rank, why = blame(standstill([1], [None, "sleeping"], ["", IN_COLLECTIVE], returned={0: 5}))
    assert rank == 0
    assert "returned at step 5, while rank 1 went on and waits for it" in why


# Wording


def test_a_failure_names_rank_host_cause_consequences_step_lines_and_log():
    known = known_of(2, rank_0=raised(LOST_PEER), rank_1=Ended("exited", -signal.SIGKILL))
    known.take(1, Position(step=12), now=1.0)
    known.take(1, Line("loading"), now=1.0)
    failure = wording.rank_failed(known, 1, DIRECTORY)
    assert str(failure) == (
        "Rank 1 of 2 on n01 failed: killed by SIGKILL, often because memory ran out\n"
        "As a consequence, rank 0 lost the connection to it.\n"
        "Its last known step is 12.\n\n"
        "Last lines of the ranks:\n  [rank 1] loading\n\n"
        "The whole log: runs/demo/log.txt"
    )
    assert (failure.rank, failure.host, failure.exitcode) == (1, "n01", -9)
    assert failure.signal == "SIGKILL" and failure.logs == {0: [], 1: ["loading"]}


def test_the_end_after_sigterm_names_who_was_told_the_step_and_the_checkpoint():
    told, other = Ended("stopped", told=True, step=8), Ended("stopped", told=False, step=8)
    known = known_of(2, rank_0=other, rank_1=told)
    stopped = wording.run_stopped(known, Path("checkpoints/step-00000008.pt"), DIRECTORY)
    assert stopped.step == 8
    assert "rank 1 on n01 got SIGTERM. All ranks left after step 8" in str(stopped)
    assert "the newest checkpoint is that of step 8" in str(stopped)
    assert "there is no checkpoint" in str(wording.run_stopped(known, None, DIRECTORY))
