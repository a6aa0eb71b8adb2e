"""From an agent to its client.

Messages are gathered for a moment, then sent as one event of Dask.
"""

import time

from distributed import Worker

from ddp_common.messages import Ended, File, FileKept, Message, Returned, Started, pack, unpack
from ddp_common.worker import spool

TOPIC = "ddp_common"
FLUSH = 0.1  # seconds that reports and printed lines are gathered before they are sent
AT_ONCE = (Started, Returned, Ended)  # these do not wait


class Sender:
    """Calling it with a message sends that to the client, soon.

    That is at the latest when `flush_if_due` is called after `FLUSH`.
    """

    def __init__(self, worker: Worker, attempt_id: str, rank: int):
        self.worker = worker
        self.attempt_id = attempt_id
        self.rank = rank
        self.waiting: list[Message] = []
        self.sent = time.monotonic()

    def __call__(self, message: Message) -> None:
        if isinstance(message, File):  # too large for an event: the client fetches it
            token = f"{self.attempt_id}/{self.rank}/{time.monotonic_ns()}"
            spool.keep_file(token, message.content)
            message = FileKept(message.name, token)
        self.waiting.append(message)
        if isinstance(message, AT_ONCE):
            self.flush()

    def flush(self) -> None:
        if self.waiting:
            event = {"attempt": self.attempt_id, "rank": self.rank, "packed": pack(self.waiting)}
            self.worker.log_event(TOPIC, event)
        self.waiting = []
        self.sent = time.monotonic()

    def flush_if_due(self) -> None:
        if time.monotonic() - self.sent > FLUSH:
            self.flush()


def messages_of(event: dict) -> list[Message]:
    """The messages in an event of an agent."""
    return unpack(event["packed"])
