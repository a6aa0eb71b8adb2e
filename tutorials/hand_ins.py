"""What `make marks` judges: the exercises of a lesson, and what students have handed in.

A folder of hand-ins has a folder for each student (`ann/pets.ipynb`, and the files that answers
name), or flat files (`ann-pets.ipynb`, `ann-my_port.py`). Relies on the student copies of the
lessons: their cells with the tag `context`, or `context-NAME` for the exercise NAME, are what an
answer needs. Promises: links are left out, since they may lead to another hand-in.
"""

import ast
import functools
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

import nbformat

from ddp_common.errors import Error
from tutorials.checks.common import TIMEOUT
from tutorials.kit.cli import tutorials

COPIES = Path(__file__).resolve().parent / "student"
LARGEST = 50_000_000  # bytes of a notebook


@dataclass
class Exercise:
    """An exercise of a lesson."""

    lesson: str
    name: str  # of the function
    cell: str  # the id of its cell
    stub: str  # what stands there before anything is written
    context: list[str]  # cells that are run before it
    judge: str  # the call of `judge`, and what that needs
    timeout: float  # of that call, seconds
    timed: bool  # the check measures time: nothing else may run meanwhile


@dataclass
class HandIn:
    """A notebook that was handed in."""

    student: str
    lesson: str  # or whatever stands in its place
    notebook: Path
    files: dict[str, Path]  # of the same student, by the names that an answer uses


def exercises(lesson: str) -> list[Exercise]:
    """The exercises of a lesson. Raises ValueError if one has no call of `judge`."""
    found, tagged = [], []
    cells = [cell for cell in student_copy(lesson) if cell.cell_type == "code"]
    for cell, after in zip(cells, [*cells[1:], cells[-1]]):
        tags = cell.metadata.get("tags", [])
        tagged += [(tag, cell.source) for tag in tags]
        if "solution" not in tags:
            continue
        (name,) = [each.name for each in ast.parse(cell.source).body if is_function(each)]
        context = [source for tag, source in tagged if tag in ("context", f"context-{name}")]
        judge, timeout = call_of_judge(f"{cell.source}\n{after.source}")
        timed = "timed" in after.metadata.get("tags", [])
        found.append(Exercise(lesson, name, cell.id, cell.source, context, judge, timeout, timed))
    return found


@functools.cache
def student_copy(lesson: str) -> list:
    """The cells that every student was given."""
    return read(COPIES / f"{lesson}.ipynb")


def call_of_judge(source: str) -> tuple[str, float]:
    """What stands in `source` up to its call of `judge`, without functions; and the time limit."""
    lines = []
    for line in ast.parse(source).body:
        if is_function(line):
            continue
        lines.append(ast.unparse(line))
        if lines[-1].startswith("judge("):
            (limit,) = [each.value for each in line.value.keywords] or [ast.Constant(TIMEOUT)]
            return "\n".join(lines), ast.literal_eval(limit)
    raise ValueError(f"There is no call of judge in {source}")


def is_function(line):
    return isinstance(line, ast.FunctionDef)


def read(notebook: Path) -> list:
    """The cells of a notebook. Raises `Error` for a file that is none."""
    try:
        if notebook.stat().st_size > LARGEST:
            raise ValueError(f"it has more than {LARGEST // 10**6} MB")
        cells = nbformat.read(notebook, 4).cells
        if not all(isinstance(cell.source, str) and cell.cell_type for cell in cells):
            raise ValueError("a cell has no text")
        return cells
    except Exception as error:  # whatever a broken file has nbformat raise
        raise Error(f"{notebook.name} is no notebook: {str(error) or repr(error):.200}") from None


def hand_ins(folder: Path) -> list[HandIn]:
    """The notebooks in a folder of hand-ins, sorted by their names."""
    found, of_flat = [], {}
    for path in own_in(folder):
        if path.is_dir():
            files = {each.name: each for each in own_in(path)}
            notebooks = [each for each in files.values() if each.suffix == ".ipynb"]
            named = [each for each in notebooks if lesson_of(each) in tutorials()]
            for each in named or notebooks[:1]:
                found.append(HandIn(path.name, lesson_of(each), each, files))
        elif path.suffix == ".ipynb":
            student = path.stem.rpartition("-")[0] or path.stem
            files = of_flat.setdefault(student, {})
            found.append(HandIn(student, lesson_of(path), path, files))
    for path in own_in(folder):
        owners = [name for name in of_flat if path.name.startswith(f"{name}-")]
        if path.is_file() and owners:
            owner = max(owners, key=len)
            of_flat[owner][path.name.removeprefix(f"{owner}-")] = path
    return found


def own_in(folder):
    paths = sorted(folder.iterdir())
    return [path for path in paths if not path.is_symlink() and not path.name.startswith(".")]


def lesson_of(notebook):
    return notebook.stem.rpartition("-")[2]


def answer_in(cells: list, exercise: Exercise) -> list[str]:
    """The student's cell, and cells of the student's own directly beside it; [] without it."""
    copy = student_copy(exercise.lesson)
    given = {cell.id for cell in copy} | {cell.source for cell in copy}
    is_own = [given.isdisjoint((cell.get("id"), cell.source)) for cell in cells]
    defines = re.compile(rf"^def {exercise.name}\(", re.MULTILINE)
    code = [number for number, cell in enumerate(cells) if cell.cell_type == "code"]
    places = [number for number in code if cells[number].get("id") == exercise.cell]
    places += [number for number in code if defines.search(cells[number].source)]
    places = [number for number in places if cells[number].source != exercise.stub] or places
    if not places:
        return []
    first = last = places[0]
    while first > 0 and is_own[first - 1]:
        first -= 1
    while last + 1 < len(cells) and is_own[last + 1]:
        last += 1
    return [cells[number].source for number in code if first <= number <= last]


def digest_of(files: dict[str, Path]) -> str:
    """A short name for the content of a student's files, without notebooks."""
    content = hashlib.sha256()
    for name, top in files.items():
        for path in [top, *sorted(top.rglob("*"))]:
            if path.is_file() and not path.is_symlink() and path.suffix != ".ipynb":
                content.update(f"{name}/{path.relative_to(top)}".encode())
                content.update(hashlib.sha256(path.read_bytes()).digest())
    return content.hexdigest()
