"""A wheel, built and installed outside of the clone, launches; and it says what it has not."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
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
    """A fresh environment with the wheel; what it depends on is this environment's."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for name in ("ddp_common", "clusters", "tutorials"):
        shutil.copytree(ROOT / name, source / name)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*build, "--wheel-dir", folder, source], check=True)
    (wheel,) = folder.glob("*.whl")
    venv.create(folder / "environment", symlinks=True)
    python = folder / "environment" / "bin" / "python"
    (packages,) = (folder / "environment").glob("lib/python*/site-packages")
    # A plain path: what an editable install has put beside it is not followed.
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps"]
    subprocess.run([*pip, "--no-index", "--force-reinstall", wheel], check=True)
    return folder, python


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
    script = folder / "train.py"
    script.write_text(LAUNCH)
    done = run(installed, script)
    assert done.returncode == 0, done.stderr
    where, ranks = done.stdout.splitlines()[-2:]
    assert Path(where).is_relative_to(folder / "environment")
    assert ranks == f"ranks: 2 in {folder / 'elsewhere' / 'runs' / 'train'}"


def test_it_says_that_it_has_no_tutorials(installed):
    done = run(installed, "-m", "ddp_common", "run", "pets")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "clone" in done.stderr


def test_it_says_that_it_has_no_data(installed):
    done = run(installed, "-c", "import ddp_common as ddp; ddp.fetch('pets')")
    assert "this ddp_common was installed from a wheel, which has none" in done.stderr
