"""What would be submitted: DRY=1 for every profile, on a machine without a batch system."""

import json
import os
import shlex
import signal
import subprocess
import sys

import pytest
from processes import finished

from dask_ranks.clusters.connect import describe
from dask_ranks.clusters.profiles import PROFILES
from ddp_common import Error, connect

PBS_PRO = """# 2 job(s) such as this one, for 2 rank(s): each starts Dask workers.
# Your program stays where you start it, and submits the jobs. TIME and
# SCHEDULER:PORT are known then. The `export` lines are ours: nothing to change.
# Next: make doctor, with the same CLUSTER and OPTIONS
#!/usr/bin/env bash

#PBS -N dask-worker
#PBS -l select=1:ncpus=8:ngpus=1:mem=32gb
#PBS -l walltime=01:00:00
#PBS -e runs/clusters/TIME/
#PBS -o runs/clusters/TIME/
#PBS -r n
exec >> "runs/clusters/TIME/worker-$PBS_JOBID.log" 2>&1
export PYTHONPATH='/a clone'
export DDP_JOB_END=$(($(date +%s) + 3600))  # seconds since 1970
export DDP_JOB_WARNING=60  # seconds before, ranks save and leave
export DASK_DISTRIBUTED__WORKER__DAEMON=False
export DASK_DISTRIBUTED__WORKER__HTTP__ROUTES=[]
export DASK_DISTRIBUTED__COMM__TIMEOUTS__TCP=11s
export DASK_DISTRIBUTED__WORKER__PRELOAD='["import contextlib\\nwith \
contextlib.suppress(ImportError): from dask_ranks.worker.rank_host import HOST; HOST.prepare()"]'
trap : TERM  # it is for the worker, for whose end this shell waits
export DDP_SCRATCH=$(mktemp -d)  # a folder that only you can read
export DASK_TEMPORARY_DIRECTORY=$DDP_SCRATCH
eval "set -- $(trap -p EXIT)"  # $3: what the lines above have at the end
trap 'ddp_code=$?; set +e; rm -rf "$DDP_SCRATCH"; (exit $ddp_code); '"${3-}" EXIT
PYTHON -m dask_cuda.cli tls://SCHEDULER:PORT --name worker-0 --nthreads 8 \
--memory-limit 32.00GiB --death-timeout 60 \
--dashboard-address 127.0.0.1:0 --no-dashboard --protocol tls:// \
--tls-ca-file runs/clusters/TIME/credentials/tls_ca_file \
--tls-cert runs/clusters/TIME/credentials/tls_worker_cert \
--tls-key runs/clusters/TIME/credentials/tls_worker_key
"""


@pytest.mark.parametrize("name", sorted(path.stem for path in PROFILES.glob("*.yaml")))
def test_every_profile_can_be_printed_on_any_machine(name):
    text = describe(name)
    assert "python" in text or "Cluster(" in text
    if "#!" in text:
        subprocess.run(["bash", "-n"], input=text, text=True, check=True)


def test_dry_prints_the_script_of_slurm_and_starts_and_leaves_nothing(tmp_path):
    variables = {
        "PATH": str(tmp_path),  # no batch system is there
        "DRY": "1",
        "CLUSTER": "slurm",
        "WORKERS": "3",
        "OPTIONS": "queue=gpu account=abc walltime=02:00:00",
    }
    words = ["-m", "tutorials", "run", "pets"]
    done = finished(*words, cwd=tmp_path, env={**os.environ, **variables})
    assert done.stdout.startswith("# 3 job(s) such as this one, for 3 rank(s): each starts")
    lines = ["-p gpu", "-A abc", "-t 02:00:00", "--cpus-per-task=2", "--mem=4G"]
    assert all(f"#SBATCH {line}" in done.stdout for line in lines)
    assert "+ 7200" in done.stdout and not list(tmp_path.iterdir())


def test_dry_says_what_a_sites_settings_give_to_the_jobs_and_what_replaces_them(tmp_path):
    lines = ["queue: short", "walltime: '08:00:00'", "cores: null"]
    lines += ["job-extra-directives: [--constraint=new]"]
    (tmp_path / "site.yaml").write_text("jobqueue:\n  slurm:\n    " + "\n    ".join(lines))
    variables = {"DRY": "1", "CLUSTER": "slurm", "DASK_CONFIG": str(tmp_path)}
    words = ["-m", "tutorials", "run", "pets"]
    said = finished(*words, cwd=tmp_path, env={**os.environ, **variables}).stdout
    taken = "queue=short, job_extra_directives=['--constraint=new']"
    line = f"# From jobqueue.yaml, Dask's settings: {taken}. Replaced here: walltime=08:00:00.\n"
    assert f"{line}#!/usr/bin" in said and "#SBATCH --constraint=new\n" in said, said


def test_the_script_of_pbs_pro_asks_with_select(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/a clone")
    assert describe("pbs-gpu").replace(shlex.quote(sys.executable), "PYTHON") == PBS_PRO


def test_a_program_of_ones_own_prints_the_script_with_dry_and_ends(tmp_path):
    program = "import ddp_common; ddp_common.connect('slurm'); print('it goes on')"
    done = finished("-c", program, cwd=tmp_path, env={**os.environ, "DRY": "1"})
    assert "#SBATCH -t 01:00:00" in done.stdout and "it goes on" not in done.stdout


def test_ctrl_c_is_what_it_was_after_a_batch_systems_class_is_imported():
    """dask-jobqueue's module `runner` has it end the program, wherever it is imported."""
    program = """
import signal
from dask_ranks.clusters.profiles import cluster_class
cluster_class("dask_jobqueue.SLURMCluster")
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
"""
    finished("-c", program)


def test_several_gpus_of_one_job_are_several_ranks(monkeypatch):
    monkeypatch.setenv(
        "OPTIONS", "processes=4 cores=32 memory=128GiB job_extra_directives=[--gres=gpu:4]"
    )
    text = describe("slurm-gpu", workers=8)
    assert text.startswith("# 2 job(s) such as this one, for 8 rank(s): ")
    assert "#SBATCH --gres=gpu:4\n" in text and "dask_cuda.cli" in text
    assert "--nthreads 8 --memory-limit 32.00GiB" in text


WORKER = """
import os, signal, time
def end(*_):
    time.sleep(0.5)
    os.write(1, f"{os.path.isdir(folder)}\\n".encode())
    os._exit(1)
folder = os.environ["DASK_TEMPORARY_DIRECTORY"]
signal.signal(signal.SIGTERM, end)
found = os.stat(folder)
os.write(1, f"{found.st_mode & 0o777:o} {found.st_uid}\\n".encode())
time.sleep(600)
"""


THEIRS = """trap 'echo "theirs, after $?"; exit 3' EXIT"""


@pytest.mark.parametrize(
    ("prologue", "then"), [([], ""), ([THEIRS, "set -eu"], "theirs, after 1\n")]
)
def test_a_cancelled_job_removes_its_temporary_files_when_its_worker_has_ended(
    tmp_path, monkeypatch, prologue, then
):
    """The folder is of its user alone. Lines of a profile may have something to do at the end."""
    monkeypatch.setenv("OPTIONS", f"job_script_prologue={shlex.quote(json.dumps(prologue))}")
    script = describe("slurm")
    python = shlex.quote(sys.executable)
    lines = script[script.index("trap : TERM") : script.index(python)]
    (tmp_path / "job.sh").write_text(f"{lines}\n{python} -c '{WORKER}'\n")
    (tmp_path / "scratch").mkdir()
    job = subprocess.Popen(
        ["bash", tmp_path / "job.sh"],
        stdout=subprocess.PIPE,
        text=True,
        env={"PATH": os.environ["PATH"], "TMPDIR": str(tmp_path / "scratch")},
        process_group=0,
    )
    assert job.stdout.readline() == f"700 {os.getuid()}\n"
    os.killpg(job.pid, signal.SIGTERM)  # as the batch system sends it
    assert job.communicate()[0] == f"True\n{then}"
    assert job.returncode == (3 if then else 1)
    assert not list((tmp_path / "scratch").iterdir())


def test_a_clone_in_a_folder_with_a_space_has_jobs_on_slurm_and_is_refused_on_pbs(
    tmp_path, monkeypatch
):
    commands, python = tmp_path / "commands", tmp_path / "a clone" / "python"
    commands.mkdir()
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    (commands / "qsub").symlink_to("/bin/false")
    monkeypatch.setattr(sys, "executable", str(python))
    assert f"\n'{python}' -m distributed.cli.dask_worker tls" in describe("slurm")
    monkeypatch.setenv("PATH", str(commands))
    monkeypatch.setenv("RUNS", str(tmp_path / "runs"))
    with pytest.raises(Error, match="PBS cannot have jobs with a space in a path"):
        connect("pbs")
    assert not list((tmp_path / "runs" / "clusters").iterdir())


def test_without_the_commands_of_the_batch_system_make_run_says_so_before_it_starts(tmp_path):
    words = [sys.executable, "-m", "tutorials", "run", "pets"]
    variables = {"CLUSTER": "slurm", "PATH": str(tmp_path)}
    done = subprocess.run(
        words, cwd=tmp_path, env={**os.environ, **variables}, capture_output=True, text=True
    )
    assert done.returncode == 1 and done.stdout == ""
    assert "There is no sbatch here" in done.stderr and "DRY=1" in done.stderr


def test_a_network_that_this_host_lacks_is_refused_in_dasks_own_words(tmp_path, monkeypatch):
    (tmp_path / "sbatch").symlink_to("/bin/false")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("OPTIONS", "interface=ib77")
    monkeypatch.setenv("RUNS", str(tmp_path))
    with pytest.raises(Error, match="'ib77' is not a valid network interface.*'lo'"):
        connect("slurm")
    assert not list((tmp_path / "clusters").iterdir())
