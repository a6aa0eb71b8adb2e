"""What asks a real Slurm before anything is trained: the doctor, an exercise on job headers."""

import re
import subprocess
import sys

import jupytext
import pytest
from runs_here import A_RUN, ROOT, wait_until
from slurm_here import JOB, jobs, said_by, submit, why_not

from tutorials.checks import ucmerced as checks

TUTORIAL = ROOT / "tutorials" / "ucmerced.py"

pytestmark = pytest.mark.skipif(why_not() is not None, reason=f"no Slurm here: {why_not()}")


@pytest.fixture
def doctor(slurm, tmp_path):
    """Run `make doctor CLUSTER=slurm` with options; returns its exit code and what it prints.

    Every space and line break is one space there.
    """

    def run(options):
        variables = {"OPTIONS": options, "WORKERS": "2", "RUNS": str(tmp_path / "runs")}
        doctor = slurm.login.start(
            [sys.executable, "-m", "dask_ranks", "doctor", "--cluster", "slurm"],
            cwd=ROOT,
            env={**slurm.environment, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        said = re.sub(r"\s+", " ", doctor.communicate(timeout=A_RUN)[0])
        assert "Traceback" not in said
        wait_until(lambda: not jobs(slurm))
        return doctor.returncode, said

    return run


def test_a_sound_slurm_is_fit_to_train(doctor):
    code, said = doctor(JOB)
    assert code == 0 and "Ready to train" in said, said
    assert "Slurm answers; there is: main (up)" in said and "ok workers 2 have come" in said


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("queue=gpu", "FAILED queue gpu is not up; there is: main (up)"),
        ("python=/no/python", "ended before its worker came: NonZeroExitCode"),
    ],
    ids=["no_such_partition", "no_python_on_the_nodes"],
)
def test_what_is_wrong_is_named_with_what_to_do(doctor, option, words):
    code, said = doctor(f"{JOB} {option}")
    assert code == 1 and words in said, said


def test_slurm_takes_the_header_that_ucmerced_asks_for_at_its_word(slurm, tmp_path):
    names = {"checks": checks, "judge": lambda check, answer: None}
    for cell in jupytext.read(TUTORIAL).cells:
        if "def my_header" in cell.source and cell.cell_type == "code":
            exec(cell.source, names)
    site = {"account": "lab", "partitions": {"main": 1440}}
    need = {"ranks": 2, "cpus": 1, "memory": 2, "minutes": 95, "warning": 120}
    header = names["my_header"](site, need)
    checks.fits(header, site, need)
    script = tmp_path / "job.sh"
    script.write_text(f"{header}\nsrun echo a rank\n")
    job = submit(slurm, tmp_path, script)
    wait_until(lambda: job not in jobs(slurm))
    assert (tmp_path / f"{job}.log").read_text() == "a rank\n" * 2
    words = said_by(slurm, "scontrol", "show", "job", job).split()
    assert {"JobState=COMPLETED", "Partition=main", "Account=lab", "NumTasks=2"} <= set(words)
    assert {"CPUs/Task=1", "TimeLimit=01:35:00", "MinMemoryCPU=2G"} <= set(words)
