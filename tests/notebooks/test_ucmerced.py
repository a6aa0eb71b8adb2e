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

from tutorials.checks import ucmerced as checks
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


# Four logs

READING = {1: ("T", 20), 2: ("M", 17), 3: ("W", 0), 4: ("P", 42)}


def test_the_steps_lost_are_those_that_the_logs_say():
    for number, text in checks.LOGS.items():
        steps = [int(step) for step in re.findall(r"step[ -]0*(\d+)", text)]
        kept = re.findall(r"(?:step-0*|step )(\d+)(?:\.pt|: epoch \d+ done, saved|, saved)", text)
        assert steps[-1] - int(kept[-1]) == READING[number][1]


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
