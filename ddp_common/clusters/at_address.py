"""A cluster that somebody else has started, by the address of its scheduler."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

from distributed.comm import connect as connect_to
from distributed.security import Security

from ddp_common.clusters.cluster_client import ClusterClient
from ddp_common.clusters.profiles import number_of_workers
from ddp_common.clusters.quiet import quiet
from ddp_common.errors import Error

ANSWER_TIMEOUT = 10  # seconds that a scheduler has to answer at an address


def at_address(profile, wanted):
    address, count = profile["cluster"], 1 if wanted is None else number_of_workers(wanted)
    try:
        with quiet(), ThreadPoolExecutor(1) as own_thread:  # a notebook's has a loop that runs
            own_thread.submit(asyncio.run, _shake_hands(address)).result()
            client = ClusterClient(address, timeout=ANSWER_TIMEOUT)
    except Exception as error:  # what does not speak Dask's protocol may look like anything
        raise Error(
            f"CLUSTER={address}: no Dask scheduler could be reached there: {_why_not(error)}. Is it running, is the port right (the dashboard's is "
            "another), and does it speak TLS? For tls://, Dask's own settings name the credentials: DASK_DISTRIBUTED__COMM__TLS__CA_FILE, "
            "…__TLS__CLIENT__CERT and …__TLS__CLIENT__KEY."
        ) from None
    client.timeout, client.expected = profile["timeout"], count
    return client


def _why_not(error):
    """Of a failed connection, in a few words."""
    if isinstance(error, MemoryError):  # it took the first bytes for the length of a message
        return "what answers does not speak Dask's protocol"
    said = [
        str(each).partition("\n")[0].rpartition("Error: ")[2]
        for each in (error, error.__cause__)
        if str(each or "")
    ]
    return (
        f"{said[0]}{f' ({said[1]})' if said[1:] else ''}"
        if said
        else f"no answer within {ANSWER_TIMEOUT} s"
    )


async def _shake_hands(address):
    """Raise an exception unless there is a Dask scheduler. A `Client` would wait for ever for a port that takes connections and says nothing."""
    greeting = connect_to(
        address, timeout=ANSWER_TIMEOUT, **Security().get_connection_args("client")
    )
    (await asyncio.wait_for(greeting, ANSWER_TIMEOUT + 1)).abort()
