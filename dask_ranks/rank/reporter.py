"""Takes what this rank says to its launcher, in a thread of its own, and in order.

What is posted goes into a queue. The thread turns tensors into numbers and hands the messages to
`send`. Four times a second it also says where training is, if it has moved: that is how the client
knows that a rank is alive. Promise: a message that fails on its way is told once on stderr, and
those after it arrive.
"""

import contextlib
import queue
import sys
import threading
import time
from collections.abc import Callable

from dask_ranks.rank import whereabouts
from ddp_common import reporting
from ddp_common.errors import first_line
from ddp_common.reporting import Message, Position, Postable

POSITION_INTERVAL = 0.25  # seconds between two messages on where training is
COLLECTIVES_INTERVAL = 2.0  # seconds without progress between two looks at collectives


class Reporter(reporting.Sink):
    """A rank's messages on their way, until `finish`.

    A launch within another one, in a script that `ddprun` runs, tells that one where training is.
    """

    def __init__(self, send: Callable[[Message], None]):
        super().__init__()
        self.send = send
        self.outbox: queue.SimpleQueue[Postable | None] = queue.SimpleQueue()
        self.moves = 0  # counts everything that is progress
        self._has_complained = False
        self.outer = reporting.put_in(self)
        self._thread = threading.Thread(target=self._deliver, daemon=True, name="ddp-reports")
        self._thread.start()

    def finish(self) -> None:
        """Send the rest, and take no more."""
        self.outbox.put(None)
        self._thread.join()
        reporting.put_in(self.outer)

    def post(self, message: Postable) -> None:
        self.outbox.put(message)

    def moved(self) -> None:
        self.moves += 1
        self.outer.position = self.position or self.outer.position
        self.outer.moved()

    def _deliver(self) -> None:
        """Pass messages on until None comes.

        In between, and at the end, say where training is if it has moved.
        """
        moves_told = 0
        told = 0.0  # when that was
        look_at = 0.0  # collectives
        ended = whereabouts.last_ended()  # of them the last
        is_over = False
        while not is_over:
            with contextlib.suppress(queue.Empty):
                message = self.outbox.get(timeout=POSITION_INTERVAL)
                is_over = message is None
                if message is not None:
                    self._pass_on(message)
            if moves_told == self.moves and time.monotonic() > max(look_at, told):
                look_at = time.monotonic() + COLLECTIVES_INTERVAL
                before, ended = ended, whereabouts.last_ended()
                if ended != before:
                    self.moved()
            is_due = is_over or time.monotonic() - told > POSITION_INTERVAL
            if is_due and moves_told != self.moves:
                moves_told = self.moves
                told = time.monotonic()
                self._pass_on(Position(**self.position))  # type: ignore[arg-type]

    def _pass_on(self, message: Postable) -> None:
        try:
            self.send(message() if callable(message) else message)
        except Exception as error:  # of CUDA, of the pipe: the next one may arrive all the same
            if not self._has_complained:
                self._has_complained = True
                why = f"{type(error).__name__}: {first_line(error)}"
                text = f"Warning: not all that this rank reports arrives: {why}"
                with contextlib.suppress(Exception):  # the function has closed or replaced stderr
                    print(text, file=sys.stderr, flush=True)


def stop() -> None:
    """Nobody listens any more."""
    reporting.put_in(reporting.Sink())
