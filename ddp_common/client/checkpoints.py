"""Checkpoints of ranks that do not see the run directory: the client's part.

The workers' part is `worker.spool`. Promises: what arrives is verified by its SHA-256, and appears
whole or not at all.
"""

import queue
import threading
from pathlib import Path
from typing import NamedTuple

from distributed import Client

from ddp_common.errors import Error
from ddp_common.ranks.checkpoint_files import (
    digest_file,
    install,
    newest,
    newest_good,
    remove_all_but,
    sha256,
)
from ddp_common.worker.spool import PIECE, find_checkpoints, forget, read_piece, write_piece

FETCH_TIMEOUT = 600  # seconds that the last checkpoints have to arrive when a run ends


class Announced(NamedTuple):
    """A checkpoint that a rank has saved in the spool of its worker."""

    address: str  # of the worker
    name: str
    keep: int  # how many of the newest the rank keeps


class Checkpoints:
    """The checkpoints of one attempt.

    Finds out which workers see them, hands out the newest, fetches new ones. `place` maps a
    worker's address to (path, whether it is the run directory's own). Fetching is done by a
    thread, so that a large file does not keep the client from noticing a failure. Raises `Error`
    for a run directory that cannot be written.
    """

    def __init__(self, client: Client, attempt_id: str, directory: Path, addresses: list[str]):
        self.client = client
        self.attempt_id = attempt_id
        self.directory = directory.absolute()
        self.place = self._find_place(addresses)
        self.resumed = newest(self.directory)
        self.blind = [address for address, (_, sees) in self.place.items() if not sees]
        self._announced: queue.SimpleQueue[Announced | None] = queue.SimpleQueue()
        self._fetcher: threading.Thread | None = None
        self._problem: str | Error | None = None  # why the last fetch failed
        if self.resumed is not None and self.blind:
            self._hand_out(self.resumed)

    def _find_place(self, addresses: list[str]) -> dict[str, tuple[str, bool]]:
        marker = self.directory / f".seen-{self.attempt_id}"
        try:
            marker.touch()
        except OSError as error:
            raise Error(
                f"The run directory {self.directory.parent} cannot be written: {error.strerror}. "
                "Make room, or choose another one."
            ) from None
        try:
            return self.client.run(
                find_checkpoints, self.attempt_id, str(self.directory), workers=addresses
            )
        finally:
            marker.unlink(missing_ok=True)

    def newest(self) -> Path | None:
        """The newest good checkpoint on the client, None if there is none."""
        if self._fetcher is not None:
            self._finish_fetching()
        return newest_good(self.directory)

    def _hand_out(self, path: Path) -> None:
        """Put a checkpoint and its digest into the spool of every worker that does not see it."""
        for source in (digest_file(path), path):
            with open(source, "rb") as file:
                offset = 0
                while piece := file.read(PIECE):
                    for address in self.blind:
                        spool, _ = self.place[address]
                        target = f"{spool}/{source.name}"
                        self.client.run(write_piece, target, offset, piece, workers=[address])
                    offset += len(piece)

    # Fetching

    def announced(self, address: str, name: str, keep: int) -> None:
        """A rank has saved a checkpoint on this worker, and keeps the last `keep`."""
        if address not in self.blind:
            return
        if self._fetcher is None:
            self._fetcher = threading.Thread(
                target=self._fetch, daemon=True, name="ddp-checkpoints"
            )
            self._fetcher.start()
        self._announced.put(Announced(address, name, keep))

    def _fetch(self) -> None:
        """The thread: fetch what was announced last, until None comes."""
        while (wanted := self._announced.get()) is not None:
            wanted = self._newest_announced(wanted)
            try:
                self._fetch_file(wanted)
            except Error as error:
                self._problem = error
            except Exception as error:
                # Its worker has died, or retention was quicker: the next will do
                self._problem = f"{type(error).__name__}: {error}"
            else:
                self._problem = None

    def _newest_announced(self, wanted: Announced) -> Announced:
        """`wanted`, or what was announced after it.

        Retention may have removed what came before.
        """
        while not self._announced.empty():
            newer = self._announced.get()
            if newer is None:
                self._announced.put(None)  # for the thread's own loop
                break
            wanted = newer
        return wanted

    def _fetch_file(self, wanted: Announced) -> None:
        spool, _ = self.place[wanted.address]
        source = f"{spool}/{wanted.name}"
        path = self.directory / wanted.name
        temporary = path.with_suffix(".tmp")
        digests = self._read(wanted.address, source.removesuffix(".pt") + ".sha256", 0)
        try:
            with open(temporary, "wb") as file:
                while piece := self._read(wanted.address, source, file.tell()):
                    file.write(piece)
            if sha256(temporary) not in digests.decode().split():
                raise Error(f"{source} on {wanted.address} did not arrive whole.")
            install(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        remove_all_but(wanted.keep, path)

    def _read(self, address: str, path: str, offset: int) -> bytes:
        return self.client.run(read_piece, path, offset, workers=[address])[address]

    def _finish_fetching(self) -> bool:
        """Whether all that was announced has been fetched, or given up, in time."""
        assert self._fetcher is not None
        self._announced.put(None)
        self._fetcher.join(FETCH_TIMEOUT)
        return not self._fetcher.is_alive()

    def close(self, lost: set[str]) -> str | Error | None:
        """Fetch what was announced, then have the workers forget it, except those that are `lost`.

        Returns why the last fetch failed, or None.
        """
        if self._fetcher is not None and not self._finish_fetching():
            spools = [self.place[address][0] for address in self.blind]
            return (
                f"it had not arrived after {FETCH_TIMEOUT} s; it stays on the worker, in {spools}"
            )
        alive = [address for address in self.blind if address not in lost]
        if alive:
            self.client.run(forget, self.attempt_id, workers=alive, on_error="ignore")
        return self._problem
