"""Decoded images that processes share, in memory or in a file.

Promises: what is kept is used only if its checksum fits, so that a killed process leaves no wrong image.
"""

import hashlib
import mmap
import os
import zlib
from pathlib import Path

import numpy as np

from ddp_common.errors import Error


class Kept:
    """Arrays of uint8 of one shape that processes share: written once, each with its CRC, without which it is not taken.

    `place` is 'memory', shared with processes forked later, or a folder; there the file is named after `what`, whatever identifies the
    content, and has its full length from the start: a disk that is full is an `Error` now and not a crash later.
    """

    def __init__(self, place, count, shape, what):
        self.place, self.count, self.shape, self.length = place, count, shape, int(np.prod(shape))
        self.name = f"images-{hashlib.sha256(what.encode()).hexdigest()[:16]}.u8"
        self._open()

    def _open(self):
        total = self.count * (self.length + 4)
        if self.place == "memory":
            try:
                self.map = mmap.mmap(-1, max(total, 1))
            except (OSError, ValueError, OverflowError) as error:
                raise Error(
                    f"The images cannot be kept in memory, which takes {total / 1e6:,.0f} MB: {error}. Take a smaller size, a folder "
                    "as the cache, or use cache=None."
                ) from None
        else:
            path = Path(self.place) / self.name
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                with open(path, "a+b") as file:  # made if it is not there, never cut
                    _reserve(file, path, total)
                    self.map = mmap.mmap(file.fileno(), total)
            except (OSError, ValueError, OverflowError) as error:
                raise Error(
                    f"The images cannot be kept in {self.place}, which takes {total / 1e6:,.0f} MB: {error}. Make room, name another "
                    "folder, or use cache=None."
                ) from None
        self.sums = np.frombuffer(self.map, np.uint32, self.count)
        self.arrays = np.frombuffer(
            self.map, np.uint8, self.count * self.length, self.count * 4
        ).reshape(self.count, *self.shape)

    def get(self, row):
        """The array at `row`, None if it is not there, or torn."""
        return (
            self.arrays[row]
            if self.sums[row] and self.sums[row] == _sum(self.arrays[row])
            else None
        )

    def put(self, row, array):
        self.arrays[row] = array
        self.sums[row] = _sum(array)

    def __getstate__(self):
        return {
            name: value
            for name, value in self.__dict__.items()
            if name not in ("map", "sums", "arrays")
        }

    def __setstate__(self, state):
        self.__dict__.update(state)
        self._open()


def _sum(array):
    return zlib.crc32(array) or 1  # 0: nothing is there


def _reserve(file, path, total):
    """Let `file` have `total` bytes on the disk; those that it has already stay as they are, the others become 0."""
    if not hasattr(os, "posix_fallocate"):
        return file.truncate(total)
    try:
        os.posix_fallocate(file.fileno(), 0, total)
    except OSError:
        path.unlink(missing_ok=True)  # nobody has got more of it
        raise
