"""The drawn stand-ins: the same pictures everywhere, every class, whole or not at all."""

import functools
import hashlib
import importlib.util
import os
import random
import subprocess
import sys
from pathlib import Path

import cloudpickle
import numpy as np
import pytest
from PIL import Image

from ddp_common import Error
from ddp_common.data import drawing as shared
from ddp_common.data.datasets import draw_all

DATA = Path(__file__).parents[2] / "data"
UCMERCED = """
agricultural airplane baseballdiamond beach buildings chaparral denseresidential forest freeway
golfcourse harbor intersection mediumresidential mobilehomepark overpass parkinglot river runway
sparseresidential storagetanks tenniscourt
""".split()

SECOND_PICTURES = {  # the mean red, green and blue of number 1 of each class
    "beagle": (158.2, 153.2, 163.8),
    "corgi": (157.0, 161.2, 176.4),
    "dachshund": (92.4, 104.1, 83.0),
    "dalmatian": (194.6, 160.5, 127.7),
    "german_shepherd": (119.9, 127.4, 131.3),
    "golden_retriever": (203.4, 195.9, 165.2),
    "greyhound": (138.5, 151.9, 156.4),
    "poodle": (137.1, 142.8, 144.3),
    "pug": (160.5, 138.8, 116.3),
    "siberian_husky": (195.9, 169.9, 126.8),
    "agricultural": (145.2, 112.7, 90.6),
    "airplane": (187.2, 183.6, 172.5),
    "baseballdiamond": (124.7, 120.2, 78.8),
    "beach": (164.7, 177.5, 154.9),
    "buildings": (118.4, 114.9, 127.8),
    "chaparral": (147.7, 130.5, 100.9),
    "denseresidential": (162.3, 149.0, 122.2),
    "forest": (78.4, 120.4, 75.6),
    "freeway": (171.1, 156.1, 141.5),
    "golfcourse": (144.7, 153.3, 94.8),
    "harbor": (134.5, 144.4, 136.0),
    "intersection": (91.9, 92.0, 82.2),
    "mediumresidential": (99.1, 115.5, 81.1),
    "mobilehomepark": (120.6, 114.9, 97.4),
    "overpass": (134.1, 148.2, 115.9),
    "parkinglot": (102.1, 101.7, 106.6),
    "river": (105.6, 113.1, 90.9),
    "runway": (113.1, 103.1, 93.0),
    "sparseresidential": (78.6, 96.8, 59.3),
    "storagetanks": (176.5, 178.9, 173.3),
    "tenniscourt": (132.0, 117.0, 113.0),
}


@pytest.fixture(scope="module", params=["ucmerced", "dogs"])
def drawing(request):
    specification = importlib.util.spec_from_file_location(
        f"draw_{request.param}", DATA / request.param / "draw.py"
    )
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_the_classes_are_those_of_the_real_set(drawing):
    if "airplane" in drawing.CLASSES:
        assert list(drawing.CLASSES) == UCMERCED
    else:
        assert len(drawing.CLASSES) == len(set(drawing.CLASSES)) == 10 and list(
            drawing.CLASSES
        ) == sorted(drawing.CLASSES)


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
    program = (
        "import hashlib, runpy, sys; m = runpy.run_path(sys.argv[1]); "
        "drawn = b''.join(m['draw'](label, 1).tobytes() for label in m['CLASSES']); "
        "print(hashlib.sha256(drawn).hexdigest())"
    )
    said = subprocess.run(
        [sys.executable, "-c", program, drawing.__file__],
        env=os.environ | {"PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        check=True,
    )
    here = b"".join(drawing.draw(label, 1).tobytes() for label in drawing.CLASSES)
    assert said.stdout.strip() == hashlib.sha256(here).hexdigest()


def test_the_pictures_look_as_they_always_did(drawing):
    """Where lots are cast in another order, all that comes after is another picture."""
    for label in drawing.CLASSES:
        assert drawing.draw(label, 1).mean((0, 1)) == pytest.approx(SECOND_PICTURES[label], abs=1)


def test_a_program_that_was_sent_to_another_process_draws_the_same(drawing):
    program = (
        "import pickle, sys; draw, label = pickle.load(sys.stdin.buffer); "
        "sys.stdout.buffer.write(draw(label, 2).tobytes())"
    )
    label = drawing.CLASSES[2]
    sent = cloudpickle.dumps((drawing.draw, label))
    command = [sys.executable, "-c", program]
    said = subprocess.run(command, input=sent, capture_output=True, check=True)
    assert said.stdout == drawing.draw(label, 2).tobytes()


def test_an_unknown_class_is_an_error(drawing):
    with pytest.raises(ValueError, match="unicorn"):
        drawing.draw("unicorn", 0)


def small(drawing, **options):
    return {
        "draw": functools.partial(drawing.draw, size=16),
        "classes": drawing.CLASSES,
        "per_class": 2,
        **options,
    }


def copied(drawing, folder, per_class):
    """A copy of the program in a folder of its own, that draws fewer pictures."""
    text = Path(drawing.__file__).read_text()
    folder.mkdir()
    fewer = text.replace(f"PER_CLASS = {drawing.PER_CLASS}", f"PER_CLASS = {per_class}")
    (folder / "draw.py").write_text(fewer)
    return folder / "draw.py"


def test_all_are_written_as_they_are_drawn_and_nothing_else_is_left(drawing, tmp_path):
    folder = draw_all(**small(drawing), folder=tmp_path / "new" / "drawn")
    files = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    assert files == sorted(
        Path(label) / f"{label}{number}.png" for label in drawing.CLASSES for number in range(2)
    )
    for path in files:
        assert (
            np.asarray(Image.open(folder / path))
            == drawing.draw(path.parts[0], int(path.stem[-1]), 16)
        ).all()
    assert list(folder.parent.iterdir()) == [folder]


def test_what_is_drawn_already_is_kept_and_what_is_something_else_is_not_touched(
    drawing, tmp_path
):
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
    program = copied(drawing, tmp_path / "program", per_class=5)
    both = [
        subprocess.Popen([sys.executable, program, tmp_path / "new" / "drawn"]) for _ in range(2)
    ]
    assert [process.wait() for process in both] == [0, 0]
    assert len(list((tmp_path / "new" / "drawn").glob("*/*.png"))) == 5 * len(drawing.CLASSES)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["drawn"]


def run(program, *arguments, **options):
    command = [sys.executable, program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, **options)


def test_a_copy_of_the_program_draws_wherever_it_lies_and_wherever_it_is_run(drawing, tmp_path):
    program = copied(drawing, tmp_path / "elsewhere", per_class=1)
    done = run(program, "drawn", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    label = drawing.CLASSES[-1]
    picture = Image.open(tmp_path / "drawn" / label / f"{label}0.png")
    assert (np.asarray(picture) == drawing.draw(label, 0)).all()


def test_the_program_says_how_it_is_called_and_draws_nothing(drawing, tmp_path):
    for arguments, code in (([], 2), (["--help"], 0)):
        done = run(drawing.__file__, *arguments, cwd=tmp_path)
        assert done.returncode == code
        assert "FOLDER" in done.stdout + done.stderr and "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_program_says_in_one_message_why_a_folder_will_not_do(drawing, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("...")
    cases = {"mine": "holds something other", "mine/letter.txt/drawn": "cannot be written"}
    for folder, said in cases.items():
        done = run(drawing.__file__, tmp_path / folder)
        assert done.returncode == 1 and said in done.stderr
        assert done.stderr.startswith("Error: ") and done.stderr.count("\n") == 1
    assert (tmp_path / "mine" / "letter.txt").read_text() == "..."


def test_pictures_of_a_changed_program_get_another_folder(drawing, tmp_path, monkeypatch):
    program = tmp_path / "draw.py"
    program.write_bytes(Path(drawing.__file__).read_bytes())
    first = shared.edition(program)
    assert first == shared.edition(Path(drawing.__file__)) and len(first) == 8

    program.write_text(program.read_text() + "# changed\n")
    second = shared.edition(program)
    kit = tmp_path / "drawing.py"
    kit.write_text(Path(shared.__file__).read_text() + "# changed\n")
    monkeypatch.setattr(shared, "__file__", str(kit))
    assert len({first, second, shared.edition(program)}) == 3
