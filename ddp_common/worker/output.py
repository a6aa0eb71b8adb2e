"""What a rank prints, cut into lines, and never more of it than can be kept."""

import collections
import time

LONGEST_LINE = 10_000  # bytes of a line that are kept
RATE = 2**20  # bytes a second; more are left out
LINE_COST = 100  # bytes that a line counts for, beside its own
KEPT_LINES = 50  # the last of those that are left out, which are passed on after all


class Output:
    """Makes lines of pieces.

    Of a line that is drawn again and again (a progress bar, which prints carriage returns) the
    last state counts. A line beyond `LONGEST_LINE` is cut. Of an avalanche of lines the first and
    the last are passed on, and how many were left out.
    """

    def __init__(self) -> None:
        self._begun = b""  # the line that has not ended yet
        self._second = time.monotonic()  # when the present second began
        self._bytes = 0  # that were passed on in it
        self._held: collections.deque[str] = collections.deque(maxlen=KEPT_LINES)
        self._left_out = 0

    def lines(self, piece: bytes) -> list[str]:
        """The lines that have become whole with this piece."""
        passed: list[str] = []
        *whole, begun = (self._begun + piece).split(b"\n")
        self._begun = _last_state(begun)[: LONGEST_LINE + 1]
        for line in whole:
            self._take(_last_state(line).rstrip(b"\r"), passed)
        return passed

    def due(self) -> list[str]:
        """What was held back, a second after that; call it now and then."""
        passed: list[str] = []
        if self._held and time.monotonic() - self._second > 1:
            self._release(passed)
        return passed

    def rest(self) -> list[str]:
        """What is left at the end: the line that has not ended, and what was held back."""
        passed: list[str] = []
        if self._begun:
            self._take(self._begun.rstrip(b"\r"), passed)
        self._release(passed)
        return passed

    def _take(self, line: bytes, passed: list[str]) -> None:
        now = time.monotonic()
        if now - self._second > 1:
            self._release(passed)
            self._second = now
            self._bytes = 0
        text = line[:LONGEST_LINE].decode(errors="replace")
        if len(line) > LONGEST_LINE:
            text += " … [cut here]"
        self._bytes += len(line) + LINE_COST
        if self._bytes < RATE:
            passed.append(text)
            return
        if len(self._held) == KEPT_LINES:
            self._left_out += 1
        self._held.append(text)

    def _release(self, passed: list[str]) -> None:
        if self._left_out:
            passed.append(
                f"… [{self._left_out:,} lines left out: they came too fast to be kept] …"
            )
        passed.extend(self._held)
        self._held.clear()
        self._left_out = 0


def _last_state(line: bytes) -> bytes:
    """Of a line that is drawn again and again, what a terminal would show of it."""
    text = line.rstrip(b"\r")
    _, _, state = text.rpartition(b"\r")
    return state + line[len(text) :][:1]
