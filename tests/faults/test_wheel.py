"""A wheel, built and installed outside of the clone, launches; it has nothing of the course."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


LAUNCH = """
import ddp_common as ddp

def train():
    return ddp.world_size()

if __name__ == "__main__":
    print(ddp.__file__)
    with ddp.connect(workers=2) as client:
        run = ddp.launch(client, train)
    print("ranks:", run.result, "in", run.directory.parent)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The wheel, and a fresh environment with it."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for name in ("ddp_common", "dask_ranks", "clusters", "tutorials"):
        shutil.copytree(ROOT / name, source / name)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*build, "--wheel-dir", folder, source], check=True)
    (wheel,) = folder.glob("*.whl")
    return folder, environment(folder, "--force-reinstall", wheel)


def environment(folder, *installed):
    """The Python of a fresh environment; what else is imported is this environment's."""
    venv.create(folder / "environment", symlinks=True)
    python = folder / "environment" / "bin" / "python"
    (packages,) = (folder / "environment").glob("lib/python*/site-packages")
    # A plain path: what an editable install has put beside it is not followed.
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps"]
    subprocess.run([*pip, "--no-index", "--no-build-isolation", *installed], check=True)
    return python


def run(installed, *command):
    folder, python = installed
    kept = {key: os.environ[key] for key in ("PATH", "HOME", "LANG") if key in os.environ}
    (folder / "elsewhere").mkdir(exist_ok=True)
    return subprocess.run(
        [python, *command],
        cwd=folder / "elsewhere",
        env={**kept, "DDP_PROGRESS": "off"},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_it_launches_with_the_profiles_that_it_brings(installed):
    folder, _ = installed
    script = folder / "kites.py"
    script.write_text(LAUNCH)
    done = run(installed, script)
    assert done.returncode == 0, done.stderr
    where, ranks = done.stdout.splitlines()[-2:]
    assert Path(where).is_relative_to(folder / "environment")
    assert ranks == f"ranks: 2 in {folder / 'elsewhere' / 'runs' / 'kites'}"


def test_it_holds_the_package_and_the_profiles_and_nothing_of_the_course(installed):
    folder, _ = installed
    (wheel,) = folder.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    folders = {name.partition("/")[0].partition("-")[0] for name in names}
    assert folders == {"ddp_common", "dask_ranks"}
    assert any(name.endswith("share/ddp-common/clusters/local.yaml") for name in names)
    found = "import importlib.util; print(importlib.util.find_spec('tutorials'))"
    assert run(installed, "-c", found).stdout == "None\n"


def test_an_editable_install_lets_notebooks_import_the_tutorials(installed, tmp_path):
    folder, _ = installed
    python = environment(tmp_path, "--ignore-installed", "--editable", folder / "source")
    program = "import tutorials.kit.cells, ddp_common; print(ddp_common.__file__)"
    said = subprocess.check_output([python, "-c", program], cwd=tmp_path, text=True)
    assert Path(said.strip()).is_relative_to(folder / "source")
