"""ddp_common beside its peers: the same small training under each, as its documentation says.

    python tests/benchmarks/peers/measure.py [--output FILE.json] [--only NAME]
                                             [--peer NAME] [--turns 2]

| name   | what                                                                                |
|--------|-------------------------------------------------------------------------------------|
| code   | versions, and the lines that a user writes (task.py and the probe are not counted)  |
| launch | from the start of a program to the first step of both ranks; the same for a second  |
|        | launch in the same program; a step of the loop, without saves. All take turns       |
| raise  | rank 1 raises in the second epoch: what the caller gets, and when                   |
| killed | the same of SIGKILL                                                                 |
|        | The run that was killed goes on with 2 ranks, and with 3: how many samples of that  |
|        | epoch are in the weights twice, and how many never (results `resume`)               |

Each peer has a script beside this file, which names the pages that it follows. Everything runs on
the CPU, with gloo and one thread a rank. A peer that is not installed is left out, and the result
says so; submitit is measured where Slurm answers, or can be started (tests/hpc). Two ranks, unless
said otherwise. Promises: when it ends, no process that it has started is left.
"""

import ast
import collections
import contextlib
import importlib.metadata
import io
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import tokenize
from pathlib import Path
from typing import NamedTuple

import psutil

sys.path.append(str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parents[2]))
sys.path.append(str(Path(__file__).resolve().parents[2] / "hpc"))

import measuring
import probe
import task
from measuring import single

HERE = Path(__file__).resolve().parent
GIVE_UP = 90  # seconds after which a run is ended
FIRST_STEPS = 20  # of a launch, which are not timed
NEVER = "1000000"  # steps
BROKEN_EPOCH = 1  # in which rank 1 raises, or is killed
MISSING = "not installed"
NO_SLURM = "no Slurm here"
NO_ACCOUNTS = "not measured: this Slurm keeps no accounts, which submitit asks"
TORCHRUN = "-m torch.distributed.run --standalone --nproc-per-node {ranks} {script}"


class Peer(NamedTuple):
    """A way to start ranks."""

    package: str  # as pip has it
    script: str  # beside this file
    command: str = ""  # of Python; "": a program calls it (call.py), as a notebook would


PEERS = {
    "ddp_common": Peer("ddp-common", "with_ddp_common"),
    "torchrun": Peer("torch", "with_torchrun", TORCHRUN),
    "Ray Train": Peer("ray", "with_ray"),
    "accelerate": Peer("accelerate", "with_accelerate"),
    "Fabric": Peer("lightning", "with_fabric", "{script}"),
    "submitit": Peer("submitit", "with_submitit"),
}


# Running a script


class Ran(NamedTuple):
    """A run of a script that has ended. Times are s since 1970."""

    began: float
    ended: float
    code: int | None  # the exit status; None: it was ended after GIVE_UP
    output: str  # of all its processes
    calls: list[dict]  # of call.py, for a peer that is called from a program
    lines: list[dict]  # of the probe
    struck: float | None  # when the fault struck


def run(peer, folder, *, launches=1, ranks=2, fault="", more=None):
    """Run a peer's script in `folder`, where it finds the checkpoints of the run before."""
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as apart:
        log = Path(apart) / "log"
        log.mkdir()
        environment = {
            **os.environ,
            **(more or {}),
            "PYTHONPATH": str(HERE),
            "OMP_NUM_THREADS": "1",
            "RANKS": str(ranks),
            "HOME": apart,  # nobody's settings, and nothing is left there
            "PEERS_LOG": str(log),
            "PEERS_FAULT": fault,
            "PEERS_RAY": f"{apart}/ray",
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        (folder / "called.json").unlink(missing_ok=True)
        began = time.time()
        with open(folder / "output.txt", "w") as output:
            process = subprocess.Popen(
                command_of(peer, launches, ranks),
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = process.wait(GIVE_UP * launches)
            except subprocess.TimeoutExpired:
                code = None
            ended = time.time()
        end_all(log)
        process.wait()
        called = folder / "called.json"
        mark = log / "mark"
        return Ran(
            began,
            ended,
            code,
            (folder / "output.txt").read_text(errors="replace"),
            json.loads(called.read_text()) if called.exists() else [],
            read_lines(log),
            float(mark.read_text()) if mark.exists() else None,
        )


def command_of(peer, launches, ranks):
    if not peer.command:
        return [sys.executable, str(HERE / "call.py"), peer.script, str(launches)]
    given = {"ranks": ranks, "script": HERE / f"{peer.script}.py"}
    return [sys.executable, *(word.format(**given) for word in peer.command.split())]


def end_all(log):
    """End what a run has left: all processes that have its PEERS_LOG among their variables."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("PEERS_LOG") == str(log):
                process.send_signal(signal.SIGKILL)


def read_lines(log):
    """The lines of the probe, of all ranks and launches, each with the id of its process."""
    lines = []
    for path in sorted(log.glob("*.jsonl")):
        for text in path.read_text().splitlines():
            with contextlib.suppress(json.JSONDecodeError):  # a process was killed as it wrote
                lines.append({"process": path.stem, **json.loads(text)})
    return lines


# Launches and steps


def measure_launch(peers, options):
    cold, warm, step = (collections.defaultdict(list) for _ in range(3))
    why = {}
    for turn in range(options.turns):
        order = list(peers) if turn % 2 == 0 else list(reversed(peers))
        for name in order:
            launches = 1 if peers[name].command else 2
            more = {**(options.more.get(name) or {}), "SAVE_EVERY": NEVER}
            with tempfile.TemporaryDirectory() as folder:
                ran = run(peers[name], Path(folder), launches=launches, more=more)
            begins = [ran.began] + [call["began"] for call in ran.calls[1:]]
            found = first_steps(ran.lines, begins)
            if None in found:
                why[name] = f"failed: {last_line(ran.output)}"
                continue
            cold[name].append(found[0])
            warm[name] += found[1:]
            step[name].append(1e3 * step_seconds(ran.lines))
    results = []
    for name, peer in peers.items():
        no_second = "none: a command is a launch" if peer.command else why.get(name, "")
        results += [
            several("launch", f"{name}: cold, to both ranks' first step, s", cold[name], why),
            several("launch", f"{name}: again in the same program, s", warm[name], no_second),
            several("launch", f"{name}: a step, ms", step[name], why),
        ]
    return results


def several(name, what, values, otherwise):
    """A result with the median of `values`, and all of them; words where there are none."""
    if not values:
        peer = what.partition(":")[0]
        words = otherwise.get(peer, "") if isinstance(otherwise, dict) else otherwise
        return single(name, what, words)
    return {**single(name, what, statistics.median(values)), "all_ours": list(values)}


def first_steps(lines, begins, ranks=2):
    """For each launch, the seconds from its begin until the last rank has made its first step.

    None for a launch in which not all ranks did. A process belongs to the last launch that began
    before its first line.
    """
    first = {}
    for line in lines:
        process = line["process"]
        first[process] = min(line["time"], first.get(process, line["time"]))
    of_launch = [[] for _ in begins]
    for moment in first.values():
        number = max(number for number, begin in enumerate(begins) if begin <= moment)
        of_launch[number].append(moment)
    return [
        max(moments) - begin if len(moments) == ranks else None
        for begin, moments in zip(begins, of_launch)
    ]


def step_seconds(lines):
    """The median time from one step to the next, without each process's FIRST_STEPS."""
    times = collections.defaultdict(list)
    for line in lines:
        times[line["process"]].append(line["time"])
    seconds = []
    for moments in times.values():
        moments = sorted(moments)[FIRST_STEPS:]
        seconds += [after - before for before, after in zip(moments, moments[1:])]
    return statistics.median(seconds)


def last_line(output):
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return lines[-1][:120] if lines else "no output"


# Failures


def measure_raise(peers, options):
    results = []
    for name, peer in peers.items():
        with tempfile.TemporaryDirectory() as folder:
            ran = run(peer, Path(folder), fault="raise", more=options.more.get(name))
        keep(options, name, "raise", ran)
        gets, seconds = learned(ran)
        where = place_of(ran, says_message_and_line)
        results += [
            single("raise", f"{name}: the caller gets", gets),
            single("raise", f"{name}: the message, and the line that raised it", where),
            single("raise", f"{name}: after, s", seconds),
        ]
    return results


def measure_killed_and_resume(peers, options):
    """Both start from the same run, which ends when its rank 1 is killed.

    submitit learns of a kill from Slurm's accounts. Where there are none its rank 1 raises.
    """
    killed, resumed = [], []
    for name, peer in peers.items():
        with tempfile.TemporaryDirectory() as folder:
            folder = Path(folder)
            more = options.more.get(name)
            is_told = name != "submitit" or slurm_keeps_accounts(more)
            fault = "SIGKILL" if is_told else "raise"
            first = run(peer, folder / "first", fault=fault, more=more)
            keep(options, name, fault, first)
            if is_told:
                killed += what_a_kill_says(name, first)
            else:
                killed.append(single("killed", f"{name}: the caller gets", NO_ACCOUNTS))
            for ranks in (2, 3):
                shutil.copytree(folder / "first", folder / str(ranks))
                second = run(peer, folder / str(ranks), ranks=ranks, more=more)
                keep(options, name, f"resumed-{ranks}", second)
                count = counted(first, second)
                if ranks == 2:
                    again = count.again if count else "failed"
                    resumed.append(single("resume", f"{name}: steps made again", again))
                what = f"{name}: {ranks} ranks, samples twice, never"
                resumed.append(single("resume", what, in_words(count, second)))
    return killed + resumed


def what_a_kill_says(name, ran):
    gets, seconds = learned(ran)
    return [
        single("killed", f"{name}: the caller gets", gets),
        single("killed", f"{name}: that it was rank 1", place_of(ran, says_rank)),
        single("killed", f"{name}: that it was SIGKILL", place_of(ran, says_sigkill)),
        single("killed", f"{name}: after, s", seconds),
    ]


def learned(ran):
    """What the caller gets, and how long after the fault (s)."""
    if ran.struck is None:
        return f"failed: {last_line(ran.output)}", None
    error = ran.calls[0]["error"] if ran.calls else None
    if error:
        return f"`{error['type']}`", ran.calls[0]["ended"] - ran.struck
    if ran.code is None:
        return f"nothing within {GIVE_UP} s", None
    return f"exit code {ran.code}", ran.ended - ran.struck


def place_of(ran, is_said):
    """Where something is said: in the exception, or on the screen."""
    error = ran.calls[0]["error"] if ran.calls else None
    if error and is_said(error["text"]):
        return "in the exception"
    return "printed" if is_said(ran.output) else "no"


def says_message_and_line(text):
    return probe.MESSAGE in text and "probe.stepped(" in text


def says_sigkill(text):
    return re.search(r"SIGKILL|signal 9|exit ?code[: ]+-9", text, re.IGNORECASE) is not None


def says_rank(text):
    """Whether rank 1 is named, and shortly after that something became of it."""
    ended = r"(SIGKILL|signal 9|failed|died|terminated|exit ?code)"
    found = re.search(rf"\brank\W{{1,9}}1\b.{{0,300}}?{ended}", text, re.IGNORECASE | re.DOTALL)
    return found is not None


# What is in the weights


class Count(NamedTuple):
    """Of one epoch, after a resume."""

    again: int  # steps that had been made before the failure, and are made again
    twice: int  # samples that are in the weights more than once
    never: int


def counted(first, second):
    """What became of the broken epoch; None if the resumed run made no step."""
    if not second.lines:
        return None
    return count_samples(first.lines, second.lines, BROKEN_EPOCH, task.SAMPLES, probe.FAULT_STEP)


def in_words(count, ran):
    """The samples that are in the weights twice, and those that never are."""
    if count is None:
        return f"failed: {last_line(ran.output)}"
    words = f"{count.twice:,}, {count.never:,}"
    return words if ran.code == 0 else f"{words} (exit code {ran.code})"


def count_samples(first, second, epoch, samples, broken_at):
    """Count the samples of `epoch` that are in the weights at the end.

    `first` and `second` are the lines of two runs, of which the second goes on from a checkpoint
    of the first, which ended with `broken_at` steps. Steps that the checkpoint does not have are
    not in the weights: the second run's first line says how many it had.
    """
    restored = min(line["steps"] for line in second) - 1
    kept = [line for line in first if line["steps"] <= restored] + second
    seen = collections.Counter()
    for line in kept:
        if line["epoch"] == epoch:
            seen.update(line["samples"])
    twice = sum(count > 1 for count in seen.values())
    return Count(broken_at - restored, twice, samples - len(seen))


# Code


def measure_code(peers, options):
    results = []
    for name, peer in peers.items():
        lines, imports = lines_of_code((HERE / f"{peer.script}.py").read_text())
        results += [
            single("code", f"{name}: version", importlib.metadata.version(peer.package)),
            single("code", f"{name}: lines", lines),
            single("code", f"{name}: lines of imports besides", imports),
        ]
    return results


def lines_of_code(source):
    """Lines that a user writes, and lines of imports, which are not among the former.

    Neither blank lines nor comments nor docstrings count, nor what is the benchmark's own.
    """
    imports, docstrings = set(), set()
    for node in ast.walk(ast.parse(source)):
        inside = range(getattr(node, "lineno", 0), (getattr(node, "end_lineno", 0) or 0) + 1)
        if isinstance(node, ast.Import | ast.ImportFrom):
            imports.update(inside)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            docstrings.update(inside)
    written = set()
    ignored = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.ENDMARKER}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in ignored and token.string.strip():
            written.update(range(token.start[0], token.end[0] + 1))
    of_benchmark = {
        number for number, line in enumerate(source.splitlines(), 1) if "probe" in line
    }
    written -= of_benchmark | docstrings
    return len(written - imports), len(written & imports)


# Slurm, for submitit


@contextlib.contextmanager
def slurm(folder):
    """The variables of a Slurm that answers, or is started for this; None if there is none."""
    from slurm_here import running_slurm, why_not

    if shutil.which("sinfo") and subprocess.run(["sinfo"], capture_output=True).returncode == 0:
        yield {}
    elif why_not() is not None:
        yield None
    else:
        folder.chmod(0o755)
        with running_slurm(folder / "slurm") as variables:
            yield variables


def slurm_keeps_accounts(variables):
    asked = subprocess.run(["sacct"], env={**os.environ, **variables}, capture_output=True)
    return asked.returncode == 0


# The command line


def is_installed(peer):
    try:
        importlib.metadata.version(peer.package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def left_out(installed, has_slurm):
    """For each peer that is not measured, a result that says why."""
    results = []
    for name in PEERS:
        if name not in installed:
            results.append(single("code", f"{name}: version", MISSING))
        elif name == "submitit" and not has_slurm:
            results.append(
                single("launch", f"{name}: cold, to both ranks' first step, s", NO_SLURM)
            )
    return results


def keep(options, name, what, ran):
    """With --keep: what a run has printed, and what its caller got."""
    if options.keep:
        options.keep.mkdir(parents=True, exist_ok=True)
        said = [call["error"] for call in ran.calls]
        path = options.keep / f"{name}-{what}.txt"
        path.write_text(f"{ran.output}\n\nexit code {ran.code}\n{json.dumps(said, indent=2)}\n")


def check_peers(installed):
    """Leave with a sentence if there is nobody to compare with."""
    others = set(installed) - {"ddp_common", "torchrun"}
    if not others:
        sys.exit(
            "None of the peers is installed (ray, accelerate, lightning, submitit), so there is "
            "nothing to compare with. Install them with: pip install -e '.[peers]'"
        )


MEASURES = {
    "code": measure_code,
    "launch": measure_launch,
    "raise": measure_raise,
    "killed": measure_killed_and_resume,
}


def main():
    parser = measuring.command_line(__doc__, MEASURES, "peers")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--peer", choices=list(PEERS), help="only this one")
    parser.add_argument(
        "--keep", type=Path, metavar="FOLDER", help="where to leave what was printed"
    )
    options = parser.parse_args()
    installed = {name: peer for name, peer in PEERS.items() if is_installed(peer)}
    check_peers(installed)
    machine = measuring.describe_machine()
    measuring.show_head(machine)
    with tempfile.TemporaryDirectory() as folder, slurm(Path(folder)) as variables:
        results = left_out(installed, variables is not None)
        measuring.show(results)
        peers = {
            name: peer
            for name, peer in installed.items()
            if options.peer in (None, name) and (name != "submitit" or variables is not None)
        }
        options.more = {"submitit": variables}
        results += measuring.take(MEASURES, options.only, peers, options)
    measuring.write(options.output, machine, results)


if __name__ == "__main__":
    main()
