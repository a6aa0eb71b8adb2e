"""Data sets: what ships, what a download becomes, and files of ones own that do not fit."""

import contextlib
import functools
import gzip
import hashlib
import http.server
import shutil
import threading
from pathlib import Path

import pandas
import pytest
import torch
import yaml

from ddp_common.data import datasets
from ddp_common.errors import Error

CITY = (
    "License Issue Date,License Number,Animal's Name,Species,ZIP Code\n"
    "May 1 2020,777,Bella,Dog,98101\nMay 2 2020,778,BELLA ,Cat,98102\n"
    "May 3 2020,779,R2-D2,Dog,98103\nMay 4 2020,780,,Dog,98103\nMay 5 2020,781,nan,Dog,98103\n"
)


class Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        """The test's output stays readable."""


@pytest.fixture
def served(tmp_path, monkeypatch):
    """Serve the files of a data set, from a registry of our own. Returns their folder."""
    served = tmp_path / "served"
    served.mkdir()
    (tmp_path / "data").mkdir()
    handler = functools.partial(Handler, directory=served)
    with contextlib.ExitStack() as stack:

        def serve(name, contents):
            entry = datasets.entry_of(name)
            for file, content in zip(entry["files"], contents, strict=True):
                (served / file["name"]).write_bytes(content)
                file["url"] = f"http://127.0.0.1:{running.server_port}/{file['name']}"
                file["sha256"] = hashlib.sha256(content).hexdigest()
                file.pop("mirrors", None)
            monkeypatch.setattr(datasets, "DATA", tmp_path / "data")
            monkeypatch.delenv("DDP_DATA", raising=False)
            (tmp_path / "data" / "datasets.yaml").write_text(yaml.safe_dump({name: entry}))
            return served

        running = stack.enter_context(http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler))
        threading.Thread(target=running.serve_forever, daemon=True).start()
        stack.callback(running.shutdown)
        yield serve


def test_the_city_list_becomes_names_and_counts_and_nothing_else(served):
    files = served("pets", [CITY.encode()])
    with pytest.raises(Error, match="make data TUTORIAL=pets"):
        datasets.fetch("pets", "full")
    path = datasets.download("pets", progressbar=False)
    assert path.read_text() == "name,count\nbella,2\nnan,1\n"  # Nan is a name
    assert [each.name for each in path.parent.iterdir()] == ["names.csv"]
    assert datasets.fetch("pets", "full").path == path

    before = path.read_bytes()
    (files / datasets.entry_of("pets")["files"][0]["name"]).write_text("another list")
    with pytest.raises(Error, match="hash"):
        datasets.download("pets", progressbar=False)
    assert path.read_bytes() == before


def test_a_list_that_is_none_is_refused(served):
    served("pets", [b"Animal's Name\n123\n"])
    with pytest.raises(Error):
        datasets.download("pets", progressbar=False)


def test_an_unknown_data_set_is_named():
    with pytest.raises(Error, match="There is no data set 'cats'"):
        datasets.fetch("cats")


def idx(*shape, kind=8):
    """The content of an IDX file whose bytes count upwards."""
    lengths = b"".join(length.to_bytes(4) for length in shape)
    content = bytes(number % 256 for number in range(torch.Size(shape).numel()))
    return bytes([0, 0, kind, len(shape)]) + lengths + content


def test_the_full_set_of_digits_is_a_folder_of_four_verified_files(served):
    names = [file["name"] for file in datasets.entry_of("mnist")["files"]]
    contents = [idx(3, 28, 28) if "images" in name else idx(3) for name in names]
    served("mnist", map(gzip.compress, contents))
    folder = datasets.download("mnist", progressbar=False)
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)
    assert datasets.fetch("mnist", "full").path == folder
    pixels = datasets.read_idx(folder / "t10k-images-idx3-ubyte.gz")
    assert pixels.dtype == torch.uint8 and pixels.shape == (3, 28, 28)
    assert pixels[0, 1, 2] == 30
    (folder / "train-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(Error, match="make data TUTORIAL=mnist"):
        datasets.fetch("mnist", "full")


@pytest.mark.parametrize(
    "content, said",
    [
        (b"no gzip at all", "Not a gzipped file"),
        (gzip.compress(idx(2, 3))[:-12], "ended before the end-of-stream"),
        (gzip.compress(b"\x89PNG and so on"), "begins with 89 50 4e 47"),
        (gzip.compress(idx(2, 3)[:-1]), "2 x 3 = 6 bytes and holds 5"),
    ],
    ids=["no_gzip", "cut", "other_content", "too_short"],
)
def test_a_damaged_file_of_digits_is_refused_with_the_reason_and_the_remedy(
    tmp_path, content, said
):
    (tmp_path / "digits.gz").write_bytes(content)
    with pytest.raises(Error, match=f"(?s)digits.gz.*{said}.*make data"):
        datasets.read_idx(tmp_path / "digits.gz")


def test_the_digits_and_the_names_that_ship_are_those_that_the_cards_describe():
    folder = datasets.fetch("mnist").path
    images = datasets.read_idx(folder / "digits-images-idx3-ubyte.gz")
    labels = datasets.read_idx(folder / "digits-labels-idx1-ubyte.gz")
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


@pytest.mark.parametrize(
    "name, change, said",
    [
        ("planes", lambda table: table.drop(columns=["tailnum"]), "has no column tailnum"),
        ("weather", lambda table: table.assign(temp="warm"), "column temp .* be a number"),
    ],
    ids=["no column", "text for numbers"],
)
def test_flights_of_ones_own_that_do_not_fit_are_refused(tmp_path, name, change, said):
    mine = Path(shutil.copytree(datasets.DATA / "flights", tmp_path / "mine"))
    assert datasets.fetch("flights", str(mine)).path == mine
    path = mine / f"{name}.parquet"
    change(pandas.read_parquet(path)).to_parquet(path, index=False)
    with pytest.raises(Error, match=said) as refused:
        datasets.fetch("flights", str(mine))
    assert path.name in str(refused.value)
