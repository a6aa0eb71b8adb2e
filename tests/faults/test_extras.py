"""Every extra of pyproject.toml can be installed with the versions of constraints.txt.

pip resolves them and installs nothing; without a network that is skipped.
"""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
HERE = f"{sys.version_info.major}.{sys.version_info.minor}"


def requirements_of(extra):
    """Those of the package and of an extra, with the extras that this one includes."""
    found = list(PROJECT["dependencies"])
    for requirement in EXTRAS[extra]:
        included = re.fullmatch(r"ddp-common\[(.*)\]", requirement)
        if included:
            for other in included[1].split(","):
                found += EXTRAS[other]
        else:
            found.append(requirement)
    return found


def resolve(requirements, python, folder):
    """Have pip choose versions for a Python, which need not be here; its own words."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed"]
    command += ["--quiet", "--disable-pip-version-check", "--retries", "1"]
    command += ["--constraint", str(ROOT / "constraints.txt"), "--target", str(folder)]
    command += ["--python-version", python, "--only-binary", ":all:"]
    command += ["--report", str(folder / "report.json"), *requirements]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    """Skips where no package index answers."""
    done = resolve(["cloudpickle"], HERE, tmp_path_factory.mktemp("index"))
    if done.returncode != 0:
        pytest.skip("no package index can be reached")


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("extra", "python"), [(extra, HERE) for extra in EXTRAS] + [("cuda", "3.12"), ("cuda", "3.13")]
)
def test_an_extra_resolves(index, tmp_path, extra, python):
    done = resolve(requirements_of(extra), python, tmp_path)
    assert done.returncode == 0, done.stderr
