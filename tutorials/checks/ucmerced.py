"""The checks of `ucmerced`: predictions, the header of a Slurm job, four logs, an accuracy.

A header is read as `sbatch` reads it (https://slurm.schedmd.com/sbatch.html), so that it can be
judged where there is no Slurm. Logs are made up, with lines as Slurm prints them. Where an edge
decides, cases are fixed; others are drawn at random.
"""

import copy
import math
import re
import shlex

import numpy as np
import torch.distributed as dist
from scipy.stats import binomtest

import ddp_common as ddp
from tutorials.checks.common import Wrong, enough_workers, named

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
srun: error: node14: tasks 0-1: Terminated
sacct: State TIMEOUT, ExitCode 0:0, MaxRSS 2.9G""",
    2: """job 70231: 2 ranks on node14
step 120: epoch 2 done, saved
step 180: epoch 3 done, saved
step 197: loss 0.981
slurmstepd: error: Detected 1 oom_kill event in StepId=70231.0. Some of the step tasks have
been OOM Killed.
slurmstepd: error: *** STEP 70231.0 ON node14 CANCELLED AT … ***
srun: error: node14: task 1: Out Of Memory
sacct: State OUT_OF_MEMORY, ExitCode 0:125, MaxRSS 3.0G""",
    3: """job 70240: 2 ranks on node11
Resumed from step-00000240.pt
step 360: epoch 6 done, saved
step 402: loss 0.655
SIGTERM: all ranks left after step 402, saved
srun: error: node11: tasks 0-1: Exited with exit code 143
sacct: State FAILED, ExitCode 15:0, MaxRSS 2.1G""",
    4: """job 70244: 2 ranks on node09
step 240: epoch 4 done, saved
step 300: epoch 5 done, saved
step 342: loss 0.690
slurmstepd: error: *** STEP 70244.0 ON node09 CANCELLED AT … ***
srun: error: node09: tasks 0-1: Terminated
sacct: State CANCELLED by 2007, ExitCode 0:15, MaxRSS 2.1G""",
}
READINGS = {1: ("T", 20), 2: ("M", 17), 3: ("W", 0), 4: ("P", 42)}
LETTERS = {
    "T": "Which words stand beside CANCELLED?",
    "M": "Three of the logs say CANCELLED. Which state has sacct?",
    "W": "Who wrote the line with SIGTERM, and what had the ranks done then?",
    "P": "Who stands beside CANCELLED in the line of sacct?",
}


def reading(answer):
    """Judge `answer()`: {number of a log: (letter, steps lost)}, or pairs in their order."""
    given = answer()
    pairs = given if isinstance(given, dict) else dict(enumerate(given or (), start=1))
    strange = [number for number in pairs if str(number) not in map(str, READINGS)]
    if strange:
        raise Wrong(f"log {strange[0]!r}", "the logs 1 to 4", "Which numbers have the logs?")
    for number, (letter, lost) in READINGS.items():
        mine = pairs.get(number, pairs.get(str(number)))
        if isinstance(mine, str):  # "T 20", "T: 20 steps"
            mine = re.sub("[:;,=–—-]", " ", mine).split(maxsplit=1)
        if not isinstance(mine, (tuple, list)) or len(mine) != 2:
            raise Wrong(f"log {number}: {mine!r}", "a letter and a number", "What did you read?")
        yours = f"log {number}: {mine[0]!r}, {mine[1]!r}"
        found = set(re.findall(r"\b[TWMP]\b", str(mine[0]).upper()))
        if not found:
            wanted = "one of T, W, M, P, and then a number"
            raise Wrong(yours, wanted, "Which of both comes first, and is it one of the four?")
        if found != {letter}:
            raise Wrong(yours, "another letter of T, W, M, P", LETTERS[letter])
        steps = re.sub(r"\s*steps?$", "", mine[1].strip()) if isinstance(mine[1], str) else mine[1]
        if steps not in (lost, str(lost)):
            question = "Which step was the last, and which was the last that was saved?"
            raise Wrong(yours, "another number of steps", question)
    return "you know why a job ended, and what it cost"


# An accuracy over ranks with unequal shares, its interval

# (right, all) of rank 0 and rank 1; the first three differ in what a mistake would give
CASES = (
    ((9, 10), (54, 90)),
    ((40, 120), (27, 30)),
    ((0, 0), (63, 80)),  # a rank without an image
    ((50, 60), (0, 0)),
)
MANY = (700, 1_400), (300, 600)  # so many that 93 % and 97 % intervals are not those of 95 %
OF_THREE = ((9, 10), (54, 90), (3, 4)), ((0, 0), (5, 8), (20, 40))


def accuracy(client):
    """The check of an answer that two and three ranks of `client` run, on unequal shares."""

    def check(answer):
        random = np.random.default_rng()
        sizes = random.integers([100, 20], [200, 60], (2, 2))
        rights = random.integers(sizes // 4, sizes)
        drawn = [tuple(zip(*pair)) for pair in zip(rights.tolist(), sizes.tolist())]
        _on_ranks(client, answer, 2, [*CASES, *drawn, MANY])
        with enough_workers(client, 3):
            _on_ranks(client, answer, 3, OF_THREE)
        return "each image counts once, and all ranks know the accuracy of all"

    return check


def _on_ranks(client, answer, ranks, cases):
    """Raise `Wrong` unless the answer is right in each case on so many ranks."""
    given = {"cases": cases, "workers": ranks, "directory": False, "stall_timeout": 30}
    seen = ddp.launch(client, _run_as_rank, answer=answer, **given).result
    for number, case in enumerate(cases):
        _check_case(case, [of_rank[number] for of_rank in seen])


def _run_as_rank(answer, cases):
    """What the answer returns for each case, of all ranks."""
    returned = []
    for case in cases:
        right, size = case[ddp.rank()]
        given = np.arange(size) < right
        np.random.default_rng(size).shuffle(given)
        returned.append(_plain(answer(given)))
    everyones = [None] * ddp.world_size()
    dist.all_gather_object(everyones, returned)
    return everyones


def _plain(returned):
    """(accuracy, low, high) as floats; what it is, as a str, for anything else."""
    if isinstance(returned, dict):
        returned = list(returned.values())
    if isinstance(returned, (tuple, list)) and len(returned) == 2:  # the interval is a pair
        pair = returned[1]
        ends = [pair.low, pair.high] if hasattr(pair, "low") else pair
        returned = [returned[0], *ends] if np.shape(ends) == (2,) else returned
    try:
        values = [float(value) for value in returned]
    except (TypeError, ValueError):
        return repr(returned)
    return values if len(values) == 3 else repr(returned)


def _check_case(case, seen):
    """Raise `Wrong` for the first thing that is not right in what the ranks return."""
    right, n = (sum(numbers) for numbers in zip(*case))
    of_ranks = [f"{right} of {n} on rank {rank}" for rank, (right, n) in enumerate(case)]
    context = f"\n  right: {', '.join(of_ranks)}"
    for rank, values in enumerate(seen):
        if isinstance(values, str):
            ask = "Which three numbers does every rank return?"
            raise Wrong(
                f"rank {rank} returns {values:.80}", "(accuracy, low, high)", ask + context
            )
    for rank, (share, low, high) in enumerate(seen):
        if not math.isclose(share, right / n, abs_tol=6e-4):  # three places are enough
            yours = f"rank {rank}: {share:.4f}"
            raise Wrong(yours, f"{right / n:.4f}", _asks(case, share) + context)
        times = (high - low) / (2 * 1.96 * math.sqrt(share * (1 - share) / n) or math.inf)
        is_width = case != MANY or 0.935 < times < 1.09  # 93 % would be 0.924, 97 % 1.107
        if not is_width or not any(
            np.allclose([low, high], ends, atol=room) for ends, room in _intervals(right, n)
        ):
            ends = binomtest(right, n).proportion_ci(method="wilson")
            ask = "How many images are there on all ranks? How many standard errors make 95 %?"
            wanted = f"about {ends.low:.3f} to {ends.high:.3f}"
            raise Wrong(f"rank {rank}: {low:.3f} to {high:.3f}", wanted, ask + context)


def _intervals(right, n):
    """The ends of 95 % intervals by common methods, each with room for rounding and draws."""
    share = right / n
    error = math.sqrt(share * (1 - share) / n)
    found = [(share - times * error, share + times * error) for times in (1.96, 2)]
    for method in ("wilson", "wilsoncc", "exact"):
        ends = binomtest(right, n).proportion_ci(method=method)
        found.append((ends.low, ends.high))
    return [(ends, 0.04 * (ends[1] - ends[0]) + 0.5 / n) for ends in found]


def _asks(case, share):
    """A question that fits an accuracy which is not right."""
    if not all(n for _, n in case):  # what is wrong for other shares, too, was seen there
        return "One rank has no image here. Does it take part in each exchange all the same?"
    own = [right / n for right, n in case if n]
    if math.isclose(share, 100 * sum(r for r, _ in case) / sum(n for _, n in case), abs_tol=0.01):
        return "Is it a share from 0 to 1?"
    if math.isclose(share, sum(own) / len(own), abs_tol=1e-3) and len(own) > 1:
        return "Does each image count the same, also the one of the smaller share?"
    if any(math.isclose(share, each, abs_tol=1e-3) for each in own) or math.isnan(share):
        return "Whose images does this number speak of? What do ranks exchange?"
    return "Does each image count once?"


# The predictions

WARNED = {
    "on": "right. The ranks finish a step, save it, leave, and go on",
    "back": "not right. So it is without a warning: SIGTERM leaves the time to save",
    "error": "not right. RESTARTS=1 starts again, and the ranks saved when they were warned",
}


def warned(prediction: object) -> str:
    """What became of the first prediction, however it is spelled."""
    if prediction is None or prediction is ...:
        return "You have made no first prediction: the answer is 'on'."
    said = named(prediction, WARNED)
    if said is None:
        return f"Your first prediction was {prediction!r}: which of {', '.join(WARNED)} is that?"
    return f"You said {said!r}: {WARNED[said]}."


def colleagues(prediction: object) -> str:
    """What became of the second prediction, a number in any form."""
    if prediction is None or prediction is ...:
        return "You have made no second prediction: about 83 of 100."
    said = ",".join(map(str, prediction)) if isinstance(prediction, tuple) else str(prediction)
    number = re.search(r"\d+([.,]\d+)?", said)  # a decimal comma makes a tuple: 83,5
    value = float(number[0].replace(",", ".")) if number else math.nan
    value *= 100 if 0 < value < 1 else 1
    if not 0 <= value <= 100:
        return f"Your second prediction was {prediction!r}, which is no number from 0 to 100."
    if value > 90:
        why = "not right. So many intervals hold the *true* accuracy, which has no chance in it"
    elif value >= 76:
        why = "right, about 83. Two chances add up: the colleague's images and yours"
    else:
        why = "not right: about 83. Two accuracies differ by 1.4 standard errors, typically"
    return f"You said {value:g} of 100: {why}."
