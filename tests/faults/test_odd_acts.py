"""What else a training function may do first or last: one rank stays one rank."""

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
from patience import PATIENCE

import ddp_common as ddp

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def forks(end):
    pid = os.fork()
    if pid == 0:
        print("the child was here", flush=True)
        if end == "raises":
            raise ValueError("of the child")
        return "child"
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


@pytest.mark.parametrize(("end", "code"), [("returns", 0), ("raises", 1)])
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
        time.sleep(10 * PATIENCE)

    def train():
        sampler = ddp.ElasticSampler(20, 10, seed=0)
        codes = []
        for _ in sampler.epochs(1):
            for _ in sampler.batches():
                reported = multiprocessing.Event()
                child = multiprocessing.Process(target=report_and_wait, args=(reported,))
                child.start()
                reported.wait(PATIENCE)
                child.terminate()
                child.join(PATIENCE)
                codes.append(child.exitcode)
        program = "import time; print('ready', flush=True); time.sleep(600)"
        other = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
        other.stdout.readline()  # it hears SIGINT from now on
        other.send_signal(signal.SIGINT)
        return [*codes, other.wait(PATIENCE)]

    run = ddp.launch(client, train, workers=1)
    assert run.result == [-signal.SIGTERM, -signal.SIGTERM, -signal.SIGINT]
    assert run.records == []


def test_a_rank_that_is_killed_while_its_child_goes_on_printing_is_noticed(client):
    def train():
        subprocess.Popen(["yes", "still here"])
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(ddp.RankFailed, match="killed by SIGKILL"):
        ddp.launch(client, train, workers=1)


def test_a_thread_that_prints_for_ever_keeps_a_rank_for_half_a_minute_and_reaches_no_other(client):
    def print_for_ever():
        def chatter():
            while True:
                print("still here", flush=True)

        threading.Thread(target=chatter).start()
        return 7

    assert ddp.launch(client, print_for_ever, workers=2).result == 7
    assert ddp.launch(client, ddp.world_size, workers=4).result == 4


def changes_its_root(folder):
    os.chroot(folder)
    return torch.ones(2)


def test_a_rank_that_changes_its_root_returns_tensors(client, tmp_path):
    if os.geteuid() != 0:
        pytest.skip("only root may change its root")
    result = ddp.launch(
        client, changes_its_root, workers=1, folder=tmp_path, directory=False
    ).result
    assert result.sum() == 2
