"""What a batch system says of its jobs: Slurm by squeue, PBS by qstat.

Relies on the commands being on PATH. Promises: a batch system that does not answer is an
`OSError`, which is not the same as one that has no jobs.
"""

import re
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

ANSWER_TIMEOUT = 30  # seconds
UNKNOWN_JOB = re.compile(r"[Uu]nknown [Jj]ob|[Ii]nvalid job|has finished")


class JobState(StrEnum):
    """Where a job is in its life."""

    PENDING = "pending"
    RUNNING = "running"
    ENDED = "ended"
    NEVER = "never to start"  # the batch system says that it cannot run the job


States = dict[str, tuple[JobState, str]]  # job id -> its state, and why

SLURM_PENDING = ("PENDING", "CONFIGURING", "REQUEUED", "SUSPENDED")
SLURM_ENDS = {  # why a job has ended, where Slurm gives no other reason
    "CANCELLED": "it was cancelled",
    "COMPLETED": "its script has come to its end",
    "COMPLETING": "its processes end: it was cancelled, or has come to its end",
    "FAILED": "its script has failed",
    "NODE_FAIL": "its node has failed",
    "OUT_OF_MEMORY": "it needed more memory than it had asked for",
    "PREEMPTED": "another job has taken its place",
    "TIMEOUT": "its time limit",
}
PBS_STATES = {
    "R": JobState.RUNNING,
    "B": JobState.RUNNING,
    "E": JobState.ENDED,
    "C": JobState.ENDED,
    "F": JobState.ENDED,
    "X": JobState.ENDED,
}
PBS_ENDS = {  # by exit status: a signal's is negative, or 128 or 256 more than its number
    "-29": "its time limit",
    "0": "its script has come to its end",
    "143": "it got SIGTERM: it was cancelled, or its time limit was over",
    "271": "it got SIGTERM: it was cancelled, or its time limit was over",
}


def slurm_states(ids: Iterable[str]) -> States:
    """What Slurm says of jobs; those that it has forgotten are absent.

    Raises `OSError` if it does not answer.
    """
    said = ask("squeue", "--me", "--noheader", "--states=all", "--format=%i|%T|%r")
    states: States = {}
    for line in said.splitlines():
        if line.count("|") < 2:
            continue
        job, state, reason = line.split("|", 2)
        has_reason = reason not in ("None", "")
        if state in SLURM_PENDING:
            states[job] = JobState.PENDING, reason if has_reason else "just submitted"
        elif state == "RUNNING":
            states[job] = JobState.RUNNING, "it runs"
        else:
            known = SLURM_ENDS.get(state, state)
            states[job] = JobState.ENDED, reason if has_reason else known
    return {job: states[job] for job in ids if job in states}


def pbs_states(ids: Iterable[str]) -> States:
    """The same from `qstat -f`, of PBS Pro, OpenPBS or Torque. Jobs that have ended may be absent.

    An id is that of qsub, with the name of its server: another server's jobs are found by it. What
    answers may call the server by another name, so jobs are told by their numbers.
    """
    numbers = {job: job.partition(".")[0] for job in ids}
    by_number = read_qstat(ask("qstat", "-f", *numbers))
    return {job: by_number[number] for job, number in numbers.items() if number in by_number}


def read_qstat(text: str) -> States:
    """The jobs that `qstat -f` has listed, by their numbers."""
    states: States = {}
    # Long lines are broken, and go on after a tab; Slurm's qstat begins every line with one
    unwrapped = re.sub(r"\n\t(?![\w.]+ = )", "", text)
    for block in unwrapped.split("Job Id:")[1:]:
        job = block.split(maxsplit=1)[0].partition(".")[0]
        values = dict(re.findall(r"^\s+(\w+) = (.*)$", block, flags=re.M))
        letter = values.get("job_state", "")
        if not letter:
            continue
        state = PBS_STATES.get(letter, JobState.PENDING)
        comment = values.get("comment", "").strip()
        if state is JobState.RUNNING:
            why = "it runs"
        elif state is JobState.ENDED:
            status = values.get("Exit_status") or values.get("exit_status") or ""
            default = f"its exit status is {status}" if status else "its processes end"
            why = PBS_ENDS.get(status, default)
        elif comment.lower().startswith("can never run"):
            state, why = JobState.NEVER, comment
        else:
            why = comment or f"state {letter}"
        states[job] = state, why
    return states


def ask(*command: str) -> str:
    """What a command prints. Raises `OSError` if there is no answer."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_TIMEOUT)
    except subprocess.TimeoutExpired:
        raise OSError(f"{command[0]} did not answer within {ANSWER_TIMEOUT} s") from None
    if done.returncode and not done.stdout and not UNKNOWN_JOB.search(done.stderr):
        raise OSError(f"{command[0]}: {done.stderr.strip()}")
    return done.stdout


@dataclass
class BatchSystem:
    """What is known of a batch system; the first of its `commands` is the one that submits."""

    name: str
    states: Callable[[Iterable[str]], States]
    commands: tuple[str, ...]


SYSTEMS = {  # by the command that submits
    "sbatch": BatchSystem("Slurm", slurm_states, ("sbatch", "squeue", "scancel", "sinfo")),
    "qsub": BatchSystem("PBS", pbs_states, ("qsub", "qstat", "qdel")),
}


def summary(states: States) -> str:
    """'1 running, 2 pending (Resources)'."""
    parts = []
    for kind in (JobState.RUNNING, JobState.PENDING, JobState.NEVER, JobState.ENDED):
        reasons = [reason for each, reason in states.values() if each is kind]
        if not reasons:
            continue
        part = f"{len(reasons)} {kind}"
        if kind is not JobState.RUNNING:
            part += f" ({', '.join(sorted(set(reasons)))})"
        parts.append(part)
    return ", ".join(parts) or "none submitted"
