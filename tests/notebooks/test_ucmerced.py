"""The exercises of `ucmerced` are judged rightly; a folder of one's own trains, or is refused."""

import re
from types import SimpleNamespace

import jupytext
import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image
from scipy.stats import binomtest
from sklearn.ensemble import RandomForestClassifier
from tutorials_here import DATA, ROOT, make_run

import ddp_common as ddp
from tutorials.checks import ucmerced as checks
from tutorials.checks.common import Wrong, judge
from tutorials.land import Views

AERIAL = DATA / "ucmerced" / "rsscn7_subset"
SITE = {"account": "lab", "partitions": {"long": 4320, "short": 60, "medium": 240}}
NEED = {"ranks": 4, "cpus": 2, "memory": 3, "minutes": 95, "warning": 120}


@pytest.fixture(scope="module")
def solutions():
    names = {"np": np, "torch": torch, "dist": dist, "binomtest": binomtest}
    names |= {"__name__": "__main__", "checks": checks, "client": None}
    names["judge"] = lambda *_: None
    for cell in jupytext.read(ROOT / "tutorials" / "ucmerced.py").cells:
        if "solution" in cell.metadata.get("tags", []):
            exec(cell.source, names)
    return names


def test_the_solutions_are_right_for_any_site_and_any_ranks(solutions):
    for _ in range(20):
        assert "any site" in checks.header(solutions["my_header"])
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


def test_the_steps_lost_are_those_that_the_logs_say():
    for number, text in checks.LOGS.items():
        steps = [int(step) for step in re.findall(r"step[ -]0*(\d+)", text)]
        kept = re.findall(r"(?:step-0*|step )(\d+)(?:\.pt|: epoch \d+ done, saved|, saved)", text)
        assert steps[-1] - int(kept[-1]) == READING[number][1]


@pytest.mark.parametrize(
    "given",
    [
        READING,
        {
            str(number): [letter.lower(), np.int64(lost)]
            for number, (letter, lost) in READING.items()
        },
        list(READING.values()),
        [(f"({letter})", float(lost)) for letter, lost in READING.values()],
        [(letter, str(lost)) for letter, lost in READING.values()],
        [(letter, f"{lost} steps") for letter, lost in READING.values()],
        {number: f"{letter}: {lost}" for number, (letter, lost) in READING.items()},
        {number: (f"{letter}: see the table", lost) for number, (letter, lost) in READING.items()},
    ],
    ids="dict small_letters_and_numpy list floats quoted with_a_unit texts words".split(),
)
def test_four_logs_may_be_answered_in_any_form(given):
    assert "what it cost" in checks.reading(lambda: given)


@pytest.mark.parametrize(
    ("given", "asks"),
    [
        (READING | {1: ("P", 20)}, "beside CANCELLED"),
        (READING | {2: ("P", 17)}, "Which state has sacct"),
        (READING | {3: ("T", 0)}, "what had the ranks done then"),
        (READING | {4: ("T", 42)}, "Who stands beside CANCELLED"),
        (READING | {1: ("T", 260)}, "Which step was the last"),
        (READING | {3: ("W", 42)}, "Which step was the last"),
        (READING | {2: ("T M", 17)}, "Which state"),
        (READING | {4: "P"}, "What did you read"),
        (READING | {1: (20, "T")}, "Which of both comes first"),
        (dict(enumerate(READING.values())), "Which numbers have the logs"),
        ({1: ("T", 20)}, "What did you read"),
        (None, "What did you read"),
        ("TMWP", "What did you read"),
    ],
    ids=str,
)
def test_logs_that_are_misread_are_refused_with_a_question_and_without_the_answer(given, asks):
    with pytest.raises(Wrong, match=asks) as refused:
        checks.reading(lambda: given)
    said = ("another", "a letter and a number", "one of T, W, M, P", "the logs 1 to 4")
    assert any(each in str(refused.value) for each in said)


# An accuracy over ranks with unequal shares, its interval


def summed(is_right):
    """Right images, and all, of all ranks."""
    counts = torch.tensor([int(np.sum(is_right)), len(is_right)])
    dist.all_reduce(counts)
    return counts.tolist()


def half_width(p, n, errors=1.96):
    return errors * (p * (1 - p) / n) ** 0.5


def with_gathered_arrays(is_right):
    """Joins what every rank has, by pickles; Clopper and Pearson's interval, as a dict."""
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, is_right)
    joined = np.concatenate(parts)
    ends = binomtest(int(joined.sum()), len(joined)).proportion_ci(method="exact")
    return {"accuracy": joined.mean(), "low": ends.low, "high": ends.high}


def with_the_normal_interval(is_right):
    right, n = summed(is_right)
    p = right / n
    return np.array([p, p - half_width(p, n), p + half_width(p, n)])


def with_two_standard_errors_in_tensors(is_right):
    right, n = map(torch.tensor, summed(is_right))
    p = right / n
    error = 2 * (p * (1 - p) / n).sqrt()
    return torch.stack([p, p - error, p + error])


def with_the_interval_as_a_pair(is_right):
    right, n = summed(is_right)
    return right / n, binomtest(right, n).proportion_ci(method="wilson")


def with_draws(is_right):
    right, n = summed(is_right)
    draws = np.random.default_rng(0).binomial(n, right / n, 20_000) / n
    return [right / n, *np.percentile(draws, [2.5, 97.5])]


def with_two_reductions_and_rounded(is_right):
    right, n = torch.tensor(float(is_right.sum())), torch.tensor(float(is_right.size))
    dist.all_reduce(right, op=dist.ReduceOp.SUM)
    dist.all_reduce(n)
    low, high = binomtest(int(right), int(n)).proportion_ci(method="wilson")
    return round((right / n).item(), 4), round(low, 3), round(high, 3)


RIGHT_ACCURACIES = [
    with_gathered_arrays,
    with_the_normal_interval,
    with_two_standard_errors_in_tensors,
    with_the_interval_as_a_pair,
    with_draws,
    with_two_reductions_and_rounded,
]


def mean_of_ranks(is_right):
    p = torch.tensor(float(is_right.mean()) if len(is_right) else 0.0)
    dist.all_reduce(p)
    right, n = summed(is_right)
    p = p.item() / dist.get_world_size()
    return p, p - half_width(p, n), p + half_width(p, n)


def of_this_rank(is_right):
    p, n = (is_right.mean(), len(is_right)) if len(is_right) else (0.0, 1)
    return p, p - half_width(p, n), p + half_width(p, n)


def in_percent(is_right):
    right, n = summed(is_right)
    low, high = binomtest(right, n).proportion_ci(method="wilson")
    return 100 * right / n, 100 * low, 100 * high


def with_standard_errors(errors):
    def answer(is_right):
        right, n = summed(is_right)
        p = right / n
        return p, p - half_width(p, n, errors), p + half_width(p, n, errors)

    return answer


def with_this_ranks_n(is_right):
    right, n = summed(is_right)
    p = right / n
    half = half_width(p, max(1, len(is_right)))
    return p, p - half, p + half


def on_rank_0_only(is_right):
    right, n = summed(is_right)
    if ddp.rank() == 0:
        low, high = binomtest(right, n).proportion_ci(method="wilson")
        return right / n, low, high
    return None


def each_image_of_rank_0_twice(is_right):
    right, n = summed(is_right if ddp.rank() else np.concatenate([is_right, is_right]))
    return right / n, *binomtest(right, n).proportion_ci(method="wilson")


def without_an_exchange_if_there_is_no_image(is_right):
    return with_the_normal_interval(is_right) if len(is_right) else (0.0, 0.0, 1.0)


def the_accuracy_alone(is_right):
    right, n = summed(is_right)
    return right / n


WRONG_ACCURACIES = [
    (mean_of_ranks, "Does each image count the same"),
    (of_this_rank, "Whose images does this number speak of"),
    (in_percent, "share from 0 to 1"),
    (with_standard_errors(1), "How many standard errors"),
    (with_standard_errors(1.645), "How many standard errors"),
    (with_standard_errors(2.576), "How many standard errors"),
    (with_this_ranks_n, "How many images are there on all ranks"),
    (on_rank_0_only, "does every rank return"),
    (each_image_of_rank_0_twice, "Does each image count once"),
    (without_an_exchange_if_there_is_no_image, "One rank has no image here"),
    (the_accuracy_alone, "Which three numbers"),
]


@pytest.fixture(scope="module")
def client():
    with ddp.connect("local", workers=2) as client:
        yield client


def test_the_solution_of_the_accuracy_is_right(client, solutions):
    assert "counts once" in checks.accuracy(client)(solutions["my_accuracy"])


@pytest.mark.parametrize("answer", RIGHT_ACCURACIES)
def test_a_right_accuracy_by_other_means_is_accepted(client, answer):
    assert "counts once" in checks.accuracy(client)(answer)


@pytest.mark.parametrize(("wrong", "asks"), WRONG_ACCURACIES)
def test_a_wrong_accuracy_is_refused_with_a_question(client, wrong, asks):
    with pytest.raises(Wrong, match=asks):
        checks.accuracy(client)(wrong)


def test_a_rank_that_divides_by_its_own_nothing_is_told_so(client, capsys):
    def divides(is_right):
        return is_right.sum().item() / len(is_right), 0, 1

    judge(checks.accuracy(client), divides)
    assert "ZeroDivisionError" in capsys.readouterr().out


# The predictions


def test_each_option_of_the_first_prediction_has_its_own_reply():
    replies = [checks.warned(option) for option in ("on", "Back.", '"error"')]
    assert ": right" in replies[0] and len(set(replies)) == 3
    assert all(": not right" in reply for reply in replies[1:])
    for no_option in ("restart", "not back, but on"):
        assert "which of on, back, error" in checks.warned(no_option)
    assert "no first prediction" in checks.warned(None)


@pytest.mark.parametrize(
    "number",
    [83, "83", 80, "about 85 %", 0.83, 90, np.int64(84), "83,5", "0,83", (83, 5), (0, 83)],
)
def test_about_83_of_100_colleagues_is_right_in_any_form(number):
    assert ": right" in checks.colleagues(number)


@pytest.mark.parametrize(
    ("number", "says"),
    [(95, "no chance in it"), (100, "no chance in it"), (50, "1.4 standard errors"), (0, "1.4")],
)
def test_another_number_of_colleagues_is_told_why_not(number, says):
    assert "not right" in checks.colleagues(number) and says in checks.colleagues(number)


@pytest.mark.parametrize("answer", ["most", 830, ""])
def test_what_is_no_number_of_colleagues_is_said_to_be_none(answer):
    assert "no number from 0 to 100" in checks.colleagues(answer)


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


def test_while_one_chooses_the_forest_of_the_notebook_judges_no_test_image_either():
    """A job leaves this cell out; in a notebook it comes after `test=False`, too."""
    (cell,) = (
        cell.source
        for cell in jupytext.read(ROOT / "tutorials" / "ucmerced.py").cells
        if cell.source.startswith("def colours")
    )
    loaded = []

    def load(images, rows):
        loaded.append(rows)
        return torch.zeros(2, 3, 4, 4, dtype=torch.uint8), None

    names = {"torch": torch, "RandomForestClassifier": RandomForestClassifier, "load": load}
    names |= {"images": None, "training": [0, 1], "targets": np.arange(9), "test": [2, 3]}
    exec(cell, names | {"settings": SimpleNamespace(seed=0, test=False)})
    assert loaded == [[0, 1]]


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
