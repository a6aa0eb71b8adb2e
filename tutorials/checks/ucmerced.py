"""The checks of `ucmerced`: the header of a Slurm job, and the log of a job that has ended.

A header is read as `sbatch` reads it (https://slurm.schedmd.com/sbatch.html), so that it can be
judged where there is no Slurm. Logs are made up, with lines as Slurm prints them.
"""

import math
import re
import shlex

import numpy as np

from tutorials.checks.common import Wrong

TOO_MUCH = 2  # times what is needed: more only makes the job wait longer
GIB = {"K": 1 / 1024**2, "M": 1 / 1024, "": 1 / 1024, "G": 1, "T": 1024}
LONG_NAMES = {
    **{"A": "account", "p": "partition", "n": "ntasks", "c": "cpus-per-task", "t": "time"},
    **{"N": "nodes", "J": "job-name", "o": "output", "e": "error"},
}
ASKED = "account partition ntasks cpus-per-task mem-per-cpu time signal".split()
HARMLESS = "nodes ntasks-per-node mem job-name output error mail-type mail-user comment".split()
ENDS = ("finished", "time limit", "warned", "memory", "cancelled")


def header(answer):
    """Judge `answer(site, need)`, the header of a job script, for jobs drawn at random."""
    random = np.random.default_rng()
    for _ in range(8):
        site, need = any_job(random)
        fits(answer(dict(site), dict(need)), site, need)
    return "any site, any job. Where there is a Slurm, ask it, too: sbatch --test-only"


def any_job(random):
    """A site, its partitions with their limits in minutes, and what a job needs there."""
    limits = random.choice([30, 60, 120, 240, 720, 1440, 2880, 4320], 3, replace=False)
    names = random.choice(["short", "medium", "long", "day", "batch", "cpu"], 3, replace=False)
    partitions = {str(name): int(limit) for name, limit in zip(names, limits)}
    ranks, cpus = random.choice([2, 3, 4, 6, 8, 12], 2, replace=False)
    need = {
        "ranks": int(ranks),
        "cpus": int(cpus),
        "memory": int(random.integers(1, 9)),
        "minutes": int(random.integers(15, max(limits) + 1)),
        "warning": int(random.choice([90, 120, 180, 240, 300])),
    }
    return {"account": f"project_{random.integers(1_000, 9_999)}", "partitions": partitions}, need


def fits(text, site, need):
    """Raise `Wrong` for the first thing in a header that does not fit the site and the need."""
    if isinstance(text, (list, tuple)):
        text = "\n".join(map(str, text))
    if not isinstance(text, str) or not re.match(r"#! */\S*(bash|sh|env \w*sh)\b", text):
        empty = isinstance(text, str) and text[:1].isspace()
        question = "Is the first line empty?" if empty else "Which program is to read the script?"
        raise Wrong(repr(text), "a str whose first line is #!/bin/bash", question)
    options, unread = options_of(text)
    if unread:
        question = "Slurm reads lines that begin with exactly #SBATCH, up to the first command."
        raise Wrong(repr(unread[0]), "a line that Slurm reads", question)
    for name in options:
        if name not in (*ASKED, *HARMLESS):
            question = "Who asked for it? What becomes of the job?"
            raise Wrong(f"--{name}", f"options that the job needs: {', '.join(ASKED)}", question)
    for name, is_right, expected, question in requirements(options, site, need):
        if not is_right:
            yours = f"--{name}={options[name]}" if name in options else f"no --{name}"
            raise Wrong(yours, expected, f"{question}\n  site: {site}\n  need: {need}")


def options_of(text):
    """The options that `sbatch` reads, as {long name: value}, and the lines that it does not."""
    options, unread, in_header = {}, [], True
    for line in text.splitlines():
        in_header = in_header and (line.startswith("#") or not line.strip())
        if not (in_header and line.startswith("#SBATCH")):
            unread += [line] if re.match(r"\s*#\s*SBATCH", line) else []
            continue
        words = shlex.split(line.removeprefix("#SBATCH"), comments=True)
        while words:
            word = words.pop(0)
            if word.startswith("--"):
                name, has_value, value = word[2:].partition("=")
            else:  # -n 4 or -n4
                name, has_value, value = LONG_NAMES.get(word[1:2], word), word[2:], word[2:]
            if not has_value and words and not words[0].startswith("-"):
                value = words.pop(0)
            options[name] = value
    return options, unread


def requirements(options, site, need):
    """For each option: its name, whether it is right, what is expected, a question."""

    def number(name):
        return int(options[name]) if options.get(name, "").isdigit() else 0

    def same(name, expected, question):
        return name, options.get(name) == str(expected), expected, question

    limits, minutes = site["partitions"], minutes_of(options.get("time", ""))
    partition = min((name for name in limits if limits[name] >= need["minutes"]), key=limits.get)
    most = min(limits[partition], TOO_MUCH * need["minutes"])
    in_time = need["minutes"] <= minutes <= most
    places = number("nodes") * number("ntasks-per-node")
    ranks = number("ntasks") or places
    fit = number("nodes") <= ranks and (places == 0 or places >= ranks)
    memory, gib = "mem-per-cpu", gib_of(options.get("mem-per-cpu", ""))
    if number("nodes") == 1 and "mem" in options:
        memory, gib = "mem", gib_of(options["mem"]) / need["ranks"] / need["cpus"]
    one_memory = not {"mem", "mem-per-cpu"} <= options.keys()
    enough = need["memory"] <= gib <= TOO_MUCH * need["memory"]
    said = options.get("signal", "")
    signal = re.fullmatch(r"(?:R:)?(?:SIG)?(?:TERM|15)@(\d+)", said)
    warned = signal is not None and int(signal[1]) == need["warning"]
    whom = "(B: warns only the shell)" if said.startswith("B:") else ""
    wanted_time = f"{need['minutes']} minutes"
    if minutes >= 0:
        wanted_time += f"; Slurm reads yours as {minutes:g}"
    wanted_memory = f"{need['memory']} GiB for each CPU"
    if gib >= 0:
        wanted_memory += f"; yours is {gib:.2g}"
    wanted_signal = f"SIGTERM for the ranks {need['warning']} s before the limit {whom}"
    return [
        same("account", site["account"], "Who pays?"),
        same("partition", partition, "Which has the smallest limit that is large enough?"),
        ("time", in_time, wanted_time, "What happens at its limit? And which jobs start sooner?"),
        ("ntasks", ranks == need["ranks"], need["ranks"], "A task is a rank. How many are there?"),
        ("nodes", fit, f"nodes for {ranks} ranks", "Do nodes, tasks, tasks on each fit together?"),
        same("cpus-per-task", need["cpus"], "How many CPUs has each rank?"),
        ("mem", one_memory, "--mem or --mem-per-cpu", "Which of the two should Slurm take?"),
        (memory, enough, wanted_memory, "A number alone is in MiB. And is yours for each CPU?"),
        ("signal", warned, wanted_signal, "Which signal asks to end, and who has to save?"),
    ]


def minutes_of(text):
    """Minutes of a time as Slurm writes it: 95, 95:00, 1:35:00, 1-12, 1-12:30 …; else NaN."""
    if not re.fullmatch(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}", text):
        return math.nan
    days, dash, clock = text.rpartition("-")
    parts = [float(part) for part in clock.split(":")]
    if not dash and len(parts) < 3:
        parts = [0.0, *parts]
    hours, minutes, seconds = [*parts, 0.0, 0.0][:3]
    return float(days or 0) * 1440 + hours * 60 + minutes + seconds / 60


def gib_of(text):
    """GiB of a memory size as Slurm writes it: 3G, 3072M, 3072; else NaN."""
    found = re.fullmatch(r"(\d+)([KMGT]?)B?", text.upper())
    return int(found[1]) * GIB[found[2]] if found else math.nan


def log(answer):
    """Judge `answer(log)`: (why a job ended, how many steps were trained in vain)."""
    random = np.random.default_rng()
    for end in random.permutation(ENDS * 3):
        text, cause, lost = any_log(random, end)
        yours = answer(text)
        if not isinstance(yours, (list, tuple)) or len(yours) != 2:
            raise Wrong(repr(yours), (cause, lost), "Which two things do you return?")
        if yours[0] != cause:
            question = "Which line names the cause?"
        elif end == "warned":
            question = "What did the ranks do between the signal and their end?"
        else:
            question = "Which step was the last, and from which would the run go on?"
        if tuple(yours) != (cause, lost):
            raise Wrong(yours, (cause, lost), f"{question}\n\n{text}")
    return "you know why a job ended, and what it cost"


def any_log(random, end):
    """A log, the cause of the job's end, and how many steps were trained in vain.

    `end` is one of `ENDS`. Ranks that were 'warned' of the time limit have saved and left.
    """
    job, node = random.integers(1_000, 99_999), f"node{random.integers(10, 99)}"
    epoch, epochs = (int(random.integers(*ends)) for ends in ((20, 90), (1, 9)))  # steps, saved
    last = epochs * epoch + int(random.integers(1, epoch))
    # the earlier job has saved so many epochs: perhaps all that were ever saved
    begin = int(random.integers(0, epochs + (end != "finished")))
    step = f"step {last}: loss {random.uniform(0.1, 2):.3f}"
    cancelled = f"slurmstepd: error: *** STEP {job}.0 ON {node} CANCELLED AT 2026-11-22T10:00:00"
    oom = f"slurmstepd: error: Detected 1 oom_kill event in StepId={job}.0. Some of the step tasks"
    killed = f"srun: error: {node}: task 0: Terminated"
    left = f"SIGTERM: all ranks left after step {last}, saved"
    said = {
        "finished": ["Done: the weights are saved"],
        "time limit": [step, f"{cancelled} DUE TO TIME LIMIT ***", killed],
        "warned": [step, left, f"srun: error: {node}: tasks 0-1: Exited with exit code 143"],
        "memory": [step, f"{oom} have been OOM Killed.", f"{cancelled} ***", killed],
        "cancelled": [step, f"{cancelled} ***", killed],
    }
    lines = [f"job {job}: 2 ranks on {node}"]
    lines += [f"Resumed from step-{begin * epoch:08d}.pt"] if begin else []
    for number in range(begin + 1, epochs + 1):
        lines.append(f"step {number * epoch}: epoch {number} done, saved")
    lines += said[end]
    lines.insert(int(random.integers(1, len(lines))), "memory in use: 3.1 of 6.0 GiB")
    cause = "time limit" if end == "warned" else str(end)
    return "\n".join(lines), cause, 0 if end in ("warned", "finished") else last - epochs * epoch
