"""Folders of images on a disk and in object storage (a real S3 server).

The right pixels, the same augmentation for any number of loader workers, bad input named.
"""

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from ddp_common import Error, ImageFolder

SIZE = 16
LABELS = ["cat", "dog", "emu"]


def noise(*seed):
    return np.random.default_rng(seed).integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8)


@pytest.fixture
def folder(tmp_path):
    """Four PNGs of noise, of the size at which they are read, in each of three classes."""
    for label in LABELS:
        (tmp_path / "set" / label).mkdir(parents=True)
        for number in range(4):
            picture = Image.fromarray(noise(ord(label[0]), number))
            picture.save(tmp_path / "set" / label / f"{number}.png")
    return tmp_path / "set"


@pytest.fixture
def bucket(s3, folder):
    """The URL of a prefix that holds the same images."""
    s3.mkdir("photos")
    s3.put(f"{folder}/", "s3://photos/set/", recursive=True)
    return "s3://photos/set"


def expected(folder):
    images = [np.array(Image.open(path)) for path in sorted(folder.glob("*/*.png"))]
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2)


def everything(dataset, **options):
    """All images and all labels of `dataset`, by a `DataLoader`."""
    batches = list(DataLoader(dataset, batch_size=5, **options))
    labels = torch.cat([labels for _, labels in batches]).tolist()
    return torch.cat([batch for batch, _ in batches]), labels


def test_a_class_is_a_folder_and_its_number_the_place_of_its_name(folder):
    dataset = ImageFolder(folder, SIZE)
    assert dataset.classes == LABELS
    assert dataset.targets == [0] * 4 + [1] * 4 + [2] * 4
    pixels, labels = everything(dataset)
    assert pixels.dtype == torch.uint8
    assert torch.equal(pixels, expected(folder)) and labels == dataset.targets
    assert torch.equal(dataset[7][0], pixels[7]) and dataset[7][1] == 1


def test_only_image_files_in_a_class_count_and_they_may_lie_deeper(folder):
    (folder / "cat" / "young").mkdir()
    (folder / "cat" / "young" / "a.JPG").write_bytes((folder / "cat" / "0.png").read_bytes())
    for name in ("cat/notes.txt", "cat/.hidden.png", "top.png"):
        (folder / name).write_bytes(b"not to be read")
    dataset = ImageFolder(folder, SIZE)
    assert dataset.classes == LABELS and dataset.targets.count(0) == 5
    assert len(everything(dataset)[1]) == 13


@pytest.mark.parametrize("kind, suffix", [("L", "png"), ("RGBA", "png"), ("CMYK", "jpg")])
def test_every_kind_of_image_becomes_three_channels_of_bytes(folder, kind, suffix):
    Image.new("RGB", (40, 30), (255, 255, 255)).convert(kind).save(folder / "cat" / f"!.{suffix}")
    pixels, _ = ImageFolder(folder, SIZE)[0]
    assert pixels.shape == (3, SIZE, SIZE) and pixels.float().mean() > 250


def test_an_image_of_more_than_8_bits_is_not_cut_off_but_refused(folder):
    ramp = np.linspace(0, 60_000, 1200).astype(np.uint16).reshape(30, 40)
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
    (turned, _), (cropped, _) = ImageFolder(folder, SIZE).__getitems__([0, 1])
    assert cropped.min() > 230
    assert turned[:, :6].max() < 20 and turned[:, 10:].min() > 235  # what was right is below


@pytest.mark.parametrize(
    "place, said",
    [
        ("nowhere", "cannot be read: .*No such file .*Check its name"),
        ("set/cat", "has the classes .*name the folder of these"),
        ("", "has the classes .'set'."),
        ("nosuch://set", "cannot be read: Protocol not known: nosuch"),
    ],
)
def test_a_place_without_classes_of_images_is_refused_and_says_why(folder, place, said):
    with pytest.raises(Error, match=said):
        ImageFolder(place if "://" in place else folder.parent / place, SIZE)


def test_a_class_without_images_is_named_and_classes_leaves_it_out_or_orders(folder):
    (folder / "yak").mkdir()
    (folder / "linked").symlink_to(folder / "dog")
    with pytest.raises(Error, match="has no image in yak"):
        ImageFolder(folder, SIZE)
    dataset = ImageFolder(folder, SIZE, classes=["linked", "cat"])
    assert dataset.classes == ["linked", "cat"] and dataset.targets == [1] * 4 + [0] * 4


@pytest.mark.parametrize("content", [b"", b"<html>not found</html>"])
def test_a_damaged_file_stops_the_run_and_is_named(folder, content):
    (folder / "dog" / "1.png").write_bytes(content)
    with pytest.raises(Error, match="set/dog/1.png is no image that can be read: cannot identify"):
        ImageFolder(folder, SIZE)[5]


def test_kept_images_are_read_once_also_by_the_forked_workers_of_a_loader(folder):
    dataset = ImageFolder(folder, SIZE, cache="memory")
    pixels = expected(folder)
    workers = {"num_workers": 2, "multiprocessing_context": "fork"}
    assert torch.equal(everything(dataset, **workers)[0], pixels)
    for path in folder.glob("*/*.png"):
        path.write_bytes(b"gone")
    assert torch.equal(everything(dataset)[0], pixels)


def test_images_are_kept_in_memory_only(folder):
    with pytest.raises(Error, match="cache='/a/disk': images are kept in memory only"):
        ImageFolder(folder, SIZE, cache="/a/disk")


def test_without_credentials_only_what_is_public_can_be_read_anonymously(
    s3, folder, bucket, monkeypatch
):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    words = "s3://photos/set cannot be read: .*credentials.*anonymous=True"
    with pytest.raises(Error, match=words):
        ImageFolder(bucket, SIZE)
    dataset = ImageFolder(bucket, SIZE, anonymous=True)
    for path in s3.find("photos/set"):
        s3.chmod(path, "public-read")
    assert torch.equal(everything(dataset)[0], expected(folder))
