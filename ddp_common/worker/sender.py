"""From an agent to its client: messages, gathered for a moment and packed into one of Dask's events."""

import json
import time
import zlib

from ddp_common.worker import spool

TOPIC = "ddp_common"
FLUSH = 0.1  # seconds that reports and printed lines are gathered before they are sent


class Sender:
    """Gathers this rank's messages for a moment, then sends them to the client as one event.

    They are packed into a few bytes: worker, scheduler and client each keep the last thousand events.
    """

    def __init__(self, worker, run_id, rank):
        self.worker, self.envelope, self.waiting, self.sent = (
            worker,
            {"run": run_id, "rank": rank},
            [],
            time.monotonic(),
        )

    def __call__(self, message):
        if "content" in message:  # too large for an event: the client fetches it
            message["token"] = (
                f"{self.envelope['run']}/{self.envelope['rank']}/{time.monotonic_ns()}"
            )
            spool.keep_file(message["token"], message.pop("content"))
        self.waiting.append(message)
        if {"started", "returned", "ended"} & set(message):
            self.flush()

    def flush(self):
        if self.waiting:
            packed = zlib.compress(json.dumps(self.waiting).encode(), level=1)
            self.worker.log_event(TOPIC, {**self.envelope, "packed": packed})
        self.waiting, self.sent = [], time.monotonic()

    def flush_if_due(self):
        if time.monotonic() - self.sent > FLUSH:
            self.flush()


def messages_of(event):
    """The messages (list of dict) in an event of an agent; none in any other."""
    return json.loads(zlib.decompress(event["packed"])) if "packed" in event else []
