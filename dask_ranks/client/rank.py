"""A rank, as the client sees it: how far it has come, and what it has said last."""

from collections import deque
from dataclasses import dataclass, field

from distributed import Future

from dask_ranks.messages import PROGRESS, Ended, Line, Message, Position, Started, Whereabouts

KEPT_LINES = 50  # of a rank's output, for the error message
LONGEST_LINE = 10_000  # characters of such a line


@dataclass(eq=False)
class RankState:
    """What is known of a rank. Times are those of `time.monotonic()` on the client."""

    number: int  # from 0
    address: str  # of its worker
    host: str  # the address of its worker until it has started
    step: int = 0  # the last that is known
    moved: float | None = None  # when it last made progress
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT_LINES))  # printed last
    has_returned: bool = False  # its function has
    is_lost: bool = False  # its worker is, before its end or after it
    _ended: Ended | None = None  # ask `how`, or `ended`
    tables: Future | None = None  # its partitions, on its worker
    task: Future | None = None  # its agent, once that is submitted
    whereabouts: Whereabouts | None = None  # its answer, once it was asked where it is
    process_state: str | None = None  # in psutil's words; None: its worker has not answered

    def take(self, message: Message, now: float) -> None:
        """Take note of a message that has come at `now`."""
        if isinstance(message, PROGRESS):
            self.moved = now
        match message:
            case Started():
                self.host = message.host
            case Position():
                self.step = max(self.step, message.known().get("step", 0))
                self.has_returned = self.has_returned or message.has_returned
            case Line():
                cut = " … [cut here]" if len(message.text) > LONGEST_LINE else ""
                self.lines.append(message.text[:LONGEST_LINE] + cut)
            case Whereabouts():
                self.whereabouts = message
            case Ended():
                self._ended = self._ended or message
                self.has_returned = self.how == "done"

    def lose_worker(self) -> None:
        """Take note that the scheduler has lost its worker; rank 0's has the result."""
        has_result = self.number == 0 and self.how == "done"
        if self._ended is None or has_result:
            self._ended = Ended("lost")
            self.has_returned = False
        self.is_lost = True

    @property
    def has_started(self) -> bool:
        """Whether its process runs, or has."""
        return self.moved is not None

    @property
    def how(self) -> str | None:
        """How it has ended, in the words of `Ended`; None as long as it lives."""
        return None if self._ended is None else self._ended.how

    @property
    def ended(self) -> Ended:
        """How it has ended: ask only of one that has."""
        assert self._ended is not None, f"rank {self.number} lives"
        return self._ended


def numbers(ranks: list[RankState]) -> str:
    """The numbers of some ranks, as a sentence has them: '1, 2'."""
    return ", ".join(str(rank.number) for rank in ranks)
