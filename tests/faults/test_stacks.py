"""The stack of a rank that does nothing is read whole, also where the machine is busy."""

import os
import threading
import time
from multiprocessing.connection import Connection

from ddp_common.worker import agent

PAUSE = 0.6  # seconds: what a busy machine takes from a process in the middle of writing


STACK = b"""Thread 0x1 (most recent call first):
  File "/x/ddp_common/ranks/process.py", line 301 in wait_for_its_end

Current thread 0x2 (most recent call first):
  File "/x/mine.py", line 7 in train
  File "/x/ddp_common/ranks/process.py", line 148 in _call
  File "/x/ddp_common/ranks/process.py", line 69 in main
"""


def test_a_stack_that_comes_in_pieces_is_read_to_its_end():
    """The end is the outermost of the rank's own frames; who writes keeps the pipe open."""
    read, write = os.pipe()

    def write_slowly():
        for line in STACK.splitlines(keepends=True):
            os.write(write, line)
            time.sleep(PAUSE)

    writer = threading.Thread(target=write_slowly)
    writer.start()
    with Connection(read) as connection:
        stack = agent._read_stack(connection)
    writer.join()
    os.close(write)
    assert stack == STACK
