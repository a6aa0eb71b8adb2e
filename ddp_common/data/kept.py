"""Decoded images that processes share, in memory or in a memory-mapped file.

There is no lock: whoever reads an image compares its checksum. Promises: neither a killed process
nor another one that writes at this moment leaves a wrong image.
"""

import hashlib
import mmap
import os
import zlib
from pathlib import Path

import numpy as np

from ddp_common.errors import Error


class Kept:
    """`count` images, uint8 of shape (3, size, size), each with its CRC, which is 0 at first.

    `place` is 'memory', shared with processes forked later, or a folder. There the file is named
    after `what`, a text that identifies the content, and has its full length from the start: a
    disk that is full is an `Error` now and not a crash later.
    """

    def __init__(self, place: str | Path, count: int, size: int, what: str):
        self._arguments = place, count, size, what
        record = np.dtype([("crc", np.uint32), ("image", np.uint8, (3, size, size))])
        total = count * record.itemsize
        try:
            if place == "memory":
                shared = mmap.mmap(-1, total)
            else:
                name = f"images-{hashlib.sha256(what.encode()).hexdigest()[:16]}.u8"
                shared = _mapped(Path(place) / name, total)
        except (OSError, ValueError, OverflowError) as error:
            raise Error(
                f"The images cannot be kept in {place}, which takes {total / 1e6:,.0f} MB: "
                f"{error}. Make room, take a smaller size, name another folder, or use cache=None."
            ) from None
        records = np.frombuffer(shared, record)
        self._sums = records["crc"]
        self._images = records["image"]

    def get(self, row: int) -> np.ndarray | None:
        """The image at `row`; None if it is not there, or torn."""
        image = self._images[row]
        return image if self._sums[row] == _sum(image) else None

    def put(self, row: int, image: np.ndarray):
        self._images[row] = image
        self._sums[row] = _sum(image)

    def __reduce__(self):
        return Kept, self._arguments  # in another process it is opened anew


def _sum(image):
    return zlib.crc32(image) or 1  # 0: nothing is there


def _mapped(path, total):
    """The file at `path`, made if it is not there; what it has stays, the rest becomes 0."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+b") as file:
        if not hasattr(os, "posix_fallocate"):
            file.truncate(total)
        else:
            try:
                os.posix_fallocate(file.fileno(), 0, total)
            except OSError:
                path.unlink(missing_ok=True)  # no process could map it whole
                raise
        return mmap.mmap(file.fileno(), total)
