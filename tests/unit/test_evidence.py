"""Tables of figures in the docs come from docs/evidence, and from nowhere else."""

import json
import sys

import evidence  # in docs/
import pytest

sys.path.insert(0, str(evidence.ROOT / "tests" / "benchmarks"))
import measuring

PAGE = """# Page

<!-- evidence: launch -->
<!-- end of evidence -->

Below.
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A repository of a page, and of what a benchmark has left in `runs`."""
    monkeypatch.setattr(evidence, "ROOT", tmp_path)
    monkeypatch.setattr(evidence, "FILES", tmp_path / "docs" / "evidence")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "page.md").write_text(PAGE)
    measured = [
        measuring.compared(
            "step",
            "mean step, ms",
            [2.0, 2.0],
            [4.0, 4.0],
            alternative="torchrun",
            at_most=0.4,
        ),
        measuring.single("ranks", "8: launch returns, s", 0.4567, at_most=1),
        measuring.single("slurm", "a real Slurm", "not measured: none is here"),
    ]
    write(tmp_path, measured)
    return tmp_path


def write(place, results):
    measuring.write(place / "runs" / "bench-launch.json", measuring.describe_machine(), results)


def page_of(place):
    return (place / "docs" / "page.md").read_text()


def test_what_was_measured_is_taken_over_and_filled_in(place):
    assert evidence.take(place / "runs") == ["launch"]
    assert [str(path) for path in evidence.fill()] == ["docs/page.md"]
    page = page_of(place)
    row = "| mean step, ms | 2 | torchrun: 4 | 0.5 (0.5 to 0.5) | at most 0.4: **missed** |"
    assert row in page
    assert "| 8: launch returns, s | 0.457 |  |  | at most 1: met |" in page
    assert "not measured: none is here" in page
    assert "load " in page and page.startswith("# Page\n") and page.endswith("\nBelow.\n")
    evidence.check()
    assert evidence.fill() == []


def test_a_figure_that_somebody_types_is_found(place):
    evidence.take(place / "runs")
    evidence.fill()
    (place / "docs" / "page.md").write_text(page_of(place).replace("| 2 |", "| 1 |"))
    with pytest.raises(evidence.Wrong, match=r"docs/page.md is not what docs/evidence says"):
        evidence.check()


def test_so_is_a_newer_measurement_that_no_page_has(place):
    evidence.take(place / "runs")
    evidence.fill()
    write(place, [measuring.single("step", "mean step, ms", 3.0)])
    evidence.take(place / "runs")
    with pytest.raises(evidence.Wrong, match="evidence.py fill"):
        evidence.check()


def test_one_measure_of_a_file_by_the_number_of_ranks(place):
    text = PAGE.replace("launch", "by ranks: launch/ranks")
    evidence.take(place / "runs")
    filled = evidence.filled(text, "page")
    assert "| ranks | launch returns, s |\n|---|---|\n| 8 | 0.457 |" in filled


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (PAGE.replace("launch", "lunch"), r"no docs/evidence/lunch.json \(there: launch\)"),
        (PAGE.replace("launch", "launch/speed"), "has no measure 'speed'"),
        (PAGE.replace("<!-- end of evidence -->", ""), "each table needs both"),
    ],
)
def test_what_a_page_wants_in_vain_is_said(place, text, said):
    evidence.take(place / "runs")
    with pytest.raises(evidence.Wrong, match=said):
        evidence.filled(text, "page")


def test_without_measurements_there_is_nothing_to_take(place, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(evidence.Wrong, match="Measure first: make bench"):
        evidence.take(tmp_path / "empty")


def test_every_file_says_where_and_when_and_a_page_shows_all_of_it():
    shown = "".join(path.read_text() for path in evidence.pages())
    files = sorted(evidence.FILES.glob("*.json"))
    assert files
    for path in files:
        content = json.loads(path.read_text())
        assert {"date", "cores", "processor", "python", "torch", "load"} <= {*content["machine"]}
        for result in content["results"]:
            what = result["what"].rpartition(": ")[2]
            assert what in shown, f"no page shows {what!r} of {path.name}"
