"""The reading tour leads through code that is there: every link, every name given with a file.

A name in backticks that is the text of a link must be defined in that file. One without a link
must occur in the file that its section is about.
"""

import ast
import difflib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reading-tour.md"
LINK = re.compile(r"\[([^\]]+)\]\(([^)]+)\)")
IDENTIFIER = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def links(text):
    """(words, target) of each link on a page; addresses of other sites are left out."""
    found = LINK.findall(text)
    return [(words, target) for words, target in found if not target.startswith("http")]


def file_of(target):
    return (PAGE.parent / target.partition("#")[0]).resolve()


def defined_in(tree, prefix=""):
    """Dotted names of the functions, classes, methods and variables that a module defines."""
    names = set()
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(prefix + node.name)
        if isinstance(node, ast.ClassDef):
            names |= defined_in(node, f"{prefix}{node.name}.")
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        names |= {prefix + each.id for each in targets if isinstance(each, ast.Name)}
    return names


def parsed(path):
    return ast.parse(path.read_text())


def close_to(name, names):
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    return f" Does it mean {' or '.join(near)}?" if near else ""


NAMED = sorted(
    {
        (words.strip("`"), target)
        for words, target in links(PAGE.read_text())
        if words.startswith("`") and target.endswith(".py") and not words.endswith(".py`")
    }
)
STOPS = [
    (files[0][1], section)
    for section in re.split(r"^## ", PAGE.read_text(), flags=re.M)[1:]
    if (files := [each for each in links(section.splitlines()[0]) if each[1].endswith(".py")])
]


@pytest.mark.parametrize(("words", "target"), links(PAGE.read_text()))
def test_every_link_of_the_tour_leads_somewhere(words, target):
    path = file_of(target)
    assert path.exists(), (
        f"docs/reading-tour.md links to {target}, which is not there. If the file has moved, "
        "change the link; if what it shows is gone, change the sentence."
    )
    if words.endswith(".py`"):
        assert path == ROOT / words.strip("`"), f"the link says {words}, and leads to {target}"


@pytest.mark.parametrize(("name", "target"), NAMED)
def test_every_name_that_is_given_with_a_file_is_defined_there(name, target):
    names = defined_in(parsed(file_of(target)))
    assert name in names, (
        f"docs/reading-tour.md says that {name} is in {target.removeprefix('../')}, which does "
        f"not define it.{close_to(name, names)} Change the page with the code."
    )


@pytest.mark.parametrize(("target", "section"), STOPS, ids=[target for target, _ in STOPS])
def test_a_name_without_a_link_occurs_in_the_file_of_its_section(target, section):
    words = set(re.findall(r"\w+", file_of(target).read_text()))
    for name in re.findall(r"`([^`]+)`", LINK.sub("", section)):
        if IDENTIFIER.fullmatch(name):
            for part in name.split("."):
                assert part in words, (
                    f"docs/reading-tour.md speaks of {name} in the section on "
                    f"{target.removeprefix('../')}, where no word is {part}."
                    f"{close_to(part, words)} Change the page with the code."
                )


def test_the_tour_goes_through_the_five_files_at_the_core_in_the_order_of_the_data():
    stops = [target.removeprefix("../ddp_common/") for target, _ in STOPS]
    assert stops == [
        "client/launch.py",
        "worker/agent.py",
        "ranks/process.py",
        "ranks/rendezvous.py",
        "ranks/sampling.py",
    ]
    assert len(NAMED) > 20


def test_a_name_that_is_gone_is_noticed():
    tree = ast.parse(
        "class A:\n    b: int = 1\n    def c(self): ...\nD = E = 2\nasync def f(): ..."
    )
    assert defined_in(tree) == {"A", "A.b", "A.c", "D", "E", "f"}
    assert close_to("run_ranks", {"run_rank", "other"}) == " Does it mean run_rank?"
