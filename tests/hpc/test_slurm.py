"""Without Dask on a real Slurm: sbatch, srun, scancel; files and weights are as everywhere."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from children import command_line
from slurm_here import why_not
from strangers import ATTACK, IMPORTS, as_nobody, ports_of

from ddp_common.ranks.checkpoint_files import checkpoints, newest, step_of

ROOT = Path(__file__).parents[2]
PATIENCE = 180  # seconds for a job on a busy machine

pytestmark = pytest.mark.skipif(why_not() is not None, reason=f"no Slurm here: {why_not()}")


def submit(slurm, folder, *options, cwd=ROOT, **variables):
    """Submit the repository's batch script; returns the job's number. The log is in `folder`."""
    done = subprocess.run(
        [
            "sbatch",
            "--parsable",
            f"--output={folder}/%j.log",
            *options,
            "clusters/batch/mnist.sbatch",
        ],
        cwd=cwd,
        env={**slurm, **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout)


@pytest.fixture
def submit_in_no_hurry(slurm, repository, tmp_path):
    """Submit a training that takes 200 s, unless it is resumed before: then it hurries.

    Meanwhile the cores are free. Its job's log is in `tmp_path`.
    """

    def submit_it(run, pause=1):
        chosen = {"TUTORIAL": "in_no_hurry", "SET": f"pause={pause}", "CHECKPOINT": str(run)}
        return submit(slurm, tmp_path, cwd=repository, **chosen)

    return submit_it


def state(slurm, job):
    said = subprocess.run(
        ["scontrol", "show", "job", str(job)], env=slurm, capture_output=True, text=True
    ).stdout
    return re.search(r"JobState=(\w+)", said)[1]


def finish(slurm, job):
    wait_until(
        lambda: state(slurm, job) not in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING")
    )
    return state(slurm, job)


def wait_until(condition, within=PATIENCE):
    deadline = time.monotonic() + within
    while not (value := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return value


def weights(directory):
    return torch.load(newest(directory / "checkpoints"))["model"]


def equal(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def undisturbed(slurm, tmp_path_factory):
    """The run directory of a job that nothing happened to."""
    folder = tmp_path_factory.mktemp("undisturbed")
    job = submit(slurm, folder, CHECKPOINT=str(folder / "run"))
    assert finish(slurm, job) == "COMPLETED", (folder / f"{job}.log").read_text()
    assert "Done in" in (folder / f"{job}.log").read_text()
    return folder / "run"


@pytest.fixture(scope="module")
def undisturbed_in_a_hurry(slurm, repository, tmp_path_factory):
    """The same of the run that has time, without its pauses; srun starts its ranks, too."""
    folder = tmp_path_factory.mktemp("in-a-hurry")
    chosen = {"TUTORIAL": "in_no_hurry", "SET": "", "CHECKPOINT": str(folder / "run")}
    job = submit(slurm, folder, cwd=repository, **chosen)
    assert finish(slurm, job) == "COMPLETED", (folder / f"{job}.log").read_text()
    return folder / "run"


def test_sbatch_trains_on_two_tasks_and_leaves_what_every_run_leaves(undisturbed):
    names = {path.name for path in undisturbed.iterdir()}
    of_every_run = {"config.json", "metrics.jsonl", "log.txt", "checkpoints"}
    assert of_every_run | {"loss.png", "names.txt"} <= names
    assert '"rank": 1' in (undisturbed / "metrics.jsonl").read_text()
    assert step_of(checkpoints(undisturbed / "checkpoints")[-1]) == 68


def test_only_rank_0_is_heard(slurm, undisturbed):
    log = next(undisturbed.parent.glob("*.log")).read_text()
    assert log.count("Invented:") == 1


def test_scancel_and_sbatch_again_ends_with_the_weights_of_an_undisturbed_run(
    slurm, submit_in_no_hurry, undisturbed_in_a_hurry, tmp_path
):
    run = tmp_path / "run"
    first = submit_in_no_hurry(run)
    wait_until(lambda: checkpoints(run / "checkpoints"))
    subprocess.run(["scancel", str(first)], env=slurm, check=True)
    assert finish(slurm, first) == "CANCELLED"
    saved = step_of(checkpoints(run / "checkpoints")[-1])
    assert saved < 200
    second = submit_in_no_hurry(run)
    assert finish(slurm, second) == "COMPLETED", (tmp_path / f"{second}.log").read_text()
    assert f"Resumed from step-{saved:08d}." in (tmp_path / f"{second}.log").read_text()
    assert equal(weights(run), weights(undisturbed_in_a_hurry))


def test_a_killed_task_ends_the_job_within_seconds_and_the_log_names_it(
    slurm, submit_in_no_hurry, tmp_path
):
    run = tmp_path / "run"
    job = submit_in_no_hurry(run)
    wait_until(lambda: checkpoints(run / "checkpoints"))
    steps = subprocess.run(
        ["scontrol", "listpids", str(job)], env=slurm, capture_output=True, text=True
    ).stdout
    rows = [line.split() for line in steps.splitlines()]
    rank_1 = next(int(row[0]) for row in rows if row[2:5] == ["0", "1", "1"])
    os.kill(rank_1, signal.SIGKILL)
    began = time.monotonic()
    assert finish(slurm, job) == "FAILED"
    assert time.monotonic() - began < 90
    assert re.search(r"task 1: Killed", (tmp_path / f"{job}.log").read_text())


def test_the_warning_before_the_time_limit_lets_all_ranks_save_and_leave(
    slurm, submit_in_no_hurry, tmp_path
):
    """The signal that `#SBATCH --signal=TERM@60` has Slurm send to the tasks.

    Here it is sent as soon as training has begun.
    """
    run = tmp_path / "run"
    job = submit_in_no_hurry(run)
    wait_until(lambda: checkpoints(run / "checkpoints"))
    subprocess.run(["scancel", "--signal=TERM", str(job)], env=slurm, check=True)
    assert finish(slurm, job) == "FAILED"  # exit code 143: there is more to do
    log = (tmp_path / f"{job}.log").read_text()
    step = re.search(
        r"told to stop \(SIGTERM\). They left after step (\d+); the newest checkpoint is", log
    )
    assert step and step_of(checkpoints(run / "checkpoints")[-1]) == int(step[1]), log


def test_so_do_ranks_with_loader_workers_which_get_the_signal_too(slurm, tmp_path):
    """As torch's workers, they would die of it, and the ranks with them."""
    run = tmp_path / "run"
    script = ROOT / "tests" / "trains_with_loader_workers.py"
    done = subprocess.run(
        ["sbatch", "--parsable", f"--output={tmp_path}/%j.log", "--ntasks=2", "--overcommit"]
        + ["--wrap", f"srun --kill-on-bad-exit=1 --overcommit {sys.executable} {script}"],
        cwd=ROOT,
        env={**slurm, "RUN_DIRECTORY": str(run)},
        capture_output=True,
        text=True,
        check=True,
    )
    job = int(done.stdout)
    wait_until(lambda: checkpoints(run / "checkpoints") or state(slurm, job) == "FAILED")
    subprocess.run(["scancel", "--signal=TERM", str(job)], env=slurm, check=True)
    assert finish(slurm, job) == "FAILED"
    log = (tmp_path / f"{job}.log").read_text()
    step = re.search(r"told to stop \(SIGTERM\). They left after step (\d+)", log)
    assert step and step_of(checkpoints(run / "checkpoints")[-1]) == int(step[1]), log
    assert "DataLoader worker" not in log


def test_make_run_starts_srun_itself(slurm, undisturbed, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "ddp_common", "run", "pets", "--cluster", "srun", "--workers", "2"],
        cwd=ROOT,
        env={**slurm, "CHECKPOINT": str(tmp_path / "run")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert equal(weights(tmp_path / "run"), weights(undisturbed))


def test_ctrl_c_on_make_run_cancels_the_step_after_the_ranks_have_saved(
    slurm, repository, tmp_path
):
    words = "-m ddp_common run in_no_hurry --cluster srun --workers 2"
    process = subprocess.Popen(
        [sys.executable, *words.split()],
        cwd=repository,
        text=True,
        env={**slurm, "CHECKPOINT": str(tmp_path / "run"), "SET": "pause=1"},
        stderr=subprocess.PIPE,
    )
    wait_until(lambda: checkpoints(tmp_path / "run" / "checkpoints"))
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=120)
    assert process.returncode != 0 and "make run TUTORIAL=in_no_hurry RESUME=" in error

    def no_step_is_left():
        done = subprocess.run(["squeue", "-h"], env=slurm, capture_output=True, text=True)
        return not done.stdout.strip()

    wait_until(no_step_is_left)


def test_one_task_does_not_start_srun_within_srun(slurm, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "ddp_common", "run", "pets", "--cluster", "srun", "--workers", "1"],
        cwd=ROOT,
        timeout=PATIENCE,
        env={**slurm, "CHECKPOINT": str(tmp_path / "run")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_two_jobs_on_one_node_do_not_meet(
    slurm, submit_in_no_hurry, undisturbed_in_a_hurry, tmp_path
):
    """They train for 4 s at least, so that they do so at once."""
    jobs = [submit_in_no_hurry(tmp_path / name, pause=0.02) for name in ("one", "two")]
    assert [finish(slurm, job) for job in jobs] == ["COMPLETED"] * 2
    for name in ("one", "two"):
        assert equal(weights(tmp_path / name), weights(undisturbed_in_a_hurry))


def ranks_of(job):
    """The processes that srun has started for a job."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            variables = process.environ()
            if variables.get("SLURM_JOB_ID") == str(job) and "SLURM_PROCID" in variables:
                found.append(process.pid)
    return found


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_another_user_stops_no_job_of_srun_and_has_nothing_run_in_it(
    slurm, submit_in_no_hurry, tmp_path
):
    run, marker = tmp_path / "run", Path("/tmp") / f"ddp-stranger-srun-{os.getpid()}"
    job = submit_in_no_hurry(run)
    try:
        wait_until(lambda: list((run / "checkpoints").glob("*.pt")))
        ranks = ranks_of(job)
        command_lines = " ".join(" ".join(command_line(psutil.Process(pid))) for pid in ranks)
        assert not re.search(r"[0-9a-f]{64}", command_lines)
        ports = ports_of(ranks)
        said = as_nobody(ATTACK, marker, *ports, imports=IMPORTS)
        assert ports and said.count("\n") == len(ports), said
        answers = [bytes.fromhex(word) for line in said.splitlines() for word in line.split()[2:]]
        # Our store's own random number and its proof; nothing from gloo
        assert max(map(len, answers), default=0) <= 64
        metrics = run / "metrics.jsonl"
        steps = len(metrics.read_text().splitlines())
        wait_until(lambda: len(metrics.read_text().splitlines()) > steps + 20)
        assert state(slurm, job) == "RUNNING" and not marker.exists()
    finally:
        subprocess.run(["scancel", str(job)], env=slurm, check=True)
        finish(slurm, job)


def test_torchrun_and_dask_end_with_the_same_weights_as_srun(slurm, undisturbed, tmp_path):
    for cluster in ("torchrun", "local"):
        words = f"-m ddp_common run pets --cluster {cluster} --workers 2"
        done = subprocess.run(
            [sys.executable, *words.split()],
            cwd=ROOT,
            env={**slurm, "CHECKPOINT": str(tmp_path / cluster)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        assert equal(weights(tmp_path / cluster), weights(undisturbed)), cluster
