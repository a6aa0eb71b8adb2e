"""The client's hand in the checkpoints of ranks that do not see the run directory."""

import queue
import threading

from ddp_common.errors import Error
from ddp_common.ranks.checkpoint_files import (
    checkpoints,
    digest_file,
    fault,
    install,
    newest,
    remove_all_but,
    sha256,
)
from ddp_common.worker.spool import PIECE, find_checkpoints, forget, read_piece, write_piece

FETCH_TIMEOUT = 600  # seconds that the last checkpoints have to arrive when a run ends


class Checkpoints:
    """The client's hand in the checkpoints of one attempt: finds out who sees them, hands out the newest, fetches new ones.

    `place` maps a worker's address to (path, whether it is the run directory's own). Fetching is done by a thread, so that a large
    file does not keep the client from noticing a failure.
    """

    def __init__(self, client, run_id, directory, addresses):
        self.client, self.run_id, self.directory = client, run_id, directory.absolute()
        marker = self.directory / f".seen-{run_id}"
        try:
            marker.touch()
        except OSError as error:
            raise Error(
                f"The run directory {self.directory.parent} cannot be written: {error.strerror}. Make room, or choose another one."
            ) from None
        try:
            self.place = client.run(
                find_checkpoints, run_id, str(self.directory), workers=addresses
            )
        finally:
            marker.unlink(missing_ok=True)
        self.resumed = newest(self.directory)
        self.blind = [address for address, (_, sees) in self.place.items() if not sees]
        if self.resumed is not None and self.blind:
            self._hand_out(self.resumed)
        self._announced, self._fetcher, self._problem = queue.SimpleQueue(), None, None

    def newest(self):
        """The newest good checkpoint on the client, None if there is none."""
        if self._fetcher is not None:
            self._finish_fetching()
        return next(
            (path for path in reversed(checkpoints(self.directory)) if fault(path) is None), None
        )

    def _hand_out(self, path):
        for source in (digest_file(path), path):
            with open(source, "rb") as file:
                for number, piece in enumerate(iter(lambda: file.read(PIECE), b"")):
                    for address in self.blind:
                        target = f"{self.place[address][0]}/{source.name}"
                        self.client.run(
                            write_piece, target, number * PIECE, piece, workers=[address]
                        )

    def announced(self, address, name, keep):
        """A rank has saved a checkpoint on this worker, and keeps the last `keep`."""
        if address in self.blind:
            if self._fetcher is None:
                self._fetcher = threading.Thread(
                    target=self._fetch, daemon=True, name="ddp-checkpoints"
                )
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
                self._fetch_file(
                    address, f"{self.place[address][0]}/{name}", self.directory / name, keep
                )
            except (
                Exception
            ) as error:  # its worker has died, or retention was quicker: the next one will do
                self._problem = (
                    f"{type(error).__name__}: {error}" if not isinstance(error, Error) else error
                )
            else:
                self._problem = None

    def _fetch_file(self, address, source, path, keep):
        (digest,) = self.client.run(
            read_piece, source.removesuffix(".pt") + ".sha256", 0, workers=[address]
        ).values()
        temporary = path.with_suffix(".tmp")
        try:
            with open(temporary, "wb") as file:
                while piece := self.client.run(read_piece, source, file.tell(), workers=[address])[
                    address
                ]:
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
