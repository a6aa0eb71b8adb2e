"""Students' copies of the notebooks run through, from the first cell to the last, unsolved."""

import lab  # in tutorials/
import nbformat
import pytest
import sync
from kernels import configuration
from nbclient import NotebookClient
from tutorials_here import QUICK, environment


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", [path.stem for path in sync.sources()])
def test_student_notebook_runs_through_unsolved(name, tmp_path, monkeypatch):
    lab.prepare(lab.originals(), tmp_path / "my-work")
    for key, value in environment(tmp_path / "runs", SET=QUICK[name]).items():
        monkeypatch.setenv(key, value)
    monkeypatch.delenv("DDP_PROGRESS")  # nobody watches here: it must be found out
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
        output for cell in student.cells if "judge(" in cell.source for output in cell.outputs
    ]
    assert len(list((tmp_path / "runs").glob("*/*"))) <= 5, "short launches keep no folder"
    # words, no bare value such as False
    assert {output.output_type for output in judged} <= {"stream"}
