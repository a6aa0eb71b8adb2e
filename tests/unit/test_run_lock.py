"""One run at a time in a directory, with a real process that holds it and is killed."""

import contextlib
import os
import signal
import subprocess
import sys

import pytest

from dask_ranks.run import run_directory
from dask_ranks.run.run_directory import RunDirectory
from ddp_common import Error

HOLDER = """
import os, sys, time
from dask_ranks.run.run_directory import RunDirectory
directory = RunDirectory(sys.argv[1])
if os.fork() == 0:
    time.sleep(600)
print("held", flush=True)
time.sleep(float(sys.argv[2]))
directory.close()
"""


@contextlib.contextmanager
def holder(folder, seconds):
    """A process that holds the run directory `folder` for so long; a child of it lives on."""
    command = [sys.executable, "-c", HOLDER, folder, str(seconds)]
    process = subprocess.Popen(command, text=True, stdout=subprocess.PIPE, process_group=0)
    try:
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_a_second_run_in_a_directory_is_refused_until_the_first_has_died(tmp_path):
    with holder(tmp_path, 600) as first:
        words = f"(?s)process {first.pid} on .*is writing in {tmp_path}.*choose another directory"
        with pytest.raises(Error, match=words):
            RunDirectory(tmp_path)
        first.kill()
        first.wait()
        second = RunDirectory(tmp_path)
    with pytest.raises(Error, match=f"process {os.getpid()} on"):
        RunDirectory(tmp_path)
    second.close()


def test_a_batch_job_waits_for_the_one_before_it_and_says_so(tmp_path, monkeypatch, capsys):
    with holder(tmp_path, run_directory.WAIT + 2) as first:
        monkeypatch.setenv("SLURM_JOB_ID", "1")
        RunDirectory(tmp_path).close()
        assert first.wait() == 0
    assert f"Another run is writing in {tmp_path}: waiting 60 s" in capsys.readouterr().err
