"""The client's side of a run: choose workers, start one rank on each, start again from the newest checkpoint when one fails.

Data flows one way: client -> agent -> rank -> reports -> client. Relies on the workers being processes that can import `ddp_common`;
`attempt` follows one set of ranks. Promises: never two ranks on a worker, also with several launches at once; when `launch` returns
or raises, every rank it started is gone and the workers are free.
"""

import collections
import contextlib
import copyreg
import html
import importlib
import linecache
import os
import queue
import reprlib
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ddp_common.errors import Error, RankFailed, RunStopped

RECONNECT_TIMEOUT = 5  # seconds
PLACEMENT_TIMEOUT = 60  # seconds to wait for free workers
SHOWN_ITEMS = 3  # of a result that is a dict or a list
KEPT_MESSAGES = 10  # events that the scheduler keeps of those which have reached the client
STALL_TIMEOUT = 600  # seconds that a rank may live without getting on

_subscribing = threading.Lock()


@dataclass(repr=False)
class Run:
    """What a launch leaves: rank 0's `result`, the `directory`, the number of ranks, every reported record, and why it was restarted.

    `records` is a sequence of dicts, kept compactly: each is made when it is asked for. `problems` says what could not be written, such
    as checkpoints on a full disk; training went on.
    """

    result: object
    directory: Path
    world_size: int
    records: Sequence  # of dict
    seconds: float
    failures: list = field(default_factory=list)  # the exceptions that restarts have answered, in order
    problems: list = field(default_factory=list)  # of str

    @property
    def metrics(self):
        """All reports as a pandas DataFrame: one row per report; columns rank, time (s since 1970), epoch, step and what was reported."""
        from ddp_common.records import Records

        records = self.records if isinstance(self.records, Records) else Records(self.records)
        return records.frame()

    def _in_words(self):
        from ddp_common.run_directory import shown

        return {"result": in_short(self.result), "world_size": self.world_size, "seconds": round(self.seconds, 1),
                "directory": str(shown(self.directory)), "records": len(self.records), "restarts": len(self.failures)}

    def __repr__(self):
        return f"Run({', '.join(f'{name}={value}' for name, value in self._in_words().items())})"

    def _repr_html_(self):
        rows = "".join(f"<tr><th>{name}</th><td style='text-align: left'>{html.escape(str(value))}</td></tr>"
                       for name, value in self._in_words().items())
        return f"<table>{rows}</table>"


def in_short(value):
    """A value in a few words: what it is and how large. The numbers in a tensor or a table are nobody's first question."""
    kind = type(value).__name__
    if isinstance(getattr(value, "shape", None), tuple):
        return f"{kind} {tuple(value.shape)}"
    if isinstance(value, dict):
        items = [f"{key}: {_kind_and_size(item)}" for key, item in list(value.items())[:SHOWN_ITEMS]]
        return f"{kind} of {len(value)} ({', '.join(items)}{', …' if len(value) > SHOWN_ITEMS else ''})"
    if isinstance(value, (list, tuple, set, frozenset)):
        items = [_kind_and_size(item) for item in list(value)[:SHOWN_ITEMS]]
        return f"{kind} of {len(value)} ({', '.join(items)}{', …' if len(value) > SHOWN_ITEMS else ''})"
    return _kind_and_size(value)


def _kind_and_size(value):
    if isinstance(getattr(value, "shape", None), tuple):
        return f"{tuple(value.shape)}"
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, Path)):
        return reprlib.repr(value)
    return f"{type(value).__name__}{f' of {len(value)}' if hasattr(value, '__len__') else ''}"


def launch(client, function, *, workers=None, min_workers=None, restarts=None, stall_timeout=STALL_TIMEOUT, directory=None,
           timeout=PLACEMENT_TIMEOUT, **arguments):
    """Run `function(**arguments)` on one rank per worker and return a `Run`.

    `client` is a `distributed.Client`, or what `connect` gives under torchrun and srun: there the ranks are running already, and only
    `directory` and `arguments` matter. `workers` is the number of ranks (default: as many as the cluster has workers); launches
    that find too few free ones wait up to `timeout` seconds, or start with fewer once there are `min_workers`. After a failure it
    starts again from the newest good checkpoint, on the workers there are then, up to `restarts` times (default: RESTARTS from the
    environment, else 0). A rank that makes no progress for `stall_timeout` seconds is a failure (None: never); progress is a step of
    a sampler or an optimizer, a batch of an evaluation, a report, a saved file or checkpoint. `directory` continues in an earlier run's directory, whose newest checkpoint
    `Checkpoint.restore` then finds; default: a new one, or what RESUME names for the first launch of a tutorial.
    Raises `RankFailed` as soon as any rank fails, `RunStopped` when ranks left because they got SIGTERM, `SchedulerLost`, and `Error`
    for what can be put right before.
    """
    from ddp_common.without_dask import Ranks, run_here

    if isinstance(client, Ranks):
        return run_here(function, arguments, directory)
    from ddp_common import attempt as attempt_module
    from ddp_common.run_directory import absolute

    _refuse_unusable(client)
    payload = _pickle(function, arguments)
    restarts = whole_number("restarts", os.environ.get("RESTARTS") or 0 if restarts is None else restarts, least=0)
    directory = absolute(directory) if directory else directory  # what it means now, wherever the program goes meanwhile
    run_directory, failures, began = None, [], time.monotonic()
    try:
        while True:
            run_id = uuid.uuid4().hex[:12]
            if hasattr(client, "make_ready"):  # one of `connect`
                client.make_ready(bool(failures))
            with _inbox(client, run_id) as inbox, _placement(client, run_id, workers, min_workers, timeout) as addresses:
                run_directory = run_directory or _open_directory(function, directory)
                try:
                    attempt = attempt_module.Attempt(client, run_id, addresses, inbox, run_directory, stall_timeout)
                    result = attempt.run(payload, *failures[-1:], number=len(failures) + 1)
                    run_directory.close()  # now: it may have to say that something was not written
                    return Run(result, run_directory.path, len(addresses), run_directory.records, time.monotonic() - began, failures,
                               run_directory.problems)
                except (RankFailed, RunStopped) as failure:
                    if len(failures) == restarts or attempt_module.stop_requested:
                        raise
                    failures.append(failure)
    except KeyboardInterrupt as interrupt:
        if run_directory is not None:
            run_directory.log("interrupted from the keyboard")
            interrupt.directory = run_directory.path
            from ddp_common.progress import explain_interrupt

            explain_interrupt(interrupt, function, run_directory)
        raise
    except Error as error:
        if failures and not isinstance(error, (RankFailed, RunStopped)):
            error.args = (f"{error}\nIt was to restart because: {str(failures[-1]).splitlines()[0]}",)
            error.directory = run_directory.path
        raise
    finally:
        if run_directory is not None:
            run_directory.close()


def whole_number(name, value, least):
    with contextlib.suppress(TypeError, ValueError):
        if int(value) == float(value) >= least:
            return int(value)
    raise Error(f"{name}={value!r}: {name} is a whole number of at least {least}.")


def _pickle(function, arguments):
    import cloudpickle

    for name in ("torch.classes", "torch.ops"):  # of a class of their own; cloudpickle sends them with any function that says `images.classes`
        if name in sys.modules:
            copyreg.pickle(type(sys.modules[name]), lambda module: (importlib.import_module, (module.__name__,)))
    cells = {name: entry for name, entry in list(linecache.cache.items()) if len(entry) == 4 and not os.path.exists(name)}
    try:
        return cloudpickle.dumps((function, arguments, cells))
    except Exception as error:
        raise Error(f"{getattr(function, '__name__', function)!r} or its arguments cannot be sent to the workers: {error}. Open files, "
                    "clients, locks and running processes cannot travel: make them inside the function.") from None


def _refuse_unusable(client):
    """Raise `Error` for what is no client, or one through which no ranks can be started."""
    from distributed import Client

    if not isinstance(client, Client):
        kind = type(client).__name__
        how = "Make a client of it: Client(cluster)." if hasattr(client, "scheduler_address") else "Make one with ddp_common.connect()."
        raise Error(f"launch takes a distributed.Client first, not {kind}. {how}")
    if client.asynchronous:
        raise Error("This client is asynchronous, and launch waits until training has ended. Make it without asynchronous=True, or call launch in a "
                    "thread: run = await asyncio.to_thread(ddp.launch, client, train, …).")
    try:
        _wait_until_connected(client)
        workers = client.scheduler_info(n_workers=-1)["workers"]
    except OSError as error:
        raise _no_answer(client, error) from None
    if any(address.startswith("inproc://") for address in workers):
        raise Error("The workers of this cluster are threads of one process (processes=False). Ranks need processes: use "
                    "LocalCluster(processes=True), which is the default.")


def _no_answer(client, error):
    address = getattr(client.scheduler, "address", None) or "an address that it has forgotten"
    return Error(f"Dask's scheduler at {address} does not answer ({error}). Connect again, and launch with the new client.")


def _wait_until_connected(client):
    """A client that has just lost its connection may have it back in a moment. Raises OSError if it does not, or is closed."""
    deadline = time.monotonic() + RECONNECT_TIMEOUT
    while client.status == "connecting" and time.monotonic() < deadline:
        time.sleep(0.05)
    if client.status != "running":
        why = "the connection was lost" if client.status == "connecting" else "this client is closed"
        raise ConnectionError(why)


def _open_directory(function, directory):
    from ddp_common.run_directory import RunDirectory, new_directory
    from ddp_common.settings import current, run_to_resume

    name = getattr(function, "__name__", "run")
    opened = RunDirectory(directory or run_to_resume(name) or new_directory(current.name or name))
    opened.function = name
    return opened


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
            if not inboxes and client.status == "running":  # a client that closes while it is subscribed makes the scheduler log an error
                client.unsubscribe_topic(TOPIC)
                client.unsubscribe_topic("all")


@contextlib.contextmanager
def _placement(client, run_id, wanted, least, timeout):
    """Claim workers, wait for them if need be; yields their addresses in rank order and gives them back at the end."""
    wanted = None if wanted is None else whole_number("workers", wanted, least=1)
    least = None if least is None else whole_number("min_workers", least, least=1)
    deadline, most = time.monotonic() + timeout, getattr(client, "most", None)
    try:
        while not (answer := _ask_scheduler(client, _claim, run_id, client.id, list(client.ddp_inboxes), wanted, least, most))["claimed"]:
            if time.monotonic() > deadline:
                raise Error(_too_few(client, answer, wanted, least, timeout))
            _ask_for(client, run_id, wanted or least or 1)
            time.sleep(0.05)
        _ask_for(client, run_id, len(answer["claimed"]))
        yield answer["claimed"]
    finally:
        _ask_for(client, run_id, 0)
        with contextlib.suppress(OSError):  # the scheduler is gone, and with it the claims
            if client.status == "running":
                client.run_on_scheduler(_release, run_id)


def _ask_scheduler(client, function, *arguments):
    try:
        return client.run_on_scheduler(function, *arguments)
    except OSError as error:
        raise _no_answer(client, error) from None


def _too_few(client, answer, wanted, least, timeout):
    what = f"No {least or wanted or 'free'} worker(s) for this launch within {timeout} s: the cluster has "
    adaptive = _adaptive(client)
    if adaptive is not None and adaptive.maximum < (least or wanted or 1):
        return f"{what}{answer['known']} and adapts to {adaptive.maximum:g} at most. Raise that: cluster.adapt(maximum={least or wanted})."
    if answer["known"] == 0:
        return (f"{what}no workers. Start some: cluster.scale(2), or `dask worker` with the address {client.scheduler.address}. Where it adapts by "
                f"itself to what there is to do, set the least: cluster.adapt(minimum={least or wanted or 2}).")
    return (f"{what}{answer['known']}, of which {answer['busy']} run other launches. Start more (WORKERS=…), ask for fewer ranks, "
            "or wait for the others.")


def _adaptive(client):
    """What scales the cluster of this client by itself (`cluster.adapt()`); None if nothing does, or it is out of reach."""
    return getattr(getattr(client, "cluster", None), "_adaptive", None)


def _ask_for(client, run_id, workers):
    """Have a cluster that adapts keep as many workers as all launches of this program need: it counts tasks, and these come later."""
    adaptive = _adaptive(client)
    if adaptive is None:
        return
    with _subscribing:
        needs = adaptive.__dict__.setdefault("ddp_needs", {"minimum": adaptive.minimum})
        needs.pop(run_id, None)
        if workers:
            needs[run_id] = workers
        launches = sum(need for name, need in needs.items() if name != "minimum")
        adaptive.minimum = min(max(needs["minimum"], launches), max(adaptive.maximum, needs["minimum"]))


def _claim(run_id, client_id, active, wanted, least, most, dask_scheduler):
    """Runs on the scheduler, whose event loop makes it atomic: no two launches get one worker.

    Void are the claims of a dead client, and those of runs that are not `active` any more on a client which had lost its connection.
    """
    claims = dask_scheduler.__dict__.setdefault("ddp_claims", {})  # worker address -> (client id, run id)
    for address, (owner, run) in list(claims.items()):
        if owner not in dask_scheduler.clients or address not in dask_scheduler.workers or (owner == client_id and run not in active):
            del claims[address]
    known = [address for address, worker in dask_scheduler.workers.items() if worker.status.name == "running"]
    free = sorted((address for address in known if address not in claims), key=lambda a: dask_scheduler.workers[a].host)
    count = wanted or min(most or len(known), len(known))
    if len(free) < count:
        count = len(free) if least and len(free) >= least else 0
    if count == 0 or count < (least or 0):
        return {"claimed": [], "known": len(known), "busy": len(claims)}
    claims.update((address, (client_id, run_id)) for address in free[:count])
    _keep_few_messages(dask_scheduler, client_id)
    return {"claimed": free[:count]}


def _keep_few_messages(scheduler, client_id):
    """Dask keeps, for whoever debugs it, a thousand events of a topic and a thousand messages of a connection: of a run hundreds of MB.

    These are parts of Dask that it does not document; where they are not what they were, nothing happens.
    """
    topic = scheduler._broker._topics["ddp_common"] if hasattr(scheduler, "_broker") else None
    for holder, name in ((topic, "events"), (scheduler.client_comms.get(client_id), "recent_message_log")):
        kept = getattr(holder, name, None)
        if isinstance(kept, collections.deque) and kept.maxlen != KEPT_MESSAGES:
            setattr(holder, name, collections.deque(maxlen=KEPT_MESSAGES))


def _release(run_id, dask_scheduler):
    claims = dask_scheduler.__dict__.get("ddp_claims", {})
    for address in [address for address, (_, owner) in claims.items() if owner == run_id]:
        del claims[address]
