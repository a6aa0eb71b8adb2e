"""Headers are read as Slurm reads them, logs are read by what they say; wrong answers are refused.

The solutions are those of the tutorial `ucmerced`. What Slurm itself says of its header is in
tests/hpc/test_job_headers.py.
"""

import re
from pathlib import Path

import jupytext
import numpy as np
import pytest

from ddp_common.teaching import batch_jobs

TUTORIAL = Path(__file__).parents[2] / "tutorials" / "ucmerced.py"
SITE = {"account": "lab", "partitions": {"long": 4320, "short": 60, "medium": 240}}
NEED = {"ranks": 4, "cores": 2, "memory": 3, "minutes": 95, "warning": 120}


@pytest.fixture(scope="module")
def solutions():
    names = {"re": re}
    for cell in jupytext.read(TUTORIAL).cells:
        if "solution" in cell.metadata.get("tags", []) and "torch" not in cell.source:
            exec(cell.source, names)
    return names


@pytest.fixture
def header(solutions):
    return solutions["my_header"](SITE, NEED)


def test_the_solutions_are_accepted_for_any_site_and_any_log(solutions, capsys):
    for _ in range(20):
        assert batch_jobs.check_header(solutions["my_header"])
        assert batch_jobs.check_log(solutions["my_reading"])
        assert batch_jobs.check_restarts(solutions["my_restarts"])
    assert "not yet" not in capsys.readouterr().out


# How Slurm writes numbers


@pytest.mark.parametrize(
    ("text", "minutes"),
    [
        ("95", 95),
        ("95:00", 95),
        ("01:35:00", 95),
        ("00:95:00", 95),
        ("1-0", 1440),
        ("1-2:03", 1440 + 123),
        ("2-00:00:30", 2880.5),
    ],
)
def test_a_time_is_read_as_slurm_reads_it(text, minutes):
    assert batch_jobs.minutes_of(text) == minutes


@pytest.mark.parametrize("text", ["", "an hour", "1:2:3:4", "-5", "1.5"])
def test_what_is_no_time_is_refused(text):
    with pytest.raises(ValueError):
        batch_jobs.minutes_of(text)


def test_memory_without_a_unit_is_in_mebibytes():
    assert batch_jobs.mebibytes_of("3") == 3
    assert batch_jobs.mebibytes_of("3G") == batch_jobs.mebibytes_of("3gb") == 3072
    assert batch_jobs.mebibytes_of("3072M") == 3072
    with pytest.raises(ValueError):
        batch_jobs.mebibytes_of("3 apples")


def test_long_and_short_options_are_the_same():
    said = batch_jobs.read_header("#!/bin/sh\n#SBATCH -n 4 -c2 -t 95  # two words\n#SBATCH -A lab")
    assert said.options == {"ntasks": "4", "cpus-per-task": "2", "time": "95", "account": "lab"}
    long = batch_jobs.read_header("#!/bin/sh\n\n# a comment\n#SBATCH --ntasks 4 --exclusive\n")
    assert long.options == {"ntasks": "4", "exclusive": ""}


def test_slurm_reads_no_header_after_the_first_command():
    said = batch_jobs.read_header("#!/bin/sh\n#SBATCH -n 4\nmodule load\n#SBATCH -c 2\n")
    assert said.options == {"ntasks": "4"} and said.ignored == ["#SBATCH -c 2"]


# Headers that fit in other words


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("--time=95", "--time=01:35:00"),
        ("--time=95", "-t 95:00"),
        ("--time=95", "--time=0-2"),
        ("--mem-per-cpu=3G", "--mem-per-cpu=3072"),
        ("--mem-per-cpu=3G", "--nodes=1\n#SBATCH --mem=24G"),
        ("--ntasks=4", "--nodes=2 --ntasks-per-node=2"),
        ("--signal=TERM", "--signal=SIGTERM"),
        ("--signal=TERM", "--signal=15"),
        ("#!/bin/bash", "#!/usr/bin/env bash\n# for the lab"),
    ],
)
def test_a_header_that_says_the_same_is_accepted(header, old, new):
    assert old in header
    assert batch_jobs.fault_in_header(header.replace(old, new), SITE, NEED) is None


# Wrong ones

WRONG_HEADERS = {
    "no interpreter": ("#!/bin/bash\n", "", "Which program"),
    "a blank before SBATCH": ("#SBATCH", "# SBATCH", "Who pays"),
    "options after a command": (
        "#SBATCH --signal",
        "module load python\n#SBATCH --signal",
        "How far does Slurm read",
    ),
    "another account": ("=lab", "=my_project", "Who pays"),
    "the largest partition": ("=medium", "=long", "Which is the smallest"),
    "a partition that is too short": ("=medium", "=short", "Which is the smallest"),
    "no partition": ("#SBATCH --partition=medium\n", "", "Which is the smallest"),
    "minutes as hours": ("=95", "=95:00:00", "which jobs start sooner"),
    "minutes as seconds": ("=95", "=00:00:95", "reaches its limit"),
    "an hour too little": ("=95", "=00:35:00", "reaches its limit"),
    "all that the partition allows": ("=95", "=240", "which jobs start sooner"),
    "hours and minutes": ("=95", "=01:35", "reaches its limit"),
    "no time": ("#SBATCH --time=95\n", "", "How does Slurm write"),
    "cores times ranks": ("--ntasks=4", "--ntasks=8", "A task is a rank"),
    "no cores": ("#SBATCH --cpus-per-task=2\n", "", "How many cores"),
    "memory without a unit": ("=3G", "=3", "counts in MiB"),
    "memory of a rank for each core": ("=3G", "=12G", "And per what"),
    "memory of a node": ("--mem-per-cpu=3G", "--mem=24G", "In which option"),
    "no signal": ("#SBATCH --signal=TERM@120\n", "", "Which signal"),
    "a signal for the shell alone": ("=TERM", "=B:TERM", "Who has to save"),
    "the default warning": ("@120", "", "how long before"),
    "a signal that nobody can catch": ("=TERM", "=KILL", "Which signal"),
}


@pytest.mark.parametrize(("old", "new", "asks"), WRONG_HEADERS.values(), ids=WRONG_HEADERS)
def test_a_wrong_header_is_refused_with_a_question(header, old, new, asks):
    assert old in header
    fault = batch_jobs.fault_in_header(header.replace(old, new), SITE, NEED)
    assert fault is not None and asks in str(fault), fault


@pytest.mark.parametrize("wrong", [None, 5, "", ("a", "b")])
def test_what_is_no_header_is_refused(wrong):
    assert batch_jobs.fault_in_header(wrong, SITE, NEED) is not None


# Logs

WRONG_READINGS = {
    "whatever is cancelled ran out of time": lambda cause, lost, log: (
        "time limit" if "CANCELLED" in log else cause,
        lost,
    ),
    "terminated by a person": lambda cause, lost, log: (
        "cancelled" if "Terminated" in log else cause,
        lost,
    ),
    "the last step": lambda cause, lost, log: (
        cause,
        int(re.findall(r"step (\d+)", log)[-1]),
    ),
    "the last saved step": lambda cause, lost, log: (
        cause,
        int(re.findall(r"step (\d+).*saved", log)[-1]),
    ),
    "warned ranks lose steps, too": lambda cause, lost, log: (
        cause,
        np.diff([0, *(int(step) for step in re.findall(r"step (\d+)", log))])[-1],
    ),
    "a signal comes from a person": lambda cause, lost, log: (
        "cancelled" if "SIGTERM" in log else cause,
        lost,
    ),
    "the number alone": lambda cause, lost, log: lost,
}


@pytest.mark.parametrize("wrong", WRONG_READINGS.values(), ids=WRONG_READINGS)
def test_a_wrong_reading_of_the_log_is_refused(solutions, capsys, wrong):
    assert not batch_jobs.check_log(lambda log: wrong(*solutions["my_reading"](log), log))
    said = capsys.readouterr().out
    assert said.count("not yet") == 1 and "Which line names the cause" in said


# Restarts

WRONG_NUMBERS = {
    "jobs": lambda training, limit, warning, start: -(-training // (limit - warning - start)),
    "without the warning": lambda training, limit, warning, start: (
        -(-training // (limit - start)) - 1
    ),
    "without the start": lambda training, limit, warning, start: (
        -(-training // (limit - warning)) - 1
    ),
    "rounded down": lambda training, limit, warning, start: training // (limit - warning - start),
    "a float": lambda training, limit, warning, start: (
        -(-training / (limit - warning - start)) // 1 - 1
    ),
    "none": lambda training, limit, warning, start: 0,
}


@pytest.mark.parametrize("wrong", WRONG_NUMBERS.values(), ids=WRONG_NUMBERS)
def test_a_wrong_number_of_restarts_is_refused(solutions, capsys, wrong):
    def answer(training, limit, warning, start):
        right = solutions["my_restarts"](training, limit, warning, start)
        return right if right is None else wrong(training, limit, warning, start)

    assert not batch_jobs.check_restarts(answer)
    assert "How many minutes of each job" in capsys.readouterr().out


def test_a_run_that_never_ends_needs_no_number(solutions, capsys):
    def answer(training, limit, warning, start):
        return solutions["my_restarts"](training, limit, warning, start) or 0

    assert not batch_jobs.check_restarts(answer)
    assert "expected None" in capsys.readouterr().out


def test_of_partitions_that_are_alike_any_is_right(header):
    site = {**SITE, "partitions": {"medium": 240, "other": 240, "long": 4320}}
    for name in ("medium", "other"):
        text = header.replace("=medium", f"={name}")
        assert batch_jobs.fault_in_header(text, site, NEED) is None
    fault = batch_jobs.fault_in_header(header.replace("=medium", "=long"), site, NEED)
    assert fault.expected == "medium or other"


def test_where_there_is_no_slurm_nothing_is_asked(solutions, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert batch_jobs.try_here(solutions["my_header"]) == batch_jobs.NO_SLURM
