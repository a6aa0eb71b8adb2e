"""The exercises of `ucmerced` are judged rightly; a folder of one's own trains, or is refused."""

import re

import jupytext
import numpy as np
import pytest
from PIL import Image
from tutorials_here import DATA, ROOT, make_run

from tutorials.checks import ucmerced as checks
from tutorials.checks.common import Wrong

AERIAL = DATA / "ucmerced" / "rsscn7_subset"
SITE = {"account": "lab", "partitions": {"long": 4320, "short": 60, "medium": 240}}
NEED = {"ranks": 4, "cpus": 2, "memory": 3, "minutes": 95, "warning": 120}


@pytest.fixture(scope="module")
def solutions():
    names = {"re": re}
    for cell in jupytext.read(ROOT / "tutorials" / "ucmerced.py").cells:
        if "solution" in cell.metadata.get("tags", []):
            exec(cell.source, names)
    return names


def test_the_solutions_are_right_for_any_site_and_any_log(solutions):
    for _ in range(20):
        assert "any site" in checks.header(solutions["my_header"])
        assert "why a job ended" in checks.log(solutions["my_reading"])


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
    "room for more": ("--ntasks=4", "--ntasks=4 --nodes=1 --ntasks-per-node=8"),
    "memory of the only node": ("--mem-per-cpu=3G", "--nodes=1 --mem=24G"),
    "MiB": ("--mem-per-cpu=3G", "--mem-per-cpu 3072"),
    "a clock": ("--time=95", "-t 01:35:00"),
    "days and hours": ("--time=95", "--time=0-02"),
    "twice the time and memory": ("3G\n#SBATCH --time=95", "6G\n#SBATCH --time=190"),
    "bash found by env": ("#!/bin/bash", "#!/usr/bin/env bash"),
    "a place for what it prints": ("--ntasks=4", "--ntasks=4 -o job-%j.log -e job-%j.err"),
    "more than was asked for": ("#SBATCH --time", "# a name\n#SBATCH -J job\n\n#SBATCH --time"),
}

WRONG = {
    "an array": ("--ntasks=4", "--ntasks=4 --array=0-3", "Who asked for it"),
    "an option that does not exist": ("--ntasks=4", "--ntasks=4 --nonsense=3", "Who asked for it"),
    "a begin in a week": ("--ntasks=4", "--ntasks=4 --begin=now+7days", "Who asked for it"),
    "all GPUs of a node": ("--ntasks=4", "--ntasks=4 --gres=gpu:8 --exclusive", "Who asked"),
    "two kinds of memory": ("--mem-per-cpu=3G", "--mem-per-cpu=3G --mem=24G", "of the two"),
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


# The log of a job that has ended


def test_a_log_may_be_read_into_a_list_of_numpy_numbers(solutions):
    def as_list(log):
        cause, lost = solutions["my_reading"](log)
        return [cause, np.int64(lost)]

    assert "what it cost" in checks.log(as_list)


@pytest.mark.parametrize(
    ("misread", "asks"),
    [
        (lambda log, cause, lost: ("cancelled" if "CANCELLED" in log else cause, lost), "line"),
        (lambda log, cause, lost: (cause, int(re.findall(r"step (\d+)", log)[-1])), "step"),
        (lambda log, cause, lost: (cause, lost + 1 if "SIGTERM" in log else lost), "the signal"),
        (lambda log, cause, lost: cause, "two things"),
        (lambda log, cause, lost: None, "two things"),
    ],
    ids=["all_cancelled", "last_step", "warned_but_lost", "cause_alone", "nothing"],
)
def test_a_log_that_is_misread_is_refused_with_a_question(solutions, misread, asks):
    with pytest.raises(Wrong, match=asks):
        checks.log(lambda log: misread(log, *solutions["my_reading"](log)))


def test_what_an_earlier_job_has_saved_is_not_lost(solutions):
    log = "job 7: 2 ranks on node1\nResumed from step-00000240.pt\nstep 260: loss 0.7\n{}"
    log = log.format("slurmstepd: error: *** STEP 7.0 ON node1 CANCELLED DUE TO TIME LIMIT ***")
    assert solutions["my_reading"](log) == ("time limit", 20)

    def forgets(log):
        return solutions["my_reading"](log.replace("Resumed", "Began"))

    with pytest.raises(Wrong, match="from which would the run go on"):
        for _ in range(10):  # not each draw of 15 logs has such a one
            checks.log(forgets)


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
    assert "3 test images: the standard error is at most 28.9%" in done.stdout
    assert re.search(r"small +\d+\.\d% +\d+\.\d% to \d+\.\d%", done.stdout), done.stdout


def test_a_class_that_is_too_small_for_three_sets_is_refused_in_one_message(tmp_path):
    folder = make_folder(tmp_path / "mine", {"forest": 5, "river": 2})
    done = make_run("ucmerced", tmp_path / "runs", f"data={folder}")
    assert done.returncode == 1 and "Class river has only 2 samples" in done.stderr
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
