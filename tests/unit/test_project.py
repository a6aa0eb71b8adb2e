"""What the project promises about itself: one list of dependencies, commands that are named."""

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
    extras = project["optional-dependencies"]
    assert names(project["dependencies"] + extras["dev"] + extras["docs"]) <= pinned


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
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "Dockerfile",
        ".ci",
        ".devcontainer",
        ".dockerignore",
        ".github",
        ".gitignore",
        ".pre-commit-config.yaml",
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
        "lint",
        "sync",
        "bench",
        "scaling",
        "doctor",
        "fault-lab",
        "docs",
    ):
        assert f"make {command}" in said


WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_takes_actions_by_commit_and_may_only_read(path):
    text = path.read_text()
    used = re.findall(r"uses: *(.*)", text)
    by_commit = re.compile(r"[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+")
    for action in used:
        assert by_commit.fullmatch(action), (
            f"{path.name}: {action}. A tag can be moved to other code: write the commit's 40 "
            "characters, and the version behind it (owner/name@… # v1.2.3)."
        )
    workflow = yaml.safe_load(text)
    assert used
    assert workflow["permissions"] == {"contents": "read"}
    assert workflow["concurrency"]["cancel-in-progress"] is True
    assert all(job["timeout-minutes"] <= 90 for job in workflow["jobs"].values())
    for job in workflow["jobs"].values():
        more = job.get("permissions", {})
        assert not more or (
            more == {"pages": "write", "id-token": "write"}
            and all(step.get("uses", "").startswith("actions/") for step in job["steps"])
        ), "only the job that publishes the site may write, and it runs no code of ours"


def test_hooks_and_workflows_name_only_programs_and_targets_that_are_there():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.M))
    for path in WORKFLOWS:
        called = set(
            re.findall(r"(?:run: make|\.ci/run) ([a-z-]+)$", path.read_text(), flags=re.M)
        )
        assert called <= targets, f"{path.name}: make has no target {called - targets}"
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [each["repo"] for each in hooks] == ["local"], "nothing is to be downloaded"
    lint = (ROOT / "Makefile").read_text().partition("\nlint:")[2].partition("\n\n")[0]
    for hook in hooks[0]["hooks"]:
        program = hook["entry"].split()[0].removeprefix(".venv/bin/")
        assert program in lint, f"make lint does not run {program}, a hook of every commit"


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
