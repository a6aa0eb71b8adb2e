"""Ranks that wait for each other: which collective each waits in is said, and who is to blame."""

import re
import sys
import threading

import cloudpickle
import torch
import torch.distributed as dist
from processes import stalled
from torch.nn.parallel import DistributedDataParallel

import ddp_common as ddp

cloudpickle.register_pickle_by_value(sys.modules[__name__])


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


def test_a_collective_under_a_condition_is_named_with_its_line(client, tmp_path):
    error = stalled(client, tmp_path, call_a_barrier_on, 1)
    assert error.rank == 1
    said = headline(error)
    line = r"\(test_hangs.py:\d+\)"
    assert re.search(rf"It has called barrier #\d+ {line}", said)
    assert re.search(rf"while rank 0 called all_reduce #\d+ of 36 floats {line}", said)


def test_a_collective_that_one_rank_has_left_out_is_found_by_what_came_before(client, tmp_path):
    error = stalled(client, tmp_path, leave_a_barrier_out_on, 0)
    assert error.rank == 0
    assert "It has called all_reduce #" in headline(error)


def test_a_rank_that_never_comes_is_named_with_what_its_peer_waits_in(client, tmp_path):
    error = stalled(client, tmp_path, never_come_on, 1)
    assert error.rank == 1
    assert "It is not in a collective" in headline(error)
    assert "Rank 0 waits in all_reduce #" in headline(error)
    assert "never_come_on" in error.stacks[1]


def test_ranks_in_different_process_groups_are_told_apart(client, tmp_path):
    def cross():
        groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
        if ddp.rank() == 1:
            groups.reverse()
        for group in groups:
            sum_up(group=group)

    error = stalled(client, tmp_path, cross)
    assert error.collectives.keys() == {0, 1}
    groups = {re.search(r"of the group (\w+)", what)[1] for what in error.collectives.values()}
    assert len(groups) == 2


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
