"""What the README shows works, word for word."""

import os
import re
import subprocess
import sys
from pathlib import Path

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


def test_every_make_command_of_the_readme_exists():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.M))
    assert set(re.findall(r"make ([a-z-]+)", README)) - {"sure"} <= targets


def test_every_file_that_the_readme_links_to_exists():
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).exists(), target


def test_every_test_that_the_page_on_security_names_exists():
    page = (ROOT / "docs" / "security.md").read_text()
    named = set(re.findall(r"`(test_\w+)`", page))
    there = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        there.update(re.findall(r"def (test_\w+)", path.read_text()))
    assert named and named <= there
