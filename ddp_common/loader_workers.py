"""Fork the workers of a loader, and once more where Python has let one hang.

Before 3.12, Python's `fork` may give a process that waits for ever, before its first line: for a
lock that another thread had at this moment, such as one of torch's at the end of a collective
(CPython's issue 112275). Promise: a worker that was forked runs.
"""

import multiprocessing
import os
import signal
import sys
from multiprocessing import connection, context, popen_fork
from types import SimpleNamespace
from typing import Any

FORK_TIMEOUT = 10  # seconds that a forked process has to come to its first line
MAY_HANG = sys.version_info < (3, 12)


def loader_context(chosen: Any) -> Any:
    """What to start loader workers with, in place of the `multiprocessing_context` chosen."""
    method = (chosen or multiprocessing).get_start_method()
    return ForkContext() if MAY_HANG and method == "fork" else chosen


class Popen(popen_fork.Popen):
    """A forked process that has come to its first line."""

    def _launch(self, process_obj: Any) -> None:
        while True:
            is_there, say_so = os.pipe()

            def announced(**options: Any) -> int:
                os.close(say_so)  # its last holder: `is_there` wakes the parent
                return process_obj._bootstrap(**options)

            super()._launch(SimpleNamespace(_bootstrap=announced))  # type: ignore[misc]
            os.close(say_so)
            runs = connection.wait([is_there], FORK_TIMEOUT)
            os.close(is_there)
            if runs:
                return
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            assert self.finalizer is not None, "it was launched"
            self.finalizer()


class ForkContext(context.ForkContext):
    class Process(context.ForkProcess):
        _Popen = staticmethod(Popen)
