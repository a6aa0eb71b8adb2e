"""Ranks that wait for each other: which collective each waits in is said, and who is to blame."""

import sys
import threading

import cloudpickle
import faults_on_purpose as faults
import torch
import torch.distributed as dist
from patience import PATIENCE
from processes import stalled
from torch.utils.data import DataLoader

import ddp_common as ddp

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def sum_up(size=4, group=None):
    dist.all_reduce(torch.ones(size), group=group)


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
    assert "does not answer: a call of C or C++ keeps Python's lock" in str(error)
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
    assert error.collectives[0].startswith("is in no collective; the last was")
