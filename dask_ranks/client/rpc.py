"""Asking workers that may not answer, and the scheduler which workers there are; and waiting.

A question is a coroutine on the event loop of Dask's client: whoever asks goes on meanwhile. Dask
itself would wait for a worker that is suspended for ever, and for a dead one half a minute.
"""

import asyncio
import concurrent.futures
import contextlib
import functools
import re
import time
from collections.abc import Awaitable, Callable
from typing import Any

from distributed import Client, Future

from ddp_common.errors import Error

POLL = 0.05  # seconds
RESTARTED = "scheduler-restart"  # Dask's words for why tasks were cancelled: client.restart(),
CONNECTION_LOST = "scheduler-connection-lost"  # and a scheduler that is gone


def wait_until(
    is_so: Callable[[], bool], timeout: float, pause: Callable[[float], Any] = time.sleep
) -> bool:
    """Wait until `is_so()`, at most `timeout` seconds; returns whether it is."""
    deadline = time.monotonic() + timeout
    while not is_so():
        if time.monotonic() > deadline:
            return False
        pause(POLL)
    return True


def begin(client: Client, ask: Callable[[], Awaitable]) -> concurrent.futures.Future:
    """Have `ask` asked, in which calls of `client` are awaited; returns what it will return."""

    async def answer() -> Any:
        return await ask()

    return asyncio.run_coroutine_threadsafe(answer(), client.loop.asyncio_loop)  # type: ignore


def ask_each(client: Client, function: Callable, *arguments: Any, workers: list[str]) -> dict:
    """What `function(*arguments)` returns on each worker: a dict that fills as they answer.

    What one raises leaves it without an answer.
    """
    answers: dict[str, Any] = {}

    async def ask(address: str) -> None:
        with contextlib.suppress(OSError):  # a lost scheduler is heard of otherwise
            answers.update(
                await client.run(function, *arguments, workers=[address], on_error="ignore")
            )

    for address in workers:
        begin(client, functools.partial(ask, address))
    return answers


def answers_within(
    timeout: float, client: Client, function: Callable, *arguments: Any, workers: list[str]
) -> dict[str, Any]:
    """The same, and wait for the answers, up to `timeout` seconds."""
    answers = ask_each(client, function, *arguments, workers=workers)
    wait_until(lambda: len(answers) == len(workers), timeout)
    return dict(answers)


def known_workers(client: Client) -> dict[str, dict]:
    """What the scheduler knows of its workers, by their address.

    Not by `client.scheduler_info`: a timer of Dask's puts an answer without workers where that one
    is kept, and now and then between the answer and its return. Raises OSError if the scheduler
    cannot be reached.
    """
    if client.scheduler is None:
        raise ConnectionError("this client is closed")
    return client.sync(client.scheduler.identity, n_workers=-1)["workers"]


def why_cancelled(future: Future) -> str | None:
    """Dask's word for why a task was cancelled; None if it was not."""
    if future.status != "cancelled":
        return None
    assert future._state is not None, "it has a status"
    return getattr(future._state.exception, "reason", None)


def refuse_without_package(error: Exception) -> None:
    """Raise `Error` if `error` is that of a process which cannot import `ddp_common`."""
    if re.search("No module named '(ddp_common|dask_ranks)'", str(error)):
        raise Error(
            "The workers, or the scheduler, have no ddp_common.\n"
            "Install it there, or send it: clusters/README.md, 'Workers without this package'."
        ) from None
