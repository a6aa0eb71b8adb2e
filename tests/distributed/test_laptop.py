"""`make check` tells an instructor in one line for each thing whether a laptop is ready."""

import subprocess
import sys

import pytest

from ddp_common.commands import laptop


def test_a_sound_machine_is_ready_and_nothing_is_left(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "ddp_common", "check"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [
        line for line in done.stdout.splitlines() if line.rstrip().endswith((" ok", " warning"))
    ]
    titles = [row.split()[0] for row in rows]
    assert titles == ["packages", "machine", "data", "notebook", "cluster", "training"]
    assert done.stdout.splitlines()[-1].startswith("Ready")
    assert done.stderr == "" and not list(tmp_path.iterdir())


def said_by(check, monkeypatch):
    lines = []
    monkeypatch.setattr(laptop, "CHECKS", [laptop.Check("one thing", check, "Do this.")])
    ready = laptop.check(lines.append)
    return ready, "\n".join(lines)


def test_a_package_that_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(laptop, "_needed", lambda: ["numpy", "no-such-package"])
    ready, said = said_by(laptop.check_packages, monkeypatch)
    assert not ready and "missing: no-such-package" in said and "`make setup`" in said
    assert "Not ready: 1 failed" in said


def test_a_package_in_another_version_is_a_warning(monkeypatch):
    monkeypatch.setattr(laptop, "_needed", lambda: ["numpy"])
    monkeypatch.setattr(laptop, "_tested_versions", lambda: {"numpy": "0.1"})
    ready, said = said_by(laptop.check_packages, monkeypatch)
    assert ready and "(tested: 0.1)" in said and "Ready, with 1 warning." in said


def test_every_package_of_the_project_is_looked_for():
    assert {"torch", "distributed", "jupyterlab", "nbval"} <= set(laptop._needed())
    assert "dask-cuda" not in laptop._needed()  # only where there are GPUs
    assert set(laptop._needed()) <= set(laptop._tested_versions())


@pytest.mark.parametrize(
    "limit, state, advice", [("ROOM", "FAILED", "disk"), ("MEMORY", "warning", "Close programs")]
)
def test_too_little_room_and_memory_are_told(monkeypatch, limit, state, advice):
    monkeypatch.setattr(laptop, limit, 1e9)
    ready, said = said_by(laptop.check_machine, monkeypatch)
    assert ready == (state == "warning")
    assert state in said and advice in said


def test_a_check_that_cannot_be_made_is_a_failure_with_what_to_do(monkeypatch):
    def broken():
        raise FileNotFoundError("names.csv")
        yield

    ready, said = said_by(broken, monkeypatch)
    assert not ready and "names.csv" in said and "Do this." in said
