"""Launches, until every rank has finished its first backward: warm, cold, and many ranks."""

import subprocess
import sys
import tempfile
import time

from measuring import ENVIRONMENT, HERE, compared, launched, left_in, take_turns
from measuring import with_torchrun as torchrun
from plain_torch import first_backward

import ddp_common as ddp


def measure(quick):
    yield from two_ranks(turns=2 if quick else 5)
    yield from many_ranks(sizes=(4,) if quick else (8, 32))


def two_ranks(turns):
    """A first time of each does not count: it fills the forkserver and the page cache."""
    with ddp.connect("local", workers=2) as client:

        def warm():
            return until_backward(lambda: launched(client, first_backward))

        def other():
            return until_backward(lambda: torchrun("first_backward"))

        ways = (warm, cold, other)
        take_turns(*ways, turns=1)
        ours, script, theirs = take_turns(*ways, turns=turns)
    goals = {"at_least": 15, "limit": 0.3}
    what = "launch on a warm cluster, to both ranks' first backward, s"
    yield compared(what, ours, theirs, beside="torchrun", speed_up=True, **goals)
    what = "a script that connects and launches, from its start to the same, s"
    yield compared(what, script, theirs, beside="torchrun", at_most=1.0)


def cold():
    return until_backward(script)


def script():
    """Run `with_ddp` as a program; returns what each rank left."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, HERE / "with_ddp.py", folder]
        subprocess.run(command, env=ENVIRONMENT, cwd=folder, check=True, stderr=subprocess.PIPE)
        return left_in(folder, 2)


def many_ranks(sizes):
    """All on this machine, one after the other; torchrun once, since it imports torch in each."""
    with ddp.connect("local", workers=max(sizes)) as client:
        launched(client, first_backward, ranks=max(sizes))
        for ranks in sizes:
            ours = [
                until_backward(lambda: launched(client, first_backward, ranks)) for _ in range(3)
            ]
            theirs = until_backward(lambda: torchrun("first_backward", ranks=ranks))
            what = f"{ranks} ranks, warm, to their first backward, s"
            yield compared(what, ours, [theirs] * 3, beside="torchrun, once", speed_up=True)


def until_backward(launch):
    """Seconds from the call of `launch` until the last rank has finished its first backward."""
    began = time.time()
    return max(rank["finished"] for rank in launch()) - began
