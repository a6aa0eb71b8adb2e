"""Look at the processes of a run from outside, and hold a run back until a test has looked."""

import contextlib
import functools
import json
import sys
import threading
import time

import cloudpickle
from fault_lab import is_alive, members, rank_pids  # noqa: F401 (tests import it from here)

from ddp_common.teaching import faults

PATIENCE = 60.0  # seconds that a busy machine, which may stall for 10 s, gets for what takes one


def wait_until(condition, within=120.0):
    """The first true value of `condition()`. Raises if there is none in time."""
    deadline = time.monotonic() + within
    while not (value := condition()):
        assert time.monotonic() < deadline, f"nothing came of {condition} within {within} s"
        time.sleep(0.02)
    return value


def log_of(directory):
    path = directory / "log.txt"
    return path.read_text() if path.exists() else ""


def workers_of(directory):
    """The addresses of the workers of a run, in rank order."""
    return json.loads((directory / "config.json").read_text())["workers"]


def assert_nothing_left(directory, ranks, within=PATIENCE):
    """The run in `directory` has started `ranks` ranks; neither they nor their children live."""
    pids = rank_pids(directory)
    assert len(pids) == ranks
    assert_gone(lambda: members(pids), within)


def assert_gone(left, within=PATIENCE):
    """`left()`, a list of process numbers, becomes empty."""
    wait_until(lambda: not left(), within)


class Background:
    """A call in a thread of its own; `outcome()` waits for it and returns or raises as it did."""

    def __init__(self, function, *args, **kwargs):
        self._ended = threading.Event()
        self._returned = None
        self._raised = None
        threading.Thread(target=self._run, args=(function, args, kwargs), daemon=True).start()

    def _run(self, function, args, kwargs):
        try:
            self._returned = function(*args, **kwargs)
        except BaseException as error:  # raised again in the thread that asks
            self._raised = error
        self._ended.set()

    def is_running(self):
        return not self._ended.is_set()

    def outcome(self, within=180.0):
        """What the call returned; raises what it raised. The default is below pytest's 300 s."""
        assert self._ended.wait(within), f"still running after {within} s"
        if self._raised is not None:
            raise self._raised
        return self._returned


@contextlib.contextmanager
def held_back(function, gate, *, rank=1, step=8):
    """Yields `function` with a wait in it: `rank` stops after `step` steps, and so do all others.

    They go on when the block is left: within it the run is still going on, however slow the
    machine. `gate` is the path of a file that does not exist yet; the ranks look for it.
    """
    try:
        yield faults.inject(function, functools.partial(_wait_for, gate), rank=rank, step=step)
    finally:
        gate.touch()


def _wait_for(gate):
    while not gate.exists():
        time.sleep(0.02)


cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import it
