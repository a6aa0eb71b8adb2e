"""A time-out that a busy machine does not use up while this program stands still."""

import time

LONGEST_STRETCH = 0.05  # seconds that count between two looks, however long they lie apart


class Patience:
    """So many seconds for something to happen, in a loop that looks often.

    Where the whole machine stands still, so do those that are waited for. Time that passes
    between two calls of `is_over` therefore counts only up to `LONGEST_STRETCH`.
    """

    def __init__(self, seconds: float):
        self.left = seconds
        self.looked = time.monotonic()

    def is_over(self) -> bool:
        now = time.monotonic()
        self.left -= min(now - self.looked, LONGEST_STRETCH)
        self.looked = now
        return self.left <= 0
