"""Folders of images, on a disk or in object storage, as data sets: class = folder.

One rank lists the files and tells the others: every rank has the same index, and storage is asked
once. A batch is read at once, not one image after the other: from object storage by fsspec's
concurrent requests, from a disk by threads. Promises: a file that is no image is named; the same
object works in the workers of a `DataLoader`, also with images that are kept in memory.
"""

import io
import math
import mmap
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Literal

import fsspec
import numpy as np
import torch
from PIL import Image, ImageOps

from ddp_common import exchange
from ddp_common.errors import Error

SUFFIXES = (".jpg", ".jpeg", ".png", ".tif", ".tiff", ".bmp", ".gif", ".webp")
S3 = {
    "max_concurrency": 1,  # read a file without asking for its size first
    "config_kwargs": {"max_pool_connections": 32},  # of each process, where botocore takes 10
}


class ImageFolder(torch.utils.data.Dataset):
    """The images <url>/<class>/…, each as (uint8 tensor of shape (3, size, size), class number).

    `url` is a path or an fsspec URL. An image is scaled so that its short side fits and cropped in
    the middle. `classes` are the folders to read, by default all, sorted; `targets` is the number
    of each image's class, `labels` its name. `cache="memory"` keeps decoded images, 3 * size *
    size bytes for each, in memory that the forked workers of a `DataLoader` share. `anonymous`
    reads a public s3:// bucket without credentials.

    Every rank has to make one, at the same place: they talk. Raises `Error` when the folder cannot
    be read, when a class has no image, or when there is only one; reading raises it for a file
    that cannot be decoded.
    """

    def __init__(
        self,
        url: str | Path,
        size: int = 64,
        *,
        classes: Sequence[str] | None = None,
        cache: Literal["memory"] | None = None,
        anonymous: bool = False,
    ):
        if cache not in (None, "memory"):
            raise Error(f"cache={cache!r}: images are kept in memory only: cache='memory'.")
        self.url = str(url)
        self.size = size
        self.anonymous = anonymous
        self._mine: dict[int, tuple] = {}  # what `_own` gives, by the process
        folders, names = exchange.asked_of_rank_0(self._list)
        self.classes = list(classes or folders)
        number = {label: number for number, label in enumerate(self.classes)}
        self._names = [name for name in names if _class_of(name) in number]
        self.targets = [number[_class_of(name)] for name in self._names]
        there = set(self.targets)
        empty = [label for label in self.classes if number[label] not in there]
        if empty or len(self.classes) < 2:
            wrong = f"no image in {', '.join(empty)}" if empty else f"the classes {self.classes}"
            raise Error(
                f"{self.url} has {wrong}. An image's class is the folder that it lies in: name "
                "the folder of these, of two or more; classes=[…] leaves out others.\n"
                f"Images are {', '.join(SUFFIXES)}."
            )
        self._kept = None
        if cache == "memory":
            self._kept = _shared(len(self)), _shared(len(self), 3, size, size)

    @property
    def labels(self) -> list[str]:
        """The name of each image's class."""
        return [self.classes[number] for number in self.targets]

    def __len__(self):
        return len(self._names)

    def __getitem__(self, index):
        return self.__getitems__([index])[0]

    def __getitems__(self, indices):
        """The images at `indices` (list of int), read at once; a `DataLoader` calls this."""
        if self._kept is None:
            images = dict(zip(indices, self._decoded(indices)))
        else:
            is_there, images = self._kept
            missing = [index for index in indices if not is_there[index]]
            for index, image in zip(missing, self._decoded(missing)):
                images[index] = image
                is_there[index] = 1  # last: a process may be killed before
        return [(torch.from_numpy(images[index].copy()), self.targets[index]) for index in indices]

    def _decoded(self, indices):
        """A uint8 array of shape (3, size, size) for each of the indices."""
        filesystem, root, pool = self._own()
        paths = [f"{root}/{self._names[index]}" for index in indices]
        files = paths
        if filesystem.async_impl:
            files = filesystem.cat_ranges(paths, None, None, on_error="return")
        return pool.map(partial(_decode, size=self.size), paths, files)

    def _own(self):
        """The file system, its root, and the threads of this process.

        A forked process cannot use those of its parent.
        """
        if os.getpid() not in self._mine:
            anonymous = {"anon": True} if self.anonymous else {}
            options = S3 | anonymous if self.url.startswith("s3://") else {}
            filesystem, root = fsspec.url_to_fs(self.url, skip_instance_cache=True, **options)
            # A rank's share of the cores; in a worker of a DataLoader that is one.
            pool = ThreadPoolExecutor(torch.get_num_threads())
            self._mine = {os.getpid(): (filesystem, root.rstrip("/"), pool)}
        return self._mine[os.getpid()]

    def __getstate__(self):
        return vars(self) | {"_mine": {}, "_kept": None}  # a spawned worker reads for itself

    def _list(self):
        """The folders of classes, and all image files in them, by their relative names, sorted."""
        try:
            filesystem, root, _ = self._own()
            paths = [*_below(root)] if "file" in filesystem.protocol else filesystem.find(root)
        except Exception as error:  # each file system has its own
            raise Error(
                f"{self.url} cannot be read: {error or repr(error)}. Check its name, your right "
                "to read it (of a public bucket: anonymous=True) and the network. For s3:// "
                "install the extra: pip install -e '.[s3]'."
            ) from None
        names = [path.removeprefix(f"{root}/") for path in paths]
        names = sorted(name for name in names if "/" in name and "/." not in f"/{name}")
        images = [name for name in names if name.lower().endswith(SUFFIXES)]
        return sorted({_class_of(name) for name in names}), images


def _class_of(name: str) -> str:
    return name.split("/")[0]


def _below(root: str):
    """All files below a folder on a disk, and folders, with '/' at the end; links are followed."""

    def fail(error):
        raise error

    for folder, folders, names in os.walk(root, onerror=fail, followlinks=True):
        for name in [*(f"{each}/" for each in folders), *names]:
            yield f"{folder}/{name}"


def _shared(*shape: int) -> np.ndarray:
    """Bytes, 0 at first, that this process shares with those that it forks."""
    return np.frombuffer(mmap.mmap(-1, math.prod(shape)), np.uint8).reshape(shape)


def _decode(path, file, size):
    """The image in `file`, its bytes or its path: a uint8 array of shape (3, size, size)."""
    try:
        if isinstance(file, Exception):
            raise file
        image = Image.open(io.BytesIO(file) if isinstance(file, bytes) else file)
        if image.mode.startswith(("I", "F")):  # Pillow would cut off what is above 255
            raise ValueError(f"its mode is {image.mode}, of more than 8 bits: convert it")
        image.draft("RGB", (size, size))  # a JPEG is decoded at the next larger of its own scales
        image = ImageOps.exif_transpose(image).convert("RGB")
        image = ImageOps.fit(image, (size, size), Image.Resampling.BICUBIC)
        return np.ascontiguousarray(np.asarray(image).transpose(2, 0, 1))
    except Exception as error:  # Pillow's decoders raise all kinds
        raise Error(f"{path} is no image that can be read: {error or repr(error)}.") from None
