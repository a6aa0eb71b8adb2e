"""What the notebook `ucmerced` teaches by functions.

Its exercises judge rightly, its museum's faults are caught, its data are checked.
"""

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

import cloudpickle
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from PIL import Image
from tutorials_here import ROOT, clean_environment, names_of

import ddp_common as ddp

AERIAL = Path(os.environ.get("DDP_DATA", "/nonexistent")) / "ucmerced" / "rsscn7_subset"


@pytest.fixture(scope="module")
def ucmerced(tmp_path_factory):
    with names_of("ucmerced", tmp_path_factory.mktemp("runs")) as names:
        yield names


def test_the_checks_of_ucmerced_accept_the_solutions(ucmerced, capsys):
    assert ucmerced["check_accuracy"](ucmerced["my_accuracy"])
    assert ucmerced["check_quality"](ucmerced["my_quality"])
    assert ucmerced["check_interval"](ucmerced["my_interval"])
    assert capsys.readouterr().out.count("right") == 3


def own_accuracy(correct, judged):
    return correct / max(1, judged)


def mean_of_accuracies(correct, judged):
    share = torch.tensor(own_accuracy(correct, judged))
    dist.all_reduce(share)
    return share.item() / ddp.world_size()


def only_rank_0_calls(correct, judged):
    sums = torch.tensor([correct, judged])
    if ddp.rank() == 0:
        dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def rows_and_columns_exchanged(matrix):
    return matrix.diagonal() / matrix.sum(1).clamp(min=1), matrix.diagonal() / matrix.sum(0).clamp(
        min=1
    )


def not_a_number(matrix):
    return matrix.diagonal() / matrix.sum(0), matrix.diagonal() / matrix.sum(1)


def without_replacement(right):
    return np.quantile(
        [np.random.default_rng(0).permutation(right).mean() for _ in range(100)], [0.025, 0.975]
    )


def standard_error_once(right):
    error = (right.mean() * (1 - right.mean()) / len(right)) ** 0.5
    return right.mean() - error, right.mean() + error


@pytest.mark.parametrize(
    "check, wrong",
    [
        ("check_accuracy", lambda correct, judged: None),
        ("check_accuracy", own_accuracy),
        ("check_accuracy", mean_of_accuracies),
        ("check_accuracy", lambda correct, judged: correct / judged),
        ("check_accuracy", only_rank_0_calls),
        ("check_quality", lambda matrix: None),
        ("check_quality", rows_and_columns_exchanged),
        ("check_quality", not_a_number),
        ("check_interval", lambda right: None),
        ("check_interval", without_replacement),
        ("check_interval", standard_error_once),
    ],
)
def test_the_checks_of_ucmerced_refuse_wrong_answers(ucmerced, capsys, check, wrong):
    cloudpickle.register_pickle_by_value(
        sys.modules[__name__]
    )  # as if it were defined in a notebook
    try:
        assert not ucmerced[check](wrong)
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    assert "not yet" in capsys.readouterr().out


@pytest.mark.parametrize("check", ["check_accuracy", "check_quality", "check_interval"])
def test_an_answer_to_ucmerced_that_raises_is_shown_in_words(ucmerced, capsys, check):
    ddp.judge(ucmerced[check], ucmerced["crashes"])
    said = capsys.readouterr().out
    assert said.startswith("not yet") and "ZeroDivisionError: division by zero" in said


@pytest.mark.parametrize("seeded", [True, False])
def test_a_split_that_differs_between_ranks_is_caught(ucmerced, seeded):
    images = ucmerced["images"]
    everyones = ddp.launch(
        ucmerced["client"],
        ucmerced["splits_of_all"],
        images=images,
        held_out=0.2,
        seeded=seeded,
        workers=2,
    ).result
    with (
        contextlib.nullcontext()
        if seeded
        else pytest.raises(AssertionError, match="trained on by one rank and judged by another")
    ):
        ucmerced["check_disjoint"](everyones, len(images))


def test_sets_that_overlap_or_lose_an_image_are_caught(ucmerced):
    check, parts = ucmerced["check_disjoint"], [np.array([0, 1]), np.array([2]), np.array([3])]
    check([parts, parts], 4)
    for wrong, samples in (
        ([parts[0], parts[1], np.array([2])], 4),
        (parts, 5),
        ([parts[0], parts[1], np.array([3, 1])], 4),
    ):
        with pytest.raises(AssertionError):
            check([wrong, wrong], samples)


@pytest.mark.parametrize("padded", [True, False])
def test_images_that_count_twice_are_caught(ucmerced, padded):
    dealt = ddp.launch(
        ucmerced["client"], ucmerced["dealt_for_the_test"], samples=21, padded=padded, workers=2
    ).result
    with (
        pytest.raises(AssertionError, match="22 judgements of 21 images")
        if padded
        else contextlib.nullcontext()
    ):
        ucmerced["check_counted_once"](dealt, range(21))


@pytest.mark.parametrize(
    "outputs, criterion, says",
    [(1_000, F.cross_entropy, "is 6.9|is 7.|is 6."), (21, F.nll_loss, "is -?[01].")],
)
def test_too_many_outputs_and_nll_loss_on_logits_are_caught(ucmerced, outputs, criterion, says):
    labels = torch.arange(42) % 21
    ucmerced["check_first_loss"](ucmerced["first_loss"](21, F.cross_entropy, labels), 21)
    with pytest.raises(AssertionError, match=says):
        ucmerced["check_first_loss"](ucmerced["first_loss"](outputs, criterion, labels), 21)


def test_accuracy_on_training_images_is_caught(ucmerced):
    ucmerced["check_held_out"]([{3: 0}, {4: 1}], [0, 1, 2])
    with pytest.raises(AssertionError, match="1 of the judged images were trained on"):
        ucmerced["check_held_out"]([{3: 0}, {2: 1}], [0, 1, 2])


def test_two_ranks_in_the_queue_of_one_worker_are_caught(ucmerced):
    workers = ucmerced["client"].workers()
    ucmerced["check_all_met"](ucmerced["ranks_as_tasks"](list(workers)))
    first = next(iter(workers))
    with pytest.raises(AssertionError, match="queue of the same worker"):
        ucmerced["check_all_met"](
            ucmerced["ranks_as_tasks"]([first] * (workers[first]["nthreads"] + 1))
        )


def test_an_evaluation_on_rank_0_alone_ends_at_once_and_says_who_left(ucmerced):
    network = ucmerced["make_network"]("resnet18", 21)
    with pytest.raises(
        ddp.RankFailed, match="its function returned at step 0, while rank 0 went on"
    ) as failed:
        ddp.launch(
            ucmerced["client"],
            ucmerced["judge_on_rank_0_only"],
            images=ucmerced["images"],
            network="resnet18",
            weights=network.state_dict(),
            rows=ucmerced["test"][:20],
            workers=2,
        )
    assert failed.value.rank == 1


def test_an_unknown_network_is_refused_with_those_that_there_are(ucmerced):
    with pytest.raises(
        ddp.Error, match="no network 'resnet7'. There is: resnet101, resnet152, resnet18"
    ):
        ucmerced["make_network"]("resnet7", 21)


def make_folder(path, counts):
    for label, count in counts.items():
        (path / label).mkdir(parents=True)
        for number in range(count):
            Image.new("RGB", (8, 8), (number, 0, 0)).save(path / label / f"{number}.png")
    return path


def run_tutorial(tmp_path, values):
    """What `make run` does with these settings."""
    return subprocess.run(
        [sys.executable, "-m", "ddp_common", "run", "ucmerced", "--set", values],
        cwd=ROOT,
        env=clean_environment(tmp_path / "runs"),
        capture_output=True,
        text=True,
    )


def test_a_class_that_is_too_small_for_three_sets_is_refused_in_one_message(tmp_path):
    done = run_tutorial(
        tmp_path, f"data={make_folder(tmp_path / 'mine', {'forest': 5, 'river': 2})}"
    )
    assert done.returncode == 1
    assert (
        "The class 'river' has 2 image(s)" in done.stderr
        and "Traceback" not in done.stderr
        and done.stderr.count("Error") == 1
    )


@pytest.mark.skipif(
    not AERIAL.is_dir(),
    reason="DDP_DATA names no folder with ucmerced/rsscn7_subset, real aerial scenes",
)
def test_real_aerial_scenes_are_told_apart_better_than_by_a_linear_model(tmp_path):
    """The bar is low because the data are few: 105 photographs to learn from, 35 for the test.

    Over five seeds 59 % were right, from 49 to 66 %.
    """
    done = run_tutorial(
        tmp_path, f"data={AERIAL} epochs=20 batch_size=16 learning_rate=1e-3 held_out=0.2"
    )
    assert done.returncode == 0, done.stderr[-3000:]
    network, linear = (
        float(re.search(rf"{name} +([\d.]+)%", done.stdout)[1])
        for name in ("resnet18", "linear on pixels")
    )
    assert network > 45 and network > linear + 10, done.stdout
