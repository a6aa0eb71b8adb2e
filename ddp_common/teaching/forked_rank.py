"""Stands for a rank that was forked elsewhere: torchrun starts this, and it ends as its rank does.

    python -m ddp_common.teaching.forked_rank SCRIPT [ARGUMENT …]

It asks `forked_torchrun` for the rank, and hands over its arguments, environment, folder and
output. It passes SIGTERM on, and if it is killed itself, so is the rank. It imports next to
nothing: a hundredth of what a rank imports.
"""

import contextlib
import json
import os
import resource
import signal
import socket
import struct
import sys
from collections.abc import Iterator

FOLDER = "DDP_FORKED_TORCHRUN"  # variable: the folder in which `forked_torchrun` listens
NAME = ".ranks"  # of its socket there
LENGTH = struct.Struct("!q")  # of a request, before it
TERMINATE = b"t"  # one byte, so that it arrives in one piece
EXIT_CODE = struct.Struct("!i")  # of a rank; negative: the signal that has ended it


def main(*arguments: str) -> int:
    """Have a rank run the script; returns the rank's exit code, negative after a signal."""
    request = {
        "arguments": arguments,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
    }
    encoded = json.dumps(request).encode()
    with socket.socket(socket.AF_UNIX) as connection:
        with inside(os.environ[FOLDER]):
            connection.connect(NAME)
        socket.send_fds(connection, [LENGTH.pack(len(encoded))], [1, 2])
        connection.sendall(encoded)
        signal.signal(signal.SIGTERM, lambda *_: connection.send(TERMINATE))
        answer = connection.recv(EXIT_CODE.size, socket.MSG_WAITALL)
    if len(answer) < EXIT_CODE.size:
        return 1  # all is being ended
    (code,) = EXIT_CODE.unpack(answer)
    return code


@contextlib.contextmanager
def inside(folder: str) -> Iterator[None]:
    """Meanwhile `folder` is the current one: the path of a socket must be short (unix(7))."""
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def end_like(code: int) -> None:
    """End this process with an exit code, or by a signal, as another has ended."""
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the rank has left its core already
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


if __name__ == "__main__":
    end_like(main(*sys.argv[1:]))
