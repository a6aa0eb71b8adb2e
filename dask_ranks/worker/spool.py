"""The worker's side of files for a run directory that the worker cannot see.

Whether it sees the directory is found out, not configured: the client leaves a marker there,
and the worker looks for it. A worker that does not see it keeps a spool, a folder of its own,
for the checkpoints of its rank; the client reads each that is announced, and writes the newest
ones there before a restart (`client.checkpoints`). Everything goes through Dask's own
connections. All functions here are called by the client, with `client.run`; those that may take
long leave the worker's event loop to others.
"""

import asyncio
import shutil
from pathlib import Path

from distributed import Worker

from ddp_common.errors import Error


def find_checkpoints(attempt_id: str, directory: str, dask_worker: Worker) -> str:
    """Where a rank on this worker finds and leaves checkpoints: `directory`, or a spool."""
    if (Path(directory) / f".seen-{attempt_id}").exists():
        return directory
    spool = _spool(dask_worker, attempt_id)
    try:
        spool.mkdir(mode=0o700, parents=True)
    except OSError as error:
        raise Error(
            f"The worker {dask_worker.address} does not see the run directory, and cannot keep "
            f"its rank's checkpoints in {spool}: {error.strerror}. Make room there, or give its "
            "cluster another local_directory."
        ) from None
    return str(spool)


def _spool(worker: Worker, attempt_id: str) -> Path:
    return Path(worker.local_directory) / f"ddp-{attempt_id}"


async def read(attempt_id: str, name: str, dask_worker: Worker) -> bytes:
    """A file in this worker's spool."""
    return await asyncio.to_thread((_spool(dask_worker, attempt_id) / name).read_bytes)


async def write(attempt_id: str, name: str, content: bytes, dask_worker: Worker) -> None:
    """Write a file into this worker's spool; it is whole if its digest says so."""
    spool = _spool(dask_worker, attempt_id)
    path = spool / name
    if not spool.exists():  # it was told to forget it meanwhile
        return
    try:
        path.parent.mkdir(exist_ok=True)
        await asyncio.to_thread(path.write_bytes, content)
    except OSError as error:
        raise Error(
            f"The worker {dask_worker.address} cannot write the checkpoint {path}: "
            f"{error.strerror}.\nMake room there, or give its cluster another local_directory."
        ) from None


def forget(attempt_id: str, dask_worker: Worker) -> None:
    """Remove this worker's spool of an attempt."""
    shutil.rmtree(_spool(dask_worker, attempt_id), ignore_errors=True)
