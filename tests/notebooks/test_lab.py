"""`make lab`: it opens in students' copies, which are theirs; saving writes nothing else.

A real JupyterLab serves a copy of the repository, in a folder with spaces in its name.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request

import lab  # in tutorials/
import psutil
import pytest
from tutorials_here import ROOT, copy_of_repository

LINK = re.compile(r"(http://127\.0\.0\.1:\d+)/lab/tree/my-work/start-here\.ipynb\?token=(\w+)")


@pytest.fixture
def repository(tmp_path):
    return copy_of_repository(tmp_path)


@pytest.fixture
def ask(repository, tmp_path, folder_for_sockets):
    """A function that asks the REST interface of a JupyterLab which `make lab` has started."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "jupyter_server_config.py").write_text(
        f"c.ServerApp.root_dir = {str(home)!r}\n"  # of somebody who uses Jupyter elsewhere, too
        "c.KernelManager.transport = 'ipc'\n"  # no ports that others may take (`kernels`)
    )
    places = {"CONFIG": str(home), "RUNTIME": folder_for_sockets, "DATA": str(home / "data")}
    environment = {name: value for name, value in os.environ.items() if "DISPLAY" not in name}
    environment |= {f"JUPYTER_{name}_DIR": place for name, place in places.items()}
    process = subprocess.Popen(
        ["make", "lab"],
        cwd=repository,
        env=environment,
        text=True,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    said = []
    reader = threading.Thread(target=lambda: said.extend(process.stdout), daemon=True)
    reader.start()

    def wait_for(condition):
        deadline = time.monotonic() + 120
        while not condition():
            assert process.poll() is None and time.monotonic() < deadline, "".join(said)
            time.sleep(0.1)

    def ask(place, method="GET", **content):
        address, token = LINK.search("".join(said)).groups()
        request = urllib.request.Request(
            f"{address}/api/{place}",
            json.dumps(content).encode() if content else None,
            method=method,
            headers={"Authorization": f"token {token}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())

    def listens():  # it says where it is before that
        try:
            return bool(ask("status"))
        except urllib.error.URLError:
            return False

    wait_for(lambda: LINK.search("".join(said)))
    wait_for(listens)
    yield ask
    os.killpg(process.pid, signal.SIGTERM)
    process.wait(timeout=60)
    reader.join(timeout=60)
    process.stdout.close()


def files_of(repository):
    return {
        path.relative_to(repository).as_posix(): path.read_bytes()
        for path in repository.rglob("*")
        if path.is_file() and ".ipynb_checkpoints" not in path.parts
    }


def test_students_find_a_copy_of_each_notebook_and_saving_it_writes_nothing_else(repository, ask):
    listed = {entry["name"] for entry in ask("contents/")["content"]}
    assert {"my-work", "pets.ipynb", "pets.py"} <= listed and "student" not in listed
    copies = {entry["name"] for entry in ask("contents/my-work")["content"]}
    students = {path.name for path in (ROOT / "tutorials" / "student").glob("*.ipynb")}
    assert copies == students | {"start-here.ipynb", "glossary.ipynb"}
    before = files_of(repository)
    opened = ask("contents/my-work/pets.ipynb?type=notebook&content=1")["content"]
    opened["cells"][0]["source"] += "\nchanged by a test"
    ask("contents/my-work/pets.ipynb", "PUT", type="notebook", format="json", content=opened)
    after = files_of(repository)
    assert {name for name in before | after if before.get(name) != after.get(name)} == {
        "tutorials/my-work/pets.ipynb"
    }


def has_a_terminal_of_its_own(process):
    """Not what the shell of a terminal has started, as .bashrc may say."""
    with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):  # it has just ended
        return os.getsid(process.pid) == process.pid and process.terminal() is not None
    return False


def test_a_terminal_has_the_python_of_the_notebooks_also_where_lab_writes_into_a_pipe(ask):
    """A login shell would read /etc/profile, and that sets another PATH."""
    ask("terminals", "POST")
    of_this_test = psutil.Process().children(recursive=True)
    shells = [each.cmdline() for each in of_this_test if has_a_terminal_of_its_own(each)]
    assert [shell[1:] for shell in shells] == [[]], shells


def notebook_of(text, kernel="python3"):
    """The bytes of a notebook; `prepare` looks at its cells."""
    return json.dumps({"cells": [text], "metadata": {"kernelspec": kernel}}).encode()


def test_what_a_student_has_done_is_never_overwritten_and_an_untouched_copy_follows(tmp_path):
    mine, first, second = tmp_path / "mine", notebook_of("1st"), notebook_of("2nd")
    assert lab.prepare({"a.ipynb": first, "b.ipynb": first}, mine) == []
    (mine / "a.ipynb").write_text("my work")
    (line,) = lab.prepare({"a.ipynb": second, "b.ipynb": second}, mine)
    assert "newer a.ipynb" in line and "stays as it is" in line
    assert (mine / "a.ipynb").read_text() == "my work"
    assert (mine / "b.ipynb").read_bytes() == second


def test_a_notebook_that_differs_in_its_kernel_alone_is_no_newer_one(tmp_path):
    python, own = notebook_of("1st"), notebook_of("1st", "ddp-tutorials")
    lab.prepare({"a.ipynb": python, "b.ipynb": python}, tmp_path)
    (tmp_path / "a.ipynb").write_text("my work")
    assert lab.prepare({"a.ipynb": own, "b.ipynb": own}, tmp_path) == []
    assert (tmp_path / "a.ipynb").read_text() == "my work"
    assert (tmp_path / "b.ipynb").read_bytes() == own
