"""Leave together: a rank that gets SIGTERM finishes its step, and so do the others.

Batch systems send SIGTERM before they kill. Ranks that take part in every step's collective are
never more than one step apart. So it is enough to agree, through the store, on a step that none of
them can have begun: the last rank to learn of the request names the step after its own next one.
The store notifies the ranks of a request; until then no step asks it.

Promises: all ranks leave before the same step, having saved. Nobody else can stop them, since the
store answers to the run's own ranks only.
"""

import signal
import threading

from ddp_common.ranks import loader_workers, rendezvous

_told = False  # this rank has got SIGTERM
_in_loop = False  # training has come to its first step
_is_done = False  # there is nothing left to stop
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


def _on_sigterm(number, frame):
    global _told
    # Only once: a second SIGTERM, which some batch systems send, would raise in what the first
    # one has this rank do.
    is_to_leave = not (_told or _in_loop or _is_done)
    _told = True
    loader_workers.note_that_rank_was_told()
    if is_to_leave:
        raise Stopped("before the first step")


def was_told() -> bool:
    """Whether it was this rank that got SIGTERM."""
    return _told


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
    if _acknowledged_store is not store:
        if not _told and not _requested.is_set():
            return False
        if _told:
            store.set("stop/wanted", "")
        _acknowledged_store = store
        ranks_that_know = store.add("stop/aware", 1)
        if ranks_that_know == rendezvous.world_size():
            store.set("stop/before", str(step + 1))
    return store.check(["stop/before"]) and step >= int(store.get("stop/before"))
