"""Set-up and make's own part: what goes wrong is said at once, in one message.

Nothing real is ever installed here.
"""

import http.server
import importlib.metadata
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("install", ROOT / "install.py")
install = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(install)
NOBODY = 65534
CLOSED = "http://127.0.0.1:9/simple"
PROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
[project]
name = "toy"
version = "1"
[project.optional-dependencies]
dev = []
docs = []
"""
BACKEND = """
import zipfile
METADATA = "Metadata-Version: 2.1\\nName: toy\\nVersion: 1\\n"
METADATA += "Provides-Extra: dev\\nProvides-Extra: docs\\n"
WHEEL = "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n"
def build_editable(folder, config_settings=None, metadata_directory=None):
    with zipfile.ZipFile(f"{folder}/toy-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("toy-1.dist-info/METADATA", METADATA)
        wheel.writestr("toy-1.dist-info/WHEEL", WHEEL)
        wheel.writestr("toy-1.dist-info/RECORD", "")
    return "toy-1-py3-none-any.whl"
"""


@pytest.fixture
def clone(tmp_path):
    """A clone of a toy project with this repository's Makefile and install.py.

    It has a folder with a wheel that calls itself torch.
    """
    folder = tmp_path / "clone"
    folder.mkdir()
    shutil.copy(ROOT / "Makefile", folder)
    # What is installed here is small, and the disk of the tests may be nearly full
    installer = re.sub(
        r"^(ROOM\w*) = .*", r"\1 = 0.1e9", (ROOT / "install.py").read_text(), flags=re.MULTILINE
    )
    assert installer.count(" = 0.1e9") == 2
    (folder / "install.py").write_text(installer)
    (folder / "pyproject.toml").write_text(PROJECT)
    (folder / "backend.py").write_text(BACKEND)
    (folder / "constraints.txt").write_text("torch==1\n")
    wheels = folder / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "torch-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("torch.py", "")
        wheel.writestr(
            "torch-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: torch\nVersion: 1\n"
        )
        wheel.writestr(
            "torch-1.dist-info/WHEEL",
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        wheel.writestr("torch-1.dist-info/RECORD", "")
    return folder


def environment(clone, **variables):
    """What a person at a terminal has: no settings of pip, and no flags of the make around us.

    Nor its VENV: what is installed here would spoil that environment.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PIP_", "MAKE", "MFLAGS"))
        and not name.lower().endswith("_proxy")
        and name not in ("VENV", "TORCH")
    }
    return (
        kept
        | {"PIP_INDEX_URL": CLOSED, "PIP_CONFIG_FILE": os.devnull, "PYTHON_BASE": sys.executable}
        | variables
    )


def make(clone, *words, **variables):
    return subprocess.run(
        ["make", *words],
        cwd=clone,
        env=environment(clone, **variables),
        capture_output=True,
        text=True,
        timeout=200,
    )


def wheel_house(clone):
    return {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(clone / "wheels")}


def test_set_up_from_a_wheel_house_needs_no_network_says_its_steps_and_is_done_once(clone):
    done = make(clone, "setup", **wheel_house(clone))
    assert done.returncode == 0, done.stdout + done.stderr
    for words in (
        "Setting up .venv/ with Python 3.",
        "Installing torch",
        "Installing the other packages",
        "done in",
    ):
        assert words in done.stdout
    assert not (clone / ".venv" / "unfinished").exists()
    assert "Nothing to be done" in make(clone, "setup").stdout


@pytest.fixture
def uv(clone):
    """Adds uv itself, as it is installed here, to the wheels of the clone."""
    distribution = importlib.metadata.distribution("uv")
    name = f"uv-{distribution.version}"
    tag = next(line for line in distribution.read_text("WHEEL").splitlines() if "Tag: " in line)
    with zipfile.ZipFile(clone / "wheels" / f"{name}-{tag.split()[1]}.whl", "w") as wheel:
        for file in distribution.files:
            if file.parts[-2:-1] == ("bin",):
                wheel.write(file.locate(), f"{name}.data/scripts/{file.name}")
            elif file.name not in ("RECORD", "INSTALLER", "REQUESTED"):
                wheel.write(file.locate(), file.as_posix())
        wheel.writestr(f"{name}.dist-info/RECORD", "")
    return clone


def installer_of_torch(clone):
    return next(clone.glob(".venv/lib/*/site-packages/torch-1.dist-info/INSTALLER")).read_text()


def test_uv_installs_where_it_can_be_had_and_knows_the_settings_of_pip(uv):
    done = make(uv, "setup", **wheel_house(uv))
    assert done.returncode == 0, done.stdout + done.stderr
    assert installer_of_torch(uv) == "uv"
    assert "uv could not" not in done.stdout


def test_pip_installs_where_uv_does_not_know_a_setting(uv):
    done = make(uv, "setup", PIP_ONLY_BINARY=":all:", **wheel_house(uv))
    assert done.returncode == 0, done.stdout + done.stderr
    assert installer_of_torch(uv).strip() == "pip"


def test_pip_says_what_is_wrong_where_uv_fails(uv):
    (uv / "wheels" / "torch-1-py3-none-any.whl").unlink()
    done = make(uv, "setup", **wheel_house(uv))
    assert "uv could not" in done.stdout
    assert "A package is not to be had in the version of constraints.txt" in done.stderr


def test_make_docs_installs_what_it_needs_once(clone):
    (clone / "docs").mkdir()
    (clone / "docs" / "build_site.py").write_text("print('the site is built')")
    assert make(clone, "setup", **wheel_house(clone)).returncode == 0
    done = make(clone, "docs")
    assert done.returncode != 0 and "the site is built" not in done.stdout
    assert "/wheels make docs" in done.stderr and "'.[docs]'" in done.stderr
    done = make(clone, "docs", **wheel_house(clone))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Installing what `make docs` needs" in done.stdout
    assert make(clone, "docs").stdout == "the site is built\n"


def test_without_a_network_the_index_is_named_before_anything_is_installed(clone):
    done = make(clone, "setup")
    assert done.returncode != 0
    assert f"The package index {CLOSED} cannot be reached: Connection refused" in done.stderr
    assert (
        "PIP_FIND_LINKS" in done.stderr and "ResolutionImpossible" not in done.stdout + done.stderr
    )
    assert not list((clone / ".venv").glob("lib/*/site-packages/torch*"))


@pytest.mark.parametrize("user", ["me:secret@", "secret@"])
def test_an_index_with_a_password_is_asked_without_it_and_a_refusal_is_an_answer(user):
    class Refuses(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_error(401)

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Refuses) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert (
            install.why_unreachable(f"http://{user}127.0.0.1:{server.server_port}/simple") is None
        )
        server.shutdown()
    assert install.why_unreachable(f"http://{user}127.0.0.1:9/simple") == "Connection refused"


def test_an_environment_whose_python_is_gone_is_made_anew(tmp_path, capsys):
    folder = tmp_path / ".venv"
    install.make_environment(folder)
    (folder / "unfinished").unlink()
    for link in (folder / "bin").glob("python*"):
        link.unlink()
        link.symlink_to(tmp_path / "gone")
    install.make_environment(folder)
    said = capsys.readouterr().out
    assert "The Python of the one that is there is gone; this one starts afresh" in said
    subprocess.run([folder / "bin" / "python", "-c", "import pip"], check=True)


def test_the_index_of_torch_is_looked_at_too_and_a_password_is_not_printed(clone):
    said = make(
        clone,
        "setup",
        "TORCH=--index-url http://me:secret@127.0.0.1:9/cpu",
        PIP_INDEX_URL="file:///nowhere",
    ).stderr
    assert (
        "The package index http://127.0.0.1:9/cpu cannot be reached" in said
        and "secret" not in said.replace("TORCH", "")
    )


def test_a_wheel_house_that_lacks_a_package_is_explained(clone):
    (clone / "wheels" / "torch-1-py3-none-any.whl").unlink()
    said = make(clone, "setup", **wheel_house(clone)).stderr
    assert (
        "A package is not to be had in the version of constraints.txt" in said and "torch" in said
    )


def test_a_small_disk_is_refused_with_what_is_there_and_what_is_needed(clone, small_disk):
    shutil.copy(ROOT / "install.py", clone)
    said = make(clone, "setup", f"VENV={small_disk}/venv").stderr
    assert "0.00 GB free" in said and "2.3 GB are needed" in said and "VENV=" in said
    assert not list(small_disk.iterdir())


def test_a_small_disk_for_downloads_is_refused(clone, small_disk):
    said = make(clone, "setup", TMPDIR=str(small_disk)).stderr
    assert "0.1 GB are needed" in said and "TMPDIR=" in said
    assert not (clone / ".venv").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_a_clone_of_another_user_is_refused(clone):
    with tempfile.TemporaryDirectory() as folder:
        theirs = shutil.copytree(clone, Path(folder) / "clone")
        for place in (Path(folder), theirs):  # may be looked into, not written to
            place.chmod(0o755)
        refuse_as_another_user(theirs)


def refuse_as_another_user(clone):
    python = shutil.which("python3", path="/usr/bin:/bin")
    if (
        python is None
        or subprocess.run(
            [python, "-c", "import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))"]
        ).returncode
    ):
        python = sys.executable
    done = subprocess.run(
        [python, str(clone / "install.py")],
        cwd=clone,
        env=environment(clone),
        capture_output=True,
        text=True,
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
    )
    if (
        done.returncode == 126
        or "Permission denied: " in done.stderr
        and "install.py" in done.stderr
    ):
        pytest.skip("that user may not run this Python")
    assert (
        done.returncode == 1
        and "You may not write to" in done.stderr
        and "git clone" in done.stderr
    )


def test_a_folder_that_is_no_environment_is_left_alone(clone):
    (clone / "mine").mkdir()
    (clone / "mine" / "thesis.tex").write_text("years of work")
    said = make(clone, "setup", "VENV=mine").stderr
    assert "is no virtual environment" in said
    assert (clone / "mine" / "thesis.tex").read_text() == "years of work"


def test_an_interrupted_set_up_starts_afresh(clone):
    process = subprocess.Popen(
        ["make", "setup"],
        cwd=clone,
        env=environment(clone, **wheel_house(clone)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 120
    while not (clone / ".venv" / "bin" / "python").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    (clone / ".venv" / "half-written").touch()
    done = make(clone, "setup", **wheel_house(clone))
    assert done.returncode == 0 and "was interrupted; this one starts afresh" in done.stdout
    assert not (clone / ".venv" / "half-written").exists()


def test_a_python_that_is_named_and_too_old_or_absent_is_refused(clone):
    done = make(clone, "setup", "PYTHON_BASE=/nowhere/python")
    assert (
        done.returncode != 0
        and "PYTHON_BASE=/nowhere/python is no Python of 3.11 or newer" in done.stdout
    )


@pytest.fixture
def echo(clone):
    """The clone, set up with a program instead of Python: it writes its environment down."""
    (clone / ".venv" / "bin").mkdir(parents=True)
    program = clone / ".venv" / "bin" / "python"
    program.write_text(f'#!/bin/sh\nexec env -0 > "{clone}/said"\n')
    program.chmod(0o755)
    (clone / ".venv" / "installed").touch()
    return clone


def arrived(echo, name):
    entries = (echo / "said").read_bytes().decode().split("\0")
    return dict(entry.partition("=")[::2] for entry in entries)[name]


NASTY = [
    "two words",
    'pets"; touch X; "',
    "'; touch X; '",
    "$(touch X)",
    "`touch X`",
    "$$HOME $HOME ${HOME}",
    "$(shell touch X)",
    "a\nb",
    "a\\nb",
    "#x",
    "a=b c=d",
    "*",
    "%",
    "~",
    "-n",
    "é €",
]


@pytest.mark.parametrize("value", NASTY)
@pytest.mark.parametrize("where", ["command line", "environment"])
def test_what_is_typed_arrives_as_it_is_and_is_never_executed(echo, where, value):
    for target, name in (
        ("run", "TUTORIAL"),
        ("run", "SET"),
        ("data", "TUTORIAL"),
        ("scaling", "TUTORIAL"),
        ("doctor", "OPTIONS"),
        ("sync", "TUTORIAL"),
        ("run", "TORCH"),
    ):
        words = [f"{name}={value}"] if where == "command line" else []
        variables = {name: value} if where == "environment" else {}
        done = make(echo, target, *words, **variables)
        assert done.returncode == 0, done.stderr
        assert arrived(echo, name) == value, target
    assert not (echo / "X").exists()


def test_a_python_with_a_nasty_name_is_not_executed_by_the_shell(clone):
    for value in ('"; touch X; "', "$(touch X)", "a b; touch X"):
        done = make(clone, "setup", f"PYTHON_BASE={value}")
        assert done.returncode != 0 and "is no Python" in done.stdout
    assert not (clone / "X").exists()


@pytest.mark.parametrize(
    "word",
    ["EPOCHS=1", "BATCH_SIZE=64", "WORKER=1", "workers=2", "TUTORIALS=pets", "X=$(shell touch X)"],
)
def test_a_variable_that_make_does_not_know_is_refused_with_those_that_it_knows(echo, word):
    done = make(echo, "run", "TUTORIAL=pets", word)
    assert done.returncode != 0
    assert (
        f"{word.partition('=')[0]}=" in done.stderr and "no variable of that name" in done.stderr
    )
    assert "TUTORIAL CLUSTER WORKERS" in done.stderr and "go into SET" in done.stderr
    assert not (echo / "said").exists() and not (echo / "X").exists()


@pytest.mark.parametrize(
    "word",
    [
        "DDP_PROGRESS=lines",
        "OMP_NUM_THREADS=1",
        "CUDA_VISIBLE_DEVICES=0",
        "HTTPS_PROXY=http://proxy:1",
        "RUNS=s3://bucket/runs",
    ],
)
def test_variables_of_other_programs_pass(echo, word):
    assert make(echo, "run", word).returncode == 0
    assert arrived(echo, word.partition("=")[0]) == word.partition("=")[2]


@pytest.mark.parametrize("word", ["lap", '"; touch X; "', "$(shell touch X)", "$$(touch X)"])
def test_a_command_that_make_does_not_know_is_told_so(echo, word):
    done = make(echo, word)
    assert done.returncode == 2 and not done.stdout
    shown = word.partition("(")[0]  # make takes what has parentheses for a member of an archive
    assert f'There is no command "{shown}' in done.stderr
    assert "`make help` lists them all." in done.stderr
    assert not (echo / "X").exists()


def test_make_alone_is_help(clone):
    assert make(clone).stdout == make(clone, "help").stdout != ""
