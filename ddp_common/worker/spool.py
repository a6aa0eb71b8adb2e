"""Files between the client's run directory and workers that cannot see it.

Whether a worker sees the directory is found out, not configured: the client leaves a marker there, the worker looks for it. One that
does not see it keeps a spool, a folder of its own, for the checkpoints of its rank; the client fetches each as it is announced, and
puts the newest one there before a restart. Everything goes through Dask's own connections, in pieces. Promises: what arrives is
verified by its SHA-256, and appears whole or not at all.
"""

import collections
import shutil
from pathlib import Path

from ddp_common.errors import Error

KEPT_MESSAGES = 10
PIECE = (
    8 * 2**20
)  # bytes in one message: large enough to be quick, small enough for heartbeats in between

_files = {}  # on a worker: what save_file sent, until the client has fetched it


# On the worker; called with `client.run`


def find_checkpoints(run_id, directory, dask_worker):
    """Where a rank on this worker finds and leaves checkpoints: (path, whether it is the run directory's own)."""
    _keep_few_messages(dask_worker)
    if (Path(directory) / f".seen-{run_id}").exists():
        return directory, True
    spool = _spool(dask_worker, run_id)
    try:
        spool.mkdir(mode=0o700, parents=True)
    except OSError as error:
        raise Error(
            f"The worker {dask_worker.address} does not see the run directory, and cannot keep its rank's checkpoints in {spool}: "
            f"{error.strerror}. Make room there, or give its cluster another local_directory."
        ) from None
    return str(spool), False


def _keep_few_messages(worker):
    """Dask keeps the last thousand messages to the scheduler for whoever debugs it: with many reports, hundreds of MB."""
    stream = getattr(worker, "batched_stream", None)
    if isinstance(getattr(stream, "recent_message_log", None), collections.deque):
        stream.recent_message_log = collections.deque(maxlen=KEPT_MESSAGES)


def _spool(worker, run_id):
    return Path(worker.local_directory) / f"ddp-{run_id}"


def keep_file(token, content):
    _files[token] = content


def take_file(token):
    """The content of a saved file, which this worker then forgets."""
    return _files.pop(token)


def read_piece(path, offset):
    with open(path, "rb") as file:
        file.seek(offset)
        return file.read(PIECE)


def write_piece(path, offset, content):
    with open(path, "r+b" if offset else "wb") as file:
        file.seek(offset)
        file.write(content)


def forget(run_id, dask_worker):
    """Remove this worker's spool of a run."""
    shutil.rmtree(_spool(dask_worker, run_id), ignore_errors=True)


# On the client
