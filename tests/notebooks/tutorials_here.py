"""What the tests of the notebooks share: the names that a tutorial defines, and how one is run."""

import ast
import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jupytext
import pytest
import torch

from tutorials.kit.cells import LESSON_TAGS

ROOT = Path(__file__).parents[2]
DATA = Path(os.environ.get("DDP_DATA", "/nonexistent"))

# Less to train than a notebook has by itself
QUICK = {
    "mnist": "epochs=1",
    "pets": "epochs=1",
    "ucmerced": "epochs=1 size=33",
    "dogs": "epochs=1 size=32 images_per_breed=50 trials=4",
    "flights": "epochs=1 share=0.1",
    "gpt": "epochs=1 layers=1 batch_size=128",
}


def copy_of_repository(folder):
    """A copy of this repository, as a student has it, in a folder with spaces in its name."""
    repository = folder / "my own course"
    ignored = shutil.ignore_patterns("my-work", "__pycache__", ".ipynb_checkpoints")
    for name in ("tutorials", "ddp_common", "dask_ranks", "clusters", "docs"):
        shutil.copytree(ROOT / name, repository / name, ignore=ignored)
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, repository)
    python = repository / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    for stamp in ("torch", "installed-course"):  # newer than what they stand for: all is set up
        (repository / ".venv" / stamp).touch()
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    return repository


def environment(runs, **variables):
    """The variables for a tutorial on two ranks, whose run directories go to `runs`."""
    return {**os.environ, "WORKERS": "2", "RUNS": str(runs), "DDP_PROGRESS": "off", **variables}


@contextlib.contextmanager
def settings_of_torch_put_back():
    """A study's function may set what holds for its whole process; the tests' process goes on."""
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_flush_denormal(False)


@contextlib.contextmanager
def names_of(name, runs):
    """The names that a tutorial's job defines before section 5, with little training.

    And those of the cells after it: of these all functions and classes (exercises, solutions,
    checks).
    """
    with pytest.MonkeyPatch.context() as patch, settings_of_torch_put_back():
        for key, value in environment(runs, SET=QUICK[name]).items():
            patch.setenv(key, value)
        names = {"__name__": "__main__"}
        cells = jupytext.read(ROOT / "tutorials" / f"{name}.py").cells
        start = next(n for n, cell in enumerate(cells) if cell.source.startswith("## 5."))
        for number, cell in enumerate(cells):
            if cell.cell_type != "code":
                continue
            tree = ast.parse(cell.source)
            is_lesson = LESSON_TAGS & set(cell.metadata.get("tags", []))
            if number > start or is_lesson:
                definitions = (ast.FunctionDef, ast.ClassDef)
                tree.body = [node for node in tree.body if isinstance(node, definitions)]
            exec(compile(tree, "<cell>", "exec"), names)
        yield names
        names["client"].close()


def make_run(tutorial, runs, values, **variables):
    """What `make run` does with these settings."""
    command = [sys.executable, "-m", "tutorials", "run", tutorial, "--set", values]
    return subprocess.run(
        command, cwd=ROOT, env=environment(runs, **variables), capture_output=True, text=True
    )
