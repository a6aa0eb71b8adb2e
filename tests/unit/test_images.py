"""Folders of images on a disk and in object storage (a real S3 server).

The right pixels, once kept never wrong, bad input named.
"""

import io
import multiprocessing
import os
import pickle
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from s3_here import s3_server
from s3fs import S3FileSystem
from torch.utils.data import DataLoader

from ddp_common import Error, ImageFolder
from ddp_common.data import images
from ddp_common.data.bucket import SignedReader

ROOT = Path(__file__).parents[2]
SIZE = 16
COLOURS = {"cat": (200, 30, 40), "dog": (20, 180, 60), "emu": (30, 60, 220)}


def noise(*seed, size=SIZE):
    return np.random.default_rng(seed).integers(0, 256, (size, size, 3), dtype=np.uint8)


@pytest.fixture
def folder(tmp_path):
    """Four PNGs of noise, of the size at which they are read, in each of three classes."""
    for label in COLOURS:
        (tmp_path / "set" / label).mkdir(parents=True)
        for number in range(4):
            Image.fromarray(noise(ord(label[0]), number)).save(
                tmp_path / "set" / label / f"{number}.png"
            )
    return tmp_path / "set"


@pytest.fixture
def bucket(s3, folder):
    """The URL of a prefix that holds the same images."""
    s3.mkdir("photos")
    s3.put(f"{folder}/", "s3://photos/set/", recursive=True)
    return "s3://photos/set"


def expected(folder):
    return torch.stack(
        [
            torch.from_numpy(np.asarray(Image.open(path)).copy()).permute(2, 0, 1)
            for path in sorted(folder.glob("*/*.png"))
        ]
    )


def everything(dataset, **options):
    """All images and all labels of `dataset`, by a `DataLoader`."""
    batches = list(DataLoader(dataset, batch_size=5, **options))
    return torch.cat([batch for batch, _ in batches]), torch.cat(
        [labels for _, labels in batches]
    ).tolist()


def test_a_class_is_a_folder_and_its_number_the_place_of_its_name(folder):
    dataset = ImageFolder(folder, SIZE)
    assert (
        dataset.classes == ["cat", "dog", "emu"]
        and dataset.targets == [0] * 4 + [1] * 4 + [2] * 4
        and len(dataset) == 12
    )
    pixels, labels = everything(dataset)
    assert (
        pixels.dtype == torch.uint8
        and torch.equal(pixels, expected(folder))
        and labels == dataset.targets
    )
    assert torch.equal(dataset[7][0], pixels[7]) and dataset[7][1] == 1
    assert [label for _, label in dataset.__getitems__([8, 0, 8])] == [2, 0, 2]


def test_only_image_files_in_a_class_count_and_they_may_lie_deeper(folder):
    (folder / "cat" / "young").mkdir()
    (folder / "cat" / "young" / "a.JPG").write_bytes((folder / "cat" / "0.png").read_bytes())
    for name in ("cat/notes.txt", "cat/.hidden.png", "top.png"):
        (folder / name).write_bytes(b"not to be read")
    (folder / "cat" / "gone.png").symlink_to("nowhere")
    (folder / "fox").symlink_to(folder / "emu")
    dataset = ImageFolder(folder, SIZE)
    assert (
        dataset.classes == ["cat", "dog", "emu", "fox"]
        and dataset.targets.count(0) == 5
        and len(everything(dataset)[1]) == 17
    )


@pytest.mark.parametrize(
    "kind, suffix",
    [
        ("RGB", "jpg"),
        ("RGB", "tif"),
        ("L", "png"),
        ("RGBA", "png"),
        ("P", "gif"),
        ("CMYK", "jpg"),
        ("1", "bmp"),
    ],
)
def test_every_kind_of_image_becomes_three_channels_of_bytes(folder, kind, suffix):
    Image.new("RGB", (40, 30), (255, 255, 255)).convert(kind).save(folder / "cat" / f"!.{suffix}")
    pixels, _ = ImageFolder(folder, SIZE)[0]
    assert pixels.shape == (3, SIZE, SIZE) and pixels.float().mean() > 250


@pytest.mark.parametrize("kind", [np.uint16, np.int32, np.float32], ids=str)
def test_an_image_of_more_than_8_bits_is_not_cut_off_but_refused(folder, kind):
    ramp = np.linspace(0, 60_000, 1200).astype(kind).reshape(30, 40)
    Image.fromarray(ramp).save(folder / "cat" / "!.tif")
    with pytest.raises(Error, match="!.tif is no image that can be read: .*more than 8 bits"):
        ImageFolder(folder, SIZE)[0]


def test_an_image_is_scaled_to_its_short_side_cropped_in_the_middle_and_turned_upright(folder):
    wide = np.zeros((30, 90, 3), np.uint8)
    wide[:, 30:60] = 255  # the middle third is white
    upright = Image.Exif()
    upright[0x0112] = 6  # held sideways
    sides = np.zeros((30, 30, 3), np.uint8)
    sides[:, 15:] = 255
    Image.fromarray(wide).save(folder / "cat" / "!wide.png")
    Image.fromarray(sides).save(folder / "cat" / "!turned.jpg", exif=upright)
    dataset = ImageFolder(folder, SIZE)
    assert dataset[1][0].min() > 230
    assert (
        dataset[0][0][:, :6].max() < 20 and dataset[0][0][:, 10:].min() > 235
    )  # what was right is below


def test_a_jpeg_that_is_decoded_at_a_smaller_scale_looks_the_same(folder):
    large = Image.fromarray(noise(1)).resize((512, 512), Image.Resampling.BICUBIC)
    large.save(folder / "cat" / "!.jpg", quality=95)
    whole = (
        np.asarray(large.resize((SIZE, SIZE), Image.Resampling.BICUBIC))
        .transpose(2, 0, 1)
        .astype(int)
    )
    assert abs(ImageFolder(folder, SIZE)[0][0].numpy() - whole).mean() < 6


def write_class(folder, count):
    for number in range(count):
        path = folder / "only" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(noise(number)).save(path)
    return folder


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda path: path / "nowhere", "There is no folder or bucket .*/nowhere"),
        (
            lambda path: write_class(path, 1) / "only" / "0.png",
            "There is no folder or bucket .*/0.png",
        ),
        (
            lambda path: path,
            "holds no image .*name the folder that holds the folders of the classes",
        ),
        (lambda path: write_class(path, 2) / "only", "holds no image"),
        (lambda path: write_class(path, 2), "holds only the class 'only'"),
        (lambda path: f"nosuch://{path}", "cannot be read: Protocol not known: nosuch"),
    ],
    ids=["missing", "a file", "empty", "images without classes", "one class", "unknown protocol"],
)
@pytest.mark.parametrize("cache", [None, "memory"])
def test_a_place_without_classes_of_images_is_refused_and_says_why(tmp_path, make, said, cache):
    (tmp_path / "here").mkdir()
    with pytest.raises(Error, match=said):
        ImageFolder(make(tmp_path / "here"), SIZE, cache=cache)


def test_a_folder_that_may_not_be_read_is_refused(folder):
    program = (
        "import os, ddp_common as ddp; read = lambda: ddp.ImageFolder('.', 8); read(); "
        "os.chmod('dog', 0)\n"
        "if os.geteuid() == 0: os.setuid(65534)  # root may read everything\nread()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    (folder / "dog").chmod(0o755)
    assert "There is no right to read" in done.stderr and "Check the credentials" in done.stderr


def test_what_to_do_with_damaged_images_is_spelt_right(folder):
    with pytest.raises(Error, match="'raise' or 'skip', not 'ignore'"):
        ImageFolder(folder, SIZE, on_error="ignore")


def png(cut=None):
    buffer = io.BytesIO()
    Image.fromarray(noise(9)).save(buffer, "PNG")
    return buffer.getvalue()[:cut]


DAMAGES = {
    "empty": b"",
    "text": b"<html>not found</html>",
    "cut": png(200),
    "scrambled": png()[:60] + bytes(400),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_stops_the_run_and_is_named(folder, damage):
    (folder / "dog" / "1.png").write_bytes(DAMAGES[damage])
    dataset = ImageFolder(folder, SIZE, cache="memory")
    assert torch.equal(dataset[4][0], expected_one(folder, "dog/0.png"))
    why = "file is empty" if damage == "empty" else ""
    words = f"set/dog/1.png is no image that can be read: .*{why}.*on_error='skip'"
    with pytest.raises(Error, match=words):
        everything(dataset)


def expected_one(folder, name):
    return torch.from_numpy(np.asarray(Image.open(folder / name)).copy()).permute(2, 0, 1)


@pytest.mark.parametrize("place", ["disk", "s3"])
def test_damaged_files_are_left_out_and_named_once(folder, place, request):
    for name, content in zip(
        ("cat/0.png", "dog/1.png", "dog/2.png", "emu/3.png"), DAMAGES.values()
    ):
        (folder / name).write_bytes(content)
    where = request.getfixturevalue("bucket") if place == "s3" else folder
    words = (
        r"4 of 12 files in .*set are no images.*left out: cat/0.png: the file is empty; "
        "dog/1.png: its content is of no image format"
    )
    with pytest.warns(UserWarning, match=words):
        dataset = ImageFolder(where, SIZE, on_error="skip")
    pixels, labels = everything(dataset)
    assert labels == dataset.targets == [0] * 3 + [1] * 2 + [2] * 3
    assert torch.equal(pixels[3], expected_one(folder, "dog/0.png"))
    assert torch.equal(pixels[4], expected_one(folder, "dog/3.png"))


def test_a_class_of_which_all_images_are_damaged_is_no_class(folder):
    for path in [*folder.glob("dog/*"), *folder.glob("emu/*")]:
        path.write_bytes(b"")
    with (
        pytest.warns(UserWarning, match="8 of 12 files"),
        pytest.raises(Error, match="holds only the class 'cat'"),
    ):
        ImageFolder(folder, SIZE, on_error="skip")


@pytest.mark.parametrize("workers", [0, 2])
def test_images_kept_in_memory_are_read_once_also_by_the_workers_of_a_loader(folder, workers):
    dataset, pixels = ImageFolder(folder, SIZE, cache="memory"), expected(folder)
    assert torch.equal(everything(dataset, num_workers=workers)[0], pixels)
    for path in folder.glob("*/*.png"):
        path.write_bytes(b"gone")
    assert torch.equal(everything(dataset, num_workers=workers)[0], pixels)
    assert torch.equal(everything(dataset)[0], pixels)


def test_what_a_reader_does_to_an_image_does_not_reach_the_kept_one(folder):
    dataset = ImageFolder(folder, SIZE, cache="memory")
    dataset[0][0].zero_()
    assert torch.equal(dataset[0][0], expected(folder)[0])


READ_ALL = (
    "import sys, ddp_common as ddp; "
    "d = ddp.ImageFolder(sys.argv[1], int(sys.argv[3]), cache=sys.argv[2]); "
    "d.__getitems__(range(len(d)))"
)


def test_images_kept_in_a_folder_are_shared_with_other_processes(folder, tmp_path):
    pixels = expected(folder)
    subprocess.run(
        [sys.executable, "-c", READ_ALL, folder, tmp_path / "kept", str(SIZE)],
        cwd=ROOT,
        check=True,
    )
    rewrite_with_the_same_times(folder)
    assert torch.equal(everything(ImageFolder(folder, SIZE, cache=tmp_path / "kept"))[0], pixels)
    with pytest.raises(Error, match="is no image"):
        everything(ImageFolder(folder, SIZE))
    with pytest.raises(Error, match="is no image"):  # of another size, nothing is kept
        everything(ImageFolder(folder, 2 * SIZE, cache=tmp_path / "kept"))


def rewrite_with_the_same_times(folder):
    """Make all images unreadable in a way that a listing does not show.

    Only what is kept can be read from now on.
    """
    for path in folder.glob("*/*.png"):
        about = path.stat()
        path.write_bytes(bytes(about.st_size))
        os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))


def test_a_changed_file_is_read_anew(folder, tmp_path):
    everything(ImageFolder(folder, SIZE, cache=tmp_path / "kept"))
    Image.fromarray(noise(1, 2, 3)).save(folder / "cat" / "2.png")
    assert torch.equal(
        everything(ImageFolder(folder, SIZE, cache=tmp_path / "kept"))[0], expected(folder)
    )


def test_a_kept_image_that_is_torn_is_read_anew(folder, tmp_path):
    everything(ImageFolder(folder, SIZE, cache=tmp_path / "kept"))
    (kept,) = (tmp_path / "kept").iterdir()
    content = bytearray(kept.read_bytes())
    content[-1] ^= 1
    content[12 * 4 + 100] ^= 1
    kept.write_bytes(content)
    assert torch.equal(
        everything(ImageFolder(folder, SIZE, cache=tmp_path / "kept"))[0], expected(folder)
    )


def keep_forever(folder, shape):
    kept, values = (
        images.Kept(folder, 3, shape, "x"),
        [np.full(shape, value, np.uint8) for value in range(1, 9)],
    )
    while True:
        for value in values:
            kept.put(int(value[0, 0, 0]) % 3, value)


def test_a_writer_that_is_killed_leaves_no_wrong_image(tmp_path):
    shape = (3, 500, 500)

    def kept():
        found = map(images.Kept(tmp_path, 3, shape, "x").get, range(3))
        return [array.copy() for array in found if array is not None]

    taken = []
    deadline = time.monotonic() + 60
    for milliseconds in range(30, 40):
        writer = multiprocessing.get_context("fork").Process(
            target=keep_forever, args=(tmp_path, shape)
        )
        writer.start()
        time.sleep(milliseconds / 1000)
        while not kept():  # in the first round a busy machine may take longer
            assert time.monotonic() < deadline
        writer.kill()
        writer.join()
        taken += kept()
    assert taken and all((array == array[0, 0, 0]).all() for array in taken)


def test_a_disk_without_room_for_all_images_is_refused_at_once(folder, small_disk):
    with pytest.raises(
        Error, match="cannot be kept in .*disk, which takes 9 MB: .*No space left.*Make room"
    ):
        ImageFolder(folder, 512, cache=small_disk)
    assert list(small_disk.iterdir()) == []


def test_a_place_that_is_no_folder_is_refused(folder, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(Error, match="cannot be kept in .*file.*cache=None"):
        ImageFolder(folder, SIZE, cache=tmp_path / "file")


@pytest.mark.parametrize("place, context", [("disk", "fork"), ("s3", "fork"), ("s3", "spawn")])
def test_the_workers_of_a_loader_read_the_same_images(folder, place, context, request, tmp_path):
    where = request.getfixturevalue("bucket") if place == "s3" else folder
    dataset = ImageFolder(where, SIZE, cache=tmp_path / "kept")
    assert torch.equal(
        dataset[0][0], expected(folder)[0]
    )  # the parent has connections and threads of its own
    pixels, labels = everything(
        dataset,
        num_workers=2 if context == "fork" else 1,
        multiprocessing_context=multiprocessing.get_context(context),
    )
    assert torch.equal(pixels, expected(folder)) and labels == dataset.targets
    assert torch.equal(everything(dataset)[0], expected(folder))


@pytest.mark.parametrize("cache", [None, "memory", "folder"])
def test_a_data_set_can_be_pickled_before_and_after_it_is_used(folder, tmp_path, cache):
    dataset = ImageFolder(folder, SIZE, cache=tmp_path / "kept" if cache == "folder" else cache)
    for _ in range(2):
        assert torch.equal(everything(pickle.loads(pickle.dumps(dataset)))[0], expected(folder))
        everything(dataset)


def test_object_storage_is_asked_once_for_the_list_and_once_for_each_image(folder, bucket, s3_log):
    before = len(s3_log.read_text().splitlines())
    dataset = ImageFolder(bucket, SIZE)
    assert torch.equal(everything(dataset)[0], expected(folder)) and dataset.classes == list(
        COLOURS
    )
    asked = [
        line.split('"')[1] for line in s3_log.read_text().splitlines()[before:] if '"' in line
    ]
    assert len(asked) == 1 + 12 and sum("list-type=2" in line for line in asked) == 1, asked
    everything(pickle.loads(pickle.dumps(dataset)))  # as on another rank
    assert len(s3_log.read_text().splitlines()) == before + 1 + 12 + 12


def test_a_changed_object_is_read_anew(s3, folder, bucket, tmp_path):
    everything(ImageFolder(bucket, SIZE, cache=tmp_path / "kept"))
    Image.fromarray(noise(1, 2, 3)).save(folder / "cat" / "2.png")
    s3.put_file(f"{folder}/cat/2.png", "photos/set/cat/2.png")
    assert torch.equal(
        everything(ImageFolder(bucket, SIZE, cache=tmp_path / "kept"))[0], expected(folder)
    )


@pytest.mark.parametrize(
    "url, said",
    [
        ("s3://nobody-has-this/set", "There is no folder or bucket s3://nobody-has-this/set"),
        ("s3://photos/empty", "s3://photos/empty holds no image"),
        ("s3://photos/set/cat", "s3://photos/set/cat holds no image"),
        ("s3://photos", "s3://photos holds only the class 'set'"),
    ],
)
def test_a_bucket_without_classes_of_images_is_refused_and_says_why(bucket, url, said):
    with pytest.raises(Error, match=said):
        ImageFolder(url, SIZE)


def test_without_credentials_only_what_is_public_can_be_read_anonymously(
    s3, folder, bucket, monkeypatch
):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with pytest.raises(
        Error, match="no right to read s3://photos/set: .*credentials.*anonymous=True"
    ):
        ImageFolder(bucket, SIZE)
    dataset = ImageFolder(bucket, SIZE, anonymous=True)
    with pytest.raises(Error, match="no right to read s3://photos/set: .*Check the credentials"):
        dataset[0]
    for path in s3.find("photos/set"):
        s3.chmod(path, "public-read")
    assert torch.equal(everything(dataset, num_workers=1)[0], expected(folder))


@pytest.fixture
def strict(endpoint):
    """The server asks for rights that nobody has."""

    def count_of_free_requests(count):
        urllib.request.urlopen(
            urllib.request.Request(
                f"{endpoint}/moto-api/reset-auth", count, {"Content-Type": "text/plain"}
            )
        ).close()

    yield lambda: count_of_free_requests(b"0")
    count_of_free_requests(b"inf")


def test_credentials_without_rights_are_told_from_a_missing_bucket(bucket, strict):
    dataset = ImageFolder(bucket, SIZE)
    strict()
    with pytest.raises(Error, match="no right to read s3://photos/set: .*Check the credentials"):
        ImageFolder(bucket, SIZE)
    with pytest.raises(Error, match="no right to read s3://photos/set"):
        dataset[0]


def test_a_server_that_nobody_answers_for_is_said(bucket, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with pytest.raises(Error, match="s3://photos/set cannot be read: .*127.0.0.1:9.*the network"):
        ImageFolder(bucket, SIZE)


class SignsWrongly(S3FileSystem):
    """A store whose signed addresses do not do; it counts them."""

    address = "http://127.0.0.1:9/nobody-answers"
    signed = 0

    async def _url(self, *_, **__):
        self.signed += 1
        return self.address


def test_where_signed_addresses_do_not_do_objects_are_read_in_the_ordinary_way(bucket, s3):
    paths = s3.find("photos/set")
    filesystem = SignsWrongly(skip_instance_cache=True)
    reader = SignedReader(filesystem)
    (first,) = reader.read(paths[:1])
    others = list(reader.read(paths[1:]))
    assert [first, *others] == [s3.cat_file(path) for path in paths]
    assert filesystem.signed == 1  # not tried again for each object


def test_one_signed_address_that_fails_does_not_end_signing(bucket, s3):
    paths = s3.find("photos/set")
    filesystem = SignsWrongly(skip_instance_cache=True)
    reader = SignedReader(filesystem)
    filesystem.address = s3.sign(paths[0], expiration=600)
    list(reader.read(paths[:1]))
    filesystem.address = SignsWrongly.address  # the server is busy for a moment
    assert list(reader.read(paths[1:2])) == [s3.cat_file(paths[1])]
    filesystem.address = s3.sign(paths[2], expiration=600)
    assert list(reader.read(paths[2:3])) == [s3.cat_file(paths[2])]
    assert filesystem.signed == 3


def test_what_keeps_a_process_from_any_request_is_told_by_the_store(folder, bucket, monkeypatch):
    dataset = ImageFolder(bucket, SIZE)
    there = pickle.loads(pickle.dumps(dataset))  # as on another host
    monkeypatch.setenv("AWS_PROFILE", "nobody-has-this")
    with pytest.raises(Error, match="s3://photos/set cannot be read: .*nobody-has-this"):
        there[0]


def test_an_object_that_is_not_there_keeps_no_other_from_being_read(bucket, s3):
    there = s3.find("photos/set")[0]
    missing, found = SignedReader(s3).read(["photos/set/nothing", there])
    assert isinstance(missing, FileNotFoundError)
    assert found == s3.cat_file(there)


def test_without_a_network_the_first_object_says_so_for_all(bucket, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    reader = SignedReader(S3FileSystem(skip_instance_cache=True))
    assert not any(isinstance(each, bytes) for each in reader.read(["photos/set/a"] * 100))
    assert reader.works is not False  # it may come back


def test_a_size_that_no_memory_holds_is_refused(folder):
    with pytest.raises(Error, match="cannot be kept in memory"):
        ImageFolder(folder, 10**9, cache="memory")


def test_the_server_of_these_tests_ends_although_a_loader_holds_its_pipe(tmp_path):
    """Regression: a test run waited forever for a server that waited for a forked worker."""
    with s3_server(tmp_path / "requests.log") as url:
        running = iter(DataLoader(range(8), num_workers=1, persistent_workers=True))
        urllib.request.urlopen(f"{url}/moto-api/data.json").close()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(url)
    assert list(running)
