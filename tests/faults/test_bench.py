"""`make bench` ends with its table, whatever one of its parts does."""

import subprocess
import sys
from pathlib import Path

import bench  # in benchmarks/
import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(600)
def test_the_whole_benchmark_comes_to_its_end():
    command = [sys.executable, ROOT / "benchmarks/bench.py", "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) > 12


def test_a_part_that_fails_does_not_lose_the_rows_of_the_others(monkeypatch, capsys):
    def fails(quick):
        yield "| measured |"
        raise ValueError("too many values to unpack")

    monkeypatch.setattr(bench, "PARTS", {"first": fails, "second": lambda quick: ["| too |"]})
    monkeypatch.setattr(sys, "argv", ["bench.py"])
    with pytest.raises(SystemExit, match="first"):
        bench.main()
    told = capsys.readouterr()
    assert "| measured |\n| too |\n" in told.out
    assert "too many values to unpack" in told.err
