"""The fault lab: break a real run of two ranks in every known way, and measure what becomes of it.

    make fault-lab

For each fault, moment and rank: what the caller gets, how soon after the fault, when the last
process of the run is gone, and whether a second launch in the same directory ends with the weights
of an undisturbed run, bit for bit.
"""

import contextlib
import functools
import itertools
import logging
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import cloudpickle
import torch
from distributed import Client

sys.path.append(str(Path(__file__).parents[1] / "tests"))  # what it shares with the tests

import faults_on_purpose as faults
from patience import PATIENCE
from processes import environment_for, processes_of, separate_cluster

from dask_ranks.run.job import RankFailed
from ddp_common import connect, inject, launch
from ddp_common.errors import Error

STALL_TIMEOUT = 2.0  # seconds, for the faults below that only it notices; see `run_case`
MOMENTS = ("start", "step", "save")
SAVED_STEP = 6  # of `faults.train`'s 14: there is a save at every third
LEAVES = "leaves the loop one batch early"
CONDITION = "collective under a condition"
OTHER_SIZE = "collective of another size"
LOADER_WORKER = "loader worker killed"
RESULT = "result that cannot be pickled"
STALLS = ("stop", "hang", CONDITION, OTHER_SIZE, LEAVES)
DISK_FULL = "disk full while saving"
CLIENT_KILLED = "client killed"
CTRL_C = "Ctrl-C"
SCHEDULER_KILLED = "scheduler killed"
NANNY_KILLED = "worker and nanny killed"


@dataclass
class Outcome:
    """What became of one fault.

    Times are seconds since the fault; None where there is nobody to tell, or nothing to measure.
    """

    fault: str
    when: str
    rank: object
    error: object = None  # the exception that the caller got
    said: str = ""  # its first line, or what the program said
    told: float = None
    gone: float = None
    left: int = 0  # processes of the run that were still alive after PATIENCE
    resumed_equal: bool = None


# At every moment, on rank 0 and on another
MATRIX = ("raise", "kill", "worker killed")
# At one moment: what happens then is the same at others
ONCE = (
    ("KeyboardInterrupt", "step", 1),
    ("child with a session of its own", "step", 1),
    ("sys.exit(3)", "start", 0),
    ("os._exit(0)", "step", 0),
    ("SIGSEGV", "save", 1),
    ("stop", "start", 1),
    ("stop", "step", 0),
    ("hang", "step", 1),
    (CONDITION, "step", 0),
    (OTHER_SIZE, "step", 1),
    (LOADER_WORKER, "step", 0),
    (LEAVES, "end", 0),
    (LEAVES, "end", 1),
    (RESULT, "end", 0),
    (DISK_FULL, "save", 0),
)


def cases():
    """Every (fault, moment, rank) that happens to a rank on a cluster which stays."""
    return [*itertools.product(MATRIX, MOMENTS, (0, 1)), *ONCE]


def run_case(client, fault, when, rank, undisturbed, folder, stall_timeout=STALL_TIMEOUT):
    """Break a run as told and resume it.

    `undisturbed` are the weights to end with; `folder` is an empty one for marks and runs.
    `stall_timeout` (s) must be longer than a busy machine holds up a rank that is sound.
    """
    mark = Path(folder) / "mark"
    outcome = Outcome(fault, when, rank)
    options = {"workers": 2, "directory": Path(folder) / "run"}
    if fault in STALLS:
        options["stall_timeout"] = stall_timeout
    arguments = {
        LEAVES: {"leaves_early": rank},
        DISK_FULL: {"file_limit": 2000, "on_error": "stop"},
    }.get(fault, {})
    if arguments:
        function = functools.partial(faults.train, mark=str(mark))
    else:
        function = faults.inject(
            faults.train, fault, rank=rank, when=when, step=SAVED_STEP, mark=mark
        )
    try:
        launch(client, function, **options, **arguments)
    except Error as error:
        outcome.error, outcome.said = error, str(error).splitlines()[0]
    caught = time.time()
    outcome.told = caught - _struck_at(mark, outcome)
    _wait_until_gone(outcome, options["directory"], mark)
    _resume(client, outcome, options["directory"], undisturbed)
    return outcome


def _struck_at(mark, outcome):
    if (struck := faults.struck_at(mark)) is None:
        instead = outcome.error or outcome.said
        raise Error(f"The fault {outcome.fault!r} did not strike. What happened: {instead}")
    return struck


def _resume(client, outcome, directory, undisturbed):
    resumed = launch(client, faults.train, workers=2, directory=directory)
    outcome.resumed_equal = torch.equal(resumed.result, undisturbed)


def _wait_until_gone(outcome, directory, mark):
    deadline = time.time() + PATIENCE
    while (left := processes_of(directory)) and time.time() < deadline:
        time.sleep(0.005)
    outcome.left = len(left)
    outcome.gone = time.time() - _struck_at(mark, outcome)


def run_client_case(client, fault, when, undisturbed, folder):
    """The same for a client that is killed or gets Ctrl-C.

    It is a program of its own, on the cluster of `client`.
    """
    mark, directory = Path(folder) / "mark", Path(folder) / "run"
    outcome = Outcome(fault, when, "client")
    process = subprocess.Popen(
        [sys.executable, __file__, client.scheduler.address, fault, when, mark, directory],
        env=environment_for(client, folder),
        stderr=subprocess.PIPE,
        text=True,
    )
    _, errors = process.communicate(timeout=2 * PATIENCE)
    _, interrupt, note = errors.strip().rpartition("\nKeyboardInterrupt\n")
    words = " ".join(note.split())
    outcome.said = words if interrupt else f"(ended by signal {-process.returncode}) {words}"
    ended = time.time()
    if fault == CTRL_C:
        outcome.told = ended - _struck_at(mark, outcome)
    _wait_until_gone(outcome, directory, mark)
    _resume(client, outcome, directory, undisturbed)
    return outcome


def victim(address, fault, when, mark, directory):
    """A program that trains, and that one of its own ranks kills or interrupts."""
    number = signal.SIGINT if fault == CTRL_C else signal.SIGKILL
    # a shell's background jobs are deaf to it
    signal.signal(signal.SIGINT, signal.default_int_handler)
    function = faults.inject(
        faults.train,
        functools.partial(os.kill, os.getpid(), number),
        rank=1,
        when=when,
        step=SAVED_STEP,
        mark=mark,
    )
    with Client(address) as client:
        launch(client, function, workers=2, directory=directory, pause=0.1)


def run_cluster_case(client, fault, when, undisturbed, folder):
    """The same for a scheduler that is killed, or a worker with its nanny.

    The run is resumed on the cluster of `client`.
    """
    outcome = Outcome(fault, when, "scheduler" if fault == SCHEDULER_KILLED else 1)
    mark, directory = Path(folder) / "mark", Path(folder) / "run"
    with separate_cluster(folder) as (scheduler, address), Client(address) as other:
        other.wait_for_workers(2, timeout=2 * PATIENCE)
        launch(other, faults.train, workers=2, directory=Path(folder) / "first")
        strike = fault
        if fault == SCHEDULER_KILLED:
            strike = functools.partial(os.kill, scheduler.pid, signal.SIGKILL)
        train = faults.inject(faults.train, strike, when=when, step=SAVED_STEP, mark=mark)
        try:
            launch(other, train, workers=2, directory=directory, pause=0.1)
        except Error as error:
            outcome.error, outcome.said = error, str(error).splitlines()[0]
        outcome.told = time.time() - _struck_at(mark, outcome)
        _wait_until_gone(outcome, directory, mark)
    _resume(client, outcome, directory, undisturbed)
    return outcome


LINE = "{:<33} {:<6} {:<9} {:>7} {:>7} {:>5} {:>5}  {}"
HEAD = ("fault", "when", "rank", "told s", "gone s", "left", "same", "what the caller gets")


def main():
    """Run every case and print the table."""
    outcomes = []

    def show(outcome):
        outcomes.append(outcome)
        print(_row(outcome), flush=True)

    # what Dask has to say of killed clients and schedulers
    logging.getLogger("distributed").setLevel(logging.CRITICAL + 1)
    print(LINE.format(*HEAD), flush=True)
    with connect("local", workers=3) as client, tempfile.TemporaryDirectory() as root:
        first = launch(client, faults.train, workers=2, directory=Path(root) / "undisturbed")
        undisturbed = first.result
        for number, case in enumerate(cases()):
            folder = _folder(root, number)
            show(run_case(client, *case, undisturbed, folder))
        for number, (fault, when) in enumerate(
            itertools.product((CLIENT_KILLED, CTRL_C), MOMENTS)
        ):
            folder = _folder(root, f"client-{number}")
            show(run_client_case(client, fault, when, undisturbed, folder))
        for number, (fault, when) in enumerate(
            itertools.product((SCHEDULER_KILLED, NANNY_KILLED), MOMENTS)
        ):
            folder = _folder(root, f"cluster-{number}")
            show(run_cluster_case(client, fault, when, undisturbed, folder))
        seconds = recovery(client, Path(root) / "recovery")
        print(f"\nfrom a kill to the first step after the restart, warm: {seconds:.2f} s")
    print(_summary(outcomes), flush=True)


def _row(outcome):
    times = (outcome.told, outcome.gone)
    return LINE.format(
        outcome.fault,
        outcome.when,
        str(outcome.rank),
        *("" if seconds is None else f"{seconds:.2f}" for seconds in times),
        str(outcome.left),
        {True: "yes", False: "NO", None: ""}[outcome.resumed_equal],
        outcome.said[:110],
    )


def _figures(outcomes):
    """What the table comes to; stalls apart, which take as long as their time-out."""
    at_once = [each for each in outcomes if "stalled" not in each.said]
    return {
        "told": [each.told for each in at_once if each.told is not None],
        "gone": [each.gone for each in at_once if each.gone is not None],
        "stalls": len(outcomes) - len(at_once),
        "after_timeout": [each.told - STALL_TIMEOUT for each in outcomes if each not in at_once],
        "blamed_wrongly": sum(_is_blamed_wrongly(each) for each in outcomes),
        "left": sum(each.left for each in outcomes),
        "others": sum(each.resumed_equal is False for each in outcomes),
    }


def _is_blamed_wrongly(outcome):
    """Whether a stall's exception names another rank than the one that was broken.

    A tensor of another size that makes gloo end a process is no stall: that one may be either.
    """
    return "stalled" in outcome.said and outcome.error.rank != outcome.rank


def _summary(outcomes):
    found = _figures(outcomes)
    told, gone = found["told"], found["gone"]
    return (
        f"median from the fault to the caller's exception {statistics.median(told):.2f} s, "
        f"longest {max(told):.2f} s; to the last process gone {statistics.median(gone):.2f} s, "
        f"longest {max(gone):.2f} s (without the {found['stalls']} stalls, whose time-out was "
        f"{STALL_TIMEOUT:g} s; the exception came {max(found['after_timeout']):.2f} s after it at "
        f"most, and named another rank than the broken one {found['blamed_wrongly']} times)\n"
        f"processes left: {found['left']}; resumed with other weights: "
        f"{found['others']} of {len(outcomes)}"
    )


def _folder(root, name):
    folder = Path(root) / str(name)
    folder.mkdir()
    return folder


def recovery(client, directory):
    """Seconds from a SIGKILL to the first step of the next attempt, on two warm ranks."""
    mark = directory.with_suffix(".mark")
    killed = inject(faults.train, "kill", mark=mark)
    run = launch(client, killed, workers=2, restarts=1, directory=directory)
    events = [record.get("event") for record in run.records]
    after = run.records[events.index("restart") + 1 :]
    first_step = next(record["time"] for record in after if "loss" in record)
    return first_step - faults.struck_at(mark)


@dataclass
class Survived:
    """A run that was killed `kills` times, against one that was not.

    Whether the weights are identical, and their relative difference.
    """

    kills: int
    identical: bool
    difference: float
    seconds: float


def survive_kills(client, folder, kills, ranks, seed=0):
    """Train while random ranks are killed at random times.

    `ranks` are the numbers of ranks that the attempts take in turn. One number: a single launch
    with that many restarts, dropout included. Several: a launch for each attempt, without dropout.
    """
    chance = random.Random(seed)
    directory = Path(folder) / "disturbed"
    began = time.time()
    arguments = {"epochs": 2 * kills, "every_steps": 1, "dropout": 0.5 if len(ranks) == 1 else 0.0}
    undisturbed = launch(
        client, faults.train, workers=ranks[0], directory=Path(folder) / "undisturbed", **arguments
    ).result
    killed = []
    killer = threading.Thread(
        target=_kill_at_random, args=(directory, kills, killed, chance), daemon=True
    )
    killer.start()
    for attempt in range(2 * kills + 1):
        with contextlib.suppress(RankFailed):
            run = launch(
                client,
                faults.train,
                workers=ranks[attempt % len(ranks)],
                restarts=2 * kills if len(ranks) == 1 else 0,
                directory=directory,
                pause=0.1,
                **arguments,
            )
            break
    difference = ((run.result - undisturbed).norm() / undisturbed.norm()).item()
    return Survived(
        len(killed), torch.equal(run.result, undisturbed), difference, time.time() - began
    )


def _kill_at_random(directory, kills, killed, chance):
    while len(killed) < kills:
        time.sleep(chance.uniform(0.05, 0.4))
        if alive := processes_of(directory):
            killed.append(chance.choice(alive))
            with contextlib.suppress(ProcessLookupError):
                os.kill(killed[-1], signal.SIGKILL)


cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import it
if __name__ == "__main__":
    if sys.argv[1:]:
        victim(*sys.argv[1:])
    else:
        main()
