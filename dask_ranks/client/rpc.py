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
SILENCE_TIMEOUT = 30  # seconds that workers have to answer at all, if nothing else is said
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


def submit(client: Client, key: str, address: str, function: Callable, *arguments: Any) -> Future:
    """A task, once and before others, that only the worker at this address may run."""
    where: dict = {"workers": [address], "pure": False, "retries": 0, "priority": 10}
    return client.submit(function, *arguments, key=key, **where)


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


def ask_all(
    client: Client,
    function: Callable,
    *arguments: Any,
    workers: list[str] | None = None,
    timeout: float | None = None,
) -> dict[str, Any]:
    """What `function(*arguments)` returns on each worker (None: on all), by their addresses.

    Raises `Error` for workers that do not answer in time or have no `ddp_common`, OSError for one
    that is lost, and what the function raises.
    """
    asked = {
        address: begin(
            client, functools.partial(client.run, function, *arguments, workers=[address])
        )
        for address in (known_workers(client) if workers is None else workers)
    }
    timeout = SILENCE_TIMEOUT if timeout is None else timeout
    concurrent.futures.wait(asked.values(), timeout)
    silent = [address for address, answer in asked.items() if not answer.done()]
    if silent:
        raise no_word(silent, timeout)
    try:
        return {address: answer.result()[address] for address, answer in asked.items()}
    except Exception as error:
        refuse_without_package(error)
        raise


def no_word(workers: list[str], timeout: float) -> Error:
    """The `Error` for workers that do not answer."""
    return Error(
        f"The worker at {', '.join(workers)} did not answer for {timeout:g} s. Is its process "
        "suspended (SIGSTOP, a suspended job), or its host overloaded?\n"
        "Let it go on, or end it, and try again."
    )


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
