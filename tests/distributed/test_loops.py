"""Loops as training scripts have them. Those that are refused are the rows of docs/loops.md.

Two ranks end with the weights of one process, or the loop is refused with a reason.
"""

import itertools
import queue
import re
import sys
import threading
from pathlib import Path

import cloudpickle
import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
from tqdm import tqdm

import ddp_common as ddp

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SAMPLES, BATCH, EPOCHS = 105, 20, 3  # 6 steps; of the last batch's 5 samples rank 0 gets 3
LOOPS = {}  # name -> (function, what the refusal says; None if the loop is right)


class Noisy(Dataset):
    def __init__(self, inputs):
        self.inputs = inputs

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        noisy = self.inputs[index] + 0.1 * torch.randn(4)
        return noisy, noisy.square().sum().view(1)


class Training:
    """What all loops share: data, a model, a sampler, and what one step is."""

    def __init__(self):
        torch.manual_seed(0)
        self.data = Noisy(torch.randn(SAMPLES, 4))
        network = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)
        )
        self.network = network
        alone = not torch.distributed.is_initialized()
        self.model = network if alone else DistributedDataParallel(network)
        self.optimizer = torch.optim.SGD(network.parameters(), lr=0.05)
        self.sampler = ddp.ElasticSampler(SAMPLES, BATCH, seed=1)
        self.checkpoint = ddp.Checkpoint(
            model=self.model, optimizer=self.optimizer, sampler=self.sampler
        )
        self.checkpoint.restore()

    def loader(self, **options):
        return ddp.DataLoader(self.data, batch_sampler=self.sampler, **options)

    def loss(self, batch, weight=None):
        inputs, targets = batch
        weight = self.sampler.weight if weight is None else weight
        return torch.nn.functional.mse_loss(self.model(inputs), targets) * weight

    def step(self, batch, weight=None):
        loss = self.loss(batch, weight)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.checkpoint.step()
        ddp.report(loss=loss)

    def weights(self):
        return torch.cat([each.detach().flatten() for each in self.network.parameters()])


def right(function):
    LOOPS[function.__name__] = (function, None)
    return function


def refused(message):
    def note(function):
        LOOPS[function.__name__] = (function, message)
        return function

    return note


@right
def epochs_and_a_loader(training):
    loader = training.loader()
    for epoch in tqdm(training.sampler.epochs(EPOCHS)):
        for number, batch in enumerate(tqdm(loader)):
            training.step(batch)


@right
def epochs_and_batches(training):
    inputs = training.data.inputs
    for epoch in training.sampler.epochs(EPOCHS):
        for rows in training.sampler.batches():
            training.step((inputs[rows], inputs[rows].sum(1, keepdim=True)))


@right
def workers(training):
    loader = training.loader(num_workers=2, prefetch_factor=3, persistent_workers=True)
    for epoch in training.sampler.epochs(EPOCHS):
        for batch in loader:
            training.step(batch)


@right
def workers_that_are_spawned(training):
    def begin(worker):
        assert get_worker_info().dataset.inputs.shape == (SAMPLES, 4)

    loader = training.loader(
        num_workers=1,
        multiprocessing_context="spawn",
        collate_fn=lambda batch: batch,
        worker_init_fn=begin,
    )
    assert loader.dataset is training.data and loader.batch_sampler is training.sampler
    for epoch in training.sampler.epochs(1):
        for samples in loader:
            training.step([torch.stack(part) for part in zip(*samples)])


@right
def a_loop_that_is_left_and_gone_on_with(training):
    loader = training.loader(num_workers=2, persistent_workers=True)
    for _ in range(4):
        for epoch in training.sampler.epochs(EPOCHS):
            for batch in loader:
                training.step(batch)
                if training.sampler.step == 4:
                    break
            if training.sampler.step == 4:
                break
    assert training.sampler.steps_done == 6 * EPOCHS


@right
def validation_within_an_epoch(training):
    for epoch in training.sampler.epochs(EPOCHS):
        for number, batch in enumerate(training.loader()):
            training.step(batch)
            if number == 2:
                for sampler in (ddp.EvalSampler(SAMPLES, 8), [range(8), range(8, 16)]):
                    for inputs, _ in DataLoader(
                        training.data, batch_sampler=sampler, num_workers=1
                    ):
                        with torch.no_grad():
                            training.network(inputs)


@right
def two_samplers_in_turns(training):
    other = ddp.ElasticSampler(50, 9, seed=2)
    loader = ddp.DataLoader(training.data, batch_sampler=other, num_workers=1)
    for _ in zip(training.sampler.epochs(EPOCHS), other.epochs(EPOCHS)):
        for batch, second in zip(training.loader(num_workers=2), loader):
            training.step(batch)
            training.step(second, other.weight)


@right
def gradients_of_two_batches_added_up(training):
    loader = training.loader(num_workers=2)
    for epoch in training.sampler.epochs(EPOCHS):
        for number, batch in enumerate(loader):
            (training.loss(batch) / 2).backward()
            if number % 2:
                training.optimizer.step()
                training.optimizer.zero_grad()
                training.checkpoint.step()


@refused("Sampler itself was iterated over")
def the_sampler_itself(training):
    with pytest.raises(ddp.Error, match="Sampler itself was iterated over"):
        iter(DataLoader(training.data, batch_sampler=training.sampler, num_workers=2))
    for epoch in training.sampler.epochs(EPOCHS):
        for rows in training.sampler:
            training.step(training.data[rows])


class EveryOther:
    """As accelerate's prepare() wraps a batch sampler: this process takes each n-th batch."""

    def __init__(self, inner):
        self.inner = inner

    def __iter__(self):
        return itertools.islice(self.inner, ddp.rank(), None, ddp.world_size())


@refused("Sampler itself was iterated over")
def something_around_the_sampler(training):
    prepared = EveryOther(training.loader().batch_sampler)
    for epoch in training.sampler.epochs(EPOCHS):
        for batch in DataLoader(training.data, batch_sampler=prepared):
            training.step(batch)


@refused(r"begins outside of epochs")
def a_plain_range(training):
    with pytest.raises(ddp.Error, match="begins outside of epochs"):
        next(iter(training.loader()))
    for epoch in range(EPOCHS):
        for batch in training.loader():
            training.step(batch)


@refused("second pass over epoch 0 begins; 6 of its 6 steps")
def a_second_pass(training):
    for epoch in training.sampler.epochs(EPOCHS):
        batches = iter(training.loader(num_workers=1))
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                batches = iter(training.loader(num_workers=1))
                batch = next(batches)
            training.step(batch)
            with pytest.raises(ddp.Error, match="second pass over epoch 0"):
                next(iter(training.loader()))


@refused("Epoch 0 had no pass over this sampler's batches")
def an_epoch_without_a_pass(training):
    loader = DataLoader(training.data, batch_size=BATCH, shuffle=True)
    for epoch in training.sampler.epochs(EPOCHS):
        for inputs, _ in loader:
            training.network(inputs)


@refused("left after 3 of 6 steps(?s:.*)steps=3")
def a_pass_that_is_left(training):
    for epoch in training.sampler.epochs(EPOCHS):
        for number, batch in enumerate(training.loader(num_workers=1)):
            training.step(batch)
            if number == 2:
                training.checkpoint.save()
                break


@refused("no batch of the sampler was in training")
def batches_that_are_kept(training):
    for epoch in training.sampler.epochs(EPOCHS):
        for batch in itertools.cycle(training.loader(num_workers=1)):
            training.step(batch)


@refused("Another thread takes this sampler's batches")
def a_thread_that_takes_batches(training):
    def prefetch():
        for batch in training.loader():
            batches.put(batch)

    for epoch in training.sampler.epochs(EPOCHS):
        batches = queue.Queue(maxsize=2)
        threading.Thread(target=prefetch, daemon=True).start()
        for _ in range(len(training.sampler)):
            training.step(batches.get())


@refused("Stream is an IterableDataset")
def a_data_set_without_indices(training):
    class Stream(IterableDataset):
        def __iter__(self):
            yield from range(SAMPLES)

    ddp.DataLoader(Stream(), batch_sampler=training.sampler)


@refused("in any order")
def a_loader_without_order(training):
    training.loader(num_workers=2, in_order=False)


@refused("drop_last=True")
def one_sample_for_batch_normalisation(training):
    training.network.append(torch.nn.BatchNorm1d(1))
    sampler = ddp.ElasticSampler(22, BATCH)  # of the last batch each of two ranks gets one
    for epoch in sampler.epochs(1):
        for batch in ddp.DataLoader(training.data, batch_sampler=sampler):
            training.network(batch[0])


@refused("multiprocessing_context='spawn'")
def a_start_method_for_all(training):
    torch.multiprocessing.set_start_method("spawn")


def train(name):
    training = Training()
    LOOPS[name][0](training)
    return training.weights()


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_ends_with_the_weights_of_one_process_or_is_refused(client, name):
    refusal = LOOPS[name][1]
    if refusal is not None:
        with pytest.raises(ddp.RankFailed, match=refusal):
            ddp.launch(client, train, workers=2, name=name)
        return
    alone = train(name)
    run = ddp.launch(client, train, workers=2, name=name)
    assert (run.result - alone).norm() / alone.norm() < 1e-6
    assert (alone - Training().weights()).norm() > 0.01  # it trained
    steps = [record["step"] for record in run.records if record["rank"] == 1 and "step" in record]
    assert steps == sorted(steps)


def test_every_loop_that_is_refused_is_a_row_of_the_page():
    page = (Path(__file__).parents[2] / "docs" / "loops.md").read_text()
    refused_loops = {name for name, (_, refusal) in LOOPS.items() if refusal is not None}
    assert {*re.findall(r"\| `(\w+)` \|$", page, flags=re.M)} == refused_loops


def batches_alone(batch_size, reads=False):
    sampler = ddp.ElasticSampler(10, batch_size)
    for epoch in sampler.epochs(1):
        for rows in sampler.batches():
            assert not reads or sampler.weight >= 0


def test_a_weight_that_nobody_reads_is_a_problem_where_ranks_have_unequal_shares(client):
    cases = [dict(batch_size=3), dict(batch_size=3, reads=True), dict(batch_size=4)]
    unread, *others = [ddp.launch(client, batches_alone, workers=2, **case) for case in cases]
    (problem,) = unread.problems
    assert "sampler.weight was not read in an epoch" in problem
    assert not any(run.problems for run in others)
