"""What a client knows of the ranks of one attempt, from what it was told so far."""

import re
import signal
from dataclasses import dataclass, field

from ddp_common.messages import PROGRESS, Ended, Line, Message, Position, Returned, Started

RESTARTED = "scheduler-restart"  # Dask's word for why client.restart() cancels tasks
KEPT_LINES = 50  # of each rank's output, for the error message
# What C++ prints of an exception that nobody catches, before it aborts
UNCAUGHT = re.compile(r"\s*what\(\):\s*(.+)")


@dataclass
class Known:
    """What is known so far, everything by rank (0, 1, …).

    Times are those of `time.monotonic()` on the client.
    """

    addresses: list[str]  # of the workers, in rank order
    hosts: dict[int, str] = field(default_factory=dict)  # of the ranks that have started
    last_started: float = 0.0  # when the last of them did
    at: dict[int, dict] = field(default_factory=dict)  # where training was last: step, samples, …
    moved: dict[int, float] = field(default_factory=dict)  # when it last made progress
    lines: dict[int, list[str]] = field(default_factory=dict)  # the last ones that it printed
    uncaught: dict[int, str] = field(default_factory=dict)  # exceptions of C++ that it printed
    returned: dict[int, dict] = field(default_factory=dict)  # its function has: where training was
    ended: dict[int, Ended] = field(default_factory=dict)
    lost_late: set[int] = field(default_factory=set)  # its worker died after it had ended
    scheduler_lost: bool = False
    cancelled_by: str | None = None  # Dask's word for why the tasks were cancelled, if not by us

    def __post_init__(self) -> None:
        for rank in range(len(self.addresses)):
            self.lines[rank] = []

    def take(self, rank: int, message: Message, now: float) -> None:
        """Take note of a message."""
        if isinstance(message, PROGRESS):
            self.moved[rank] = now
        if isinstance(message, Position):
            self.at[rank] = message.known()
        if isinstance(message, Returned):
            self.returned[rank] = message.known()
        elif isinstance(message, Line):
            self.lines[rank] = [*self.lines[rank], message.text][-KEPT_LINES:]
            uncaught = UNCAUGHT.match(message.text)
            if uncaught:
                self.uncaught[rank] = uncaught[1]
        elif isinstance(message, Started):
            self.hosts[rank] = message.host
            self.last_started = now
        elif isinstance(message, Ended):
            self.ended.setdefault(rank, message)

    def lose_worker(self, address: str) -> None:
        """Take note that the scheduler has lost a worker, whoever's it is."""
        if address not in self.addresses:
            return
        rank = self.addresses.index(address)
        if rank in self.ended:
            self.lost_late.add(rank)
        else:
            self.ended[rank] = Ended("lost")

    def tasks_cancelled(self, reason: str | None) -> None:
        """Take note that the tasks were cancelled, not by us; `reason` is Dask's word for why."""
        self.scheduler_lost = True
        self.cancelled_by = reason

    def all_have_started(self) -> bool:
        return len(self.hosts) == len(self.addresses)

    def all_have_ended(self) -> bool:
        return len(self.ended) == len(self.addresses)

    def failed(self) -> list[int]:
        return [rank for rank, end in self.ended.items() if end.how not in ("done", "stopped")]

    def stopped(self) -> list[int]:
        return [rank for rank, end in self.ended.items() if end.how == "stopped"]

    def left_before_training(self) -> list[int]:
        """Ranks that left when training had not begun.

        The others may wait for them where no signal is heard.
        """
        return [rank for rank in self.stopped() if not self.ended[rank].in_loop]

    def step_of(self, rank: int) -> int:
        """The last step that is known of a rank; 0 if none is."""
        return self.at.get(rank, {}).get("step", 0)


def as_meant(message: Message) -> Message:
    """The same message; but a rank that SIGTERM has killed was told to stop.

    It did not listen yet.
    """
    if message == Ended("exited", -signal.SIGTERM):
        return Ended("stopped", told=True, in_loop=False)
    return message
