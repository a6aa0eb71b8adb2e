"""Runs that a test starts as a person does, waits for and compares.

The tutorial `in_no_hurry` trains for 200 s, in which the cores are free, unless it is resumed:
then it hurries. So a test has the time that it needs to break the run, on any machine.
"""

import re
import subprocess
import sys
import time
from pathlib import Path

import torch
from patience import PATIENCE

from ddp_common.checkpoint_files import checkpoints, newest, step_of

ROOT = Path(__file__).parents[2]
A_RUN = 5 * PATIENCE  # seconds: jobs start, and processes import torch, more than once
LAST_STEP = 200
RUN = ("-m", "tutorials", "run")  # what `make run` starts


def wait_until(condition, within=A_RUN):
    """The condition's value, as soon as it is true."""
    deadline = time.monotonic() + within
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {within:g} s"
        time.sleep(0.1)
    return value


def train(environment, folder, tutorial, cwd, start=subprocess.Popen, **variables):
    """`make run` of a tutorial on two workers.

    `start` starts it: `subprocess.Popen`, or the same on another host.
    Its run is `folder`/run, what it prints `folder`/output. Returns the process.
    """
    places = {"CHECKPOINT": str(folder / "run"), "RUNS": str(folder / "runs")}
    with open(folder / "output", "a") as output:
        return start(
            [sys.executable, *RUN, tutorial],
            cwd=cwd,
            env={**environment, **places, "WORKERS": "2", **variables},
            stdout=output,
            stderr=output,
        )


def finish(process, folder, code=0):
    """Wait for a run's end, and for its exit code; returns what it has printed."""
    process.wait(A_RUN)
    said = (folder / "output").read_text()
    assert process.returncode == code, said
    assert "Traceback" not in said
    return said


def wait_until_saved(folder):
    """Wait until the run in `folder` has a checkpoint; returns its step."""
    directory = folder / "run" / "checkpoints"
    wait_until(lambda: checkpoints(directory))
    return last_step(folder)


def last_step(folder):
    return step_of(checkpoints(folder / "run" / "checkpoints")[-1])


def started_ranks(folder):
    """Number of a rank -> its process and host, at the last start of the run in a folder."""
    log = (folder / "run" / "log.txt").read_text()
    found = re.findall(r"rank (\d+) started: process (\d+) on (\S+)", log)
    return {int(rank): (int(pid), host) for rank, pid, host in found}


def weights(folder):
    return torch.load(newest(folder / "run" / "checkpoints"))["model"]


def same_weights(one, other):
    """Whether the runs in two folders have ended with the same weights, bit for bit."""
    one, other = weights(one), weights(other)
    return all(torch.equal(one[name], other[name]) for name in one)
