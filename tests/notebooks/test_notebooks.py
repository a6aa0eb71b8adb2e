"""The notebooks: paired with their scripts, executed in order, reproducible, and their exercises judge rightly."""

import os
import subprocess
import sys
from pathlib import Path

import jupytext
import nbformat
import pytest
from nbclient import NotebookClient

import ddp_common as ddp
from ddp_common.cli import LESSON_TAGS

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tutorials"))
import sync  # noqa: E402

TUTORIALS = [path.stem for path in sync.sources()]
each_tutorial = pytest.mark.parametrize("name", TUTORIALS)


def cells_of(notebook):
    return [(cell.cell_type, cell.source, cell.metadata.get("tags", [])) for cell in notebook.cells]


def script(name):
    return jupytext.read(ROOT / "tutorials" / f"{name}.py")


def notebook(name):
    return nbformat.read(ROOT / "tutorials" / f"{name}.ipynb", 4)


@each_tutorial
def test_notebook_and_script_are_a_pair(name):
    assert cells_of(notebook(name)) == cells_of(script(name)), f"{name}.ipynb is not what {name}.py says: run make sync"


@each_tutorial
def test_every_cell_was_executed_in_order(name):
    counts = [cell.execution_count for cell in notebook(name).cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1)), "run make sync"


@each_tutorial
def test_no_output_is_an_error_or_a_warning(name):
    outputs = [output for cell in notebook(name).cells for output in cell.get("outputs", [])]
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]


@each_tutorial
def test_student_notebook_is_generated_from_the_notebook(name):
    student = nbformat.read(ROOT / "tutorials" / "student" / f"{name}.ipynb", 4)
    assert cells_of(student) == cells_of(sync.student(notebook(name))), "run make sync"
    assert not any(cell.get("outputs") for cell in student.cells)
    assert not any("instructor" in cell.metadata.get("tags", []) for cell in student.cells)
    solutions = [cell.source for cell in notebook(name).cells if "solution" in cell.metadata.get("tags", [])]
    assert solutions and not any(solution in cell.source for solution in solutions for cell in student.cells)


def test_a_solution_without_marks_is_refused():
    with pytest.raises(ValueError, match="end of your code"):
        sync.stub("def f():\n    return 1")


@each_tutorial
def test_code_cells_are_short(name):
    for cell in script(name).cells:
        if cell.cell_type == "code" and "solution" not in cell.metadata.get("tags", []):
            longest = 60 if "ddp.Checkpoint(" in cell.source else 26
            assert len(cell.source.splitlines()) <= longest, cell.source.splitlines()[0]


# On another processor, floating-point sums come in another order: what the notebook compares must not depend on it.
PROCESSORS = {"this": {}, "old": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"}}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("processor", PROCESSORS)
@each_tutorial
def test_notebook_reproduces_its_outputs(name, processor, tmp_path):
    environment = clean_environment(tmp_path) | PROCESSORS[processor]
    command = [sys.executable, "-m", "pytest", "-q", "--nbval", "--nbval-current-env", "--nbval-cell-timeout=240", "-p", "no:cacheprovider",
               "-o", "timeout=600", "-o", "addopts=", f"tutorials/{name}.ipynb"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:]
    assert " passed" in done.stdout


@pytest.mark.timeout(600)
@each_tutorial
def test_student_notebook_runs_through_unsolved(name, tmp_path, monkeypatch):
    for key, value in (clean_environment(tmp_path) | {"SET": "epochs=1"}).items():
        monkeypatch.setenv(key, value)
    student = nbformat.read(ROOT / "tutorials" / "student" / f"{name}.ipynb", 4)
    NotebookClient(student, timeout=120, resources={"metadata": {"path": str(ROOT / "tutorials")}}).execute()
    text = "".join(output.get("text", "") for cell in student.cells for output in cell.get("outputs", []))
    assert text.count("not yet") == sum("solution" in cell.metadata.get("tags", []) for cell in student.cells)


def clean_environment(runs):
    kept = {key: value for key, value in os.environ.items() if key not in ("CLUSTER", "PRESET", "SET", "RESUME")}
    return kept | {"WORKERS": "2", "RUNS": str(runs), "DDP_PROGRESS": "off"}


@pytest.fixture(scope="module")
def pets(tmp_path_factory):
    """The names that the pets tutorial defines before its section 5, its exercises' checks, and its solutions."""
    with pytest.MonkeyPatch.context() as patch:
        for key, value in clean_environment(tmp_path_factory.mktemp("runs")).items():
            patch.setenv(key, value)
        names = {"__name__": "__main__"}
        cells = script("pets").cells
        start = next(number for number, cell in enumerate(cells) if cell.source.startswith("## 5."))
        for cell in cells[:start]:
            if cell.cell_type == "code" and not LESSON_TAGS & set(cell.metadata.get("tags", [])):
                exec(cell.source, names)
        for cell in cells[start:]:
            if set(cell.metadata.get("tags", [])) & {"solution", "exercise"} and cell.cell_type == "code":
                exec("\n".join(line for line in cell.source.splitlines() if not line.startswith("check_")), names)
        yield names
        names["client"].close()


def test_the_checks_of_pets_accept_the_solutions(pets, capsys):
    assert pets["check_share"](pets["my_share"])
    assert pets["check_weight"](pets["my_weight"])
    assert pets["check_search"](pets["train_one"])
    assert capsys.readouterr().out.count("right") == 3


@pytest.mark.parametrize("check, wrong", [
    ("check_share", lambda batch, rank, size: batch[rank * (len(batch) // size):(rank + 1) * (len(batch) // size)]),
    ("check_share", lambda batch, rank, size: batch),
    ("check_share", lambda batch, rank, size: None),
    ("check_weight", lambda mine, everyones, size: mine / everyones),
    ("check_weight", lambda mine, everyones, size: 1.0),
    ("check_weight", lambda mine, everyones, size: None),
    ("check_search", lambda rate, contexts, targets: None),
    ("check_search", lambda rate, contexts, targets: (rate, rate)),
])
def test_the_checks_of_pets_refuse_wrong_answers(pets, capsys, check, wrong):
    assert not pets[check](wrong)
    assert "not yet" in capsys.readouterr().out


def test_a_name_outside_the_alphabet_is_refused_by_name(pets, tmp_path):
    (tmp_path / "names.csv").write_text("name,count\nbella,2\nzoë,1\n")
    with pytest.raises(ddp.Error, match="'zoë' has 'ë'"):
        pets["read_names"](tmp_path / "names.csv")


@pytest.mark.parametrize("content", ["name,count\n", "something,else\nbella,1\n"])
def test_a_table_without_names_is_refused(pets, tmp_path, content):
    (tmp_path / "names.csv").write_text(content)
    with pytest.raises(ddp.Error, match="holds no names"):
        pets["read_names"](tmp_path / "names.csv")


def test_windows_of_a_name(pets):
    contexts, targets = pets["windows"](["bo"])
    alphabet = pets["ALPHABET"]
    assert ["".join(alphabet[code] for code in row) for row in contexts] == ["*" * 8, "*" * 7 + "b", "*" * 6 + "bo"]
    assert "".join(alphabet[code] for code in targets) == "bo+"
