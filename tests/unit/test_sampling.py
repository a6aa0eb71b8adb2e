"""What one rank is dealt, and where its position is; several ranks are in tests/distributed."""

import collections
import threading
import tracemalloc

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, TensorDataset
from torch.utils.data import DataLoader as TorchLoader

from ddp_common import DataLoader, ElasticSampler, Error, EvalSampler, messages, split
from ddp_common.ranks import reporting, stopping


def steps(sampler, epochs):
    return [batch for _ in sampler.epochs(epochs) for batch in sampler]


def resumed(sampler):
    """Another sampler, at the position of this one."""
    other = ElasticSampler(sampler.length, sampler.batch_size, seed=sampler.seed)
    other.load_state_dict(sampler.state_dict())
    return other


def restored(epoch, step):
    sampler = ElasticSampler(10, 4)
    sampler.load_state_dict({**sampler.state_dict(), "epoch": epoch, "step": step})
    return sampler


# The order


def test_drop_last_leaves_out_the_ragged_batch_and_nothing_else():
    whole = steps(ElasticSampler(103, 16), epochs=2)
    dropped = steps(ElasticSampler(103, 16, drop_last=True), epochs=2)
    assert dropped == whole[:6] + whole[7:13]
    assert len(ElasticSampler(96, 16, drop_last=True)) == len(ElasticSampler(96, 16)) == 6
    with pytest.raises(Error, match="leaves nothing of 15 samples in batches of 16"):
        ElasticSampler(15, 16, drop_last=True)


def test_the_order_of_a_seed_and_an_epoch_is_the_one_it_always_was():
    """Checkpoints of old runs depend on it."""
    for length in (1, 2, 103, 70_000):
        expected = np.random.default_rng([3, 5]).permutation(length)
        assert np.array_equal(ElasticSampler(length, 16, seed=3).permutation(5), expected)
        assert ElasticSampler(length, 16, seed=3).permutation(5).dtype == np.int64
    assert ElasticSampler(10, 4, seed=7).permutation(1).tolist() == [9, 0, 8, 6, 7, 1, 3, 4, 2, 5]


def test_without_shuffling_samples_come_in_order_and_nothing_is_kept_in_memory():
    assert steps(ElasticSampler(5, 2, shuffle=False), epochs=2) == [[0, 1], [2, 3], [4]] * 2
    assert next(iter(ElasticSampler(10**15, 4, shuffle=False))) == [0, 1, 2, 3]


def test_the_order_of_an_epoch_takes_four_bytes_a_sample():
    samples = 10_000_000
    tracemalloc.start()
    next(iter(ElasticSampler(samples, batch_size=64)))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 4 * samples <= most < 6 * samples


def test_numbers_of_numpy_and_torch_are_numbers():
    sampler = ElasticSampler(np.int64(10), torch.tensor(4), seed=np.int32(1))
    assert len(sampler) == 3
    assert len(EvalSampler(np.int64(10), torch.tensor(4))) == 3
    assert len(steps(sampler, np.int64(2))) == 6
    assert messages.pack([messages.Position(**reporting.position())])


@pytest.mark.parametrize("arguments", [(0, 4), (10, 256 / 2)])
def test_a_sampler_of_what_is_no_number_is_refused_at_once(arguments):
    with pytest.raises(Error, match=f"at least one sample .* not {arguments[0]} and"):
        ElasticSampler(*arguments)
    with pytest.raises(Error, match="seed of an ElasticSampler is a whole number .* not -1"):
        ElasticSampler(10, 4, seed=-1)


@pytest.mark.parametrize("arguments", [(10, 0), (10.0, 2)])
def test_an_evaluation_of_what_is_no_number_is_refused_at_once(arguments):
    with pytest.raises(Error, match="EvalSampler (needs|takes)"):
        EvalSampler(*arguments)


# Weight


def test_the_weight_of_no_batch_is_refused():
    sampler = ElasticSampler(10, 4)
    with pytest.raises(Error, match="none was taken yet"):
        _ = sampler.weight
    for _ in sampler.epochs(1):
        with pytest.raises(Error, match="Read it in the loop, when the batch is taken"):
            _ = sampler.weight
        assert [sampler.weight for _ in sampler] == [1.0] * 3
        with pytest.raises(Error, match="or its pass is over"):
            _ = sampler.weight


def test_a_thread_that_takes_batches_ahead_is_refused():
    sampler = ElasticSampler(103, 16)
    thread = threading.Thread(target=lambda: next(iter(sampler)))
    thread.start()
    thread.join()
    with pytest.raises(Error, match="Another thread takes this sampler's batches"):
        _ = sampler.weight


# Position


@pytest.mark.parametrize(
    "other",
    [
        dict(length=104),
        dict(seed=1),
        dict(batch_size=8),
        dict(shuffle=False),
        dict(drop_last=True),
    ],
    ids=lambda other: next(iter(other)),
)
def test_a_position_of_other_data_or_settings_is_refused(other):
    saved = ElasticSampler(**{"length": 103, "batch_size": 16, "seed": 0, **other}).state_dict()
    with pytest.raises(Error, match=next(iter(other))):
        ElasticSampler(103, 16).load_state_dict(saved)


@pytest.mark.parametrize("n", [-1, 1.5], ids=str)
def test_a_number_of_epochs_that_is_none_is_refused_before_the_loop(n):
    with pytest.raises(Error, match="number of epochs of the whole run, 0 or more"):
        next(ElasticSampler(10, 4).epochs(n))


@pytest.mark.parametrize("position", [(1, 0), (1, 2)], ids=str)
def test_a_plain_loop_after_a_later_position_is_refused_at_once(position):
    sampler = restored(*position)
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


# Passes


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


def test_a_pass_that_an_exception_ended_is_resumed_in_its_middle():
    sampler = ElasticSampler(10, 4)
    try:
        for _ in sampler:
            if sampler.step == 2:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        other = resumed(sampler)
    assert (other.epoch, other.step) == (0, 2)
    with pytest.raises(Error, match="saved within the pass"):
        next(iter(sampler))


def test_a_run_that_left_its_loop_over_epochs_is_resumed_in_the_middle():
    sampler = ElasticSampler(10, 4)
    for _ in sampler.epochs(3):
        for _ in sampler:
            if sampler.step == 2:
                break
        break
    assert steps(resumed(sampler), 3) == steps(sampler, 3) == steps(ElasticSampler(10, 4), 3)[2:]


def test_two_samplers_in_turns_count_their_steps_together(monkeypatch):
    monkeypatch.setattr(reporting, "_positions", {})
    monkeypatch.setattr(reporting, "_sums", collections.Counter())
    one, other, asked, places = ElasticSampler(10, 4), ElasticSampler(20, 4), [], []
    monkeypatch.setattr(stopping, "is_time_to_stop", lambda step: asked.append(step))
    for _ in one.epochs(2):
        for _ in zip(one, other):
            places.append(reporting.position())
    # what ranks agree on when one is told to stop: it grows
    assert len(asked) == 12 and asked == sorted(set(asked))
    # the second one leaves an epoch of 5 after 3
    assert [place["step"] for place in places] == [2, 4, 6, 10, 12, 14]
    assert all("total_samples" not in place and "epochs" not in place for place in places[1:])


# Loaders


def test_data_that_draw_nothing_are_fetched_whole_and_others_by_sample():
    class Fetched(torch.utils.data.Dataset):
        def __init__(self, draws):
            self.draws = draws
            self.asked = []

        def __getitems__(self, indices):
            self.asked.append(indices)
            return [torch.rand(()) if self.draws else torch.zeros(()) for _ in indices]

    for draws, sizes in ((False, [4, 4, 2]), (True, [4] + 10 * [1])):
        data = Fetched(draws)
        list(DataLoader(data, batch_sampler=ElasticSampler(10, 4)))
        assert [len(indices) for indices in data.asked] == sizes


@pytest.mark.parametrize("workers", [0, 2])
def test_an_item_that_cannot_be_read_says_so(workers):
    class Torn(torch.utils.data.Dataset):
        def __getitem__(self, index):
            if index == 5:
                raise OSError("torn")
            return index

    sampler = ElasticSampler(20, 4, shuffle=False)
    with pytest.raises(OSError, match="torn"):
        list(DataLoader(Torn(), batch_sampler=sampler, num_workers=workers))
    assert sampler.step == 1


def test_what_holds_another_sampler_than_ours_is_none_of_our_business():
    inner = BatchSampler(range(10), batch_size=3, drop_last=False)
    inner.left_out = {ElasticSampler(10, 4), *range(1000)}  # too many to look through
    assert len(list(TorchLoader(range(10), batch_sampler=inner))) == 4
    data = TensorDataset(torch.arange(10))
    data.position = ElasticSampler(10, 4)
    assert len(list(TorchLoader(data, batch_size=5))) == 2


# Parts


def test_a_split_is_disjoint_complete_and_equal_on_every_call():
    parts = split(103, [0.1, 0.2], seed=4)
    assert [len(part) for part in parts] == [72, 10, 21]
    assert sorted(np.concatenate(parts)) == list(range(103))
    again = split(103, [0.1, 0.2], seed=4)
    assert all(np.array_equal(one, other) for one, other in zip(parts, again))
    assert not np.array_equal(parts[0], split(103, [0.1, 0.2], seed=5)[0])


@pytest.mark.parametrize("length, fractions", [(4, [0.9]), (0, [0.3])])
def test_a_split_with_an_empty_part_is_refused(length, fractions):
    with pytest.raises(Error, match=f"split of {length} samples .* none may be empty"):
        split(length, fractions)


@pytest.mark.parametrize(
    "fractions",
    [[0.0], [0.5, 0.5], [1.5, -0.9], [float("nan")], [], 0.1],
    ids=str,
)
def test_fractions_that_leave_nothing_are_refused(fractions):
    for by in (None, [0] * 10):
        with pytest.raises(Error, match="positive fractions"):
            split(10, fractions, by=by)


def test_a_split_by_classes_gives_each_part_its_share_of_every_class():
    targets = [0] * 100 + [1] * 50 + [2] * 7
    parts = split(157, [0.2, 0.1], by=targets)
    counts = [np.bincount(np.take(targets, part)).tolist() for part in parts]
    assert counts == [[70, 35, 5], [20, 10, 1], [10, 5, 1]]
    by_name = split(157, [0.2, 0.1], by=[("a", "b", "c")[number] for number in targets])
    assert all(map(np.array_equal, parts, by_name))
    assert sorted(np.concatenate(parts)) == list(range(157))
    assert all((np.diff(part) > 0).all() for part in parts)


def test_a_split_by_classes_depends_on_the_seed_alone_and_each_class_has_its_own_order():
    targets = np.arange(300) % 3
    first, again, other = (split(300, [0.1], by=targets, seed=seed)[1] for seed in (4, 4, 5))
    assert np.array_equal(first, again) and not np.array_equal(first, other)
    assert len({tuple(first[targets[first] == label] // 3) for label in range(3)}) == 3


def test_the_smallest_class_is_in_every_part_or_the_split_is_refused():
    assert [len(part) for part in split(6, [0.01, 0.01], by=[0, 0, 0, 1, 1, 1])] == [2, 2, 2]
    with pytest.raises(Error, match="Class 1 has only 2 samples, too few for 3 parts"):
        split(5, [0.01, 0.01], by=[0, 0, 0, 1, 1])
    with pytest.raises(Error, match="Class river has only 2 samples"):
        split(5, [0.01, 0.01], by=["river", "lake", "lake", "river", "lake"])
    with pytest.raises(Error, match=r"classes of 6 samples have the shape \(6,\), not \(5,\)"):
        split(6, [0.1], by=[0, 0, 0, 1, 1])
