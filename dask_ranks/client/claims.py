"""On the scheduler: which attempt has which worker. All that a launch has there is this plugin.

Promises: two attempts never have one worker; the claims of a client that is gone, and those on a
worker that is gone, are void; after the last launch the scheduler is as it was found, without this
plugin and without the messages of ranks, of which Dask would keep a great many.
"""

from typing import Any

from distributed import Scheduler, SchedulerPlugin

NAME = "ddp-claims"


class Claims(SchedulerPlugin):
    """The claims of all launches on this scheduler, while there are any."""

    def __init__(self, scheduler: Scheduler, topic: str):
        self.scheduler = scheduler
        self.topic = topic  # of the ranks' messages
        self.holders: dict[str, tuple[str, str]] = {}  # worker -> (client id, attempt id)

    def claim(
        self,
        client_id: str,
        attempt_id: str,
        wanted: int | None,
        most: int | None,
        rows_held: dict[str, int],
        caller: str | None,
    ) -> dict[str, Any]:
        """Claim `wanted` workers (None: all, up to `most`), those with most rows first.

        `caller` is never taken: the worker whose only thread calls `launch`, if there is one. The
        scheduler's event loop makes it atomic. Returns those in "claimed", none where too few
        are free; and what is to be said of the others.
        """
        workers = self.scheduler.workers
        status = {address: worker.status.name for address, worker in workers.items()}
        known = [address for address in workers if status[address] == "running"]
        paused = [address for address in workers if status[address] == "paused"]
        if caller in known:
            known.remove(caller)
        free = [address for address in known if address not in self.holders]
        free.sort(key=lambda address: (-rows_held.get(address, 0), workers[address].host))
        count = wanted or min(most or len(known), len(known))
        if count == 0 or len(free) < count:
            busy = len(self.holders)
            return {"claimed": [], "paused": paused, "known": len(known), "busy": busy}
        chosen = sorted(free[:count], key=lambda address: workers[address].host)
        self.holders.update(dict.fromkeys(chosen, (client_id, attempt_id)))
        return {"claimed": chosen, "paused": paused}

    def release(self, holder: str) -> None:
        """Void the claims of a client or an attempt, and go where there are no others."""
        for address, ids in list(self.holders.items()):
            if holder in ids:
                del self.holders[address]
        if not self.holders:
            self.scheduler.remove_plugin(NAME)

    # Called by Dask

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        self.release(client)

    def remove_worker(self, scheduler: Scheduler, worker: str, **others: Any) -> None:
        self.holders.pop(worker, None)

    def log_event(self, topic: str, msg: Any) -> None:
        """A message of a rank has gone to its client: nobody will read it here any more."""
        if topic == self.topic:
            self.scheduler._broker.truncate(topic)


# Called by the client, with `client.run_on_scheduler`


def claim(topic: str, *request: Any, dask_scheduler: Scheduler) -> dict[str, Any]:
    """`Claims.claim`, on a scheduler that may not have the plugin yet."""
    if NAME not in dask_scheduler.plugins:
        dask_scheduler.add_plugin(Claims(dask_scheduler, topic), name=NAME)
    plugin: Any = dask_scheduler.plugins[NAME]
    return plugin.claim(*request)


def release(attempt_id: str, dask_scheduler: Scheduler) -> None:
    """Give back the workers of an attempt, if it has any."""
    plugin: Any = dask_scheduler.plugins.get(NAME)
    if plugin is not None:
        plugin.release(attempt_id)
