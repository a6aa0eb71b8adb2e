"""One environment for a class: each clone uses it as it is, and brings its own packages.

As root, another user works in the clone, to whom the environment is read-only, unless this Python
lies where no other user comes.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import environment  # in tutorials/
import pytest

ROOT = Path(__file__).parents[2]
NOBODY = 65534
SHORT = "epochs=1 hidden=8 layers=1 batch_size=1024"
PLACES = """
import dask_ranks, ddp_common, tutorials


def places():
    return {each.__path__[0].rpartition("/")[0] for each in (ddp_common, dask_ranks, tutorials)}


class Places:
    def __len__(self):
        return 1

    def __getitem__(self, _):
        return sorted(places())
"""
WHERE = """
from torch.utils.data import DataLoader

import ddp_common as ddp
from places import Places, places


def of_a_rank():
    of_loader_worker = DataLoader(Places(), None, num_workers=1, multiprocessing_context="spawn")
    return places().union(*of_loader_worker)


if __name__ == "__main__":
    with ddp.connect(workers=1) as client:
        found = places().union(*client.run(places).values())
        print(*found | ddp.launch(client, of_a_rank, directory=False).result)
"""


def another_user():
    """What `subprocess` needs for a process of another user; {} where that cannot be."""
    words = {"user": NOBODY, "extra_groups": []}
    try:
        subprocess.run([sys.executable, "-c", ""], check=True, capture_output=True, **words)
    except (OSError, subprocess.CalledProcessError):
        return {}
    return words


@pytest.fixture
def clone():
    """A student's clone: the folder, and how to run a program in it. What this user made goes."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        Path(folder, "environment").symlink_to(sys.prefix)  # whose name may have a space
        there = Path(folder, "a clone")
        ignored = shutil.ignore_patterns("__pycache__", "my-work", "cache", ".*")
        for name in ("ddp_common", "dask_ranks", "tutorials", "clusters", "data"):
            shutil.copytree(ROOT / name, there / name, ignore=ignored)
        for name in ("Makefile", "pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / name, there)
        as_student = another_user()
        if as_student:
            for path in (Path(folder), there, *there.rglob("*")):
                os.chown(path, NOBODY, -1)

        def run(*words, **variables):
            return subprocess.run(
                words,
                cwd=there,
                env={"PATH": os.environ["PATH"], "HOME": folder, **variables},
                capture_output=True,
                text=True,
                timeout=240,
                **as_student,
            )

        yield there, run


def files_of(environment):
    """Each file of an environment with its size and time, but what any import may write."""
    return {
        path: (path.lstat().st_size, path.lstat().st_mtime_ns)
        for path in Path(environment).rglob("*")
        if "__pycache__" not in path.parts and not path.is_dir()
    }


def test_a_clone_trains_in_an_environment_of_others_and_changes_nothing_there(clone):
    there, run = clone
    shared = there.parent / "environment"
    before = files_of(sys.prefix)
    trained = run("make", "run", "TUTORIAL=pets", f"SET={SHORT}", f"VENV={shared}", "WORKERS=2")
    assert trained.returncode == 0, trained.stdout + trained.stderr
    assert "Run directory: runs/pets/" in trained.stdout
    assert not (there / ".venv").exists()
    assert files_of(sys.prefix) == before


def test_every_process_has_the_packages_of_the_clone(clone):
    there, run = clone
    (there / "places.py").write_text(PLACES)
    (there / "where.py").write_text(WHERE)
    said = run(f"{there.parent}/environment/bin/python", "where.py", PYTHONPATH=str(there))
    assert said.stdout.strip() == str(there), said.stderr


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (
            "click==0.1",
            "it has click {click}, and this clone was tested with 0.1. Whoever made it",
        ),
        ("", "it lacks no-such-package. Whoever made it can run `make setup VENV="),
    ],
)
def test_an_environment_that_does_not_fit_is_named_by_its_first_package(clone, line, why):
    there, run = clone
    lines = (there / "constraints.txt").read_text().splitlines()
    others = [each for each in lines if not line or not each.startswith("click==")]
    (there / "constraints.txt").write_text("\n".join([*others, line]))
    if not line:
        project = there / "pyproject.toml"
        project.write_text(
            project.read_text().replace('    "click",\n', '    "no-such-package",\n')
        )
    shared = there.parent / "environment"
    refused = run("make", "lab", f"VENV={shared}")
    assert refused.returncode != 0 and "Traceback" not in refused.stderr
    click = environment.installed()["click"].version
    assert f"VENV={shared} does not fit this clone: {why.format(click=click)}" in refused.stderr
    assert not (there / "tutorials" / "my-work").exists()


def test_only_setup_makes_an_environment_elsewhere_and_only_where_one_may_write(clone):
    there, run = clone
    elsewhere = there.parent / "elsewhere"
    refused = run("make", "run", f"VENV={elsewhere}")
    assert (
        refused.returncode != 0 and f"`make setup VENV={elsewhere}` makes one." in refused.stdout
    )
    assert not elsewhere.exists()
    elsewhere.mkdir(mode=0o555)
    if another_user():
        refused = run("make", "setup", f"VENV={elsewhere}")
        assert refused.returncode != 0 and "you may not write there" in refused.stdout
        assert not list(elsewhere.iterdir())
