"""The memory limit of a worker, held against its rank and all that the rank has started."""

import time

from ddp_common.worker import descendants
from ddp_common.worker.forkserver import guard

MEMORY_INTERVAL = 0.5  # seconds between two looks at a rank's memory, where the worker has a limit
MEMORY_SHARE = 50  # a look that takes long is followed by a pause of so many times as long


class MemoryLimit:
    """The worker's memory limit, held against its rank and all that the rank has started: Dask's nanny sees only the worker's process."""

    def __init__(self, worker, process):
        self.limit, self.pid, self.next_look = (
            worker.memory_manager.memory_limit,
            process.pid,
            time.monotonic() + MEMORY_INTERVAL,
        )

    def exceeded(self):
        """A sentence once the rank is over the limit, else None."""
        began = time.monotonic()
        if not self.limit or began < self.next_look:
            return None
        living = descendants.of_rank(self.pid, guard())
        used = descendants.memory_of(living, self.limit)
        now = time.monotonic()
        self.next_look = now + max(MEMORY_INTERVAL, MEMORY_SHARE * (now - began))
        if used <= self.limit:
            return None
        others = (
            f" together with the {len(living) - 1} process(es) that it has started"
            if len(living) > 1
            else ""
        )
        return (
            f"it used {used / 2**30:.2f} GiB of memory{others}, and its worker's limit is {self.limit / 2**30:.2f} GiB. Take a smaller "
            "batch, more ranks, or a higher memory_limit in the profile"
        )
