"""A rank's life: `live` has its steps, in their order, around the training function.

Each step is a context manager that undoes at its end what it has done; so whatever ends the
training function, reports are sent and the process group is left. Promises: ranks have random
numbers of their own, though all are forked from one state; what a rank forks is no rank: it
reports nothing, and SIGTERM ends it, except that workers of a `ddp.DataLoader` stay as long as the
rank trains.
"""

import contextlib
import functools
import linecache
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from ddp_common import handover, main_module
from ddp_common.messages import Ended, Message, Position, Problem
from ddp_common.ranks import (
    checkpoint,
    last_word,
    rendezvous,
    replicas,
    reporting,
    rows,
    stopping,
    whereabouts,
)
from ddp_common.ranks.scripts import Script

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
    _settle(environment, threads)
    step = 0
    try:
        with _reports(send), _sigterm():
            function, arguments = _unpickled(payload, tables)
            is_function = not isinstance(function, Script)
            if is_function:
                # By fork, the workers of a DataLoader know a notebook's classes, as they would in
                # the notebook itself. A script chooses for itself.
                multiprocessing.set_start_method("fork", force=True)
            group = rendezvous.process_group(store_socket, is_made_here=is_function)
            try:
                with group, stopping.in_agreement():
                    result = _call(function, arguments)
                    stopping.training_has_ended()
                    models = replicas.at_the_end(checkpoint.held_parts())
                    checkpoint.finish_writing()
                    reporting.post(Position(**reporting.position(), has_returned=True))
                    _compare_with_others(models)
                    _tell_if_alone()
            finally:  # after an exception: what is being written is whole, and told
                step = reporting.position().get("step", 0)
                checkpoint.finish_writing()
    except stopping.Stopped:
        return Ended(
            "stopped",
            got_sigterm=stopping.was_told(),
            in_loop=stopping.is_in_loop(),
            step=step,
        )
    is_rank_0 = environment["RANK"] == "0"
    return Ended("done", result=last_word.pickled_result(result) if is_rank_0 else None)


def _settle(environment: dict[str, str], threads: int) -> None:
    """What holds for this process until it ends."""
    os.environ.update(environment)
    # Every process that the rank starts has this mark.
    os.environ["DDP_RANK_PROCESS"] = str(os.getpid())
    torch.set_num_threads(threads)
    # What this process was forked from has one state for all ranks. `random` draws by itself.
    numpy.random.seed()
    torch.seed()
    multiprocessing.set_start_method(None, force=True)
    whereabouts.keep_collectives()
    replicas.watch()


@contextlib.contextmanager
def _reports(send: Callable[[Message], None]) -> Iterator[None]:
    """What is reported goes to `send`, all of it before the end. Steps count as progress."""
    finish = reporting.start(send)
    os.register_at_fork(after_in_child=reporting.stop)
    hook = register_optimizer_step_post_hook(_optimizer_stepped)
    try:
        yield
    finally:
        hook.remove()
        finish()


def _optimizer_stepped(*_: Any) -> None:
    global _has_trained
    _has_trained = True
    reporting.made_progress()


@contextlib.contextmanager
def _sigterm() -> Iterator[None]:
    """SIGTERM ends training between two steps; after training it changes nothing."""
    try:
        stopping.listen_to_sigterm()
        handler = signal.getsignal(signal.SIGTERM)
        os.register_at_fork(after_in_child=functools.partial(_end_by_sigterm, handler))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        yield
    finally:
        stopping.training_has_ended()


def _end_by_sigterm(handler: Any) -> None:
    """In what the rank has forked: SIGTERM ends it, unless its program has a handler for it."""
    if signal.getsignal(signal.SIGTERM) is handler:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _unpickled(payload: bytes, tables: int | None) -> tuple[Callable, dict[str, Any]]:
    """The training function and its arguments; torch's settings become those of the client."""
    if tables is not None:
        handover.receive(tables, rows.rows_of)
    function, arguments, sources, settings = main_module.loads(payload)
    linecache.cache.update(sources)  # a traceback then shows the lines of a notebook's cells
    for set_it in settings:
        set_it()
    return function, arguments


def _compare_with_others(models: replicas.Fingerprint) -> None:
    """Rank 0 tells the client if the others' models differ in the end from its own."""
    fingerprints = rendezvous.collected_by_rank_0("models", models)
    drift = replicas.in_the_end(fingerprints)
    if drift is not None:
        reporting.post(Problem(drift))


def _tell_if_alone() -> None:
    """Rank 0 tells the client if the ranks have trained without a word to each other."""
    is_one_of_many = rendezvous.rank() == 0 and rendezvous.world_size() > 1
    if is_one_of_many and _has_trained and not whereabouts.has_called_collectives():
        reporting.post(Problem(ALONE))


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
