"""The memory limit of a worker, held against its rank and all that the rank has started.

Dask's nanny sees only the worker's own process, which trains nothing.
"""

import time

from distributed import Worker

from ddp_common.worker import descendants
from ddp_common.worker.forkserver import guard

MEMORY_INTERVAL = 0.5  # seconds between two looks at a rank's memory, where the worker has a limit
MEMORY_SHARE = 50  # a look that takes long is followed by a pause of so many times as long
LONGEST_INTERVAL = 10.0  # seconds, since it may have taken long only because the machine stalled


class MemoryLimit:
    """Ask it often whether the rank is over its limit; it looks only as often as costs nothing."""

    def __init__(self, worker: Worker, pid: int):
        self.limit = worker.memory_manager.memory_limit  # bytes; None or 0 without one
        self.pid = pid  # of the rank
        self.next_look = time.monotonic() + MEMORY_INTERVAL

    def exceeded(self) -> str | None:
        """A sentence once the rank is over the limit, else None."""
        began = time.monotonic()
        if not self.limit or began < self.next_look:
            return None
        living = descendants.of_rank(self.pid, guard())
        used = descendants.memory_of(living, self.limit)
        now = time.monotonic()
        pause = max(MEMORY_INTERVAL, MEMORY_SHARE * (now - began))
        self.next_look = now + min(pause, LONGEST_INTERVAL)
        if used <= self.limit:
            return None
        others = ""
        if len(living) > 1:
            others = f" together with the {len(living) - 1} process(es) that it has started"
        return (
            f"it used {used / 2**30:.2f} GiB of memory{others}, and its worker's limit is "
            f"{self.limit / 2**30:.2f} GiB. Take a smaller batch, more ranks, or a higher "
            "memory_limit in the profile"
        )
