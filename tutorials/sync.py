"""Writes the notebooks from the scripts: `python tutorials/sync.py [NAME …]`, or `make sync`.

The percent script is the source, always: `NAME.py` -> `NAME.ipynb` (executed on two workers,
outputs kept) and `student/NAME.ipynb` (solutions replaced by stubs, outputs taken out). Nothing is
ever read back from a notebook but its cell ids: so none is paired with its script by jupytext, and
what is saved in Jupyter changes the notebook that is open, nothing else.
To change a tutorial, change its script (in JupyterLab: Open With > Jupytext Notebook, or as text).
A notebook whose cells were changed by hand all the same is set aside before it is written anew.
"""

import hashlib
import json
import os
import re
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import jupytext
import nbformat
from jupytext.combine import combine_inputs_with_outputs
from nbclient import NotebookClient

from tutorials.kit import minutes

HERE = Path(__file__).parent
METADATA = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
INSTRUCTORS = HERE.parent / "docs" / "instructors.md"
SET_ASIDE = HERE / "my-work"  # of no interest to git
CELL_TIMEOUT = 300  # seconds


def sources():
    """The tutorials: every percent script in this folder."""
    return sorted(
        path for path in HERE.glob("*.py") if path.read_text().startswith("# ---\n# jupyter:")
    )


def from_script(script):
    """The notebook of a percent script, not executed; cells of an earlier one keep their ids."""
    notebook, earlier = jupytext.read(script), script.with_suffix(".ipynb")
    if earlier.exists():
        notebook = combine_inputs_with_outputs(notebook, nbformat.read(earlier, 4))
    for cell in notebook.cells:
        cell.metadata = {"tags": cell.metadata["tags"]} if cell.metadata.get("tags") else {}
    notebook.metadata = METADATA | {"cells_as_written": digest(notebook)}
    return notebook


def digest(notebook):
    """A short name for the cells of a notebook, without outputs.

    As long as it stands in the metadata and fits, nobody has changed them.
    """
    cells = [
        (cell.cell_type, cell.source, cell.metadata.get("tags", [])) for cell in notebook.cells
    ]
    return hashlib.sha256(json.dumps(cells).encode()).hexdigest()[:16]


def set_aside(path):
    """Keep a copy of a notebook that is about to be written anew.

    Only if its cells are not those that were written last: then somebody has worked in it.
    """
    if not path.exists():
        return
    notebook = nbformat.read(path, 4)
    if notebook.metadata.get("cells_as_written") in (None, digest(notebook)):
        return
    copy = SET_ASIDE / f"{path.stem}-changed-{time.strftime('%Y-%m-%dT%H-%M-%S')}.ipynb"
    copy.parent.mkdir(exist_ok=True)
    copy.write_bytes(path.read_bytes())
    print(
        f"{path.name} was changed by hand, and is now written anew from {path.stem}.py. What it "
        f"was is kept in {copy.parent.name}/{copy.name}: "
        f"take over into {path.stem}.py what shall last, and run this again.",
        flush=True,
    )


def execute(notebook, folder=HERE):
    """Run all cells on two workers, with default settings; the run directory is thrown away."""
    metadata = dict(notebook.metadata)
    with tempfile.TemporaryDirectory() as runs:
        os.environ.update(WORKERS="2", RUNS=runs, DDP_PROGRESS="off")
        for name in ("CLUSTER", "PRESET", "SET", "RESUME"):
            os.environ.pop(name, None)
        # what a cell prints comes in more pieces on a busy machine; joined, it is the same
        NotebookClient(
            notebook,
            timeout=CELL_TIMEOUT,
            record_timing=False,
            coalesce_streams=True,
            resources={"metadata": {"path": str(folder)}},
        ).execute()
    notebook.metadata = metadata  # without the kernel's own version
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if "text" in output:
                output.text = without_folders(output.text)
    return notebook


def without_folders(text):
    """`text` without the folders of this machine: `…/ddp_common/faults.py`."""
    libraries = {sysconfig.get_path("purelib"): "…/site-packages"}
    libraries[sysconfig.get_path("stdlib")] = "…/python"
    for folder, short in {**libraries, str(HERE.parent): "…"}.items():
        text = text.replace(folder, short)
    cell = re.escape(tempfile.gettempdir()) + r"/ipykernel_\d+/\d+\.py"
    text = re.sub(cell, "…/a-cell.py", text)
    return re.sub(re.escape(tempfile.gettempdir()) + r"/[\w.-]+", "…", text)


def student(notebook):
    """The notebook a student gets: stubs for solutions, no outputs."""
    notebook = nbformat.from_dict(notebook)
    for cell in notebook.cells:
        if "solution" in cell.metadata.get("tags", []):
            cell.source = stub(cell.source)
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    notebook.metadata = METADATA
    return notebook


GAP = re.compile(r"^( *)# your code\n(.*?)^ *# end of your code\n?", re.DOTALL | re.MULTILINE)


def stub(source):
    """`source` with an ellipsis in place of what stands between two marks, once or more often.

    These are the lines '# your code' and '# end of your code'.
    """
    gaps = GAP.findall(f"{source}\n")
    if not gaps or len(gaps) != source.count("# your code") or not all(own for _, own in gaps):
        raise ValueError("a solution cell needs the lines '# your code' and '# end of your code'")
    return GAP.sub(r"\1# your code\n\1...\n", f"{source}\n").rstrip()


def write_minutes(name, copy):
    """Write the minutes of a student's copy into the page for instructors.

    Only if its exercises have minutes in their tags: the numbers of others are estimates.
    """
    lesson = minutes.of_lesson(copy)
    sizes = ", ".join(f"{lesson.total(what):,} {what}" for what in ("words", "lines", "cells"))
    print(f"{name}: {lesson.minutes:.0f} minutes by the strict clock; {sizes}", flush=True)
    if lesson.total("tagged"):
        page = INSTRUCTORS.read_text()
        INSTRUCTORS.write_text(minutes.written_into(page, name, lesson))


def main(names):
    scripts = [path for path in sources() if not names or path.stem in names]
    if not scripts:
        sys.exit(
            f"No tutorial is called {' or '.join(names)}. There is: "
            f"{', '.join(path.stem for path in sources())}."
        )
    (HERE / "student").mkdir(exist_ok=True)
    for script in scripts:
        print(f"{script.stem}: executing", flush=True)
        notebook = execute(from_script(script))
        set_aside(script.with_suffix(".ipynb"))
        nbformat.write(notebook, script.with_suffix(".ipynb"))
        copy = student(notebook)
        nbformat.write(copy, HERE / "student" / script.with_suffix(".ipynb").name)
        write_minutes(script.stem, copy)
        print(
            f"{script.stem}: wrote {script.stem}.ipynb and student/{script.stem}.ipynb", flush=True
        )


if __name__ == "__main__":
    main(sys.argv[1:])
