"""Data sets against a real HTTP server: whole or nothing, verified, only what may be kept."""

import gzip
import hashlib
import http.server
import os
import shutil
import threading
from pathlib import Path

import pandas
import pytest
import torch
import yaml

from ddp_common.data import datasets
from ddp_common.errors import Error

REAL_DATA = os.environ.get("DDP_DATA")
CITY = (
    "License Issue Date,License Number,Animal's Name,Species,ZIP Code\n"
    "May 1 2020,777,Bella,Dog,98101\n"
    "May 2 2020,778,BELLA ,Cat,98102\n"
)


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
    """A data folder of our own whose registry points at the server.

    Returns (served folder, cache, registry writer).
    """
    folder, address = server
    monkeypatch.setattr(datasets, "DATA", tmp_path / "data")
    monkeypatch.delenv("DDP_DATA", raising=False)
    (tmp_path / "data").mkdir()

    def register(sha256=None):
        entry = datasets_entry() | {
            "files": [{"url": f"{address}/rows.csv", "name": "rows.csv", "sha256": sha256}]
        }
        (tmp_path / "data" / "datasets.yaml").write_text(yaml.safe_dump({"pets": entry}))

    register()
    return folder, tmp_path / "data" / "cache" / "pets", register


def datasets_entry(name="pets"):
    return yaml.safe_load(
        (Path(datasets.__file__).parents[2] / "data" / "datasets.yaml").read_text()
    )[name]


def test_the_city_list_becomes_names_and_counts_and_nothing_else(data):
    served, cache, _ = data
    (served / "rows.csv").write_text(
        CITY
        + "May 3 2020,779,R2-D2,Dog,98103\n"
        + "May 4 2020,780,,Dog,98103\n"
        + "May 5 2020,781,nan,Dog,98103\n"
    )
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


@pytest.mark.parametrize(
    "content", ["", "name\nbella\n", "Animal's Name\n", "Animal's Name\n123\n", "\x00\xff"]
)
def test_a_list_that_is_none_is_refused(data, content):
    served, cache, _ = data
    (served / "rows.csv").write_text(content)
    with pytest.raises(Error):
        datasets.download("pets", progressbar=False)
    assert list(cache.iterdir()) == []


def test_no_network_is_said_and_leaves_nothing(data, monkeypatch):
    _, cache, _ = data
    entry = datasets_entry() | {
        "files": [{"url": "http://127.0.0.1:9/rows.csv", "name": "rows.csv", "sha256": None}]
    }
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


def idx(*shape, kind=8, stated=None):
    """The content of an IDX file whose bytes count upwards."""
    lengths = b"".join(length.to_bytes(4) for length in stated or shape)
    return (
        bytes([0, 0, kind, len(shape)])
        + lengths
        + bytes(number % 256 for number in range(torch.Size(shape).numel()))
    )


@pytest.fixture
def mnist(tmp_path, monkeypatch, server):
    """The registry's entry of mnist with small files on the server.

    Returns (served folder, cache).
    """
    folder, address = server
    monkeypatch.setattr(datasets, "DATA", tmp_path / "data")
    monkeypatch.delenv("DDP_DATA", raising=False)
    entry = datasets_entry("mnist")
    for file in entry["files"]:
        content = gzip.compress(idx(3, 28, 28) if "images" in file["name"] else idx(3), mtime=0)
        (folder / file["name"]).write_bytes(content)
        file.update(url=f"{address}/{file['name']}", sha256=hashlib.sha256(content).hexdigest())
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "datasets.yaml").write_text(yaml.safe_dump({"mnist": entry}))
    return folder, tmp_path / "data" / "cache" / "mnist"


def test_the_full_set_of_digits_is_a_folder_of_four_verified_files(mnist):
    _, cache = mnist
    with pytest.raises(Error, match="make data TUTORIAL=mnist"):
        datasets.fetch("mnist", "full")
    assert datasets.download("mnist", progressbar=False) == cache
    assert sorted(path.name for path in cache.iterdir()) == sorted(datasets_entry("mnist")["full"])
    assert datasets.fetch("mnist", "full").path == cache
    assert datasets.read_idx(cache / "t10k-images-idx3-ubyte.gz").shape == (3, 28, 28)


def test_what_is_there_and_verifies_is_not_fetched_again(mnist):
    served, cache = mnist
    datasets.download("mnist", progressbar=False)
    for path in served.iterdir():
        path.unlink()
    assert datasets.download("mnist", progressbar=False) == cache
    (cache / "t10k-labels-idx1-ubyte.gz").write_bytes(b"damaged")
    with pytest.raises(Error, match="t10k-labels"):  # it would be fetched, and is not there
        datasets.download("mnist", progressbar=False)


def test_digits_with_a_wrong_checksum_are_refused_and_leave_nothing(mnist):
    served, cache = mnist
    (served / "t10k-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(4, 28, 28)))
    with pytest.raises(Error, match="t10k-images.*hash"):
        datasets.download("mnist", progressbar=False)
    assert list(cache.iterdir()) == []


def test_an_incomplete_full_set_is_not_taken(mnist):
    _, cache = mnist
    datasets.download("mnist", progressbar=False)
    (cache / "train-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(Error, match="make data TUTORIAL=mnist"):
        datasets.fetch("mnist", "full")


def test_idx_files_are_read_as_bytes_of_the_stated_shape(tmp_path):
    (tmp_path / "a.gz").write_bytes(gzip.compress(idx(2, 3, 4)))
    tensor = datasets.read_idx(tmp_path / "a.gz")
    assert tensor.dtype == torch.uint8 and torch.equal(
        tensor, torch.arange(24, dtype=torch.uint8).reshape(2, 3, 4)
    )


@pytest.mark.parametrize(
    "content, said",
    [
        (b"no gzip at all", "Not a gzipped file"),
        (b"", "begins with nothing"),
        (gzip.compress(idx(2, 3))[:-12], "ended before the end-of-stream"),
        (gzip.compress(idx(2, 3))[:-8] + bytes(8), "CRC check failed"),
        (gzip.compress(b""), "begins with nothing"),
        (gzip.compress(b"\x00\x00\x08"), "begins with 00 00 08"),
        (gzip.compress(b"\x89PNG and so on"), "begins with 89 50 4e 47"),
        (gzip.compress(idx(2, 3, kind=13)), "begins with 00 00 0d 02"),
        (gzip.compress(idx(2, 3)[:10]), "begins with 00 00 08 02"),
        (gzip.compress(idx(2, 3)[:-1]), "2 x 3 = 6 bytes and holds 5"),
        (gzip.compress(idx(2, 3) + b"x"), "2 x 3 = 6 bytes and holds 7"),
        (gzip.compress(idx(2, 3, stated=(3, 3))), "3 x 3 = 9 bytes and holds 6"),
        (gzip.compress(idx(0, 3)), "0 x 3 = 0 bytes and holds 0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "file",
)  # a compressed file holds the time
def test_a_damaged_idx_file_is_refused_with_its_name_the_reason_and_the_remedy(
    tmp_path, content, said
):
    (tmp_path / "digits.gz").write_bytes(content)
    with pytest.raises(Error) as refused:
        datasets.read_idx(tmp_path / "digits.gz")
    assert (
        "digits.gz" in str(refused.value)
        and said in str(refused.value)
        and "make data" in str(refused.value)
    )


def test_a_missing_idx_file_is_named(tmp_path):
    with pytest.raises(Error, match="nowhere.gz cannot be read: No such file"):
        datasets.read_idx(tmp_path / "nowhere.gz")


def digits_of(folder, part):
    return (
        datasets.read_idx(folder / f"{part}-images-idx3-ubyte.gz"),
        datasets.read_idx(folder / f"{part}-labels-idx1-ubyte.gz"),
    )


def test_shipped_digits_are_those_that_the_card_describes():
    images, labels = digits_of(datasets.fetch("mnist").path, "digits")
    assert images.shape == (10_000, 28, 28)
    assert labels.bincount().tolist() == [1001, 1127, 991, 1032, 980, 863, 1014, 1070, 944, 978]
    digest = hashlib.sha256(
        images.numpy().tobytes()
    ).hexdigest()  # of the content: compressed, it depends on the version of zlib
    assert digest == "01a649acf97bc53c9bbc1a378d3087f5a8f67ccf25746dab384bcbe11feed658"


@pytest.mark.skipif(not REAL_DATA, reason="DDP_DATA names no folder of real data")
def test_shipped_digits_are_the_first_of_the_real_training_set_and_none_of_the_test_set():
    full = datasets.fetch("mnist", "full").path
    shipped = digits_of(datasets.fetch("mnist").path, "digits")
    training = digits_of(full, "train")
    test = digits_of(full, "t10k")

    def with_label(images, labels):
        pairs = zip(images.numpy(), labels.tolist())
        return {image.tobytes() + bytes([label]) for image, label in pairs}

    assert with_label(*shipped) == with_label(training[0][:10_000], training[1][:10_000])
    assert not with_label(*shipped) & with_label(*test)


GOOD = "name,count\n" + "".join(
    f"pet{'abcdefghijklmnopqrstuvwxyz'[number]},{number + 1}\n" for number in range(12)
)


@pytest.mark.parametrize(
    "content, said",
    [
        (b"name,count\nbella,2\nluna,3\n", "holds 2 name(s), and 10 are needed"),
        (b"name,count\n", "holds 0 name(s)"),
        (b"\n\n", "is no table of names: No columns to parse"),
        (bytes(range(256)) * 100, "is no table of names"),
        (b"\x89PNG\r\n\x1a\n" + bytes(1000), "is no table of names"),
        (b"Name;Count\nbella;2\n", "has the columns Name;Count"),
        (GOOD.replace("name,count", "count,name").encode(), "has the columns count, name"),
        (GOOD.replace("peta", "Bella").encode(), "has the name 'Bella' in row 1"),
        (GOOD.replace("petc", "").encode(), "has the name '' in row 3"),
        (GOOD.replace("petb", "b" * 5_000_000).encode(), "in row 2"),
        (GOOD.replace("petb,2", "petb,two").encode(), "has the count 'two' in row 2"),
        (GOOD.replace("petb,2", "petb,-2").encode(), "has the count '-2' in row 2"),
        (GOOD.replace("petb,2", "petb,").encode(), "has the count '' in row 2"),
        (GOOD.replace("petb,2", "petb,2,3").encode(), "is no table of names"),
    ],
    ids=lambda value: value if isinstance(value, str) else "file",
)
def test_a_file_that_is_no_table_of_names_is_refused_with_the_row_and_the_format(
    tmp_path, content, said
):
    (tmp_path / "mine.csv").write_bytes(content)
    with pytest.raises(Error) as refused:
        datasets.fetch("pets", str(tmp_path / "mine.csv"))
    assert (
        said in str(refused.value)
        and "mine.csv" in str(refused.value)
        and len(str(refused.value)) < 1000
    )


def test_a_good_file_of_names_is_taken(tmp_path):
    (tmp_path / "mine.csv").write_text(GOOD)
    assert datasets.fetch("pets", str(tmp_path / "mine.csv")).path == tmp_path / "mine.csv"


def test_a_tilde_means_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.csv").write_text(GOOD)
    assert datasets.fetch("pets", "~/mine.csv").path == tmp_path / "mine.csv"


@pytest.mark.parametrize(
    "name, path",
    [("pets", "folder"), ("pets", ""), ("mnist", "file"), ("dogs", "file"), ("ucmerced", "file")]
    + [("flights", "file")],
)
def test_a_folder_for_a_file_or_a_file_for_a_folder_is_refused(tmp_path, monkeypatch, name, path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("something")
    with pytest.raises(Error, match="is a f(ile|older).*that is (one|a) f(ile|older)"):
        datasets.fetch(name, path)


# Flights


@pytest.fixture
def own_flights(tmp_path):
    """A folder of somebody's own: a copy of what ships."""
    return Path(shutil.copytree(datasets.DATA / "flights", tmp_path / "mine"))


def rewrite(path, change):
    """Write a Parquet file anew, after `change(table)`, which returns the new table."""
    change(pandas.read_parquet(path)).to_parquet(path, index=False)


@pytest.mark.parametrize("name", datasets.FLIGHTS_TABLES)
def test_the_flights_that_ship_have_the_columns_that_are_asked_for(name):
    path = datasets.fetch("flights").path / f"{name}.parquet"
    assert set(pandas.read_parquet(path).columns) == set(datasets.FLIGHTS_TABLES[name])


def test_what_ships_whole_is_also_the_full_set():
    assert datasets.fetch("flights", "full") == datasets.fetch("flights", "shipped")
    assert datasets.download("flights") == datasets.DATA / "flights"


def test_every_flight_has_its_month_in_one_row_group_and_no_sign_of_its_delay_in_the_order():
    flights = pandas.read_parquet(datasets.DATA / "flights" / "flights.parquet")
    assert len(flights) == 336_776 and flights["month"].is_monotonic_increasing
    scheduled = flights[["month", "day", "sched_dep_time"]]
    assert (scheduled.sort_values(list(scheduled), kind="stable").index == flights.index).all()


def test_a_good_folder_of_flights_is_taken(own_flights):
    assert datasets.fetch("flights", str(own_flights)).path == own_flights


@pytest.mark.parametrize(
    "name, change, says",
    [
        ("flights", lambda t: t.drop(columns=["dest"]), "has no column dest"),
        ("flights", lambda t: t.astype({"carrier": "category"}).head(0), "has no rows"),
        ("weather", lambda t: t.assign(temp=t["temp"].astype(str)), "column temp .* be a number"),
        ("planes", lambda t: t.assign(tailnum=range(len(t))), "column tailnum .* be a text"),
        (
            "flights",
            lambda t: t.assign(time_hour=t["time_hour"].dt.tz_localize(None)),
            "be a time with a time zone",
        ),
    ],
    ids=["no column", "no rows", "text for numbers", "numbers for text", "no time zone"],
)
def test_flights_of_ones_own_that_are_not_as_they_must_be_are_refused(
    own_flights, name, change, says
):
    rewrite(own_flights / f"{name}.parquet", change)
    with pytest.raises(Error, match=says) as refused:
        datasets.fetch("flights", str(own_flights))
    assert f"{name}.parquet" in str(refused.value)


def test_a_table_of_flights_that_is_missing_or_no_parquet_is_refused(own_flights):
    (own_flights / "planes.parquet").write_text("tailnum,year\n")
    with pytest.raises(Error, match="planes.parquet is no table of planes"):
        datasets.fetch("flights", str(own_flights))
    (own_flights / "planes.parquet").unlink()
    with pytest.raises(Error, match="There is no table of planes, .*planes.parquet"):
        datasets.fetch("flights", str(own_flights))
