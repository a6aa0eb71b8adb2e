"""Ranks that wait for each other: which collective each waits in is said, and who is to blame."""

import inspect
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import cloudpickle
import faults_on_purpose as faults
import pytest
import torch
import torch.distributed as dist
from patience import PATIENCE
from processes import stalled
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import ddp_common as ddp
from dask_ranks.client import monitor

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


def hang_in_forward():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def forward(self, x):
            if ddp.rank() == 1 and len(x) == 3:
                threading.Event().wait()
            return self.layer(x)

    model = torch.nn.parallel.DistributedDataParallel(Net())
    for samples in range(1, 5):
        model(torch.ones(samples, 4)).sum().backward()


def test_a_rank_that_hangs_in_its_model_is_named_though_ddp_has_called_that(client, tmp_path):
    """Also where the program lies in a folder that is called like torch's own."""
    program = compile(inspect.getsource(hang_in_forward), "/home/me/torch/train.py", "exec")
    names = {"__name__": "__main__", "torch": torch, "threading": threading, "ddp": ddp}
    exec(program, names)
    error = stalled(client, tmp_path, names["hang_in_forward"])
    assert error.rank == 1 and "It is not in a collective" in str(error)


def return_early():
    """Rank 0, which then waits for the others, as it holds the store."""
    sum_up()
    if ddp.rank() == 1:
        sum_up()


def leave_before_save():
    sum_up()
    if ddp.rank() == 1:
        ddp.Checkpoint(model=torch.nn.Linear(4, 1)).save()


def save_on_rank_1_alone():
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    checkpoint = ddp.Checkpoint(model=model)
    for _ in range(4):
        model(torch.ones(2, 4)).sum().backward()
        if ddp.rank() == 1:
            checkpoint.save()


@pytest.mark.parametrize(
    ("function", "timeout", "words"),
    [
        (return_early, "RETURNED_TIMEOUT", "Rank 0 .* It came to its end, while rank 1"),
        (leave_before_save, "RETURNED_TIMEOUT", "Rank 0 .* It came to its end, while rank 1"),
        (save_on_rank_1_alone, "QUIET_TIMEOUT", r"rank 1 called all_gather #\d+ of"),
    ],
)
def test_ranks_that_can_meet_no_more_are_known_soon(client, monkeypatch, function, timeout, words):
    monkeypatch.setattr(monitor, timeout, 2)
    began = time.monotonic()
    with pytest.raises(ddp.RankStalled, match=words):
        ddp.launch(client, function, workers=2)
    assert time.monotonic() - began < 60


def validate_alone_on_rank_0():
    for _ in range(20 if ddp.rank() == 0 else 0):
        time.sleep(0.2)
    sum_up()


def test_a_rank_that_works_alone_is_told_once_and_the_run_goes_on(client, monkeypatch, capfd):
    monkeypatch.setattr(monitor, "QUIET_TIMEOUT", 1)
    ddp.launch(client, validate_alone_on_rank_0, workers=2)
    assert capfd.readouterr().err.count("No progress for 1 s: rank 0, 1. The run goes on") == 1


def evaluate_for_long():
    for _ in range(60):
        sum_up()
        time.sleep(0.2)


def test_collectives_that_end_are_progress(client):
    ddp.launch(client, evaluate_for_long, workers=2, stall_timeout=6)


class NeedsItsThread:
    """A data set of a library with threads, such as polars: a forked process has none of them."""

    def __init__(self):
        self.pool = ThreadPoolExecutor(max_workers=1)
        self.pool.submit(int).result()

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return self.pool.submit(int, index).result()


def test_ranks_that_wait_for_forked_workers_of_their_loaders_are_told_so(client, tmp_path):
    def train():
        sum_up()
        next(iter(DataLoader(NeedsItsThread(), num_workers=1)))

    said = str(stalled(client, tmp_path, train))
    assert "It waits for a worker of its DataLoader" in said and '"forkserver"' in said
    assert "behind the others" not in said


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
