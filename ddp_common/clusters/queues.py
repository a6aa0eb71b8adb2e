"""What a batch system says of its jobs: Slurm by squeue, PBS by qstat."""

import re
import subprocess
from types import SimpleNamespace

QUEUED, RUNNING, ENDED = "pending", "running", "ended"
UNKNOWN_JOB = re.compile(r"[Uu]nknown [Jj]ob|[Ii]nvalid job|has finished")


def slurm_states(ids):
    """Job id -> (pending, running or ended; Slurm's state and reason). Jobs that it has forgotten are absent."""
    said = _ask("squeue", "--me", "--noheader", "--states=all", "--format=%i|%T|%r")
    states = {}
    for job, state, reason in (
        line.split("|", 2) for line in said.splitlines() if line.count("|") >= 2
    ):
        kind = (
            QUEUED
            if state in ("PENDING", "CONFIGURING", "REQUEUED", "SUSPENDED")
            else RUNNING
            if state == "RUNNING"
            else ENDED
        )
        states[job] = (
            kind,
            reason.replace("None", "just submitted")
            if kind == QUEUED
            else f"{state}, {reason}"
            if reason not in ("None", "")
            else state,
        )
    return {job: states[job] for job in ids if job in states}


def pbs_states(ids):
    """The same from `qstat -f`, of PBS Pro, OpenPBS or Torque; jobs that have ended may be absent."""
    states = {}
    for block in _ask("qstat", "-f", *ids).split("Job Id:")[1:]:
        job, state, comment = (
            re.match(r"\s*(\d+)", block),
            re.search(r"job_state = (\w)", block),
            re.search(r"comment = (.*)", block),
        )
        if job and state:
            kind = RUNNING if state[1] in "RB" else ENDED if state[1] in "ECFX" else QUEUED
            states[job[1]] = kind, comment[1].strip() if comment else f"state {state[1]}"
    return {job: states[job] for job in ids if job in states}


def _ask(*command):
    """What a command prints. Raises `OSError` if there is no answer, which is not the same as an empty one."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except subprocess.TimeoutExpired:
        raise OSError(f"{command[0]} did not answer within 30 s") from None
    if done.returncode and not done.stdout and not UNKNOWN_JOB.search(done.stderr):
        raise OSError(f"{command[0]}: {done.stderr.strip()}")
    return done.stdout


SYSTEMS = {  # by the command that submits
    "sbatch": SimpleNamespace(
        name="Slurm", states=slurm_states, commands=("sbatch", "squeue", "scancel", "sinfo")
    ),
    "qsub": SimpleNamespace(name="PBS", states=pbs_states, commands=("qsub", "qstat", "qdel")),
}


def summary(states):
    """'1 running, 2 pending (Resources)'."""
    parts = []
    for kind in (RUNNING, QUEUED, ENDED):
        reasons = [reason for each, reason in states.values() if each == kind]
        if reasons:
            parts.append(
                f"{len(reasons)} {kind}"
                + (f" ({', '.join(sorted(set(reasons)))})" if kind != RUNNING else "")
            )
    return ", ".join(parts) or "none submitted"
