"""A real Slurm of four nodes and a login host on this machine, without systemd or Docker.

    with running_slurm(folder) as slurm:
        said_by(slurm, "sinfo")

The hosts are those of `hosts_here`: each has a name, an address and an /etc/hosts of its own. On
the login host is slurmctld, on each node slurmd; one munged is for all, since they share files.
Needs root and the packages slurm-wlm, munge and iproute2 (Debian, Ubuntu). Nothing outside the
folder is touched.
"""

import contextlib
import os
import re
import shutil
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

import hosts_here
import runs_here
from hosts_here import INTERFACE, Host, running_hosts
from patience import PATIENCE
from runs_here import ROOT, wait_until

PROGRAMS_OF_DATABASE = ("mariadbd", "mariadb-install-db", "slurmdbd")
PROGRAMS = ("munged", "mungekey", "slurmctld", "slurmd", "sinfo", "srun", "sbatch")
HOSTS = ("login", "node-1", "node-2", "node-3", "node-4")
CPUS = 8  # of a node: more than the machine may have, as Slurm is told not to look
MEMORY = 32_000  # MiB; the same
JOB = f"cores=1 memory=1GiB interface={INTERFACE}"
SILENCE = round(PATIENCE / 4)  # seconds after which a node that does not answer is down

# A job starts on the node that has most free cores (CR_LLN): two of them are on two nodes.
CONFIGURATION = """
ClusterName=here
SlurmctldHost={login.name}({login.address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core,CR_LLN
{accounting}
TaskProlog={folder}/prolog
MpiDefault=none
SlurmdParameters=config_overrides
MessageTimeout=60
SlurmdTimeout={silence}
ReturnToService=1
KillWait={kill_wait}
MinJobAge=3600
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
PartitionName=urgent Nodes=ALL PriorityTier=2 MaxTime=INFINITE State=UP
"""
NODE = "NodeName={0.name} NodeAddr={0.address} CPUs={cpus} RealMemory={memory} State=UNKNOWN\n"

# `sacct -c` reads a file; `sacct` asks a daemon, which has a database
FILE = """
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/filetxt
JobCompLoc={folder}/jobs.txt
"""
DATABASE = """
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost={login.name}
AccountingStoragePass={folder}/munge.socket
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=1
"""
DAEMON_OF_DATABASE = """
DbdHost={login.name}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StorageUser=root
LogFile={folder}/slurmdbd.log
PidFile={folder}/slurmdbd.pid
"""


@dataclass
class Slurm:
    """A Slurm that runs: its hosts, and the variables that its commands need on each of them."""

    login: Host
    nodes: list[Host]
    folder: Path
    environment: dict[str, str]
    daemons: dict[str, subprocess.Popen] = field(default_factory=dict)

    def start(self, host, *command):
        """Start a daemon on a host; `daemons` has it by the names of both."""
        name = f"{command[0]} {host.name}"
        with open(self.folder / f"{name}.out", "a") as output:
            options = {"env": self.environment, "stdout": output, "stderr": output}
            # In a session of its own: the signals of a terminal are not for it
            self.daemons[name] = host.start(command, start_new_session=True, **options)

    def repair(self):
        """Have all nodes as they were at first, whatever has become of them."""
        for node in self.nodes:
            node.mend()
            if self.daemons[f"slurmd {node.name}"].poll() is not None:
                self.start(node, "slurmd", "-D", "-N", node.name)
            resume = ["scontrol", "update", f"NodeName={node.name}", "State=RESUME"]
            # It is refused for one that works
            self.login.start(resume, env=self.environment, stderr=subprocess.DEVNULL).wait()
        wait_until(lambda: are_idle(self))


def why_not():
    """Why no Slurm can be started here; None if it can."""
    if os.geteuid() != 0:
        return "needs root to start slurmd"
    if missing := not_installed(PROGRAMS):
        return f"{', '.join(missing)} not installed (Debian: apt install slurm-wlm munge)"
    return hosts_here.why_not()


def not_installed(programs):
    """Those that are neither on PATH nor where Debian has daemons."""
    path = f"{os.environ['PATH']}:/usr/sbin"
    return [program for program in programs if shutil.which(program, path=path) is None]


@contextlib.contextmanager
def running_slurm(folder, has_database=False, kill_wait=5, **options):
    """Start hosts and daemons, whose files are in `folder`; yields a `Slurm` with idle nodes.

    With a database `sacct` works, which needs `PROGRAMS_OF_DATABASE`. A job that is told to end
    has `kill_wait` seconds; a site's Slurm gives 30. `options` are those of `running_hosts`.
    """
    folder = Path(folder)
    with running_hosts(*HOSTS, **options) as (login, *nodes):
        for name in ("state", "munge", *(node.name for node in nodes)):
            (folder / name).mkdir(parents=True)
        # A real PBS sets this one; what Slurm has as its commands does not.
        prolog = folder / "prolog"
        prolog.write_text("#!/bin/sh\necho export PBS_JOBID=$SLURM_JOB_ID\n")
        prolog.chmod(0o755)
        configuration = folder / "slurm.conf"
        of_nodes = [NODE.format(node, cpus=CPUS, memory=MEMORY) for node in nodes]
        names = {"folder": folder, "login": login}
        accounting = (DATABASE if has_database else FILE).format(**names)
        seconds = {"silence": SILENCE, "kill_wait": kill_wait}
        of_all = CONFIGURATION.format(accounting=accounting, **seconds, **names)
        configuration.write_text(of_all + "".join(of_nodes))
        path = f"{os.environ['PATH']}:/usr/sbin"
        environment = {**os.environ, "SLURM_CONF": str(configuration), "PATH": path}
        slurm = Slurm(login, nodes, folder, environment)
        key = folder / "munge" / "key"
        said_by(slurm, "mungekey", "--create", "--keyfile", key)
        slurm.start(
            login,
            "munged",
            "--foreground",
            "--force",
            f"--key-file={key}",
            f"--socket={folder}/munge.socket",
            f"--pid-file={folder}/munge/pid",
            f"--log-file={folder}/munge/log",
            f"--seed-file={folder}/munge/seed",
        )
        wait_until_ready((folder / "munge.socket").exists, folder)
        if has_database:
            start_database(slurm, DAEMON_OF_DATABASE.format(**names))
        slurm.start(login, "slurmctld", "-D")
        for node in nodes:
            slurm.start(node, "slurmd", "-D", "-N", node.name)
        wait_until_ready(lambda: are_idle(slurm), folder)
        try:
            yield slurm
        finally:
            said_by(slurm, "scancel", "--user=root")
            _wait_until_no_job_is_left(slurm)


def start_database(slurm, configuration):
    """Start what `sacct` asks. The database asks for no password: its host is the login host."""
    data = slurm.folder / "database"
    common = ["--user=mysql", f"--datadir={data}"]
    said_by(slurm, "mariadb-install-db", "--skip-test-db", *common)
    own = [f"--socket={data}/socket", f"--pid-file={data}/pid", "--bind-address=127.0.0.1"]
    slurm.start(slurm.login, "mariadbd", "--skip-grant-tables", *common, *own)
    path = slurm.folder / "slurmdbd.conf"
    path.write_text(configuration)
    path.chmod(0o600)  # it asks for that
    wait_until_ready((data / "socket").exists, slurm.folder)
    slurm.start(slurm.login, "slurmdbd", "-D")
    said_by(slurm, "sacctmgr", "--immediate", "--quiet", "add", "cluster", "here")


def _wait_until_no_job_is_left(slurm):
    """Up to 30 s: a job ends as it does, before its processes are killed with their host."""
    for _ in range(60):
        if not jobs(slurm):
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


def are_idle(slurm):
    """Whether all nodes are there, with no job on them."""
    said = said_by(slurm, "sinfo", "--noheader", "--Node", "--format=%t").split()
    return set(said) == {"idle"}


def said_by(slurm, *command):
    """What a command prints on the login host.

    It is asked again where a busy controller has not answered.
    """

    def answer():
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
        process = slurm.login.start(command, env=slurm.environment, **options)
        said, _ = process.communicate()
        return [said] if process.returncode == 0 else None

    (said,) = wait_until(answer)
    return said


def train(slurm, folder, tutorial, cwd, **variables):
    """`runs_here.train` on the login host, in jobs of one core if they are asked for."""
    variables = {"OPTIONS": JOB, **variables}
    there = slurm.environment, folder, tutorial, cwd, slurm.login.start
    return runs_here.train(*there, **variables)


def jobs(slurm, *options):
    """The numbers of the jobs that wait, run or are about to end; `options` are for squeue."""
    return said_by(slurm, "squeue", "--noheader", "--format=%i", *options).split()


def running_jobs(slurm):
    """The same of those that run. Jobs of an earlier test may take a while to end."""
    return jobs(slurm, "--states=RUNNING")


def state(slurm, job):
    """Slurm's word for the state of a job: RUNNING, COMPLETED, FAILED …"""
    return re.search(r"JobState=(\w+)", said_by(slurm, "scontrol", "show", "job", job))[1]


def submit(slurm, folder, script, cwd=ROOT, **variables):
    """Submit a batch script; returns the job's number. Its log is `folder`/`number`.log."""
    process = slurm.login.start(
        ["sbatch", "--parsable", f"--output={folder}/%j.log", script],
        cwd=cwd,
        env={**slurm.environment, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    said, error = process.communicate()
    assert process.returncode == 0, error
    return said.strip()


@contextlib.contextmanager
def partition_down(slurm):
    """Meanwhile no job starts."""
    update = ["scontrol", "update", "PartitionName=main"]
    said_by(slurm, *update, "State=DOWN")
    try:
        yield
    finally:
        said_by(slurm, *update, "State=UP")
