"""The notebooks are written from their scripts, executed, and without solutions for students.

It relies on `tutorials/sync.py`, which writes them. That a notebook still prints what it shows is
what `make test` looks at first, with nbval.
"""

import re
import tempfile

import nbformat
import pytest
import sync  # in tutorials/
import torch

from tutorials.kit import minutes

TUTORIALS = [path.stem for path in sync.sources()]
each_tutorial = pytest.mark.parametrize("name", TUTORIALS)


def cells_of(notebook):
    return [
        (cell.cell_type, cell.source, cell.metadata.get("tags", [])) for cell in notebook.cells
    ]


def notebook(name):
    return nbformat.read(sync.HERE / f"{name}.ipynb", 4)


@each_tutorial
def test_notebook_and_script_are_a_pair(name):
    script = sync.from_script(sync.HERE / f"{name}.py")
    assert cells_of(notebook(name)) == cells_of(script), (
        f"{name}.ipynb is not what {name}.py says: run make sync"
    )


@each_tutorial
def test_every_cell_was_executed_in_order_without_an_error_or_a_warning(name):
    cells = [cell for cell in notebook(name).cells if cell.cell_type == "code"]
    counts = [cell.execution_count for cell in cells]
    assert counts == list(range(1, len(cells) + 1)), "run make sync"
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [
        output
        for output in outputs
        if output.output_type == "error" or output.get("name") == "stderr"
    ]


@each_tutorial
def test_outputs_show_no_folder_of_the_machine_that_executed_them(name):
    texts = [
        str(output.get("text", "")) + str(output.get("data", {}).get("text/plain", ""))
        for cell in notebook(name).cells
        for output in cell.get("outputs", [])
    ]
    # torch's own C++ names the folder in which it was built
    paths = re.findall(r"(?<![\w…/:.\\])/(?!__w/)(?:[\w.-]+/)+[\w.-]+", "\n".join(texts))
    assert not paths


def test_a_traceback_is_shown_without_the_folders_of_this_machine():
    text = f'File "{sync.HERE.parent}/ddp_common/faults.py", File "{torch.__file__}"'
    shown = sync.without_folders(text)
    assert shown == 'File "…/ddp_common/faults.py", File "…/site-packages/torch/__init__.py"'
    temporary = tempfile.gettempdir()
    assert sync.without_folders(f"see {temporary}/run-x_1/log.txt") == "see …/log.txt"
    assert sync.without_folders(f"{temporary}/ipykernel_7/42.py") == "…/a-cell.py"


@each_tutorial
def test_student_notebook_is_generated_from_the_notebook_and_has_no_solution(name):
    copy = student(name)
    assert cells_of(copy) == cells_of(sync.student(notebook(name))), "run make sync"
    assert not any(cell.get("outputs") for cell in copy.cells)
    solutions = [
        cell.source for cell in notebook(name).cells if "solution" in cell.metadata.get("tags", [])
    ]
    assert solutions and not any(
        solution in cell.source for solution in solutions for cell in copy.cells
    )


def student(name):
    return nbformat.read(sync.HERE / "student" / f"{name}.ipynb", 4)


def lesson(name):
    return minutes.of_lesson(student(name))


@each_tutorial
def test_a_lesson_has_ten_minutes_to_spare_by_the_strict_clock(name):
    timed = lesson(name)
    assert timed.minutes <= 80
    assert timed.reading <= 48
    assert timed.total("words") <= 1_700
    assert timed.total("lines") <= 230
    assert 20 <= timed.total("cells") <= 28
    code = [cell.source for cell in student(name).cells if cell.cell_type == "code"]
    assert max(len(source.splitlines()) for source in code) <= 40
    assert len(timed.helper_names) <= 12, sorted(timed.helper_names)


@each_tutorial
def test_a_student_writes_a_line_before_minute_25_and_has_something_to_do_every_15(name):
    assert lesson(name).before_own_code < 25
    assert lesson(name).longest_without_doing <= 15


@each_tutorial
def test_the_heading_of_an_exercise_says_the_minutes_that_its_cell_has(name):
    exercises = [part for part in lesson(name).sections if "Exercise " in part.heading]
    assert exercises
    for part in exercises:
        assert re.findall(r"\((\d+) minutes\)", part.heading) == [str(part.tagged)], part.heading


@each_tutorial
def test_the_page_for_instructors_has_the_minutes_of_the_clock(name):
    page = sync.INSTRUCTORS.read_text()
    assert minutes.written_into(page, name, lesson(name)) == page, "run make sync"


def test_a_solution_without_marks_is_refused():
    with pytest.raises(ValueError, match="end of your code"):
        sync.stub("def f():\n    return 1")


def test_a_notebook_that_was_changed_by_hand_is_set_aside_before_it_is_written_anew(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(sync, "SET_ASIDE", tmp_path / "my-work")
    path = tmp_path / "pets.ipynb"
    notebook = sync.from_script(sync.HERE / "pets.py")
    nbformat.write(notebook, path)
    sync.set_aside(path)
    assert capsys.readouterr().out == "" and not (tmp_path / "my-work").exists()
    notebook.cells[0].source += "\na thought of the instructor"
    nbformat.write(notebook, path)
    sync.set_aside(path)
    (kept,) = (tmp_path / "my-work").iterdir()
    assert kept.read_bytes() == path.read_bytes()
    assert kept.name in capsys.readouterr().out
