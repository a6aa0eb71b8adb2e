"""Many small objects of a bucket, read fast: signed addresses, and connections that stay open.

`s3fs` reads an object through a request of the whole AWS client, which takes 2 ms of a core: where
images are small, more than all the rest. Here `s3fs` only signs an address for each object, and
botocore's pool of connections fetches it, with the proxies and certificates that the client would
use. Promises: what cannot be had in this way is asked for once more through `s3fs`, which knows
about regions and retries, and says what is wrong.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

CONNECTIONS = 32  # at once, of each process: enough to keep a server 20 ms away busy
SECONDS_VALID = 600  # of a signed address, which is used at once


class SignedReader:
    """Reads whole objects of the `s3fs.S3FileSystem` that it is given, in this process only."""

    def __init__(self, filesystem: Any):
        self.filesystem = filesystem
        self.connections: Any = None  # made when they are first needed
        self.threads = ThreadPoolExecutor(CONNECTIONS)
        self.works: bool | None = None  # whether signed addresses do; not known yet

    def read(self, paths: list[str]) -> Iterator[bytes | Exception]:
        """The bytes of each object, in order, or the exception that kept it from being read."""
        if self.connections is None and self.works is not False:
            self._connect()
        lost: list[Exception] = []
        return self.threads.map(self._read_one, paths, [lost] * len(paths))

    def _connect(self):
        from botocore.exceptions import BotoCoreError  # s3fs brings it: an extra of this package

        try:
            self.connections = _connections_like(self.filesystem)
        except (BotoCoreError, OSError):  # a profile or file of certificates that is not here
            self.works = False  # `s3fs` will say so

    def _read_one(self, path, lost):
        """`lost`: of this batch, what kept an object away that may well exist."""
        if lost:
            return lost[0]  # no network: the others need not wait for the same
        content = None if self.works is False else self._read_signed(path)
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

    def _read_signed(self, path):
        """The object's bytes; None if this was not to be had."""
        from botocore.awsrequest import AWSRequest
        from botocore.exceptions import BotoCoreError

        try:
            address = self.filesystem.sign(path, expiration=SECONDS_VALID)
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
