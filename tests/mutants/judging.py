"""Judges answers to the exercises of a lesson, as it does itself: a process of `make mutants`.

    python -m tests.mutants.judging LESSON NAME KEY NAME KEY …

For each answer, the KEY of the exercise NAME, it runs the lesson's cells that this needs, and then
the lesson's call of `judge`. Lines of JSON on the standard output: [name] when the cells have run,
and [name, key, mark, sentence] for each answer.
"""

import ast
import json
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.mutants.mutate import mutants
from tutorials.hand_ins import Exercise, exercises
from tutorials.kit.cells import cells_with_tag

HERE = Path(__file__).parent
TUTORIALS = HERE.parents[1] / "tutorials"
PORT = TUTORIALS / "scripts" / "solutions" / "plain_loop.py"


@dataclass
class Answer:
    """An answer of which is known whether it is right."""

    key: str
    is_right: bool
    what: Any  # a function, or the text that defines one (of a port: the script)
    asks: str = ""  # a regular expression that the sentence must have
    is_quick: bool = False  # a test has it, too


def exercise_of(lesson: str, name: str) -> Exercise:
    (exercise,) = [each for each in exercises(lesson) if each.name == name]
    return exercise


def solution_of(lesson: str, name: str) -> str:
    """The function that the lesson has as its solution; of a port, the script."""
    if name == "my_port":
        return PORT.read_text()
    cells = cells_with_tag((TUTORIALS / f"{lesson}.py").read_text(), "solution")
    for node in ast.parse(cells).body:
        if getattr(node, "name", "") == name:
            return ast.get_source_segment(cells, node)
    raise KeyError(name)


def answers_to(lesson: str, name: str, names: dict[str, Any]) -> tuple[list[Answer], dict]:
    """The solution, its mutants, what stands in `answers/`; and the mutants that are equivalent.

    `names` are the lesson's, which functions in `answers/` use.
    """
    solution, there = solution_of(lesson, name), dict(names)
    file = HERE / "answers" / f"{lesson}_{name}.py"
    exec(compile(file.read_text(), str(file), "exec"), there)

    def text_of(what):
        if isinstance(what, list):
            text = solution
            for old, new in what:
                assert old in text, f"{file.name}: {old!r} is not in the solution"
                text = text.replace(old, new)
            return text
        return what

    quick = there["IN_TESTS"]
    found = [Answer("the solution", True, solution)]  # in `make test` the notebook judges it
    for key, what in there["RIGHT"].items():
        found.append(Answer(key, True, text_of(what), is_quick=key in quick))
    for key, (what, asks) in there["WRONG"].items():
        found.append(Answer(key, False, text_of(what), asks, is_quick=key in quick))
    every = there.get("EVERY", 1)  # of the mutants: where each takes long, not all are judged
    for key, text in list(mutants(solution))[::every] if every else []:
        found.append(Answer(f"line {key}", False, text))
    assert len({each.key for each in found}) == len(found), f"{file.name}: a key comes twice"
    return found, there["EQUIVALENT"]


def main(lesson: str, *asked: str) -> None:
    """Judge the answers, pairs of NAME and KEY, and end all that they have left."""
    from traitlets.config import Config

    from tutorials.checks.as_answer import Shell
    from tutorials.checks.common import TIMEOUT, verdict

    found_by = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    shell = Shell.instance(config=Config(HistoryManager={"enabled": False}))
    found: list = []

    def judge(check, answer, timeout=TIMEOUT):
        found.append(verdict(check, answer, 2 * timeout))

    ready: dict[str, tuple] = {}
    ran: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for name, key in zip(asked[::2], asked[1::2]):
            if name not in ready:
                exercise = exercise_of(lesson, name)
                for source in [each for each in exercise.context if each not in ran]:
                    shell.run_cell(source).raise_error()
                    ran.append(source)
                answers, _ = answers_to(lesson, name, shell.user_ns)
                ready[name] = exercise, {each.key: each.what for each in answers}
                print(json.dumps([name]), file=found_by, flush=True)
            exercise, whats = ready[name]
            answer = function_of(whats[key], name, shell, Path(folder))
            exec(exercise.judge, {**shell.user_ns, "judge": judge, name: answer})
            print(json.dumps([name, key, *found.pop()]), file=found_by, flush=True)
    os._exit(0)  # whatever answers have left


def function_of(what: Any, name: str, shell: Any, folder: Path) -> Any:
    """The answer as a function, as a notebook would define it."""
    if name == "my_port":
        script = folder / "my_port.py"
        script.write_text(what)
        return lambda: script
    if isinstance(what, str):
        shell.run_cell(what).raise_error()
        return shell.user_ns[name]
    return what


if __name__ == "__main__":
    main(*sys.argv[1:])
