"""Answers to exercise A of `ucmerced`: the header of a job."""

LIMITS = '[name for name in limits if limits[name] >= need["minutes"]]'
TIME = "#SBATCH --time={need['minutes']}"
MEMORY = "#SBATCH --mem-per-cpu={need['memory']}G"
SIGNAL = "#SBATCH --signal=TERM@{need['warning']}"
TASKS = "#SBATCH --ntasks={need['ranks']}"
CPUS = "#SBATCH --cpus-per-task={need['cpus']}"
CHOICE = "min(enough, key=limits.get)"
SHELL = "#!/bin/bash"
LAST = 'return "\\n".join(lines)'

RIGHT = {
    "a quoted signal": [(SIGNAL, "#SBATCH --signal='SIGTERM@{need['warning']}'")],
    "signal 15, and a comment": [(SIGNAL, SIGNAL.replace("TERM", "15") + "  # before the limit")],
    "a signal in small letters": [(SIGNAL, SIGNAL.replace("TERM", "sigterm"))],
    "a short name": [(TASKS, "#SBATCH -n {need['ranks']}")],
    "a short name without a blank": [(TASKS, "#SBATCH -n{need['ranks']}")],
    "one node for all": [(TASKS, "#SBATCH --nodes=1 --ntasks-per-node={need['ranks']}")],
    "all tasks on the only node": [(TASKS, "#SBATCH --ntasks-per-node={need['ranks']}")],
    "a node for each": [(TASKS, "#SBATCH --nodes={need['ranks']} --tasks-per-node=1")],
    "memory of the only node": [
        (MEMORY, "#SBATCH --nodes=1 --mem={need['memory'] * need['cpus'] * need['ranks']}G")
    ],
    "MiB": [(MEMORY, "#SBATCH --mem-per-cpu={1024 * need['memory']}")],
    "MiB, said": [(MEMORY, "#SBATCH --mem-per-cpu={1024 * need['memory']}M")],
    "a clock": [(TIME, "#SBATCH --time={need['minutes'] // 60}:{need['minutes'] % 60:02}:00")],
    "minutes and seconds": [(TIME, TIME + ":00")],
    "a short clock": [(TIME, "#SBATCH -t 0-{need['minutes'] // 60}:{need['minutes'] % 60:02}")],
    "half an hour more, within the limit": [
        (TIME, "#SBATCH --time={min(need['minutes'] + 15, limits[min(enough, key=limits.get)])}")
    ],
    "twice the memory": [(MEMORY, MEMORY.replace("}G", " * 2}G"))],
    "bash found by env": [(SHELL, "#!/usr/bin/env bash")],
    "a place for what it prints": [(TASKS, TASKS + " -o job-%j.log -e job-%j.err")],
    "a comment on SBATCH": [(SHELL, SHELL + "\\n# SBATCH: what sbatch reads")],
    "a name": [(SHELL, SHELL + "\\n#SBATCH -J job\\n")],
    "a list": [(LAST, "return lines")],
    "sorted by limit": [(CHOICE, "sorted(enough, key=limits.get)[0]")],
    "pairs": [(CHOICE, "min((limits[name], name) for name in enough)[1]")],
    "a loop": [
        (LIMITS, "list(limits)"),
        (
            "    lines += [",
            "    best = None\n    for name in enough:\n        if limits[name] >= need['minutes']:\n"
            "            if best is None or limits[name] < limits[best]:\n                best = name\n"
            "    lines += [",
        ),
        (CHOICE, "best"),
    ],
}
WRONG = {
    "an array": ([(TASKS, TASKS + " --array=0-3")], "Who asked for it"),
    "an option that does not exist": ([(TASKS, TASKS + " --nonsense=3")], "Who asked for it"),
    "a begin in a week": ([(TASKS, TASKS + " --begin=now+7days")], "Who asked for it"),
    "all GPUs of a node": ([(TASKS, TASKS + " --gres=gpu:8 --exclusive")], "Who asked"),
    "two kinds of memory": ([(MEMORY, MEMORY + " --mem=24G")], "of the two"),
    "a signal for the shell": ([(SIGNAL, SIGNAL.replace("TERM", "B:TERM"))], "who has to save"),
    "in small letters": ([(SIGNAL, SIGNAL.replace("TERM", "b:term"))], "who has to save"),
    "another signal": ([(SIGNAL, SIGNAL.replace("TERM", "USR1"))], "asks to end"),
    "a signal that kills": ([(SIGNAL, SIGNAL.replace("TERM", "KILL"))], "asks to end"),
    "warned in minutes": ([(SIGNAL, SIGNAL.replace("['warning']", "['warning'] // 60"))], "save"),
    "no warning": ([(SIGNAL, "#SBATCH -J job")], "asks to end"),
    "too few places": ([(TASKS, TASKS + " --nodes=1 --ntasks-per-node=1")], "fit together"),
    "more nodes than ranks": ([(TASKS, TASKS + " --nodes=99")], "fit together"),
    "cores for ranks": (
        [(TASKS, TASKS.replace("['ranks']", "['ranks'] * need['cpus']"))],
        "A task",
    ),
    "one task": ([(TASKS, "#SBATCH --ntasks=1")], "A task is a rank"),
    "nodes for ranks": ([(TASKS, "#SBATCH --nodes={need['ranks']}")], "A task is a rank"),
    "all CPUs for each": (
        [(CPUS, CPUS.replace("['cpus']", "['cpus'] * need['ranks']"))],
        "How many CPUs",
    ),
    "memory without a unit": ([(MEMORY, MEMORY[:-1])], "in MiB"),
    "memory of a rank": (
        [(MEMORY, MEMORY.replace("['memory']", "['memory'] * need['cpus']"))],
        "for each CPU",
    ),
    "memory of all on a node": ([(MEMORY, "#SBATCH --mem={need['memory']}G")], "for each CPU"),
    "three times the memory": (
        [(MEMORY, MEMORY.replace("['memory']", "['memory'] * 3"))],
        "for each CPU",
    ),
    "a quarter too little time": (
        [(TIME, TIME.replace("['minutes']", "['minutes'] * 3 // 4"))],
        "at its limit",
    ),
    "hours for minutes": ([(TIME, TIME + ":00:00")], "which jobs start sooner"),
    "the partition's limit": (
        [(TIME, "#SBATCH --time={limits[min(enough, key=limits.get)]}")],
        "start sooner",
    ),
    "three times the time": (
        [(TIME, TIME.replace("['minutes']", "['minutes'] * 3"))],
        "--time|start sooner",
    ),
    "the largest partition": ([(CHOICE, "max(limits, key=limits.get)")], "large enough"),
    "the smallest of all": ([("min(enough,", "min(limits,")], "large enough"),
    "the first in the alphabet": ([(CHOICE, "min(enough)")], "large enough"),
    "the first that is large enough": ([(CHOICE, "enough[0]")], "large enough"),
    "the last": ([(CHOICE, "enough[-1]")], "large enough"),
    "strictly larger": ([(LIMITS, LIMITS.replace(">=", ">"))], "large enough|cannot be judged"),
    "a site that it changes": (
        [
            (
                "    lines += [",
                "    for name in [n for n in limits if limits[n] <= need['minutes']]:\n        del limits[name]\n    enough = list(limits)\n    lines += [",
            )
        ],
        "large enough|cannot be judged",
    ),
    "another account": ([("site['account']", "'mine'")], "Who pays"),
    "no account": (
        [('["#!/bin/bash", f"#SBATCH --account={site[\'account\']}"]', '["#!/bin/bash"]')],
        "Who pays",
    ),
    "blanks around =": ([(TIME, TIME.replace("time=", "time = "))], "an option or its value"),
    "a word that is no option": ([(TIME, TIME + " minutes")], "an option or its value"),
    "a blank": ([(TIME, TIME.replace("#SBATCH", "# SBATCH"))], "exactly #SBATCH"),
    "after a command": ([(TIME, "module load x\\n" + TIME)], "the first command"),
    "no program": ([(SHELL, "#")], "Which program"),
    "any program": ([(SHELL, "#!x")], "Which program"),
    "an empty first line": ([(SHELL, "\\n" + SHELL)], "Is the first line empty"),
    "no line ends": ([(LAST, 'return " ".join(lines)')], "--|Which program|Slurm reads"),
    "printed": ([(LAST, 'print("\\n".join(lines))')], "whose first line"),
}
EQUIVALENT: dict = {}
IN_TESTS = ["a clock", "strictly larger", "hours for minutes", "in small letters"]
