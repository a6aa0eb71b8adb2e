"""Rank 0's result, on its way to the client: in memory, and not copied on this machine."""

import mmap
import os
import tempfile
import weakref
from typing import BinaryIO

# Bytes; the client says so before it fetches one, because that takes a moment
LARGE_RESULT = 32 * 2**20


def open_result_file(attempt_id: str) -> BinaryIO:
    """A file in memory, into which rank 0 writes its result: a pipe would copy it four times."""
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create(f"ddp-result-{attempt_id}"), "rb")
    return tempfile.TemporaryFile()


def take_result(file: BinaryIO) -> tuple[memoryview, dict]:
    """The content of rank 0's file, and the fields of `Ended` that say where it is.

    A client on this machine finds it there. The file is closed with the content, when Dask forgets
    it.
    """
    size = os.fstat(file.fileno()).st_size
    content = mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ)
    weakref.finalize(content, file.close)
    path = f"/proc/{os.getpid()}/fd/{file.fileno()}"
    target = os.readlink(path) if os.path.exists(path) else None
    place = {"result_size": size, "result_path": path, "result_target": target}
    return memoryview(content), place
