"""Which workers a launch takes: claimed on the scheduler, waited for if need be, given back at the end.

Promises: never two ranks on a worker, also with several launches and several clients at once; the claims of a client that has died
are void.
"""

import collections
import contextlib
import threading
import time

from ddp_common.client.connection import no_answer
from ddp_common.errors import Error
from ddp_common.values import whole_number

KEPT_MESSAGES = 10  # events that the scheduler keeps of those which have reached the client
_adapting = threading.Lock()


@contextlib.contextmanager
def placement(client, run_id, wanted, least, timeout):
    """Claim workers, wait for them if need be; yields their addresses in rank order and gives them back at the end."""
    wanted = None if wanted is None else whole_number("workers", wanted, least=1)
    least = None if least is None else whole_number("min_workers", least, least=1)
    deadline, most = time.monotonic() + timeout, getattr(client, "most", None)
    try:
        while not (
            answer := _ask_scheduler(
                client, _claim, run_id, client.id, list(client.ddp_inboxes), wanted, least, most
            )
        )["claimed"]:
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
        raise no_answer(client, error) from None


def _too_few(client, answer, wanted, least, timeout):
    what = f"No {least or wanted or 'free'} worker(s) for this launch within {timeout} s: the cluster has "
    adaptive = _adaptive(client)
    if adaptive is not None and adaptive.maximum < (least or wanted or 1):
        return f"{what}{answer['known']} and adapts to {adaptive.maximum:g} at most. Raise that: cluster.adapt(maximum={least or wanted})."
    if answer["known"] == 0:
        return (
            f"{what}no workers. Start some: cluster.scale(2), or `dask worker` with the address {client.scheduler.address}. Where it adapts by "
            f"itself to what there is to do, set the least: cluster.adapt(minimum={least or wanted or 2})."
        )
    return (
        f"{what}{answer['known']}, of which {answer['busy']} run other launches. Start more (WORKERS=…), ask for fewer ranks, "
        "or wait for the others."
    )


def _adaptive(client):
    """What scales the cluster of this client by itself (`cluster.adapt()`); None if nothing does, or it is out of reach."""
    return getattr(getattr(client, "cluster", None), "_adaptive", None)


def _ask_for(client, run_id, workers):
    """Have a cluster that adapts keep as many workers as all launches of this program need: it counts tasks, and these come later."""
    adaptive = _adaptive(client)
    if adaptive is None:
        return
    with _adapting:
        needs = adaptive.__dict__.setdefault("ddp_needs", {"minimum": adaptive.minimum})
        needs.pop(run_id, None)
        if workers:
            needs[run_id] = workers
        launches = sum(need for name, need in needs.items() if name != "minimum")
        adaptive.minimum = min(
            max(needs["minimum"], launches), max(adaptive.maximum, needs["minimum"])
        )


def _claim(run_id, client_id, active, wanted, least, most, dask_scheduler):
    """Runs on the scheduler, whose event loop makes it atomic: no two launches get one worker.

    Void are the claims of a dead client, and those of runs that are not `active` any more on a client which had lost its connection.
    """
    claims = dask_scheduler.__dict__.setdefault(
        "ddp_claims", {}
    )  # worker address -> (client id, run id)
    for address, (owner, run) in list(claims.items()):
        if (
            owner not in dask_scheduler.clients
            or address not in dask_scheduler.workers
            or (owner == client_id and run not in active)
        ):
            del claims[address]
    known = [
        address
        for address, worker in dask_scheduler.workers.items()
        if worker.status.name == "running"
    ]
    free = sorted(
        (address for address in known if address not in claims),
        key=lambda a: dask_scheduler.workers[a].host,
    )
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
    for holder, name in (
        (topic, "events"),
        (scheduler.client_comms.get(client_id), "recent_message_log"),
    ):
        kept = getattr(holder, name, None)
        if isinstance(kept, collections.deque) and kept.maxlen != KEPT_MESSAGES:
            setattr(holder, name, collections.deque(maxlen=KEPT_MESSAGES))


def _release(run_id, dask_scheduler):
    claims = dask_scheduler.__dict__.get("ddp_claims", {})
    for address in [address for address, (_, owner) in claims.items() if owner == run_id]:
        del claims[address]
