"""`python -m tutorials …` as a process of its own, and what it leaves behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
# What is set outside, and is to reach no test
SET_OUTSIDE = {"TUTORIAL", "CLUSTER", "WORKERS", "OPTIONS", "PRESET", "SET", "RESUME", "DRY"}
SET_OUTSIDE |= {"CHECKPOINT", "RESTARTS", "DDP_PROGRESS", "DDP_CHECKPOINTS", "RANK", "WORLD_SIZE"}
SET_OUTSIDE |= {"LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}


def command(*words, runs, **variables):
    kept = {name: value for name, value in os.environ.items() if name not in SET_OUTSIDE}
    return subprocess.Popen(
        [sys.executable, "-m", "tutorials", *words],
        cwd=ROOT,
        env=kept | {"RUNS": str(runs)} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process):
    """Exit code and outputs of `process`; fails the test if anything it started outlives it."""
    out, error = process.communicate(timeout=180)
    deadline = time.monotonic() + 60
    while left := session_of(process.pid):
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.1)
    return process.returncode, out, error


def session_of(leader):
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and os.getsid(process.pid) == leader:
                found.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


def own_tutorial(folder, source):
    """`run` of a tutorial with this job."""
    (folder / "mine.py").write_text("# ---\n# jupyter:\n# ---\n\n# %%" + source)
    program = (
        "import pathlib, tutorials.kit.cli as cli; "
        f"cli.TUTORIALS = pathlib.Path({str(folder)!r}); cli.main()"
    )
    return subprocess.Popen(
        [sys.executable, "-c", program, "run", "mine"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"RUNS": str(folder / "runs"), "WORKERS": "1"},
    )


def press_ctrl_c(process, times=1):
    """As a terminal does it: the client hears it, and every worker."""
    for number in range(times):
        if number:
            time.sleep(0.1)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
