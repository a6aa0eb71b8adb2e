"""The stack of a rank that does nothing is read whole, also where the machine is busy."""

import os
import threading
import time
from multiprocessing.connection import Connection

from ddp_common.worker import agent

PAUSE = 0.15  # seconds: what a busy machine takes from a process in the middle of writing


def test_a_stack_that_comes_in_pieces_is_read_to_its_end(monkeypatch):
    monkeypatch.setattr(agent, "NEXT_PIECE_TIMEOUT", 100)  # its end is told by the pipe's
    read, write = os.pipe()

    def write_slowly():
        for line in (b"Thread 0x1:\n", b"  File a.py\n", b"Current thread 0x2:\n", b"  b.py\n"):
            os.write(write, line)
            time.sleep(PAUSE)
        os.close(write)

    writer = threading.Thread(target=write_slowly)
    writer.start()
    with Connection(read) as connection:
        stack = agent._read_stack(connection)
    writer.join()
    assert stack.endswith(b"Current thread 0x2:\n  b.py\n")
