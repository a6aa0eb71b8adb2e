"""What the tests of the notebooks share: their cells, and the names that a tutorial defines."""

import ast
import contextlib
import os
import sys
from pathlib import Path

import jupytext
import pytest

from ddp_common.commands.cli import LESSON_TAGS

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tutorials"))


def script(name):
    return jupytext.read(ROOT / "tutorials" / f"{name}.py")


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
