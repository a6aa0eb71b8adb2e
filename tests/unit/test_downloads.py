"""Downloads from a real server on this machine, also a bad one: whole or nothing."""

import gzip
import hashlib
import http.server
import io
import math
import random
import tarfile
import threading
import zipfile

import pytest
import torch
import yaml
from click.testing import CliRunner
from PIL import Image

from ddp_common import ImageFolder
from ddp_common.errors import Error
from tutorials.kit import cli, datasets, read_idx

CONTENT = random.Random(0).randbytes(700_001)


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves `server.files` in the way of which the URL's first part says how."""

    def do_GET(self):
        way, name = self.path.split("/")[1:]
        content = self.server.files[name]
        self.server.asked.append(name)
        if way == "error":
            return self.send_error(500)
        if way == "another-file":
            content = content[::-1]
        sent = len(content) // 3 if way == "breaks-off" else len(content)
        self.send_response(200)
        self.send_header("Content-Length", len(content))
        self.end_headers()
        self.wfile.write(content[:sent])

    def log_message(self, *args):
        """The test's output stays readable."""


@pytest.fixture
def server():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        running.daemon_threads, running.block_on_close = True, False
        running.files, running.asked = {}, []
        running.address = f"http://127.0.0.1:{running.server_port}"
        threading.Thread(target=running.serve_forever, args=[0.01], daemon=True).start()
        yield running
        running.shutdown()


@pytest.fixture
def registry(tmp_path, monkeypatch):
    """Write the entry of a data set into a registry of our own. Returns the cache of 'set'."""

    def register(folder=tmp_path, name="set", **entry):
        monkeypatch.setattr(datasets, "DATA", folder)
        monkeypatch.delenv("DDP_DATA", raising=False)
        entries = {name: {"title": "", "licence": "", **entry}}
        (folder / "datasets.yaml").write_text(yaml.safe_dump(entries))
        return folder / "cache" / name

    return register


def file_at(server, way, name="file.bin", content=CONTENT, **others):
    server.files[name] = content
    return {
        "name": name,
        "url": f"{server.address}/{way}/{name}",
        "sha256": hashlib.sha256(content).hexdigest(),
        **others,
    }


def left_in(folder):
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_a_file_comes_whole_and_once(server, registry):
    cache = registry(full="file.bin", files=[file_at(server, "well")])
    assert datasets.download("set", progressbar=False).read_bytes() == CONTENT
    assert datasets.fetch("set", "full").path == cache / "file.bin"
    datasets.download("set", progressbar=False)
    assert server.asked == ["file.bin"] and left_in(cache) == ["file.bin"]


@pytest.mark.parametrize(
    "way, said", [("error", "500"), ("another-file", "hash"), ("breaks-off", "more expected")]
)
def test_what_is_not_the_file_is_refused_and_not_kept(server, registry, way, said):
    cache = registry(full="file.bin", files=[file_at(server, way)])
    with pytest.raises(Error, match=f"file.bin failed.*{way}.*{said}.*Nothing was changed"):
        datasets.download("set", progressbar=False)
    assert list(cache.iterdir()) == []


def test_where_an_address_fails_the_next_is_taken_with_its_own_digest(server, registry):
    file = file_at(server, "error", sha256="0" * 64)
    md5 = hashlib.md5(CONTENT).hexdigest()
    file["mirrors"] = [{"url": f"{server.address}/well/file.bin", "md5": md5}]
    registry(full="file.bin", files=[file])
    assert datasets.download("set", progressbar=False).read_bytes() == CONTENT


def test_a_full_disk_is_said_and_left_empty(server, registry, small_disk):
    registry(small_disk, full="file.bin", files=[file_at(server, "well")])
    words = "cache/set cannot be written: No space left on device.*Make room"
    with pytest.raises(Error, match=words):
        datasets.download("set", progressbar=False)
    assert left_in(small_disk) == [".set.lock", "datasets.yaml"]


# What becomes of the real files


def served(server, registry, name, contents):
    """Register the data set `name` as it is, but for what its files hold. Returns its cache."""
    entry = datasets.entry_of(name)
    for file, content in zip(entry["files"], contents, strict=True):
        file.pop("mirrors", None)
        file |= file_at(server, "well", file["name"], content)
    return registry(name=name, **entry)


CITY = (
    "License Issue Date,License Number,Animal's Name,Species,ZIP Code\n"
    "May 1 2020,777,Bella,Dog,98101\nMay 2 2020,778,BELLA ,Cat,98102\n"
    "May 3 2020,779,R2-D2,Dog,98103\nMay 4 2020,780,,Dog,98103\nMay 5 2020,781,nan,Dog,98103\n"
)


def test_the_city_list_becomes_names_and_counts_and_nothing_else(server, registry):
    cache = served(server, registry, "pets", [CITY.encode()])
    with pytest.raises(Error, match="make data TUTORIAL=pets"):
        datasets.fetch("pets", "full")
    path = datasets.download("pets", progressbar=False)
    assert path.read_text() == "name,count\nbella,2\nnan,1\n"  # Nan is a name
    assert left_in(cache) == ["names.csv"]
    assert datasets.fetch("pets", "full").path == path

    server.files = dict.fromkeys(server.files, b"another list")
    with pytest.raises(Error, match="hash"):
        datasets.download("pets", progressbar=False)
    assert path.read_text() == "name,count\nbella,2\nnan,1\n"


def test_a_list_that_is_none_is_refused(server, registry):
    served(server, registry, "pets", [b"Animal's Name\n123\n"])
    with pytest.raises(Error):
        datasets.download("pets", progressbar=False)


def idx(*shape, kind=8):
    """The content of an IDX file whose bytes count upwards."""
    lengths = b"".join(length.to_bytes(4) for length in shape)
    content = bytes(number % 256 for number in range(math.prod(shape)))
    return bytes([0, 0, kind, len(shape)]) + lengths + content


def test_the_full_set_of_digits_is_a_folder_of_four_verified_files(server, registry):
    names = [file["name"] for file in datasets.entry_of("mnist")["files"]]
    contents = [idx(3, 28, 28) if "images" in name else idx(3) for name in names]
    served(server, registry, "mnist", map(gzip.compress, contents))
    folder = datasets.download("mnist", progressbar=False)
    assert left_in(folder) == sorted(names)
    assert datasets.fetch("mnist", "full").path == folder
    pixels = read_idx(folder / "t10k-images-idx3-ubyte.gz")
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
        read_idx(tmp_path / "digits.gz")


# Archives


def zipped(*members):
    """A zip of (name, content)."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for name, content in members:
            file.writestr(name, content)
    return buffer.getvalue()


def tarred(*members, mode="w"):
    """A tar of (name, content)."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as file:
        for name, content in members:
            about = tarfile.TarInfo(name)
            about.size = len(content)
            file.addfile(about, io.BytesIO(content))
    return buffer.getvalue()


def photos(server, suffix, content):
    return file_at(server, "well", f"photos{suffix}", content, unpack=True)


TWO = [("set/a/1.jpg", b"one"), ("set/b/2.jpg", b"two")]


@pytest.mark.parametrize(
    "suffix, content", [(".zip", zipped(*TWO)), (".tgz", tarred(*TWO, mode="w:gz"))]
)
def test_an_archive_becomes_a_folder_once(server, registry, suffix, content):
    cache = registry(full="photos/set", files=[photos(server, suffix, content)])
    path = datasets.download("set", progressbar=False)
    assert path == datasets.fetch("set", "full").path == cache / "photos" / "set"
    assert (path / "a" / "1.jpg").read_bytes() == b"one"
    assert (path / "b" / "2.jpg").read_bytes() == b"two"
    datasets.download("set", progressbar=False)
    assert len(server.asked) == 1


def test_an_archive_is_unpacked_only_where_its_digest_is_known():
    for name, entry in datasets.registry().items():
        for file in entry.get("files", ()):
            digests = [file["sha256"]]
            for mirror in file.get("mirrors", ()):
                digests.append(mirror.get("md5", mirror.get("sha256", file["sha256"])))
            assert all(digests) or not file.get("unpack"), name


def jpeg():
    buffer = io.BytesIO()
    Image.new("RGB", (30, 20), (200, 100, 50)).save(buffer, "JPEG")
    return buffer.getvalue()


def test_make_data_brings_archives_of_the_shape_of_the_real_dogs(server, registry):
    names = [f"Images/n02085620-Chihuahua/{n}.jpg" for n in range(2)]
    names += [f"Images/n02085936-Maltese_dog/{n}.jpg" for n in range(2)]
    images = tarred(*((name, jpeg()) for name in names))
    lists = tarred(("train_list.mat", b"..."), ("test_list.mat", b"..."))
    cache = served(server, registry, "dogs", [images, lists])
    done = CliRunner().invoke(cli.main, ["data", "dogs"])
    assert done.exit_code == 0, done.output
    assert "Licence: " in done.output and 'Use it with SET="data=full"' in done.output
    found = ImageFolder(datasets.fetch("dogs", "full").path, 16)
    assert found.targets == [0, 0, 1, 1] and found[3][0].shape == (3, 16, 16)
    assert (cache / "lists" / "test_list.mat").exists()
