"""Ranks agree when to leave, however many steps they are apart, and whoever is told."""

import random
import time

import pytest
from ports import free_port
from ranks_here import Rank, torchrun_variables

from ddp_common import stopping

TRAINS = """
import os
import random
import signal
import time
import torch
import torch.distributed as dist
from ddp_common import rendezvous, stopping

def train(told, at, every, signals, last=1_000_000):
    chance = random.Random(os.getpid())
    for step in range(1, last + 1):
        if stopping.arrive():
            print("left before", step)
            stopping.leave()
        if ddp.rank() in told and step == at:
            for _ in range(signals):
                os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(chance.random() * 0.002)
        if step % every == 0:
            dist.all_reduce(torch.ones(1))
    print("all done")

stopping.listen_to_sigterm()
try:
    with rendezvous.process_group(), stopping.in_agreement():
        train(**KEYWORDS)
        stopping.training_has_ended()
except stopping.Stopped:
    print("stopped")
"""


def leave(folder, world_size, **keywords):
    """What each rank says."""
    port = free_port()
    code = TRAINS.replace("KEYWORDS", repr(keywords))
    variables = [torchrun_variables(rank, world_size, port) for rank in range(world_size)]
    ranks = [Rank(code, folder, each) for each in variables]
    said = [rank.said() for rank in ranks]
    assert [rank.process.exitcode for rank in ranks] == [0] * world_size, said
    return said


@pytest.mark.parametrize("trial", range(10))
def test_all_ranks_leave_before_the_same_step_that_none_had_begun(tmp_path, trial):
    chance = random.Random(trial)
    world_size = chance.choice([2, 3, 4])
    at = chance.randint(1, 40)
    said = leave(
        tmp_path,
        world_size,
        told=chance.sample(range(world_size), chance.choice([1, 1, 2])),
        at=at,
        every=chance.choice([1, 3, 8]),  # steps between two collectives: how far apart ranks get
        signals=chance.choice([1, 3]),
    )
    first, *others = said
    assert others == [first] * (world_size - 1)
    step = int(first.split()[2])
    assert first == f"left before {step}\nstopped\n" and step > at


def test_a_request_that_comes_when_others_have_begun_their_last_step_changes_nothing(tmp_path):
    said = leave(tmp_path, 3, told=[1], at=100, every=1, signals=1, last=100)
    assert said == ["all done\n"] * 3


SIGNALLED = """
import os, signal
from ddp_common import stopping

stopping.listen_to_sigterm()
try:
    stopping.training_has_ended()
    os.kill(os.getpid(), signal.SIGTERM)
    print("goes on")
except stopping.Stopped:
    print("stopped")
"""


def test_after_its_last_step_a_rank_that_is_told_is_done(tmp_path):
    assert Rank(SIGNALLED, tmp_path, {}).said() == "goes on\n"


HAS_NOTHING_TO_DO = """
import os, signal, time
from ddp_common import rendezvous, stopping

stopping.listen_to_sigterm()
try:
    with rendezvous.process_group(), stopping.in_agreement():
        if ddp.rank() == 0:
            for step in range(1, 1_000_000):
                if stopping.arrive():
                    stopping.leave()
                if step == 5:
                    os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.01)
except stopping.Stopped:
    print("stopped")
"""


def test_a_rank_that_has_returned_is_not_waited_for(tmp_path):
    port = free_port()
    began = time.monotonic()
    code = HAS_NOTHING_TO_DO
    ranks = [Rank(code, tmp_path, torchrun_variables(rank, 2, port)) for rank in (0, 1)]
    assert [rank.said() for rank in ranks] == ["stopped\n", ""]
    assert time.monotonic() - began < stopping.PEERS_TIMEOUT.total_seconds() / 4


IS_LAST = """
import os, signal, time
from ddp_common import rendezvous, stopping

stopping.listen_to_sigterm()
with rendezvous.process_group(), stopping.in_agreement():
    stopping.arrive()
    if ddp.rank() == 0:
        while not rendezvous.has_left(1):
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGTERM)
        while not stopping.arrive():
            pass
print("left")
"""


def test_a_rank_that_is_told_when_the_others_have_gone_waits_for_none_of_them(tmp_path):
    port = free_port()
    ranks = [Rank(IS_LAST, tmp_path, torchrun_variables(rank, 2, port)) for rank in (0, 1)]
    assert [rank.said() for rank in ranks] == ["left\n"] * 2
