"""A real Slurm of one node on this machine, without systemd or Docker.

    with running_slurm(folder) as environment:
        subprocess.run(["sinfo"], env={**os.environ, **environment})

It is munged, slurmctld and slurmd in a folder of their own. Needs root and the packages slurm-wlm
and munge (Debian, Ubuntu). Nothing outside the folder is touched; ports are free ones.
"""

import contextlib
import os
import re
import shutil
import socket
import subprocess
import time
from pathlib import Path

from ports import free_port
from runs_here import ROOT, wait_until

PROGRAMS = ("munged", "mungekey", "slurmctld", "slurmd", "sinfo", "srun", "sbatch")
CPUS = 16  # more than the machine may have: Slurm is told not to look
MEMORY = 64_000  # MiB; the same

CONFIGURATION = """
ClusterName=here
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
TaskProlog={folder}/prolog
MpiDefault=none
SlurmdParameters=config_overrides
MessageTimeout=60
ReturnToService=2
KillWait=5
MinJobAge=3600
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} RealMemory={memory} State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def why_not():
    """Why no Slurm can be started here; None if it can."""
    if os.geteuid() != 0:
        return "needs root to start slurmd"
    missing = [
        program
        for program in PROGRAMS
        if shutil.which(program) is None and not Path("/usr/sbin", program).exists()
    ]
    if missing:
        return f"{', '.join(missing)} not installed (Debian: apt install slurm-wlm munge)"
    return None


@contextlib.contextmanager
def running_slurm(folder):
    """Start the three daemons in `folder`.

    Yields the variables that Slurm's commands need, once a node is idle.
    """
    folder = Path(folder)
    host = socket.gethostname().split(".")[0]
    for name in ("state", "spool", "munge"):
        (folder / name).mkdir(parents=True)
    # A real PBS sets this one; what Slurm has as its commands does not.
    prolog = folder / "prolog"
    prolog.write_text("#!/bin/sh\necho export PBS_JOBID=$SLURM_JOB_ID\n")
    prolog.chmod(0o755)
    configuration = folder / "slurm.conf"
    configuration.write_text(
        CONFIGURATION.format(
            folder=folder,
            host=host,
            cpus=CPUS,
            memory=MEMORY,
            controller_port=free_port(),
            node_port=free_port(),
        )
    )
    environment = {"SLURM_CONF": str(configuration), "PATH": f"{os.environ['PATH']}:/usr/sbin"}
    everything = {**os.environ, **environment}
    subprocess.run(
        ["mungekey", "--create", "--keyfile", folder / "munge" / "key"], env=everything, check=True
    )
    commands = {
        "munged": [
            "munged",
            "--foreground",
            "--force",
            f"--key-file={folder}/munge/key",
            f"--socket={folder}/munge.socket",
            f"--pid-file={folder}/munge/pid",
            f"--log-file={folder}/munge/log",
            f"--seed-file={folder}/munge/seed",
        ],
        "slurmctld": ["slurmctld", "-D"],
        "slurmd": ["slurmd", "-D", "-N", host],
    }
    daemons = []
    try:
        for name, command in commands.items():
            with open(folder / f"{name}.out", "w") as output:
                daemons.append(
                    subprocess.Popen(command, env=everything, stdout=output, stderr=output)
                )
            if name == "munged":
                wait_until_ready((folder / "munge.socket").exists, folder)
        wait_until_ready(lambda: a_node_is_idle(everything), folder)
        yield environment
    finally:
        subprocess.run(["scancel", "--user=root"], env=everything, capture_output=True)
        _wait_until_no_job_is_left(everything)
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(10)
            daemon.kill()
            daemon.wait()


def _wait_until_no_job_is_left(environment):
    """Up to 30 s: a job's steps outlive the daemon that has started them."""
    for _ in range(60):
        squeue = ["timeout", "10", "squeue", "--noheader"]
        if not subprocess.run(squeue, env=environment, capture_output=True).stdout:
            return
        time.sleep(0.5)


def wait_until_ready(condition, folder):
    """Wait for the daemons. What they have printed is shown if that is in vain."""
    try:
        wait_until(condition)
    except AssertionError:
        for path in (*folder.glob("*.out"), *folder.glob("*.log")):
            print(f"{path}:\n{path.read_text()[-1500:]}")
        raise


def a_node_is_idle(environment):
    sinfo = ["sinfo", "-h", "-o", "%t"]
    return b"idle" in subprocess.run(sinfo, env=environment, capture_output=True).stdout


def said_by(environment, *command):
    """What a command prints. It is asked again where a busy controller has not answered."""

    def answer():
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
        return done if done.returncode == 0 else None

    return wait_until(answer).stdout


def jobs(environment, *options):
    """The numbers of the jobs that wait, run or are about to end; `options` are for squeue."""
    return said_by(environment, "squeue", "--noheader", "--format=%i", *options).split()


def running_jobs(environment):
    """The same of those that run. Jobs of an earlier test may take a while to end."""
    return jobs(environment, "--states=RUNNING")


def state(environment, job):
    """Slurm's word for the state of a job: RUNNING, COMPLETED, FAILED …"""
    return re.search(r"JobState=(\w+)", said_by(environment, "scontrol", "show", "job", job))[1]


def submit(environment, folder, script, cwd=ROOT, **variables):
    """Submit a batch script; returns the job's number. Its log is `folder`/`number`.log."""
    command = ["sbatch", "--parsable", f"--output={folder}/%j.log", str(script)]
    done = subprocess.run(
        command, cwd=cwd, env={**environment, **variables}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@contextlib.contextmanager
def partition_down(environment):
    """Meanwhile no job starts."""
    update = ["scontrol", "update", "PartitionName=main"]
    said_by(environment, *update, "State=DOWN")
    try:
        yield
    finally:
        said_by(environment, *update, "State=UP")
