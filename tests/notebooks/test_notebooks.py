"""The notebooks: paired with their scripts, executed in order, reproducible.

The students' run through unsolved.
"""

import os
import subprocess
import sys

import lab  # in tutorials/
import nbformat
import pytest
import sync
import torch
from kernels import configuration
from nbclient import NotebookClient
from tutorials_here import ROOT, clean_environment, script, settings_of_torch_put_back

TUTORIALS = [path.stem for path in sync.sources()]
each_tutorial = pytest.mark.parametrize("name", TUTORIALS)


def cells_of(notebook):
    return [
        (cell.cell_type, cell.source, cell.metadata.get("tags", [])) for cell in notebook.cells
    ]


def notebook(name):
    return nbformat.read(ROOT / "tutorials" / f"{name}.ipynb", 4)


@each_tutorial
def test_notebook_and_script_are_a_pair(name):
    assert cells_of(notebook(name)) == cells_of(script(name)), (
        f"{name}.ipynb is not what {name}.py says: run make sync"
    )


@each_tutorial
def test_every_cell_was_executed_in_order(name):
    counts = [cell.execution_count for cell in notebook(name).cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1)), "run make sync"


@each_tutorial
def test_no_output_is_an_error_or_a_warning(name):
    outputs = [output for cell in notebook(name).cells for output in cell.get("outputs", [])]
    assert not [
        output
        for output in outputs
        if output.output_type == "error" or output.get("name") == "stderr"
    ]


@each_tutorial
def test_what_a_cell_prints_is_kept_in_one_piece(name):
    for cell in notebook(name).cells:
        streams = [
            output.name for output in cell.get("outputs", []) if output.output_type == "stream"
        ]
        assert len(streams) == len(set(streams)), cell.source


@each_tutorial
@pytest.mark.parametrize("folder", [".", "student"])
def test_no_notebook_is_paired_with_a_script(name, folder):
    metadata = nbformat.read(ROOT / "tutorials" / folder / f"{name}.ipynb", 4).metadata
    assert "jupytext" not in metadata, (
        "what is saved in Jupyter would be written into a script too"
    )


@each_tutorial
def test_student_notebook_is_generated_from_the_notebook(name):
    student = nbformat.read(ROOT / "tutorials" / "student" / f"{name}.ipynb", 4)
    assert cells_of(student) == cells_of(sync.student(notebook(name))), "run make sync"
    assert not any(cell.get("outputs") for cell in student.cells)
    assert not any("instructor" in cell.metadata.get("tags", []) for cell in student.cells)
    solutions = [
        cell.source for cell in notebook(name).cells if "solution" in cell.metadata.get("tags", [])
    ]
    assert solutions and not any(
        solution in cell.source for solution in solutions for cell in student.cells
    )


@each_tutorial
def test_a_student_sees_cells_that_judge_folded_and_what_is_to_be_repaired_open(name):
    def folded(notebook):
        return [
            cell.source
            for cell in notebook.cells
            if cell.metadata.get("jupyter", {}).get("source_hidden")
        ]

    student = nbformat.read(ROOT / "tutorials" / "student" / f"{name}.ipynb", 4)
    judging = [cell.source for cell in student.cells if "\nddp.judge(" in cell.source]
    assert judging and set(judging) <= set(folded(student))
    assert not any("def broken_script" in source for source in folded(student))
    assert not any("# your code" in source for source in folded(student))
    assert not folded(notebook(name))


def test_a_solution_without_marks_is_refused():
    with pytest.raises(ValueError, match="end of your code"):
        sync.stub("def f():\n    return 1")


def test_what_a_study_sets_for_its_process_is_put_back():
    threads = torch.get_num_threads()
    with settings_of_torch_put_back():
        torch.set_num_threads(1)
        torch.set_flush_denormal(True)
        assert sys.float_info.min / 2 == 0
    assert torch.get_num_threads() == threads
    assert sys.float_info.min / 2 > 0


# On another processor, floating-point sums come in another order: what the notebook compares must
# not depend on it. The stored outputs come from one with AVX-512; the oldest instructions
# (ATEN_CPU_CAPABILITY=default, ONEDNN_MAX_CPU_ISA=SSE41) make ResNet18 3.7 times slower.
ANOTHER_PROCESSOR = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}


@pytest.mark.timeout(1500)
@each_tutorial
def test_notebook_reproduces_its_outputs(name, tmp_path):
    environment = clean_environment(tmp_path) | ANOTHER_PROCESSOR
    del environment["DDP_PROGRESS"]  # nobody watches here: it must be found out
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)  # for the plugin
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--nbval",
        "--nbval-current-env",
        "--nbval-cell-timeout=800",
        "-p",
        "kernels",
        "-p",
        "no:cacheprovider",
        "-o",
        "timeout=1500",
        "-o",
        "addopts=",
        f"tutorials/{name}.ipynb",
    ]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:]
    assert " passed" in done.stdout


QUICK = {
    "ucmerced": "epochs=1 size=33",
    "dogs": "head_epochs=1 epochs=1 size=32 images_per_breed=50 trials=4",
    "flights": "epochs=1 share=0.1",
}


@pytest.mark.timeout(1500)
@each_tutorial
def test_student_notebook_runs_through_unsolved(name, tmp_path, monkeypatch):
    lab.prepare(lab.originals(), tmp_path / "my-work")
    for key, value in (clean_environment(tmp_path) | {"SET": QUICK.get(name, "epochs=1")}).items():
        monkeypatch.setenv(key, value)
    monkeypatch.delenv("DDP_PROGRESS")
    student = nbformat.read(tmp_path / "my-work" / f"{name}.ipynb", 4)
    resources = {"metadata": {"path": str(tmp_path / "my-work")}}
    NotebookClient(student, timeout=800, resources=resources, config=configuration()).execute()
    text = "".join(
        output.get("text", "") for cell in student.cells for output in cell.get("outputs", [])
    )
    assert text.count("not yet") == sum(
        "solution" in cell.metadata.get("tags", []) for cell in student.cells
    )
    judged = [
        output for cell in student.cells if "ddp.judge(" in cell.source for output in cell.outputs
    ]
    # words, no bare value such as False
    assert {output.output_type for output in judged} <= {"stream"}
