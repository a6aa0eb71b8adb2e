"""Everything that agents and scheduler tell a client of a run, in one queue."""

import contextlib
import queue
import threading

from ddp_common.worker.sender import TOPIC

_subscribing = threading.Lock()


@contextlib.contextmanager
def open_inbox(client, run_id):
    """A queue of everything that concerns this run: what its agents send, and workers that the scheduler has lost.

    A client has one handler per topic, so the inboxes of its launches share one. Handlers run on the client's event loop.
    """
    inboxes = client.__dict__.setdefault("ddp_inboxes", {})

    def on_message(event):
        if (mine := inboxes.get(event[1]["run"])) is not None:
            mine.put(event[1])

    def on_cluster_change(event):
        if event[1].get("action") == "remove-worker":
            for each in list(inboxes.values()):
                each.put({"lost": event[1]["worker"]})

    with _subscribing:
        inbox = inboxes[run_id] = queue.SimpleQueue()
        client.subscribe_topic(TOPIC, on_message)
        client.subscribe_topic("all", on_cluster_change)
    try:
        yield inbox
    finally:
        with _subscribing:
            del inboxes[run_id]
            if (
                not inboxes and client.status == "running"
            ):  # a client that closes while it is subscribed makes the scheduler log an error
                client.unsubscribe_topic(TOPIC)
                client.unsubscribe_topic("all")
