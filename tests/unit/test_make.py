"""What make itself does: words arrive as they were typed, and what is wrong is said at once."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def make(folder, *words, **variables):
    return subprocess.run(
        ["make", *words],
        cwd=folder,
        env={"PATH": os.environ["PATH"], **variables},
        capture_output=True,
        text=True,
    )


@pytest.fixture
def echo(tmp_path):
    """A folder with this Makefile, set up with a program instead of Python.

    It writes its environment to the file `said`.
    """
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    program = tmp_path / ".venv" / "bin" / "python"
    program.parent.mkdir(parents=True)
    program.write_text(f'#!/bin/sh\nexec env -0 > "{tmp_path}/said"\n')
    program.chmod(0o755)
    for stamp in ("torch", "installed-course"):
        (tmp_path / ".venv" / stamp).touch()
    return tmp_path


def arrived(echo, name):
    entries = (echo / "said").read_bytes().decode().split("\0")
    return dict(entry.partition("=")[::2] for entry in entries)[name]


@pytest.mark.parametrize("value", ["\"; touch X; '", "$(shell touch X) `touch X`", "a=b c=d é\n*"])
def test_what_is_typed_arrives_as_it_is_and_is_never_executed(echo, value):
    typed = make(echo, "run", f"SET={value}")
    assert typed.returncode == 0, typed.stderr
    assert arrived(echo, "SET") == value
    inherited = make(echo, "doctor", OPTIONS=value)
    assert inherited.returncode == 0, inherited.stderr
    assert arrived(echo, "OPTIONS") == value
    assert not (echo / "X").exists()


def test_a_variable_that_make_does_not_know_is_refused_and_those_of_other_programs_pass(echo):
    refused = make(echo, "run", "TUTORIAL=pets", "EPOCHS=1")
    assert refused.returncode != 0
    assert "EPOCHS=1" in refused.stderr and "TUTORIAL CLUSTER WORKERS" in refused.stderr
    assert not (echo / "said").exists()
    assert make(echo, "run", "OMP_NUM_THREADS=1").returncode == 0
    assert arrived(echo, "OMP_NUM_THREADS") == "1"


def test_a_command_that_make_does_not_know_is_told_so(echo):
    done = make(echo, "lap")
    assert done.returncode == 2 and 'There is no command "lap"' in done.stderr


def test_the_name_of_a_tutorial_alone_is_answered_with_what_to_type(echo):
    (echo / "tutorials").mkdir()
    (echo / "tutorials" / "pets.ipynb").touch()
    for words in (["run", "pets"], ["pets"]):
        done = make(echo, *words)
        assert done.returncode == 2 and "Write: make run TUTORIAL=pets." in done.stderr
    assert not (echo / "said").exists()


def test_make_alone_lists_the_commands(echo):
    said = make(echo).stdout
    for command in ("run", "lab", "kernel", "test", "test-all", "lint", "docs", "doctor", "setup"):
        assert f"make {command} " in said


def test_a_python_that_is_too_old_or_absent_is_refused_before_anything_is_made(echo):
    done = make(echo, "setup", "PYTHON_BASE=/nowhere/python", "VENV=other")
    assert done.returncode != 0
    assert "/nowhere/python is no Python of 3.11 or newer" in done.stdout
    assert not (echo / "other").exists()


@pytest.mark.parametrize("build", ["--index-url https://example.org", "https://example.org/cpu"])
def test_a_build_of_torch_that_is_no_word_is_refused_before_anything_is_made(echo, build):
    done = make(echo, "setup", f"TORCH={build}", f"PYTHON_BASE={sys.executable}", "VENV=other")
    assert done.returncode != 0
    assert f"TORCH={build}: it takes the last word" in done.stdout and "TORCH=cpu" in done.stdout
    assert not (echo / "other").exists()


@pytest.mark.parametrize(("settings", "with_uv"), [({}, True), ({"PIP_NO_INDEX": "1"}, False)])
def test_where_pip_may_ask_no_index_uv_which_would_is_not_used(echo, settings, with_uv):
    (echo / ".venv" / "installed-course").unlink()
    would = make(echo, "--dry-run", "setup", **settings).stdout
    (install,) = [line for line in would.splitlines() if "--editable" in line]
    assert ("bin/uv" in install) is with_uv
