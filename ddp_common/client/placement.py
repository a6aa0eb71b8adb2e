"""Which workers a launch takes: it claims them, and gives them back at the end.

They are claimed on the scheduler, and waited for if need be. Promises: never two ranks on a
worker, also with several launches and several clients at once; the claims of a client that has
died are void.
"""

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from distributed import Client, Scheduler

from ddp_common.client.asking import known_workers
from ddp_common.errors import Error
from ddp_common.values import whole_number

LOOK_INTERVAL = 0.05  # seconds
RECONNECT_TIMEOUT = 5  # seconds

_over: dict[str, set[str]] = {}  # address of a scheduler -> `_attempts_over`


@contextlib.contextmanager
def claimed_workers(
    client: Client,
    attempt_id: str,
    wanted: int | None,
    timeout: float,
    rows_held: dict[str, int],
) -> Iterator[list[str]]:
    """Claim workers, waiting for them if need be; yields their addresses in rank order.

    Gives them back at the end. `wanted`: how many (None: all). `rows_held`: rows of this launch's
    tables on each worker; those with most are taken first. Raises `Error` when there are too few
    within `timeout` seconds.
    """
    if wanted is not None:
        wanted = whole_number("workers", wanted, least=1)
    most = getattr(client, "most", None)
    deadline = time.monotonic() + timeout

    def claim() -> dict[str, Any]:
        over = list(_attempts_over(client))
        return _ask_scheduler(client, _claim, attempt_id, client.id, wanted, most, rows_held, over)

    try:
        answer = claim()
        if wanted is None and answer["paused"]:
            paused = ", ".join(answer["paused"])
            warnings.warn(
                f"The worker at {paused} is paused, as its memory is nearly full, and gets no "
                "rank. Free memory there, or give workers more (memory_limit).",
                stacklevel=4,
            )
        while not answer["claimed"]:
            if time.monotonic() > deadline:
                raise Error(_too_few(client, answer, wanted, timeout))
            time.sleep(LOOK_INTERVAL)
            answer = claim()
        yield answer["claimed"]
    finally:
        _give_back(client, attempt_id)


def _give_back(client: Client, attempt_id: str) -> None:
    """Give back the workers of an attempt, if it has any.

    Where the scheduler cannot be reached, the next launch of this program does it.
    """
    over = _attempts_over(client)
    over.add(attempt_id)
    attempts = list(over)
    with contextlib.suppress(OSError):  # the scheduler is gone, or out of reach for now
        if client.status == "running":
            client.run_on_scheduler(_release, attempts)
            over.difference_update(attempts)


def _attempts_over(client: Client) -> set[str]:
    """Attempts of this program (ids) that are over, and may still have workers on the scheduler.

    Not only those of this client: one that has lost its connection may still count as alive on the
    scheduler, and another one takes its place. An attempt that is in here stays over, so a list of
    them that is a moment old does no harm. One of the attempts that go on would lack what another
    thread has begun in that moment.
    """
    return _over.setdefault(_scheduler_of(client), set())


def _scheduler_of(client: Client) -> str:
    """The scheduler's address, also of a client that was closed since; "" if it had none."""
    if client.scheduler is not None:
        client.__dict__["ddp_scheduler"] = client.scheduler.address
    return client.__dict__.get("ddp_scheduler", "")


def _ask_scheduler(client: Client, function: Callable, *arguments: Any) -> Any:
    try:
        return client.run_on_scheduler(function, *arguments)
    except OSError as error:
        raise no_answer(client, error) from None


def _too_few(client: Client, answer: dict[str, Any], wanted: int | None, timeout: float) -> str:
    known, busy = answer["known"], answer["busy"]
    what = f"No {wanted or 'free'} worker(s) for this launch within {timeout} s: the cluster has"
    if known == 0:
        return (
            f"{what} no workers. Start some: cluster.scale(2), or `dask worker` with the address "
            f"{client.scheduler.address}. Where it adapts by itself to what there is to do, set "
            f"the least: cluster.adapt(minimum={wanted or 2})."
        )
    paused = ""
    if answer["paused"]:
        paused = f", and those at {', '.join(answer['paused'])} are paused: their memory is full"
    return (
        f"{what} {known}, of which {busy} run other launches{paused}. Start more (WORKERS=…, "
        "cluster.scale, cluster.adapt(minimum=…)), ask for fewer ranks, or wait for the others."
    )


# Whether ranks can be started through a client


def refuse_unusable(client: Any) -> None:
    """Raise `Error` for what is no client, or one through which no ranks can be started."""
    if not isinstance(client, Client):
        how = "Make one with ddp_common.connect()."
        if hasattr(client, "scheduler_address"):
            how = "Make a client of it: Client(cluster)."
        kind = type(client).__name__
        raise Error(f"launch takes a distributed.Client first, not {kind}. {how}")
    if client.asynchronous:
        raise Error(
            "This client is asynchronous, and launch waits until training has ended. Make it "
            "without asynchronous=True, or call launch in a thread: run = await "
            "asyncio.to_thread(ddp.launch, client, train, …)."
        )
    try:
        _wait_until_connected(client)
        workers = known_workers(client)
    except OSError as error:
        raise no_answer(client, error) from None
    if any(address.startswith("inproc://") for address in workers):
        raise Error(
            "The workers of this cluster are threads of one process (processes=False). Ranks need "
            "processes: use LocalCluster(processes=True), which is the default."
        )


def no_answer(client: Client, error: OSError) -> Error:
    """The `Error` for a scheduler that does not answer."""
    address = getattr(client.scheduler, "address", None) or "an address that it has forgotten"
    return Error(
        f"Dask's scheduler at {address} does not answer ({error}). Connect again, and launch with "
        "the new client."
    )


def _wait_until_connected(client: Client) -> None:
    """A client that has just lost its connection may have it back in a moment.

    Raises OSError if it does not, or if it is closed.
    """
    deadline = time.monotonic() + RECONNECT_TIMEOUT
    while client.status == "connecting" and time.monotonic() < deadline:
        time.sleep(LOOK_INTERVAL)
    if client.status == "connecting":
        raise ConnectionError("the connection was lost")
    if client.status != "running":
        raise ConnectionError("this client is closed")


# On the scheduler


def _claim(
    attempt_id: str,
    client_id: str,
    wanted: int | None,
    most: int | None,
    rows_held: dict[str, int],
    over: list[str],
    dask_scheduler: Scheduler,
) -> dict[str, Any]:
    """Claim workers, also those of attempts that are `over` (their ids).

    Runs on the scheduler, whose event loop makes it atomic: no two launches get one worker.
    """
    claims = _claims(dask_scheduler)
    _drop_void(claims, over, dask_scheduler)
    workers = dask_scheduler.workers
    known = _running(dask_scheduler)
    paused = [address for address, worker in workers.items() if worker.status.name == "paused"]
    free = [address for address in known if address not in claims]
    free.sort(key=lambda address: (-rows_held.get(address, 0), workers[address].host))
    count = wanted or min(most or len(known), len(known))
    if count == 0 or len(free) < count:
        return {"claimed": [], "paused": paused, "known": len(known), "busy": len(claims)}
    chosen = sorted(free[:count], key=lambda address: workers[address].host)
    for address in chosen:
        claims[address] = client_id, attempt_id
    return {"claimed": chosen, "paused": paused}


def _running(scheduler: Scheduler) -> list[str]:
    workers = scheduler.workers
    return [address for address, worker in workers.items() if worker.status.name == "running"]


def _claims(scheduler: Scheduler) -> dict[str, tuple[str, str]]:
    """Worker address -> (client id, attempt id)."""
    return scheduler.__dict__.setdefault("ddp_claims", {})


def _drop_void(claims: dict, over: list[str], scheduler: Scheduler) -> None:
    """Drop the claims of dead clients, on dead workers, and of attempts that are over.

    The last are left where a client had lost its connection when the attempt ended.
    """
    for address, (owner, attempt) in list(claims.items()):
        is_dead = owner not in scheduler.clients or address not in scheduler.workers
        if is_dead or attempt in over:
            del claims[address]


def _release(attempts: list[str], dask_scheduler: Scheduler) -> None:
    claims = _claims(dask_scheduler)
    for address, (_, attempt) in list(claims.items()):
        if attempt in attempts:
            del claims[address]
