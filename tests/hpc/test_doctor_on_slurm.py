"""The doctor on a real Slurm: wrong queues, a silent controller, jobs that cannot start.

And a cluster that is sound.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from slurm_here import running_slurm, why_not, without_controller

from ddp_common.clusters.doctor import examine

ROOT = Path(__file__).parents[2]
OPTIONS = {
    "cores": 1,
    "processes": 1,
    "memory": "2GiB",
    "interface": "lo",
    "walltime": "00:10:00",
    "job_directives_skip": ["--mem"],  # this Slurm counts no memory
    "scheduler_options": {"dashboard_address": "127.0.0.1:0"},
}

pytestmark = pytest.mark.skipif(why_not() is not None, reason=f"no Slurm here: {why_not()}")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slurm")
    folder.chmod(0o755)
    with running_slurm(folder) as variables:
        yield {**os.environ, **variables}


@pytest.fixture
def profile(tmp_path):
    """Write a profile with some options of its own; returns its path."""

    def write(**options):
        path = tmp_path / "mine.yaml"
        options = OPTIONS | {"log_directory": str(tmp_path)} | options
        content = {"cluster": "dask_jobqueue.SLURMCluster", "options": options}
        path.write_text(yaml.safe_dump(content))
        return str(path)

    return write


def doctor(environment, profile):
    """Run the command; returns its exit code and what it printed.

    Every space and line break is one space there.
    """
    done = subprocess.run(
        [sys.executable, "-m", "ddp_common", "doctor", "--cluster", profile],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert "Traceback" not in done.stdout + done.stderr
    return done.returncode, re.sub(r"\s+", " ", done.stdout + done.stderr)


def jobs(slurm):
    return subprocess.run(
        ["squeue", "-h", "-o", "%i %t"], env=slurm, capture_output=True, text=True, check=True
    ).stdout.split()


def test_a_partition_that_does_not_exist_is_found_before_a_job_is_submitted(slurm, profile):
    code, said = doctor(slurm, profile(queue="gpu"))
    assert code == 1 and "Slurm it answers, and has 1 partition ok" in said
    assert "partition gpu does not exist; there is: main (up) FAILED" in said
    assert "Change `queue:` in the profile" in said
    assert "cluster the checks above come first skipped" in said and not jobs(slurm)


@pytest.mark.parametrize("options", [{"queue": "main"}, {}], ids=["named", "default"])
def test_a_partition_that_is_down_is_found_before_a_job_waits_in_it_for_ever(
    slurm, profile, options
):
    subprocess.run(
        ["scontrol", "update", "PartitionName=main", "State=DOWN"], env=slurm, check=True
    )
    try:
        code, said = doctor(slurm, profile(**options))
    finally:
        subprocess.run(
            ["scontrol", "update", "PartitionName=main", "State=UP"], env=slurm, check=True
        )
    assert code == 1
    assert "is not up: jobs wait in it for ever; there is: main (down) FAILED" in said
    assert "one that is up, or wait" in said and not jobs(slurm)


def test_a_controller_that_does_not_answer_is_found(slurm, profile, tmp_path):
    code, said = doctor(without_controller(slurm, tmp_path), profile(queue="main"))
    assert code == 1 and "Slurm `sinfo` gave no answer:" in said
    assert "Slurm is down or cannot be reached from here" in said


@pytest.mark.parametrize("options", [{"queue": "main"}, {}], ids=["named", "default"])
def test_a_sound_slurm_is_fit_to_train(slurm, profile, tmp_path, options):
    code, said = doctor(
        slurm | {"RUNS": str(tmp_path / "runs"), "WORKERS": "2"}, profile(**options)
    )
    assert code == 0, said
    if options:
        assert "partition main is up ok" in said
    else:
        assert "partition none in the profile; the default (main) is up ok" in said
    assert "cluster 2 workers came within" in said
    assert "the sum is right ok" in said and "Fit to train" in said
    assert not [job for job in jobs(slurm) if job in ("R", "PD")]


def test_jobs_whose_python_is_not_on_the_nodes_are_told_where_it_belongs(
    slurm, profile, monkeypatch
):
    for name in ("SLURM_CONF", "PATH"):
        monkeypatch.setenv(name, slurm[name])
    lines = []
    assert not examine(profile(queue="main", python="/nowhere/bin/python"), 1, lines.append)
    said = re.sub(r"\s+", " ", "\n".join(lines))
    assert re.search(r"cluster \S.* FAILED", said)
    assert "versions there is no cluster skipped" in said
    assert "A job starts /nowhere/bin/python: this file must exist on the compute nodes" in said
    assert not [job for job in jobs(slurm) if job in ("R", "PD")]
