"""Leave together: a rank that gets SIGTERM finishes its step, and so do the others.

Batch systems send SIGTERM before they kill. Ranks may be some steps apart: where NCCL works
through what was asked of it, or where gradients are added up over several steps
(`model.no_sync()`). Whoever leaves while another rank has begun a later step leaves that one
waiting. So ranks agree, through the store, on a step that none of them has begun. The store
notifies the ranks of a request; until then no step asks it.

Promises: all ranks leave before the same step, having saved. Nobody else can stop them, since the
store answers to the run's own ranks only.
"""

import contextlib
import datetime
import mmap
import signal
import threading
from typing import NoReturn

import torch
import torch.distributed as dist

from ddp_common.ranks import rendezvous

PEERS_TIMEOUT = datetime.timedelta(minutes=10)  # for all to come to the step that was agreed
LEAVE_BEFORE = "leave before "  # in the store; the number of a step follows

_told = False  # this rank has got SIGTERM
_in_loop = False  # training has come to its first step
_is_done = False  # there is nothing left to stop
# A byte that this process shares with what it forks: told to stop, and still in its last step
_is_leaving = mmap.mmap(-1, 1)
_watched_store = None  # the store that sets `_requested`
_requested = threading.Event()  # some rank has got SIGTERM
_acknowledged_store = None  # the store in which this rank has said that it knows


class Stopped(BaseException):
    """Ends a training function from inside its loop.

    It is not an `Exception`, so that no handler of the user's takes it for an error.
    """


def listen_to_sigterm() -> None:
    """From now on SIGTERM ends this process between two steps; before the first step, at once.

    Call it in the main thread.
    """
    signal.signal(signal.SIGTERM, _on_sigterm)


def training_has_ended() -> None:
    """From now on SIGTERM changes nothing: the training function has come to its end."""
    global _is_done
    _is_done = True
    _is_leaving[0] = False


def _on_sigterm(number, frame):
    global _told
    # Only once: a second SIGTERM, which some batch systems send, would raise in what the first
    # one has this rank do.
    is_to_leave = not (_told or _in_loop or _is_done)
    _told = True
    _is_leaving[0] = not (is_to_leave or _is_done)
    if is_to_leave:
        raise Stopped("before the first step")


def was_told() -> bool:
    """Whether it was this rank that got SIGTERM."""
    return _told


def is_rank_leaving() -> bool:
    """Whether this process, or the one that has forked it, finishes its last step."""
    return bool(_is_leaving[0])


def is_in_loop() -> bool:
    """Whether training has come to its first step.

    From there on ranks leave together; before that, each one on its own.
    """
    return _in_loop


def is_time_to_stop(step: int) -> bool:
    """Whether the ranks are to leave before `step`, counted over the whole run.

    Every rank asks before every step.
    """
    global _in_loop, _watched_store, _acknowledged_store
    _in_loop = True
    store = rendezvous.current_store()
    if store is None:
        return _told
    if _watched_store is not store:
        _watched_store = store
        _requested.clear()
        store.call_when_set("stop/wanted", _requested.set)
    if not _told and not _requested.is_set():
        return False
    is_last_to_know = False
    if _acknowledged_store is not store:
        _acknowledged_store = store
        if _told:
            store.set("stop/wanted", "")
        # Before it says that it knows: whoever then decides must have seen this rank's step.
        _is_agreed(store, step, is_last_to_know=False)
        ranks_that_know = store.add("stop/aware", 1)
        is_last_to_know = ranks_that_know == rendezvous.world_size()
    return _is_agreed(store, step, is_last_to_know)


def _is_agreed(store, step: int, is_last_to_know: bool) -> bool:
    """Whether it is agreed to leave before `step`; if not, this rank goes on with it.

    One value of the store says which step has been begun by the rank that is furthest, as far as
    ranks know of the request; once all know, it says before which step they leave. A rank changes
    it only if it is what the rank has read: so no rank goes on while another one decides.
    """
    said = ""
    while not said.startswith(LEAVE_BEFORE):
        furthest = max(step, int(said or 0))
        if is_last_to_know:
            wanted = f"{LEAVE_BEFORE}{furthest + 1}"
        else:
            wanted = str(furthest)
        is_said_already = wanted == said
        if is_said_already:
            return False
        held = store.compare_set("stop/before", said, wanted).decode()
        if held == wanted:
            return False
        said = held
    return step >= int(said.removeprefix(LEAVE_BEFORE))


def leave() -> NoReturn:
    """Raise `Stopped`. Rank 0, which holds the store, is the last: others may still ask it.

    It waits for `PEERS_TIMEOUT` at most, and not for a rank that has died.
    """
    store = rendezvous.current_store()
    if store is not None:
        if rendezvous.device().type == "cuda":
            # Others' last step may need what this rank's GPU has not done yet.
            torch.cuda.synchronize()
        everybody = [f"stop/left/{peer}" for peer in range(rendezvous.world_size())]
        with contextlib.suppress(dist.DistError):  # all is saved: leave anyway
            store.set(everybody[rendezvous.rank()], "")
            if rendezvous.rank() == 0:
                store.wait(everybody, PEERS_TIMEOUT)
    _is_leaving[0] = False
    raise Stopped
