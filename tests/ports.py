"""Ports for programs that open them later."""

import os
import random
import socket

# Below the ranges from which systems take ports for outgoing connections, and below ours for steps
# of Slurm: nobody else takes such a port between the choice and the start of the program.
FIRST, BEHIND = 10_000, 15_000
_given: set[int] = set()  # to this process
_draws = random.Random(os.getpid())  # processes of the test suite differ


def free_port():
    """A port of 127.0.0.1 that is free, and stays so until a program has started."""
    while True:
        port = _draws.randrange(FIRST, BEHIND)
        if port in _given:
            continue
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            _given.add(port)
            return port
