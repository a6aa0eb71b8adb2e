"""One run at a time in a directory, with a real process that holds it and ends."""

import subprocess
import sys

import pytest

from ddp_common import Error
from ddp_common.run import run_lock
from ddp_common.run.run_directory import RunDirectory

HOLDER = """
import sys, time
from ddp_common.run.run_directory import RunDirectory
directory = RunDirectory(sys.argv[1])
if sys.argv[2] == "ending":
    directory.say_ending()
print("held", flush=True)
time.sleep(float(sys.argv[3]))
directory.close()
"""


def holder(folder, how, seconds):
    """A process that holds the run directory `folder` for so many seconds."""
    command = [sys.executable, "-c", HOLDER, folder, how, str(seconds)]
    process = subprocess.Popen(command, text=True, stdout=subprocess.PIPE)
    assert process.stdout.readline() == "held\n"
    return process


def test_a_second_run_in_a_directory_is_refused_until_the_first_has_died(tmp_path):
    with holder(tmp_path, "running", 600) as first:
        words = f"process {first.pid} on .*since 20.*choose another directory"
        with pytest.raises(Error, match=words) as caught:
            RunDirectory(tmp_path)
        assert str(tmp_path) in str(caught.value)
        first.kill()
        first.wait()
    second = RunDirectory(tmp_path)
    with pytest.raises(Error, match="this very process"):
        RunDirectory(tmp_path)
    second.close()
    assert not (tmp_path / run_lock.NAME).exists()


def test_a_run_that_was_told_to_end_is_waited_for(tmp_path):
    with holder(tmp_path, "ending", run_lock.GRACE + 2) as first:
        RunDirectory(tmp_path).close()
        assert first.wait() == 0
