"""What would be submitted: DRY=1 for every profile, on a machine without a batch system.

And profiles that are extended and overridden.
"""

import os
import subprocess
import sys
import textwrap

import pytest

from ddp_common import Error
from ddp_common.clusters.connect import describe
from ddp_common.clusters.job_script import PRELOAD, cluster_class, seconds_of
from ddp_common.clusters.profiles import PROFILES, read_profile
from ddp_common.clusters.protection import PRIVATE_FOLDER_IN_A_JOB

NAMES = sorted(path.stem for path in PROFILES.glob("*.yaml"))

PBS_PRO = """# 2 job(s) such as this one, for 2 rank(s):
# Each starts Dask workers, to which your program sends its function later. The program
# itself stays where you start it, and submits the jobs. TIME and SCHEDULER:PORT are
# known then. The `export` lines are ours: nothing to change.
# Next: make doctor CLUSTER=pbs-gpu
#!/usr/bin/env bash

#PBS -N dask-worker
#PBS -l select=1:ncpus=8:ngpus=1:mem=32gb
#PBS -l walltime=01:00:00
#PBS -e runs/clusters/TIME/
#PBS -o runs/clusters/TIME/
exec >> "runs/clusters/TIME/worker-${PBS_JOBID:-$SLURM_JOB_ID}.log" 2>&1
export DDP_JOB_END=${SLURM_JOB_END_TIME:-$(($(date +%s) + 3600))}  # seconds since 1970
export DDP_JOB_WARNING=60  # seconds before it, ranks save and leave
export DASK_DISTRIBUTED__WORKER__DAEMON=False DASK_DISTRIBUTED__COMM__TIMEOUTS__TCP=11s \
DASK_DISTRIBUTED__WORKER__HTTP__ROUTES=[]
export DASK_DISTRIBUTED__WORKER__PRELOAD="${DASK_DISTRIBUTED__WORKER__PRELOAD:-EARLY}"
SCRATCH
PYTHON -m dask_cuda.cli tls://SCHEDULER:PORT --name worker-0 --nthreads 8 \
--memory-limit 32.00GiB --death-timeout 60 \
--dashboard-address 127.0.0.1:0 --no-dashboard --protocol tls:// \
--tls-ca-file runs/clusters/TIME/cert.pem \
--tls-cert runs/clusters/TIME/cert.pem --tls-key runs/clusters/TIME/key.pem
"""


def dry(tmp_path, **variables):
    """What `make run DRY=1` prints where no program is on the path; nothing may be left."""
    done = subprocess.run(
        [sys.executable, "-m", "ddp_common", "run", "pets"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": str(tmp_path), "DRY": "1", **variables},
    )
    assert not list(tmp_path.iterdir())
    return done


@pytest.mark.parametrize("name", NAMES)
def test_every_profile_can_be_printed_on_any_machine(name):
    text = describe(name)
    assert "python" in text or "Cluster(" in text
    if "#!" in text:
        subprocess.run(["bash", "-n"], input=text, text=True, check=True)


def test_dry_starts_and_leaves_nothing(tmp_path):
    done = dry(
        tmp_path, CLUSTER="slurm", WORKERS="3", OPTIONS="queue=gpu account=abc walltime=02:00:00"
    )
    assert done.returncode == 0, done.stderr
    comments, _, script = done.stdout.partition("#!/usr/bin/env bash\n")
    assert comments.startswith("# 3 job(s) such as this one, for 3 rank(s):\n# Each starts")
    assert comments.endswith("# Next: make doctor CLUSTER=slurm\n") and script
    for line in (
        "#SBATCH -p gpu",
        "#SBATCH -A abc",
        "#SBATCH -t 02:00:00",
        "#SBATCH --cpus-per-task=2",
        "#SBATCH --mem=4G",
        "+ 7200",
    ):
        assert line in done.stdout


@pytest.mark.parametrize(
    ("cluster", "expected"),
    [
        (
            "tcp://10.0.0.1:8786",
            "Nothing would be started: there is a scheduler at tcp://10.0.0.1:8786.",
        ),
        ("torchrun", "torchrun --standalone --nproc-per-node=2"),
        ("srun", "srun --ntasks=2 --kill-on-bad-exit=1"),
        ("local", "distributed.LocalCluster(n_workers=2,"),
    ],
)
def test_dry_says_what_starts_without_jobs(tmp_path, cluster, expected):
    assert expected in dry(tmp_path, CLUSTER=cluster, WORKERS="2").stdout


def test_dry_refuses_what_a_run_would_refuse(tmp_path):
    done = dry(tmp_path, CLUSTER="slurm", OPTIONS="quue=gpu")
    assert (
        done.returncode == 1
        and "there is no option 'quue'. Did you mean queue? It stands in OPTIONS" in done.stderr
        and "Traceback" not in done.stderr
    )


def test_the_script_of_pbs_pro_asks_with_select():
    assert (
        describe("pbs-gpu")
        .replace(sys.executable, "PYTHON")
        .replace(PRIVATE_FOLDER_IN_A_JOB, "SCRATCH")
        .replace(PRELOAD, "EARLY")
        == PBS_PRO
    )


def test_what_a_jobs_worker_imports_first_does_no_harm_where_the_package_is_missing():
    subprocess.run([sys.executable, "-I", "-S", "-c", PRELOAD], check=True)


def test_ctrl_c_is_what_it_was_after_a_batch_systems_class_is_imported():
    """dask-jobqueue's module `runner` has it end the program, wherever it is imported."""
    program = """
import signal
from ddp_common.clusters.job_script import cluster_class
cluster_class("dask_jobqueue.SLURMCluster")
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_preload_of_the_users_own_is_left_as_it_is():
    line = f'echo "${{DASK_DISTRIBUTED__WORKER__PRELOAD:-{PRELOAD}}}"'

    def printed(**variables):
        command = ["bash", "-ec", line]
        done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    assert printed() == PRELOAD
    assert printed(DASK_DISTRIBUTED__WORKER__PRELOAD="mine") == "mine"


@pytest.mark.parametrize("trap", [None, "own_but_open", "somebody_else's", "a_link"])
def test_a_job_keeps_its_temporary_files_in_a_folder_of_its_user_alone(tmp_path, trap):
    folder = tmp_path / f"ddp-{os.getuid()}"
    if trap == "a_link":
        folder.symlink_to("/usr")
    elif trap:
        folder.mkdir()
        folder.chmod(0o777)
    if trap == "somebody_else's":
        if os.geteuid():
            pytest.skip("only root may give a folder away")
        os.chown(folder, 65534, 65534)
    done = subprocess.run(
        ["bash", "-ec", f"{PRIVATE_FOLDER_IN_A_JOB}\necho $DASK_TEMPORARY_DIRECTORY"],
        capture_output=True,
        text=True,
        env={"PATH": os.environ["PATH"], "TMPDIR": str(tmp_path)},
        check=True,
    )
    used = done.stdout.strip()
    assert (
        used.startswith(str(tmp_path))
        and os.stat(used).st_mode & 0o777 == 0o700
        and os.stat(used).st_uid == os.getuid()
    )
    assert (used == str(folder)) == (trap in (None, "own_but_open"))


def test_without_a_resource_spec_pbs_is_asked_for_cores_and_memory():
    assert "#PBS -l select=1:ncpus=2:mem=4096MB\n" in describe("pbs")


def test_several_gpus_of_one_job_are_several_ranks(monkeypatch):
    monkeypatch.setenv(
        "OPTIONS", "processes=4 cores=32 memory=128GiB job_extra_directives=[--gres=gpu:4]"
    )
    text = describe("slurm-gpu", workers=8)
    assert text.startswith("# 2 job(s) such as this one, for 8 rank(s):")
    assert (
        "#SBATCH --gres=gpu:4\n" in text
        and "--nthreads 8 --memory-limit 32.00GiB" in text
        and "dask_cuda.cli" in text
    )


def test_the_sites_differ_from_what_they_extend_only_where_they_say_so():
    puhti, base = read_profile("puhti", ""), read_profile("slurm-gpu", "")
    assert puhti["cluster"] == base["cluster"] and puhti["timeout"] == base["timeout"] == 600
    assert (
        puhti["options"]["job_extra_directives"] == ["--gres=gpu:v100:1"]
        and puhti["options"]["worker_command"] == "dask_cuda.cli"
    )
    sciclone = describe("sciclone")
    assert "\n#!/usr/bin/env bash\n" in sciclone  # not the tcsh of the login shell
    assert "#PBS -l nodes=1:c18a:ppn=12\n" in sciclone and "--interface ib0" in sciclone


@pytest.fixture
def write(tmp_path):
    def write(name, text):
        (tmp_path / name).write_text(textwrap.dedent(text))
        return str(tmp_path / name)

    return write


def test_a_profile_may_extend_one_beside_it(write):
    write(
        "base.yaml",
        "cluster: dask_jobqueue.SLURMCluster\ntimeout: 5\noptions: {cores: 3, memory: 1GiB}",
    )
    profile = read_profile(write("mine.yaml", "extends: base.yaml\noptions: {memory: 2GiB}"), "")
    assert profile["timeout"] == 5 and profile["options"] == {"cores": 3, "memory": "2GiB"}


FAULTS = {
    "extends_nothing": (
        "extends: no-such-profile",
        "There is no cluster profile 'no-such-profile', which",
    ),
    "extends_itself": ("extends: mine.yaml", "extends itself"),
    "unknown_key": ("cluster: a.B\nwalltime: 5", "unknown keys: walltime"),
    "timeout_in_words": ("cluster: a.B\ntimeout: soon", "timeout: 'soon'"),
    "negative": ("cluster: a.B\nwarning: -5", "warning: -5"),
    "walltime_in_words": (
        "extends: slurm\noptions: {walltime: two hours}",
        "it is written hours:minutes:seconds",
    ),
    "binary": ("\x00\x01", "valid YAML"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_profile_with_a_fault_is_refused_with_what_is_wrong(write, fault):
    text, reason = FAULTS[fault]
    with pytest.raises(Error) as refused:
        describe(write("mine.yaml", text))
    assert reason in str(refused.value)


@pytest.mark.parametrize("text", ["queue", "=gpu", "queue='gpu"])
def test_options_that_are_no_pairs_are_refused_with_how_they_are_written(text):
    with pytest.raises(Error, match=r"OPTIONS=.* Write OPTIONS="):
        read_profile("slurm", text)


def test_options_reach_the_profile_and_into_its_mappings():
    profile = read_profile(
        "slurm",
        "timeout=5 workers=7 cores=12 walltime=12:00:00 scheduler_options.interface=eth1 "
        "job_extra_directives='[--exclusive, -C x]'",
    )
    assert (profile["timeout"], profile["workers"]) == (5, 7)
    assert profile["options"]["walltime"] == "12:00:00" and profile["options"]["cores"] == 12
    assert profile["options"]["scheduler_options"] == {"interface": "eth1"}
    assert profile["options"]["job_extra_directives"] == ["--exclusive", "-C x"]


def test_a_walltime_without_quotes_is_the_time_that_was_meant(write):
    profile = read_profile(write("mine.yaml", "extends: slurm\noptions: {walltime: 12:30:00}"), "")
    assert profile["options"]["walltime"] == "12:30:00"


@pytest.mark.parametrize(
    ("walltime", "seconds"),
    [("00:01:00", 60), ("02:00:00", 7200), ("1-00:00:00", 86400), ("30:00", 1800)],
)
def test_walltimes_are_understood_as_the_batch_systems_do(walltime, seconds):
    assert seconds_of(walltime) == seconds


WRONG = {
    "processes=two": "whole number of at least 1",
    "processes=0": "whole number of at least 1",
    "processes=1.5": "whole number of at least 1",
    "processes=true": "whole number of at least 1",
    "cores=many": "whole number of at least 1",
    "memory=lots": "it is a number of bytes, such as 4GiB",
    "walltime=[1,2]": "it is written hours:minutes:seconds",
    "job_script_prologue='module load gcc'": "it is a list of texts",
    "job_extra_directives=--exclusive": "it is a list of texts",
    "worker_extra_args=[1]": "it is a list of texts",
    "scheduler_options=eth0": "it is a mapping, such as {interface: eth0}",
}


@pytest.mark.parametrize("options", WRONG)
def test_options_of_the_wrong_kind_are_one_error_before_anything_starts(monkeypatch, options):
    monkeypatch.setenv("OPTIONS", options)
    with pytest.raises(Error) as refused:
        describe("slurm")
    assert WRONG[options] in str(refused.value)


def test_a_profile_may_name_saturns_class_by_the_place_where_it_was_before():
    pytest.importorskip("dask_saturn")
    now = cluster_class("ddp_common.clusters.saturn.SaturnCluster")
    assert cluster_class("ddp_common.saturn.SaturnCluster") is now
