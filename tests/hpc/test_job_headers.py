"""The header that the tutorial `ucmerced` asks for, handed in to a real Slurm."""

import re
import subprocess
import time
from pathlib import Path

import jupytext
import numpy as np
import pytest
from slurm_here import why_not

from ddp_common.teaching import batch_jobs

TUTORIAL = Path(__file__).parents[2] / "tutorials" / "ucmerced.py"
PATIENCE = 120  # seconds for a job that does next to nothing, on a busy machine

pytestmark = pytest.mark.skipif(why_not() is not None, reason=f"no Slurm here: {why_not()}")


@pytest.fixture(scope="module")
def my_header():
    names = {}
    for cell in jupytext.read(TUTORIAL).cells:
        if "def my_header" in cell.source and cell.cell_type == "code":
            exec(cell.source, names)
    return names["my_header"]


def shown(slurm, job):
    """What Slurm says of a job: {name: value}."""
    said = subprocess.run(
        ["scontrol", "show", "job", job], env=slurm, capture_output=True, text=True, check=True
    ).stdout
    return dict(word.split("=", 1) for word in said.split() if "=" in word)


@pytest.mark.parametrize("cores, ranks", [(1, 2), (2, 3)])
def test_slurm_takes_the_header_at_its_word(slurm, my_header, tmp_path, cores, ranks):
    site = {"account": "lab", "partitions": {"main": 1440}}
    need = {"ranks": ranks, "cores": cores, "memory": 2, "minutes": 95, "warning": 120}
    text = my_header(site, need)
    assert batch_jobs.fault_in_header(text, site, need) is None
    script = tmp_path / "job.sh"
    script.write_text(f"{text}\nsrun --cpus-per-task={cores} echo a rank\n")
    submitted = subprocess.run(
        ["sbatch", "--parsable", f"--output={tmp_path}/log", str(script)],
        env=slurm,
        capture_output=True,
        text=True,
    )
    assert submitted.returncode == 0, submitted.stderr
    job = submitted.stdout.strip()
    deadline = time.monotonic() + PATIENCE
    while shown(slurm, job)["JobState"] not in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"):
        assert time.monotonic() < deadline, shown(slurm, job)
        time.sleep(0.1)
    said = shown(slurm, job)
    assert said["JobState"] == "COMPLETED", (tmp_path / "log").read_text()
    assert said["Partition"] == "main" and said["Account"] == "lab"
    assert said["NumTasks"] == str(ranks) and said["CPUs/Task"] == str(cores)
    assert said["TimeLimit"] == "01:35:00" and said["MinMemoryCPU"] == "2G"
    assert (tmp_path / "log").read_text().split("\n") == ["a rank"] * ranks + [""]


def test_what_we_call_refused_slurm_refuses_or_reads_otherwise(slurm, my_header, tmp_path):
    site = {"account": "lab", "partitions": {"main": 1440}}
    need = {"ranks": 2, "cores": 1, "memory": 2, "minutes": 95, "warning": 120}
    text = my_header(site, need)
    script = tmp_path / "job.sh"

    def submit(content):
        script.write_text(f"{content}\ntrue\n")
        return subprocess.run(
            ["sbatch", "--parsable", "--hold", "--output=/dev/null", str(script)],
            env=slurm,
            capture_output=True,
            text=True,
        )

    no_interpreter = submit(text.replace("#!/bin/bash\n", ""))
    assert no_interpreter.returncode and "does not look like a batch script" in (
        no_interpreter.stderr
    )
    assert submit(text.replace("=main", "=nowhere")).returncode
    for old, new, name, value in (
        ("=2G", "=2", "MinMemoryCPU", "2M"),
        ("--time=95", "--time=95:00:00", "TimeLimit", "3-23:00:00"),
        ("--time=95", "--time=01:35", "TimeLimit", "00:02:00"),  # rounded up to minutes
        ("#SBATCH --ntasks", "true\n#SBATCH --ntasks", "NumTasks", "1"),
        ("#SBATCH --ntasks", "# SBATCH --ntasks", "NumTasks", "1"),
    ):
        changed = text.replace(old, new)
        assert batch_jobs.fault_in_header(changed, site, need) is not None, new
        job = submit(changed).stdout.strip()
        assert shown(slurm, job)[name] == value, new
        subprocess.run(["scancel", job], env=slurm, check=True)


def test_the_header_can_be_tried_where_there_is_a_slurm(slurm, my_header, monkeypatch):
    for name in ("PATH", "SLURM_CONF"):
        monkeypatch.setenv(name, slurm[name])
    assert re.search(
        r"Job \d+ to start at \S+ using 2 processors .* in partition main",
        batch_jobs.try_here(my_header),
    )
    wrong = batch_jobs.try_here(lambda site, need: my_header(site, {**need, "ranks": 3}))
    assert wrong.startswith("not yet: yours --ntasks=3")


def test_logs_have_slurms_own_words_for_a_cancelled_step(slurm, tmp_path):
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/bash\n#SBATCH --ntasks=2\nsrun sleep 300\n")
    sbatch = ["sbatch", "--parsable", f"--output={tmp_path}/log", str(script)]
    job = subprocess.run(
        sbatch, env=slurm, capture_output=True, text=True, check=True
    ).stdout.strip()
    deadline = time.monotonic() + PATIENCE
    while (
        f"{job}.0"
        not in subprocess.run(
            ["squeue", "--steps", "--noheader", "--format=%i"],
            env=slurm,
            capture_output=True,
            text=True,
        ).stdout.split()
    ):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    subprocess.run(["scancel", job], env=slurm, check=True)
    pattern = r"error: \*\*\* STEP \d+\.0 ON \S+ CANCELLED AT \S+ \*\*\*"
    while not re.search(pattern, (tmp_path / "log").read_text()):
        assert time.monotonic() < deadline, (tmp_path / "log").read_text()
        time.sleep(0.1)
    invented, _ = batch_jobs.any_log(np.random.default_rng(0), "cancelled")
    assert re.search(pattern, invented)
