"""Headers are read as Slurm reads them, logs are read by what they say; wrong answers are refused.

The solutions are those of the tutorial `ucmerced`. What Slurm itself says of its header is in
tests/hpc/test_job_headers.py.
"""

import re
from pathlib import Path

import jupytext
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


# Headers that fit in other words


# Wrong ones

WRONG_HEADERS = {
    "another account": ("=lab", "=my_project", "Who pays"),
    "an hour too little": ("=95", "=00:35:00", "reaches its limit"),
    "memory of a rank for each core": ("=3G", "=12G", "And per what"),
}


@pytest.mark.parametrize(("old", "new", "asks"), WRONG_HEADERS.values(), ids=WRONG_HEADERS)
def test_a_wrong_header_is_refused_with_a_question(header, old, new, asks):
    assert old in header
    fault = batch_jobs.fault_in_header(header.replace(old, new), SITE, NEED)
    assert fault is not None and asks in str(fault), fault


# Logs


# Restarts


def test_where_there_is_no_slurm_nothing_is_asked(solutions, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert batch_jobs.try_here(solutions["my_header"]) == batch_jobs.NO_SLURM
