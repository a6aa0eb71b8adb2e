"""The lock of a run directory, with real processes that hold it, end and fork."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ddp_common import Error
from ddp_common.run import run_lock
from ddp_common.run.run_directory import RunDirectory
from ddp_common.run.run_lock import Lock

HOLDER = """
import sys, time
from ddp_common.run.run_directory import RunDirectory
directory = RunDirectory(sys.argv[1])
if "ending" in sys.argv:
    directory.say_ending()
if "fork" in sys.argv:
    import os
    if (child := os.fork()) == 0:
        time.sleep(60)
        os._exit(0)
    print("child", child, flush=True)
print("held", flush=True)
time.sleep(float(sys.argv[2]))
directory.close()
"""


@pytest.fixture
def holder(tmp_path):
    """Start a process that holds the run directory `run` for some seconds.

    Returns it and what it said first.
    """
    started = []

    def start(seconds, *options):
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, tmp_path / "run", str(seconds), *options],
            text=True,
            stdout=subprocess.PIPE,
        )
        started.append(process)
        said = []
        while not said or said[-1] != "held":
            said.append(process.stdout.readline().strip())
        return process, said

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_second_run_in_a_directory_is_refused_and_told_who_is_there(tmp_path, holder):
    process, _ = holder(60)
    with pytest.raises(
        Error, match=f"process {process.pid} on .*since 20.*choose another directory"
    ) as caught:
        RunDirectory(tmp_path / "run")
    assert str(tmp_path / "run") in str(caught.value) and "\n" not in str(caught.value)


def test_two_in_one_program_are_refused_too(tmp_path):
    first = RunDirectory(tmp_path)
    with pytest.raises(Error, match="this very process"):
        RunDirectory(tmp_path)
    first.close()
    RunDirectory(tmp_path).close()


def test_a_lock_dies_with_its_owner(tmp_path, holder):
    process, _ = holder(60)
    process.kill()
    process.wait()
    assert (tmp_path / "run" / run_lock.NAME).exists()
    RunDirectory(tmp_path / "run").close()
    assert not (tmp_path / "run" / run_lock.NAME).exists()


def test_a_child_that_the_owner_has_forked_does_not_keep_the_lock(tmp_path, holder):
    process, said = holder(60, "fork")
    child = int(said[0].split()[1])
    try:
        process.kill()
        process.wait()
        RunDirectory(tmp_path / "run").close()
        os.kill(child, 0)  # it lives
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_run_that_was_told_to_end_is_waited_for(tmp_path, holder):
    process, _ = holder(run_lock.GRACE + 2, "ending")
    RunDirectory(tmp_path / "run").close()
    assert process.wait(timeout=120) == 0


@pytest.mark.parametrize(
    "job, restart",
    [
        pytest.param({"SLURM_JOB_ID": "17"}, {"SLURM_RESTART_COUNT": "1"}, id="slurm"),
        pytest.param({"PBS_JOBID": "17.host"}, {}, id="pbs"),
    ],
)
def test_a_requeued_batch_job_waits_for_its_predecessor(
    tmp_path, holder, monkeypatch, job, restart
):
    for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "PBS_JOBID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    process, _ = holder(run_lock.GRACE + 2)
    for name, value in restart.items():
        monkeypatch.setenv(name, value)
    RunDirectory(tmp_path / "run").close()
    assert process.wait(timeout=120) == 0


def test_an_abandoned_run_directory_is_free_again(tmp_path):
    RunDirectory(tmp_path)
    RunDirectory(tmp_path).close()


@pytest.fixture
def without_flock(monkeypatch):
    """A file system that knows no locks answers so."""

    def refuse(descriptor, operation):
        raise OSError(run_lock.errno.ENOLCK, "No locks available")

    monkeypatch.setattr(run_lock.fcntl, "flock", refuse)


def left_by(folder, **changes):
    """The lock that another process has left, or holds."""
    folder.mkdir(exist_ok=True)
    with subprocess.Popen([sys.executable, "-c", "pass"]) as gone:
        pass
    record = {**run_lock._this_process(), "pid": gone.pid, **changes}
    (folder / run_lock.NAME).write_text(json.dumps(record))
    return folder


def test_without_flock_a_living_process_of_this_host_holds_and_a_dead_one_does_not(
    tmp_path, without_flock
):
    Lock(left_by(tmp_path / "dead")).release()
    with pytest.raises(Error, match=f"process {os.getppid()} on "):
        parent = run_lock.psutil.Process(os.getppid())
        Lock(left_by(tmp_path / "alive", pid=parent.pid, began=parent.create_time()))


def test_a_process_number_that_was_given_to_another_process_does_not_block(
    tmp_path, without_flock
):
    Lock(left_by(tmp_path / "run", pid=os.getppid(), began=1.0)).release()


@pytest.mark.parametrize("flock", ["without_flock", "with_flock"])
def test_another_host_that_has_been_silent_for_long_does_not_block(tmp_path, request, flock):
    if flock == "without_flock":
        request.getfixturevalue("without_flock")
    folder = left_by(tmp_path / "run", boot="another", host="n07")
    long_ago = time.time() - 2 * run_lock.SILENT
    os.utime(folder / run_lock.NAME, (long_ago, long_ago))
    Lock(folder).release()


def test_another_host_that_gives_signs_of_life_holds_the_lock(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "GRACE", 0.5)
    folder = left_by(tmp_path / "run", boot="another", host="n07")
    touching = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import os, sys, time\nwhile True: os.utime(sys.argv[1]); time.sleep(0.1)",
            folder / run_lock.NAME,
        ]
    )
    try:
        with pytest.raises(Error, match="on n07"):
            Lock(folder)
    finally:
        touching.kill()
        touching.wait()


def test_another_host_that_falls_silent_is_waited_for_and_then_passed_over(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "SILENT", 1.0)
    Lock(left_by(tmp_path / "run", boot="another", host="n07")).release()


def test_a_holder_gives_signs_of_life(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "BEAT", 0.05)
    lock = Lock(tmp_path)
    path = tmp_path / run_lock.NAME
    os.utime(path, (1, 1))
    deadline = time.monotonic() + 120
    while path.stat().st_mtime == 1:
        assert time.monotonic() < deadline, "no sign of life"
        time.sleep(0.02)
    lock.release()


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[1]", b"\xff\xfe", b'{"pid": "x"}', b"null"], ids=repr
)
@pytest.mark.parametrize("flock", ["without_flock", "with_flock"])
def test_a_lock_file_that_says_nothing_does_not_block_when_nobody_holds_it(
    tmp_path, request, flock, content
):
    if flock == "without_flock":
        request.getfixturevalue("without_flock")
    (tmp_path / run_lock.NAME).write_bytes(content)
    os.utime(tmp_path / run_lock.NAME, (1, 1))
    Lock(tmp_path).release()


def test_a_folder_that_was_removed_and_made_again_is_locked_again(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    lock = Lock(folder)
    (folder / run_lock.NAME).unlink()
    folder.rmdir()
    folder.mkdir()
    lock.renew()
    with pytest.raises(Error, match="this very process"):
        Lock(folder)
    lock.release()
    assert list(Path(folder).iterdir()) == []
