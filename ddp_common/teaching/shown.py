"""As much of what a student's code prints as anybody would read."""

import io
from collections import deque

LONGEST = 20_000  # characters: half of them from the beginning, half from the end


class HeadAndTail(io.TextIOBase):
    """A stream that keeps the beginning and the end of what is written to it.

    `longest` is the number of characters that it keeps.
    """

    def __init__(self, longest: int = LONGEST):
        self._half = longest // 2
        self._head: list[str] = []
        self._in_head = 0
        self._tail: deque[str] = deque()
        self._in_tail = 0
        self._left_out = 0

    def writable(self) -> bool:
        """As for any stream to which one may write."""
        return True

    def write(self, text: str) -> int:
        """Take note of `text`."""
        room = self._half - self._in_head
        head, rest = text[:room], text[room:]
        if head:
            self._head.append(head)
            self._in_head += len(head)
        if rest:
            self._append_to_tail(rest)
        return len(text)

    def _append_to_tail(self, text):
        self._tail.append(text)
        self._in_tail += len(text)
        while self._in_tail > self._half:
            first = self._tail.popleft()
            too_many = min(len(first), self._in_tail - self._half)
            if too_many < len(first):
                self._tail.appendleft(first[too_many:])
            self._in_tail -= too_many
            self._left_out += too_many

    def text(self) -> str:
        """What was kept, and how much was left out in the middle."""
        head, tail = "".join(self._head), "".join(self._tail)
        if not self._left_out:
            return head + tail
        return f"{head}\n… [{self._left_out:,} characters left out] …\n{tail}"
