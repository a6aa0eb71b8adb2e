"""Folders of images, on a disk or in object storage, as data sets: class = folder.

One rank lists the files and tells the others: every rank has the same index, and storage is asked
once. A batch is read at once, not one image after the other: from object storage by fsspec's
concurrent requests, from a disk by threads. Promises: a file that is no image is named; the same
object works in the workers of a `DataLoader`, also with images that are kept in memory.
"""

import io
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Literal

import fsspec
import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError

from ddp_common.errors import Error
from ddp_common.ranks import exchange

SUFFIXES = (".jpg", ".jpeg", ".png", ".tif", ".tiff", ".bmp", ".gif", ".webp")
S3 = {
    "max_concurrency": 1,  # read a file without asking for its size first
    "config_kwargs": {"max_pool_connections": 32},  # of each process, where botocore takes 10
}


class ImageFolder(torch.utils.data.Dataset):
    """The images <url>/<class>/…, each as (uint8 tensor of shape (3, size, size), class number).

    `url` is a path or an fsspec URL. An image is scaled so that its short side fits and cropped in
    the middle. `classes` are the names, sorted; `targets` is the number of each image's class,
    `labels` its name. `anonymous` reads a public s3:// bucket without credentials.

    `cache="memory"` keeps decoded images, 3 * size * size bytes for each, in memory that the
    workers of a `DataLoader` share.

    Every rank has to make one, at the same place: they talk. Raises `Error` when there is no such
    folder or bucket, no right to read it, no image in it, or only one class; reading raises it
    for a file that cannot be decoded.
    """

    def __init__(
        self,
        url: str | Path,
        size: int = 64,
        *,
        cache: Literal["memory"] | None = None,
        anonymous: bool = False,
    ):
        if cache not in (None, "memory"):
            raise Error(
                f"cache={cache!r}: decoded images are kept in memory only. "
                "Write cache='memory', or leave it out."
            )
        self.url = str(url)
        self.size = size
        self.anonymous = anonymous
        self._process = None  # the one to which `_mine` belongs
        self._names = exchange.asked_of_rank_0(self._list)
        labels = [name.split("/")[0] for name in self._names]
        self.classes = sorted(set(labels))
        if len(self.classes) < 2:
            if labels:
                found = f"only the class {self.classes[0]!r}"
            else:
                found = f"no image ({', '.join(SUFFIXES)}) in a folder"
            raise Error(
                f"{self.url} holds {found}. An image's class is the name of the folder that it "
                "lies in, and there must be two or more: "
                "name the folder that holds the folders of the classes."
            )
        number = {label: number for number, label in enumerate(self.classes)}
        self.targets = [number[label] for label in labels]
        self._memory = Memory(len(labels), size) if cache else None

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
        images = {index: self._memory and self._memory.get(index) for index in indices}
        missing = [index for index, image in images.items() if image is None]
        for index, image in zip(missing, self._decode(missing)):
            if isinstance(image, Exception):
                raise Error(
                    f"{self.url}/{self._names[index]} is no image that can be read: {image}. "
                    "Remove or replace the file."
                )
            images[index] = image
        return [(torch.from_numpy(images[index].copy()), self.targets[index]) for index in indices]

    def _decode(self, indices):
        """An array, or what was wrong with the file, for each of the indices; arrays are kept."""
        if not indices:
            return []
        filesystem, root, pool = self._own()
        is_remote = filesystem.async_impl
        paths = [f"{root}/{self._names[index]}" for index in indices]
        if is_remote:
            contents = filesystem.cat_ranges(paths, None, None, on_error="return")
        else:
            contents = pool.map(partial(_read, filesystem), paths)
        images = list(pool.map(partial(_decoded, size=self.size), contents))
        for index, image in zip(indices, images):
            is_damaged = isinstance(image, Exception)
            is_file_at_fault = isinstance(image, (FileNotFoundError, Undecodable))
            if is_remote and is_damaged and not is_file_at_fault:
                raise _unreachable(self.url, image)
            if self._memory is not None and not is_damaged:
                self._memory.put(index, image)
        return images

    def _own(self):
        """The file system, its root, and the threads of this process.

        A forked process cannot use those of its parent.
        """
        if self._process != os.getpid():
            options = {}
            if self.url.startswith("s3://"):
                options = S3 | ({"anon": True} if self.anonymous else {})
            filesystem, root = fsspec.url_to_fs(self.url, skip_instance_cache=True, **options)
            # A rank's share of the cores; in a worker of a DataLoader that is one.
            pool = ThreadPoolExecutor(torch.get_num_threads())
            self._mine = filesystem, root.rstrip("/"), pool
            self._process = os.getpid()
        return self._mine

    def __getstate__(self):
        return {**self.__dict__, "_process": None, "_mine": None}

    def _list(self):
        """The names of all image files, relative and sorted."""
        try:
            filesystem, root, _ = self._own()
            found = _files_below(filesystem, root)
        except ImportError as error:
            raise Error(
                f"{self.url} needs one more package ({error}). "
                "For s3:// install the extra: pip install -e '.[s3]'."
            ) from None
        # Each file system has its own exceptions: access denied, no such bucket, no network.
        except Exception as error:
            raise _unreachable(self.url, error) from None
        return sorted(name for name in found if _is_image_in_folder(name))


class Memory:
    """`count` decoded images in memory that processes share which are forked later."""

    def __init__(self, count: int, size: int):
        self._arguments = count, size
        bytes_of_an_image = 3 * size * size
        try:
            pixels = mmap.mmap(-1, count * bytes_of_an_image)
            self._is_there = mmap.mmap(-1, count)
        except (OSError, ValueError, OverflowError) as error:
            raise Error(
                f"{count} images of {size} x {size} cannot be kept in memory: {error}. "
                "Take a smaller size, or leave cache='memory' out."
            ) from None
        self._images = np.frombuffer(pixels, np.uint8).reshape(count, 3, size, size)

    def get(self, index: int) -> np.ndarray | None:
        return self._images[index] if self._is_there[index] else None

    def put(self, index: int, image: np.ndarray):
        self._images[index] = image
        self._is_there[index] = 1  # last: a process may be killed before

    def __reduce__(self):
        return Memory, self._arguments  # in another process it begins empty


class Undecodable(Exception):
    """Bytes that are no image."""


def _files_below(filesystem, root):
    """The names of all files below `root`, relative to it.

    On a disk links are followed, and a folder that cannot be read is an OSError.
    """
    if "file" not in filesystem.protocol:
        return [path.removeprefix(f"{root}/") for path in filesystem.find(root)]
    found = []
    for folder, _, names in os.walk(root, onerror=_raise, followlinks=True):
        paths = [os.path.join(folder, name) for name in names]
        found += [os.path.relpath(path, root) for path in paths if os.path.isfile(path)]
    return found


def _raise(error):
    raise error


def _is_image_in_folder(name):
    if "/" not in name or not name.lower().endswith(SUFFIXES):
        return False
    return not any(part.startswith(".") for part in name.split("/"))


def _unreachable(url, error):
    if isinstance(error, (FileNotFoundError, NotADirectoryError)):
        return Error(
            f"There is no folder or bucket {url} to read images from ({error}). Check its name."
        )
    if isinstance(error, PermissionError) or "credentials" in str(error):
        return Error(
            f"There is no right to read {url}: {error}. "
            "Check the credentials; a public bucket is read with anonymous=True."
        )
    return Error(
        f"{url} cannot be read: {error or repr(error)}. "
        "Check its name, the credentials and the network."
    )


def _read(filesystem, path):
    try:
        return filesystem.cat_file(path)
    except OSError as error:
        return error


def _decoded(content, size):
    """The image in the bytes `content`: a uint8 array of shape (3, size, size).

    An exception is returned, not raised: that which `content` is already, or why there is no image
    in it.
    """
    if isinstance(content, Exception):
        return content
    try:
        if not content:
            raise ValueError("the file is empty")
        image = Image.open(io.BytesIO(content))
        if image.mode.startswith(("I", "F")):  # Pillow would cut off what is above 255
            raise ValueError(
                f"it has more than 8 bits for each channel (mode {image.mode}), and how these "
                "become 8 is for you to say: convert it"
            )
        image.draft("RGB", (size, size))  # a JPEG is decoded at the next larger of its own scales
        image = ImageOps.exif_transpose(image).convert("RGB")
        image = ImageOps.fit(image, (size, size), Image.Resampling.BICUBIC)
        return np.ascontiguousarray(np.asarray(image).transpose(2, 0, 1))
    except UnidentifiedImageError:
        return Undecodable("its content is of no image format that is known here")
    except Exception as error:  # Pillow's decoders raise all kinds
        return Undecodable(error)
