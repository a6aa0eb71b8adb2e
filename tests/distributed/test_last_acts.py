"""What a training function may do first or last, and how it may leave.

The caller knows of it, and one rank stays one rank.
"""

import io
import os
import signal
import subprocess
import sys
import threading
import time

import cloudpickle
import pytest
import torch
from patience import PATIENCE
from processes import log_of

import ddp_common as ddp

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class EarlyStop(Exception):
    """Of the program that launches; no worker can import it."""


class Unpicklable(Exception):
    def __init__(self):
        super().__init__("it holds a lock")
        self.lock = threading.Lock()


def leave_with(kind, words):
    if ddp.rank() == 1:
        raise kind(*words)
    time.sleep(10 * PATIENCE)


@pytest.mark.parametrize(
    ("kind", "words", "code", "said"),
    [
        (KeyboardInterrupt, (), 1, "failed: KeyboardInterrupt"),
        (SystemExit, ("no data",), 1, "left with exit code 1 before it had finished"),
        (EarlyStop, ("plateau",), 1, "EarlyStop: plateau"),
    ],
)
def test_an_exception_of_any_kind_reaches_the_caller(client, kind, words, code, said):
    with pytest.raises(ddp.RankFailed) as caught:
        ddp.launch(client, leave_with, workers=2, kind=kind, words=words)
    assert said in str(caught.value).splitlines()[0]
    assert (caught.value.rank, caught.value.exitcode) == (1, code)
    assert "raise kind(*words)" in caught.value.traceback
    assert "in leave_with" in caught.value.traceback
    assert type(caught.value.__cause__) is kind and caught.value.__cause__.args == words
    assert "raise kind(*words)" in log_of(caught.value.directory)


def test_an_exception_that_cannot_travel_is_told_in_words(client):
    def train():
        raise Unpicklable()

    with pytest.raises(ddp.RankFailed) as caught:
        ddp.launch(client, train, workers=1)
    assert caught.value.__cause__ is None
    assert "raise Unpicklable()" in caught.value.traceback


def close_output():
    for stream in (0, 1, 2):
        os.close(stream)
    return 7


def change_everything():
    os.umask(0o777)
    os.chdir("/")
    os.environ.clear()
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.setrecursionlimit(200)
    sys.stdout, sys.stderr = io.StringIO(), None
    return 7


def leave_a_child_that_prints_for_ever():
    subprocess.Popen(["yes", "still here"])
    return 7


def own_session():
    if os.getpgid(0) != os.getpid():
        os.setpgid(0, 0)
    torch.set_num_threads(1)
    sys.excepthook = None
    return 7


ACTS = [close_output, change_everything, leave_a_child_that_prints_for_ever, own_session]


@pytest.mark.parametrize("act", ACTS, ids=lambda act: act.__name__)
def test_what_a_training_function_does_last_reaches_no_other_launch(client, act):
    assert ddp.launch(client, act, workers=2).result == 7
    # nothing of it reaches the next one
    assert ddp.launch(client, ddp.world_size, workers=4).result == 4
