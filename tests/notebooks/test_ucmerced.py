"""The exercises of `ucmerced` are judged rightly; a folder of one's own trains, or is refused."""

import re

import jupytext
import numpy as np
import pytest
import torch
from PIL import Image
from scipy.stats import binomtest, ttest_1samp
from tutorials_here import DATA, ROOT, make_run

from tutorials.checks import ucmerced as checks
from tutorials.checks.common import Wrong
from tutorials.helpers import interval
from tutorials.land import Views

AERIAL = DATA / "ucmerced" / "rsscn7_subset"
SITE = {"account": "lab", "partitions": {"long": 4320, "short": 60, "medium": 240}}
NEED = {"ranks": 4, "cpus": 2, "memory": 3, "minutes": 95, "warning": 120}


def wilson(right):
    return binomtest(int(right.sum()), len(right)).proportion_ci(method="wilson")


@pytest.fixture(scope="module")
def solutions():
    names = {"np": np, "wilson": wilson, "interval": interval}
    for cell in jupytext.read(ROOT / "tutorials" / "ucmerced.py").cells:
        if "solution" in cell.metadata.get("tags", []):
            exec(cell.source, names)
    return names


def test_the_solutions_are_right_for_any_site_and_any_ranks(solutions):
    for _ in range(20):
        assert "any site" in checks.header(solutions["my_header"])
        assert "counts once" in checks.report(solutions["my_report"])
    assert "why a job ended" in checks.reading(solutions["my_reading"])


# The header of a job

HEADER = """#!/bin/bash
#SBATCH --account=lab
#SBATCH --partition=medium
#SBATCH --ntasks=4
#SBATCH --cpus-per-task=2
#SBATCH --mem-per-cpu=3G
#SBATCH --time=95
#SBATCH --signal=TERM@120
"""

RIGHT = {
    "as it is": ("", ""),
    "a quoted signal": ("TERM@120", '"SIGTERM@120"'),
    "signal 15, and a comment": ("TERM@120", "15@120   # before the limit"),
    "short names": ("--ntasks=4", "-n4 -N 2"),
    "nodes and tasks on each": ("--ntasks=4", "--nodes=2 --ntasks-per-node=2"),
    "another name of it": ("--ntasks=4", "--nodes=2 --tasks-per-node=2"),
    "all tasks on the only node": ("--ntasks=4", "--ntasks-per-node=4"),
    "a signal in small letters": ("TERM@120", "term@120"),
    "room for more": ("--ntasks=4", "--ntasks=4 --nodes=1 --ntasks-per-node=8"),
    "memory of the only node": ("--mem-per-cpu=3G", "--nodes=1 --mem=24G"),
    "MiB": ("--mem-per-cpu=3G", "--mem-per-cpu 3072"),
    "a clock": ("--time=95", "-t 01:35:00"),
    "days and hours": ("--time=95", "--time=0-02"),
    "twice the time and memory": ("3G\n#SBATCH --time=95", "6G\n#SBATCH --time=190"),
    "bash found by env": ("#!/bin/bash", "#!/usr/bin/env bash"),
    "a place for what it prints": ("--ntasks=4", "--ntasks=4 -o job-%j.log -e job-%j.err"),
    "a comment on SBATCH": ("#SBATCH --time", "# SBATCH: what sbatch reads\n#SBATCH --time"),
    "more than was asked for": ("#SBATCH --time", "# a name\n#SBATCH -J job\n\n#SBATCH --time"),
}

WRONG = {
    "an array": ("--ntasks=4", "--ntasks=4 --array=0-3", "Who asked for it"),
    "an option that does not exist": ("--ntasks=4", "--ntasks=4 --nonsense=3", "Who asked for it"),
    "a begin in a week": ("--ntasks=4", "--ntasks=4 --begin=now+7days", "Who asked for it"),
    "all GPUs of a node": ("--ntasks=4", "--ntasks=4 --gres=gpu:8 --exclusive", "Who asked"),
    "two kinds of memory": ("--mem-per-cpu=3G", "--mem-per-cpu=3G --mem=24G", "of the two"),
    "too few tasks on the only node": ("--ntasks=4", "--ntasks-per-node=2", "A task is a rank"),
    "a signal for the shell, in small letters": ("TERM", "b:term", "who has to save"),
    "too few places": ("--ntasks=4", "--ntasks=4 --nodes=1 --ntasks-per-node=2", "fit together"),
    "more nodes than ranks": ("--ntasks=4", "--ntasks=4 --nodes=8", "fit together"),
    "cores for ranks": ("--ntasks=4", "--ntasks=8", "A task is a rank"),
    "memory without a unit": ("=3G", "=3", "in MiB"),
    "memory of a rank": ("=3G", "=12G", "for each CPU"),
    "an hour too little": ("=95", "=00:35:00", "at its limit"),
    "hours for minutes": ("=95", "=95:00:00", "which jobs start sooner"),
    "the largest partition": ("medium", "long", "large enough"),
    "another account": ("=lab", "=mine", "Who pays"),
    "a signal for the shell": ("TERM", "B:TERM", "who has to save"),
    "another signal": ("TERM", "USR1", "asks to end"),
    "blanks around =": ("--time=95", "--time = 95", "an option or its value"),
    "a word that is no option": ("--time=95", "--time=95 on", "an option or its value"),
    "a blank": ("#SBATCH --time", "# SBATCH --time", "exactly #SBATCH"),
    "after a command": ("#SBATCH --time", "module load x\n#SBATCH --time", "the first command"),
    "no program": ("#!/bin/bash", "#", "Which program"),
    "any program": ("#!/bin/bash", "#!x", "Which program"),
    "an empty first line": ("#!/bin/bash", "\n#!/bin/bash", "Is the first line empty"),
    "three times the memory": ("=3G", "=9G", "for each CPU"),
}


@pytest.mark.parametrize(("old", "new"), RIGHT.values(), ids=RIGHT)
def test_a_right_header_in_other_words_is_accepted(old, new):
    checks.fits(HEADER.replace(old, new), SITE, NEED)


def test_a_header_may_be_a_list_of_lines_and_be_made_of_numpy_numbers(solutions):
    numbers = {name: np.int64(number) for name, number in NEED.items()}
    checks.fits(solutions["my_header"](SITE, numbers).splitlines(), SITE, NEED)


@pytest.mark.parametrize(("old", "new", "asks"), WRONG.values(), ids=WRONG)
def test_a_wrong_header_is_refused_with_a_question(old, new, asks):
    assert old in HEADER
    with pytest.raises(Wrong, match=asks):
        checks.fits(HEADER.replace(old, new, 1), SITE, NEED)


@pytest.mark.parametrize(("partitions", "minutes", "right"), checks.EDGES)
def test_the_partition_is_the_smallest_that_is_large_enough(partitions, minutes, right):
    site, need = {**SITE, "partitions": partitions}, {**NEED, "minutes": minutes}
    options = {"partition": right, "time": str(minutes)}
    found = {name: is_right for name, is_right, *_ in checks.requirements(options, site, need)}
    assert found["partition"] and found["time"]


def from_a_site_that_it_changes(limits, minutes):
    for name in [name for name, limit in limits.items() if limit <= minutes]:
        del limits[name]
    return min(limits, key=limits.get)


@pytest.mark.parametrize(
    "choose",
    [
        from_a_site_that_it_changes,
        lambda limits, minutes: min(name for name in limits if limits[name] >= minutes),
        lambda limits, minutes: next(name for name in limits if limits[name] >= minutes),
        lambda limits, minutes: min(
            (name for name in limits if limits[name] > minutes), key=limits.get, default="none"
        ),
        lambda limits, minutes: max(limits, key=limits.get),
        lambda limits, minutes: min(limits, key=limits.get),
        lambda limits, minutes: sorted(limits)[-1],
    ],
    ids=["changed", "name", "first", "strictly_larger", "largest", "smallest", "last"],
)
def test_a_partition_that_is_chosen_otherwise_is_refused_every_time(solutions, choose):
    def header(site, need):
        name = choose(site["partitions"], need["minutes"])
        only = {name: 4 * max(site["partitions"].values())}  # the solution has no other choice
        return solutions["my_header"]({**site, "partitions": only}, need)

    for _ in range(20):
        with pytest.raises(Wrong, match="--partition"):
            checks.header(header)


# Four logs

READING = {1: ("T", 20), 2: ("M", 17), 3: ("W", 0), 4: ("P", 42)}


def test_the_steps_in_vain_are_those_that_the_logs_say():
    for number, text in checks.LOGS.items():
        steps = [int(step) for step in re.findall(r"step[ -]0*(\d+)", text)]
        kept = re.findall(r"(?:step-0*|step )(\d+)(?:\.pt|: epoch \d+ done, saved|, saved)", text)
        assert steps[-1] - int(kept[-1]) == READING[number][1]


@pytest.mark.parametrize(
    "given",
    [
        READING,
        {
            str(number): [letter.lower(), np.int64(vain)]
            for number, (letter, vain) in READING.items()
        },
        list(READING.values()),
        [(f"({letter})", float(vain)) for letter, vain in READING.values()],
        [(letter, str(vain)) for letter, vain in READING.values()],
        {number: (f"{letter}: see the table", vain) for number, (letter, vain) in READING.items()},
    ],
    ids=["dict", "small_letters_and_numpy", "list", "floats", "quoted", "words"],
)
def test_four_logs_may_be_answered_in_any_form(given):
    assert "what it cost" in checks.reading(lambda: given)


@pytest.mark.parametrize(
    ("given", "asks"),
    [
        (READING | {1: ("P", 20)}, "beside CANCELLED"),
        (READING | {2: ("P", 17)}, "Which line of this one says why"),
        (READING | {3: ("T", 0)}, "what had the ranks done then"),
        (READING | {4: ("T", 42)}, "What is missing here"),
        (READING | {1: ("T", 260)}, "Which step was the last"),
        (READING | {3: ("W", 42)}, "Which step was the last"),
        (READING | {2: ("T M", 17)}, "Which line"),
        (READING | {4: "P"}, "What did you read"),
        ({1: ("T", 20)}, "What did you read"),
        (None, "What did you read"),
        ("TMWP", "What did you read"),
    ],
    ids=str,
)
def test_logs_that_are_misread_are_refused_with_a_question_and_without_the_answer(given, asks):
    with pytest.raises(Wrong, match=asks) as refused:
        checks.reading(lambda: given)
    assert "another" in str(refused.value) or "a letter and a number" in str(refused.value)


# An accuracy from unequal ranks, its interval, a verdict


def joined(ranks):
    return (np.concatenate(arrays) for arrays in zip(*ranks))


def verdict_by(low, high):
    return "A" if low > 0 else "B" if high < 0 else "not told apart"


def counted_by_hand(ranks):
    """Sums of counts, the normal interval, a z of the differences."""
    n = sum(len(a) for a, _ in ranks)
    p = sum(int(a.sum()) for a, _ in ranks) / n
    half = 1.96 * (p * (1 - p) / n) ** 0.5
    only_a = sum(int((a & ~b).sum()) for a, b in ranks)
    only_b = sum(int((b & ~a).sum()) for a, b in ranks)
    error = 1.96 * (only_a + only_b) ** 0.5
    return p, p - half, p + half, verdict_by(only_a - only_b - error, only_a - only_b + error)


def exact(ranks):
    """Clopper and Pearson's interval, McNemar's exact test, other words for a verdict."""
    a, b = joined(ranks)
    only_a, only_b = int((a & ~b).sum()), int((b & ~a).sum())
    low, high = binomtest(int(a.sum()), len(a)).proportion_ci(method="exact")
    apart = only_a + only_b > 0 and binomtest(only_a, only_a + only_b).pvalue < 0.05
    verdict = ("model A" if only_a > only_b else "model B") if apart else "Neither"
    return [a.mean(), [low, high], verdict]


def resampled(ranks):
    """Percentiles of test sets that are drawn again from this one."""
    a, b = joined(ranks)
    rows = np.random.default_rng(0).integers(0, len(a), (4_000, len(a)))
    low, high = np.percentile(a[rows].mean(1), [2.5, 97.5])
    ends = np.percentile((a * 1.0 - b)[rows].mean(1), [2.5, 97.5])
    return {"p": a.mean(), "low": low, "high": high, "verdict": verdict_by(*ends)}


def with_torch(ranks):
    a, b = (torch.from_numpy(array).double() for array in joined(ranks))
    error = 2 * (a.mean() * (1 - a.mean()) / len(a)).sqrt()
    apart = (a != b).any() and ttest_1samp((a - b).numpy(), 0).pvalue < 0.05
    verdict = ("a" if a.mean() > b.mean() else "b") if apart else "NOT TOLD APART"
    return a.mean(), (a.mean() - error, a.mean() + error), verdict


@pytest.mark.parametrize("answer", [counted_by_hand, exact, resampled, with_torch])
def test_a_right_report_in_other_words_is_accepted(answer):
    for _ in range(3):
        assert "counts once" in checks.report(answer)


def mean_of_ranks(ranks, low, high, verdict):
    return np.mean([a.mean() for a, _ in ranks if len(a)]), low, high, verdict


def rank_0_alone(ranks, low, high, verdict):
    return ranks[0][0].mean(), low, high, verdict


def in_percent(ranks, low, high, verdict):
    return 100 * next(joined(ranks)).mean(), low, high, verdict


def one_standard_error(ranks, low, high, verdict):
    p, half = next(joined(ranks)).mean(), (high - low) / 4
    return p, p - half, p + half, verdict


def ninety_percent(ranks, low, high, verdict):
    p, half = next(joined(ranks)).mean(), (high - low) / 2 * 1.645 / 1.96
    return p, p - half, p + half, verdict


def of_one_rank(ranks, low, high, verdict):
    p = next(joined(ranks)).mean()
    half = (high - low) / 2 * len(ranks) ** 0.5
    return p, p - half, p + half, verdict


def by_the_larger(ranks, low, high, verdict):
    a, b = joined(ranks)
    return a.mean(), low, high, "A" if a.mean() >= b.mean() else "B"


def by_overlap(ranks, low, high, verdict):
    a, b = joined(ranks)
    ends = wilson(b)
    return a.mean(), low, high, verdict_by(low - ends.high, high - ends.low)


def unpaired(ranks, low, high, verdict):
    a, b = joined(ranks)
    error = 1.96 * ((a.var() + b.var()) / len(a)) ** 0.5
    gap = a.mean() - b.mean()
    return a.mean(), low, high, verdict_by(gap - error, gap + error)


def by_one_interval(ranks, low, high, verdict):
    a, b = joined(ranks)
    return a.mean(), low, high, verdict_by(low - b.mean(), high - b.mean())


def difference_of_ninety_percent(ranks, low, high, verdict):
    a, b = joined(ranks)
    return a.mean(), low, high, verdict_by(*interval(1.0 * a - b, 0.9)[1:])


def upside_down(ranks, low, high, verdict):
    return next(joined(ranks)).mean(), low, high, {"A": "B", "B": "A"}.get(verdict, verdict)


def always_unsure(ranks, low, high, verdict):
    return next(joined(ranks)).mean(), low, high, "not told apart"


def no_verdict(ranks, low, high, verdict):
    return next(joined(ranks)).mean(), low, high


@pytest.mark.parametrize(
    ("wrong", "asks"),
    [
        (mean_of_ranks, "each image count once"),
        (rank_0_alone, "each image count once"),
        (in_percent, "share from 0 to 1"),
        (one_standard_error, "how many standard errors"),
        (ninety_percent, "how many standard errors"),
        (of_one_rank, "How many images"),
        (by_the_larger, "Which differences|Which is better"),
        (by_overlap, "same images"),
        (unpaired, "same images"),
        (by_one_interval, "same images"),
        (difference_of_ninety_percent, "Which differences"),
        (upside_down, "same images"),
        (always_unsure, "same images"),
        (no_verdict, "Which four things"),
    ],
)
def test_a_wrong_report_is_refused_with_a_question_every_time(solutions, wrong, asks):
    def answer(ranks):
        _, *rest = solutions["my_report"](ranks)
        return wrong(ranks, *rest)

    for _ in range(5):
        with pytest.raises(Wrong, match=asks):
            checks.report(answer)


# The views


def test_a_scene_has_eight_views_and_all_of_them_come():
    scene = torch.arange(12).reshape(3, 2, 2)
    data = Views([(scene, 5)], turn=True)
    seen = {tuple(data[0][0].flatten().tolist()) for _ in range(400)}
    assert len(seen) == 8 and data[0][1] == 5
    assert (Views([(scene, 5)], turn=False)[0][0] == scene).all()


# A folder of one's own


def make_folder(path, counts):
    for label, count in counts.items():
        (path / label).mkdir(parents=True)
        for number in range(count):
            Image.new("RGB", (8, 8), (number, 0, 0)).save(path / label / f"{number}.png")
    return path


def test_three_images_of_each_class_train_and_it_says_how_little_they_show(tmp_path):
    folder = make_folder(tmp_path / "mine", {"forest": 3, "lake": 3, "river": 3})
    done = make_run("ucmerced", tmp_path / "runs", f"data={folder} epochs=2")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Accuracy on 3 test images" in done.stdout
    assert re.search(r"model.pt +\d+\.\d% +\d+\.\d% to \d+\.\d%", done.stdout), done.stdout


def test_while_one_chooses_the_test_images_are_not_judged(tmp_path):
    folder = make_folder(tmp_path / "mine", {"forest": 3, "lake": 3})
    done = make_run("ucmerced", tmp_path / "runs", f"data={folder} epochs=1 test=False")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "validation accuracy" in done.stdout and "Accuracy on" not in done.stdout
    (model,) = (tmp_path / "runs").glob("ucmerced/*/model.pt")
    assert len(torch.load(model, weights_only=True)["classes"]) == 2


def test_a_class_that_is_too_small_for_three_sets_is_refused_in_one_message(tmp_path):
    folder = make_folder(tmp_path / "mine", {"forest": 5, "river": 2})
    done = make_run("ucmerced", tmp_path / "runs", f"data={folder}")
    assert done.returncode == 1 and "Class river has only 2 samples" in done.stderr
    assert "Traceback" not in done.stderr and done.stderr.count("Error") == 1


@pytest.mark.skipif(
    not AERIAL.is_dir(),
    reason="DDP_DATA names no folder with ucmerced/rsscn7_subset, real aerial scenes",
)
def test_real_aerial_scenes_are_told_apart_far_better_than_by_chance(tmp_path):
    """The bar is low because the data are few: 105 photographs to learn from, 35 for the test.

    There are seven classes. With the weights of the best epoch 71 % were right with this seed;
    over four seeds 61 %, from 51 to 71 %.
    """
    sizes = "size=64 epochs=10 batch_size=16 learning_rate=1e-3 held_out=0.2"
    done = make_run("ucmerced", tmp_path / "runs", f"data={AERIAL} network=resnet18 {sizes}")
    assert done.returncode == 0, done.stderr[-3000:]
    accuracy = float(re.search(r"model.pt +([\d.]+)%", done.stdout)[1])
    assert accuracy > 45, done.stdout
