"""What the README shows works, word for word."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_example_trains(tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.S)
    (tmp_path / "mine.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "mine.py"],
        cwd=tmp_path,
        env=os.environ | {"WORKERS": "2"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    losses = [
        float(line.split()[1]) for line in done.stdout.splitlines() if re.match(r"\d ", line)
    ]
    assert len(losses) == 5 and losses[-1] < losses[0]


@pytest.mark.parametrize("page", ["README.md", "docs/commands.md"])
def test_every_make_command_that_a_page_names_exists(page):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.M))
    named = set(re.findall(r"make ([a-z-]+)", (ROOT / page).read_text())) - {"sure"}
    assert named and named <= targets


def test_the_readme_is_read_to_its_end():
    assert len(README.splitlines()) <= 120


def test_the_page_of_commands_has_each_that_make_help_has():
    help_text = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True).stdout
    named = set(re.findall(r"^make ([a-z-]+)", help_text, flags=re.M)) | {"help"}
    page = (ROOT / "docs" / "commands.md").read_text()
    assert len(named) > 10 and {name for name in named if f"`make {name}" not in page} == set()


PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "clusters/README.md", "data/README.md"]
PAGES += sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))


@pytest.mark.parametrize("page", PAGES)
def test_every_file_that_a_page_links_to_exists(page):
    path = ROOT / page
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text()):
        assert (path.parent / target).exists(), f"{page} links to {target}, which is not there"


@pytest.mark.parametrize("page", PAGES)
def test_every_module_that_a_page_names_exists(page):
    for module in re.findall(r"\bddp_common/[\w/]+\.py", (ROOT / page).read_text()):
        assert (ROOT / module).exists(), f"{page} names {module}, which is not there"


def test_every_test_that_the_page_on_security_names_exists():
    page = (ROOT / "docs" / "security.md").read_text()
    named = set(re.findall(r"`(test_\w+)`", page))
    there = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        there.update(re.findall(r"def (test_\w+)", path.read_text()))
    assert named and named <= there
