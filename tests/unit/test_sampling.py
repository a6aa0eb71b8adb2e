"""Index maths of one rank; what several ranks do together is in tests/distributed."""

import collections
import pickle
import threading
import tracemalloc

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from ddp_common import ElasticSampler, Error, EvalSampler, split, stratified_split
from ddp_common.ranks import reporting, stopping


def steps(sampler, epochs):
    return [batch for _ in sampler.epochs(epochs) for batch in sampler]


def test_every_sample_is_dealt_once_per_epoch_and_the_last_batch_is_ragged():
    dealt = steps(ElasticSampler(103, 16), epochs=1)
    assert [len(batch) for batch in dealt] == [16] * 6 + [7]
    assert sorted(index for batch in dealt for index in batch) == list(range(103))


def test_the_number_of_steps_counts_the_ragged_batch():
    assert [len(ElasticSampler(length, 16)) for length in (1, 16, 17, 103)] == [1, 1, 2, 7]


def test_each_epoch_has_its_own_order_and_each_seed_its_own():
    orders = [
        ElasticSampler(100, 10, seed=seed).permutation(epoch)
        for seed in (0, 1)
        for epoch in (0, 1)
    ]
    assert len({tuple(order) for order in orders}) == 4
    assert tuple(ElasticSampler(100, 10, seed=1).permutation(1)) == tuple(orders[3])


def test_without_shuffling_samples_come_in_order():
    assert steps(ElasticSampler(5, 2, shuffle=False), epochs=2) == [[0, 1], [2, 3], [4]] * 2


def test_the_weight_of_no_batch_is_refused():
    sampler = ElasticSampler(10, 4)
    with pytest.raises(Error, match="none was taken yet"):
        _ = sampler.weight
    for _ in sampler.epochs(1):
        with pytest.raises(Error, match="Read it in the loop, when the batch is taken"):
            _ = sampler.weight
        next(iter(sampler))
        assert sampler.weight == 1.0


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


@pytest.mark.parametrize(
    "other",
    [dict(length=104), dict(seed=1), dict(batch_size=8)],
    ids=lambda other: next(iter(other)),
)
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
    assert all(
        np.array_equal(one, other) for one, other in zip(parts, split(103, [0.1, 0.2], seed=4))
    )
    assert not np.array_equal(parts[0], split(103, [0.1, 0.2], seed=5)[0])


def test_a_split_of_few_samples_is_complete_and_has_no_empty_part():
    for length in range(5, 16):
        parts = split(length, [0.3, 0.3, 0.3])
        assert sorted(np.concatenate(parts)) == list(range(length)) and all(map(len, parts))


@pytest.mark.parametrize("length, fractions", [(4, [0.9]), (4, [0.1]), (1, [0.3]), (0, [0.3])])
def test_a_split_with_an_empty_part_is_refused(length, fractions):
    with pytest.raises(Error, match=f"split of {length} samples .* none may be empty"):
        split(length, fractions)


@pytest.mark.parametrize(
    "arguments, said",
    [
        ((128.0, 4), "whole numbers, not 128.0 and 4"),
        ((0, 4), "not 0 and 4"),
        ((10, 0), "not 10 and 0"),
        ((10, 256 / 2), "not 10 and 128.0"),
    ],
)
def test_a_sampler_of_what_is_no_number_is_refused_at_once(arguments, said):
    with pytest.raises(Error, match=said):
        ElasticSampler(*arguments)


def test_a_seed_that_is_none_is_refused_at_once():
    with pytest.raises(Error, match="seed of an ElasticSampler is a whole number .* not -1"):
        ElasticSampler(10, 4, seed=-1)


@pytest.mark.parametrize("arguments", [(10, 0), (10, 2.0), (10.0, 2), (-1, 2)])
def test_an_evaluation_of_what_is_no_number_is_refused_at_once(arguments):
    with pytest.raises(Error, match="EvalSampler (needs|takes)"):
        EvalSampler(*arguments)


def test_numbers_of_numpy_and_torch_are_numbers():
    assert len(ElasticSampler(np.int64(10), torch.tensor(4), seed=np.int32(1))) == 3
    assert len(EvalSampler(np.int64(10), torch.tensor(4))) == 3


@pytest.mark.parametrize(
    "fractions",
    [
        [0.0],
        [-0.1],
        [1.0],
        [0.5, 0.5],
        [0.7, 0.7],
        [0.7, 0.2, 0.1],
        [1.5, -0.9],
        [float("nan")],
        [],
        0.1,
    ],
    ids=str,
)
def test_fractions_that_leave_nothing_are_refused(fractions):
    with pytest.raises(Error, match="fractions"):
        split(10, fractions)


def followed(sampler, epochs, workers):
    """Of each step: the samples, and where the sampler says that training is."""
    loader = DataLoader(range(103), batch_sampler=sampler, num_workers=workers)
    return [
        (batch.tolist(), sampler.state_dict(), sampler.weight, torch.rand(1))
        for _ in sampler.epochs(epochs)
        for batch in sampler.follow(loader)
    ]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_with_workers_asks_ahead_and_the_position_is_that_of_training(workers):
    sampler = ElasticSampler(103, 16, seed=3)
    plain = [
        (batch, sampler.state_dict(), sampler.weight, torch.rand(1))
        for _ in sampler.epochs(2)
        for batch in sampler
    ]
    assert followed(ElasticSampler(103, 16, seed=3), 2, workers) == plain


@pytest.mark.parametrize("stop", [1, 5, 7, 8])
def test_a_followed_loader_that_was_left_goes_on_with_exactly_the_next_step(stop):
    first = ElasticSampler(103, 16, seed=3)
    endless = (
        batch
        for _ in first.epochs(2)
        for batch in first.follow(DataLoader(range(103), batch_sampler=first, num_workers=2))
    )
    begun = [next(endless).tolist() for _ in range(stop)]
    second = ElasticSampler(103, 16, seed=3)
    second.load_state_dict(first.state_dict())
    assert begun + [batch for batch, *_ in followed(second, 2, workers=2)] == steps(
        ElasticSampler(103, 16, seed=3), epochs=2
    )


def test_a_loader_with_another_sampler_cannot_be_followed():
    with pytest.raises(Error, match="batch_sampler is this sampler"):
        next(ElasticSampler(103, 16).follow(DataLoader(range(103), batch_size=16)))


def test_a_stratified_split_gives_each_part_its_share_of_every_class():
    targets = [0] * 100 + [1] * 50 + [2] * 7
    parts = stratified_split(targets, [0.2, 0.1])
    assert [np.bincount(np.take(targets, part)).tolist() for part in parts] == [
        [70, 35, 5],
        [20, 10, 1],
        [10, 5, 1],
    ]
    assert sorted(np.concatenate(parts)) == list(range(157)) and all(
        (np.diff(part) > 0).all() for part in parts
    )


def test_a_stratified_split_depends_on_the_seed_alone():
    targets = np.arange(300) % 3
    first, again, other = (stratified_split(targets, [0.1], seed=seed)[1] for seed in (4, 4, 5))
    assert np.array_equal(first, again) and not np.array_equal(first, other)
    assert (
        len({tuple(first[targets[first] == label] // 3) for label in range(3)}) == 3
    )  # each class has its own order


def test_the_smallest_class_is_in_every_part_or_the_split_is_refused():
    assert [len(part) for part in stratified_split([0, 0, 0, 1, 1, 1], [0.01, 0.01])] == [2, 2, 2]
    with pytest.raises(Error, match="Class 1 has only 2 samples, too few for 3 parts"):
        stratified_split([0, 0, 0, 1, 1], [0.01, 0.01])


@pytest.mark.parametrize("fractions", [[0.0], [1.0], [0.5, 0.5], [-0.1]])
def test_a_stratified_split_takes_the_fractions_of_a_split(fractions):
    with pytest.raises(Error, match="positive fractions"):
        stratified_split([0] * 10, fractions)


def test_the_order_of_a_seed_and_an_epoch_is_the_one_it_always_was():
    """Checkpoints of old runs depend on it."""
    for length in (1, 2, 103, 70_000):
        expected = np.random.default_rng([3, 5]).permutation(length)
        assert np.array_equal(ElasticSampler(length, 16, seed=3).permutation(5), expected)
        assert ElasticSampler(length, 16, seed=3).permutation(5).dtype == np.int64
    assert ElasticSampler(10, 4, seed=7).permutation(1).tolist() == [9, 0, 8, 6, 7, 1, 3, 4, 2, 5]


def test_without_shuffling_nothing_is_kept_in_memory():
    sampler = ElasticSampler(10**15, 4, shuffle=False)
    assert next(iter(sampler)) == [0, 1, 2, 3]


@pytest.mark.parametrize("n", [-1, 1.5, "3", None, float("inf")], ids=str)
def test_a_number_of_epochs_that_is_none_is_refused_before_the_loop(n):
    with pytest.raises(Error, match="number of epochs of the whole run, 0 or more"):
        ElasticSampler(10, 4).epochs(n)


def test_no_epochs_are_no_epochs():
    assert list(ElasticSampler(10, 4).epochs(0)) == []


def test_a_position_of_another_order_is_refused_and_an_old_one_without_it_is_not():
    state = ElasticSampler(10, 4).state_dict()
    with pytest.raises(Error, match="shuffle True there, False here"):
        ElasticSampler(10, 4, shuffle=False).load_state_dict(state)
    old = {"epoch": 1, "step": 3, "seed": 0, "length": 10, "batch_size": 4}
    sampler = ElasticSampler(10, 4, shuffle=False)
    sampler.load_state_dict(old)
    assert list(sampler.epochs(4)) == [2, 3]


def restored(epoch, step):
    sampler = ElasticSampler(10, 4)
    sampler.load_state_dict({**sampler.state_dict(), "epoch": epoch, "step": step})
    return sampler


def test_a_plain_loop_after_a_restored_first_epoch_goes_on():
    sampler = restored(0, 1)
    assert [(sampler.epoch, sampler.step) for _ in range(2) for _ in sampler] == [
        (0, 2),
        (0, 3),
        (1, 1),
        (1, 2),
        (1, 3),
    ]


@pytest.mark.parametrize("position", [(1, 0), (1, 2), (0, 3)], ids=str)
def test_a_plain_loop_after_a_later_position_is_refused_at_once(position):
    sampler = restored(*position)
    print(sampler.epoch)  # looking at it says nothing about the loop
    with pytest.raises(Error, match=r"for epoch in sampler.epochs\(n\)"):
        next(iter(sampler))
    with pytest.raises(Error, match=r"for epoch in sampler.epochs\(n\)"):
        sampler.set_epoch(0)


def test_set_epoch_says_where_the_loop_begins_and_never_goes_back():
    sampler = restored(1, 2)
    seen = []
    for epoch in range(sampler.epoch, 3):
        sampler.set_epoch(epoch)
        seen += [(sampler.epoch, sampler.step) for _ in sampler]
    assert seen == [(1, 3), (2, 1), (2, 2), (2, 3)]
    with pytest.raises(Error, match="epoch 0 of this sampler is over, the next one is 3"):
        sampler.set_epoch(0)
    with pytest.raises(Error, match="number of an epoch, 0 or more"):
        sampler.set_epoch(-1)


def test_set_epoch_within_epochs_agrees_or_is_refused():
    sampler = ElasticSampler(10, 4)
    for epoch in sampler.epochs(2):
        sampler.set_epoch(epoch)
        assert len(list(sampler)) == 3
    with pytest.raises(Error, match="counts for itself"):
        for epoch in sampler.epochs(4):
            sampler.set_epoch(0)


def test_a_position_that_is_restored_within_a_pass_ends_that_pass():
    sampler = ElasticSampler(10, 4)
    with pytest.raises(Error, match="can't go on"):
        for _ in sampler:
            sampler.load_state_dict({**sampler.state_dict(), "step": 0})


def test_loops_over_epochs_do_not_nest():
    sampler = ElasticSampler(10, 4)
    with pytest.raises(Error, match="second loop over epochs"):
        for _ in sampler.epochs(2):
            for _ in sampler.epochs(2):
                pass


def saved_by(leave):
    """Leave the first pass in its second step, save, and go on.

    Returns the saved state and the next position of the loop that went on.
    """
    sampler = ElasticSampler(10, 4)
    state = leave(sampler)
    next(iter(sampler))
    return state, (sampler.epoch, sampler.step - 1)


def test_a_pass_that_was_left_early_is_resumed_where_the_loop_went_on():
    def leave(sampler):
        for _ in sampler:
            if sampler.weight and sampler.step == 2:
                break
        return sampler.state_dict()

    state, went_on = saved_by(leave)
    resumed = ElasticSampler(10, 4)
    resumed.load_state_dict(state)
    assert (resumed.epoch, resumed.step) == went_on == (1, 0)


def test_a_pass_that_an_exception_ended_is_resumed_in_its_middle():
    sampler = ElasticSampler(10, 4)
    try:
        for _ in sampler:
            if sampler.step == 2:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        state = sampler.state_dict()
    resumed = ElasticSampler(10, 4)
    resumed.load_state_dict(state)
    assert (resumed.epoch, resumed.step) == (0, 2)
    with pytest.raises(Error, match="saved within the pass"):
        next(iter(sampler))


def test_a_run_that_left_its_loop_over_epochs_is_resumed_in_the_middle():
    sampler = ElasticSampler(10, 4)
    for _ in sampler.epochs(3):
        for _ in sampler:
            if sampler.step == 2:
                break
        break
    resumed = ElasticSampler(10, 4)
    resumed.load_state_dict(sampler.state_dict())
    assert steps(resumed, 3) == steps(sampler, 3) == steps(ElasticSampler(10, 4), 3)[2:]


def test_epochs_after_a_loop_of_ones_own_that_was_left_early_go_on_with_the_next_epoch():
    sampler = ElasticSampler(12, 2)
    for number, _ in enumerate(sampler):
        assert sampler.weight == 1.0  # it was trained on: no look at the data
        if number == 2:
            break
    saved = sampler.state_dict()
    resumed = ElasticSampler(12, 2)
    resumed.load_state_dict(saved)
    for each in (sampler, resumed):
        positions = [(epoch, each.step, len(list(each))) for epoch in each.epochs(3)]
        assert positions == [(1, 0, 6), (2, 0, 6)]


def test_an_abandoned_iterator_that_is_asked_again_is_refused():
    sampler = ElasticSampler(103, 16)
    first = iter(sampler)
    next(first)
    next(iter(sampler))
    with pytest.raises(Error, match="can't go on"):
        next(first)


def test_a_thread_that_takes_batches_ahead_is_refused():
    sampler = ElasticSampler(103, 16)
    thread = threading.Thread(target=lambda: next(iter(sampler)))
    thread.start()
    thread.join()
    with pytest.raises(Error, match="Another thread takes this sampler's batches"):
        _ = sampler.weight


class Rows(torch.utils.data.Sampler):
    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        for batch in self.sampler:
            yield [index + 1 for index in batch]


def test_what_is_between_a_loader_and_the_sampler_is_right_without_workers_and_refused_with_them():
    sampler = ElasticSampler(10, 4, shuffle=False)
    seen = [
        (batch.tolist(), sampler.step)
        for batch in DataLoader(range(11), batch_sampler=Rows(sampler))
    ]
    assert seen == [([1, 2, 3, 4], 1), ([5, 6, 7, 8], 2), ([9, 10], 3)]
    with pytest.raises(Error, match="something stands between"):
        next(iter(DataLoader(range(11), batch_sampler=Rows(ElasticSampler(10, 4)), num_workers=1)))


def test_a_loader_that_hands_out_whole_lists_needs_no_batches_of_its_own():
    sampler = ElasticSampler(10, 4, shuffle=False)
    data = torch.utils.data.TensorDataset(torch.arange(10))
    seen = [
        (batch.tolist(), sampler.step)
        for (batch,) in DataLoader(data, batch_size=None, sampler=sampler, num_workers=1)
    ]
    assert seen == [([0, 1, 2, 3], 1), ([4, 5, 6, 7], 2), ([8, 9], 3)]


class AsksLater(torch.utils.data.dataloader._MultiProcessingDataLoaderIter):
    """As another version of torch might: it asks for one batch less at first."""

    def _reset(self, loader, first_iter=False):
        self.questions = 0
        super()._reset(loader, first_iter)

    def _try_put_index(self):
        self.questions += 1
        if self.questions > 1:
            super()._try_put_index()


class OtherLoader(DataLoader):
    def _get_iterator(self):
        return AsksLater(self)


def test_a_loader_with_other_workings_is_refused_and_can_be_followed():
    sampler = ElasticSampler(103, 16, seed=3)
    loader = OtherLoader(range(103), batch_sampler=sampler, num_workers=2)
    with pytest.raises(Error, match=r"does not know.*`for batch in sampler.follow\(loader\)`"):
        next(iter(loader))
    seen = [(batch.tolist(), sampler.step) for batch in sampler.follow(loader)]
    assert seen == list(zip(steps(ElasticSampler(103, 16, seed=3), 1), range(1, 8)))


def test_an_item_that_cannot_be_read_costs_its_batch_and_no_more():
    class Torn(torch.utils.data.Dataset):
        def __getitem__(self, index):
            if index == 5:
                raise OSError("torn")
            return index

    for workers in (0, 2):
        sampler = ElasticSampler(20, 4, shuffle=False)
        batches, seen = iter(DataLoader(Torn(), batch_sampler=sampler, num_workers=workers)), []
        while sampler.step < 5:
            try:
                seen.append((next(batches).tolist()[0], sampler.step))
            except OSError:
                pass
        assert seen == [(0, 1), (8, 3), (12, 4), (16, 5)]


def test_a_data_set_that_looks_at_the_sampler_travels_to_workers_that_are_spawned():
    sampler = ElasticSampler(10, 4)
    sampler.between_steps.append(lambda: None)
    batches = iter(sampler)
    next(batches)
    copy = pickle.loads(pickle.dumps(sampler))
    assert (copy.epoch, copy.step, copy.between_steps) == (0, 1, [])
    assert steps(copy, 1) == list(batches)


def test_two_samplers_in_turns_count_their_steps_together(monkeypatch):
    monkeypatch.setattr(reporting, "_positions", {})
    monkeypatch.setattr(reporting, "_sums", collections.Counter())
    one, other, asked, places = ElasticSampler(10, 4), ElasticSampler(20, 4), [], []
    monkeypatch.setattr(stopping, "is_time_to_stop", lambda step: asked.append(step))
    for _ in one.epochs(2):
        for _ in zip(one, other):
            places.append(reporting.position())
    assert len(asked) == 12 and asked == sorted(
        set(asked)
    )  # what ranks agree on when one is told to stop: it grows
    assert [place["step"] for place in places] == [
        2,
        4,
        6,
        10,
        12,
        14,
    ]  # the second one leaves an epoch of 5 after 3
    assert all("total_samples" not in place and "epochs" not in place for place in places[1:])


def test_the_order_of_an_epoch_takes_four_bytes_a_sample():
    samples = 10_000_000
    tracemalloc.start()
    next(iter(ElasticSampler(samples, batch_size=64)))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 4 * samples <= most < 6 * samples
