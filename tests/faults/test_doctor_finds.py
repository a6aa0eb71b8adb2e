"""The doctor on clusters of which one thing is really broken."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from distributed import Client
from patience import PATIENCE
from processes import can_hide, hiding, separate_cluster

from ddp_common.clusters.checks import FAILED, OK, SKIPPED, WARNING
from ddp_common.clusters.doctor import check_workers

ROOT = Path(__file__).parents[2]


def doctor(runs, **variables):
    """Run the command; returns its exit code and what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "ddp_common", "doctor"],
        cwd=ROOT,
        env={**os.environ, "RUNS": str(runs), **variables},
        capture_output=True,
        text=True,
        timeout=4 * PATIENCE,
    )
    assert "Traceback" not in done.stdout + done.stderr
    return done.returncode, done.stdout + done.stderr


def states(text, check):
    """The states of the rows of `check` in a printed table."""
    return [
        line.split()[-1]
        for line in text.splitlines()
        if line.startswith(check) and line.split()[-1] in (OK, WARNING, FAILED, SKIPPED)
    ]


def test_without_the_commands_of_the_batch_system_nothing_is_started(tmp_path):
    profile = tmp_path / "mine.yaml"
    options = {"queue": "main", "cores": 1, "memory": "1GiB"}
    profile.write_text(
        yaml.safe_dump({"cluster": "dask_jobqueue.SLURMCluster", "options": options})
    )
    code, text = doctor(tmp_path, CLUSTER=str(profile), PATH=str(tmp_path))
    assert code == 1 and "not on PATH: sbatch, squeue" in text
    assert states(text, "profile") == [OK] and states(text, "Slurm") == [FAILED]
    assert states(text, "cluster") == states(text, "ranks") == [SKIPPED]


@pytest.mark.skipif(not can_hide(), reason="needs the right to make a mount namespace (root)")
def test_a_run_directory_that_workers_do_not_share_is_a_warning(tmp_path, monkeypatch):
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    monkeypatch.setenv("RUNS", str(hidden))
    with (
        separate_cluster(tmp_path, *hiding(hidden)) as (_, address),
        Client(address) as client,
    ):
        client.wait_for_workers(2, timeout=2 * PATIENCE)
        found = list(check_workers(client))
    (directory,) = [finding for finding in found if finding.check == "run directory"]
    assert directory.state == WARNING and "through Dask" in directory.advice
    assert [finding.state for finding in found if finding.check == "all-reduce"] == [OK]
    assert not list(hidden.iterdir())
