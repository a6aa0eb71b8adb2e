"""What the notebook `ucmerced` teaches by functions.

Its exercises judge rightly, its museum's faults are caught, its data are checked.
"""

import contextlib
import math
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
from tutorials_here import (
    ROOT,
    alt_texts,
    clean_environment,
    lines_cut_off,
    names_of,
    script,
)

import ddp_common as ddp

AERIAL = Path(os.environ.get("DDP_DATA", "/nonexistent")) / "ucmerced" / "rsscn7_subset"


@pytest.fixture(scope="module")
def ucmerced(tmp_path_factory):
    with names_of("ucmerced", tmp_path_factory.mktemp("runs")) as names:
        yield names


CHECKS = {
    "check_balanced": "my_balanced_accuracy",
    "check_header": "my_header",
    "check_reading": "my_reading",
    "check_restarts": "my_restarts",
    "check_repair": "my_repair",
    "check_comparison": "my_comparison",
}


@pytest.mark.parametrize(("check", "solution"), CHECKS.items())
def test_the_checks_of_ucmerced_accept_the_solutions(ucmerced, capsys, check, solution):
    assert ucmerced[check](ucmerced[solution])
    assert capsys.readouterr().out.startswith("right")


@pytest.mark.parametrize("check", CHECKS)
def test_an_answer_to_ucmerced_that_raises_is_shown_in_words(ucmerced, capsys, check):
    ddp.judge(ucmerced[check], ucmerced["crashes"])
    said = capsys.readouterr().out
    assert said.startswith("not yet") and "ZeroDivisionError: division by zero" in said


def nothing(*given, **named):
    """An answer that is not written yet."""


def refused(ucmerced, capsys, check, wrong):
    """What is said of a wrong answer, which travels as if a notebook had defined it."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    try:
        ddp.judge(ucmerced[check], wrong)
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    said = capsys.readouterr().out
    assert said.count("not yet") == 1 and "right:" not in said, said
    return said


@pytest.mark.parametrize("check", CHECKS)
def test_an_answer_to_ucmerced_that_is_not_written_yet_is_refused_once(ucmerced, capsys, check):
    assert "Traceback" not in refused(ucmerced, capsys, check, nothing)


# Exercise 1


def own_balanced_accuracy(labels, guesses, classes):
    recalls = [(guesses[labels == label] == label).float() for label in range(classes)]
    there = [hits.mean() for hits in recalls if len(hits)]
    return torch.stack(there).mean().item() if there else 0.0


def mean_over_ranks(labels, guesses, classes):
    share = torch.tensor(own_balanced_accuracy(labels, guesses, classes))
    dist.all_reduce(share)
    return share.item() / ddp.world_size()


def plain_accuracy(labels, guesses, classes):
    sums = torch.tensor([(labels == guesses).sum(), len(labels)])
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def counts_of_all_ranks(labels, guesses, classes):
    images = torch.bincount(labels, minlength=classes)
    right = torch.bincount(labels[labels == guesses], minlength=classes)
    dist.all_reduce(images)
    dist.all_reduce(right)
    return right, images


def not_a_number(labels, guesses, classes):
    right, images = counts_of_all_ranks(labels, guesses, classes)
    return (right / images).mean().item()


def absent_classes_as_zero(labels, guesses, classes):
    right, images = counts_of_all_ranks(labels, guesses, classes)
    return (right / images.clamp(min=1)).mean().item()


def precision_instead_of_recall(labels, guesses, classes):
    right, _ = counts_of_all_ranks(labels, guesses, classes)
    named = torch.bincount(guesses, minlength=classes)
    dist.all_reduce(named)
    return (right[named > 0] / named[named > 0]).mean().item()


def only_rank_0_calls(labels, guesses, classes):
    if ddp.rank() == 0:
        right, images = counts_of_all_ranks(labels, guesses, classes)
        return (right[images > 0] / images[images > 0]).mean().item()
    return 0.0


def only_rank_0_answers(labels, guesses, classes):
    right, images = counts_of_all_ranks(labels, guesses, classes)
    answer = (right[images > 0] / images[images > 0]).mean().item()
    return answer if ddp.rank() == 0 else None


@pytest.mark.parametrize(
    "wrong",
    [
        own_balanced_accuracy,
        mean_over_ranks,
        plain_accuracy,
        not_a_number,
        absent_classes_as_zero,
        precision_instead_of_recall,
        only_rank_0_calls,
        only_rank_0_answers,
    ],
)
def test_a_wrong_balanced_accuracy_is_refused(ucmerced, capsys, wrong):
    refused(ucmerced, capsys, "check_balanced", wrong)


# Exercise 2: more of it in tests/unit/test_batch_jobs.py and tests/hpc/test_slurm.py


def test_a_header_for_another_site_is_refused(ucmerced, capsys):
    header = ucmerced["my_header"](
        {"account": "lab", "partitions": {"main": 60}},
        {"ranks": 2, "cores": 1, "memory": 1, "minutes": 5, "warning": 60},
    )
    assert "Who pays" in refused(ucmerced, capsys, "check_header", lambda site, need: header)


def test_the_last_step_is_not_the_number_of_lost_ones(ucmerced, capsys):
    def last_step(log):
        cause, _ = ucmerced["my_reading"](log)
        return cause, int(re.findall(r"step (\d+)", log)[-1])

    refused(ucmerced, capsys, "check_reading", last_step)


def test_the_first_job_is_no_restart(ucmerced, capsys):
    def jobs(training, limit, warning, start):
        restarts = ucmerced["my_restarts"](training, limit, warning, start)
        return None if restarts is None else restarts + 1

    refused(ucmerced, capsys, "check_restarts", jobs)


# Exercise 3


def changed(*changes):
    """An answer to exercise 3: both faults named, and the script with these replacements."""

    def answer(script):
        for old, new in changes:
            assert old in script
            script = script.replace(old, new)
        return {"B", "C"}, script

    return answer


ENTROPY = ("F.nll_loss", "F.cross_entropy")
HELD_OUT = ("guesses = model", "mine = test[rank::ranks]\nguesses = model")
LOSS = "F.nll_loss(model(scenes[mine]), labels[mine])"
PADDING = (
    "mine = test[list(torch.utils.data.DistributedSampler(test, shuffle=False))]\nguesses = model"
)
WRONG_REPAIRS = {
    "nothing is repaired": changed(),
    "the loss alone is repaired": changed(ENTROPY),
    "the images alone are repaired": changed(HELD_OUT),
    "the sign is hidden": changed(HELD_OUT, (LOSS, f"{LOSS}.abs()")),
    "probabilities without their logarithm": changed(
        HELD_OUT, ("model(scenes[mine]), labels", "model(scenes[mine]).softmax(1), labels")
    ),
    "a sampler that pads": changed(ENTROPY, ("guesses = model", PADDING)),
    "all ranks judge all": changed(ENTROPY, ("guesses = model", "mine = test\nguesses = model")),
    "it trains on the test images, too": changed(
        ENTROPY, HELD_OUT, ("mine = train[rank", "mine = order[rank")
    ),
    "only rank 0 counts": changed(
        ENTROPY, HELD_OUT, ("dist.all_reduce(correct)", "pass  # rank 0 prints its own")
    ),
    "it fails": changed(ENTROPY, HELD_OUT, ("    optimizer.step()", "    undefined")),
    "other faults are named": lambda script: ({"A", "D"}, changed(ENTROPY, HELD_OUT)(script)[1]),
    "one fault is named": lambda script: ({"B"}, changed(ENTROPY, HELD_OUT)(script)[1]),
}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("wrong", WRONG_REPAIRS)
def test_a_wrong_repair_of_the_evaluation_is_refused(ucmerced, capsys, script_runs, wrong):
    repair = WRONG_REPAIRS[wrong]
    assert not ucmerced["check_repair"](lambda: repair(ucmerced["broken_script"]()))
    said = capsys.readouterr().out
    assert said.count("not yet") == 1 and "?" in said
    assert script_runs and not any(run.timed_out for run in script_runs)
    assert all(run.ok for run in script_runs) == (wrong != "it fails"), script_runs


# Stretch


def pieces(ucmerced, first, second, draws=2_000):
    """Differences and p of the solution: to spoil one of them."""
    return ucmerced["my_comparison"](first, second, draws)


def not_paired(ucmerced, first, second, draws=2_000):
    random, size = np.random.default_rng(0), len(first)
    drawn = (random.integers(size, size=(draws, size)) for _ in range(2))
    one, other = (right[rows].mean(1) for right, rows in zip((first, second), drawn))
    return one - other, pieces(ucmerced, first, second)[1]


def without_replacement(ucmerced, first, second, draws=2_000):
    difference = first.astype(float) - second
    order = np.random.default_rng(0).permutation(len(first))
    return np.full(draws, difference[order].mean()), pieces(ucmerced, first, second)[1]


def a_normal_distribution(ucmerced, first, second, draws=2_000):
    difference = first.astype(float) - second
    error = difference.std() / len(first) ** 0.5
    drawn = np.random.default_rng(0).normal(difference.mean(), error, draws)
    return drawn, pieces(ucmerced, first, second)[1]


def the_other_way_round(ucmerced, first, second, draws=2_000):
    differences, p = pieces(ucmerced, first, second)
    return -differences, p


def too_few_images_in_a_draw(ucmerced, first, second, draws=2_000):
    half = len(first) // 2
    differences, _ = pieces(ucmerced, first[:half], second[:half])
    return differences, pieces(ucmerced, first, second)[1]


def too_few_draws(ucmerced, first, second, draws=2_000):
    differences, p = pieces(ucmerced, first, second)
    return differences[:100], p


def one_sided(ucmerced, first, second, draws=2_000):
    differences, p = pieces(ucmerced, first, second)
    return differences, p / 2


def all_images_toss(ucmerced, first, second, draws=2_000):
    n, k = len(first), int(min((first & ~second).sum(), (second & ~first).sum()))
    p = min(1.0, 2 * sum(math.comb(n, i) for i in range(k + 1)) / 2**n)
    return pieces(ucmerced, first, second)[0], p


def an_approximation(ucmerced, first, second, draws=2_000):
    """The chi-squared form, without a correction."""
    b, c = (first & ~second).sum(), (second & ~first).sum()
    p = math.erfc(abs(b - c) / (b + c) ** 0.5 / 2**0.5)
    return pieces(ucmerced, first, second)[0], p


@pytest.mark.parametrize(
    "wrong",
    [
        not_paired,
        without_replacement,
        a_normal_distribution,
        the_other_way_round,
        too_few_images_in_a_draw,
        too_few_draws,
        one_sided,
        all_images_toss,
        an_approximation,
    ],
)
def test_a_wrong_comparison_is_refused(ucmerced, capsys, wrong):
    refused(
        ucmerced,
        capsys,
        "check_comparison",
        lambda first, second, draws=2_000: wrong(ucmerced, first, second, draws),
    )


# What the notebook computes


def test_the_interval_over_images_holds_the_truth_about_95_times_of_100(ucmerced):
    random = np.random.default_rng(1)
    held = 0
    for _ in range(100):
        low, high = ucmerced["interval"](random.random(200) < 0.7, draws=300)
        held += low <= 0.7 <= high
    assert 88 <= held <= 99


@pytest.mark.parametrize("share", [0.99, 0.999])
def test_where_nearly_all_images_are_right_the_interval_holds_the_truth_too(ucmerced, share):
    random = np.random.default_rng(0)
    held = 0
    for _ in range(300):
        low, high = ucmerced["interval"](random.random(315) < share)
        held += low <= share <= high
    assert held >= 0.91 * 300


def test_where_all_images_are_right_the_interval_does_not_say_that_nothing_can_go_wrong(ucmerced):
    low, high = ucmerced["interval"](np.ones(60, bool))
    assert 0.93 < low < 0.95 and high == pytest.approx(1)
    low, high = ucmerced["interval"](np.zeros(60, bool))
    assert low == pytest.approx(0) and 0.05 < high < 0.07


def test_the_interval_over_seeds_is_that_of_students_t(ucmerced):
    differences = np.array([1.0, 2.0, 3.0, 4.0, 5.0])  # mean 3, standard error 0.707
    ucmerced["T"] = {5: 2.78}
    said = ucmerced["over_seeds"](differences)
    assert "mean difference +3.0" in said and "+1.0 to +5.0 points: a difference" in said
    assert "no difference shown" in ucmerced["over_seeds"](differences - 3)
    assert "nothing can be said" in ucmerced["over_seeds"](differences[:1])


def test_precision_and_recall_of_a_class_that_was_never_named_or_has_no_image_are_0(ucmerced):
    table = ucmerced["per_class"](torch.tensor([[5, 0, 0], [5, 0, 0], [0, 0, 0]]), list("abc"))
    assert table.loc["a"].tolist() == [0.5, 1, 5]
    assert table.loc["b"].tolist() == [0, 0, 5]
    assert table.loc["c"].tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("per_class", "says", "does_not_say"),
    [
        ([1] * 2, "so few images tell only very different networks apart", "differ in size"),
        ([15] * 21, "do not rank single classes", "so few images"),
        ([1_000] * 3, "3,000 test images: the standard error is at most 0.9%", "do not rank"),
        ([30, 300], "look at the recall of the small ones", "do not rank"),
    ],
)
def test_it_says_before_training_what_the_test_images_can_tell(
    ucmerced, per_class, says, does_not_say
):
    targets = np.repeat(np.arange(len(per_class)), per_class)
    said = " / ".join(ucmerced["what_it_can_tell"](targets, np.arange(len(targets))))
    assert says in said and does_not_say not in said


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
            ucmerced["ranks_as_tasks"]([first] * (workers[first]["nthreads"] + 1), seconds=1)
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
            rows=ucmerced["validation"][:20],
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


def test_a_folder_with_one_class_is_refused_in_one_message(tmp_path):
    done = run_tutorial(tmp_path, f"data={make_folder(tmp_path / 'mine', {'forest': 5})}")
    assert done.returncode == 1
    assert "holds only the class 'forest'" in done.stderr and "Traceback" not in done.stderr


def test_three_images_of_each_class_train_and_it_says_that_they_show_little(tmp_path):
    folder = make_folder(tmp_path / "mine", {"forest": 3, "lake": 3, "river": 3})
    done = run_tutorial(tmp_path, f"data={folder} epochs=2")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "so few images tell only very different networks apart" in done.stdout
    assert re.search(r"small +\d+\.\d% +\d+\.\d% to \d+\.\d%", done.stdout), done.stdout


@pytest.mark.skipif(
    not AERIAL.is_dir(),
    reason="DDP_DATA names no folder with ucmerced/rsscn7_subset, real aerial scenes",
)
def test_real_aerial_scenes_are_told_apart_better_than_by_a_linear_model(tmp_path):
    """The bar is low because the data are few: 105 photographs to learn from, 35 for the test.

    With this seed 71 % were right; over four seeds 61 %, from 51 to 71 %. With twice the epochs it
    was 59 % over five.
    """
    done = run_tutorial(
        tmp_path,
        f"data={AERIAL} network=resnet18 epochs=10 batch_size=16 learning_rate=1e-3 held_out=0.2",
    )
    assert done.returncode == 0, done.stderr[-3000:]
    network, linear = (
        float(re.search(rf"{name} +([\d.]+)%", done.stdout)[1])
        for name in ("resnet18", "linear on pixels")
    )
    assert network > 45 and network > linear + 10, done.stdout


def test_every_picture_of_ucmerced_has_a_text_for_those_who_cannot_see_it():
    texts = alt_texts("ucmerced")
    assert len(texts) == 5 and all(len(text) > 60 for text in texts), texts


def test_no_line_of_ucmerced_is_cut_off_on_a_page():
    assert lines_cut_off("ucmerced") == []


def test_the_minutes_of_ucmerced_sum_to_75():
    notes = next(
        cell.source for cell in script("ucmerced").cells if "Minutes: card" in cell.source
    )
    minutes = re.search(r"Minutes: (.*?)\. Sum: (\d+)", notes.replace("\n", " "))
    assert sum(map(int, re.findall(r"\d+", minutes[1]))) == int(minutes[2]) == 75
    exercises = [
        re.search(r"\((\d+) minutes\)", cell.source)
        for cell in script("ucmerced").cells
        if cell.source.find("### Exercise") >= 0
    ]
    assert sum(int(found[1]) for found in exercises) == 20
