"""Many small objects of a bucket, read fast: signed addresses, and connections that stay open.

`s3fs` reads an object through a request of the whole AWS client, which takes 2 ms of a core: where
images are small, more than all the rest. Here `s3fs` only signs an address for each object, and
botocore's pool of connections fetches it, with the proxies and certificates that the client would
use. Promises: what cannot be had in this way is asked for once more through `s3fs`, which knows
about regions and retries, and says what is wrong.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fsspec.asyn import sync

CONNECTIONS = 32  # at once, of each process: enough to keep a server 20 ms away busy
SECONDS_VALID = 600  # of a signed address, which is used at once


class SignedReader:
    """Reads whole objects of the `s3fs.S3FileSystem` that it is given, in this process only."""

    def __init__(self, filesystem: Any):
        self.filesystem = filesystem
        self.connections: Any = None  # made when they are first needed
        self.threads = ThreadPoolExecutor(CONNECTIONS)
        self.works: bool | None = None  # whether signed addresses do; not known yet

    def read(self, paths: list[str], made_of: Callable = lambda content: content) -> list[Any]:
        """What `made_of` makes of each object, in order.

        It is given the object's bytes, or the exception that kept it from being read, at once, in
        the thread that did: handing bytes over to another one costs more than it gains.
        """
        if self.connections is None and self.works is not False:
            self._connect()
        lost: list[Exception] = []
        tasks = sync(self.filesystem.loop, self._start, paths, lost, made_of)
        return [task.result() for task in tasks]

    async def _start(self, paths, lost, made_of):
        """Sign the addresses, and let each be read while the next one is signed.

        `s3fs` signs in its event loop. Going there once, and not for each object, saves a third of
        the work.
        """
        tasks = []
        for path in paths:
            address = await self._signed(path, lost)
            tasks.append(self.threads.submit(self._read_one, path, address, lost, made_of))
        return tasks

    def _connect(self):
        from botocore.exceptions import BotoCoreError  # s3fs brings it: an extra of this package

        try:
            self.connections = _connections_like(self.filesystem)
        except (BotoCoreError, OSError):  # a profile or file of certificates that is not here
            self.works = False  # `s3fs` will say so

    async def _signed(self, path, lost):
        """An address of the object; None if there is none, or no use in it."""
        from botocore.exceptions import BotoCoreError

        if lost or self.works is False:
            return None
        try:
            return await self.filesystem._url(path, SECONDS_VALID)
        except (BotoCoreError, OSError):
            return None

    def _read_one(self, path, address, lost, made_of):
        """`lost`: of this batch, what kept an object away that may well exist."""
        return made_of(self._content(path, address, lost))

    def _content(self, path, address, lost):
        if lost:
            return lost[0]  # no network: the others need not wait for the same
        content = self._fetched(address)
        if content is not None:
            self.works = True
            return content
        try:
            content = self.filesystem.cat_file(path)
        except (FileNotFoundError, PermissionError) as error:
            return error
        except Exception as error:  # of botocore, aiohttp, or the system: no network, for example
            lost.append(error)
            return error
        if self.works is None:  # the object is there: the signed address was not the right one
            self.works = False
        return content

    def _fetched(self, address):
        """The bytes at the address; None if these were not to be had."""
        from botocore.awsrequest import AWSRequest
        from botocore.exceptions import BotoCoreError

        if address is None or self.works is False:
            return None
        try:
            answer = self.connections.send(AWSRequest("GET", address).prepare())
            return answer.content if answer.status_code == 200 else None
        except (BotoCoreError, OSError):
            return None


def _connections_like(filesystem):
    """Connections with the time-outs, certificates and proxies of the file system's own client."""
    from botocore.httpsession import URLLib3Session
    from botocore.utils import get_environ_proxies

    client = filesystem.connect()
    return URLLib3Session(
        verify=filesystem.session.get_config_variable("ca_bundle") or True,
        proxies=get_environ_proxies(client.meta.endpoint_url),
        timeout=(client.meta.config.connect_timeout, client.meta.config.read_timeout),
        max_pool_connections=CONNECTIONS,
    )
