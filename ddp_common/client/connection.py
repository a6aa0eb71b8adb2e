"""Whether ranks can be started through a client, and whether its scheduler answers."""

import time
from typing import Any

from distributed import Client

from ddp_common.errors import Error

RECONNECT_TIMEOUT = 5  # seconds
LOOK_INTERVAL = 0.05  # seconds


def refuse_unusable(client: Any) -> None:
    """Raise `Error` for what is no client, or one through which no ranks can be started."""
    if not isinstance(client, Client):
        how = "Make one with ddp_common.connect()."
        if hasattr(client, "scheduler_address"):
            how = "Make a client of it: Client(cluster)."
        kind = type(client).__name__
        raise Error(f"launch takes a distributed.Client first, not {kind}. {how}")
    if client.asynchronous:
        raise Error(
            "This client is asynchronous, and launch waits until training has ended. Make it "
            "without asynchronous=True, or call launch in a thread: run = await "
            "asyncio.to_thread(ddp.launch, client, train, …)."
        )
    try:
        _wait_until_connected(client)
        workers = client.scheduler_info(n_workers=-1)["workers"]
    except OSError as error:
        raise no_answer(client, error) from None
    if any(address.startswith("inproc://") for address in workers):
        raise Error(
            "The workers of this cluster are threads of one process (processes=False). Ranks need "
            "processes: use LocalCluster(processes=True), which is the default."
        )


def no_answer(client: Client, error: OSError) -> Error:
    address = getattr(client.scheduler, "address", None) or "an address that it has forgotten"
    return Error(
        f"Dask's scheduler at {address} does not answer ({error}). Connect again, and launch with "
        "the new client."
    )


def _wait_until_connected(client: Client) -> None:
    """A client that has just lost its connection may have it back in a moment.

    Raises OSError if it does not, or if it is closed.
    """
    deadline = time.monotonic() + RECONNECT_TIMEOUT
    while client.status == "connecting" and time.monotonic() < deadline:
        time.sleep(LOOK_INTERVAL)
    if client.status == "connecting":
        raise ConnectionError("the connection was lost")
    if client.status != "running":
        raise ConnectionError("this client is closed")
