"""The page on tables that Dask prepared: its blocks run, and its tests are there."""

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PAGE = (REPOSITORY / "docs" / "dask-data.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.M | re.S)


@pytest.fixture(scope="module")
def names(client, tmp_path_factory):
    """What the blocks have defined, run one after the other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RUNS", str(tmp_path_factory.mktemp("page")))
        defined = {"__name__": "__main__", "client": client}
        for code in BLOCKS:
            exec(compile(code, "docs/dask-data.md", "exec"), defined)
    return defined


def test_the_network_learns_the_table(names):
    compared = names["compared"]
    spread = (compared.minutes - compared.minutes.mean()).abs().mean()
    assert names["minutes_wrong"] < 0.6 * spread


def test_predictions_are_joined_to_the_table_that_they_are_of(names):
    compared = names["compared"]
    assert len(compared) == 500
    wrong = (compared.minutes - compared.predicted).abs().mean()
    assert wrong == pytest.approx(names["minutes_wrong"], rel=1e-4)


def test_every_test_that_the_page_names_exists():
    tests = (Path(__file__).parent / "test_tables.py").read_text()
    named = re.findall(r"`(test_\w+)`", PAGE)
    assert len(named) == 8
    assert [name for name in named if f"def {name}(" not in tests] == []
