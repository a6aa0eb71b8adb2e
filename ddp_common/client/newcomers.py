"""Workers that come while a launch trains on fewer than it might: `launch(…, grow=True)`.

A worker that is free is made ready first, which takes as long as importing torch does, while the
ranks train on. Only then are they asked to leave: so a run that grows pauses no longer than one
that restarts on warm workers.
"""

import time

from distributed import Client, Future

from ddp_common.client.placement import free_workers
from ddp_common.worker import agent

LOOK_INTERVAL = 1.0  # seconds between two questions to the scheduler
LEAST_STRETCH = 5.0  # seconds that ranks train before they leave for newcomers


class Newcomers:
    """Free workers that a launch on `ranks` workers could take as well, `most` at most in all."""

    def __init__(self, client: Client, ranks: int):
        self.client = client
        self.began: float | None = None  # when the ranks did train
        self.looked = 0.0
        most = getattr(client, "most", None)
        self.room = None if most is None else most - ranks  # for how many; None: any number
        self.made_ready: dict[str, Future] = {}  # by address

    def are_ready(self) -> bool:
        """Whether there are free workers, all of them ready to start a rank at once.

        Makes them ready. Ask once the ranks train. Between two looks, and at the beginning, the
        answer is no.
        """
        now = time.monotonic()
        if self.began is None:
            self.began = now
        if now - self.looked < LOOK_INTERVAL or now - self.began < LEAST_STRETCH:
            return False
        self.looked = now
        free = free_workers(self.client)[: self.room]
        for address in free:
            if address not in self.made_ready:
                self.made_ready[address] = self.client.submit(
                    agent.warm_up, workers=[address], pure=False, retries=0
                )
        # One that cannot be made ready is not begun with: it would end a run that is sound.
        return bool(free) and all(
            self.made_ready[address].status == "finished" for address in free
        )

    def let_go(self) -> None:
        """Forget the workers that were made ready."""
        self.made_ready.clear()
