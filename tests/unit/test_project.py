"""One list of dependencies: pip's, conda's and the tested versions agree."""

import ast
import importlib.metadata
import re
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
# Imported in a notebook, by `make check`, and for a cluster of Saturn
NOT_EVERYWHERE = {"ipython", "jupyter_client", "nbclient", "nbformat", "dask-saturn"}
NEEDED_BY_DASK = {"dask-jobqueue", "cryptography"}  # for the profiles of batch systems; for TLS


def names(requirements):
    found = {re.split(r"[<>=\[]", requirement)[0].lower() for requirement in requirements}
    return found - {"ddp-common"}  # an extra that includes another one


def test_conda_and_pip_users_of_the_course_get_the_same_direct_dependencies():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = (ROOT / "environment.yml").read_text()
    conda = yaml.safe_load(text)["dependencies"]
    of_conda = {line for line in conda if isinstance(line, str)}
    only_on_pypi = next(line["pip"] for line in conda if isinstance(line, dict))
    of_conda |= {line for line in only_on_pypi if not line.startswith("-")}
    extras = project["optional-dependencies"]
    of_pip = {*project["dependencies"], *extras["course"], "pytest", "nbval", "pip"}
    of_pip |= {f"python{project['requires-python']}"}
    assert {re.sub(r"^torch\b", "pytorch", each) for each in of_pip} == of_conda
    assert {"pytest", "nbval"} <= set(extras["test"])
    assert f"# - {extras['cuda'][0]} " in text


def test_every_direct_dependency_has_a_tested_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (ROOT / "constraints.txt").read_text().lower().splitlines()
    pinned = names(line for line in lines if not line.startswith("#"))
    extras = dict(project["optional-dependencies"])
    del extras["cuda"]  # CPU machines are where versions are tested; constraints.txt suits it
    assert names(project["dependencies"] + sum(extras.values(), [])) <= pinned


def test_the_version_that_is_cited_is_the_version_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (cited["version"], cited["license"]) == (project["version"], project["license"])
    heading = f"## {cited['version']} ({cited['date-released']})"
    assert heading in (ROOT / "CHANGELOG.md").read_text().splitlines()


def test_the_package_depends_on_what_it_imports():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    imported = set()
    for path in [*(ROOT / "ddp_common").rglob("*.py"), *(ROOT / "dask_ranks").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add(node.module.partition(".")[0])
    assert "tutorials" not in imported, "the package knows nothing of the course"
    distributions = importlib.metadata.packages_distributions()
    others = imported - sys.stdlib_module_names - {"ddp_common", "dask_ranks"}
    needed = {distributions[name][0].lower() for name in others}
    assert needed - NOT_EVERYWHERE == names(project["dependencies"]) - NEEDED_BY_DASK


def test_the_page_on_a_launch_lists_our_variables():
    code = [path for name in ("ddp_common", "dask_ranks") for path in (ROOT / name).rglob("*.py")]
    found = re.findall(r"\bDDP_[A-Z_]+\b", "".join(path.read_text() for path in code))
    table = (ROOT / "docs/how-a-launch-works.md").read_text().partition("## Variables")[2]
    assert set(re.findall(r"\bDDP_[A-Z_]+\b", table)) == set(found)


@pytest.mark.parametrize("page", ["how-a-launch-works", "what-your-function-calls"])
def test_what_a_page_on_the_code_names_is_there(page):
    code = [path for name in ("ddp_common", "dask_ranks") for path in (ROOT / name).rglob("*.py")]
    there = set(re.findall(r"\w+", "".join(path.read_text() for path in code)))
    named = re.findall(r"`(?:\w+\.)*(\w+)`", (ROOT / f"docs/{page}.md").read_text())
    assert not set(named) - there - {"py", "json", "jsonl", "txt"}


def test_the_glossary_has_a_sentence_for_words_of_the_lessons():
    page = (ROOT / "docs/glossary.md").read_text()
    rows = re.findall(r"^\| (.+?) \| `(\w+)` \| (.+) \|$", page, re.M)
    assert len(rows) == 30
    for word, lesson, sentence in rows:
        script = (ROOT / "tutorials" / f"{lesson}.py").read_text()
        text = " ".join(re.findall(r"^# (.*)", script, re.M))
        assert re.search(rf"(?i)\b{word.strip('`')}", text), f"{lesson} does not say {word}"
        assert len(re.findall(r"[.!?](?= |$)", sentence)) == 1, sentence


# Lines of Python in each package, as they were when it had been made smaller
BUDGET = {
    "ddp_common": 4157,
    "dask_ranks": 8350,
    "tutorials/kit": 1699,
    "tests": 22285,
}


@pytest.mark.parametrize("package", BUDGET)
def test_a_package_does_not_grow(package):
    lines = sum(len(path.read_text().splitlines()) for path in (ROOT / package).rglob("*.py"))
    assert lines <= BUDGET[package], (
        f"{package} has {lines} lines of at most {BUDGET[package]}. Take them from what is there: "
        "a fault is answered by a call, an exact check, a refusal or a sentence on a page. If a "
        "promise needs them, raise the number, and say in the commit which promise."
    )
