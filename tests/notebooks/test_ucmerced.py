"""The exercises of `ucmerced` judge rightly, its intervals hold, folders are checked."""

import re

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image
from tutorials_here import DATA, assert_judged, make_run, names_of

import ddp_common as ddp

AERIAL = DATA / "ucmerced" / "rsscn7_subset"


@pytest.fixture(scope="module")
def ucmerced(tmp_path_factory):
    with names_of("ucmerced", tmp_path_factory.mktemp("runs")) as names:
        yield names


# Balanced accuracy over ranks


def by_gathered_counts(labels, guesses, classes):
    """Each rank's counts go to all, and are added there."""
    mine = [
        [int((labels == label).sum()), int((guesses[labels == label] == label).sum())]
        for label in range(classes)
    ]
    everyones = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, mine)
    images, right = np.sum(everyones, axis=0).T
    return float((right[images > 0] / images[images > 0]).mean())


def mean_over_ranks(labels, guesses, classes):
    hits = [(guesses[labels == label] == label).float() for label in labels.unique()]
    mine = [each.mean() for each in hits] or [torch.zeros(())]
    share = torch.stack(mine).mean()
    dist.all_reduce(share)
    return share.item() / ddp.world_size()


# The job script: more of it in tests/unit/test_batch_jobs.py and tests/hpc


def header_in_other_words(site, need):
    limits = sorted((limit, name) for name, limit in site["partitions"].items())
    name = next(name for limit, name in limits if limit >= need["minutes"])
    return f"""#!/usr/bin/env bash
#SBATCH -A {site["account"]} -p {name}
#SBATCH -n {need["ranks"]} -c {need["cores"]} --mem-per-cpu={1024 * need["memory"]}
#SBATCH -t 00:{need["minutes"]}:00 --signal=SIGTERM@{need["warning"]}
"""


def signal_for_the_shell_alone(site, need):
    return header_in_other_words(site, need).replace("SIGTERM", "B:TERM")


def reading_line_by_line(log):
    causes = {"oom-kill": "memory", "TIME LIMIT": "time limit", "SIGTERM": "time limit"}
    said = [cause for words, cause in causes.items() if words in log]
    cause = said[0] if said else "finished" if "Done" in log else "cancelled"
    steps = [(int(n), "saved" in rest) for n, rest in re.findall(r"step (\d+)(.*)", log)]
    return cause, steps[-1][0] - max([0, *(step for step, saved in steps if saved)])


def last_step(log):
    """Not the number of those that were lost."""
    cause, _ = reading_line_by_line(log)
    return cause, int(re.findall(r"step (\d+)", log)[-1])


def jobs_are_counted(training, limit, warning, start):
    done, restarts = limit - warning - start, 0
    if done <= 0:
        return None
    while (restarts + 1) * done < training:
        restarts += 1
    return restarts


def the_first_job_is_a_restart(training, limit, warning, start):
    restarts = jobs_are_counted(training, limit, warning, start)
    return restarts if restarts is None else restarts + 1


# The repair of a script

LOSS = "F.nll_loss(model(scenes[mine]), labels[mine])"
ENTROPY = (LOSS, "F.nll_loss(model(scenes[mine]).log_softmax(1), labels[mine])")
JUDGES = "guesses = model.module"
HELD_OUT = (JUDGES, f"mine = test.split(-(-len(test) // ranks))[rank]\n{JUDGES}")
PADDED = "test[list(torch.utils.data.DistributedSampler(test, shuffle=False))]"


def repaired(ucmerced, *changes):
    """An answer that names both faults, and makes these replacements."""
    script = ucmerced["broken_script"]()
    for old, new in changes:
        assert old in script
        script = script.replace(old, new)
    return lambda: ({"B", "C"}, script)


def test_a_repair_by_log_softmax_is_accepted_and_a_sampler_that_pads_refused(ucmerced, capsys):
    padded = (JUDGES, f"mine = {PADDED}\n{JUDGES}")
    answers = [repaired(ucmerced, ENTROPY, HELD_OUT), repaired(ucmerced, ENTROPY, padded)]
    assert_judged(ucmerced, capsys, "check_repair", *answers, "how often each")


# Two networks on the same images


def resampled_by_counts(first, second, draws=2_000, seed=7):
    """How often each image is drawn, in place of its number."""
    from scipy.stats import binomtest

    size = len(first)
    counts = np.random.default_rng(seed).multinomial(size, np.full(size, 1 / size), draws)
    only_first, only_second = int((first & ~second).sum()), int((second & ~first).sum())
    tossed = only_first + only_second
    p = binomtest(only_first, tossed).pvalue if tossed else 1.0
    return counts @ (first.astype(float) - second) / size, p


def not_paired(first, second, draws=2_000):
    random, size = np.random.default_rng(0), len(first)
    drawn = (random.integers(size, size=(draws, size)) for _ in range(2))
    one, other = (right[rows].mean(1) for right, rows in zip((first, second), drawn))
    return one - other, resampled_by_counts(first, second)[1]


@pytest.mark.parametrize(
    ("check", "right", "wrong", "question"),
    [
        ("balanced", by_gathered_counts, mean_over_ranks, "What did you sum"),
        ("header", header_in_other_words, signal_for_the_shell_alone, "Who has to save"),
        ("reading", reading_line_by_line, last_step, "Which line names the cause"),
        ("restarts", jobs_are_counted, the_first_job_is_a_restart, "How many minutes of each"),
        ("comparison", resampled_by_counts, not_paired, "the same images in a draw"),
    ],
)
def test_the_exercises_of_ucmerced_are_judged(ucmerced, capsys, check, right, wrong, question):
    assert_judged(ucmerced, capsys, f"check_{check}", right, wrong, question)


# What its conclusions rest on


@pytest.mark.parametrize("share", [0.7, 0.999])
def test_the_interval_over_images_holds_the_truth_about_95_times_of_100(ucmerced, share):
    random = np.random.default_rng(0)
    held = 0
    for _ in range(200):
        low, high = ucmerced["interval"](random.random(315) < share, draws=300)
        held += low <= share <= high
    assert held >= 0.91 * 200


def test_the_interval_over_seeds_is_that_of_students_t(ucmerced):
    differences = np.array([1.0, 2.0, 3.0, 4.0, 5.0])  # mean 3, standard error 0.707
    ucmerced["T"] = {5: 2.78}
    said = ucmerced["over_seeds"](differences)
    assert "mean difference +3.0" in said and "+1.0 to +5.0 points: a difference" in said
    assert "no difference shown" in ucmerced["over_seeds"](differences - 3)


# A folder of one's own


def make_folder(path, counts):
    for label, count in counts.items():
        (path / label).mkdir(parents=True)
        for number in range(count):
            Image.new("RGB", (8, 8), (number, 0, 0)).save(path / label / f"{number}.png")
    return path


def test_three_images_of_each_class_train_and_it_says_that_they_show_little(tmp_path):
    folder = make_folder(tmp_path / "mine", {"forest": 3, "lake": 3, "river": 3})
    done = make_run("ucmerced", tmp_path / "runs", f"data={folder} epochs=2")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "so few images tell only very different networks apart" in done.stdout
    assert re.search(r"small +\d+\.\d% +\d+\.\d% to \d+\.\d%", done.stdout), done.stdout


def test_a_class_that_is_too_small_for_three_sets_is_refused_in_one_message(tmp_path):
    folder = make_folder(tmp_path / "mine", {"forest": 5, "river": 2})
    done = make_run("ucmerced", tmp_path / "runs", f"data={folder}")
    assert done.returncode == 1 and "The class 'river' has 2 image(s)" in done.stderr
    assert "Traceback" not in done.stderr and done.stderr.count("Error") == 1


@pytest.mark.skipif(
    not AERIAL.is_dir(),
    reason="DDP_DATA names no folder with ucmerced/rsscn7_subset, real aerial scenes",
)
def test_real_aerial_scenes_are_told_apart_better_than_by_a_linear_model(tmp_path):
    """The bar is low because the data are few: 105 photographs to learn from, 35 for the test.

    With this seed 71 % were right; over four seeds 61 %, from 51 to 71 %. With twice the epochs it
    was 59 % over five.
    """
    sizes = "epochs=10 batch_size=16 learning_rate=1e-3 held_out=0.2"
    done = make_run("ucmerced", tmp_path / "runs", f"data={AERIAL} network=resnet18 {sizes}")
    assert done.returncode == 0, done.stderr[-3000:]
    network, linear = (
        float(re.search(rf"{name} +([\d.]+)%", done.stdout)[1])
        for name in ("resnet18", "linear on pixels")
    )
    assert network > 45 and network > linear + 10, done.stdout
