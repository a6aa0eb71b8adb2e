"""The doctor on clusters of which one thing is really broken."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from patience import PATIENCE
from processes import can_hide, hiding, separate_cluster

from dask_ranks.clusters.doctor import FAILED, OK, ROW, WARNING, examine

ROOT = Path(__file__).parents[2]


def doctor(runs, **variables):
    """Run the command; returns its exit code and what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "dask_ranks", "doctor"],
        cwd=ROOT,
        env={**os.environ, "RUNS": str(runs), **variables},
        capture_output=True,
        text=True,
        timeout=4 * PATIENCE,
    )
    assert "Traceback" not in done.stdout + done.stderr
    return done.returncode, done.stdout + done.stderr


def row(state, check, found=""):
    """The beginning of what is printed of one check."""
    return "\n" + ROW.format(state, check, found)


def test_without_the_commands_of_the_batch_system_nothing_is_started(tmp_path):
    profile = tmp_path / "mine.yaml"
    options = {"queue": "main", "cores": 1, "memory": "1GiB"}
    profile.write_text(
        yaml.safe_dump({"cluster": "dask_jobqueue.SLURMCluster", "options": options})
    )
    code, text = doctor(tmp_path, CLUSTER=str(profile), PATH=str(tmp_path))
    assert code == 1 and row(FAILED, "queue", "There is no sbatch here") in text
    assert " workers " not in text


def test_a_place_for_runs_where_nobody_may_write(tmp_path):
    (tmp_path / "file").touch()
    code, text = doctor(tmp_path / "file", CLUSTER="local")
    assert code == 1 and row(FAILED, "run directory", "Cannot make the run directory") in text
    assert "RUNS=" in text


@pytest.mark.skipif(not can_hide(), reason="needs the right to make a mount namespace (root)")
def test_a_run_directory_that_workers_do_not_share_is_a_warning(tmp_path, monkeypatch):
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    monkeypatch.setenv("RUNS", str(hidden))
    lines = []
    with separate_cluster(tmp_path, *hiding(hidden)) as (_, address):
        assert examine(address, 2, lines.append)
    text = "\n".join(lines)
    assert row(WARNING, "run directory") in text and "through Dask" in text
    assert row(OK, "ranks") in text
    assert not list(hidden.iterdir())
