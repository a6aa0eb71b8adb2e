"""Data sets against a real HTTP server on this machine: whole or nothing, verified, only what may be kept."""

import hashlib
import http.server
import os
import threading
from pathlib import Path

import pandas
import pytest
import yaml

from ddp_common import datasets
from ddp_common.errors import Error

REAL_DATA = os.environ.get("DDP_DATA")
CITY = 'License Issue Date,License Number,Animal\'s Name,Species,ZIP Code\nMay 1 2020,777,Bella,Dog,98101\nMay 2 2020,778,BELLA ,Cat,98102\n'


@pytest.fixture
def server(tmp_path):
    """A folder and the address at which it is served."""
    folder = tmp_path / "served"
    folder.mkdir()

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=folder)

        def log_message(self, *args):
            """The test's output stays readable."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield folder, f"http://127.0.0.1:{running.server_port}"
        running.shutdown()


@pytest.fixture
def data(tmp_path, monkeypatch, server):
    """A data folder of our own whose registry points at the server; returns (served folder, cache, registry writer)."""
    folder, address = server
    monkeypatch.setattr(datasets, "DATA", tmp_path / "data")
    monkeypatch.delenv("DDP_DATA", raising=False)
    (tmp_path / "data").mkdir()

    def register(sha256=None):
        entry = datasets_entry() | {"files": [{"url": f"{address}/rows.csv", "name": "rows.csv", "sha256": sha256}]}
        (tmp_path / "data" / "datasets.yaml").write_text(yaml.safe_dump({"pets": entry}))

    register()
    return folder, tmp_path / "data" / "cache" / "pets", register


def datasets_entry():
    return yaml.safe_load((Path(datasets.__file__).parents[1] / "data" / "datasets.yaml").read_text())["pets"]


def test_the_city_list_becomes_names_and_counts_and_nothing_else(data):
    served, cache, _ = data
    (served / "rows.csv").write_text(CITY + "May 3 2020,779,R2-D2,Dog,98103\nMay 4 2020,780,,Dog,98103\nMay 5 2020,781,nan,Dog,98103\n")
    path = datasets.download("pets", progressbar=False)
    assert path.read_text() == "name,count\nbella,2\nnan,1\n"  # Nan is a name
    assert "777" not in path.read_text() and "98101" not in path.read_text()
    assert [each.name for each in cache.iterdir()] == ["names.csv"]
    assert datasets.fetch("pets", "full").path == path


def test_a_checksum_that_differs_leaves_the_earlier_file(data):
    served, cache, register = data
    (served / "rows.csv").write_text(CITY)
    register(hashlib.sha256(CITY.encode()).hexdigest())
    path = datasets.download("pets", progressbar=False)
    before = path.read_bytes()
    (served / "rows.csv").write_text(CITY.replace("Bella", "Mallory"))
    with pytest.raises(Error, match="hash"):
        datasets.download("pets", progressbar=False)
    assert path.read_bytes() == before and [each.name for each in cache.iterdir()] == ["names.csv"]


@pytest.mark.parametrize("content", ["", "name\nbella\n", "Animal's Name\n", "Animal's Name\n123\n", "\x00\xff"])
def test_a_list_that_is_none_is_refused(data, content):
    served, cache, _ = data
    (served / "rows.csv").write_text(content)
    with pytest.raises(Error):
        datasets.download("pets", progressbar=False)
    assert list(cache.iterdir()) == []


def test_no_network_is_said_and_leaves_nothing(data, monkeypatch):
    _, cache, _ = data
    entry = datasets_entry() | {"files": [{"url": "http://127.0.0.1:9/rows.csv", "name": "rows.csv", "sha256": None}]}
    (datasets.DATA / "datasets.yaml").write_text(yaml.safe_dump({"pets": entry}))
    with pytest.raises(Error, match="Check the network"):
        datasets.download("pets", progressbar=False)
    assert list(cache.iterdir()) == []


def test_missing_and_unknown_data_are_named(data):
    with pytest.raises(Error, match="make data TUTORIAL=pets"):
        datasets.fetch("pets", "full")
    with pytest.raises(Error, match="There is no data set 'cats'"):
        datasets.fetch("cats")


def test_shipped_names_are_real_tidy_and_without_personal_data():
    table = pandas.read_csv(datasets.fetch("pets").path, keep_default_na=False)
    assert list(table.columns) == ["name", "count"]
    assert len(table) == 13_449 and table["count"].sum() == 51_685 and table["name"].is_unique
    assert table["name"].str.fullmatch(r"[a-z\-. ]+").all()


@pytest.mark.skipif(not REAL_DATA, reason="DDP_DATA names no folder of real data")
def test_the_real_city_list_of_2019_is_understood(data):
    served, _, _ = data
    (city_list,) = (Path(REAL_DATA) / "pets").glob("Seattle_Pet_Licenses*.csv")
    (served / "rows.csv").write_bytes(city_list.read_bytes())
    table = pandas.read_csv(datasets.download("pets", progressbar=False), keep_default_na=False)
    assert len(table) == 13_288 and table["count"].sum() == 50_645
