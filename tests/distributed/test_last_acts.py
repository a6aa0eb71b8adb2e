"""What a training function may do first or last, and how it may leave.

The caller knows of it, and one rank stays one rank.
"""

import io
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time

import cloudpickle
import pytest
import torch
from processes import log_of

import ddp_common as ddp
from ddp_common.ranks import process

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
    time.sleep(600)


@pytest.mark.parametrize(
    ("kind", "words", "code", "said"),
    [
        (KeyboardInterrupt, (), 1, "failed: KeyboardInterrupt"),
        (GeneratorExit, ("closed",), 1, "failed: GeneratorExit: closed"),
        (SystemExit, (), 0, "left with exit code 0 before its function returned: SystemExit"),
        (SystemExit, (0,), 0, "left with exit code 0 before its function returned: SystemExit: 0"),
        (SystemExit, (4,), 4, "left with exit code 4 before its function returned: SystemExit: 4"),
        (
            SystemExit,
            ("no data",),
            1,
            "left with exit code 1 before its function returned: SystemExit: no data",
        ),
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
    log = (caught.value.directory / "log.txt").read_text()
    assert "\n    raise kind(*words)\n" in log  # as lines, not as a string in a dict


@pytest.mark.parametrize(
    "make", [Unpicklable, lambda: ValueError("x" * 2**21)], ids=["a_lock", "two_megabytes"]
)
def test_an_exception_that_cannot_travel_is_told_in_words(client, make):
    def train():
        raise make()

    with pytest.raises(ddp.RankFailed) as caught:
        ddp.launch(client, train, workers=1)
    assert caught.value.__cause__ is None
    assert "raise make()" in caught.value.traceback


def test_an_interrupt_sent_to_a_rank_is_a_keyboard_interrupt_there(client):
    def train():
        if ddp.rank() == 1:
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(600)

    with pytest.raises(ddp.RankFailed, match="^Rank 1 of 2 on .* failed: KeyboardInterrupt"):
        ddp.launch(client, train, workers=2)


def test_the_words_of_an_exception_are_cut_in_their_middle(client):
    def train():
        raise ValueError("begin" + "x" * 20_000_000 + "end")

    with pytest.raises(ddp.RankFailed) as caught:
        ddp.launch(client, train, workers=1)
    assert "ValueError: begin" in str(caught.value) and "characters left out" in str(caught.value)
    assert caught.value.traceback.rstrip().endswith("end")
    assert len(str(caught.value)) < 2 * (process.LONGEST_MESSAGE + process.LONGEST_TRACEBACK)


def test_short_texts_are_not_cut():
    assert process.shortened("12345678", 8) == "12345678"
    assert process.shortened("123456789", 8) == "1234\n… [1 characters left out] …\n6789"


def test_all_ranks_may_return_early(client):
    def train():
        sampler = ddp.ElasticSampler(100, 10, seed=0)
        for _ in sampler.epochs(3):
            for _ in sampler:
                if sampler.steps_done == 4:
                    return sampler.steps_done

    assert ddp.launch(client, train, workers=2).result == 4


def forks(end):
    pid = os.fork()
    if pid == 0:
        print("the child was here", flush=True)
        if end == "raises":
            raise ValueError("of the child")
        if end == "exits":
            sys.exit(5)
        return "child"
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


@pytest.mark.parametrize(("end", "code"), [("returns", 0), ("raises", 1), ("exits", 5)])
def test_a_forked_child_that_comes_back_is_not_the_rank(client, end, code):
    run = ddp.launch(client, forks, workers=2, end=end)
    assert run.result == code
    log = (run.directory / "log.txt").read_text()
    assert "[rank 0] the child was here" in log and "[rank 1] the child was here" in log
    assert ("ValueError: of the child" in log) == (end == "raises")


def test_what_a_rank_has_forked_can_be_terminated_and_reports_nothing(client):
    def report_and_wait(reported):
        ddp.report(loss=1.0)
        reported.set()
        time.sleep(600)

    def train():
        sampler = ddp.ElasticSampler(20, 10, seed=0)
        codes = []
        for _ in sampler:
            reported = multiprocessing.Event()
            child = multiprocessing.Process(target=report_and_wait, args=(reported,))
            child.start()
            reported.wait(60)
            child.terminate()
            child.join(60)
            codes.append(child.exitcode)
        program = "import time; print('ready', flush=True); time.sleep(600)"
        other = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
        other.stdout.readline()  # it hears SIGINT from now on
        other.send_signal(signal.SIGINT)
        return [*codes, other.wait(60)]

    run = ddp.launch(client, train, workers=1)
    assert run.result == [-signal.SIGTERM, -signal.SIGTERM, -signal.SIGINT]
    assert run.records == []


def close_output():
    for stream in (0, 1, 2):
        os.close(stream)
    return 7


def close_everything_at_exit():
    import atexit

    atexit.register(os.closerange, 0, 1000)
    return 7


def print_for_ever():
    def chatter():
        while True:
            print("still here", flush=True)

    threading.Thread(target=chatter).start()
    return 7


def leave_a_child_that_prints_for_ever():
    subprocess.Popen(["yes", "still here"])
    time.sleep(0.2)
    return 7


def change_everything():
    os.umask(0o777)
    os.chdir("/")
    os.environ.clear()
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.setrecursionlimit(200)
    sys.stdout = io.StringIO()
    return 7


def own_session():
    if os.getpgid(0) != os.getpid():
        os.setpgid(0, 0)
    torch.set_num_threads(1)
    sys.excepthook = None
    return 7


@pytest.mark.parametrize(
    "act",
    [
        close_output,
        close_everything_at_exit,
        print_for_ever,
        leave_a_child_that_prints_for_ever,
        change_everything,
        own_session,
    ],
    ids=lambda act: act.__name__,
)
def test_a_training_function_that(client, act):
    assert ddp.launch(client, act, workers=2).result == 7
    # nothing of it reaches the next one
    assert ddp.launch(client, ddp.world_size, workers=4).result == 4


def test_a_rank_that_is_killed_while_its_child_goes_on_printing_is_noticed(client):
    def train():
        subprocess.Popen(["yes", "still here"])
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(ddp.RankFailed, match="killed by SIGKILL"):
        ddp.launch(client, train, workers=1)


def test_a_rank_that_closes_its_pipes_is_a_failure_that_says_so(client):
    """Python finds out first, or a thread of gloo's does, which ends the process by a signal."""

    def train():
        os.closerange(3, 1000)
        return 7

    with pytest.raises(ddp.RankFailed) as caught:
        ddp.launch(client, train, workers=1)
    failed, headline = caught.value, str(caught.value).splitlines()[0]
    # The message has its last lines: which, if two threads wrote theirs at once, is chance.
    written = log_of(failed.directory)
    assert failed.rank == 0 and headline.startswith(f"Rank 0 of 1 on {failed.host} failed: ")
    if failed.signal is None:
        assert failed.exitcode == 1 and "it left with exit code 1" in headline
        assert "Bad file descriptor" in written  # with the traceback
    else:
        assert failed.signal in ("SIGABRT", "SIGSEGV") and f"killed by {failed.signal}" in headline
        assert "Fatal Python error" in written  # with where it was
