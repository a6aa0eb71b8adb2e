"""Look at the processes of a run from outside."""

import json
import threading
import time

from fault_lab import is_alive, members, rank_pids

PATIENCE = 10.0  # seconds: how long a busy machine may take for what takes a fraction of one


def wait_until(condition, within=60.0):
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
    """The run in `directory` has started `ranks` ranks, and neither they nor their children live."""
    pids = rank_pids(directory)
    assert len(pids) == ranks
    assert_gone(lambda: members(pids), within)


def assert_gone(left, within=PATIENCE):
    """`left()`, a list of process numbers, becomes empty."""
    wait_until(lambda: not left(), within)


class Background:
    """A call in a thread of its own; `outcome()` waits for it, and returns or raises what it did."""

    def __init__(self, function, *args, **kwargs):
        self._ended, self._returned, self._raised = threading.Event(), None, None
        threading.Thread(target=self._run, args=(function, args, kwargs), daemon=True).start()

    def _run(self, function, args, kwargs):
        try:
            self._returned = function(*args, **kwargs)
        except BaseException as error:  # raised again in the thread that asks
            self._raised = error
        self._ended.set()

    def is_running(self):
        return not self._ended.is_set()

    def outcome(self, within=60.0):
        assert self._ended.wait(within), f"still running after {within} s"
        if self._raised is not None:
            raise self._raised
        return self._returned
