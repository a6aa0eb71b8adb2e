"""All ranks see the same data: what differs is refused before the first batch, nothing else is."""

import copy
import random
import sys

import cloudpickle
import numpy as np
import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import ddp_common as ddp

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SAMPLES = 40
OTHER = r"sample \d+\['number'\] is another one on rank 1 than on rank 0"


class Points(torch.utils.data.Dataset):
    """Numbers in some order; `augment` makes a tensor of each."""

    def __init__(self, numbers=range(SAMPLES), augment=None):
        self.numbers = list(numbers)
        self.augment = augment or (lambda x: x)
        self.cache = {}

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, index):
        number = self.numbers[index]
        return {"x": self.augment(torch.full((4,), float(number))), "number": number}


class WholeBatches(Points):
    """It stacks a batch itself."""

    def __getitems__(self, indices):
        return torch.utils.data.default_collate([self[index] for index in indices])


def train(make, epochs=1, compare=True, **options):
    """Train on `make()`; returns the steps of this process."""
    data = make()
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    sampler = ddp.ElasticSampler(len(data), 8, seed=3)
    checkpoint = ddp.Checkpoint(model=model, optimizer=optimizer, sampler=sampler)
    checkpoint.restore()
    loader = ddp.DataLoader(data, batch_sampler=sampler, compare=compare, **options)
    steps = 0
    for epoch in sampler.epochs(epochs):
        for batch in loader:
            loss = model(batch["x"]).mean() * sampler.weight
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            checkpoint.step()
            steps += 1
        checkpoint.save()
    return steps


# Made on each rank


def shuffled():
    return Points(random.sample(range(SAMPLES), SAMPLES))


def split_without_a_seed():
    return Points(torch.randperm(SAMPLES).tolist())


def listed_by_the_folder():
    return Points(sorted(range(SAMPLES), reverse=ddp.rank() == 1))


def one_is_missing():
    return Points(range(SAMPLES - ddp.rank()))


def with_a_generator_of_its_own():
    generator = np.random.default_rng(0)
    return Points(augment=lambda x: x + generator.random())


def plain():
    return Points()


def other():
    return Points(range(SAMPLES, 2 * SAMPLES))


def shuffled_with_a_seed():
    return Points(random.Random(0).sample(range(SAMPLES), SAMPLES))


def drawn():
    return Points(augment=lambda x: x + torch.rand(()) + np.random.rand() + random.random())


def drawn_by_a_generator_that_is_seeded():
    generator = np.random.RandomState()

    def augment(x):
        generator.seed(torch.initial_seed() % 2**32)
        return x + generator.rand()

    return Points(augment=augment)


def cached():
    data = Points()
    data.augment = lambda x: data.cache.setdefault(float(x[0]), x + torch.rand(()))
    return data


def of_another_processor():
    return Points(augment=lambda x: x / 3 * (1 + 1e-7 * ddp.rank()))


def collate_and_draw(samples):
    x = torch.stack([sample["x"] for sample in samples])
    return {"x": x * random.random()}


@pytest.mark.parametrize(
    "make, workers, why",
    [
        (shuffled, 0, OTHER),
        (split_without_a_seed, 0, OTHER),
        (listed_by_the_folder, 2, OTHER),
        (one_is_missing, 0, "ElasticSampler of rank 1 has length 39, and rank 0's has 40"),
        (with_a_generator_of_its_own, 0, r"sample \d+ is another one when it is fetched again"),
        (with_a_generator_of_its_own, 2, r"sample \d+ is another one when it is fetched again"),
    ],
)
def test_data_that_are_not_the_same_on_all_ranks_are_refused(client, make, workers, why):
    with pytest.raises(ddp.RankFailed, match=why):
        ddp.launch(client, train, make=make, num_workers=workers, workers=2, directory=False)


@pytest.mark.parametrize(
    "make, options",
    [
        (plain, {}),
        (shuffled_with_a_seed, {"num_workers": 1}),
        (drawn, {"num_workers": 2, "persistent_workers": True}),
        (drawn, {"num_workers": 1, "multiprocessing_context": "spawn"}),
        (drawn_by_a_generator_that_is_seeded, {"num_workers": 2}),
        (cached, {}),
        (of_another_processor, {}),
        (drawn, {"collate_fn": collate_and_draw}),
        (WholeBatches, {"batched": True, "collate_fn": copy.copy}),
        (shuffled, {"compare": False}),
    ],
)
def test_right_data_are_not_refused(client, make, options):
    run = ddp.launch(client, train, make=make, epochs=2, workers=2, directory=False, **options)
    assert run.result == 10


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_resume_goes_on_with_the_same_data_alone(client, tmp_path, ranks):
    def launched(make, epochs, **options):
        options |= {"make": make, "epochs": epochs, "directory": tmp_path}
        return ddp.launch(client, train, **options).result

    assert launched(drawn, 1, workers=2) == 5
    assert launched(drawn, 2, workers=ranks) == 5
    with pytest.raises(ddp.RankFailed, match=r"written with other data.*\n.*sorted"):
        launched(other, 3, workers=ranks)
    assert launched(other, 3, workers=ranks, compare=False) == 5


def test_without_a_loader_the_rows_that_a_sampler_has_are_compared(client):
    def train_on_rows(seed):
        x = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(seed * ddp.rank()))
        sampler = ddp.ElasticSampler(x, 8)
        return [len(rows) for epoch in sampler.epochs(1) for rows in sampler.batches()]

    assert ddp.launch(client, train_on_rows, seed=0, workers=2, directory=False).result == [4] * 5
    with pytest.raises(ddp.RankFailed, match=r"sample \d+ is not the same on rank 1"):
        ddp.launch(client, train_on_rows, seed=1, workers=2, directory=False)
