"""Judges what students write about batch jobs: the header of a job script, what a log tells.

A header is read as Slurm's `sbatch` reads it (its manual: https://slurm.schedmd.com/sbatch.html),
so that it can be judged where there is no Slurm; where there is one, `try_here` asks it. Logs are
made up, with lines as Slurm prints them. Relies on no batch system. Promises: every check takes
fresh random inputs, and tells the first thing that is wrong as what was seen, what was expected
and a question.
"""

import math
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ddp_common.teaching.finding import Finding

ROUNDS = 8  # random inputs of a check
GENEROUS = 2  # times what is needed: more of it only makes the job wait longer
PATIENCE = 20  # seconds that Slurm's commands may take to answer
UNITS = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024**2}  # in MiB
SHORT = {
    "A": "account",
    "p": "partition",
    "n": "ntasks",
    "c": "cpus-per-task",
    "t": "time",
    "N": "nodes",
    "J": "job-name",
    "o": "output",
}
NO_SLURM = "no Slurm answers here: on a login node this asks Slurm itself"
CAUSES = ("finished", "time limit", "memory", "cancelled")


@dataclass
class Header:
    """What `sbatch` reads from a job script."""

    first: str = ""
    options: dict[str, str] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)  # directives that come too late


# The header


def read_header(text: str) -> Header:
    """The options that `sbatch` takes from a script.

    As Slurm does, it stops at the first line that is neither empty nor a comment, and takes a line
    for a directive only if it begins with exactly `#SBATCH`.
    """
    lines = text.splitlines()
    header = Header(first=lines[0] if lines else "")
    in_header = True
    for line in lines:
        if line.strip() and not line.startswith("#"):
            in_header = False
        if not line.startswith("#SBATCH"):
            continue
        words = line.removeprefix("#SBATCH").split("#")[0].split()
        if in_header:
            header.options.update(_options(words))
        else:
            header.ignored.append(line)
    return header


def _options(words):
    """{long name: value} of --name=value, --name value, -n value and -nvalue."""
    found, words = {}, list(words)
    while words:
        word = words.pop(0)
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
        else:
            name, value = SHORT.get(word[1:2], word[1:2]), word[2:]
            equals = value
        if not equals and words and not words[0].startswith("-"):
            value = words.pop(0)
        found[name] = value
    return found


def minutes_of(text: str) -> float:
    """Minutes of a time as Slurm writes it. Raises ValueError for anything else.

    These are: minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes,
    days-hours:minutes:seconds.
    """
    days, dash, clock = text.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    if len(parts) > 3 or min(parts) < 0:
        raise ValueError(text)
    if dash:
        hours, minutes, seconds = (parts + [0, 0])[:3]
        return int(days) * 1440 + hours * 60 + minutes + seconds / 60
    if len(parts) == 3:
        return parts[0] * 60 + parts[1] + parts[2] / 60
    minutes, seconds = (parts + [0])[:2]
    return minutes + seconds / 60


def mebibytes_of(text: str) -> float:
    """MiB of a memory size as Slurm writes it; without a unit it is in MiB already."""
    match = re.fullmatch(r"(\d+)([KMGT]?)B?", text.strip(), re.IGNORECASE)
    if match is None:
        raise ValueError(text)
    return int(match[1]) * UNITS[match[2].upper() or "M"]


def any_site(random: np.random.Generator) -> dict:
    """A site that does not exist: an account, and partitions with their limits in minutes."""
    limits = np.sort(random.choice([30, 60, 120, 240, 720, 1440, 2880, 4320], 3, replace=False))
    names = random.permutation(["short", "medium", "long", "day", "batch", "cpu", "shared"])[:3]
    places = random.permutation(3)
    partitions = {str(names[place]): int(limits[place]) for place in places}
    return {"account": f"project_{random.integers(1_000, 9_999)}", "partitions": partitions}


def any_need(random: np.random.Generator, longest: int) -> dict:
    """What a job needs that fits into a partition with a limit of `longest` minutes."""
    ranks, cores = random.choice([2, 3, 4, 6, 8, 12, 16], 2, replace=False)
    return {
        "ranks": int(ranks),
        "cores": int(cores),
        "memory": int(random.integers(1, 9)),
        "minutes": int(random.integers(15, longest + 1)),
        "warning": int(random.choice([90, 120, 180, 240, 300])),
    }


def fault_in_header(text: object, site: dict, need: dict) -> Finding | None:
    """The first thing that is wrong with a header for this site and this need, or None."""
    if not isinstance(text, str):
        return Finding(f"{text!r}", "the lines of the header as a str", "What do you return?")
    header = read_header(text)
    if not header.first.startswith("#!"):
        question = "Which program shall read the script?"
        return Finding(f"a first line {header.first!r}", "one that begins with #!", question)
    if header.ignored:
        question = "How far does Slurm read before it takes the rest for commands?"
        return Finding(f"{header.ignored[0]!r} after a command", "it before", question)
    judges = (_account, _partition, _time, _ranks, _memory, _signal)
    return next((fault for judge in judges if (fault := judge(header.options, site, need))), None)


def _said(options, name):
    return f"--{name}={options[name]}" if name in options else f"no --{name}"


def _account(options, site, need):
    if options.get("account") == site["account"]:
        return None
    return Finding(_said(options, "account"), site["account"], "Who pays for the hours?")


def _partition(options, site, need):
    """The one with the shortest limit that is long enough."""
    enough = {
        name: limit for name, limit in site["partitions"].items() if limit >= need["minutes"]
    }
    shortest = min(enough.values())
    best = [name for name, limit in enough.items() if limit == shortest]
    if options.get("partition") in best:
        return None
    question = (
        f"The job needs {need['minutes']} minutes, the partitions allow {site['partitions']}. "
        "Which is the smallest that is large enough?"
    )
    return Finding(_said(options, "partition"), " or ".join(best), question)


def _time(options, site, need):
    limit = site["partitions"][options["partition"]]
    expected = f"{need['minutes']} minutes"
    try:
        minutes = minutes_of(options.get("time", ""))
    except ValueError:
        question = "How does Slurm write hours, minutes and seconds?"
        return Finding(_said(options, "time"), expected, question)
    yours = f"--time={options['time']}, which Slurm reads as {minutes:g} minutes"
    if minutes < need["minutes"]:
        return Finding(yours, expected, "What becomes of a job that reaches its limit?")
    if minutes > min(limit, GENEROUS * need["minutes"]):
        question = f"The partition allows {limit} minutes. And which jobs start sooner?"
        return Finding(yours, expected, question)
    return None


def _ranks(options, site, need):
    wanted = {"ntasks": need["ranks"], "cpus-per-task": need["cores"]}
    if "ntasks" not in options and {"nodes", "ntasks-per-node"} <= set(options):
        product = _number(options["nodes"]) * _number(options["ntasks-per-node"])
        options = {**options, "ntasks": str(product)}
    for name, number in wanted.items():
        if _number(options.get(name, "")) != number:
            question = "A task is a rank. How many cores has each of them?"
            return Finding(_said(options, name), str(number), question)
    return None


def _number(text):
    return int(text) if text.isdigit() else -1


def _memory(options, site, need):
    expected = f"{need['memory']} GiB for each core"
    cores = need["ranks"] * need["cores"]
    name = "mem-per-cpu"
    share = 1
    if name not in options and options.get("nodes") == "1":
        name = "mem"
        share = cores
    try:
        memory = mebibytes_of(options.get(name, "")) / share
    except ValueError:
        return Finding(_said(options, name), expected, "In which option, in which unit?")
    yours = f"--{name}={options[name]}, which is {memory / 1024:.2g} GiB for each core"
    if not need["memory"] * 1024 <= memory <= GENEROUS * need["memory"] * 1024:
        return Finding(yours, expected, "Without a unit Slurm counts in MiB. And per what?")
    return None


def _signal(options, site, need):
    expected = f"SIGTERM for the ranks {need['warning']} s before the limit"
    value = options.get("signal", "")
    # R: lets the job overlap a reservation, which is none of our business
    match = re.fullmatch(r"(?:R:)?(?:SIG)?(\w+)@(\d+)", value)
    if value.startswith("B:"):
        question = "B: warns the batch shell alone. Who has to save?"
        return Finding(_said(options, "signal"), expected, question)
    if match is None or match[1] not in ("TERM", "15") or int(match[2]) != need["warning"]:
        question = "Which signal asks a process to end, and how long before?"
        return Finding(_said(options, "signal"), expected, question)
    return None


def check_header(answer: Callable) -> bool:
    """Whether `answer(site, need)` returns the header that the site and the job ask for."""
    random = np.random.default_rng()
    for _ in range(ROUNDS):
        site = any_site(random)
        need = any_need(random, max(site["partitions"].values()))
        fault = fault_in_header(answer(dict(site), dict(need)), site, need)
        if fault:
            print(f"{fault.in_a_line()}\n  site: {site}\n  need: {need}")
            return False
    print("right: any site, any job. Where there is a Slurm, ask it, too")
    return True


def try_here(answer: Callable, account: str = "") -> str:
    """What the Slurm of this machine says of a header for its own partitions; submits nothing.

    Without `account` the line that names one is left out. Where there is no Slurm, it says so.
    """
    if shutil.which("sbatch") is None or shutil.which("sinfo") is None:
        return NO_SLURM
    asked = _asked(["sinfo", "--noheader", "--format=%R|%l"])
    partitions = {}
    for line in asked.stdout.split():
        name, _, limit = line.partition("|")
        partitions[name] = 525_600 if limit == "infinite" else int(minutes_of(limit))
    if asked.returncode or not partitions:
        return NO_SLURM
    site = {"account": account or "none", "partitions": partitions}
    need = {"ranks": 2, "cores": 1, "memory": 1, "minutes": 5, "warning": 60}
    if max(partitions.values()) < need["minutes"]:
        return f"No partition here allows {need['minutes']} minutes: {partitions}"
    text = answer(site, need)
    fault = fault_in_header(text, site, need)
    if fault:
        return fault.in_a_line()
    if not account:
        lines = text.splitlines(keepends=True)
        text = "".join(line for line in lines if "account" not in _options(line.split()[1:]))
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "job.sh")
        script.write_text(text.rstrip("\n") + "\n\nsrun hostname\n")
        said = _asked(["sbatch", "--test-only", str(script)])
    return " ".join((said.stdout + said.stderr).split())


def _asked(command):
    """The command, when it has ended; one that does not answer in time counts as failed."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        said = f"{command[0]} does not answer within {PATIENCE} s"
        return subprocess.CompletedProcess(command, 1, "", said)


# The log


def any_log(random: np.random.Generator, cause: str, warned: bool = False) -> tuple[str, int]:
    """The log of a job that ended by `cause`, and how many steps were trained in vain.

    With `warned` the ranks got a signal before the time limit, saved and left.
    """
    job = int(random.integers(1_000, 99_999))
    epoch = int(random.integers(20, 90))  # steps
    saved = int(random.integers(1, 9))  # epochs
    begin = int(random.integers(0, saved))
    lines = [f"job {job}: 2 ranks on node{random.integers(10, 99)}"]
    if begin:
        lines.append(f"Resumed from step-{begin * epoch:08d}.pt")
    for number in range(begin + 1, saved + 1):
        lines.append(f"step {number * epoch}: epoch {number} done, saved")
    last = saved * epoch + int(random.integers(1, epoch))
    if cause == "finished":
        lines += ["Done: the weights are saved"]
        return _dated(random, lines), 0
    lines.append(f"step {last}: loss {random.uniform(0.1, 2):.3f}")
    lost = last - saved * epoch
    if warned:
        lines.append(f"SIGTERM: all ranks left after step {last}, saved")
        lines.append("srun: error: tasks 0-1: Exited with exit code 143")
        return _dated(random, lines), 0
    cancelled = f"slurmstepd: error: *** STEP {job}.0 ON node CANCELLED AT 2026-11-22T10:00:00"
    if cause == "time limit":
        lines.append(f"{cancelled} DUE TO TIME LIMIT ***")
    if cause == "cancelled":
        lines.append(f"{cancelled} ***")
    if cause == "memory":
        lines.append(
            f"slurmstepd: error: Detected 1 oom-kill event(s) in StepId={job}.0 cgroup. Some of "
            "your processes may have been killed by the cgroup out-of-memory handler."
        )
        lines.append("srun: error: task 1: Out Of Memory")
        lines.append(f"{cancelled} ***")
    lines.append("srun: error: task 0: Terminated")
    return _dated(random, lines), lost


def _dated(random, lines):
    """The lines, with one that says nothing somewhere in between."""
    place = int(random.integers(1, len(lines)))
    noise = random.choice(["memory in use: 3.1 of 6.0 GiB", "the oldest checkpoint was removed"])
    return "\n".join([*lines[:place], str(noise), *lines[place:]])


def check_log(answer: Callable) -> bool:
    """Whether `answer(log)` returns the cause and the number of steps that were lost."""
    random = np.random.default_rng()
    cases = [(cause, False) for cause in CAUSES] + [("time limit", True)]
    for place in random.permutation(len(cases) * 3):
        cause, warned = cases[place % len(cases)]
        log, lost = any_log(random, cause, warned)
        yours = answer(log)
        if yours == (cause, lost):
            continue
        question = "Which line names the cause, and from which step would the run go on?"
        print(Finding(f"{yours!r}", f"{(cause, lost)}", question).in_a_line())
        print(log)
        return False
    print("right: you know why a job ended, and what it cost")
    return True


# RESTARTS


def restarts_needed(training: int, limit: int, warning: int, start: int) -> int | None:
    """The smallest RESTARTS with which a run gets through. All arguments are minutes.

    A run of `training` minutes goes on in jobs of `limit` minutes. Each needs `start` minutes
    until its ranks train, and they leave `warning` minutes before its limit. None: never.
    """
    useful = limit - warning - start
    if useful <= 0:
        return None
    return math.ceil(training / useful) - 1


def check_restarts(answer: Callable) -> bool:
    """Whether `answer(training, limit, warning, start)` is what `restarts_needed` returns."""
    random = np.random.default_rng()
    for turn in range(6 * ROUNDS):
        limit, warning, start = (
            int(random.integers(*ends)) for ends in ((20, 90), (1, 9), (1, 5))
        )
        training = int(random.integers(5, 600))
        if turn % 3 == 0:  # it fits exactly
            training = (limit - warning - start) * int(random.integers(1, 6))
        if turn % 6 == 1:  # nothing is left to train in
            limit = warning + start - int(random.integers(0, 2))
        expected = restarts_needed(training, limit, warning, start)
        yours = answer(training, limit, warning, start)
        if yours == expected and type(yours) is type(expected):
            continue
        given = f"training={training}, limit={limit}, warning={warning}, start={start}"
        question = "How many minutes of each job go into training? The first is no restart."
        if expected is not None and type(yours) is int and abs(yours - expected) == 1:
            question = f"You are off by one. {question}"
        print(Finding(f"{yours!r}", f"{expected!r}", question).in_a_line())
        print(f"  {given}")
        return False
    print("right: as many jobs as it takes, and the first of them is no restart")
    return True
