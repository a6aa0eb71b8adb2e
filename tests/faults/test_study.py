"""`make study`: the article's design and the fair one, on real ranks; stopped and gone on with."""

import os
import subprocess
import sys
from functools import partial

import pandas
from patience import PATIENCE
from processes import finished

PICTURES = {"by-iteration.png", "by-images.png"}


def test_a_study_compares_both_designs_and_goes_on_where_it_was(tmp_path):
    small = "resize=32 crop=32 batch_per_rank=4 steps=3"
    chosen = {"WORKERS": "1 2", "SET": small, "RUNS": str(tmp_path)}
    study = partial(finished, "-m", "tutorials.study", within=10 * PATIENCE)
    study(env=os.environ | chosen)
    (folder,) = (tmp_path / "study/dogs").iterdir()
    table = pandas.read_csv(folder / "study.csv").set_index(["design", "ranks"])
    assert table.loc["article", "batch"].tolist() == [4, 8]
    assert table.loc["article", "rate"].tolist() == [0.01, 0.02]
    assert table.loc["fair", "batch"].tolist() == [8, 8]
    assert PICTURES < {path.name for path in folder.iterdir()}
    # Of the four runs the last is begun again, and the others are not
    before = {path: path.stat().st_mtime for path in folder.glob("*/log.txt")}
    (folder / "fair-2-ranks/log.txt").unlink()
    done = study(env=os.environ | chosen | {"RESUME": str(folder)})
    after = {path for path in before if path.stat().st_mtime != before[path]}
    assert after == {folder / "fair-2-ranks/log.txt"}, done.stdout


def test_a_study_of_another_tutorial_is_refused():
    command = [sys.executable, "-m", "tutorials.study"]
    chosen = os.environ | {"TUTORIAL": "pets"}
    done = subprocess.run(command, env=chosen, capture_output=True, text=True)
    assert done.returncode == 1 and "make study takes TUTORIAL=dogs" in done.stderr
