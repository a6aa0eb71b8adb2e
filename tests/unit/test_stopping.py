"""Ranks agree when to leave, in whatever order their requests reach the store."""

import contextlib
import importlib.util
import itertools
import socket
import threading
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp_common.ranks import stopping, store

KEY = b"k" * 32
LAST = 50  # steps of a run


class InTurns:
    """Lets one request to the store through at a time, from the rank whose turn it is.

    After the given turns, one rank after the other.
    """

    def __init__(self, turns, ranks):
        self.turns = [*turns, *itertools.islice(itertools.cycle(range(ranks)), 8 * LAST)]
        self.left = set(range(ranks))  # the ranks that will still ask
        self.changed = threading.Condition()

    @contextlib.contextmanager
    def turn(self, rank):
        with self.changed:
            self.changed.wait_for(lambda: self.turns[0] == rank)
        yield
        with self.changed:
            self._go_on(1)

    def has_ended(self, rank):
        with self.changed:
            self.left.discard(rank)
            self._go_on(0)

    def _go_on(self, turns):
        del self.turns[:turns]
        while self.left and self.turns[0] not in self.left:
            del self.turns[0]
        self.changed.notify_all()


def one_rank(rank, ranks, member, in_turns):
    """A copy of the module, as a rank's own process has it: told, with its store."""
    spec = importlib.util.spec_from_file_location(f"stopping_of_{rank}", stopping.__file__)
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    for name in ("set", "add", "compare_set"):
        setattr(member, name, taking_turns(getattr(member, name), rank, in_turns))
    copy.rendezvous = SimpleNamespace(current_store=lambda: member, world_size=lambda: ranks)
    copy._told = True
    return copy


def taking_turns(request, rank, in_turns):
    def ask(*arguments):
        with in_turns.turn(rank):
            return request(*arguments)

    return ask


def steps_left_before(begun, turns):
    """The step before which each rank leaves; rank i is told when it has done `begun[i]`."""
    ranks = len(begun)
    in_turns = InTurns(turns, ranks)
    server = store.Server(socket.create_server(("127.0.0.1", 0)), KEY)
    left_before = {}

    def train(rank):
        with contextlib.closing(store.connect(*server.address, KEY, timeout=10)) as member:
            me = one_rank(rank, ranks, member, in_turns)
            try:
                for step in range(begun[rank], LAST):
                    if me.is_time_to_stop(step):
                        left_before[rank] = step
                        break
            finally:
                in_turns.has_ended(rank)

    threads = [threading.Thread(target=train, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    server.close()
    return [left_before.get(rank) for rank in range(ranks)]


@settings(max_examples=25, deadline=None)
@given(
    begun=st.lists(st.integers(0, 9), min_size=2, max_size=3),
    turns=st.lists(st.integers(0, 2), min_size=4, max_size=12),
)
def test_all_ranks_leave_before_the_same_step_that_none_had_begun(begun, turns):
    turns = [turn for turn in turns if turn < len(begun)]
    first, *others = steps_left_before(begun, turns)
    assert others == [first] * len(others)
    assert first >= max(begun)


@pytest.mark.parametrize("turns", [[0, 0, 1, 1, 1, 0], [0, 0, 1, 1, 0, 1], [0, 1, 0, 1, 1, 0]])
def test_whoever_decides_has_seen_how_far_the_others_are(turns):
    """A rank had said that it knows, and not yet where it is, when another one decided."""
    first, second = steps_left_before((8, 3), turns)
    assert first == second > 8
