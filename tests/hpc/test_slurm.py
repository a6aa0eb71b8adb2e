"""The main path on a real Slurm: submit, train, cancel, go on; with Dask in jobs, and without.

`.ci/run` runs this file each time; the other files of this folder are for `make test-all`.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import runs_here
from hosts_here import NAMESPACES
from runs_here import (
    A_RUN,
    LAST_STEP,
    ROOT,
    finish,
    last_step,
    same_weights,
    wait_until,
    wait_until_saved,
)
from slurm_here import HOSTS, jobs, running_jobs, said_by, state, submit, train, why_not

pytestmark = pytest.mark.skipif(why_not() is not None, reason=f"no Slurm here: {why_not()}")


@pytest.fixture(scope="module")
def undisturbed(slurm, repository, tmp_path_factory):
    """The folder of a run without Dask, `make run CLUSTER=srun`, to which nothing happened."""
    folder = tmp_path_factory.mktemp("undisturbed")
    finish(train(slurm, folder, "in_no_hurry", repository, CLUSTER="srun"), folder)
    return folder


def test_srun_trains_two_ranks_without_dask_and_leaves_what_every_run_leaves(undisturbed):
    run = undisturbed / "run"
    assert {"config.json", "metrics.jsonl", "log.txt"} <= {path.name for path in run.iterdir()}
    assert '"rank": 1' in (run / "metrics.jsonl").read_text()
    assert last_step(undisturbed) == LAST_STEP
    assert (undisturbed / "output").read_text().count("Trained in no hurry.") == 1  # by rank 0


def test_in_a_shell_that_srun_has_started_ranks_share_its_cores(slurm, tmp_path):
    """As in `srun --cpus-per-task=2 --pty bash`: a step like others would wait for its end."""

    def in_a_step(command, **options):
        return slurm.login.start(["srun", "--cpus-per-task=2", *command], **options)

    small = {"CLUSTER": "srun", "SET": "epochs=1 hidden=16 batch_size=8"}
    process = runs_here.train(slurm.environment, tmp_path, "pets", ROOT, in_a_step, **small)
    assert "Done in" in finish(process, tmp_path)


def test_pets_is_trained_in_two_jobs_which_leave_nothing_but_their_logs(slurm, tmp_path):
    small = "epochs=1 hidden=16 batch_size=8"
    folder = tmp_path / "with a space"
    folder.mkdir()
    process = train(slurm, folder, "pets", ROOT, CLUSTER="slurm", SET=small)
    assert "Done in" in finish(process, folder)
    (cluster,) = (folder / "runs" / "clusters").iterdir()
    assert cluster.stat().st_mode & 0o777 == 0o700
    assert len([path for path in cluster.iterdir() if path.stat().st_size]) == 2
    assert not (cluster / "credentials").exists()
    assert "Failed to remove" not in "".join(path.read_text() for path in cluster.iterdir())
    wait_until(lambda: not jobs(slurm))


def test_a_job_that_is_cancelled_in_mid_run_is_replaced_and_the_weights_are_the_same(
    slurm, repository, undisturbed, tmp_path
):
    again = {"CLUSTER": "slurm", "RESTARTS": "2", "SET": "pause=1"}
    process = train(slurm, tmp_path, "in_no_hurry", repository, **again)
    wait_until_saved(tmp_path)
    said_by(slurm, "scancel", min(running_jobs(slurm)))
    said = finish(process, tmp_path)
    assert re.search(r"Restart 1 on 2 rank\(s\) from step [1-9]", said), said
    assert same_weights(tmp_path, undisturbed)


def test_ctrl_c_cancels_the_jobs_and_resume_goes_on_in_new_ones(
    slurm, repository, undisturbed, tmp_path
):
    process = train(slurm, tmp_path, "in_no_hurry", repository, CLUSTER="slurm", SET="pause=1")
    wait_until_saved(tmp_path)
    process.send_signal(signal.SIGINT)
    said = finish(process, tmp_path, code=130)
    assert f"make run TUTORIAL=in_no_hurry RESUME={tmp_path / 'run'}" in said
    wait_until(lambda: not jobs(slurm))
    saved = last_step(tmp_path)
    assert saved < LAST_STEP
    resumed = {"CHECKPOINT": "", "RESUME": str(tmp_path / "run"), "CLUSTER": "slurm"}
    said = finish(train(slurm, tmp_path, "in_no_hurry", repository, **resumed), tmp_path)
    assert f"it goes on from step {saved}" in said
    assert same_weights(tmp_path, undisturbed)


def test_the_warning_before_the_time_limit_lets_ranks_save_and_sbatch_again_goes_on(
    slurm, repository, undisturbed, tmp_path
):
    """The signal of `#SBATCH --signal=TERM@60`, sent as soon as training has begun."""
    script = "clusters/batch/mnist.sbatch"
    chosen = {"TUTORIAL": "in_no_hurry", "SET": "pause=1", "CHECKPOINT": str(tmp_path / "run")}
    first = submit(slurm, tmp_path, script, repository, **chosen)
    wait_until_saved(tmp_path)
    said_by(slurm, "scancel", "--signal=TERM", first)
    wait_until(lambda: state(slurm, first) == "FAILED")  # exit code 143: there is more to do
    log = (tmp_path / f"{first}.log").read_text()
    left = re.search(r"told to stop \(SIGTERM\). They left after step (\d+)", log)
    assert left and last_step(tmp_path) == int(left[1]), log
    assert "The batch script, submitted again, goes on from the newest checkpoint." in log
    second = submit(slurm, tmp_path, script, repository, **chosen)
    wait_until(lambda: second not in jobs(slurm))
    log = (tmp_path / f"{second}.log").read_text()
    assert state(slurm, second) == "COMPLETED", log
    assert re.search(rf"Resumed from step-0*{left[1]}\b", log), log
    assert same_weights(tmp_path, undisturbed)


# Of a database, or of a file where none is installed
SACCT = (
    "(sacct --noheader --allocations --format=state || sacct -c --noheader) | grep -o COMPLETED"
)


def test_the_lab_runs_a_command_on_its_login_host_and_leaves_nothing(tmp_path):
    sbatch = "sbatch --wait --output=/dev/null --nodes=4 --wrap 'srun hostname > names'"
    lab = [sys.executable, ROOT / "tests/hpc/slurm_lab.py"]
    command = f"hostname; cd '{tmp_path}'; {sbatch}; {SACCT}; exit 3"
    namespaces = set(NAMESPACES.iterdir())
    done = subprocess.run(
        lab, env={**os.environ, "COMMAND": command}, capture_output=True, text=True
    )
    assert done.returncode == 3, done.stderr
    assert done.stdout.split() == ["login", *"Submitted batch job 1 COMPLETED".split()]
    assert sorted((tmp_path / "names").read_text().split()) == list(HOSTS[1:])
    assert set(NAMESPACES.iterdir()) <= namespaces


def test_a_lab_whose_terminal_is_closed_leaves_nothing(tmp_path):
    command = f"sbatch --output=/dev/null --wrap 'sleep 1000'; touch '{tmp_path}/here'; sleep 1000"
    namespaces = set(NAMESPACES.iterdir())
    folders = set(Path(tempfile.gettempdir()).glob("slurm-lab-*"))
    lab = subprocess.Popen(
        [sys.executable, ROOT / "tests/hpc/slurm_lab.py"],
        env={**os.environ, "COMMAND": command},
        start_new_session=True,
    )
    wait_until((tmp_path / "here").exists)
    os.killpg(lab.pid, signal.SIGHUP)
    assert lab.wait(A_RUN) == 128 + signal.SIGHUP
    assert set(NAMESPACES.iterdir()) <= namespaces
    assert set(Path(tempfile.gettempdir()).glob("slurm-lab-*")) <= folders
