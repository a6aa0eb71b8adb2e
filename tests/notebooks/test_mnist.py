"""What the notebook `mnist` teaches by functions.

Its exercises judge rightly, its museum's faults are caught, its data are checked.
"""

import contextlib
import gzip
import sys

import cloudpickle
import numpy as np
import pytest
import torch
import torch.distributed as dist
from tutorials_here import names_of

import ddp_common as ddp


@pytest.fixture(scope="module")
def mnist(tmp_path_factory):
    with names_of("mnist", tmp_path_factory.mktemp("runs")) as names:
        yield names


def test_the_checks_of_mnist_accept_the_solutions(mnist, capsys):
    assert mnist["check_buckets"](mnist["my_buckets"])
    assert mnist["check_broadcast"](mnist["my_broadcast"])
    assert mnist["check_accumulation"](mnist["my_accumulation"])
    assert capsys.readouterr().out.count("right") == 3


def in_the_order_of_the_model(sizes, capacity):
    return [list(range(len(sizes)))]


def closed_before_it_overflows(sizes, capacity):
    buckets, held = [], capacity
    for number in reversed(range(len(sizes))):
        if held + sizes[number] > capacity:
            buckets, held = [*buckets, []], 0
        buckets[-1].append(number)
        held += sizes[number]
    return buckets


def average_the_weights(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.data)
        parameter.data /= ddp.world_size()


def only_rank_0_calls(model):
    if ddp.rank() == 0:
        for parameter in model.parameters():
            dist.broadcast(parameter.data, src=0)


def average_after_every_part(model, parts):
    for part in parts:
        (torch.nn.functional.mse_loss(model(part), part) / len(parts)).backward()


def forget_to_divide(model, parts):
    with model.no_sync():
        for part in parts[:-1]:
            torch.nn.functional.mse_loss(model(part), part).backward()
    torch.nn.functional.mse_loss(model(parts[-1]), parts[-1]).backward()


def never_average(model, parts):
    with model.no_sync():
        average_after_every_part(model, parts)


@pytest.mark.parametrize(
    "check, wrong",
    [
        ("check_buckets", in_the_order_of_the_model),
        ("check_buckets", closed_before_it_overflows),
        ("check_buckets", lambda sizes, capacity: None),
        ("check_broadcast", lambda model: None),
        ("check_broadcast", average_the_weights),
        ("check_broadcast", only_rank_0_calls),
        ("check_accumulation", lambda model, parts: None),
        ("check_accumulation", average_after_every_part),
        ("check_accumulation", forget_to_divide),
        ("check_accumulation", never_average),
    ],
)
def test_the_checks_of_mnist_refuse_wrong_answers(mnist, capsys, check, wrong):
    cloudpickle.register_pickle_by_value(
        sys.modules[__name__]
    )  # as if it were defined in a notebook
    try:
        assert not mnist[check](wrong)
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    assert "not yet" in capsys.readouterr().out


@pytest.mark.parametrize("check", ["check_buckets", "check_broadcast", "check_accumulation"])
def test_an_answer_to_mnist_that_raises_is_shown_in_words(mnist, capsys, check):
    ddp.judge(mnist[check], mnist["crashes"])
    said = capsys.readouterr().out
    assert said.startswith("not yet") and "ZeroDivisionError: division by zero" in said


def test_epochs_that_deal_the_same_are_caught(mnist):
    deals = mnist["deals"]()
    mnist["check_epochs_differ"](deals["ElasticSampler"])
    mnist["check_epochs_differ"](deals["with set_epoch"])
    with pytest.raises(AssertionError, match="every epoch deals the same"):
        mnist["check_epochs_differ"](deals["DistributedSampler"])


@pytest.mark.parametrize("rank_0_only", [True, False])
def test_writing_from_all_ranks_is_caught(mnist, tmp_path, rank_0_only):
    found = mnist["on_two_ranks"](
        mnist["all_ranks_write"], folder=str(tmp_path / "new"), rank_0_only=rank_0_only
    )
    with (
        contextlib.nullcontext()
        if rank_0_only
        else pytest.raises(AssertionError, match="FileExistsError.*finds 0 bytes")
    ):
        mnist["check_written_once"](*found)


@pytest.mark.parametrize("with_training_sampler", [True, False])
def test_validation_with_the_training_sampler_is_caught(mnist, with_training_sampler):
    training, held_out = ddp.split(103, [0.2])
    judged = mnist["on_two_ranks"](
        mnist["judged"],
        samples=103,
        training=training,
        held_out=held_out,
        with_training_sampler=with_training_sampler,
    )
    with (
        pytest.raises(AssertionError, match="not held out")
        if with_training_sampler
        else contextlib.nullcontext()
    ):
        mnist["check_judged"](judged, held_out)


@pytest.mark.parametrize("seen", [[[0, 1], [2, 3]], [[0, 1, 2], [1]], [[], [0]]])
def test_held_out_digits_that_are_missing_or_count_twice_are_caught(mnist, seen):
    with pytest.raises(AssertionError):
        mnist["check_judged"](seen, [0, 1, 2])


def test_shards_of_different_length_end_at_once_and_are_named(mnist):
    few = {
        "epochs": 1,
        "batch_size": 128,
        "learning_rate": 1e-3,
        "width": 8,
        "bottleneck": 2,
        "seed": 0,
    }
    with pytest.raises(ddp.RankFailed, match="returned at step 4, while rank 0 went on") as failed:
        ddp.launch(
            mnist["client"],
            mnist["train_on_own_part"],
            images=mnist["images"][:1_100],
            **few,
            workers=2,
        )
    assert failed.value.rank == 1


def write_idx(path, array):
    path.write_bytes(
        gzip.compress(
            bytes([0, 0, 8, array.ndim])
            + b"".join(length.to_bytes(4) for length in array.shape)
            + array.tobytes()
        )
    )


@pytest.mark.parametrize(
    "parts, read",
    [({"digits": 50}, [45, 45, 5, 5]), ({"train": 30, "t10k": 20}, [30, 30, 20, 20])],
)
def test_digits_of_ones_own_come_with_a_test_set_or_a_tenth_is_held_out(
    mnist, tmp_path, parts, read
):
    for part, count in parts.items():
        write_idx(tmp_path / f"{part}-images-idx3-ubyte.gz", np.zeros((count, 28, 28), np.uint8))
        write_idx(tmp_path / f"{part}-labels-idx1-ubyte.gz", np.arange(count, dtype=np.uint8))
    assert [len(tensor) for tensor in mnist["read_digits"](tmp_path)] == read


@pytest.mark.parametrize("shape, labels", [((5, 28, 28), 4), ((5, 32, 32), 5)])
def test_digits_without_a_label_each_or_of_another_size_are_refused(
    mnist, tmp_path, shape, labels
):
    write_idx(tmp_path / "digits-images-idx3-ubyte.gz", np.zeros(shape, np.uint8))
    write_idx(tmp_path / "digits-labels-idx1-ubyte.gz", np.zeros(labels, np.uint8))
    with pytest.raises(ddp.Error, match="not digits of 28 x 28 with one label each"):
        mnist["read_digits"](tmp_path)
