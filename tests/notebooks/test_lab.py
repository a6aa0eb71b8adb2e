"""`make lab`: it starts for whoever calls it, and students' copies are theirs.

Saving writes the open notebook and nothing else. A real JupyterLab serves a copy of the
repository, in a folder with spaces in its name.
"""

import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request

import lab  # in tutorials/
import nbformat
import pytest
import sync
from jupyter_client import BlockingKernelClient
from tutorials_here import ROOT


class Server:
    """A JupyterLab that was started by `make lab`, and what its REST interface answers."""

    def __init__(self, repository, environment):
        self.repository = repository
        self.runtime = environment["JUPYTER_RUNTIME_DIR"]
        self.said = []
        # whatever the age of that file: a test sets nothing up
        command = ["make", "-o", ".venv/installed", "lab"]
        self.process = subprocess.Popen(
            command,
            cwd=repository,
            env=environment,
            text=True,
            start_new_session=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self.reader = threading.Thread(
            target=lambda: self.said.extend(self.process.stdout), daemon=True
        )
        self.reader.start()
        deadline = time.monotonic() + 120
        link = re.compile(
            r"(http://127\.0\.0\.1:\d+)/lab/tree/my-work/start-here\.ipynb\?token=(\w+)"
        )
        while not link.search("".join(self.said)):
            assert self.process.poll() is None and time.monotonic() < deadline, "".join(self.said)
            time.sleep(0.1)
        self.address, self.token = link.search("".join(self.said)).groups()
        while not self._answers():  # it says where it is before it listens
            assert self.process.poll() is None and time.monotonic() < deadline, "".join(self.said)
            time.sleep(0.1)

    def _answers(self):
        try:
            return bool(self.ask("status"))
        except urllib.error.URLError:
            return False

    def ask(self, place, method="GET", **content):
        body = json.dumps(content).encode() if content else None
        request = urllib.request.Request(
            f"{self.address}/api/{urllib.parse.quote(place, safe='/?=&')}",
            body,
            method=method,
            headers={"Authorization": f"token {self.token}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def save(self, path, change=lambda notebook: None):
        """What Ctrl-S does in JupyterLab with a notebook that was opened, and perhaps changed."""
        notebook = self.ask(f"contents/{path}?type=notebook&content=1")["content"]
        change(notebook)
        self.ask(f"contents/{path}", "PUT", type="notebook", format="json", content=notebook)

    def close(self):
        os.killpg(self.process.pid, signal.SIGTERM)
        self.process.wait(timeout=60)
        self.reader.join(timeout=60)
        self.process.stdout.close()


def git(repository, *arguments):
    return subprocess.run(
        ["git", "-c", "user.name=x", "-c", "user.email=x@example.org", *arguments],
        cwd=repository,
        check=True,
        capture_output=True,
        text=True,
    ).stdout


@pytest.fixture(scope="module")
def server(tmp_path_factory, folder_for_sockets):
    repository = tmp_path_factory.mktemp("lab") / "my own course"
    shutil.copytree(
        ROOT / "tutorials",
        repository / "tutorials",
        ignore=shutil.ignore_patterns("my-work", "__pycache__", ".ipynb_checkpoints"),
    )
    for name in ("Makefile", ".gitignore", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, repository)
    (repository / ".venv" / "bin").mkdir(parents=True)
    (repository / ".venv" / "installed").touch()
    (repository / ".venv" / "bin" / "python").write_text(
        f'#!/bin/sh\nexec "{sys.executable}" "$@"\n'
    )
    (repository / ".venv" / "bin" / "python").chmod(0o755)
    git(repository, "init", "--quiet")
    git(repository, "add", "--all")
    git(repository, "commit", "--quiet", "--message", "all")
    home = tmp_path_factory.mktemp("home")
    (home / "jupyter_server_config.py").write_text(
        f"c.ServerApp.root_dir = {str(home)!r}\n"  # of somebody who uses Jupyter elsewhere, too
        "c.KernelManager.transport = 'ipc'\n"  # no ports that others may take (`kernels`)
    )
    environment = {
        key: value
        for key, value in os.environ.items()
        if key not in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER", "DDP_PROGRESS")
    }
    environment |= {
        "JUPYTER_CONFIG_DIR": str(home),
        "JUPYTER_RUNTIME_DIR": folder_for_sockets,
        "JUPYTER_DATA_DIR": str(home / "data"),
    }
    server = Server(repository, environment)
    yield server
    server.close()


def files_of(repository):
    return {
        path.relative_to(repository).as_posix(): path.read_bytes()
        for path in repository.rglob("*")
        if path.is_file() and ".git" not in path.parts and ".ipynb_checkpoints" not in path.parts
    }


def mark(notebook):
    notebook["cells"][0]["source"] += "\nchanged by a test"


def test_it_starts_says_where_and_why_it_opens_no_browser(server):
    said = "".join(server.said)
    assert "The first page says where to begin" in said
    assert "No browser can be opened from here" in said
    assert "not recommended" not in said
    assert ("You are root" in said) == (os.geteuid() == 0)


def test_it_opens_in_the_folder_of_the_tutorials_and_hides_the_originals_of_the_copies(server):
    listed = {entry["name"] for entry in server.ask("contents/")["content"]}
    assert {"my-work", "pets.ipynb", "pets.py"} <= listed and "student" not in listed
    copies = {entry["name"] for entry in server.ask("contents/my-work")["content"]}
    students = {path.name for path in (ROOT / "tutorials" / "student").glob("*.ipynb")}
    assert copies == students | {"start-here.ipynb"}


def test_the_first_page_names_every_notebook_with_a_link_that_leads_to_it(server):
    page = server.ask("contents/my-work/start-here.ipynb?type=notebook&content=1")["content"]
    (cell,) = page["cells"]
    linked = re.findall(r"\| \d \| \[[\w.]+\]\(([\w.]+)\)", cell["source"])
    copies = {entry["name"] for entry in server.ask("contents/my-work")["content"]}
    assert set(linked) == copies - {"start-here.ipynb"} and linked[0] == "mnist.ipynb"


def test_saving_a_students_copy_writes_nothing_else_and_git_sees_nothing(server):
    before = files_of(server.repository)
    server.save("my-work/pets.ipynb", mark)
    after = files_of(server.repository)
    assert {name for name in before | after if before.get(name) != after.get(name)} == {
        "tutorials/my-work/pets.ipynb"
    }
    assert git(server.repository, "status", "--porcelain") == ""
    assert not git(server.repository, "describe", "--always", "--dirty").strip().endswith("-dirty")


@pytest.mark.parametrize("name", ["pets.ipynb", "student/pets.ipynb"])
def test_saving_a_notebook_never_writes_its_script(server, name):
    before = files_of(server.repository)
    server.save(name, mark)
    after = files_of(server.repository)
    assert {name for name in before | after if before.get(name) != after.get(name)} == {
        f"tutorials/{name}"
    }
    git(server.repository, "checkout", "--quiet", "tutorials")


def test_a_script_that_is_opened_as_a_notebook_and_saved_stays_as_it_was(server):
    before = files_of(server.repository)
    for path in sync.sources():
        server.save(path.name)
    assert files_of(server.repository) == before


def test_a_kernel_of_it_has_the_environment_of_the_project(server):
    session = server.ask(
        "sessions",
        "POST",
        path="my-work/pets.ipynb",
        type="notebook",
        name="",
        kernel={"name": "python3"},
    )
    connection = f"{server.runtime}/kernel-{session['kernel']['id']}.json"
    kernel = BlockingKernelClient(connection_file=connection)
    kernel.load_connection_file()
    kernel.start_channels(hb=False)
    try:
        wanted = {"all": "[os.getcwd(), sys.executable, shutil.which('python')]"}
        reply = kernel.execute(
            "import os, shutil, sys", user_expressions=wanted, reply=True, timeout=120
        )
    finally:
        kernel.stop_channels()
    folder, python, first_on_path = ast.literal_eval(
        reply["content"]["user_expressions"]["all"]["data"]["text/plain"]
    )
    assert folder == str(server.repository / "tutorials" / "my-work")
    assert python == sys.executable
    assert os.path.dirname(first_on_path) == os.path.dirname(sys.executable)


@pytest.fixture
def mine(tmp_path):
    assert lab.prepare({"a.ipynb": b"first edition"}, tmp_path / "mine") == []
    return tmp_path / "mine"


def test_what_a_student_has_done_is_never_overwritten(mine):
    copy = mine / "a.ipynb"
    copy.write_text("my work")
    assert lab.prepare({"a.ipynb": b"first edition"}, mine) == []
    (line,) = lab.prepare({"a.ipynb": b"second edition"}, mine)
    assert "newer a.ipynb" in line and "stays as it is" in line
    assert copy.read_text() == "my work"
    copy.rename(copy.with_name("mine.ipynb"))
    assert lab.prepare({"a.ipynb": b"second edition"}, mine) == []
    assert (copy.read_text(), copy.with_name("mine.ipynb").read_text()) == (
        "second edition",
        "my work",
    )


def test_a_copy_that_nobody_has_touched_follows_its_original(mine):
    assert lab.prepare({"a.ipynb": b"second edition"}, mine) == []
    assert (mine / "a.ipynb").read_text() == "second edition"


def test_a_students_own_file_of_that_name_is_left_alone(mine):
    (mine / "b.ipynb").write_text("mine, from elsewhere")
    assert lab.prepare({"b.ipynb": b"new"}, mine) == []
    assert (mine / "b.ipynb").read_text() == "mine, from elsewhere"


def test_the_first_page_is_the_same_file_whenever_it_is_made():
    assert lab.first_page("text") == lab.first_page("text")


@pytest.mark.parametrize(
    "given, arguments, expected",
    [
        ({}, [], True),
        ({"DISPLAY": ":0"}, [], False),
        ({"BROWSER": "w3m"}, [], False),
        ({}, ["--no-browser"], False),
    ],
)
def test_a_browser_is_opened_where_there_can_be_one(monkeypatch, given, arguments, expected):
    monkeypatch.setattr(sys, "platform", "linux")
    assert ("--no-browser" in lab.options(given, arguments)[0]) == expected


def test_a_folder_that_cannot_be_written_is_said_in_a_line(tmp_path):
    tutorials = tmp_path / "tutorials"
    (tutorials / "student").mkdir(parents=True)
    for name in ("lab.py", "start-here.md"):
        shutil.copy(ROOT / "tutorials" / name, tutorials)
    (tutorials / "my-work").write_text("a file where the folder should be")
    done = subprocess.run(
        [sys.executable, tutorials / "lab.py"], capture_output=True, text=True, timeout=60
    )
    assert (
        done.returncode == 1
        and "cannot be put into" in done.stderr
        and "Traceback" not in done.stderr
    )


def test_a_notebook_that_was_changed_by_hand_is_set_aside_before_it_is_written_anew(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(sync, "SET_ASIDE", tmp_path / "my-work")
    path = tmp_path / "pets.ipynb"
    notebook = sync.from_script(ROOT / "tutorials" / "pets.py")
    nbformat.write(notebook, path)
    sync.set_aside(path)
    assert capsys.readouterr().out == "" and not (tmp_path / "my-work").exists()
    notebook.cells[0].source += "\na thought of the instructor"
    nbformat.write(notebook, path)
    sync.set_aside(path)
    (kept,) = (tmp_path / "my-work").iterdir()
    assert kept.read_bytes() == path.read_bytes()
    assert kept.name in capsys.readouterr().out
