"""The command line: interrupted early, a Ctrl-C that Python loses, training that diverges."""

import time

import psutil
import pytest
from children import command_line
from command_line import command, finish, own_tutorial, press_ctrl_c


@pytest.mark.parametrize("delay, times", [(0.0, 1), (0.4, 1), (1.0, 1), (0.0, 4), (0.6, 4)])
def test_ctrl_c_while_the_cluster_starts_is_heard_when_it_stands(tmp_path, delay, times):
    process = command("run", "pets", runs=tmp_path, SET="epochs=50", WORKERS="2")
    while not any("spawn_main" in " ".join(words) for words in children_of(process).values()):
        assert process.poll() is None
        time.sleep(0.01)
    time.sleep(delay)
    started = children_of(process)
    press_ctrl_c(process, times)
    code, _, error = finish(process)
    assert code == 130 and "Traceback" not in error
    has_begun = "The run begins" in error  # the cluster has stood before
    assert "\nStopped." in error if has_begun else error == "\nStopped.\n"
    assert not [each for each in started if command_line(each)]


def children_of(process):
    """Its living descendants, with the words of their commands."""
    found = psutil.Process(process.pid).children(recursive=True)
    return {each: words for each in found if (words := command_line(each))}


DIVERGES = """
import ddp_common as ddp

def train():
    for number in range(3):
        ddp.report(loss=1.0 if number < 1 else float("nan"))

client = ddp.connect()
run = ddp.launch(client, train)
raise RuntimeError("probability tensor contains nan")
"""


def test_what_fails_because_training_diverged_says_so(tmp_path):
    code, _, error = finish(own_tutorial(tmp_path, DIVERGES))
    assert code == 1 and "Training diverged: the loss is nan" in error
    assert "RuntimeError: probability tensor" in error and "Traceback" not in error


LOSES_AN_INTERRUPT = """
import os, signal, time
import ddp_common as ddp

class Collected:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)  # the exception comes here, and is lost

def train():
    for epoch in (sampler := ddp.ElasticSampler(10_000, 1)).epochs(1):
        for batch in sampler.batches():
            time.sleep(0.01)

client = ddp.connect()
Collected()
ddp.launch(client, train)
"""


@pytest.mark.parametrize("when", ["before connect", "before launch"])
def test_ctrl_c_that_python_loses_is_heard_by_what_comes_next(tmp_path, when):
    source = LOSES_AN_INTERRUPT
    if when == "before connect":
        source = source.replace(
            "client = ddp.connect()\nCollected()", "Collected()\nclient = ddp.connect()"
        )
    code, _, error = finish(own_tutorial(tmp_path, source))
    assert code == 130 and "Stopped." in error and "Exception ignored in" not in error
    assert ("The run begins" in error) == (when == "before launch")
