"""Which samples the ranks get together, and what is drawn for each, on any number of ranks."""

import random
import sys

import cloudpickle
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import Dataset

import ddp_common as ddp

cloudpickle.register_pickle_by_value(sys.modules[__name__])

LENGTH, BATCH, SIZES = 103, 16, (1, 2, 3, 4)
EVALUATED = (23, 2)  # 2: fewer samples than ranks


def gather(mine):
    everyone = [None] * ddp.world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def deal(length, batch_size, epochs, state=None, stop=None, drop_last=False):
    """Per rank, (epoch, indices, weight) of each step; and the position after the last."""
    sampler = ddp.ElasticSampler(length, batch_size, seed=7, drop_last=drop_last)
    if state is not None:
        sampler.load_state_dict(state)
    dealt = []
    for epoch in sampler.epochs(epochs):
        for indices in sampler:
            dealt.append((epoch, indices, sampler.weight))
            if len(dealt) == stop:
                return gather(dealt), sampler.state_dict()
    return gather(dealt), sampler.state_dict()


def evaluate(lengths):
    return [
        gather([index for batch in ddp.EvalSampler(length, 5) for index in batch])
        for length in lengths
    ]


def splits():
    return gather([part.tolist() for part in ddp.split(103, [0.1, 0.2])])


def on_ranks(client, size, function, **arguments):
    return ddp.launch(client, function, workers=size, **arguments).result


@pytest.fixture(scope="module")
def dealt(client, tmp_path_factory):
    """world size -> what each rank was dealt in two epochs."""
    arguments = dict(length=LENGTH, batch_size=BATCH, epochs=2)
    return {
        size: on_ranks(client, size, deal, directory=tmp_path_factory.mktemp("run"), **arguments)[
            0
        ]
        for size in SIZES
    }


def batches(ranks):
    """The global batch of each step, as a sorted list: what the ranks with a weight got."""
    return [
        sorted(index for _, indices, weight in step if weight for index in indices)
        for step in zip(*ranks)
    ]


def test_each_step_has_the_same_samples_on_any_number_of_ranks(dealt):
    assert len(batches(dealt[1])) == 2 * 7
    for size in SIZES[1:]:
        assert batches(dealt[size]) == batches(dealt[1])


def test_together_the_ranks_get_every_sample_once_per_epoch_in_another_order_each(dealt):
    for ranks in dealt.values():
        steps = batches(ranks)
        assert sorted(sum(steps[:7], [])) == sorted(sum(steps[7:], [])) == list(range(LENGTH))
        assert steps[:7] != steps[7:]


def test_weights_average_to_one_and_weigh_every_sample_the_same(dealt):
    for size, ranks in dealt.items():
        for step in zip(*ranks):
            assert np.isclose(np.mean([weight for _, _, weight in step]), 1)
            influences = [weight / len(indices) for _, indices, weight in step if weight]
            assert np.allclose(influences, size / sum(len(indices) for _, indices, _ in step))


def test_a_rank_whose_share_is_empty_takes_part_with_one_sample_of_weight_zero(client):
    # the last batch has two samples
    ranks, _ = on_ranks(client, 3, deal, length=10, batch_size=4, epochs=1)
    *_, last = zip(*ranks)
    shares = [(len(indices), weight) for _, indices, weight in last]
    assert shares == [(1, 1.5), (1, 1.5), (1, 0.0)]
    (_, first, _), _, (_, extra, _) = last
    assert extra == first  # of the same batch
    assert sorted(sum(batches(ranks), [])) == list(range(10))


def test_a_last_batch_that_is_dropped_is_dropped_on_every_rank(client, dealt):
    arguments = dict(length=LENGTH, batch_size=BATCH, epochs=2, drop_last=True)
    ranks, _ = on_ranks(client, 3, deal, **arguments)
    whole = batches(dealt[1])
    assert batches(ranks) == whole[:6] + whole[7:13]


@pytest.mark.parametrize(("before", "after"), [(3, 1), (1, 3), (2, 2)])
def test_a_run_that_resumes_in_an_epoch_goes_on_with_exactly_the_next_steps(
    client, dealt, before, after
):
    arguments = dict(length=LENGTH, batch_size=BATCH, epochs=2)
    begun, state = on_ranks(client, before, deal, stop=4, **arguments)
    resumed, _ = on_ranks(client, after, deal, state=state, **arguments)
    assert batches(begun) + batches(resumed) == batches(dealt[1])


def test_evaluation_counts_every_sample_once_on_any_number_of_ranks(client):
    for size in SIZES:
        many, few = on_ranks(client, size, evaluate, lengths=EVALUATED)
        assert sorted(sum(many, [])) == list(range(23))
        assert sorted(sum(few, [])) == [0, 1]
        assert sum(not share for share in few) == max(0, size - 2)


def test_a_split_is_the_same_on_every_rank_and_on_the_client(client):
    of_client = [part.tolist() for part in ddp.split(103, [0.1, 0.2])]
    assert on_ranks(client, 3, splits) == [of_client] * 3


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
            if position == stop:
                checkpoint.save()
                return gather(seen), of_steps
    return gather(seen), of_steps


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
