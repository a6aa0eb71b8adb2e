"""Files between the client's run directory and workers that cannot see it.

Whether a worker sees the directory is found out, not configured: the client leaves a marker there, the worker looks for it. One that
does not see it keeps a spool, a folder of its own, for the checkpoints of its rank; the client fetches each as it is announced, and
puts the newest one there before a restart. Everything goes through Dask's own connections, in pieces. Promises: what arrives is
verified by its SHA-256, and appears whole or not at all.
"""

import collections
import queue
import shutil
import threading
from pathlib import Path

from ddp_common.errors import Error

FETCH_TIMEOUT = 600  # seconds that the last checkpoints have to arrive when a run ends
KEPT_MESSAGES = 10
PIECE = 8 * 2**20  # bytes in one message: large enough to be quick, small enough for heartbeats in between

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
        raise Error(f"The worker {dask_worker.address} does not see the run directory, and cannot keep its rank's checkpoints in {spool}: "
                    f"{error.strerror}. Make room there, or give its cluster another local_directory.") from None
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


class Checkpoints:
    """The client's hand in the checkpoints of one attempt: finds out who sees them, hands out the newest, fetches new ones.

    `place` maps a worker's address to (path, whether it is the run directory's own). Fetching is done by a thread, so that a large
    file does not keep the client from noticing a failure.
    """

    def __init__(self, client, run_id, directory, addresses):
        from ddp_common.checkpoint import newest

        self.client, self.run_id, self.directory = client, run_id, directory.absolute()
        marker = self.directory / f".seen-{run_id}"
        try:
            marker.touch()
        except OSError as error:
            raise Error(f"The run directory {self.directory.parent} cannot be written: {error.strerror}. Make room, or choose another one.") from None
        try:
            self.place = client.run(find_checkpoints, run_id, str(self.directory), workers=addresses)
        finally:
            marker.unlink(missing_ok=True)
        self.resumed = newest(self.directory)
        self.blind = [address for address, (_, sees) in self.place.items() if not sees]
        if self.resumed is not None and self.blind:
            self._hand_out(self.resumed)
        self._announced, self._fetcher, self._problem = queue.SimpleQueue(), None, None

    def newest(self):
        """The newest good checkpoint on the client, None if there is none."""
        from ddp_common.checkpoint import checkpoints, fault

        if self._fetcher is not None:
            self._finish_fetching()
        return next((path for path in reversed(checkpoints(self.directory)) if fault(path) is None), None)

    def _hand_out(self, path):
        from ddp_common.checkpoint import digest_file

        for source in (digest_file(path), path):
            with open(source, "rb") as file:
                for number, piece in enumerate(iter(lambda: file.read(PIECE), b"")):
                    for address in self.blind:
                        target = f"{self.place[address][0]}/{source.name}"
                        self.client.run(write_piece, target, number * PIECE, piece, workers=[address])

    def announced(self, address, name, keep):
        """A rank has saved a checkpoint on this worker, and keeps the last `keep`."""
        if address in self.blind:
            if self._fetcher is None:
                self._fetcher = threading.Thread(target=self._fetch, daemon=True, name="ddp-checkpoints")
                self._fetcher.start()
            self._announced.put((address, name, keep))

    def _fetch(self):
        while (wanted := self._announced.get()) is not None:
            while not self._announced.empty():
                newer = self._announced.get()
                if newer is None:
                    self._announced.put(None)  # for the loop around this one
                    break
                wanted = newer  # retention may have removed those before it
            address, name, keep = wanted
            try:
                self._fetch_file(address, f"{self.place[address][0]}/{name}", self.directory / name, keep)
            except Exception as error:  # its worker has died, or retention was quicker: the next one will do
                self._problem = f"{type(error).__name__}: {error}" if not isinstance(error, Error) else error
            else:
                self._problem = None

    def _fetch_file(self, address, source, path, keep):
        from ddp_common.checkpoint import install, remove_all_but, sha256

        (digest,) = self.client.run(read_piece, source.removesuffix(".pt") + ".sha256", 0, workers=[address]).values()
        temporary = path.with_suffix(".tmp")
        try:
            with open(temporary, "wb") as file:
                while piece := self.client.run(read_piece, source, file.tell(), workers=[address])[address]:
                    file.write(piece)
            if sha256(temporary) not in digest.decode().split():
                raise Error(f"{source} on {address} did not arrive whole.")
            install(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        remove_all_but(keep, path)

    def _finish_fetching(self):
        self._announced.put(None)
        self._fetcher.join(FETCH_TIMEOUT)
        return not self._fetcher.is_alive()

    def close(self, lost):
        """Fetch what was announced, then have the workers forget it; not from those that are `lost`. Returns the last failure, or None."""
        if self._fetcher is not None and not self._finish_fetching():
            return f"it had not arrived after {FETCH_TIMEOUT} s; it stays on the worker, in {[self.place[each][0] for each in self.blind]}"
        if alive := [address for address in self.blind if address not in lost]:
            self.client.run(forget, self.run_id, workers=alive, on_error="ignore")
        return self._problem
