"""What a rank prints, cut into lines."""

LONGEST_LINE = 10_000  # bytes of a line that are kept
RATE = 2**20  # bytes a second that a rank may print
LINE_COST = 100  # bytes that a line counts for, beside its own


def seconds_for(piece: bytes, lines: list[str]) -> float:
    """How long a rank may take at least to print this: who reads on later slows it down."""
    return (len(piece) + LINE_COST * len(lines)) / RATE


class Output:
    """Makes lines of pieces.

    Of a line that is drawn again and again (a progress bar, which prints carriage returns) the
    last state counts. A line beyond `LONGEST_LINE` is cut.
    """

    def __init__(self) -> None:
        self._begun = b""  # the line that has not ended yet

    def lines(self, piece: bytes) -> list[str]:
        """The lines that have become whole with this piece."""
        *whole, begun = (self._begun + piece).split(b"\n")
        self._begun = _last_state(begun)[: LONGEST_LINE + 1]
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
