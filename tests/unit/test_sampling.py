"""Index maths of one rank; what several ranks do together is in tests/distributed."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from ddp_common import ElasticSampler, Error, EvalSampler, split, stratified_split


def steps(sampler, epochs):
    return [batch for _ in sampler.epochs(epochs) for batch in sampler]


def test_every_sample_is_dealt_once_per_epoch_and_the_last_batch_is_ragged():
    dealt = steps(ElasticSampler(103, 16), epochs=1)
    assert [len(batch) for batch in dealt] == [16] * 6 + [7]
    assert sorted(index for batch in dealt for index in batch) == list(range(103))


def test_the_number_of_steps_counts_the_ragged_batch():
    assert [len(ElasticSampler(length, 16)) for length in (1, 16, 17, 103)] == [1, 1, 2, 7]


def test_each_epoch_has_its_own_order_and_each_seed_its_own():
    orders = [ElasticSampler(100, 10, seed=seed).permutation(epoch) for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4
    assert tuple(ElasticSampler(100, 10, seed=1).permutation(1)) == tuple(orders[3])


def test_without_shuffling_samples_come_in_order():
    assert steps(ElasticSampler(5, 2, shuffle=False), epochs=2) == [[0, 1], [2, 3], [4]] * 2


def test_alone_every_step_has_weight_one():
    sampler = ElasticSampler(103, 16)
    assert [sampler.weight for _ in sampler.epochs(1) for _ in sampler] == [1.0] * 7


@pytest.mark.parametrize("stop", [1, 5, 7, 8, 14], ids=lambda stop: f"after_step_{stop}")
def test_a_restored_position_goes_on_with_exactly_the_next_step(stop):
    whole = steps(ElasticSampler(103, 16, seed=3), epochs=3)
    first = ElasticSampler(103, 16, seed=3)
    endless = (batch for _ in first.epochs(3) for batch in first)
    begun = [next(endless) for _ in range(stop)]
    second = ElasticSampler(103, 16, seed=3)
    second.load_state_dict(first.state_dict())
    assert begun + steps(second, epochs=3) == whole


def test_a_position_saved_between_two_epochs_goes_on_with_the_next_epoch():
    first = ElasticSampler(10, 4)
    steps(first, epochs=2)
    second = ElasticSampler(10, 4)
    second.load_state_dict(first.state_dict())
    assert list(second.epochs(4)) == [2, 3]


def test_a_finished_run_has_no_epoch_left():
    first = ElasticSampler(10, 4)
    steps(first, epochs=2)
    second = ElasticSampler(10, 4)
    second.load_state_dict(first.state_dict())
    assert list(second.epochs(2)) == []


def test_the_random_state_of_a_step_does_not_depend_on_what_was_drawn_before():
    def draws(before):
        sampler, drawn = ElasticSampler(10, 5), []
        for _ in sampler.epochs(2):
            for _ in sampler:
                drawn.append(torch.rand(()).item())
                torch.rand(before)
        return drawn

    assert draws(before=0) == draws(before=7)
    assert len(set(draws(before=0))) == 4


@pytest.mark.parametrize("other", [dict(length=104), dict(seed=1), dict(batch_size=8)], ids=lambda other: next(iter(other)))
def test_a_position_of_other_data_or_settings_is_refused(other):
    saved = ElasticSampler(**{"length": 103, "batch_size": 16, "seed": 0, **other}).state_dict()
    with pytest.raises(Error, match=next(iter(other))):
        ElasticSampler(103, 16).load_state_dict(saved)


@pytest.mark.parametrize(("length", "batch_size"), [(0, 16), (10, 0), (-1, 1), (10, -3)])
def test_nothing_to_deal_is_refused(length, batch_size):
    with pytest.raises(Error, match="at least one sample"):
        ElasticSampler(length, batch_size)


def test_evaluation_alone_visits_all_samples_in_order():
    sampler = EvalSampler(23, 5)
    assert [index for batch in sampler for index in batch] == list(range(23))
    assert len(sampler) == len(list(sampler)) == 5


def test_a_split_is_disjoint_complete_and_equal_on_every_call():
    parts = split(103, [0.1, 0.2], seed=4)
    assert [len(part) for part in parts] == [72, 10, 21]
    assert sorted(np.concatenate(parts)) == list(range(103))
    assert all(np.array_equal(one, other) for one, other in zip(parts, split(103, [0.1, 0.2], seed=4)))
    assert not np.array_equal(parts[0], split(103, [0.1, 0.2], seed=5)[0])


def test_a_split_of_few_samples_is_still_complete():
    for length in range(1, 12):
        assert sorted(np.concatenate(split(length, [0.3, 0.3, 0.3]))) == list(range(length)), length


@pytest.mark.parametrize("fractions", [[0.0], [-0.1], [1.0], [0.5, 0.5], [0.7, 0.7], [1.5, -0.9], [float("nan")]], ids=str)
def test_fractions_that_leave_nothing_are_refused(fractions):
    with pytest.raises(Error, match="fractions"):
        split(10, fractions)


def followed(sampler, epochs, workers):
    """Of each step: the samples, and where the sampler says that training is."""
    loader = DataLoader(range(103), batch_sampler=sampler, num_workers=workers)
    return [(batch.tolist(), sampler.state_dict(), sampler.weight, torch.rand(1)) for _ in sampler.epochs(epochs) for batch in sampler.follow(loader)]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_with_workers_asks_ahead_and_the_position_is_that_of_training(workers):
    sampler = ElasticSampler(103, 16, seed=3)
    plain = [(batch, sampler.state_dict(), sampler.weight, torch.rand(1)) for _ in sampler.epochs(2) for batch in sampler]
    assert followed(ElasticSampler(103, 16, seed=3), 2, workers) == plain


@pytest.mark.parametrize("stop", [1, 5, 7, 8])
def test_a_followed_loader_that_was_left_goes_on_with_exactly_the_next_step(stop):
    first = ElasticSampler(103, 16, seed=3)
    endless = (batch for _ in first.epochs(2) for batch in first.follow(DataLoader(range(103), batch_sampler=first, num_workers=2)))
    begun = [next(endless).tolist() for _ in range(stop)]
    second = ElasticSampler(103, 16, seed=3)
    second.load_state_dict(first.state_dict())
    assert begun + [batch for batch, *_ in followed(second, 2, workers=2)] == steps(ElasticSampler(103, 16, seed=3), epochs=2)


def test_a_loader_with_another_sampler_cannot_be_followed():
    with pytest.raises(Error, match="batch_sampler is this sampler"):
        next(ElasticSampler(103, 16).follow(DataLoader(range(103), batch_size=16)))


def test_a_stratified_split_gives_each_part_its_share_of_every_class():
    targets = [0] * 100 + [1] * 50 + [2] * 7
    parts = stratified_split(targets, [0.2, 0.1])
    assert [np.bincount(np.take(targets, part)).tolist() for part in parts] == [[70, 35, 5], [20, 10, 1], [10, 5, 1]]
    assert sorted(np.concatenate(parts)) == list(range(157)) and all((np.diff(part) > 0).all() for part in parts)


def test_a_stratified_split_depends_on_the_seed_alone():
    targets = np.arange(300) % 3
    first, again, other = (stratified_split(targets, [0.1], seed=seed)[1] for seed in (4, 4, 5))
    assert np.array_equal(first, again) and not np.array_equal(first, other)
    assert len({tuple(first[targets[first] == label] // 3) for label in range(3)}) == 3  # each class has its own order


def test_the_smallest_class_is_in_every_part_or_the_split_is_refused():
    assert [len(part) for part in stratified_split([0, 0, 0, 1, 1, 1], [0.01, 0.01])] == [2, 2, 2]
    with pytest.raises(Error, match="Class 1 has only 2 samples, too few for 3 parts"):
        stratified_split([0, 0, 0, 1, 1], [0.01, 0.01])


@pytest.mark.parametrize("fractions", [[0.0], [1.0], [0.5, 0.5], [-0.1]])
def test_a_stratified_split_takes_the_fractions_of_a_split(fractions):
    with pytest.raises(Error, match="positive fractions"):
        stratified_split([0] * 10, fractions)
