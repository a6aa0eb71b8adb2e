"""What a rank prints, line by line, and never more of it than can be kept."""

import collections
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

from ddp_common.messages import Line

LONGEST_LINE = 10_000  # bytes of a printed line that are kept
STATE_INTERVAL = 5.0  # seconds between two states of a line that is drawn again and again
PRINT_BURST = 4 * 2**20  # bytes that a rank may print at once, and
PRINT_RATE = 2**18  # bytes a second that it may go on printing, before lines are left out
LINE_COST = 100  # bytes that a line counts for, beside its own
KEPT_LINES = 50  # the last of those that are left out, which are passed on after all
PIECE = 65536  # bytes read at once


class Lines:
    """Turns what a rank prints into lines and passes each on; bounded, however much that is.

    Of a line that is drawn again and again (carriage returns: progress bars) the latest state
    counts, every few seconds and at its end. A line beyond `LONGEST_LINE` is cut. Of an
    avalanche of lines the first and the last are passed on, and how many were left out.
    """

    def __init__(self, send: Callable[[Line], None]):
        self.send = send
        # The line that has not ended yet
        self.state = b""  # its earlier state, before the last carriage return
        self.rest = b""  # its present state
        self.beyond = 0  # bytes that were cut off it
        self.shown: bytes | None = None  # the state of it that was passed on last
        self.drawn = time.monotonic()  # when that was
        # What may still be passed on at once
        self.allowance: float = PRINT_BURST  # bytes
        self.filled = time.monotonic()
        # What was too much
        self.last: collections.deque[str] = collections.deque(maxlen=KEPT_LINES)
        self.left_out = 0
        self.told = 0.0

    def read(self, connection: Connection) -> bool:
        """Read once; False at the end of the stream."""
        chunk = os.read(connection.fileno(), PIECE)
        now = time.monotonic()
        self.allowance = min(PRINT_BURST, self.allowance + PRINT_RATE * (now - self.filled))
        self.filled = now
        *ended, begun = chunk.split(b"\n")
        for piece in ended:
            self._go_on(piece)
            self._end_line()
        self._go_on(begun)
        return bool(chunk)

    def flush_if_due(self) -> None:
        """Pass on what has waited for its moment."""
        now = time.monotonic()
        if self.state and now - self.drawn > STATE_INTERVAL:
            self._draw(now)
        if self.last and now - self.told > STATE_INTERVAL:
            self._tell_last(now)

    def close(self) -> None:
        if self.state or self._present():
            self._end_line()
        if self.last:
            self._tell_last(time.monotonic())

    def _go_on(self, piece: bytes) -> None:
        """Another piece of the line that has not ended."""
        *states, piece = piece.split(b"\r")
        if states:
            self._append(states[0])
            later = [state for state in states[1:] if state]
            newest = later[-1] if later else self._present() or self.state
            self.state = newest[:LONGEST_LINE]
            self.rest = b""
            self.beyond = 0
        self._append(piece)

    def _append(self, piece: bytes) -> None:
        room = LONGEST_LINE - len(self.rest)
        self.rest += piece[:room]
        self.beyond += max(0, len(piece) - room)

    def _present(self) -> bytes:
        """The text of the line as it stands; empty right after a carriage return."""
        if self.beyond:
            return self.rest + b" ... [cut here: %d more bytes]" % self.beyond
        return self.rest

    def _draw(self, now: float) -> None:
        text = self._present() or self.state
        if text != self.shown:
            self._pass_on(text)
        self.shown = text
        self.drawn = now

    def _end_line(self) -> None:
        text = self._present() or self.state
        if text != self.shown:
            self._pass_on(text)
        self.state = b""
        self.rest = b""
        self.beyond = 0
        self.shown = None

    def _pass_on(self, text: bytes) -> None:
        line = text.decode(errors="replace")
        cost = len(text) + LINE_COST
        if self.allowance > cost and not self.last:
            self.allowance -= cost
            self.send(Line(line))
            return
        if not self.last:
            self.told = time.monotonic()
        if len(self.last) == KEPT_LINES:
            self.left_out += 1
        self.last.append(line)

    def _tell_last(self, now: float) -> None:
        if self.left_out:
            why = "they came faster than they can be kept"
            self.send(Line(f"... [{self.left_out:,} lines left out: {why}] ..."))
        for line in self.last:
            self.send(Line(line))
        self.last.clear()
        self.left_out = 0
        self.told = now
