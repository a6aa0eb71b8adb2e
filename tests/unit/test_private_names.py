"""Private names of other packages: those in CONTRIBUTING's table, and no others."""

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TABLE = ROOT.joinpath("CONTRIBUTING.md").read_text().partition("## Private names of others")[2]
LISTED = re.findall(
    r"`([\w.()]+)`", "".join(re.findall(r"^\| .*? \| (.*?) \|", TABLE, flags=re.M))
)
DOCUMENTED = {"_exit", "_current_frames"}  # of os and sys
PACKAGES = ("ddp_common", "dask_ranks")
OURS = (*PACKAGES, "tutorials")


def is_private(name):
    return name.startswith("_") and not name.endswith("__")


def trees():
    for path in sorted(each for name in PACKAGES for each in ROOT.joinpath(name).rglob("*.py")):
        yield path, ast.parse(path.read_text())


def own_names():
    """All that the two packages define or set themselves."""
    for _, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield node.name
            elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
                yield node.id if isinstance(node, ast.Name) else node.attr


def used_names():
    """Private names that are read or imported: (where, name)."""
    for path, tree in trees():
        for node in ast.walk(tree):
            names = []
            if isinstance(node, ast.Attribute):
                names = [node.attr]
            elif isinstance(node, ast.ImportFrom) and not node.module.startswith(OURS):
                names = [*node.module.split("."), *(each.name for each in node.names)]
            for name in filter(is_private, names):
                yield f"{path.relative_to(ROOT)}:{node.lineno}", name


def test_no_other_private_name_is_used():
    listed = {word for name in LISTED for word in name.split(".")}
    known = {*own_names(), *DOCUMENTED, *listed}
    assert not [(where, name) for where, name in used_names() if name not in known]


@pytest.mark.parametrize("name", LISTED)
def test_a_private_name_is_still_there(name):
    *path, last = name.split(".")
    while path:
        try:
            found = importlib.import_module(".".join(path).removesuffix("()"))
            break
        except ImportError:
            *path, _ = path
    for attribute in name.split(".")[len(path) : -1]:
        call = attribute.endswith("()")
        found = getattr(found, attribute.removesuffix("()"))
        found = found() if call else found
    is_set_by_instances = inspect.isclass(found) and f"self.{last}" in inspect.getsource(found)
    assert hasattr(found, last) or is_set_by_instances
