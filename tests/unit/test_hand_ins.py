"""What a class has handed in is found by its names, and its marks are written for any reader."""

import builtins
import csv
import math

import nbformat
import pytest
import torch

from ddp_common.errors import Error
from tutorials import marks
from tutorials.checks import as_answer, common, ucmerced
from tutorials.hand_ins import answer_in, digest_of, exercises, hand_ins, read, student_copy
from tutorials.kit.cli import tutorials

pytestmark = pytest.mark.filterwarnings("ignore:.*reduce_op")  # a name of torch's that is old


def make(folder, *names):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)


def found_in(folder):
    return {
        (each.student, each.lesson, each.notebook.name): sorted(each.files)
        for each in hand_ins(folder)
    }


def test_a_student_has_a_folder_or_flat_files_with_the_name_before_them(tmp_path):
    make(tmp_path, "ann/pets.ipynb", "ann/start-here.ipynb", "ann/runs/pets/1/log.txt")
    make(tmp_path, "mary-dogs.ipynb", "mary-ann-mnist.ipynb", "mary-ann-my_port.py", "list.csv")
    assert found_in(tmp_path) == {
        ("ann", "pets", "pets.ipynb"): ["pets.ipynb", "runs", "start-here.ipynb"],
        ("mary", "dogs", "mary-dogs.ipynb"): ["dogs.ipynb"],
        ("mary-ann", "mnist", "mary-ann-mnist.ipynb"): ["mnist.ipynb", "my_port.py"],
    }


def test_links_are_no_part_of_a_hand_in(tmp_path):
    make(tmp_path, "ann/mnist.ipynb", "bob/mnist.ipynb", "bob/my_port.py")
    (tmp_path / "ann" / "my_port.py").symlink_to(tmp_path / "bob" / "my_port.py")
    (tmp_path / "carl").symlink_to(tmp_path / "bob")
    assert ("carl", "mnist", "mnist.ipynb") not in found_in(tmp_path)
    assert found_in(tmp_path)["ann", "mnist", "mnist.ipynb"] == ["mnist.ipynb"]


def test_the_digest_is_that_of_all_files_but_notebooks(tmp_path):
    make(tmp_path, "runs/1/log.txt", "pets.ipynb")
    files = {path.name: path for path in tmp_path.iterdir()}
    first = digest_of(files)
    (tmp_path / "pets.ipynb").write_text("saved again")
    assert digest_of(files) == first
    (tmp_path / "runs/1/log.txt").write_text("resumed")
    assert digest_of(files) != first


@pytest.mark.parametrize("text", ["", "[1]", '{"cells": 3}', "PK\3\4", '{"nbformat": 4}'])
def test_a_file_that_is_no_notebook_is_told_in_a_sentence(text, tmp_path):
    (tmp_path / "ann-pets.ipynb").write_text(text)
    with pytest.raises(Error, match=r"ann-pets.ipynb is no notebook: \S"):
        read(tmp_path / "ann-pets.ipynb")


@pytest.mark.parametrize("lesson", tutorials())
def test_every_exercise_of_a_lesson_has_a_call_of_judge_that_names_it(lesson):
    found = exercises(lesson)
    assert len(found) >= 2
    for each in found:
        assert each.judge.count("judge(") == 1 and each.name in each.judge
        assert any("import" in source for source in each.context)


def copied(*changes):
    """The cells of a student who has changed some of them: (first line, new source)."""
    cells = [nbformat.from_dict(cell) for cell in student_copy("dogs")]
    for cell in cells:
        for begins, source in changes:
            if cell.source.startswith(begins):
                cell.source = source
    return cells


(RATE,) = (each for each in exercises("dogs") if each.name == "my_rate")
MINE = "def my_rate(seen, base, ranks, rule, warm_up):\n    return base"


def test_an_answer_is_its_cell_and_what_the_student_has_put_beside_it():
    cells = copied(("def my_rate(", MINE))
    place = next(number for number, cell in enumerate(cells) if cell.source == MINE)
    cells.insert(place, nbformat.v4.new_code_cell("import math"))
    cells.insert(place, nbformat.v4.new_markdown_cell("a thought"))
    cells.insert(place + 3, nbformat.v4.new_code_cell("my_rate(0, 1, 1, 'kept', 0)"))
    assert answer_in(cells, RATE) == ["import math", MINE, "my_rate(0, 1, 1, 'kept', 0)"]


def test_an_answer_is_found_by_its_name_where_cells_have_lost_their_ids():
    cells = copied(("def my_rate(", MINE))
    for number, cell in enumerate(cells):
        cell.id = f"new-{number}"
    assert answer_in(cells, RATE) == [MINE]
    assert answer_in([cell for cell in cells if cell.source != MINE], RATE) == []


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@x", " =1", "\t=1", "\n=1", "'=1"])
def test_no_text_of_a_student_is_a_formula_of_a_spreadsheet(text):
    assert marks.in_a_cell(text).startswith("'") and marks.in_a_cell("ann").isalpha()


def test_marks_are_read_again_without_what_was_half_written(tmp_path):
    path, digest = tmp_path / "marks.csv", "1" * 64
    row = marks.Row("ann, the 'first'", "dogs", "my_rate", "right", 'a "word", é', digest)
    marks.write_rows(path, [row, row])
    text = path.read_text()
    path.write_text(text[: text.rindex("1") - 5])
    assert list(marks.read_rows(path)) == [row]
    assert next(csv.reader(path.open())) == list(marks.Row.__annotations__)


def test_the_page_has_words_beside_symbols_and_nothing_of_a_student_is_html():
    rows = [
        marks.Row("<b>", "dogs", "my_rate", "right", "<script>", ""),
        marks.Row("bob", "dogs", "", "not judged", "no notebook", ""),
    ]
    page = marks.page_of(rows)
    assert "&lt;b&gt;" in page and "&lt;script&gt;" in page and "<script" not in page
    assert "✓ right" in page and "! not judged" in page and "<b>" not in page


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({}, "FOLDER=: there is no such folder"),
        ({"FOLDER": "/nowhere"}, "FOLDER=/nowhere: there is no such folder"),
        ({"FOLDER": "/"}, "FOLDER=/ also holds this course"),
        ({"FOLDER": ".", "TUTORIAL": "cats"}, "There is no tutorial 'cats'"),
        ({"FOLDER": ".", "PATH": "/nowhere"}, "There is no bwrap here"),
    ],
)
def test_what_cannot_be_marked_is_refused_in_a_sentence_and_nothing_is_written(
    variables, said, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FOLDER", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match=said):
        marks.main()
    assert not list(tmp_path.iterdir())


class Model(torch.nn.Linear):
    """Stands for a class that a lesson defines."""


def something_else(*_, **__):
    return "right"


@pytest.mark.parametrize(
    ("owner", "name", "value", "called"),
    [
        (common, "judge", something_else, "tutorials.checks.common.judge"),
        (common, "isinstance", something_else, "tutorials.checks.common.isinstance"),
        (common, "TIMEOUT", 0.1, "tutorials.checks.common.TIMEOUT"),
        (common.Wrong, "__init__", something_else, "tutorials.checks.common.Wrong.__init__"),
        (common.judge, "__code__", something_else.__code__, "tutorials.checks.common.judge"),
        (builtins, "isinstance", something_else, "builtins.isinstance"),
        (math, "isclose", something_else, "math.isclose"),
        (torch, "equal", something_else, "torch.equal"),
        (torch.Tensor, "allclose", something_else, "torch._tensor.Tensor.allclose"),
        (Model, "parameters", something_else, "the lesson.Model.parameters"),
    ],
)
def test_what_an_answer_replaces_is_named(owner, name, value, called, monkeypatch):
    Model.__module__ = "__main__"
    before = as_answer.what_is_there({"Model": Model})
    assert as_answer.replaced(before) == ""
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, value, raising=False)
        said = as_answer.replaced(before)
    assert said.startswith(f"it replaces {called}, ")
    assert as_answer.replaced(before) == ""


def test_a_constant_of_a_check_that_an_answer_changes_is_named(monkeypatch):
    before = as_answer.what_is_there({})
    monkeypatch.setitem(ucmerced.READINGS, 1, ("T", 0))
    assert "it replaces tutorials.checks.ucmerced.READINGS" in as_answer.replaced(before)
