"""A rank's life: `live` has its steps, in their order, around the training function.

Each step is a context manager that undoes at its end what it has done; so whatever ends the
training function, reports are sent and the process group is left. Ranks of torchrun take the same
steps: `without_dask` calls `reports`, `sigterm`, `train` and `oddities`. Promises: ranks have
random numbers of their own, though all are forked from one state; what a rank forks is no rank: it
reports nothing, and SIGTERM ends it, except that workers of a `ddp.DataLoader` stay as long as the
rank trains.
"""

import contextlib
import functools
import json
import linecache
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import numpy
import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from dask_ranks import handover
from dask_ranks.messages import Ended, Message, Position
from dask_ranks.rank import last_word, reporter, whereabouts
from dask_ranks.rank.reporter import Reporter
from dask_ranks.rank.scripts import Script
from ddp_common import checkpoint, dealing, rendezvous, replicas, reporting, rows, stopping

ALONE = (
    "Each rank has trained alone: optimizers have stepped, and no collective was called. Wrap the "
    "model in DistributedDataParallel, and give each rank its own part of the data "
    "(docs/coming-from-elsewhere.md)."
)

_has_trained = False  # an optimizer has stepped


def live(
    environment: dict[str, str],
    threads: int,
    payload: bytes,
    tables: int | None,
    store_socket: int | None,
    send: Callable[[Message], None],
) -> Ended:
    """Call the training function; returns the rank's last word.

    Arguments are those of `process.main`; `send` gives a message to the agent. Raises what the
    function raises, and `Error` if the ranks do not meet.
    """
    os.environ.update(environment)
    # Every process that the rank starts has this mark.
    os.environ["DDP_RANK_PROCESS"] = str(os.getpid())
    torch.set_num_threads(threads)
    # What this process was forked from has one state for all ranks. `random` draws by itself.
    numpy.random.seed()
    torch.seed()
    multiprocessing.set_start_method(None, force=True)
    whereabouts.keep_collectives()
    try:
        with reports(send), sigterm():
            function, arguments = _unpickled(payload, tables)
            is_function = not isinstance(function, Script)
            if is_function:
                # By fork, the workers of a DataLoader know a notebook's classes, as they would in
                # the notebook itself. A script chooses for itself.
                multiprocessing.set_start_method("fork", force=True)
            with rendezvous.process_group(store_socket, is_made_here=is_function):
                with contextlib.nullcontext() if is_function else _os_exit_is_an_end():
                    result, models = train(function, arguments)
                for problem in oddities(_collected_by_rank_0(models)):
                    reporting.post(reporting.Problem(problem))
    except stopping.Stopped as stopped:
        return Ended(
            "stopped",
            got_sigterm=stopping.state.was_told,
            has_begun=stopping.state.has_begun,
            step=stopped.step,
        )
    is_rank_0 = environment["RANK"] == "0"
    return Ended("done", result=last_word.pickled_result(result) if is_rank_0 else None)


@contextlib.contextmanager
def reports(send: Callable[[Message], None]) -> Iterator[None]:
    """What is reported goes to `send`, all of it before the end. Steps count as progress."""
    global _has_trained
    _has_trained = False
    messages = Reporter(send)
    hook = register_optimizer_step_post_hook(_optimizer_stepped)
    try:
        yield
    finally:
        hook.remove()
        messages.finish()


def _optimizer_stepped(*_: Any) -> None:
    global _has_trained
    _has_trained = True
    reporting.made_progress()


@contextlib.contextmanager
def sigterm() -> Iterator[None]:
    """SIGTERM ends training between two steps; after training it changes nothing."""
    try:
        stopping.listen_to_sigterm()
        _disown_forks(signal.getsignal(signal.SIGTERM))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        yield
    finally:
        stopping.training_has_ended()


@functools.cache  # under torchrun a process may launch more than once
def _disown_forks(handler: Any) -> None:
    """From now on what this process forks is no rank, whose handler of SIGTERM is `handler`."""
    os.register_at_fork(after_in_child=reporter.stop)
    os.register_at_fork(after_in_child=functools.partial(_end_by_sigterm, handler))


def _end_by_sigterm(handler: Any) -> None:
    """In what the rank has forked: SIGTERM ends it, unless its program has a handler for it."""
    if signal.getsignal(signal.SIGTERM) is handler:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextlib.contextmanager
def _os_exit_is_an_end() -> Iterator[None]:
    """`os._exit(0)` ends a script well, as under torchrun; rank 0, with the store, goes last."""
    own_pid, leave = os.getpid(), os._exit

    def tell_and_leave(status: int) -> NoReturn:
        store = rendezvous.current_store()
        if status == 0 and os.getpid() == own_pid and store is not None:
            reporting.post(Position(**reporting.position(), has_returned=True))
            with contextlib.suppress(dist.DistError):  # the store is gone
                # Another thread may wait in that one
                own_store = store.clone()  # type: ignore[attr-defined]  # torch's stubs lack it
                for word in ("returned", "left"):
                    own_store.set(f"{word}/{rendezvous.rank()}", "")
                if rendezvous.rank() == 0:
                    peers = range(1, rendezvous.world_size())
                    own_store.wait([f"left/{peer}" for peer in peers], rendezvous.FOREVER)
        leave(status)

    os._exit = tell_and_leave
    try:
        yield
    finally:
        os._exit = leave


def _unpickled(payload: bytes, tables: int | None) -> tuple[Callable, dict[str, Any]]:
    """The training function and its arguments; torch's settings become those of the client."""
    if tables is not None:
        handover.receive(tables, _rows_of)
    function, arguments, sources, settings = handover.loads(payload)
    linecache.cache.update(sources)  # a traceback then shows the lines of a notebook's cells
    for set_it in settings:
        set_it()
    return function, arguments


def _rows_of(table: handover.Table) -> rows.Rows:
    """What a training function gets of a table that was handed over."""
    return rows.Rows(table.name, dealing.Placement(table.lengths, table.parts), table.parts)


def train(function: Callable, arguments: dict[str, Any]) -> tuple[Any, replicas.Fingerprint]:
    """Call the training function; returns its result, and what is compared of that.

    What is being written is whole afterwards, and told, whatever has ended the function.
    """
    try:
        with stopping.in_agreement():
            result = _call(function, arguments)
            stopping.training_has_ended()
            models = replicas.of_result(result)
    except stopping.Stopped as stopped:
        stopped.step = reporting.position().get("step", 0)
        raise
    finally:
        checkpoint.finish_writing()
    reporting.post(Position(**reporting.position(), has_returned=True))
    return result, models


def oddities(models: list[replicas.Fingerprint]) -> list[str]:
    """What rank 0 tells the client of the models that the ranks have returned.

    That they differ, or that the ranks have trained without a word to each other. Other ranks have
    nothing to tell.
    """
    if rendezvous.rank() != 0:
        return []
    drift = replicas.apart_in_result(models)
    found = [] if drift is None else [drift]
    is_one_of_many = rendezvous.world_size() > 1
    if is_one_of_many and _has_trained and not whereabouts.has_called_collectives():
        found.append(ALONE)
    return found


def _collected_by_rank_0(models: replicas.Fingerprint) -> list[replicas.Fingerprint]:
    """On rank 0 what all ranks have found of what they return; elsewhere nothing.

    By the store and not by a collective: a rank may be done long before another one.
    """
    store, size = rendezvous.current_store(), rendezvous.world_size()
    if store is None:
        return []
    with rendezvous.explain_lost_store(rendezvous.rank()):
        store.set(f"models/{rendezvous.rank()}", json.dumps(models))
        if rendezvous.rank() != 0:
            return []
        store.wait([f"returned/{peer}" for peer in range(1, size)], rendezvous.FOREVER)
        keys = [f"models/{peer}" for peer in range(size)]
        return [json.loads(store.get(key)) for key in keys if store.check([key])]


def _call(function: Callable, arguments: dict[str, Any]) -> Any:
    """Call the training function. `whereabouts.is_call` finds this frame by its name.

    A process that the function has forked (os.fork) may come back from it too: that one is not
    the rank, and ends here.
    """
    own_pid = os.getpid()
    try:
        return function(**arguments)
    finally:
        if os.getpid() != own_pid:
            error = sys.exception()
            try:
                if error is not None and not isinstance(error, SystemExit):
                    traceback.print_exception(error)
                last_word.flush()
            finally:
                os._exit(last_word.exit_code(error))
