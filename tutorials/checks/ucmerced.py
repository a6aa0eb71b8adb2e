"""The checks of `ucmerced`: the header of a Slurm job, four logs, an accuracy and a verdict.

A header is read as `sbatch` reads it (https://slurm.schedmd.com/sbatch.html), so that it can be
judged where there is no Slurm. Logs are made up, with lines as Slurm prints them. Where an edge
decides, cases are fixed; others are drawn at random.
"""

import copy
import math
import re
import shlex

import numpy as np
from scipy.stats import binomtest

from tutorials.checks.common import Wrong

TOO_MUCH = 2  # times what is needed: more only makes the job wait longer
GIB = {"K": 1 / 1024**2, "M": 1 / 1024, "": 1 / 1024, "G": 1, "T": 1024}
LONG_NAMES = {
    **{"A": "account", "p": "partition", "n": "ntasks", "c": "cpus-per-task", "t": "time"},
    **{"N": "nodes", "J": "job-name", "o": "output", "e": "error"},
}
ASKED = "account partition ntasks cpus-per-task mem-per-cpu time signal".split()
HARMLESS = "nodes ntasks-per-node mem job-name output error mail-type mail-user comment".split()
ALIASES = {"tasks-per-node": "ntasks-per-node"}  # sbatch takes both
# Partitions whose order by name, by limit and in the dict differ; the job's minutes, the right one
EDGES = (
    ({"batch": 720, "short": 60, "day": 1440}, 60, "short"),  # exactly its limit
    ({"batch": 720, "short": 60, "day": 1440}, 61, "batch"),
    ({"medium": 240, "cpu": 4320, "short": 120}, 30, "short"),  # all are large enough
    ({"cpu": 4320, "long": 2880, "batch": 1440}, 1440, "batch"),
    ({"day": 1440, "medium": 2880, "batch": 4320}, 1500, "medium"),
)


def header(answer):
    """Judge `answer(site, need)`, the header of a job script: fixed jobs, and others at random."""
    random = np.random.default_rng()
    for partitions, minutes, _ in EDGES:
        site, need = any_job(random)
        site["partitions"], need["minutes"] = dict(partitions), minutes
        fits(answer(copy.deepcopy(site), dict(need)), site, need)
    for _ in range(8):
        site, need = any_job(random)
        fits(answer(copy.deepcopy(site), dict(need)), site, need)
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
        question = "Slurm reads lines that begin with exactly #SBATCH, up to the first command. "
        question += "Each word there is an option or its value."
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
            unread += [line] if re.match(r"\s*#\s*SBATCH\s+--?\w", line) else []
            continue
        words = shlex.split(line.removeprefix("#SBATCH"), comments=True)
        while words:
            word = words.pop(0)
            if not word.startswith("-"):  # a time such as `1 day`, or blanks around `=`
                unread.append(line)
                break
            if word.startswith("--"):
                name, has_value, value = word[2:].partition("=")
            else:  # -n 4 or -n4
                name, has_value, value = LONG_NAMES.get(word[1:2], word), word[2:], word[2:]
            if not has_value and words and not words[0].startswith("-"):
                value = words.pop(0)
            options[ALIASES.get(name, name)] = value
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
    on_each = number("ntasks-per-node")
    places = number("nodes") * on_each
    ranks = number("ntasks") or places or on_each  # without --nodes all are on one
    fit = number("nodes") <= ranks and (places == 0 or places >= ranks)
    memory, gib = "mem-per-cpu", gib_of(options.get("mem-per-cpu", ""))
    if number("nodes") == 1 and "mem" in options:
        memory, gib = "mem", gib_of(options["mem"]) / need["ranks"] / need["cpus"]
    one_memory = not {"mem", "mem-per-cpu"} <= options.keys()
    enough = need["memory"] <= gib <= TOO_MUCH * need["memory"]
    said = options.get("signal", "")
    signal = re.fullmatch(r"(?:R:)?(?:SIG)?(?:TERM|15)@(\d+)", said.upper())
    warned = signal is not None and int(signal[1]) == need["warning"]
    whom = "(B: warns only the shell)" if said.upper().startswith("B:") else ""
    wanted_time = f"{need['minutes']} to {most} minutes"
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


# What an answer says of four logs

LOGS = {
    1: """job 70223: 2 ranks on node14
Resumed from step-00000240.pt
memory in use: 5.8 of 6.0 GiB
step 260: loss 0.718
slurmstepd: error: *** STEP 70223.0 ON node14 CANCELLED AT … DUE TO TIME LIMIT ***
srun: error: node14: task 0: Terminated""",
    2: """job 70231: 2 ranks on node14
step 120: epoch 2 done, saved
step 180: epoch 3 done, saved
step 197: loss 0.981
slurmstepd: error: Detected 1 oom_kill event in StepId=70231.0. Some of the step tasks have
been OOM Killed.
slurmstepd: error: *** STEP 70231.0 ON node14 CANCELLED AT … ***
srun: error: node14: task 1: Terminated""",
    3: """job 70240: 2 ranks on node11
Resumed from step-00000240.pt
step 360: epoch 6 done, saved
step 402: loss 0.655
SIGTERM: all ranks left after step 402, saved
srun: error: node11: tasks 0-1: Exited with exit code 143""",
    4: """job 70244: 2 ranks on node09
step 240: epoch 4 done, saved
step 300: epoch 5 done, saved
step 342: loss 0.690
slurmstepd: error: *** STEP 70244.0 ON node09 CANCELLED AT … ***
srun: error: node09: task 0: Terminated""",
}
READINGS = {1: ("T", 20), 2: ("M", 17), 3: ("W", 0), 4: ("P", 42)}
LETTERS = {
    "T": "Which words stand beside CANCELLED?",
    "M": "Three of the logs say CANCELLED. Which line of this one says why?",
    "W": "Who wrote the line with SIGTERM, and what had the ranks done then?",
    "P": "What is missing here that stands beside CANCELLED in log 1?",
}


def reading(answer):
    """Judge `answer()`: {number of a log: (letter, steps in vain)}, or pairs in their order."""
    given = answer()
    pairs = given if isinstance(given, dict) else dict(enumerate(given or (), start=1))
    for number, (letter, vain) in READINGS.items():
        mine = pairs.get(number, pairs.get(str(number)))
        if not isinstance(mine, (tuple, list)) or len(mine) != 2:
            raise Wrong(f"log {number}: {mine!r}", "a letter and a number", "What did you read?")
        yours = f"log {number}: {mine[0]!r}, {mine[1]!r}"
        found = set(re.findall(r"\b[TWMP]\b", str(mine[0]).upper()))
        if found != {letter}:
            raise Wrong(yours, "another letter of T, W, M, P", LETTERS[letter])
        if mine[1] not in (vain, str(vain)):
            question = "Which step was the last, and which was the last that was saved?"
            raise Wrong(yours, "another number of steps", question)
    return "you know why a job ended, and what it cost"


# An accuracy from unequal ranks, its interval, a verdict

UNSURE = "not told apart"


def models(only_a, only_b, both, neither):
    """Arrays of bool: of each image whether A was right, and whether B was."""
    counts = only_a, only_b, both, neither
    a = np.repeat([True, False, True, False], counts)
    b = np.repeat([False, True, True, False], counts)
    return a, b


def dealt(a, b, sizes):
    """The pair of each rank, which has so many of the images; the last one has the rest."""
    ends = np.cumsum(sizes)
    return list(zip(np.split(a, ends), np.split(b, ends)))


# (images right by A only, by B only, by both, by neither; shares of ranks; verdict; a question)
PAIRED = "Both models have judged the same images. What is the difference on each of them?"
NO_CHOICE = "Which differences does the interval contain?"
CASES = (
    ((18, 6, 276, 100), (300,), "A", PAIRED),  # A's interval holds the accuracy of B
    ((6, 18, 276, 100), (150, 150), "B", PAIRED),
    ((70, 51, 230, 49), (200,), UNSURE, NO_CHOICE),  # and here it does not
    ((0, 0, 300, 100), (100, 100), UNSURE, "The two models are equal here. Which is better?"),
    ((90, 20, 200, 90), (17, 0), "A", "Which rank has how many images?"),  # one rank has none
)


def report(answer):
    """Judge `answer(ranks)`: (accuracy of A, low, high, verdict)."""
    for counts, sizes, verdict, question in CASES:
        fits_ranks(answer, dealt(*models(*counts), sizes), verdict, question)
    random = np.random.default_rng()
    for _ in range(8):
        only_a, only_b = random.permutation([int(random.integers(4, 12)), 40])
        a, b = models(only_a, only_b, *random.integers(100, 250, 2))
        order = random.permutation(len(a))
        ranks = dealt(a[order], b[order], random.integers(0, 60, 2))
        fits_ranks(answer, ranks, "A" if only_a > only_b else "B", PAIRED)
    return "each image counts once, and the verdict is that of the images that both have judged"


def fits_ranks(answer, ranks, verdict, question):
    """Raise `Wrong` for the first thing in a report on these ranks that is not right."""
    given = answer([(a.copy(), b.copy()) for a, b in ranks])
    shares = "; ".join(f"{a.sum()} of {len(a)}" for a, _ in ranks)
    context = f"\n  A on each rank: {shares}"
    if isinstance(given, dict):
        given = list(given.values())
    given = list(given) if isinstance(given, (tuple, list)) else [given]
    if len(given) == 3 and len(np.shape(given[1])) == 1:  # the interval is a pair
        given = [given[0], *given[1], given[2]]
    if len(given) != 4:
        expected = "an accuracy, two ends of an interval, a verdict"
        raise Wrong(f"{given!r:.100}", expected, "Which four things do you return?")
    a = np.concatenate([first for first, _ in ranks])
    accuracy, low, high = (float(number) for number in given[:3])
    if not math.isclose(accuracy, a.mean(), abs_tol=1e-4):
        ask = "Does each image count once? And is it a share from 0 to 1?"
        raise Wrong(f"{accuracy:.4f}", f"{a.mean():.4f}", ask + context)
    ends = binomtest(int(a.sum()), len(a)).proportion_ci(method="wilson")
    room = 0.14 * (ends.high - ends.low) / 2  # other methods differ by less
    if abs(low - ends.low) > room or abs(high - ends.high) > room:
        ask = "How many images are there? And how many standard errors make 95 %?"
        wanted = f"about {ends.low:.3f} to {ends.high:.3f}"
        raise Wrong(f"{low:.3f} to {high:.3f}", wanted, ask + context)
    if verdict_of(given[3]) != verdict:
        raise Wrong(repr(given[3]), repr(verdict), question + context)


def verdict_of(text):
    """'A', 'B' or `UNSURE`, however it is written; None if it is none of these."""
    if re.search(r"\b(not|no|neither|none|equal|same|unsure)\b", str(text).lower()):
        return UNSURE
    letters = set(re.findall(r"\b[AB]\b", str(text).upper()))
    return letters.pop() if len(letters) == 1 else None
