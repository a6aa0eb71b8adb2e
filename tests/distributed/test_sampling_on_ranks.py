"""What the ranks evaluate together, and what is drawn for each sample, on any number of ranks."""

import random
import sys

import cloudpickle
import numpy as np
import pytest
import torch
from tables_here import everyone, on_ranks
from torch.utils.data import Dataset

import ddp_common as ddp

cloudpickle.register_pickle_by_value(sys.modules[__name__])

EVALUATED = (23, 2)  # 2: fewer samples than ranks


def evaluate(lengths):
    return [
        everyone([index for batch in ddp.EvalSampler(length, 5) for index in batch])
        for length in lengths
    ]


def test_evaluation_counts_every_sample_once_on_any_number_of_ranks(client):
    for size in (1, 2, 3, 4):
        many, few = on_ranks(client, size, evaluate, lengths=EVALUATED)
        assert sorted(sum(many, [])) == list(range(23))
        assert sorted(sum(few, [])) == [0, 1]
        assert sum(not share for share in few) == max(0, size - 2)


# What a data set draws


class Noisy(Dataset):
    """Each sample is its index and one number from each of three generators."""

    def __len__(self):
        return 50

    def __getitem__(self, index):
        drawn = [torch.rand(()).item(), np.random.random(), random.random()]
        return torch.tensor([index, *drawn], dtype=torch.float64)


class NoisyAtOnce(Noisy):
    """The same for data that are fetched a batch at a time."""

    def __getitems__(self, indices):
        return [self[index] for index in indices]


def see(data, options, stop=None):
    """(epoch, index) -> what was drawn; and of each step, what training draws."""
    sampler = ddp.ElasticSampler(50, 8, seed=3)
    checkpoint = ddp.Checkpoint(sampler=sampler)
    checkpoint.restore()
    seen, of_steps = {}, {}
    for epoch in sampler.epochs(3):
        for batch in ddp.DataLoader(data, batch_sampler=sampler, **options):
            position = (epoch, sampler.step)
            of_steps[position] = (torch.rand(()).item(), np.random.random(), random.random())
            if sampler.weight:
                seen |= {(epoch, int(row[0])): row[1:].tolist() for row in batch}
            checkpoint.step()
            if position == stop:
                checkpoint.save()
                return everyone(seen), of_steps
    return everyone(seen), of_steps


CASES = [
    (ranks, options)
    for ranks in (1, 2, 3)
    for options in ({}, {"num_workers": 1}, {"num_workers": 2, "persistent_workers": True})
]


@pytest.mark.parametrize("data", [Noisy(), NoisyAtOnce()], ids=lambda data: type(data).__name__)
def test_what_is_drawn_for_a_sample_is_the_same_in_any_worker_on_any_rank_and_after_a_resume(
    client, tmp_path, data
):
    whole, training = None, {}
    for number, (ranks, options) in enumerate(CASES):
        arguments = dict(data=data, options=options)
        run = tmp_path / f"run-{number}"
        shares, of_steps = on_ranks(client, ranks, see, directory=run, **arguments)
        seen = {key: value for share in shares for key, value in share.items()}
        whole = whole or seen
        assert seen == whole
        # what training itself draws depends on the rank, and not on the loader
        assert of_steps == training.setdefault(ranks, of_steps)

        run = tmp_path / f"interrupted-{number}"
        on_ranks(client, ranks, see, directory=run, stop=(1, 3), **arguments)
        ranks = 1 + number % 3
        shares, of_steps = on_ranks(client, ranks, see, directory=run, **arguments)
        rest = {key: value for share in shares for key, value in share.items()}
        assert len(rest) == 2 * 50 - 3 * 8
        assert rest.items() <= whole.items()
        if ranks in training:
            assert of_steps.items() <= training[ranks].items()
    assert len({number for drawn in whole.values() for number in drawn}) == 3 * 3 * 50
