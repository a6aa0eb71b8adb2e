"""What the project promises about itself: one list of dependencies, no traces of where it was made."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]


def names(requirements):
    return {re.split(r"[<>=\[]", requirement)[0].lower() for requirement in requirements}


def test_conda_and_pip_users_get_the_same_direct_dependencies():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    conda = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    of_conda = names(line for line in conda if isinstance(line, str)) - {"python", "pip"}
    only_on_pypi = next(line["pip"] for line in conda if isinstance(line, dict))
    of_conda |= names(line for line in only_on_pypi if not line.startswith("-"))
    of_pip = names(project["dependencies"] + project["optional-dependencies"]["dev"])
    assert {"pytorch" if name == "torch" else name for name in of_pip} == of_conda


def test_every_direct_dependency_has_a_tested_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = names(
        line
        for line in (ROOT / "constraints.txt").read_text().lower().splitlines()
        if not line.startswith("#")
    )
    assert names(project["dependencies"] + project["optional-dependencies"]["dev"]) <= pinned


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="this is no clone")
def test_nothing_lies_at_the_top_that_does_not_belong_there():
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\n")
    assert {Path(path).parts[0] for path in tracked if path} == {
        "tutorials",
        "ddp_common",
        "clusters",
        "data",
        "docs",
        "tests",
        "environment.yml",
        "pyproject.toml",
        "constraints.txt",
        "Makefile",
        "install.py",
        "README.md",
        "LICENSE",
        "CITATION.cff",
        ".ci",
        ".gitignore",
    }


def test_make_help_names_every_command():
    said = subprocess.run(
        ["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    for command in (
        "setup",
        "run",
        "lab",
        "data",
        "test",
        "test-fast",
        "sync",
        "bench",
        "scaling",
        "doctor",
        "fault-lab",
    ):
        assert f"make {command}" in said


def test_make_says_which_python_it_needs(tmp_path):
    (tmp_path / "sh").symlink_to("/bin/sh")
    done = subprocess.run(
        ["/usr/bin/make", "setup", f"VENV={tmp_path}/venv", "SHELL=/bin/sh"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={"PATH": str(tmp_path)},
    )
    assert done.returncode != 0
    assert "No Python 3.11 or newer" in done.stdout
