"""What the tests of the notebooks share: their cells, and the names that a tutorial defines."""

import ast
import contextlib
import os
import sys
from pathlib import Path

import jupytext
import nbformat
import pytest

from ddp_common.commands.cli import LESSON_TAGS

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tutorials"))


def script(name):
    return jupytext.read(ROOT / "tutorials" / f"{name}.py")


def alt_texts(name):
    """What is said of each picture of an executed notebook to those who cannot see it."""
    notebook = nbformat.read(ROOT / "tutorials" / f"{name}.ipynb", 4)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return [
        output.metadata["image/png"]["alt"]
        for output in outputs
        if "image/png" in output.get("data", {})
    ]


def lines_cut_off(name):
    """The lines of a tutorial that are too long for a page: code over 88, text over 86."""
    return [
        line
        for cell in script(name).cells
        for line in cell.source.splitlines()
        if len(line) > (88 if cell.cell_type == "code" else 86)
    ]


def clean_environment(runs):
    kept = {
        key: value
        for key, value in os.environ.items()
        if key not in ("CLUSTER", "PRESET", "SET", "RESUME")
    }
    return kept | {"WORKERS": "2", "RUNS": str(runs), "DDP_PROGRESS": "off"}


@contextlib.contextmanager
def names_of(name, runs):
    """The names that a tutorial's job defines before section 5, and those of the cells after it.

    Of these all functions and classes: exercises, solutions, checks.
    """
    with pytest.MonkeyPatch.context() as patch:
        for key, value in clean_environment(runs).items():
            patch.setenv(key, value)
        names = {"__name__": "__main__"}
        cells = script(name).cells
        start = next(
            number for number, cell in enumerate(cells) if cell.source.startswith("## 5.")
        )
        for cell in cells[:start]:
            if cell.cell_type == "code" and not LESSON_TAGS & set(cell.metadata.get("tags", [])):
                exec(cell.source, names)
        for cell in cells[start:]:
            if cell.cell_type == "code":
                functions = [
                    node
                    for node in ast.parse(cell.source).body
                    if isinstance(node, (ast.FunctionDef, ast.ClassDef))
                ]
                exec(compile(ast.Module(functions, []), "<cell>", "exec"), names)
        exec(
            "def crashes(*given, **named):\n    return 1 / 0", names
        )  # an answer that a student may give to any exercise
        yield names
        names["client"].close()
