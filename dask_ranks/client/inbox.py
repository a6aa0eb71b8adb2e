"""Everything that a client hears of an attempt, in one queue.

It comes from agents, from Dask's scheduler and from Dask's futures.
"""

import queue
from dataclasses import dataclass

from distributed import Client, Future

from dask_ranks.messages import TOPIC


@dataclass
class FromAgent:
    """What the agent of one of the attempt's ranks has sent."""

    rank: int
    packed: str  # `messages.unpack` reads it


@dataclass
class WorkerLost:
    """The scheduler has lost the worker of one of the attempt's ranks."""

    address: str


@dataclass
class TaskEnded:
    """The Dask task of a rank has ended; 'error' and 'cancelled' are of interest."""

    rank: int
    status: str | None  # None: Dask has forgotten it
    reason: str | None  # why it was cancelled


Event = FromAgent | WorkerLost | TaskEnded
Inbox = queue.SimpleQueue[Event | None]  # None: something else has come that somebody waits for

RESTARTED = "scheduler-restart"  # Dask's words for why tasks were cancelled: client.restart(),
CONNECTION_LOST = "scheduler-connection-lost"  # and a scheduler that is gone


def why_cancelled(future: Future) -> str | None:
    """Dask's word for why a task was cancelled; None if it was not."""
    if future.status != "cancelled":
        return None
    assert future._state is not None, "it has a status"
    return getattr(future._state.exception, "reason", None)


def open_inbox(client: Client, attempt_id: str) -> Inbox:
    """A queue of what is sent under the topic of this attempt, from the claim to the release.

    That is what its agents send, and which of its workers are lost (`claims.Claims`, which also
    subscribes). It is filled on the client's event loop.
    """
    topic = TOPIC + attempt_id
    inbox: Inbox = queue.SimpleQueue()

    def on_event(stamped: tuple[float, dict]) -> None:
        match stamped[1]:
            case {"rank": rank, "messages": packed}:
                inbox.put(FromAgent(rank, packed))
            case {"lost": address}:
                inbox.put(WorkerLost(address))
            case {"released": _}:
                del client._event_handlers[topic]

    # Dask's own `unsubscribe_topic` would keep it
    client._event_handlers[topic] = on_event
    return inbox
