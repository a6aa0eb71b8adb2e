"""Judges one answer of a hand-in: the process that `make marks` starts in a sandbox.

    python -m tutorials.checks.as_answer <> TASK

It runs the lesson's cells that the answer needs, then the student's, as a notebook runs them, and
has the lesson's check judge. The verdict goes to what was the standard output, behind a token that
the answer is not given; all else that is printed goes nowhere.

Promises: the call of `judge` has names of its own, which an answer cannot rebind. An answer is not
right if afterwards a function of Python, of a library or of the check is another one than before,
or a constant of the check.
"""

import builtins
import json
import marshal
import os
import resource
import sys
from dataclasses import dataclass, field
from types import BuiltinFunctionType, CodeType, FunctionType, SimpleNamespace
from typing import Any

import torch._dynamo  # noqa: F401 (torch would import it later, and replace some functions then)
from IPython.core.interactiveshell import InteractiveShell
from torch.optim import Optimizer
from traitlets.config import Config

from tutorials.checks.common import TIMEOUT, verdict

LARGEST_FILE = 10**9  # bytes
LONGEST = 2_000  # characters of a sentence
LIBRARIES = sys.stdlib_module_names | {"ddp_common", "dask_ranks"}
LIBRARIES |= {"torch", "numpy", "pandas", "scipy", "tutorials"}
BUILTINS = set(vars(builtins))
# Names that Python puts into a class when it is asked for annotations, or an object is copied
MADE_BY_PYTHON = {"__annotations__", "__slotnames__"}
CONTAINERS = tuple, list, dict, set
FUNCTIONS = FunctionType, BuiltinFunctionType, type, property, staticmethod, classmethod


class Shell(InteractiveShell):
    """Runs cells as a notebook does."""

    def enable_gui(self, gui=None):
        """Nothing: `%matplotlib` asks for it, and there is no window here."""


def judged(task: dict) -> tuple[str, str]:
    """The mark and a sentence. `task` is what `tutorials/marks.py` sends."""
    shell = Shell.instance(config=Config(HistoryManager={"enabled": False}))
    for source in task["context"]:
        shell.run_cell(source).raise_error()
    found, names = [], dict(shell.user_ns)
    before = what_is_there(names)

    def judge(check, answer, *, timeout=TIMEOUT):
        found.append(verdict(check, answer, timeout))

    names["judge"] = judge
    shell.user_ns["judge"] = lambda *_, **__: None  # some students' cells have the call, too
    ran = [shell.run_cell(source) for source in task["cells"]]
    if task["name"] not in shell.user_ns:
        errors = [each.error_before_exec or each.error_in_exec for each in ran]
        first = next((f": {type(error).__name__}: {error}" for error in errors if error), "")
        return "not right", f"no {task['name']} is defined{first}"
    names[task["name"]] = shell.user_ns[task["name"]]
    said = replaced(before)
    if not said:
        exec(compile(task["judge"], "<the lesson's call of judge>", "exec"), names)
        said = replaced(before)
    ((mark, words),) = [("not right", said)] if said else found
    return mark, words[:LONGEST]


# What an answer may not replace


@dataclass
class Owner:
    """A module or a class, and what was in it: functions, and of the course everything."""

    itself: Any
    called: str
    names: frozenset
    values: list[tuple] = field(default_factory=list)  # name, value, its code or bytes if any

    def replaced(self) -> str:
        """A name that has another value now, or one that is new and hides another; else ""."""
        now = self.itself.__dict__
        for name, value, content in self.values:
            if now.get(name) is not value:
                return name
            if content is not None and content != content_of(value, content):
                return name
        for name in now.keys() - self.names - MADE_BY_PYTHON:
            if name in BUILTINS or any(name in vars(base) for base in mro(self.itself)[1:]):
                return name
        return ""


def mro(owner):
    return owner.__mro__ if isinstance(owner, type) else ()


def content_of(value, kind):
    """The code of a function, the bytes of a constant: whatever `kind` is."""
    if isinstance(kind, CodeType):
        return value.__code__
    return bytes_of(value) if isinstance(kind, bytes) else None


def bytes_of(constant) -> bytes | None:
    """A constant as bytes; None if it is not of Python's own types alone, or empty."""
    try:  # what is empty, a check may fill. Later versions than 2 count references
        return marshal.dumps(constant, 2) if constant else None
    except ValueError:
        return None


def what_is_there(names: dict[str, Any]) -> list[Owner]:
    """The modules and classes of Python, the libraries and the course, and those in `names`."""
    for optimizer in Optimizer.__subclasses__():
        if not hasattr(optimizer.step, "hooked"):  # torch does this to the first of its kind
            optimizer.step = Optimizer.profile_hook_step(optimizer.step)
            optimizer.step.hooked = True
    defined = {
        name: value
        for name, value in names.items()
        if isinstance(value, FunctionType | type) and value.__module__ == "__main__"
    }
    owners = {"the lesson": SimpleNamespace(**defined)}
    for called, module in list(sys.modules.items()):
        if called != "__main__" and called.partition(".")[0] in LIBRARIES:
            owners[called] = module
    found = {id(owner): seen(owner, called) for called, owner in owners.items()}
    for module in list(found.values()):
        for name, value, _ in module.values:
            if isinstance(value, type) and id(value) not in found:
                found[id(value)] = seen(value, f"{module.called}.{name}")
    return list(found.values())


def seen(owner, called: str) -> Owner:
    """What is in a module or a class now."""
    found = Owner(owner, called, frozenset(vars(owner)))
    for name, value in list(vars(owner).items()):
        of_course = called.startswith("tutorials") and not isinstance(owner, type)
        content = value.__code__ if isinstance(value, FunctionType) else None
        if of_course and isinstance(value, CONTAINERS):
            content = bytes_of(value)
        if of_course or isinstance(value, FUNCTIONS) or (mro(owner) and callable(value)):
            found.values.append((name, value, content))
    return found


def replaced(before: list[Owner]) -> str:
    """The first that is not what it was, in a sentence; empty if all are."""
    for owner in before:
        if name := owner.replaced():
            return f"it replaces {owner.called}.{name}, a part of the check or of what that uses"
    return ""


def main() -> None:
    """Judge the task on the standard input, and end whatever the answer has started."""
    task = json.load(sys.stdin)
    token = task.pop("token")
    os.ftruncate(sys.stdin.fileno(), 0)  # a file that nobody reads again
    found_by = os.dup(sys.stdout.fileno())
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        os.dup2(nowhere, stream.fileno())
    resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST_FILE, LARGEST_FILE))
    try:
        found = judged(task)
    except Exception as error:  # of the lesson's own cells: they do not fit together
        found = "not judged", f"{type(error).__name__}: {error}"
    os.write(found_by, f"\n{token}{json.dumps(found)}\n".encode())
    os._exit(0)


if __name__ == "__main__":
    main()
