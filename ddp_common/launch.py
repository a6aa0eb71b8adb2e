"""The client's side of a run: choose workers, start one rank on each, follow what they report, end all when one fails.

Data flows one way: client -> agent -> rank -> reports -> client. Relies on the workers being processes that can import `ddp_common`.
Promises: never two ranks on a worker, also with several launches at once; when `launch` returns or raises, every rank it started is
gone and the workers are free.
"""

import contextlib
import linecache
import os
import pickle
import queue
import re
import signal
import threading
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

from ddp_common.errors import Error, RankFailed

PLACEMENT_TIMEOUT = 60  # seconds to wait for free workers
GONE_TIMEOUT = 5  # seconds to wait for ranks to be gone once they were told
CAUSE_TIMEOUT = 1  # seconds to wait for the cause when a consequence was reported first
CONSEQUENCE = re.compile(r"Connection (closed|reset) by peer|Connection was likely closed|Broken pipe|remote process exited|ncclRemoteError")
KEPT_LINES = 50  # of each rank's output, for the error message

_subscribing = threading.Lock()


@dataclass
class Run:
    """What a launch leaves: rank 0's `result`, the `directory`, the number of ranks, and every reported `records` (list of dict)."""

    result: object
    directory: Path
    world_size: int
    records: list
    seconds: float

    @property
    def metrics(self):
        """All reports as a pandas DataFrame: one row per report; columns rank, time (s since 1970), epoch, step and what was reported."""
        import pandas

        return pandas.DataFrame(self.records)


def launch(client, function, *, workers=None, directory=None, timeout=PLACEMENT_TIMEOUT, **arguments):
    """Run `function(**arguments)` on one rank per worker and return a `Run`.

    `client` is a `distributed.Client`. `workers` is the number of ranks (default: as many as the cluster has workers); launches
    that find too few free ones wait up to `timeout` seconds. `directory` continues in an earlier run's directory, whose newest
    checkpoint `Checkpoint.restore` then finds; default: a new one, or what RESUME names for the first launch of a tutorial.
    Raises `RankFailed` as soon as any rank fails, and `Error` for what can be put right before.
    """
    payload = _pickle(function, arguments)
    _refuse_threads(client)
    run_id = uuid.uuid4().hex[:12]
    with _inbox(client, run_id) as inbox, _placement(client, run_id, workers, timeout) as addresses:
        attempt = _Attempt(client, run_id, addresses, inbox, _open_directory(function, directory))
        try:
            attempt.start(payload)
            result = attempt.follow()
        except KeyboardInterrupt as interrupt:
            attempt.directory.log("interrupted from the keyboard")
            interrupt.directory = attempt.directory.path
            raise
        finally:
            attempt.end()
    return Run(result, attempt.directory.path, len(addresses), attempt.directory.records, time.monotonic() - attempt.began)


def _pickle(function, arguments):
    import cloudpickle

    cells = {name: entry for name, entry in list(linecache.cache.items()) if len(entry) == 4 and not os.path.exists(name)}
    try:
        return cloudpickle.dumps((function, arguments, cells))
    except Exception as error:
        raise Error(f"{getattr(function, '__name__', function)!r} or its arguments cannot be sent to the workers: {error}. Open files, "
                    "clients, locks and running processes cannot travel: make them inside the function.") from None


def _refuse_threads(client):
    if any(address.startswith("inproc://") for address in client.scheduler_info(n_workers=-1)["workers"]):
        raise Error("The workers of this cluster are threads of one process (processes=False). Ranks need processes: use "
                    "LocalCluster(processes=True), which is the default.")


def _open_directory(function, directory):
    from ddp_common.reporting import RunDirectory, new_directory
    from ddp_common.settings import current

    if directory is None:
        directory, current.resume = current.resume, None  # RESUME means the first launch of a tutorial, not each
    return RunDirectory(directory or new_directory(current.name or getattr(function, "__name__", "run")))


@contextlib.contextmanager
def _inbox(client, run_id):
    """A queue of everything that concerns this run: what its agents send, and workers that the scheduler has lost.

    A client has one handler per topic, so the inboxes of its launches share one. Handlers run on the client's event loop.
    """
    from ddp_common.agent import TOPIC

    inboxes = client.__dict__.setdefault("ddp_inboxes", {})

    def on_message(event):
        if (mine := inboxes.get(event[1]["run"])) is not None:
            mine.put(event[1])

    def on_cluster_change(event):
        if event[1].get("action") == "remove-worker":
            for each in list(inboxes.values()):
                each.put({"lost": event[1]["worker"]})

    with _subscribing:
        inbox = inboxes[run_id] = queue.SimpleQueue()
        client.subscribe_topic(TOPIC, on_message)
        client.subscribe_topic("all", on_cluster_change)
    try:
        yield inbox
    finally:
        with _subscribing:
            del inboxes[run_id]
            if not inboxes:  # a client that closes while it is subscribed makes the scheduler log an error
                client.unsubscribe_topic(TOPIC)
                client.unsubscribe_topic("all")


@contextlib.contextmanager
def _placement(client, run_id, wanted, timeout):
    """Claim workers, wait for them if need be; yields their addresses in rank order and gives them back at the end."""
    if wanted is not None and (not isinstance(wanted, int) or wanted < 1):
        raise Error(f"workers={wanted!r}: the number of ranks is a whole number of at least 1.")
    deadline = time.monotonic() + timeout
    while not (answer := client.run_on_scheduler(_claim, run_id, client.id, wanted))["claimed"]:
        if time.monotonic() > deadline:
            raise Error(f"No {wanted or 'free'} worker(s) for this launch within {timeout} s: the cluster has {answer['known']}, of which "
                        f"{answer['busy']} run other launches. Start more (WORKERS=…), ask for fewer ranks, or wait for the others.")
        time.sleep(0.05)
    try:
        yield answer["claimed"]
    finally:
        with contextlib.suppress(Exception):  # the scheduler may be gone; with it went the claims
            client.run_on_scheduler(_release, run_id)


def _claim(run_id, client_id, wanted, dask_scheduler):
    """Runs on the scheduler, whose event loop makes it atomic: no two launches get one worker. A dead client's claims are void."""
    claims = dask_scheduler.__dict__.setdefault("ddp_claims", {})  # worker address -> (client id, run id)
    for address, (owner, _) in list(claims.items()):
        if owner not in dask_scheduler.clients or address not in dask_scheduler.workers:
            del claims[address]
    known = [address for address, worker in dask_scheduler.workers.items() if worker.status.name == "running"]
    free = sorted((address for address in known if address not in claims), key=lambda a: dask_scheduler.workers[a].host)
    count = wanted or len(known)
    if count == 0 or len(free) < count:
        return {"claimed": [], "known": len(known), "busy": len(claims)}
    claims.update((address, (client_id, run_id)) for address in free[:count])
    return {"claimed": free[:count]}


def _release(run_id, dask_scheduler):
    claims = dask_scheduler.__dict__.get("ddp_claims", {})
    for address in [address for address, (_, owner) in claims.items() if owner == run_id]:
        del claims[address]


class _Attempt:
    """One set of ranks from start to end. State: which ranks have ended and how; the last lines of each."""

    def __init__(self, client, run_id, addresses, inbox, directory):
        from ddp_common.reporting import Progress

        self.client, self.run_id, self.addresses, self.inbox, self.directory = client, run_id, addresses, inbox, directory
        self.futures, self.ended, self.hosts = [], {}, {}
        self.lines = {rank: [] for rank in range(len(addresses))}
        self.progress, self.began = Progress(), time.monotonic()

    def start(self, payload):
        """Write config.json, open the store's socket on rank 0's worker, submit one pinned task per rank."""
        from distributed.comm import get_address_host

        from ddp_common import agent
        from ddp_common.settings import describe

        self.directory.write_json("config.json", describe(self.addresses))
        hosts = [get_address_host(address) for address in self.addresses]
        (store,) = self.client.run(agent.listen, self.run_id, workers=self.addresses[:1]).values()
        for rank, (address, host) in enumerate(zip(self.addresses, hosts)):
            spec = {"run": self.run_id, "rank": rank, "world_size": len(hosts), "store": store,
                    "local_rank": hosts[:rank].count(host), "local_world_size": hosts.count(host),
                    "environment": {"DDP_CHECKPOINTS": (self.directory.path / "checkpoints").absolute()}}
            self.futures.append(self.client.submit(agent.run_rank, spec, payload, workers=[address], pure=False, retries=0,
                                                   key=f"ddp-rank-{self.run_id}-{rank}", priority=10))
        for rank, future in enumerate(self.futures):
            future.add_done_callback(lambda done, rank=rank: self.inbox.put({"future": rank, "status": done.status}))

    def follow(self):
        """Take in messages until every rank is done; returns rank 0's result. Raises `RankFailed` at the first failure."""
        import io

        import torch

        while len(self.ended) < len(self.addresses):
            self._take(self.inbox.get())
            if failed := self._failed():
                raise self._failure(self._first_cause(failed))
        result = torch.load(io.BytesIO(self.futures[0].result()), map_location="cpu", weights_only=False)  # our own ranks' pickle
        self.directory.log(f"finished: {len(self.addresses)} rank(s), {time.monotonic() - self.began:.1f} s")
        return result

    def _failed(self):
        return [rank for rank, how in self.ended.items() if how["how"] != "done"]

    def _first_cause(self, failed):
        """The rank that failed by itself: peers that lost their connection to it may be heard of before it."""
        deadline = time.monotonic() + CAUSE_TIMEOUT
        while all(CONSEQUENCE.search(self.ended[rank].get("message", "")) for rank in failed) and time.monotonic() < deadline:
            with contextlib.suppress(queue.Empty):
                self._take(self.inbox.get(timeout=0.02))
            failed = self._failed()
        return min(failed, key=lambda rank: bool(CONSEQUENCE.search(self.ended[rank].get("message", ""))))

    def _take(self, event):
        if event.get("lost") in self.addresses:
            self.ended.setdefault(self.addresses.index(event["lost"]), {"how": "lost"})
        if event.get("status") == "error" and event["future"] not in self.ended:
            error = self.futures[event["future"]].exception()
            self.ended[event["future"]] = {"how": "raised", "message": f"Its agent failed: {error!r}", "traceback": ""}
        for message in event.get("messages", ()):
            self._take_message(event["rank"], message)

    def _take_message(self, rank, message):
        if "report" in message:
            self.directory.record(rank, message["report"])
            self.progress.record(message["report"])
        elif "position" in message:
            self.progress.position(message["position"])
        elif "line" in message:
            self.lines[rank] = [*self.lines[rank], message["line"]][-KEPT_LINES:]
            self.directory.log(f"[rank {rank}] {message['line']}")
        elif "token" in message:
            from ddp_common.agent import take_file

            (content,) = self.client.run(take_file, message["token"], workers=[self.addresses[rank]]).values()
            self.directory.save(message["file"], content)
        elif "started" in message:
            self.hosts[rank] = message["started"]["host"]
            self.directory.log(f"rank {rank} started: process {message['started']['pid']} on {message['started']['host']}")
        elif "ended" in message:
            self.ended.setdefault(rank, message["ended"])
            if message["ended"]["how"] not in ("done", "cancelled"):
                self.directory.log(f"rank {rank} ended: {message['ended']}")

    def _failure(self, rank):
        how = self.ended[rank]
        host, code = self.hosts.get(rank, self.addresses[rank]), how.get("exitcode")
        killed_by = signal.Signals(-code).name if code is not None and code < 0 else None
        if how["how"] == "lost":
            cause = "its worker died"
        elif how["how"] == "raised":
            cause = how["message"]
        elif killed_by:
            cause = f"killed by {killed_by}" + (", often because memory ran out" if killed_by == "SIGKILL" else "")
        else:
            cause = f"it left with exit code {code} before its function returned"
        consequences = [str(peer) for peer in sorted(self._failed()) if peer != rank]
        if consequences:  # on a line of its own: how many are heard of in time differs
            cause += f"\nAs a consequence, rank {', '.join(consequences)} lost the connection to it."
        said = "".join(f"\n  [rank {r}] {line}" for r, lines in self.lines.items() for line in lines)
        message = (f"Rank {rank} of {len(self.addresses)} on {host} failed: {cause}\n\n{how.get('traceback', '')}"
                   + (f"\nLast lines of the ranks:{said}" if said else "") + f"\nThe whole log: {self.directory.path / 'log.txt'}")
        return RankFailed(message, rank=rank, host=host, exitcode=code, signal=killed_by, traceback=how.get("traceback", ""),
                          logs=self.lines, directory=self.directory.path)

    def end(self):
        """Cancel what still runs and wait until every rank says that it is gone."""
        running = [future for future in self.futures if not future.done()]
        if running:
            self.client.cancel(running, force=True)
        told = time.monotonic()
        while time.monotonic() < told + GONE_TIMEOUT:
            pending = set(range(len(self.futures))) - set(self.ended)
            if not pending or (time.monotonic() > told + 1 and not pending & set(self.hosts)):  # a rank that never started says nothing
                break
            with contextlib.suppress(queue.Empty):
                self._take(self.inbox.get(timeout=0.1))
        self.progress.close()
        self.directory.close()
