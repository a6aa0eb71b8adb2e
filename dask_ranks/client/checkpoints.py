"""Checkpoints of ranks that do not see the run directory: the client's part.

The workers' part is `worker.spool`. Promises: what arrives is verified by the digest in its name,
and appears whole or not at all.
"""

import asyncio
from concurrent.futures import Future, ThreadPoolExecutor, TimeoutError
from pathlib import Path

from distributed import Client

from dask_ranks.client.rpc import answers_within
from dask_ranks.worker import spool
from ddp_common.checkpoint_files import (
    TEMPORARY,
    digest,
    newest,
    newest_good,
    remove_all_but,
    stated_digest,
)
from ddp_common.errors import Error, first_line

FETCH_TIMEOUT = 600  # seconds that the last checkpoints have to arrive when a run ends
FORGET_TIMEOUT = 5  # seconds that workers have to remove their copies


class Checkpoints:
    """The checkpoints of one attempt: await `find`, then `hand_out`, in the end call `close`.

    `folders` maps a worker's address to the folder of its rank's checkpoints, `resumed` is the one
    to go on from. Fetching is done by a thread, so that a large file does not keep the client from
    noticing a failure.
    """

    def __init__(
        self,
        client: Client,
        attempt_id: str,
        directory: Path,
        addresses: list[str],
    ):
        self.client = client
        self.attempt_id = attempt_id
        self.directory = directory.absolute()
        self.resumed = newest(self.directory)
        self.folders: dict[str, str] = {}
        self.blind = list(addresses)  # those that do not see the run directory, once that is known
        self._fetcher = ThreadPoolExecutor(1, thread_name_prefix="ddp-checkpoints")
        self._fetching: dict[Path, Future] = {}  # the file that was announced last, by its folder
        self._not_here: dict[Path, str] = {}  # folders whose last file has not come -> the worker

    async def find(self) -> None:
        """Find out which workers see the run directory.

        Raises `Error` where the client cannot write there.
        """
        marker = self.directory / f".seen-{self.attempt_id}"
        try:
            marker.touch()
        except OSError as error:
            raise Error(
                f"The run directory {self.directory.parent} cannot be written: {error.strerror}.\n"
                "Make room, or choose another one."
            ) from None
        try:
            self.folders = await self.client.run(
                spool.find_checkpoints, self.attempt_id, str(self.directory), workers=self.blind
            )
        finally:
            marker.unlink(missing_ok=True)
        self.blind = [
            each for each, folder in self.folders.items() if folder != str(self.directory)
        ]

    async def hand_out(self) -> None:
        """Write the newest of each folder to the workers that do not see them."""
        if not self.blind:
            return
        folders = filter(Path.is_dir, self.directory.iterdir())
        for path in filter(None, [self.resumed, *map(newest, folders)]):
            name = str(path.relative_to(self.directory))
            content = await asyncio.to_thread(_content, path)
            await self.client.run(spool.write, self.attempt_id, name, content, workers=self.blind)

    def newest(self) -> Path | None:
        """The newest good checkpoint on the client, None if there is none."""
        self._wait()
        return newest_good(self.directory)

    def announced(self, address: str, name: str, keep: int) -> str | None:
        """A rank has saved a checkpoint on this worker, and keeps the last `keep`.

        Returns why the one before could not be fetched, if that is known by now.
        """
        path = self.directory / name
        if address not in self.blind or Path(name).is_absolute():
            return None
        self._not_here[path.parent] = address
        earlier = self._fetching.get(path.parent)
        self._fetching[path.parent] = self._fetcher.submit(self._fetch, address, path, keep)
        # Unless it has begun: retention may have removed it
        if earlier is None or earlier.cancel() or not earlier.done():
            return None
        error = earlier.exception()
        return first_line(error) if error is not None else None

    def _fetch(self, address: str, path: Path, keep: int) -> None:
        name = str(path.relative_to(self.directory))
        self._not_here[path.parent] = address
        answers = self.client.run(spool.read, self.attempt_id, name, workers=[address])
        path.parent.mkdir(exist_ok=True)
        temporary = path.with_name(TEMPORARY)
        try:
            temporary.write_bytes(answers[address])
            if digest(temporary) != stated_digest(path):
                raise Error(f"{name} of {address} did not arrive whole.")
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        del self._not_here[path.parent]
        remove_all_but(keep, path)

    def _wait(self) -> str | None:
        """Wait until what was announced last is here; returns why it is not, or None."""
        problem = None
        for fetch in self._fetching.values():
            try:
                fetch.result(FETCH_TIMEOUT)
            except TimeoutError:
                return f"it had not arrived after {FETCH_TIMEOUT} s"
            except Exception as error:  # its worker has died, or the disk here is full
                problem = first_line(error)
        return problem

    def close(self, lost: set[str]) -> str | None:
        """Fetch what was announced, then have the workers forget it, except those that are `lost`.

        Returns why a last fetch failed, and where the files stay then, or None.
        """
        problem = self._wait()
        self._fetcher.shutdown(wait=False)
        alive = [address for address in self.blind if address not in lost]
        kept = {*self._not_here.values()}.intersection(alive)
        if kept:
            where = ", ".join(f"{self.folders[each]} of the worker {each}" for each in kept)
            problem = f"{problem}. Until that worker ends it is in {where}"
        alive = [address for address in alive if address not in kept]
        answers_within(FORGET_TIMEOUT, self.client, spool.forget, self.attempt_id, workers=alive)
        return problem


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise Error(f"The checkpoint {path} cannot be read: {error.strerror}.") from None
