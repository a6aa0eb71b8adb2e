"""Ports for programs that open them later."""

import os
import random
import socket

# Below the ranges from which systems take ports for outgoing connections, and below ours for steps
# of Slurm: nobody else takes such a port between the choice and the start of the program. Each
# process of the test suite has a part of the range.
LANES = 10
PORTS_OF_A_LANE = 500
LANE = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % LANES
FIRST = 10_000 + LANE * PORTS_OF_A_LANE
_given: set[int] = set()  # to this process
_draws = random.Random(os.getpid())  # two runs of the suite differ


def free_port():
    """A port of 127.0.0.1 that is free, and stays so until a program has started."""
    while True:
        port = FIRST + _draws.randrange(PORTS_OF_A_LANE)
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
