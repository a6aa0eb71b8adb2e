"""Data sets: what ships, and files of ones own that do not fit."""

import shutil
from pathlib import Path

import pandas
import pytest

from ddp_common.errors import Error
from tutorials.kit import contents, datasets


def test_the_digits_and_the_names_that_ship_are_those_that_the_cards_describe():
    folder = datasets.fetch("mnist").path
    images = contents.read_idx(folder / "digits-images-idx3-ubyte.gz")
    labels = contents.read_idx(folder / "digits-labels-idx1-ubyte.gz")
    assert images.shape == (10_000, 28, 28)
    assert labels.bincount().tolist() == [1001, 1127, 991, 1032, 980, 863, 1014, 1070, 944, 978]
    table = pandas.read_csv(datasets.fetch("pets").path, keep_default_na=False)
    assert len(table) == 13_449 and table["count"].sum() == 51_685 and table["name"].is_unique
    assert table["name"].str.fullmatch(r"[a-z\-. ]+").all()  # and nothing personal


# Files of the reader's own

GOOD = "name,count\n" + "".join(f"pet{letter},2\n" for letter in "abcdefghijkl")


def test_names_of_ones_own_are_taken_and_a_tilde_means_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.csv").write_text(GOOD)
    assert datasets.fetch("pets", "~/mine.csv").path == tmp_path / "mine.csv"


@pytest.mark.parametrize(
    "content, said",
    [
        (b"name,count\nbella,2\nluna,3\n", r"holds 2 name\(s\), and 10 are needed"),
        (bytes(range(256)) * 100, "is no table of names"),
        (b"Name;Count\nbella;2\n", "has the columns Name;Count"),
        (GOOD.replace("petb,2", "petb,two").encode(), "has the count 'two' in row 2"),
    ],
    ids=["few", "binary", "columns", "count"],
)
def test_a_file_that_is_no_table_of_names_is_refused_with_the_row(tmp_path, content, said):
    (tmp_path / "mine.csv").write_bytes(content)
    with pytest.raises(Error, match=f"mine.csv.*{said}"):
        datasets.fetch("pets", str(tmp_path / "mine.csv"))


@pytest.mark.parametrize("name, path", [("pets", "folder"), ("mnist", "file"), ("dogs", "file")])
def test_a_folder_for_a_file_or_a_file_for_a_folder_is_refused(tmp_path, name, path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("something")
    with pytest.raises(Error, match="is a f(ile|older).*that is (one|a) f(ile|older)"):
        datasets.fetch(name, str(tmp_path / path))


def test_flights_of_ones_own_that_lack_a_column_are_refused(tmp_path):
    mine = Path(shutil.copytree(datasets.DATA / "flights", tmp_path / "mine"))
    assert datasets.fetch("flights", str(mine)).path == mine
    path = mine / "planes.parquet"
    pandas.read_parquet(path).drop(columns=["tailnum"]).to_parquet(path, index=False)
    with pytest.raises(Error, match="planes.parquet has no column tailnum"):
        datasets.fetch("flights", str(mine))
