"""`make bench` ends with its table, whatever one of its parts does."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(600)
def test_the_whole_benchmark_comes_to_its_end():
    command = [sys.executable, ROOT / "benchmarks/bench.py", "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) > 12


FAILS = """
import bench
bench.PARTS = {"first": lambda quick: (1 / n for n in (4, 0)), "second": lambda quick: ["| too |"]}
bench.main()
"""


def test_a_part_that_fails_does_not_lose_the_rows_of_the_others():
    command = [sys.executable, "-c", FAILS]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT / "benchmarks")
    assert done.returncode == 1 and "ZeroDivisionError" in done.stderr, done.stderr
    assert "0.25\n| too |\n" in done.stdout
