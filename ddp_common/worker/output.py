"""What a rank prints, cut into lines."""

import time

LONGEST_LINE = 10_000  # bytes of a line that are kept
RATE = 2**20  # bytes a second that a rank may print
LINE_COST = 100  # bytes that a line counts for, beside its own


class Output:
    """Makes lines of pieces.

    Of a line that is drawn again and again (a progress bar, which prints carriage returns) the
    last state counts. A line beyond `LONGEST_LINE` is cut. A rank that prints faster than `RATE`
    has to wait: `is_due` says when to read again.
    """

    def __init__(self) -> None:
        self._begun = b""  # the line that has not ended yet
        self._due = 0.0  # when more may be read

    def is_due(self) -> bool:
        return time.monotonic() >= self._due

    def lines(self, piece: bytes) -> list[str]:
        """The lines that have become whole with this piece."""
        *whole, begun = (self._begun + piece).split(b"\n")
        self._begun = _last_state(begun)[: LONGEST_LINE + 1]
        self._due = time.monotonic() + (len(piece) + LINE_COST * len(whole)) / RATE
        return [_text(_last_state(line).rstrip(b"\r")) for line in whole]

    def rest(self) -> list[str]:
        """What is left at the end: the line that has not ended."""
        return [_text(self._begun.rstrip(b"\r"))] if self._begun else []


def _text(line: bytes) -> str:
    text = line[:LONGEST_LINE].decode(errors="replace")
    return f"{text} … [cut here]" if len(line) > LONGEST_LINE else text


def _last_state(line: bytes) -> bytes:
    """Of a line that is drawn again and again, what a terminal would show of it."""
    text = line.rstrip(b"\r")
    _, _, state = text.rpartition(b"\r")
    return state + line[len(text) :][:1]
