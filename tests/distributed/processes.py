"""Look at the processes of a run from outside."""

import os
import re
import time

import psutil

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


def rank_pids(directory):
    """The process numbers of all ranks that a run has started, in all its attempts."""
    return [int(number) for number in re.findall(r"rank \d+ started: process (\d+) on", log_of(directory))]


def members(pids):
    """Living processes of the sessions that `pids` lead: each rank leads one, its children are in it."""
    return [process.pid for process in psutil.process_iter() if is_alive(process.pid) and session_of(process.pid) in set(pids)]


def session_of(pid):
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


def is_alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def assert_nothing_left(directory, ranks, within=PATIENCE):
    """The run in `directory` has started `ranks` ranks, and neither they nor their children live."""
    pids = rank_pids(directory)
    assert len(pids) == ranks
    assert_gone(lambda: members(pids), within)


def assert_gone(left, within=PATIENCE):
    """`left()`, a list of process numbers, becomes empty."""
    wait_until(lambda: not left(), within)
