"""Runs a command; when that ends, or takes too long, everything that it has started ends too.

    python -m ddp_common.teaching.contained SECONDS COMMAND [ARGUMENT …]

Exit code: the command's, or `TIMED_OUT`. This process is a child subreaper (Linux, prctl(2)), so
that whatever the command leaves behind becomes its child, and it ends with the process that has
started it. Elsewhere only the command itself is ended.
"""

import os
import signal
import subprocess
import sys

from ddp_common.ranks.parent import PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG, prctl
from ddp_common.worker import descendants

TIMED_OUT = 124  # as timeout(1) says it


def main(seconds: float, command: list[str]) -> int:
    """Run the command; returns the exit code of this process."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    try:
        code = process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        code = TIMED_OUT
    finally:
        descendants.end(_all_below)
    return code if code >= 0 else 128 - code  # a signal, as a shell says it


def _all_below() -> list[int]:
    me = os.getpid()
    return [pid for pid in descendants.trees([me], descendants.processes()) if pid != me]


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
