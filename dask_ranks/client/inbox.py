"""Everything that a client hears of an attempt, in one queue.

It comes from agents, from Dask's scheduler and from Dask's futures.
"""

import contextlib
import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from distributed import Client, Future

from dask_ranks.messages import TOPIC

_subscribing = threading.Lock()


@dataclass
class FromAgent:
    """What the agent of one of the attempt's ranks has sent."""

    rank: int
    packed: str  # `messages.unpack` reads it


@dataclass
class WorkerLost:
    """The scheduler has lost a worker, whoever's it is."""

    address: str


@dataclass
class TaskEnded:
    """The Dask task of a rank has ended; 'error' and 'cancelled' are of interest."""

    rank: int
    status: str | None  # None: Dask has forgotten it
    reason: str | None  # why it was cancelled


Event = FromAgent | WorkerLost | TaskEnded
Inbox = queue.SimpleQueue[Event]

_inboxes: WeakKeyDictionary[Client, dict[str, Inbox]] = WeakKeyDictionary()  # by attempt

RESTARTED = "scheduler-restart"  # Dask's words for why tasks were cancelled: client.restart(),
CONNECTION_LOST = "scheduler-connection-lost"  # and a scheduler that is gone


def why_cancelled(future: Future) -> str | None:
    """Dask's word for why a task was cancelled; None if it was not."""
    if future.status != "cancelled":
        return None
    assert future._state is not None, "it has a status"
    return getattr(future._state.exception, "reason", None)


@contextlib.contextmanager
def open_inbox(client: Client, attempt_id: str) -> Iterator[Inbox]:
    """A queue of everything that concerns this attempt.

    That is what its agents send, and workers that the scheduler has lost. A client has one handler
    for a topic, so the inboxes of its launches share one. Handlers run on the client's event loop.
    """
    with _subscribing:
        inboxes = _inboxes.setdefault(client, {})

    def on_message(stamped: tuple[float, dict]) -> None:
        _, event = stamped
        mine = inboxes.get(event["attempt"])
        if mine is not None:
            mine.put(FromAgent(event["rank"], event["messages"]))

    def on_cluster_change(stamped: tuple[float, dict]) -> None:
        _, event = stamped
        if event.get("action") == "remove-worker":
            for each in list(inboxes.values()):
                each.put(WorkerLost(event["worker"]))

    with _subscribing:
        inbox: Inbox = queue.SimpleQueue()
        inboxes[attempt_id] = inbox
        client.subscribe_topic(TOPIC, on_message)
        client.subscribe_topic("all", on_cluster_change)
    try:
        yield inbox
    finally:
        with _subscribing:
            del inboxes[attempt_id]
            # A client that closes while it is subscribed makes the scheduler log an error.
            if not inboxes and client.status == "running":
                client.unsubscribe_topic(TOPIC)
                client.unsubscribe_topic("all")
