"""A cluster that somebody else has started, by the address of its scheduler.

Relies on Dask's own settings for credentials. Promises: an address where no Dask scheduler
answers is an `Error` within seconds that says what is there instead.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor

from distributed.comm import connect as connect_to
from distributed.security import Security

from ddp_common.clusters.client import ClusterClient, dask_is_silent
from ddp_common.clusters.profiles import number_of_workers
from ddp_common.errors import Error, first_line

ANSWER_TIMEOUT = 10  # seconds that a scheduler has to answer at an address


def at_address(profile: dict, wanted: int | str | None) -> ClusterClient:
    """A client of the scheduler at the profile's address; `wanted` is the number of workers.

    Raises `Error` if no scheduler can be reached there.
    """
    address = profile["cluster"]
    count = 1 if wanted is None else number_of_workers(wanted)
    try:
        with dask_is_silent():
            _check_for_scheduler(address)
            client = ClusterClient(address, timeout=ANSWER_TIMEOUT)
    except Exception as error:  # what does not speak Dask's protocol may look like anything
        raise Error(
            f"CLUSTER={address}: no Dask scheduler could be reached there: {_why_not(error)}. "
            "Is it running, is the port right (the dashboard's is another), and does it speak "
            "TLS? For tls://, Dask's own settings name the credentials: "
            "DASK_DISTRIBUTED__COMM__TLS__CA_FILE, …__TLS__CLIENT__CERT and "
            "…__TLS__CLIENT__KEY."
        ) from None
    client.timeout = profile["timeout"]
    client.expected = count
    return client


def _check_for_scheduler(address):
    """Raise an exception unless there is a Dask scheduler.

    A `Client` would wait forever for a port that takes connections and says nothing.
    """
    with ThreadPoolExecutor(1) as own_thread:  # a notebook's main thread has a running event loop
        own_thread.submit(asyncio.run, _shake_hands(address)).result()


async def _shake_hands(address):
    security = Security().get_connection_args("client")
    greeting = connect_to(address, timeout=ANSWER_TIMEOUT, **security)
    connection = await asyncio.wait_for(greeting, ANSWER_TIMEOUT + 1)
    connection.abort()


def _why_not(error):
    """Why a connection failed, in a few words."""
    if isinstance(error, MemoryError):  # it took the first bytes for the length of a message
        return "what answers does not speak Dask's protocol"
    cause = error.__cause__ or error
    if not str(cause):
        return f"no answer within {ANSWER_TIMEOUT} s"
    return first_line(cause).rpartition("Error: ")[2]
