"""What one rank is dealt, and where its position is; several ranks are in tests/distributed."""

import json
import os
import signal
import threading
import tracemalloc

import numpy as np
import pytest
import torch

from dask_ranks.rank import reporter
from ddp_common import (
    Checkpoint,
    DataLoader,
    ElasticSampler,
    Error,
    EvalSampler,
    inject,
    moments,
    reporting,
    split,
    stopping,
)


def steps(sampler, epochs):
    return [batch for _ in sampler.epochs(epochs) for batch in sampler.batches()]


def first_batch(sampler):
    for _ in sampler.epochs(1):
        return next(sampler.batches())


@pytest.fixture
def reports():
    """No sampler of another test has reported a position."""
    finish = reporter.Reporter(lambda message: None).finish
    yield
    finish()
    reporter.stop()


# The order


def test_drop_last_leaves_out_the_ragged_batch_and_nothing_else():
    whole = steps(ElasticSampler(103, 16), epochs=2)
    dropped = steps(ElasticSampler(103, 16, drop_last=True), epochs=2)
    assert dropped == whole[:6] + whole[7:13]
    assert len(ElasticSampler(96, 16, drop_last=True)) == len(ElasticSampler(96, 16)) == 6
    with pytest.raises(Error, match="leaves nothing of 15 samples in batches of 16"):
        ElasticSampler(15, 16, drop_last=True)


def test_a_short_epoch_has_the_first_steps_and_the_next_one_an_order_of_its_own(reports):
    sampler = ElasticSampler(103, 16, steps=3)
    assert len(sampler) == 3
    dealt = steps(sampler, epochs=2)
    position = reporting.position()
    assert position["samples"] == position["total_samples"] == 2 * 3 * 16
    whole = steps(ElasticSampler(103, 16), epochs=2)
    assert dealt == whole[:3] + whole[7:10]
    assert len(ElasticSampler(103, 16, steps=100)) == 7
    with pytest.raises(Error, match="whole numbers, not 103, batch_size=16, steps=0"):
        ElasticSampler(103, 16, steps=0)


def test_the_order_of_a_seed_and_an_epoch_is_the_one_it_always_was():
    """Checkpoints of old runs depend on it."""
    for length in (1, 2, 103, 70_000):
        dealt = steps(ElasticSampler(length, 16, seed=3), epochs=2)[-(-length // 16) :]
        assert sum(dealt, []) == np.random.default_rng([3, 1]).permutation(length).tolist()
    dealt = steps(ElasticSampler(10, 4, seed=7), epochs=2)[3:]
    assert sum(dealt, []) == [9, 0, 8, 6, 7, 1, 3, 4, 2, 5]


def test_without_shuffling_samples_come_in_order_and_nothing_is_kept_in_memory():
    assert steps(ElasticSampler(5, 2, shuffle=False), epochs=2) == [[0, 1], [2, 3], [4]] * 2
    assert first_batch(ElasticSampler(10**15, 4, shuffle=False)) == [0, 1, 2, 3]


def test_the_order_of_an_epoch_takes_four_bytes_a_sample():
    samples = 10_000_000
    tracemalloc.start()
    first_batch(ElasticSampler(samples, batch_size=64))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 4 * samples <= most < 6 * samples


def test_numbers_of_numpy_and_torch_are_numbers():
    sampler = ElasticSampler(np.int64(10), torch.tensor(4), seed=np.int32(1))
    assert len(sampler) == 3
    assert len(EvalSampler(np.int64(10), torch.tensor(4))) == 3
    assert len(steps(sampler, np.int64(2))) == 6
    assert json.dumps(reporting.position())


@pytest.mark.parametrize("size, batch_size, seed", [(0, 4, 0), (10, 256 / 2, 0), (10, 4, -1)])
def test_a_sampler_of_what_is_no_number_is_refused_at_once(size, batch_size, seed):
    words = f"not {size}, batch_size={batch_size}, steps=None, seed={seed}\\."
    with pytest.raises(Error, match=words):
        ElasticSampler(size, batch_size, seed=seed)


@pytest.mark.parametrize("arguments", [(10, 0), (10.0, 2)])
def test_an_evaluation_of_what_is_no_number_is_refused_at_once(arguments):
    with pytest.raises(Error, match="EvalSampler (needs|takes)"):
        EvalSampler(*arguments)


# Weight


def test_the_weight_of_no_batch_is_refused():
    sampler = ElasticSampler(10, 4)
    with pytest.raises(Error, match="no batch of the sampler was in training"):
        _ = sampler.weight
    for _ in sampler.epochs(1):
        with pytest.raises(Error, match="read the weight as one is taken"):
            _ = sampler.weight
        assert [sampler.weight for _ in sampler.batches()] == [1.0] * 3
        with pytest.raises(Error, match="no batch of the sampler was in training"):
            _ = sampler.weight


@pytest.mark.parametrize("reads", [True, False])
def test_a_thread_that_takes_batches_ahead_is_refused_when_the_epoch_ends_if_not_before(reads):
    sampler = ElasticSampler(103, 16)
    batches = sampler.batches()

    def take_all():
        for _ in range(len(sampler)):
            next(batches)

    with pytest.raises(Error, match="Another thread takes this sampler's batches"):
        for _ in sampler.epochs(2):
            thread = threading.Thread(target=take_all)
            thread.start()
            thread.join()
            if reads:
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
        dict(steps=3),
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


@pytest.mark.parametrize("position", [(0, 3), (-1, 0), (0, None), ("a", 0)], ids=str)
def test_a_position_that_no_sampler_has_is_refused(position):
    sampler = ElasticSampler(10, 4)
    epoch, step = position
    with pytest.raises(Error, match="no position of this sampler"):
        sampler.load_state_dict({**sampler.state_dict(), "epoch": epoch, "step": step})


# Loops


def test_a_position_that_is_restored_within_a_loop_ends_that_loop():
    sampler = ElasticSampler(10, 4)
    with pytest.raises(Error, match="iterator can't go on"):
        for _ in sampler.epochs(1):
            for _ in sampler.batches():
                sampler.load_state_dict(sampler.state_dict())
    with pytest.raises(Error, match="loop over epochs.* can't go on"):
        for _ in sampler.epochs(2):
            sampler.load_state_dict(sampler.state_dict())


def test_an_iterator_ends_with_its_epoch_and_its_loop():
    sampler = ElasticSampler(10, 4)
    for _ in sampler.epochs(2):
        batches = sampler.batches()
        for _ in range(1 + sampler.epoch):
            next(batches)
        break
    with pytest.raises(Error, match="iterator can't go on"):
        next(batches)


def test_loops_over_epochs_do_not_nest():
    sampler = ElasticSampler(10, 4)
    with pytest.raises(Error, match="second loop over epochs"):
        for _ in sampler.epochs(2):
            for _ in sampler.epochs(2):
                list(sampler.batches())


def test_a_pass_that_is_left_ends_the_loop_over_epochs_and_another_one_goes_on_there():
    sampler = ElasticSampler(10, 4)
    with pytest.raises(Error, match=r"(?s)epoch 1 was left after 2 of 3 steps.*steps=2"):
        for _ in sampler.epochs(3):
            for _ in sampler.batches():
                if (sampler.epoch, sampler.step) == (1, 2):
                    break
    assert (sampler.state_dict()["epoch"], sampler.state_dict()["step"]) == (1, 2)
    assert steps(sampler, 3) == steps(ElasticSampler(10, 4), 3)[5:]


class Saves:
    """Stands for a checkpoint of some samplers."""

    def __init__(self, *samplers):
        self.samplers = samplers
        self.saved = []
        for sampler in samplers:
            sampler.checkpoints.append(self)

    def step(self):
        for sampler in self.samplers:
            sampler.open_batches = 0

    def has_open_batches(self):
        return any(sampler.open_batches for sampler in self.samplers)

    def save_if_due(self):
        self.saved.append([sampler.steps_done for sampler in self.samplers])

    def save_and_wait(self):
        self.saved.append("before it leaves")


@pytest.fixture
def sigterm(monkeypatch):
    """Sends it to this process, which is as a rank that can be told to leave."""
    monkeypatch.setattr(stopping, "state", stopping.State())
    before = signal.getsignal(signal.SIGTERM)
    stopping.listen_to_sigterm()
    yield lambda: os.kill(os.getpid(), signal.SIGTERM)
    signal.signal(signal.SIGTERM, before)


def test_a_rank_that_is_told_to_leave_goes_on_until_a_batch_is_done_saves_and_leaves(sigterm):
    sampler = ElasticSampler(40, 4)
    checkpoint = Saves(sampler)
    with pytest.raises(stopping.Stopped):
        for _ in sampler.epochs(1):
            for _ in sampler.batches():
                if sampler.step == 5:
                    sigterm()
                if sampler.step % 2 == 0:
                    checkpoint.step()
    assert sampler.step == 6
    assert checkpoint.saved == [[0], [2], [4], "before it leaves"]


@pytest.mark.parametrize("is_saved_first", [True, False])
def test_ranks_leave_before_a_batch_of_the_sampler_that_is_saved(sigterm, is_saved_first):
    saved, other = ElasticSampler(40, 4), ElasticSampler(40, 4)
    checkpoint = Saves(saved)
    order = [saved, other] if is_saved_first else [other, saved]
    with pytest.raises(stopping.Stopped):
        for _ in zip(*(sampler.epochs(1) for sampler in order)):
            for _ in zip(*(sampler.batches() for sampler in order)):
                if saved.step == 4:
                    sigterm()
                checkpoint.step()
    assert (saved.step, other.step) == (4, 4 if is_saved_first else 5)
    assert checkpoint.saved[-2:] == [[3], "before it leaves"]


def test_of_two_checkpoints_none_is_left_in_the_middle_of_a_batch(sigterm):
    """Each has its sampler; what one says is no word of the other."""
    one, other = ElasticSampler(40, 4), ElasticSampler(40, 4)
    checkpoints = Saves(one), Saves(other)
    with pytest.raises(stopping.Stopped):
        for _ in zip(one.epochs(1), other.epochs(1)):
            for _ in zip(one.batches(), other.batches()):
                if one.step == 4:
                    sigterm()
                checkpoints[0].step()
                if other.step % 3 == 0:
                    checkpoints[1].step()
    assert (one.step, other.step) == (6, 6)
    assert [checkpoint.saved[-1] for checkpoint in checkpoints] == ["before it leaves"] * 2


def test_a_rank_leaves_where_the_program_saves(sigterm):
    sampler = ElasticSampler(8, 4)
    checkpoint = Saves(sampler)
    with pytest.raises(stopping.Stopped):
        for _ in sampler.epochs(1):
            for _ in sampler.batches():
                checkpoint.step()
                if sampler.step == 2:
                    sigterm()
            moments.after_save(checkpoint)
            raise AssertionError("it has not left")
    assert checkpoint.saved == [[0], [1]]


def test_a_checkpoint_of_an_earlier_loop_is_left_as_it_was(sigterm):
    earlier = ElasticSampler(8, 4)
    checkpoint = Saves(earlier)
    for _ in earlier.epochs(1):
        for _ in earlier.batches():
            checkpoint.step()
    with pytest.raises(stopping.Stopped):
        for _ in (later := ElasticSampler(40, 4)).epochs(1):
            for _ in later.batches():
                sigterm()
    assert later.step == 1 and checkpoint.saved == [[0], [1]]


def test_a_fault_that_is_injected_belongs_to_one_launch():
    def train():
        return len(steps(ElasticSampler(10, 4), 1))

    with pytest.raises(ValueError, match="a fault on purpose"):
        inject(train, "raise", rank=0, step=2)()
    assert train() == 3


def test_two_samplers_in_turns_count_their_steps_together(reports):
    one, other, places = ElasticSampler(10, 4), ElasticSampler(20, 4, steps=3), []
    for _ in zip(one.epochs(2), other.epochs(2)):
        for _ in zip(one.batches(), other.batches()):
            places.append(reporting.position())
    assert [place["step"] for place in places] == [2, 4, 6, 8, 10, 12]
    assert {place["total_samples"] for place in places} == {2 * 10 + 2 * 12}


def test_steps_of_a_sampler_that_is_done_count_after_a_resume_too(reports, tmp_path):
    for epochs in (1, 2):
        reporting.put_in(reporting.Sink())  # another process
        one, other = ElasticSampler(10, 4), ElasticSampler(20, 4)
        checkpoint = Checkpoint(directory=tmp_path, one=one, other=other)
        checkpoint.restore()
        for sampler, number in ((one, 2), (other, epochs)):
            for _ in sampler.epochs(number):
                for _ in sampler.batches():
                    checkpoint.step()
        checkpoint.save()
        checkpoint.wait()
        place = reporting.position()
        assert (place["step"], place["samples"]) == (6 + 5 * epochs, 20 + 20 * epochs)


# Loaders


class Fetched(torch.utils.data.Dataset):
    """Notes what it is asked for."""

    def __init__(self):
        self.asked = []

    def __getitems__(self, indices):
        self.asked.append(indices)
        return [torch.zeros(()) for _ in indices]


@pytest.mark.parametrize(("batched", "sizes"), [(True, [4, 4, 2]), (False, [1] * 10)])
def test_samples_are_asked_for_one_by_one_unless_the_program_says_otherwise(batched, sizes):
    data, sampler = Fetched(), ElasticSampler(10, 4)
    loader = DataLoader(data, batch_sampler=sampler, batched=batched, compare=False)
    assert loader.dataset is data and loader.batch_sampler is sampler
    for _ in sampler.epochs(1):
        assert len(list(loader)) == len(loader) == 3
    assert [len(indices) for indices in data.asked] == sizes


def test_data_without_whole_batches_are_not_said_to_have_them():
    with pytest.raises(Error, match="__getitems__ takes whole batches, and range has none"):
        DataLoader(range(9), batch_sampler=ElasticSampler(9, 3), batched=True)


def test_the_length_of_a_loader_is_that_of_its_pass():
    """`number + 1 == len(loader)` is the last batch of an epoch, also after a resume."""
    sampler = ElasticSampler(10, 2)
    loader = DataLoader(range(10), batch_sampler=sampler)
    sampler.load_state_dict({**sampler.state_dict(), "step": 3})
    assert len(loader) == len(sampler) == 5
    for epoch in sampler.epochs(2):
        expected = 2 if epoch == 0 else 5
        assert len(loader) == expected
        assert [len(loader) for _ in loader] == [expected] * expected == [len(loader)] * expected
    assert len(loader) == 5


@pytest.mark.parametrize("workers", [0, 2])
def test_an_item_that_cannot_be_read_says_so(workers):
    class Torn(torch.utils.data.Dataset):
        def __getitem__(self, index):
            if index == 5:
                raise OSError("torn")
            return index

    sampler = ElasticSampler(20, 4, shuffle=False)
    with pytest.raises(OSError, match="torn"):
        for _ in sampler.epochs(1):
            list(DataLoader(Torn(), batch_sampler=sampler, num_workers=workers))
    assert sampler.step == 1


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
