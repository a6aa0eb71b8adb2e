"""Downloads from real servers on this machine, also bad ones: whole or nothing.

What is unpacked stays where it belongs.
"""

import contextlib
import hashlib
import http.server
import io
import random
import stat
import subprocess
import sys
import tarfile
import threading
import time
import zipfile
from pathlib import Path

import pytest
import yaml
from PIL import Image

from ddp_common import ImageFolder
from ddp_common.data import datasets, downloads
from ddp_common.errors import Error

CONTENT = random.Random(0).randbytes(700_001)
SIZE = len(CONTENT)
DIGEST = hashlib.sha256(CONTENT).hexdigest()
DRAW = datasets.DATA / "dogs" / "draw.py"
ROOT = Path(__file__).parents[2]


def begin_of(asked):
    """The first byte of a header such as 'bytes=1000-', 0 without one."""
    return int(asked.removeprefix("bytes=").rstrip("-")) if asked else 0


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves `server.content` in the way of which the URL's first part says how."""

    def do_GET(self):
        way, name = self.path.split("/")[1:]
        content = self.server.files.get(name, self.server.content)
        asked = self.headers.get("Range")
        self.server.asked.append((way, asked))
        begin = begin_of(asked) if way != "ignores-range" else 0
        if way == "error" or begin >= len(content):
            return self.send_error(500 if way == "error" else 416)
        if way == "another-file":
            content = content[::-1]
        sent = {"breaks-off": len(content) // 3, "breaks-off-at-once": 0}.get(way, len(content))
        if way in ("ignores-range", "stalls") and not asked:
            sent = len(content) // 2  # the first time
        self.send_response(206 if begin else 200)
        if begin:
            self.send_header(
                "Content-Range",
                f"bytes {begin + (way == 'sends-others')}-{len(content) - 1}/{len(content)}",
            )
        if way not in ("never-ends", "no-length"):
            length = len(content) - begin
            self.send_header(
                "Content-Length",
                {"promises-more": length + 1000, "promises-less": length // 2}.get(way, length),
            )
        self.end_headers()
        with contextlib.suppress(ConnectionError):
            self.wfile.write(content[begin : begin + sent])
            while way == "never-ends":
                self.wfile.write(content)
        if way == "stalls" and not begin:
            time.sleep(30)

    def log_message(self, *args):
        """The test's output stays readable."""


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(downloads, "PAUSE", 0)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        running.daemon_threads, running.block_on_close = True, False
        running.content = CONTENT
        running.files = {}
        running.asked = []
        running.address = f"http://127.0.0.1:{running.server_port}"
        threading.Thread(target=running.serve_forever, args=[0.01], daemon=True).start()
        yield running
        running.shutdown()


def file_at(server, *ways, size=SIZE, sha256=DIGEST):
    urls = [f"{server.address}/{way}/file.bin" for way in ways]
    return {
        "name": "file.bin",
        "url": urls[0],
        "sha256": sha256,
        "size": size,
        "mirrors": [{"url": url} for url in urls[1:]],
    }


def bring(file, folder):
    """Retrieve with a folder for the whole file and one for parts."""
    (folder / "new").mkdir(exist_ok=True)
    return downloads.retrieve(file, folder / "new", folder, progressbar=False)


def left_in(folder):
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("way", ["well", "no-length", "breaks-off"])
def test_a_file_comes_whole_also_when_the_connection_breaks(server, tmp_path, way):
    assert bring(file_at(server, way), tmp_path).read_bytes() == CONTENT
    assert left_in(tmp_path) == ["file.bin"]
    if way == "breaks-off":
        begins = [begin_of(asked) for _, asked in server.asked]
        assert len(begins) == 4 and all(
            later - earlier > len(CONTENT) // 3 - downloads.CHUNK
            for earlier, later in zip(begins, begins[1:])
        )


def test_a_server_without_ranges_starts_again(server, tmp_path):
    assert bring(file_at(server, "ignores-range"), tmp_path).read_bytes() == CONTENT
    assert len(server.asked) == 2 and server.asked[1][1]


def make_data(folder, name):
    """`make data` with the registry in `folder`, as a program."""
    program = (
        "import sys, pathlib; from ddp_common.commands import cli; "
        "from ddp_common.data import datasets; "
        "datasets.DATA = pathlib.Path(sys.argv[1]); cli.main(['data', sys.argv[2]])"
    )
    return subprocess.Popen(
        [sys.executable, "-c", program, folder, name],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_two_programs_do_not_mix_and_a_killed_download_is_gone_on_with(
    server, tmp_path, monkeypatch
):
    register(monkeypatch, tmp_path, full="file.bin", files=[file_at(server, "stalls")])
    first = make_data(tmp_path, "set")
    while (
        not (parts := list((tmp_path / "cache" / "set").glob("*.part")))
        or parts[0].stat().st_size < len(CONTENT) // 4
    ):
        assert first.poll() is None
        time.sleep(0.05)
    with pytest.raises(Error, match="Another program is downloading to .*Wait until it is done"):
        datasets.download("set", progressbar=False)
    first.kill()
    first.communicate()
    assert datasets.download("set", progressbar=False).read_bytes() == CONTENT
    assert len(server.asked) == 2 and begin_of(server.asked[1][1]) >= len(CONTENT) // 4
    assert (
        left_in(tmp_path / "cache") == [".set.lock", "file.bin"]
        and len(list((tmp_path / "cache" / "set").iterdir())) == 1
    )


@pytest.mark.parametrize(
    "rubbish",
    [b"something else", CONTENT[:-5] + b"other", CONTENT, CONTENT + b"more"],
    ids=["start", "full", "whole", "long"],
)
def test_what_an_earlier_download_left_is_verified_with_the_rest(server, tmp_path, rubbish):
    file = file_at(server, "well")
    (tmp_path / f".file.bin-{file['sha256'][:8]}.part").write_bytes(rubbish)
    assert bring(file, tmp_path).read_bytes() == CONTENT
    assert left_in(tmp_path) == ["file.bin"]


@pytest.mark.parametrize(
    "way, said",
    [
        ("error", "500"),
        ("another-file", "hash"),
        ("promises-less", "hash"),
        ("never-ends", "sends more than the 700,001 bytes"),
        ("promises-more", "IncompleteRead"),
        ("breaks-off-at-once", "IncompleteRead|ended prematurely|broken|bytes read"),
    ],
)
def test_what_is_not_the_file_is_refused_and_leaves_nothing_of_use(server, tmp_path, way, said):
    with pytest.raises(Error, match=f"file.bin failed.*{way}.*({said}).*Nothing was changed"):
        bring(file_at(server, way), tmp_path)
    assert not (tmp_path / "new" / "file.bin").exists()
    if way != "promises-more":  # there a part is left to go on with
        assert all(path.stat().st_size == 0 for path in tmp_path.rglob("*") if path.is_file())


def test_other_bytes_than_those_asked_for_are_not_appended(server, tmp_path):
    file = file_at(server, "sends-others")
    (tmp_path / f".file.bin-{file['sha256'][:8]}.part").write_bytes(CONTENT[:1000])
    assert bring(file, tmp_path).read_bytes() == CONTENT


def test_addresses_are_tried_in_turn_and_each_failure_is_told(server, tmp_path):
    assert (
        bring(file_at(server, "error", "another-file", "well"), tmp_path).read_bytes() == CONTENT
    )
    nobody = {"url": "http://127.0.0.1:9/file.bin"}
    file = file_at(server, "error", "another-file") | {
        "mirrors": [{"url": f"{server.address}/another-file/file.bin"}, nobody]
    }
    (tmp_path / "new" / "file.bin").unlink()
    words = (
        r"(?s)/error/file.bin: 500.*/another-file/file.bin: SHA256 hash"
        r".*127.0.0.1:9/file.bin: .*refused.*Check the network"
    )
    with pytest.raises(Error, match=words):
        bring(file, tmp_path)


def test_a_mirror_may_have_another_digest_and_length(server, tmp_path):
    file = file_at(server, "error", sha256="0" * 64, size=5)
    file["mirrors"] = [
        {"url": f"{server.address}/well/file.bin", "md5": hashlib.md5(CONTENT).hexdigest()}
    ]
    assert bring(file, tmp_path).read_bytes() == CONTENT
    file["mirrors"][0]["md5"] = "0" * 32
    (tmp_path / "new" / "file.bin").unlink()
    with pytest.raises(Error, match="MD5 hash"):
        bring(file, tmp_path)


def test_without_a_digest_nothing_is_resumed(server, tmp_path):
    with pytest.raises(Error, match="breaks-off"):
        bring(file_at(server, "breaks-off", sha256=None, size=None), tmp_path)
    assert {asked for _, asked in server.asked} == {None}


def register(monkeypatch, folder, **entry):
    """Make `entry` the data set 'set' of a registry in `folder`."""
    monkeypatch.setattr(datasets, "DATA", folder)
    monkeypatch.delenv("DDP_DATA", raising=False)
    (folder / "datasets.yaml").write_text(
        yaml.safe_dump({"set": {"title": "", "licence": "", **entry}})
    )


def test_a_disk_that_is_full_while_downloading_is_said_and_left_empty(
    server, small_disk, monkeypatch
):
    register(monkeypatch, small_disk, full="file.bin", files=[file_at(server, "well")])
    words = "cache/set cannot be written: No space left on device.*Nothing half-written.*Make room"
    with pytest.raises(Error, match=words):
        datasets.download("set", progressbar=False)
    assert left_in(small_disk) == [".set.lock", "datasets.yaml"]


def test_a_disk_that_is_full_while_unpacking_is_said_and_left_empty(
    server, small_disk, monkeypatch
):
    server.content = zipped(
        ("a/1.bin", bytes(400_000)), ("b/2.bin", bytes(400_000)), compression=zipfile.ZIP_DEFLATED
    )
    register(monkeypatch, small_disk, full="file/a", files=[archive_at(server, "file.zip")])
    with pytest.raises(Error, match="No space left on device.*Make room"):
        datasets.download("set", progressbar=False)
    assert (
        left_in(small_disk) == [".set.lock", "datasets.yaml"]
        and not (small_disk / "cache" / "set" / "file").exists()
    )


def zipped(*members, compression=zipfile.ZIP_STORED):
    """A zip of (name or ZipInfo, content)."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as file:
        for name, content in members:
            file.writestr(name, content)
    return buffer.getvalue()


def tarred(*members, mode="w"):
    """A tar of (name, content), or of (name, attributes of a TarInfo)."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as file:
        for name, content in members:
            about = tarfile.TarInfo(name)
            for key, value in (
                {"size": len(content)} if isinstance(content, bytes) else content
            ).items():
                setattr(about, key, value)
            file.addfile(about, io.BytesIO(content) if isinstance(content, bytes) else None)
    return buffer.getvalue()


def zip_link(name, target):
    about = zipfile.ZipInfo(name)
    about.create_system, about.external_attr = 3, (stat.S_IFLNK | 0o777) << 16
    return about, target


def archive_at(server, name, **unpack):
    return {
        "name": name,
        "url": f"{server.address}/well/{name}",
        "sha256": hashlib.sha256(server.content).hexdigest(),
        "unpack": {"bytes": 10_000_000, "files": 10} | unpack,
    }


@pytest.mark.parametrize(
    "suffix, content",
    [
        (
            ".zip",
            zipped(("set/Images/a/1.jpg", b"one"), ("set/Images/b/2.jpg", b"two"), ("set/", b"")),
        ),
        (
            ".tar",
            tarred(
                ("./set", {"type": tarfile.DIRTYPE}),
                ("./set/Images/a/1.jpg", b"one"),
                ("set/Images/b/2.jpg", b"two"),
            ),
        ),
        (
            ".tgz",
            tarred(("set/Images/a/1.jpg", b"one"), ("set/Images/b/2.jpg", b"two"), mode="w:gz"),
        ),
    ],
    ids=["zip", "tar", "tgz"],
)
def test_an_archive_becomes_a_folder_once(server, tmp_path, monkeypatch, suffix, content):
    server.content = content
    register(
        monkeypatch,
        tmp_path,
        full="photos/set/Images",
        files=[archive_at(server, f"photos{suffix}")],
    )
    path = datasets.download("set", progressbar=False)
    assert (
        path
        == datasets.fetch("set", "full").path
        == tmp_path / "cache" / "set" / "photos" / "set" / "Images"
    )
    assert (path / "a" / "1.jpg").read_bytes() == b"one" and (
        path / "b" / "2.jpg"
    ).read_bytes() == b"two"
    assert [each.name for each in (tmp_path / "cache" / "set").iterdir()] == ["photos"]
    datasets.download("set", progressbar=False)
    assert len(server.asked) == 1


OUTSIDE = "would lie outside"
BAD_ARCHIVES = {
    "zip up": (".zip", zipped(("good", b""), ("../evil", b"")), OUTSIDE),
    "zip up in the middle": (".zip", zipped(("a/../../evil", b"")), OUTSIDE),
    "zip absolute": (".zip", zipped(("/tmp/evil", b"")), OUTSIDE),
    "zip drive": (".zip", zipped(("C:/evil", b"")), OUTSIDE),
    "zip backslash": (".zip", zipped(("..\\evil", b"")), OUTSIDE),
    "zip link": (".zip", zipped(zip_link("link", "/etc"), ("link/evil", b"")), "link or a device"),
    "tar up": (".tar", tarred(("good", b""), ("../evil", b"")), OUTSIDE),
    "tar absolute": (".tar", tarred(("/tmp/evil", b"")), OUTSIDE),
    "tar link": (
        ".tar",
        tarred(("link", {"type": tarfile.SYMTYPE, "linkname": "/etc"}), ("link/evil", b"")),
        "link or a device",
    ),
    "tar hard link": (
        ".tar",
        tarred(("link", {"type": tarfile.LNKTYPE, "linkname": "../../secret"})),
        "link or a device",
    ),
    "tar device": (
        ".tar",
        tarred(("disk", {"type": tarfile.BLKTYPE, "devmajor": 8})),
        "link or a device",
    ),
    "tar pipe": (".tar", tarred(("pipe", {"type": tarfile.FIFOTYPE})), "link or a device"),
    "zip bomb": (
        ".zip",
        zipped(("zeros", bytes(20_000_000)), compression=zipfile.ZIP_DEFLATED),
        "more than it should",
    ),
    "tgz bomb": (".tgz", tarred(("zeros", bytes(20_000_000)), mode="w:gz"), "more than it should"),
    "zip of too many": (
        ".zip",
        zipped(*((f"{n}", b"") for n in range(11))),
        "more than it should",
    ),
    "tar of too many": (
        ".tar",
        tarred(*((f"{n}", b"") for n in range(11))),
        "more than it should",
    ),
    "zip with a wrong sum": (
        ".zip",
        zipped(("a", b"1" * 1000)).replace(b"1" * 1000, b"2" * 1000),
        "damaged.*CRC",
    ),
    "zip with a file that is a folder": (".zip", zipped(("a", b""), ("a/b", b"")), "damaged"),
    "no zip": (".zip", b"no zip", "damaged"),
    "no tar": (".tar", b"no tar", "damaged"),
    "cut tar": (".tar", tarred(("a", b"1" * 10_000))[:5000], "damaged"),
    "cut tgz": (".tgz", tarred(("a", CONTENT), mode="w:gz")[:-1000], "damaged"),
}


@pytest.mark.parametrize("suffix, content, said", BAD_ARCHIVES.values(), ids=BAD_ARCHIVES)
def test_an_archive_that_wants_to_escape_or_to_fill_the_disk_or_is_damaged_leaves_nothing(
    server, tmp_path, monkeypatch, suffix, content, said
):
    server.content = content
    register(monkeypatch, tmp_path, full="photos", files=[archive_at(server, f"photos{suffix}")])
    with pytest.raises(
        Error, match=f"photos{suffix} is not unpacked.*{said}.*Nothing was changed"
    ):
        datasets.download("set", progressbar=False)
    assert (
        left_in(tmp_path) == [".set.lock", "datasets.yaml"]
        and list((tmp_path / "cache" / "set").iterdir()) == []
    )
    assert not Path("/tmp/evil").exists()


def test_an_archive_that_ends_without_a_word_is_damaged(tmp_path, monkeypatch):
    def end(*arguments):
        raise EOFError

    archive = tmp_path / "photos.zip"
    archive.write_bytes(zipped(("a", CONTENT)))
    monkeypatch.setattr(downloads.shutil, "copyfileobj", end)
    with pytest.raises(Error, match=r"photos.zip is not unpacked: it is damaged \(EOFError\)"):
        downloads.unpack(archive, tmp_path / "photos", False, bytes=10**9, files=10)
    assert not (tmp_path / "photos").exists()


@pytest.fixture
def small_drawing(tmp_path, monkeypatch):
    """A registry whose data set is drawn by the real script, two pictures of each breed."""
    register(monkeypatch, tmp_path, shipped="draw.py", full="none")
    (tmp_path / "draw.py").write_text(DRAW.read_text().replace("PER_CLASS = 150", "PER_CLASS = 2"))
    return tmp_path


def test_pictures_are_drawn_once_and_say_that_they_are_drawn(small_drawing):
    drawn = datasets.fetch("set")
    assert (
        drawn.origin == "drawn stand-in, not photographs"
        and drawn.path.parent == small_drawing / "cache" / "set-drawn"
    )
    pictures = sorted(drawn.path.glob("*/*.png"))
    assert len(pictures) == 20
    before = [path.stat().st_mtime_ns for path in pictures]
    assert (
        datasets.fetch("set").path == drawn.path
        and [path.stat().st_mtime_ns for path in pictures] == before
    )


def test_several_may_ask_for_the_drawings_at_once(small_drawing):
    paths = []
    threads = [
        threading.Thread(target=lambda: paths.append(datasets.fetch("set").path)) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(paths) == 3 and len(set(paths)) == 1 and len(list(paths[0].glob("*/*.png"))) == 20


def test_another_version_of_the_script_draws_anew(small_drawing):
    first = datasets.fetch("set").path
    with open(small_drawing / "draw.py", "a") as script:
        script.write("# changed\n")
    assert datasets.fetch("set").path != first


def photo(kind):
    buffer = io.BytesIO()
    Image.new("RGB", (30, 20), (200, 100, 50)).save(buffer, kind)
    return buffer.getvalue()


SMALL = {  # archives of the shape of the real ones: name of a file -> content
    "ucmerced": {
        "UCMerced_LandUse.zip": zipped(
            ("UCMerced_LandUse/readme.txt", b"..."),
            *(
                (f"UCMerced_LandUse/Images/{label}/{label}{number:02d}.tif", photo("TIFF"))
                for label in ("airplane", "beach")
                for number in range(2)
            ),
        )
    },
    "dogs": {
        "images.tar": tarred(
            ("Images", {"type": tarfile.DIRTYPE}),
            *(
                (f"Images/{label}/{label[:9]}_{number}.jpg", photo("JPEG"))
                for label in ("n02085620-Chihuahua", "n02085936-Maltese_dog")
                for number in range(2)
            ),
        ),
        "lists.tar": tarred(("train_list.mat", b"..."), ("test_list.mat", b"...")),
    },
}


@pytest.mark.parametrize("name", SMALL)
def test_make_data_brings_archives_of_the_real_shape_and_they_are_image_folders(
    server, tmp_path, monkeypatch, name
):
    entry = datasets.entry_of(name)
    for file in entry["files"]:
        assert len(file["sha256"]) == 64 and file["unpack"]["bytes"] > file["size"]
        content = server.files[file["name"]] = SMALL[name][file["name"]]
        file |= {
            "url": f"{server.address}/well/{file['name']}",
            "sha256": hashlib.sha256(content).hexdigest(),
            "size": len(content),
        }
        for mirror in file.get("mirrors", ()):
            file["url"] = file["url"].replace("well", "error")
            mirror |= {
                "url": f"{server.address}/well/{file['name']}",
                "md5": hashlib.md5(content).hexdigest(),
            }
    (tmp_path / "datasets.yaml").write_text(yaml.safe_dump({name: entry}))
    out, said = make_data(tmp_path, name).communicate()
    assert "Licence: " in out and 'Use it with SET="data=full"' in out, said
    assert "100%" in said and "unpacking" in said
    monkeypatch.setattr(datasets, "DATA", tmp_path)
    found = datasets.fetch(name, "full")
    images = ImageFolder(found.path, 16)
    assert (
        "full set in" in found.origin
        and images.targets == [0, 0, 1, 1]
        and images[3][0].shape == (3, 16, 16)
    )
    assert (tmp_path / "cache" / "dogs" / "lists" / "test_list.mat").exists() == (name == "dogs")


@pytest.mark.parametrize(
    "content", [b"another file", zipped(("../evil", b""))], ids=["digest", "archive"]
)
def test_make_data_says_in_one_message_what_went_wrong(server, tmp_path, monkeypatch, content):
    server.content = zipped(("../evil", b""))
    register(monkeypatch, tmp_path, full="photos", files=[archive_at(server, "photos.zip")])
    server.content = content
    process = make_data(tmp_path, "set")
    _, said = process.communicate()
    assert (
        process.returncode == 1
        and "Nothing was changed" in said.splitlines()[-1]
        and said.count("Error: ") == 1
        and "Traceback" not in said
    )


def test_a_full_set_that_is_not_here_says_how_to_bring_it(tmp_path, monkeypatch):
    register(monkeypatch, tmp_path, full="photos", files=[], shipped="draw.py")
    words = (
        "full data set set is not here. Run `make data TUTORIAL=set` first, or use data=shipped"
    )
    with pytest.raises(Error, match=words):
        datasets.fetch("set", "full")


def test_a_folder_of_the_readers_own_is_taken_and_a_missing_one_refused(tmp_path):
    assert datasets.fetch("dogs", str(tmp_path)).path == tmp_path
    with pytest.raises(Error, match="nowhere to read dogs from"):
        datasets.fetch("dogs", str(tmp_path / "nowhere"))


def test_a_data_set_at_a_url_is_handed_on_as_it_is():
    found = datasets.fetch("dogs", "s3://bucket/dogs/Images")
    assert found.path == "s3://bucket/dogs/Images" and "your own" in found.origin
