"""Folders of images, on a disk or in object storage, as data sets: class = folder.

One rank lists the files and tells the others: every rank has the same index, and storage is asked
once. A batch is read at once, not one image after the other: from object storage by fsspec's
concurrent requests, from a disk by threads. Decoded images may be kept, in memory or in a file
that the ranks of a host share (`kept`). Promises: neither a killed process nor a changed file
leaves a wrong image; the same object works in the workers of a `DataLoader`.
"""

import hashlib
import io
import os
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import fsspec
import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError

from ddp_common.data.kept import Kept
from ddp_common.errors import Error
from ddp_common.ranks import exchange, reporting
from ddp_common.ranks.rendezvous import rank, world_size

SUFFIXES = (".jpg", ".jpeg", ".png", ".tif", ".tiff", ".bmp", ".gif", ".webp")
S3 = {
    "max_concurrency": 1,  # read a file without asking for its size first
    "config_kwargs": {"max_pool_connections": 32},  # of each process, where botocore takes 10
}
BATCH = 256  # images read at once in the check for damaged ones
NAMED = 10  # damaged files that a warning names


class ImageFolder(torch.utils.data.Dataset):
    """The images <url>/<class>/…, each as (uint8 tensor of shape (3, size, size), class number).

    `url` is a path or an fsspec URL. An image is scaled so that its short side fits and cropped in
    the middle. `classes` are the names, sorted; `targets` is the number of each image's class,
    `labels` its name. `anonymous` reads a public s3:// bucket without credentials.

    `cache` is None, 'memory', or a folder on a local disk; it keeps 3 * size * size bytes per
    image.

    `on_error`: 'raise' stops at the first image that cannot be decoded. With 'skip' the ranks
    decode all of them once, now, each its share, and leave the damaged ones out of the index,
    named in a warning.

    Every rank has to make one, at the same place: they talk. Raises `Error` when there is no such
    folder or bucket, no right to read it, no image in it, or only one class.
    """

    def __init__(
        self,
        url: str | Path,
        size: int = 64,
        *,
        cache: str | Path | None = None,
        anonymous: bool = False,
        on_error: str = "raise",
    ):
        if on_error not in ("raise", "skip"):
            raise Error(f"on_error takes 'raise' or 'skip', not {on_error!r}.")
        self.url = str(url)
        self.size = size
        self.anonymous = anonymous
        self._process = None  # the one to which `_mine` belongs
        self._names, version = exchange.asked_of_rank_0(self._list)
        self._index(range(len(self._names)))
        self._kept = None
        if cache is not None:
            self._kept = Kept(cache, len(self._names), size, f"{self.url} {size} {version}")
        if on_error == "skip":
            self._leave_out_damaged()

    def _index(self, rows):
        """Let the data set consist of these of the files listed."""
        self._rows = list(rows)
        labels = [self._names[row].split("/")[0] for row in self._rows]
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

    @property
    def labels(self) -> list[str]:
        """The name of each image's class."""
        return [self.classes[number] for number in self.targets]

    def __len__(self):
        return len(self._rows)

    def __getitem__(self, index):
        return self.__getitems__([index])[0]

    def __getitems__(self, indices):
        """The images at `indices` (list of int), read at once; a `DataLoader` calls this."""
        rows = [self._rows[index] for index in indices]
        images = {row: self._get_kept(row) for row in rows}
        missing = [row for row, image in images.items() if image is None]
        for row, image in zip(missing, self._decode(missing)):
            if isinstance(image, Exception):
                raise Error(
                    f"{self.url}/{self._names[row]} is no image that can be read: {image}. Remove "
                    "or replace the file, or leave damaged ones out with on_error='skip'."
                )
            images[row] = image
        return [
            (torch.from_numpy(images[row].copy()), self.targets[index])
            for row, index in zip(rows, indices)
        ]

    def _get_kept(self, row):
        return None if self._kept is None else self._kept.get(row)

    def _decode(self, rows):
        """An array, or what was wrong with the file, for each of the rows; arrays are kept."""
        if not rows:
            return []
        filesystem, root, pool = self._own()
        is_remote = filesystem.async_impl
        paths = [f"{root}/{self._names[row]}" for row in rows]
        if is_remote:
            contents = filesystem.cat_ranges(paths, None, None, on_error="return")
        else:
            contents = pool.map(partial(_read, filesystem), paths)
        images = list(pool.map(partial(_decoded, size=self.size), contents))
        for row, image in zip(rows, images):
            is_damaged = isinstance(image, Exception)
            is_file_at_fault = isinstance(image, (FileNotFoundError, Undecodable))
            if is_remote and is_damaged and not is_file_at_fault:
                raise _unreachable(self.url, image)
            if self._kept is not None and not is_damaged:
                self._kept.put(row, image)
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
        """The names of all image files, relative and sorted, and a digest.

        The digest changes with the names and with the files' lengths and times.
        """
        try:
            filesystem, root, _ = self._own()
            found = _versions_of_files(filesystem, root)
        except ImportError as error:
            raise Error(
                f"{self.url} needs one more package ({error}). "
                "For s3:// install the extra: pip install -e '.[s3]'."
            ) from None
        # Each file system has its own exceptions: access denied, no such bucket, no network.
        except Exception as error:
            raise _unreachable(self.url, error) from None
        names = sorted(name for name in found if _is_image_in_folder(name))
        versions = repr([(name, found[name]) for name in names])
        return names, hashlib.sha256(versions.encode()).hexdigest()

    def _leave_out_damaged(self):
        """Let the ranks decode all images, each its share, and index those that can be."""
        mine = self._rows[rank() :: world_size()]
        damaged = []
        for start in range(0, len(mine), BATCH):
            batch = [row for row in mine[start : start + BATCH] if self._get_kept(row) is None]
            for row, image in zip(batch, self._decode(batch)):
                if isinstance(image, Exception):
                    damaged.append((row, str(image)))
            reporting.made_progress()
        bad = {row: why for each in exchange.gather(damaged) for row, why in each}
        if not bad:
            return
        named = "; ".join(f"{self._names[row]}: {bad[row]}" for row in sorted(bad)[:NAMED])
        if len(bad) > NAMED:
            named += "; …"
        if rank() == 0:
            warnings.warn(
                f"{len(bad)} of {len(self._names)} files in {self.url} are no images that can be "
                f"read, and left out: {named}.",
                stacklevel=3,
            )
        self._index(row for row in self._rows if row not in bad)


class Undecodable(Exception):
    """Bytes that are no image."""


def _versions_of_files(filesystem, root):
    """Every file below `root`: relative name -> its length, and what changes with its content.

    On a disk links are followed, and a folder that cannot be read is an OSError.
    """
    versions = {}
    if "file" in filesystem.protocol:
        for folder, _, names in os.walk(root, onerror=_raise, followlinks=True):
            for path in (os.path.join(folder, name) for name in names):
                if os.path.isfile(path):
                    about = os.stat(path)
                    name = os.path.relpath(path, root)
                    versions[name] = (about.st_size, about.st_mtime_ns)
    else:
        for path, about in filesystem.find(root, detail=True).items():
            changed = str(about.get("ETag") or about.get("LastModified"))
            versions[path.removeprefix(f"{root}/")] = (about.get("size"), changed)
    return versions


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
