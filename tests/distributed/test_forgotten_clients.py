"""What a program has forgotten to close does not keep it from starting a cluster."""

import gc
import sys
import threading

import pytest
from distributed.utils import LoopRunner

import ddp_common as ddp


class Forgotten:
    """Like a `Client` that nobody has closed: it stops its loop when it is collected."""

    def __init__(self):
        self.itself = self  # only the collector finds it
        self.runner = LoopRunner()
        self.runner.start()

    def __del__(self):
        self.runner.stop()


@pytest.fixture
def collector_runs_in_new_loops():
    """The collector runs as soon as a thread of an event loop begins, if it runs at all."""

    def collect(frame, event, argument):
        is_loop = threading.current_thread().name.startswith("IO loop")
        if is_loop and gc.isenabled():
            sys.setprofile(None)  # of this thread
            gc.collect()

    thresholds = gc.get_threshold()
    gc.collect()
    gc.set_threshold(10**9)  # and at no other time
    threading.setprofile(collect)
    yield
    threading.setprofile(None)
    gc.set_threshold(*thresholds)
    gc.collect()


def test_a_client_that_was_never_closed_does_not_keep_the_next_cluster_from_starting(
    collector_runs_in_new_loops,
):
    Forgotten()
    with ddp.connect("local", workers=1) as client:
        assert client.ranks == 1
    assert gc.isenabled()
