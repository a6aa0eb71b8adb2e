"""The two ends of the pipe through which a rank's messages reach its agent.

`multiprocessing`'s own `recv` waits until a message is whole, however long that takes. A rank that
is suspended in the middle of a long message, or killed while a child of it holds the pipe open,
would keep its agent from all else. So `Reader` takes what is there and waits for nothing.
"""

import os
import pickle
import struct
import threading
from multiprocessing.connection import Connection

from ddp_common.messages import Message

LENGTH = struct.Struct("!Q")  # bytes of the pickled message that follows
PIECE = 2**16  # bytes read at once: as many as a pipe holds
MOST_PIECES = 64  # read in one go, before others have their turn

_one_at_a_time = threading.Lock()


def write(pipe: Connection, message: Message) -> None:
    """Write a message, and wait until the pipe has taken all of it.

    Several threads may do so. Raises OSError if nobody reads it any more.
    """
    pickled = pickle.dumps(message)
    left = memoryview(LENGTH.pack(len(pickled)) + pickled)
    with _one_at_a_time:
        while left:
            left = left[os.write(pipe.fileno(), left) :]


class Reader:
    """Reads messages as they come; `is_open` until the other end is closed."""

    def __init__(self, pipe: Connection):
        os.set_blocking(pipe.fileno(), False)
        self.pipe = pipe
        self.is_open = True
        self._begun = bytearray()  # what has come of the messages that are not whole yet

    def read(self) -> list[Message]:
        """The messages that have become whole."""
        for _ in range(MOST_PIECES):
            try:
                piece = os.read(self.pipe.fileno(), PIECE)
            except BlockingIOError:  # that was all, for now
                break
            if not piece:
                self.is_open = False
                break
            self._begun += piece
        return self._cut_out()

    def _cut_out(self) -> list[Message]:
        messages = []
        start = 0
        while len(self._begun) >= start + LENGTH.size:
            (length,) = LENGTH.unpack_from(self._begun, start)
            end = start + LENGTH.size + length
            if len(self._begun) < end:
                break
            with memoryview(self._begun) as whole, whole[start + LENGTH.size : end] as pickled:
                messages.append(pickle.loads(pickled))
            start = end
        del self._begun[:start]
        return messages
