"""Leave together: a rank that gets SIGTERM goes on to the end of a step, and so do the others.

Batch systems send SIGTERM before they kill. Ranks may be some steps apart: where NCCL works
through what was asked of it, or where gradients are added up over several steps
(`model.no_sync()`). Whoever leaves while another rank has begun a later step leaves that one
waiting. So ranks agree on a step that none of them has begun: freeze, compare, release. When one
has asked, a thread of each rank lets it begin no further step, and says in the store which one it
has begun last; when all have said so, they know the furthest, and leave before the step after it.

Promises: all ranks leave before the same step. The threads never wait for training.
"""

import contextlib
import ctypes
import dataclasses
import datetime
import multiprocessing
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ddp_common import rendezvous

PEERS_TIMEOUT = datetime.timedelta(minutes=10)  # for all to answer, and to come to the step


class Stopped(BaseException):
    """Ends a training function from inside its loop.

    It is not an `Exception`, so that no handler of the user's takes it for an error.
    """

    step = 0  # the last one that was done


class Agreement:
    """A rank's part in the agreement on a last step, from before its first step on."""

    def __init__(self, store: dist.Store, rank: int, world_size: int):
        """`store` has no other keys."""
        self.store = store
        self.rank = rank
        self.peers = range(world_size)
        self.lock = threading.Lock()  # for the next two
        self.arrived = 0  # moments to which this rank has come
        self.begun = 0  # the one of these that it has begun last
        self.is_frozen = False
        self.has_requested = False
        self.leave_before = 0  # the step, once it is agreed
        self.is_agreed = threading.Event()
        threading.Thread(target=self._agree, daemon=True, name="ddp-stopping").start()

    def request(self) -> None:
        """Ask all ranks to leave, once."""
        if self.has_requested:
            return
        self.has_requested = True
        with contextlib.suppress(dist.DistError):  # rank 0 has failed, and reports that itself
            for peer in self.peers:
                self.store.set(f"wake/{peer}", "leave")

    def end(self) -> None:
        """This rank begins no more steps: say so to whoever asks from now on, and waits for it."""
        with contextlib.suppress(dist.DistError):
            self._freeze(self.store)
            self.store.set(f"wake/{self.rank}", "over")
            self.store.set(f"left/{self.rank}", "")

    def arrive(self) -> bool:
        self.arrived += 1
        with self.lock:
            if not self.is_frozen:
                self.begun = self.arrived
                return False
        self.is_agreed.wait()
        return self.arrived >= self.leave_before

    def leave(self) -> None:
        """Say that this rank leaves; rank 0, which holds the store, waits for the others."""
        with contextlib.suppress(dist.DistError):  # all is saved: leave anyway
            self.store.set(f"left/{self.rank}", "")
            if self.rank == 0:
                self.store.wait([f"left/{peer}" for peer in self.peers], PEERS_TIMEOUT)

    def _agree(self) -> None:
        """In a thread of its own, with a connection of its own: it waits most of the time."""
        # A signal is for the main thread, which it is to interrupt.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        store = self.store.clone()  # type: ignore[attr-defined]  # torch's stubs lack it
        store.set_timeout(rendezvous.FOREVER)
        said = [f"begun/{peer}" for peer in self.peers]
        # Without the store nothing is agreed: rank 0 has gone, as the next collective finds.
        with contextlib.suppress(dist.DistError):
            if store.get(f"wake/{self.rank}") == b"over":
                return
            self._freeze(store)
            store.wait(said, PEERS_TIMEOUT)
            self.leave_before = 1 + max(int(step) for step in store.multi_get(said))
        self.is_agreed.set()

    def _freeze(self, store: dist.Store) -> None:
        with self.lock:
            self.is_frozen = True
            store.set(f"begun/{self.rank}", str(self.begun))


@dataclasses.dataclass
class State:
    """How far this process is."""

    was_told: bool = False  # it has got SIGTERM
    # Training has come to its first step: from there on ranks leave together
    has_begun: bool = False
    is_done: bool = False  # there is nothing left to stop
    agreement: Agreement | None = None  # with the other ranks
    agreements: int = 0  # so many it has had: each has keys of its own in the store
    # Its `value` says whether this rank trains, to the workers of its loaders as well. Each rank
    # has its own, as they are all forked from one process; None in a process that is no rank
    is_training: Any = None


state = State()  # of this process


def listen_to_sigterm() -> None:
    """From now on SIGTERM ends this process between two steps; before the first step, at once.

    Call it in the main thread.
    """
    state.is_training = multiprocessing.RawValue(ctypes.c_bool, True)
    state.has_begun = False
    state.is_done = False
    signal.signal(signal.SIGTERM, _on_sigterm)


@contextlib.contextmanager
def in_agreement() -> Iterator[None]:
    """Ranks leave together in this block; each of them has it around its training function.

    It belongs inside of the process group.
    """
    store = rendezvous.current_store()
    if store is None:
        yield
        return
    state.agreements += 1
    own_keys = dist.PrefixStore(f"stop/{state.agreements}", store)
    agreement = Agreement(own_keys, rendezvous.rank(), rendezvous.world_size())
    state.agreement = agreement
    try:
        yield
        # Not after an exception: this rank's launcher ends the others then.
        agreement.end()
    finally:
        state.agreement = None


def training_has_ended() -> None:
    """From now on SIGTERM changes nothing: the training function has come to its end."""
    state.is_done = True
    state.is_training.value = False


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    # Only once: a second SIGTERM, which some batch systems send, would raise in what the first
    # one has this rank do.
    is_to_leave = not (state.was_told or state.has_begun or state.is_done)
    state.was_told = True
    if is_to_leave:
        raise Stopped("before the first step")


def arrive() -> bool:
    """Come to a moment at which all ranks may leave; returns whether they are to.

    Every rank does so before every step, and in every `save()`: moments are counted. Once ranks
    are to leave, it is so at all later ones: a rank may go on to the end of what it is adding up.
    """
    state.has_begun = True
    agreement = state.agreement
    if agreement is None:
        return state.was_told
    if state.was_told:
        agreement.request()
    return agreement.arrive()


def leave() -> NoReturn:
    """Raise `Stopped`. Rank 0, which holds the store, is the last: others may still ask it.

    It waits for `PEERS_TIMEOUT` at most.
    """
    if state.agreement is not None:
        if rendezvous.device().type == "cuda":
            # Others' last step may need what this rank's GPU has not done yet.
            torch.cuda.synchronize()
        state.agreement.leave()
    state.is_training.value = False
    raise Stopped
