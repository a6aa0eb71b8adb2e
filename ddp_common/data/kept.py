"""Decoded images that processes share, in memory or in a memory-mapped file.

Relies on every reader to check: there is no lock. Promises: what is kept is used only if its
checksum fits, so that a killed process leaves no wrong image.
"""

import hashlib
import mmap
import os
import zlib
from pathlib import Path

import numpy as np

from ddp_common.errors import Error

CRC_LENGTH = 4  # bytes


class Kept:
    """`count` arrays of uint8 of one `shape` that processes share.

    Each is written once, with its CRC, without which it is not used. `place` is 'memory', shared
    with processes forked later, or a folder. There the file is named after `what`, a text that
    identifies the content, and has its full length from the start: a disk that is full is an
    `Error` now and not a crash later.
    """

    def __init__(self, place: str | Path, count: int, shape: tuple[int, ...], what: str):
        self.place = place
        self.count = count
        self.shape = shape
        self.length = int(np.prod(shape))  # bytes of an array
        self.name = f"images-{hashlib.sha256(what.encode()).hexdigest()[:16]}.u8"
        self._open()

    def _open(self):
        """Map the bytes: first the CRC of each array, then the arrays."""
        sums = self.count * CRC_LENGTH
        arrays = self.count * self.length
        if self.place == "memory":
            self.map = self._map_memory(sums + arrays)
        else:
            self.map = self._map_file(sums + arrays)
        self.sums = np.frombuffer(self.map, np.uint32, self.count)
        flat = np.frombuffer(self.map, np.uint8, arrays, offset=sums)
        self.arrays = flat.reshape(self.count, *self.shape)

    def _map_memory(self, total):
        try:
            return mmap.mmap(-1, max(total, 1))
        except (OSError, ValueError, OverflowError) as error:
            raise Error(
                f"The images cannot be kept in memory, which takes {total / 1e6:,.0f} MB: "
                f"{error}. Take a smaller size, a folder as the cache, or use cache=None."
            ) from None

    def _map_file(self, total):
        path = Path(self.place) / self.name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "a+b") as file:  # made if it is not there, never cut
                _reserve(file, path, total)
                return mmap.mmap(file.fileno(), total)
        except (OSError, ValueError, OverflowError) as error:
            raise Error(
                f"The images cannot be kept in {self.place}, which takes {total / 1e6:,.0f} MB: "
                f"{error}. Make room, name another folder, or use cache=None."
            ) from None

    def get(self, row: int) -> np.ndarray | None:
        """The array at `row`, None if it is not there, or torn."""
        array = self.arrays[row]
        if self.sums[row] and self.sums[row] == _sum(array):
            return array
        return None

    def put(self, row: int, array: np.ndarray):
        self.arrays[row] = array
        self.sums[row] = _sum(array)

    def __getstate__(self):
        mapped = ("map", "sums", "arrays")
        return {name: value for name, value in self.__dict__.items() if name not in mapped}

    def __setstate__(self, state):
        self.__dict__.update(state)
        self._open()


def _sum(array):
    return zlib.crc32(array) or 1  # 0: nothing is there


def _reserve(file, path, total):
    """Let `file` have `total` bytes on the disk.

    Those that it has already stay as they are, the others become 0.
    """
    if not hasattr(os, "posix_fallocate"):
        return file.truncate(total)
    try:
        os.posix_fallocate(file.fileno(), 0, total)
    except OSError:
        path.unlink(missing_ok=True)  # no process could map it whole
        raise
