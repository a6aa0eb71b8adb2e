"""Ranks that wait for each other: which collective each waits in is said, and who is to blame."""

import contextlib
import functools
import re
import sys
import threading

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from processes import PATIENCE
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import ddp_common as ddp
from ddp_common.teaching import faults

cloudpickle.register_pickle_by_value(sys.modules[__name__])

STALL_TIMEOUT = 10.0  # seconds: a rank that a busy machine holds up is not one of these


def stalled(client, tmp_path, function, *arguments, workers=2):
    """The exception of a launch whose ranks wait for ever."""
    with pytest.raises(ddp.RankStalled) as caught:
        ddp.launch(
            client,
            functools.partial(function, *arguments),
            workers=workers,
            directory=tmp_path / "run",
            stall_timeout=STALL_TIMEOUT,
        )
    return caught.value


def headline(error):
    return str(error).splitlines()[0]


def sum_up(size=4, group=None):
    dist.all_reduce(torch.ones(size), group=group)


def call_a_barrier_on(rank):
    model = DistributedDataParallel(torch.nn.Linear(8, 4))
    for step in range(6):
        model(torch.randn(2, 8)).sum().backward()
        if step == 4 and ddp.rank() == rank:
            dist.barrier()


def leave_a_barrier_out_on(rank):
    for step in range(5):
        sum_up()
        sum_up()
        if step != 3 or ddp.rank() != rank:
            dist.barrier()


def never_come_on(rank):
    for step in range(6):
        if step == 4 and ddp.rank() == rank:
            threading.Event().wait()
        sum_up()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_collective_under_a_condition_is_named_with_its_line(client, tmp_path, rank):
    error = stalled(client, tmp_path, call_a_barrier_on, rank)
    assert error.rank == rank
    said = headline(error)
    line = r"\(test_hangs.py:\d+\)"
    assert re.search(rf"It has called barrier #\d+ {line}", said)
    assert re.search(rf"while rank {1 - rank} called all_reduce #\d+ of 36 floats {line}", said)
    assert "look for a condition on the rank" in said
    assert error.collectives[rank].startswith("has begun barrier #")
    assert error.collectives[1 - rank].startswith("has begun all_reduce #")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_collective_that_one_rank_has_left_out_is_found_by_what_came_before(
    client, tmp_path, rank
):
    error = stalled(client, tmp_path, leave_a_barrier_out_on, rank)
    assert error.rank == rank
    assert "It has called all_reduce #" in headline(error)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_never_comes_is_named_with_what_its_peer_waits_in(client, tmp_path, rank):
    error = stalled(client, tmp_path, never_come_on, rank)
    assert error.rank == rank
    assert "It is not in a collective" in headline(error)
    assert f"Rank {1 - rank} waits in all_reduce #" in headline(error)
    assert "is in no collective; the last it has finished is all_reduce #" in str(error)
    assert error.collectives[rank] in (tmp_path / "run" / "log.txt").read_text()


def test_ranks_in_different_process_groups_are_told_apart(client, tmp_path):
    def cross():
        groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
        if ddp.rank() == 1:
            groups.reverse()
        for group in groups:
            sum_up(group=group)

    error = stalled(client, tmp_path, cross)
    assert error.rank == 0
    said = headline(error)
    assert "It waits in all_reduce #1 of 4 floats" in said
    assert "must use these in the same order" in said


def test_a_rank_that_hangs_is_named_though_others_wait_in_another_group(client, tmp_path):
    """Two pairs, and all four after them. Rank 1 never comes; its pair waits for it, and so
    does the other pair, but somewhere else."""

    def train():
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        for step in range(4):
            if step == 2 and ddp.rank() == 1:
                threading.Event().wait()
            sum_up(group=pairs[ddp.rank() // 2])
            sum_up()

    error = stalled(client, tmp_path, train, workers=4)
    assert error.rank == 1
    assert "It is not in a collective" in headline(error)
    assert "of 4 floats (test_hangs.py:" in error.collectives[0]


def test_a_rank_that_receives_is_not_said_to_be_in_no_call(client, tmp_path):
    def train():
        sum_up()
        if ddp.rank() == 1:
            dist.recv(torch.ones(3), src=0)
        threading.Event().wait()

    error = stalled(client, tmp_path, train)
    assert error.rank == 0
    assert "such as send or recv" in error.collectives[1]


def test_what_the_launcher_and_the_standard_library_call_is_not_shown_as_the_users(
    client, tmp_path
):
    def train():
        if ddp.rank() == 1:
            threading.Event().wait()
        with contextlib.ExitStack() as stack:
            stack.callback(sum_up)

    error = stalled(client, tmp_path, train)
    assert error.collectives == {0: error.collectives[0]}  # rank 1 has called none
    assert re.search(r"all_reduce #\d+ of 4 floats \(test_hangs.py:\d+\)", error.collectives[0])


def test_tensors_of_different_sizes_are_a_failure_that_says_so(client):
    def train():
        sum_up()
        sum_up(4 + ddp.rank())

    with pytest.raises(ddp.RankFailed) as caught:
        ddp.launch(client, train, workers=2, stall_timeout=PATIENCE)
    assert "it got a tensor of another size than it waits for" in headline(caught.value)
    assert caught.value.signal == "SIGABRT"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_collective_of_another_size_between_steps_is_a_failure_or_a_stall(
    client, tmp_path, rank
):
    """Which of the two is gloo's: what is too large aborts the rank that receives it."""
    train = faults.inject(faults.train, "collective of another size", rank=rank)
    with pytest.raises(ddp.RankFailed) as caught:
        ddp.launch(client, train, workers=2, stall_timeout=STALL_TIMEOUT)
    if isinstance(caught.value, ddp.RankStalled):
        assert caught.value.rank == rank
        assert "one collective with different sizes" in headline(caught.value)
    else:
        assert "it got a tensor of another size" in headline(caught.value)


def test_a_parameter_without_gradient_on_one_rank_is_named_by_torch(client):
    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = torch.nn.Linear(8, 4), torch.nn.Linear(8, 4)

        def forward(self, rows, both):
            out = self.first(rows)
            return out + self.second(rows) if both else out

    def train():
        model = DistributedDataParallel(Two())
        for step in range(5):
            model(torch.randn(3, 8), both=ddp.rank() == 0 or step < 3).sum().backward()

    with pytest.raises(ddp.RankFailed) as caught:
        ddp.launch(client, train, workers=2, stall_timeout=PATIENCE)
    assert caught.value.rank == 1
    assert "find_unused_parameters=True" in headline(caught.value)


def test_a_rank_whose_main_thread_never_lets_go_of_python_is_named_without_its_answer(
    client, tmp_path
):

    def busy_in_one_instruction():
        if ddp.rank() == 1:
            sum(range(10**12))  # one call of C: no other thread of the rank runs
        sum_up()

    error = stalled(client, tmp_path, busy_in_one_instruction)
    assert error.rank == 1
    assert set(error.collectives) == {0}
    assert "busy_in_one_instruction" in error.stacks[1]
    assert ddp.launch(client, faults.train, workers=2).world_size == 2


def test_workers_of_a_loader_do_not_answer_in_the_place_of_their_rank(client, tmp_path):
    def train():
        for _ in DataLoader(list(range(8)), num_workers=2, persistent_workers=True):
            sum_up()
        if ddp.rank() == 0:
            threading.Event().wait(PATIENCE * 10)
        sum_up()

    error = stalled(client, tmp_path, train)
    assert error.rank == 0
    assert error.collectives[0].startswith("is in no collective; the last it has finished is")
