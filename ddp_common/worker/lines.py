"""What a rank prints, line by line, and never more of it than can be kept."""

import collections
import os
import time

LONGEST_LINE = 10_000  # bytes of a printed line that are kept
STATE_INTERVAL = 5.0  # seconds between two states of a line that is drawn again and again, such as a progress bar
PRINT_BURST = 4 * 2**20  # bytes that a rank may print at once, and
PRINT_RATE = 2**18  # bytes a second that it may go on printing, before lines are left out
LINE_COST = 100  # bytes that a line counts for, beside its own
KEPT_LINES = 50  # the last of those that are left out, which are passed on after all


class Lines:
    """Turns what a rank prints into lines, and passes each on; bounded, however much that is.

    Of a line that is drawn again and again (carriage returns: progress bars) the latest state counts, every few seconds and at its
    end. A line beyond `LONGEST_LINE` is cut. Of an avalanche of lines the first and the last are passed on, and how many were left out.
    """

    def __init__(self, send):
        self.send = send
        self.state, self.rest, self.beyond = (
            b"",
            b"",
            0,
        )  # of the line that has not ended: earlier state, present one, bytes cut off it
        self.shown, self.drawn = (
            None,
            time.monotonic(),
        )  # the state that was passed on last, and when
        self.allowance, self.filled = PRINT_BURST, time.monotonic()
        self.last, self.left_out, self.told = collections.deque(maxlen=KEPT_LINES), 0, 0.0

    def read(self, connection):
        """Read once; False at the end of the stream."""
        chunk = os.read(connection.fileno(), 65536)
        now = time.monotonic()
        self.allowance = min(PRINT_BURST, self.allowance + PRINT_RATE * (now - self.filled))
        self.filled = now
        *ended, begun = chunk.split(b"\n")
        for piece in ended:
            self._go_on(piece)
            self._end_line()
        self._go_on(begun)
        return bool(chunk)

    def flush_if_due(self):
        """Pass on what has waited for its moment."""
        now = time.monotonic()
        if self.state and now - self.drawn > STATE_INTERVAL:
            self._draw(now)
        if self.last and now - self.told > STATE_INTERVAL:
            self._tell_last(now)

    def close(self):
        if self.state or self._present():
            self._end_line()
        if self.last:
            self._tell_last(time.monotonic())

    def _go_on(self, piece):
        *states, piece = piece.split(b"\r")
        if states:
            self._append(states[0])
            self.state = next(filter(None, reversed(states[1:])), self._present() or self.state)[
                :LONGEST_LINE
            ]
            self.rest, self.beyond = b"", 0
        self._append(piece)

    def _append(self, piece):
        room = LONGEST_LINE - len(self.rest)
        self.rest += piece[:room]
        self.beyond += max(0, len(piece) - room)

    def _present(self):
        """The text of the line as it stands; empty right after a carriage return."""
        cut = b" ... [cut here: %d more bytes]" % self.beyond if self.beyond else b""
        return self.rest + cut

    def _draw(self, now):
        text = self._present() or self.state
        if text != self.shown:
            self._pass_on(text)
        self.shown, self.drawn = text, now

    def _end_line(self):
        text = self._present() or self.state
        if text != self.shown:
            self._pass_on(text)
        self.state, self.rest, self.beyond, self.shown = b"", b"", 0, None

    def _pass_on(self, text):
        line = text.decode(errors="replace")
        cost = len(text) + LINE_COST
        if self.allowance > cost and not self.last:
            self.allowance -= cost
            self.send({"line": line})
            return
        if not self.last:
            self.told = time.monotonic()
        self.left_out += len(self.last) == KEPT_LINES
        self.last.append(line)

    def _tell_last(self, now):
        if self.left_out:
            self.send(
                {
                    "line": f"... [{self.left_out:,} lines left out: they came faster than they can be kept] ..."
                }
            )
        for line in self.last:
            self.send({"line": line})
        self.last.clear()
        self.left_out, self.told = 0, now
