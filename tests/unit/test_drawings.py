"""The drawn stand-ins: the same pictures always and everywhere, every class, whole or not at all."""

import functools
import hashlib
import importlib.util
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ddp_common import Error
from ddp_common.datasets import draw_all

DATA = Path(__file__).parents[2] / "data"
UCMERCED = """agricultural airplane baseballdiamond beach buildings chaparral denseresidential forest freeway golfcourse harbor intersection
              mediumresidential mobilehomepark overpass parkinglot river runway sparseresidential storagetanks tenniscourt""".split()


@pytest.fixture(scope="module", params=["ucmerced", "dogs"])
def drawing(request):
    specification = importlib.util.spec_from_file_location(f"draw_{request.param}", DATA / request.param / "draw.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_the_classes_are_those_of_the_real_set(drawing):
    if "airplane" in drawing.CLASSES:
        assert list(drawing.CLASSES) == UCMERCED
    else:
        assert len(drawing.CLASSES) == len(set(drawing.CLASSES)) == 10 and list(drawing.CLASSES) == sorted(drawing.CLASSES)


def test_every_class_is_drawn_in_rgb_at_the_size_asked_for(drawing):
    for label in drawing.CLASSES:
        picture = drawing.draw(label, 0)
        assert picture.shape == (64, 64, 3) and picture.dtype == np.uint8
        assert picture.std() > 5  # there is something on it
    assert drawing.draw(drawing.CLASSES[0], 0, size=40).shape == (40, 40, 3)


def test_a_picture_depends_on_class_and_number_and_not_on_global_random_state(drawing):
    label, other = drawing.CLASSES[:2]
    random.seed(1)
    np.random.seed(1)
    first = drawing.draw(label, 3)
    state, numpy_state = random.getstate(), np.random.get_state()[1].copy()
    drawing.draw(other, 3)
    assert random.getstate() == state and (np.random.get_state()[1] == numpy_state).all()
    random.seed(2)
    np.random.seed(2)
    assert (drawing.draw(label, 3) == first).all()
    assert (drawing.draw(label, 4) != first).any() and (drawing.draw(other, 3) != first).any()


def test_another_process_with_another_hash_seed_draws_the_same_bytes(drawing):
    program = ("import hashlib, runpy, sys; m = runpy.run_path(sys.argv[1]); "
               "print(hashlib.sha256(b''.join(m['draw'](label, 1).tobytes() for label in m['CLASSES'])).hexdigest())")
    said = subprocess.run([sys.executable, "-c", program, drawing.__file__], env=os.environ | {"PYTHONHASHSEED": "7"}, capture_output=True,
                          text=True, check=True)
    here = b"".join(drawing.draw(label, 1).tobytes() for label in drawing.CLASSES)
    assert said.stdout.strip() == hashlib.sha256(here).hexdigest()


def test_an_unknown_class_is_an_error(drawing):
    with pytest.raises(ValueError, match="unicorn"):
        drawing.draw("unicorn", 0)


def small(drawing, **options):
    return {"draw": functools.partial(drawing.draw, size=16), "classes": drawing.CLASSES, "per_class": 2, **options}


def test_all_are_written_as_they_are_drawn_and_nothing_else_is_left(drawing, tmp_path):
    folder = draw_all(**small(drawing), folder=tmp_path / "new" / "drawn")
    files = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    assert files == sorted(Path(label) / f"{label}{number}.png" for label in drawing.CLASSES for number in range(2))
    for path in files:
        assert (np.asarray(Image.open(folder / path)) == drawing.draw(path.parts[0], int(path.stem[-1]), 16)).all()
    assert list(folder.parent.iterdir()) == [folder]


def test_what_is_drawn_already_is_kept_and_what_is_something_else_is_not_touched(drawing, tmp_path):
    folder = draw_all(**small(drawing, per_class=1), folder=tmp_path / "drawn")
    one = next(folder.rglob("*.png"))
    before = one.stat().st_mtime_ns
    draw_all(**small(drawing, per_class=1), folder=folder)
    assert one.stat().st_mtime_ns == before
    with pytest.raises(Error, match="2 pictures of each class"):
        draw_all(**small(drawing), folder=folder)
    assert one.stat().st_mtime_ns == before and list(tmp_path.iterdir()) == [folder]


def test_an_interrupted_drawing_leaves_nothing(drawing, tmp_path):
    def interrupted(label, number):
        if label == drawing.CLASSES[1]:
            raise KeyboardInterrupt
        return np.zeros((16, 16, 3), np.uint8)

    with pytest.raises(KeyboardInterrupt):
        draw_all(interrupted, drawing.CLASSES, 2, tmp_path / "drawn")
    assert list(tmp_path.iterdir()) == []


def test_two_processes_that_draw_at_once_leave_one_whole_folder(drawing, tmp_path):
    both = [subprocess.Popen([sys.executable, drawing.__file__, tmp_path / "drawn"]) for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0]
    assert len(list((tmp_path / "drawn").glob("*/*.png"))) == drawing.PER_CLASS * len(drawing.CLASSES)
    assert [path.name for path in tmp_path.iterdir()] == ["drawn"]
