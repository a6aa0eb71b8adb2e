"""What a batch system says of its jobs: Slurm by squeue, PBS by qstat.

Relies on the commands being on PATH. Promises: a batch system that does not answer is an
`OSError`, which is not the same as one that has no jobs.
"""

import re
import subprocess
from collections.abc import Iterable
from types import SimpleNamespace

QUEUED, RUNNING, ENDED = "pending", "running", "ended"
SLURM_QUEUED = ("PENDING", "CONFIGURING", "REQUEUED", "SUSPENDED")
PBS_RUNNING = "RB"
PBS_ENDED = "ECFX"
ANSWER_TIMEOUT = 30  # seconds
UNKNOWN_JOB = re.compile(r"[Uu]nknown [Jj]ob|[Ii]nvalid job|has finished")


def slurm_states(ids: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Job id -> (pending, running or ended; Slurm's state and reason).

    Jobs that Slurm has forgotten are absent. Raises `OSError` if it does not answer.
    """
    said = ask("squeue", "--me", "--noheader", "--states=all", "--format=%i|%T|%r")
    states = {}
    for line in said.splitlines():
        if line.count("|") < 2:
            continue
        job, state, reason = line.split("|", 2)
        if state in SLURM_QUEUED:
            states[job] = (QUEUED, reason.replace("None", "just submitted"))
            continue
        kind = RUNNING if state == "RUNNING" else ENDED
        why = state if reason in ("None", "") else f"{state}, {reason}"
        states[job] = (kind, why)
    return {job: states[job] for job in ids if job in states}


def pbs_states(ids: Iterable[str]) -> dict[str, tuple[str, str]]:
    """The same from `qstat -f`, of PBS Pro, OpenPBS or Torque.

    Jobs that have ended may be absent. Raises `OSError` if it does not answer.
    """
    states = {}
    for block in ask("qstat", "-f", *ids).split("Job Id:")[1:]:
        job = re.match(r"\s*(\d+)", block)
        state = re.search(r"job_state = (\w)", block)
        if not job or not state:
            continue
        if state[1] in PBS_RUNNING:
            kind = RUNNING
        elif state[1] in PBS_ENDED:
            kind = ENDED
        else:
            kind = QUEUED
        comment = re.search(r"comment = (.*)", block)
        why = comment[1].strip() if comment else f"state {state[1]}"
        states[job[1]] = (kind, why)
    return {job: states[job] for job in ids if job in states}


def ask(*command):
    """What a command prints. Raises `OSError` if there is no answer."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_TIMEOUT)
    except subprocess.TimeoutExpired:
        raise OSError(f"{command[0]} did not answer within {ANSWER_TIMEOUT} s") from None
    if done.returncode and not done.stdout and not UNKNOWN_JOB.search(done.stderr):
        raise OSError(f"{command[0]}: {done.stderr.strip()}")
    return done.stdout


SYSTEMS = {  # by the command that submits
    "sbatch": SimpleNamespace(
        name="Slurm", states=slurm_states, commands=("sbatch", "squeue", "scancel", "sinfo")
    ),
    "qsub": SimpleNamespace(name="PBS", states=pbs_states, commands=("qsub", "qstat", "qdel")),
}


def ended(states: dict[str, tuple[str, str]] | None) -> dict[str, str]:
    """Of the jobs in `states` those that are over: name -> why.

    None means that the queue does not answer; then no job is known to be over.
    """
    return {job: reason for job, (kind, reason) in (states or {}).items() if kind == ENDED}


def summary(states: dict[str, tuple[str, str]]) -> str:
    """'1 running, 2 pending (Resources)'."""
    parts = []
    for kind in (RUNNING, QUEUED, ENDED):
        reasons = [reason for each, reason in states.values() if each == kind]
        if not reasons:
            continue
        part = f"{len(reasons)} {kind}"
        if kind != RUNNING:
            part += f" ({', '.join(sorted(set(reasons)))})"
        parts.append(part)
    return ", ".join(parts) or "none submitted"
