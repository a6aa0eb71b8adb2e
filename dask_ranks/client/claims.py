"""Which workers a launch takes: it claims them on the scheduler, and gives them back at the end.

All that a launch has on the scheduler is the plugin `Claims`, and a topic of events for each
attempt. Promises: never two ranks on a worker, also with several launches and several clients at
once; who has claimed a worker is told when it is lost; the claims of a client that is gone, and
those on a worker that is gone, are void; after the last launch the scheduler is as it was found,
without the plugin and without the messages of ranks, of which Dask would keep many.
"""

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

from distributed import Client, Scheduler, SchedulerPlugin

from dask_ranks.client.rpc import known_workers, refuse_without_package, wait_until
from dask_ranks.messages import TOPIC
from dask_ranks.run.progress import Progress
from ddp_common.errors import Error

RECONNECT_TIMEOUT = 5  # seconds
QUIET = 2  # seconds of waiting for workers without a word
NAME = "ddp-claims"  # of the plugin


@runtime_checkable
class KeepsWorkers(Protocol):
    """A client of `connect`, which looks after the workers of its cluster."""

    most: int | None  # ranks that were asked for, where there are more workers

    def make_ready(self, failed: bool) -> None:
        """Before an attempt (`failed`: after one that failed), replace workers that have ended."""

    def why_lost(self, address: str) -> str:
        """What is known of the end of the worker that was there, in words; '' if nothing."""


@contextlib.contextmanager
def claimed_workers(
    client: Client,
    attempt_id: str,
    wanted: int | None,
    timeout: float,
    rows_held: dict[str, int],
) -> Iterator[list[str]]:
    """Claim workers, waiting for them if need be; yields their addresses in rank order.

    Gives them back at the end. `wanted`: how many (None: all). `rows_held`: rows of this launch's
    tables on each worker; those with most are taken first. Raises `Error` when there are too few
    within `timeout` seconds.
    """
    most = client.most if isinstance(client, KeepsWorkers) else None
    answer: dict[str, Any] = {}

    def claim() -> bool:
        request = (client.id, attempt_id, wanted, most, rows_held)
        try:
            answer.update(client.run_on_scheduler(claim_workers, *request))
        except OSError as error:
            raise no_answer(client, error) from None
        except ImportError as error:
            refuse_without_package(error)
            raise
        return bool(answer["claimed"])

    try:
        is_claimed = wait_until(claim, min(timeout, QUIET))
        if wanted is None and answer["paused"]:
            paused = ", ".join(answer["paused"])
            warnings.warn(
                f"The worker at {paused} is paused, as its memory is nearly full, and gets no "
                "rank. Free memory there, or give workers more (memory_limit).",
                stacklevel=4,
            )
        if not is_claimed and timeout > QUIET:
            text = f"Waiting for workers, up to {timeout:g} s: {_there_are(answer)}"
            Progress().note(text, also_in_logs=True)
            is_claimed = wait_until(claim, timeout - QUIET)
        if not is_claimed:
            raise Error(
                f"No {wanted or 'free'} worker(s) for this launch within {timeout} s: "
                f"{_there_are(answer)}\n"
                "Start more (WORKERS=…, cluster.scale, cluster.adapt(minimum=…), or `dask worker "
                f"{client.scheduler.address}`), ask for fewer ranks, or wait for the others."
            )
        yield answer["claimed"]
    finally:
        # Those of a client that is gone, or has lost its connection, are void
        with contextlib.suppress(OSError, ImportError):  # it has no ddp_common: nothing is claimed
            if client.status == "running":
                client.run_on_scheduler(release_workers, attempt_id)


def _there_are(answer: dict[str, Any]) -> str:
    """The workers that a claim has found, in a sentence."""
    known = answer["known"]
    parts = [f"the cluster has {known or 'no'} worker{'' if known == 1 else 's'}"]
    if answer["busy"]:
        parts.append(f"of which {answer['busy']} run other launches")
    if answer["paused"]:
        parts.append(
            f"and those at {', '.join(answer['paused'])} are paused: their memory is full"
        )
    return f"{', '.join(parts)}."


# Whether ranks can be started through a client


def refuse_unusable(client: Any) -> None:
    """Raise `Error` for what is no client, or one through which no ranks can be started."""
    if not isinstance(client, Client):
        raise Error(
            f"launch takes a distributed.Client first, not {type(client).__name__}.\n"
            "Make one with ddp_common.connect(), or, of a cluster that you have, Client(cluster)."
        )
    if client.asynchronous:
        raise Error(
            "This client is asynchronous, and launch waits until training has ended.\n"
            "Call it in a thread: run = await asyncio.to_thread(ddp.launch, client, train, …)."
        )
    try:
        # One that has just lost its connection may have it back in a moment
        if not wait_until(lambda: client.status != "connecting", RECONNECT_TIMEOUT):
            raise ConnectionError("the connection was lost")
        if client.status != "running":
            raise ConnectionError("this client is closed")
        workers = known_workers(client)
    except OSError as error:
        raise no_answer(client, error) from None
    if any(address.startswith("inproc://") for address in workers):
        raise Error(
            "The workers of this cluster are threads of one process (processes=False).\n"
            "Ranks need processes: use LocalCluster(processes=True), which is the default."
        )


def no_answer(client: Client, error: OSError) -> Error:
    """The `Error` for a scheduler that does not answer."""
    address = getattr(client.scheduler, "address", None) or "an address that it has forgotten"
    return Error(
        f"Dask's scheduler at {address} does not answer ({error}).\n"
        "Connect again, and launch with the new client."
    )


# On the scheduler


class Claims(SchedulerPlugin):
    """The claims of all launches on this scheduler, while there are any."""

    def __init__(self, scheduler: Scheduler):
        self.scheduler = scheduler
        self.clients: dict[str, str] = {}  # attempt id -> client id, also of those that wait
        self.holders: dict[str, str] = {}  # worker -> attempt id

    def claim(
        self,
        client_id: str,
        attempt_id: str,
        wanted: int | None,
        most: int | None,
        rows_held: dict[str, int],
    ) -> dict[str, Any]:
        """Claim `wanted` workers (None: all, up to `most`), those with most rows first.

        The scheduler's event loop makes it atomic. Returns those in "claimed", none where too few
        are free; and what is to be said of the others. From now on the client gets the attempt's
        events.
        """
        self.clients[attempt_id] = client_id
        self.scheduler.subscribe_topic(TOPIC + attempt_id, client_id)
        workers = self.scheduler.workers
        status = {address: worker.status.name for address, worker in workers.items()}
        known = [address for address in workers if status[address] == "running"]
        paused = [address for address in workers if status[address] == "paused"]
        free = [address for address in known if address not in self.holders]
        free.sort(key=lambda address: (-rows_held.get(address, 0), workers[address].host))
        count = wanted or min(most or len(known), len(known))
        if count == 0 or len(free) < count:
            busy = len(self.holders)
            return {"claimed": [], "paused": paused, "known": len(known), "busy": busy}
        chosen = sorted(free[:count], key=lambda address: workers[address].host)
        self.holders.update(dict.fromkeys(chosen, attempt_id))
        return {"claimed": chosen, "paused": paused}

    def release(self, attempt_id: str) -> None:
        """Void the claims of an attempt, and go where there are no others."""
        del self.clients[attempt_id]
        for address, holder in list(self.holders.items()):
            if holder == attempt_id:
                del self.holders[address]
        # Also those of agents that have spoken when their client was gone
        topics = self.scheduler._broker._topics
        for topic in list(topics):
            if topic.startswith(TOPIC) and topic.removeprefix(TOPIC) not in self.clients:
                del topics[topic]
        if not self.clients:
            self.scheduler.remove_plugin(NAME)

    # Called by Dask

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        for attempt_id, its_client in list(self.clients.items()):
            if its_client == client:
                self.release(attempt_id)

    def remove_worker(self, scheduler: Scheduler, worker: str, **others: Any) -> None:
        attempt_id = self.holders.pop(worker, None)
        if attempt_id is not None:
            scheduler.log_event(TOPIC + attempt_id, {"lost": worker})

    def log_event(self, topic: str, msg: Any) -> None:
        """A message of a rank has gone to its client: nobody will read it here any more."""
        if topic.startswith(TOPIC):
            self.scheduler._broker.truncate(topic)


# Called by the client, with `client.run_on_scheduler`


def claim_workers(*request: Any, dask_scheduler: Scheduler) -> dict[str, Any]:
    """`Claims.claim`, on a scheduler that may not have the plugin yet."""
    if NAME not in dask_scheduler.plugins:
        dask_scheduler.add_plugin(Claims(dask_scheduler), name=NAME)
    plugin: Any = dask_scheduler.plugins[NAME]
    return plugin.claim(*request)


def release_workers(attempt_id: str, dask_scheduler: Scheduler) -> None:
    """Give back the workers of an attempt, if it has any."""
    plugin: Any = dask_scheduler.plugins.get(NAME)
    if plugin is not None and attempt_id in plugin.clients:
        dask_scheduler.log_event(TOPIC + attempt_id, {"released": True})
        plugin.release(attempt_id)
