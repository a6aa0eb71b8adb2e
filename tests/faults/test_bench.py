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
