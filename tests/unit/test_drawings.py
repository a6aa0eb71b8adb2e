"""The drawn stand-ins: the same pictures everywhere, every class, whole or not at all."""

import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from ddp_common.errors import Error
from tutorials.kit import datasets

DATA = Path(__file__).parents[2] / "data"


@pytest.fixture(scope="module", params=["ucmerced", "dogs"])
def drawing(request):
    path = DATA / request.param / "draw.py"
    specification = importlib.util.spec_from_file_location(f"draw_{request.param}", path)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_a_picture_depends_on_class_and_number_alone_also_in_another_process(drawing):
    program = (
        "import hashlib, runpy, sys; m = runpy.run_path(sys.argv[1]); "
        "print(hashlib.sha256(m['draw'](m['CLASSES'][0], 3).tobytes()).hexdigest())"
    )
    label, other = drawing.CLASSES[:2]
    here = drawing.draw(label, 3)
    there = subprocess.check_output(
        [sys.executable, "-c", program, drawing.__file__],
        env=os.environ | {"PYTHONHASHSEED": "7"},
        text=True,
    )
    assert there.strip() == hashlib.sha256(here.tobytes()).hexdigest()
    assert (drawing.draw(label, 4) != here).any() and (drawing.draw(other, 3) != here).any()


def test_what_is_no_class_is_refused_with_those_there_are(drawing):
    for other in ("no_such_class", "tree"):  # one of land's own brushes is called so
        with pytest.raises(
            ValueError, match=f"{other}.* is drawn. There is: .*{drawing.CLASSES[-1]}"
        ):
            drawing.draw(other, 0)


def test_all_are_written_as_they_are_drawn_or_nothing_is(drawing, tmp_path):
    from drawing import draw_all  # the program has put its folder on the path

    def interrupted(label, number):
        if label == drawing.CLASSES[1]:
            raise KeyboardInterrupt
        return np.zeros((16, 16, 3), np.uint8)

    with pytest.raises(KeyboardInterrupt):
        draw_all(interrupted, drawing.CLASSES, 2, tmp_path / "drawn")
    assert list(tmp_path.iterdir()) == []

    draw = functools.partial(drawing.draw, size=16)
    folder = draw_all(draw, drawing.CLASSES, 2, tmp_path / "drawn")
    assert len([path for path in folder.rglob("*") if path.is_file()]) == 2 * len(drawing.CLASSES)
    label = drawing.CLASSES[-1]
    picture = np.asarray(Image.open(folder / label / f"{label}1.png"))
    assert (picture == draw(label, 1)).all()


@pytest.fixture
def few(tmp_path, monkeypatch):
    """A data set 'set' of our own, of two pictures in each class. Returns its program."""
    entry = {"title": "", "licence": "", "shipped": "set/draw.py", "full": "none"}
    monkeypatch.setattr(datasets, "DATA", tmp_path)
    (tmp_path / "datasets.yaml").write_text(yaml.safe_dump({"set": entry}))
    shutil.copy(DATA / "drawing.py", tmp_path)
    program = tmp_path / "set" / "draw.py"
    program.parent.mkdir()
    text = (DATA / "dogs" / "draw.py").read_text()
    program.write_text(text.replace("PER_CLASS = 150", "PER_CLASS = 2"))
    return program


def test_a_data_set_is_drawn_once_and_says_that_it_is_drawn(few):
    drawn = datasets.fetch("set")
    assert drawn.origin == "drawn stand-in, not photographs"
    times = {path: path.stat().st_mtime_ns for path in drawn.path.glob("*/*.png")}
    assert len(times) == 20
    assert datasets.fetch("set").path == drawn.path
    assert times == {path: path.stat().st_mtime_ns for path in drawn.path.glob("*/*.png")}
    few.write_text(few.read_text() + "# another version\n")
    assert datasets.fetch("set").path != drawn.path


def test_a_data_set_that_cannot_be_drawn_says_why_and_leaves_nothing(few):
    few.write_text(
        few.read_text().replace("def draw(", "def draw(label, number):\n    1 / 0\n\n\ndef _(")
    )
    with pytest.raises(Error, match="pictures of set were not drawn.*division by zero"):
        datasets.fetch("set")
    assert list(datasets.cache("set-drawn").rglob("*")) == []
