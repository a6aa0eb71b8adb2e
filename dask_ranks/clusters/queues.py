"""What a batch system says of its jobs and queues: Slurm by squeue and sinfo, PBS by qstat.

Relies on the commands being on PATH. Promises: a batch system that does not answer is an
`OSError`, which is not the same as one that has no jobs; reasons are its own words; the number of
a job is what it says in its own form, whatever else a site's wrapper prints.
"""

import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

from ddp_common.errors import Error

ANSWER_TIMEOUT = 30  # seconds
UNKNOWN_JOB = re.compile(r"[Uu]nknown [Jj]ob|[Ii]nvalid job|has finished")


class JobState(StrEnum):
    """Where a job is in its life."""

    PENDING = "pending"
    RUNNING = "running"
    ENDED = "ended"


States = dict[str, tuple[JobState, str]]  # job id -> its state, and why

# Any other word of Slurm is that of a job that has ended; any other letter of PBS, that it waits
SLURM = {
    "RUNNING": JobState.RUNNING,
    **dict.fromkeys(("PENDING", "CONFIGURING", "REQUEUED", "SUSPENDED"), JobState.PENDING),
}
MEANING = {  # of those words of Slurm for which there often is no reason
    "COMPLETING": "it is ending",
    "CANCELLED": "it was cancelled",
    "NODE_FAIL": "its node failed",
    "TIMEOUT": "its time limit was reached",
    "OUT_OF_MEMORY": "its memory ran out",
    "PREEMPTED": "another job took its place",
}
PBS = {**dict.fromkeys("RB", JobState.RUNNING), **dict.fromkeys("ECFX", JobState.ENDED)}
# What sbatch says, also for a certain cluster; what `sbatch --parsable` and qsub say
SUBMITTED = re.compile(r"^Submitted batch job (\d+)(?: on cluster \S+)?\s*$", re.M)
NUMBER = re.compile(r"^(\d+)(?:\[\])?(?:[.;](?=\S*[A-Za-z])\S+)?\s*$", re.M)


def job_number(said: str) -> str:
    """The number of the job that `sbatch` or `qsub` say they have submitted, in their own form.

    Raises `Error` if they name none, or several.
    """
    numbers = set(SUBMITTED.findall(said) or NUMBER.findall(said))
    if len(numbers) == 1:
        return numbers.pop()
    raise Error(
        f"The batch system has not named one job. It said: {said.strip() or 'nothing'}\nIf there "
        "is one in the queue, cancel it. A site's own command has to print what the real one "
        "does, on a line alone: 'Submitted batch job 5', '5', '5;cluster' or '5.server'."
    )


def slurm_states(ids: Iterable[str]) -> States:
    """What Slurm says of jobs; those that it has forgotten are absent.

    Raises `OSError` if it does not answer.
    """
    said = ask("squeue", "--me", "--noheader", "--states=all", "--format=%i|%T|%r")
    states: States = {}
    for line in said.splitlines():
        if line.count("|") < 2:
            continue
        job, word, reason = line.split("|", 2)
        why = word if reason in ("None", "") else reason
        in_words = f"{MEANING[word]} ({why})" if word in MEANING else why
        states[job] = SLURM.get(word, JobState.ENDED), in_words
    return {job: states[job] for job in ids if job in states}


def slurm_queues() -> dict[str, bool]:
    """Slurm's partitions: name -> whether it is up."""
    lines = ask("sinfo", "-a", "-h", "-o", "%R %a").splitlines()
    return {line.split()[0]: line.split()[1] == "up" for line in lines}


def pbs_states(ids: Iterable[str]) -> States:
    """What `qstat -f` of PBS Pro, OpenPBS or Torque says of jobs. Ended ones may be absent."""
    states = read_qstat(ask("qstat", "-f", *ids))
    return {job: states[job] for job in ids if job in states}


def read_qstat(text: str) -> States:
    """The jobs that `qstat -f` has listed, by their numbers, without the name of the server."""
    states: States = {}
    # Long lines are broken, and go on after a tab; Slurm's qstat begins every line with one
    unwrapped = re.sub(r"\n\t(?![\w.]+ = )", "", text)
    for block in unwrapped.split("Job Id:")[1:]:
        job = block.split(maxsplit=1)[0].partition(".")[0]
        values = dict(re.findall(r"^\s+(\w+) = (.*)$", block, flags=re.M))
        letter = values.get("job_state", "")
        state = PBS.get(letter, JobState.PENDING)
        why = ""
        if state is JobState.PENDING:
            why = values.get("comment", "").strip()
        elif status := values.get("Exit_status") or values.get("exit_status"):
            why = f"exit status {status}"
        states[job] = state, why or f"state {letter}"
    return states


def pbs_queues() -> dict[str, bool]:
    """The queues of PBS: name -> whether jobs may be submitted there, and start."""
    queues = {}
    for text in re.split(r"^Queue:", ask("qstat", "-Q", "-f"), flags=re.M)[1:]:
        is_off = re.search(r"(?i)\b(enabled|started) = (false|no)\b", text)
        queues[text.split()[0]] = not is_off
    return queues


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
    """What is known of a batch system; `submit` is its command to submit a job."""

    name: str
    submit: str
    states: Callable[[Iterable[str]], States]
    queues: Callable[[], dict[str, bool]]


SYSTEMS = {  # by the cluster class of a profile
    "dask_jobqueue.SLURMCluster": BatchSystem("Slurm", "sbatch", slurm_states, slurm_queues),
    "dask_jobqueue.PBSCluster": BatchSystem("PBS", "qsub", pbs_states, pbs_queues),
}


def summary(states: States) -> str:
    """'1 running, 2 pending (Resources)'."""
    counted = Counter(
        state if state is JobState.RUNNING else f"{state} ({why})"
        for state, why in sorted(states.values())
    )
    return ", ".join(f"{number} {what}" for what, number in counted.items()) or "none submitted"
