"""Checkpoints of ranks that do not see the run directory: the client's part.

The workers' part is `worker.spool`. Promises: what arrives is verified by the digest in its name,
and appears whole or not at all.
"""

import asyncio
import functools
import os
from concurrent.futures import Future, wait
from pathlib import Path

from distributed import Client

from dask_ranks.client.rpc import answers_within, begin
from dask_ranks.worker import spool
from ddp_common import checkpoint_files as files
from ddp_common.errors import Error, first_line

FETCH_TIMEOUT = 600  # seconds that the last checkpoints have to arrive when a run ends
FORGET_TIMEOUT = 5  # seconds that workers have to remove their copies


class Checkpoints:
    """The checkpoints of one attempt: await `find`, then `hand_out`, in the end call `close`.

    `folders` maps a worker's address to the folder of its rank's checkpoints. Fetching is done on
    the client's event loop, so that a large file does not keep the client from noticing a failure.
    """

    def __init__(self, client: Client, attempt_id: str, directory: Path, addresses: list[str]):
        self.client = client
        self.attempt_id = attempt_id
        self.directory = directory.absolute()
        self.folders: dict[str, str] = {}
        self.blind = list(addresses)  # those that do not see the run directory, once that is known
        self._last: dict[Path, tuple[str, Path]] = {}  # folder -> worker and file announced last
        self._fetches: dict[Path, Future] = {}  # folder -> the fetching of that file
        self._one_at_a_time = asyncio.Lock()

    def last_step(self) -> int:
        """The step of the newest file, by its name: the ranks will see whether it is good."""
        self._not_here()
        named = filter(files.stated_digest, files.checkpoints(self.directory))
        return max(map(files.step_of, named), default=0)

    async def find(self) -> None:
        """Find out which workers see the run directory.

        Raises `Error` where the client cannot write there.
        """
        marker = self.directory / f".seen-{self.attempt_id}"
        try:
            marker.touch(exist_ok=False)
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
        own = str(self.directory)
        self.blind = [each for each, folder in self.folders.items() if folder != own]

    async def hand_out(self) -> None:
        """Write the newest of each folder to the workers that do not see them."""
        if not self.blind:
            return
        folders = [self.directory, *filter(Path.is_dir, self.directory.iterdir())]
        for path in filter(None, await asyncio.to_thread(lambda: [*map(files.newest, folders)])):
            name = str(path.relative_to(self.directory))
            content = await asyncio.to_thread(path.read_bytes)
            await self.client.run(spool.write, self.attempt_id, name, content, workers=self.blind)

    def announced(self, address: str, name: str, keep: int) -> str | None:
        """A rank has saved a checkpoint on this worker, and keeps the last `keep`.

        Returns why the one before could not be fetched, if that is known by now.
        """
        path = self.directory / name
        if address not in self.blind or Path(name).is_absolute():
            return None
        earlier = self._fetches.get(path.parent)
        self._last[path.parent] = address, path
        fetch = functools.partial(self._fetch, address, path, keep)
        self._fetches[path.parent] = begin(self.client, fetch)
        return earlier.result() if earlier is not None and earlier.done() else None

    async def _fetch(self, address: str, path: Path, keep: int) -> str | None:
        """Returns why the file has not come, or None."""
        name = str(path.relative_to(self.directory))
        async with self._one_at_a_time:
            if self._last[path.parent] != (address, path):  # retention may have removed this one
                return None
            try:
                read = self.client.run(spool.read, self.attempt_id, name, workers=[address])
                await asyncio.to_thread(_write, path, (await read)[address], keep)
            except Exception as error:  # its worker has died, or the disk here is full
                return first_line(error)
        return None

    def _not_here(self) -> dict[str, str]:
        """Wait for what was announced last; returns why it has not come, by its worker."""
        done, _ = wait(self._fetches.values(), FETCH_TIMEOUT)
        reasons = {}
        for folder, fetch in self._fetches.items():
            address, _ = self._last[folder]
            late = f"it had not arrived after {FETCH_TIMEOUT} s"
            reasons[address] = fetch.result() if fetch in done else late
        return {address: reason for address, reason in reasons.items() if reason}

    def close(self, lost: set[str]) -> str | None:
        """Fetch what was announced, then have the workers forget it, except those that are `lost`.

        Returns why a last fetch failed, and where the files stay then, or None.
        """
        reasons = self._not_here()
        alive = [each for each in self.blind if each not in lost and each not in reasons]
        answers_within(FORGET_TIMEOUT, self.client, spool.forget, self.attempt_id, workers=alive)
        problem = ". ".join(dict.fromkeys(reasons.values()))
        kept = [
            f"{self.folders[each]} of the worker {each}" for each in reasons if each not in lost
        ]
        if kept:
            problem += f". Until that worker ends it is in {', '.join(kept)}"
        return problem or None


def _write(path: Path, content: bytes, keep: int) -> None:
    """Write a checkpoint file, whole or not at all, and remove those that it replaces."""
    path.parent.mkdir(mode=0o755, exist_ok=True)
    with files.new_temporary(path.parent) as file:
        file.write(content)
        file.flush()
        if files.digest(Path(file.name)) != files.stated_digest(path):
            raise Error(f"{path.name} did not arrive whole.")
        os.replace(file.name, path)
    files.remove_all_but(keep, path)
