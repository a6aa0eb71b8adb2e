"""Leave together: a rank that gets SIGTERM, which batch systems send before they kill, finishes its step, and so do the others.

Ranks that take part in every step's collective are never more than one step apart. So it is enough to agree through the store on a
step that none of them can have begun: the last one to hear of the wish names the step after its own next one. The store says so when
there is a wish; until then no step asks it. Promises: all ranks leave before the same step, having saved; since the store answers to
the run's own ranks alone, nobody else can stop them.
"""

import signal
import threading

from ddp_common.ranks import rendezvous

_told = False  # this rank has got SIGTERM
_in_loop = False
_aware = None  # the store in which this rank has said that it knows of the wish
_watched = None  # the store that says when there is a wish
_wanted = threading.Event()  # it has said so


class Stopped(BaseException):
    """Ends a training function from inside its loop; not an `Exception`, so that no handler of the user's takes it for an error."""


def listen_to_sigterm():
    """From now on SIGTERM ends this process between two steps; before the first step, at once. Call it in the main thread."""
    signal.signal(signal.SIGTERM, _on_sigterm)


def _on_sigterm(number, frame):
    global _told
    _told = True
    if not _in_loop:
        raise Stopped("before the first step")


def was_told():
    """Whether it was this rank that got SIGTERM."""
    return _told


def is_in_loop():
    """Whether training has come to its first step: from there on ranks leave together, before that each for itself."""
    return _in_loop


def is_time_to_stop(step):
    """Whether the ranks shall leave before `step`, which counts the steps of the whole run. Every rank asks before every step."""
    global _aware, _in_loop, _watched
    _in_loop = True
    store = rendezvous.current_store()
    if store is None:
        return _told
    if _watched is not store:
        _watched = store
        _wanted.clear()
        store.call_when_set("stop/wanted", _wanted.set)
    if _aware is not store:
        if not _told and not _wanted.is_set():
            return False
        if _told:
            store.set("stop/wanted", "")
        _aware = store
        if store.add("stop/aware", 1) == rendezvous.world_size():
            store.set("stop/before", str(step + 1))
    return store.check(["stop/before"]) and step >= int(store.get("stop/before"))
