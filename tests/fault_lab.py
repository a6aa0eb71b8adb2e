"""The fault lab: break a real run of two ranks in every way that is known, and measure what becomes of it.

    make fault-lab

For each fault, moment and rank: what the caller gets, how soon after the fault, when the last process of the run is gone, and whether
a second launch in the same directory ends with the weights of an undisturbed run, bit for bit.
"""

import contextlib
import functools
import json
import logging
import os
import random
import re
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
import psutil
import torch
from distributed import Client

from ddp_common import connect, launch
from ddp_common.clusters import protection
from ddp_common.errors import Error, RankFailed
from ddp_common.teaching import faults

STALL_TIMEOUT = 2.0  # seconds, for the faults below that only it notices; a rank that is slow on a busy machine is not one of them
PATIENCE = 30.0  # seconds after which the lab says that something hangs
MOMENTS = ("start", "step", "save")
SAVED_STEP = 6  # of `faults.train`'s 14: there is a save at every third
MEMORY_LIMIT = 3 * 2**28  # bytes
RANK_FAULTS = (
    "raise",
    "KeyboardInterrupt",
    "child with a session of its own",
    "sys.exit(3)",
    "os._exit(0)",
    "SIGKILL",
    "SIGSEGV",
    "SIGSTOP",
    "worker killed",
)
MEMORY_FAULTS = ("memory limit exceeded", "memory limit exceeded by children")
LEAVES = "leaves the loop one batch early"
RANK_MARK = b"DDP_RANK_PROCESS="  # every rank has its own number there, and hands it down
STALLS = ("SIGSTOP", "deadlock", LEAVES)
DISK_FULL = "disk full while saving"
CLIENT_KILLED, CTRL_C, SCHEDULER_KILLED, NANNY_KILLED = (
    "client killed",
    "Ctrl-C",
    "scheduler killed",
    "worker and nanny killed",
)


@dataclass
class Outcome:
    """What became of one fault. Times are seconds since the fault; None where there is nobody to tell, or nothing to measure."""

    fault: str
    when: str
    rank: object
    error: object = None  # the exception that the caller got
    said: str = ""  # its first line, or what the program said
    told: float = None
    gone: float = None
    left: int = 0  # processes of the run that were still alive after PATIENCE
    resumed_equal: bool = None


def cases():
    """Every (fault, moment, rank) that happens to a rank on a cluster which stays."""
    yield from (
        (fault, when, rank) for fault in RANK_FAULTS for when in MOMENTS for rank in (0, 1)
    )
    yield from ((fault, "step", rank) for fault in ("deadlock", *MEMORY_FAULTS) for rank in (0, 1))
    yield from ((LEAVES, "end", rank) for rank in (0, 1))
    yield from ((faults.RESULT, "end", 0), (DISK_FULL, "save", 0))


def run_case(client, fault, when, rank, undisturbed, folder):
    """Break a run as told and resume it. `undisturbed` are the weights to end with; `folder` an empty one for marks and runs."""
    mark, outcome = Path(folder) / "mark", Outcome(fault, when, rank)
    options = {"workers": 2, "directory": Path(folder) / "run"} | (
        {"stall_timeout": STALL_TIMEOUT} if fault in STALLS else {}
    )
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
    if fault in MEMORY_FAULTS:
        client.run(_limit_memory, MEMORY_LIMIT)
    try:
        launch(client, function, **options, **arguments)
    except Error as error:
        outcome.error, outcome.said = error, str(error).splitlines()[0]
    caught = time.time()
    outcome.told = caught - _struck_at(mark, outcome)
    _wait_until_gone(outcome, options["directory"], mark)
    client.run(_limit_memory, None)
    _resume(client, outcome, options["directory"], undisturbed)
    return outcome


def _struck_at(mark, outcome):
    if (struck := faults.struck_at(mark)) is None:
        raise Error(
            f"The fault {outcome.fault!r} did not strike. What happened instead: {outcome.error or outcome.said}"
        )
    return struck


def _limit_memory(limit, dask_worker):
    dask_worker.memory_manager.memory_limit = limit


def _resume(client, outcome, directory, undisturbed):
    outcome.resumed_equal = torch.equal(
        launch(client, faults.train, workers=2, directory=directory).result, undisturbed
    )


def processes_of(directory):
    """Living processes (pids) of a run: its ranks and what they have started."""
    return members(rank_pids(directory))


def rank_pids(directory):
    """The process numbers of all ranks that a run has started, in all its attempts; they are in its log."""
    log = Path(directory) / "log.txt"
    return (
        [int(pid) for pid in re.findall(r"rank \d+ started: process (\d+) on", log.read_text())]
        if log.exists()
        else []
    )


def members(pids):
    """Living processes of the ranks `pids`: those of their sessions, and all that has inherited their environment, in any session."""
    leaders = set(pids)
    return [
        process.pid
        for process in psutil.process_iter()
        if _rank_of(process.pid) & leaders and is_alive(process.pid)
    ]


def _rank_of(pid):
    """The ranks that a process may be of: the leader of its session, and the one that its environment names."""
    ranks = set()
    with contextlib.suppress(ProcessLookupError):
        ranks.add(os.getsid(pid))
    with contextlib.suppress(OSError):
        marks = [
            entry
            for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if entry.startswith(RANK_MARK)
        ]
        ranks |= {int(mark.removeprefix(RANK_MARK)) for mark in marks}
    return ranks


def is_alive(pid):
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def _wait_until_gone(outcome, directory, mark):
    deadline = time.time() + PATIENCE
    while (left := processes_of(directory)) and time.time() < deadline:
        time.sleep(0.005)
    outcome.left, outcome.gone = len(left), time.time() - _struck_at(mark, outcome)


def run_client_case(client, fault, when, undisturbed, folder):
    """The same for a client that is killed or gets Ctrl-C: a program of its own, on the cluster of `client`."""
    mark, directory, outcome = (
        Path(folder) / "mark",
        Path(folder) / "run",
        Outcome(fault, when, "client"),
    )
    process = subprocess.Popen(
        [sys.executable, __file__, client.scheduler.address, fault, when, mark, directory],
        env=environment_for(client, folder),
        stderr=subprocess.PIPE,
        text=True,
    )
    outcome.said = process.communicate(timeout=2 * PATIENCE)[1].strip().splitlines()[-1:] or [
        f"(ended by signal {-process.returncode})"
    ]
    outcome.said, ended = outcome.said[0], time.time()
    if fault == CTRL_C:
        outcome.told = ended - _struck_at(mark, outcome)
    _wait_until_gone(outcome, directory, mark)
    _resume(client, outcome, directory, undisturbed)
    return outcome


def environment_for(client, folder):
    """Environment variables for another program of this user that connects to the cluster of `client`: Dask's own, for TLS."""
    if not client.scheduler.address.startswith("tls://"):
        return dict(os.environ)
    folder = Path(folder)
    if not (folder / "key.pem").exists():
        protection.write_credentials(client.security, folder)
    prefix = "DASK_DISTRIBUTED__COMM__TLS__"
    files = {"CA_FILE": "cert.pem", "CLIENT__CERT": "cert.pem", "CLIENT__KEY": "key.pem"}
    return {**os.environ, **{prefix + name: str(folder / file) for name, file in files.items()}}


def victim(address, fault, when, mark, directory):
    """A program that trains, and that one of its own ranks kills or interrupts."""
    number = signal.SIGINT if fault == CTRL_C else signal.SIGKILL
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell's background jobs are deaf to it
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
    """The same for a scheduler that is killed, or a worker with its nanny; the run is resumed on the cluster of `client`."""
    outcome = Outcome(fault, when, "scheduler" if fault == SCHEDULER_KILLED else 1)
    mark, directory = Path(folder) / "mark", Path(folder) / "run"
    with separate_cluster(folder) as (scheduler, address), Client(address) as other:
        other.wait_for_workers(2, timeout=60)
        launch(other, faults.train, workers=2, directory=Path(folder) / "first")
        strike = (
            functools.partial(os.kill, scheduler.pid, signal.SIGKILL)
            if fault == SCHEDULER_KILLED
            else fault
        )
        try:
            launch(
                other,
                faults.inject(faults.train, strike, when=when, step=SAVED_STEP, mark=mark),
                workers=2,
                directory=directory,
                pause=0.1,
            )
        except Error as error:
            outcome.error, outcome.said = error, str(error).splitlines()[0]
        outcome.told = time.time() - _struck_at(mark, outcome)
        _wait_until_gone(outcome, directory, mark)
    _resume(client, outcome, directory, undisturbed)
    return outcome


@contextlib.contextmanager
def separate_cluster(folder, *prefix, workers=2):
    """A scheduler and workers as processes of their own; yields (the scheduler's process, its address). `prefix` is a command to start
    the workers with."""
    file, dask = Path(folder) / "scheduler.json", [sys.executable, "-m", "dask"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    scheduler = subprocess.Popen(
        [
            *dask,
            "scheduler",
            "--host",
            "127.0.0.1",
            "--port",
            "0",
            "--dashboard-address",
            "127.0.0.1:0",
            "--scheduler-file",
            file,
        ],
        **quiet,
    )
    each = [
        *prefix,
        *dask,
        "worker",
        "--nthreads",
        "1",
        "--no-dashboard",
        "--memory-limit",
        "0",
        "--local-directory",
        folder,
        "--scheduler-file",
        file,
    ]
    processes = [scheduler, *(subprocess.Popen(each, **quiet) for _ in range(workers))]
    try:
        deadline = time.time() + PATIENCE
        while not (file.exists() and file.read_text().endswith("}")):  # it is not written at once
            if time.time() > deadline:
                raise Error(f"dask scheduler did not start within {PATIENCE} s.")
            time.sleep(0.05)
        yield scheduler, json.loads(file.read_text())["address"]
    finally:
        for process in processes:
            process.kill()  # what they have started ends with them
        for process in processes:
            process.wait()


def main(report=functools.partial(print, flush=True)):
    """Run every case and print the table."""
    outcomes = []
    logging.getLogger("distributed").setLevel(
        logging.CRITICAL + 1
    )  # what Dask has to say of killed clients and schedulers

    def show(outcome):
        outcomes.append(outcome)
        report(
            LINE.format(
                outcome.fault,
                outcome.when,
                str(outcome.rank),
                *(f"{x:.2f}" if x is not None else "" for x in (outcome.told, outcome.gone)),
                str(outcome.left),
                {True: "yes", False: "NO", None: ""}[outcome.resumed_equal],
                outcome.said[:110],
            )
        )

    report(
        LINE.format(
            "fault", "when", "rank", "told s", "gone s", "left", "same", "what the caller gets"
        )
    )
    with connect("local", workers=3) as client, tempfile.TemporaryDirectory() as root:
        undisturbed = launch(
            client, faults.train, workers=2, directory=Path(root) / "undisturbed"
        ).result
        for number, case in enumerate(cases()):
            show(run_case(client, *case, undisturbed, _folder(root, number)))
        for number, (fault, when) in enumerate(
            (fault, when) for fault in (CLIENT_KILLED, CTRL_C) for when in MOMENTS
        ):
            show(
                run_client_case(
                    client, fault, when, undisturbed, _folder(root, f"client-{number}")
                )
            )
        for number, (fault, when) in enumerate(
            (fault, when) for fault in (SCHEDULER_KILLED, NANNY_KILLED) for when in MOMENTS
        ):
            show(
                run_cluster_case(
                    client, fault, when, undisturbed, _folder(root, f"cluster-{number}")
                )
            )
        report(
            f"\nfrom a kill to the first step after the restart, warm: {recovery(client, Path(root) / 'recovery'):.2f} s"
        )
    at_once = [outcome for outcome in outcomes if "stalled" not in outcome.said]
    told, gone = (
        [getattr(each, name) for each in at_once if getattr(each, name) is not None]
        for name in ("told", "gone")
    )
    report(
        f"median from the fault to the caller's exception {statistics.median(told):.2f} s, longest {max(told):.2f} s; to the last process gone "
        f"{statistics.median(gone):.2f} s, longest {max(gone):.2f} s (without the {len(outcomes) - len(at_once)} stalls, whose time-out was "
        f"{STALL_TIMEOUT:g} s)\nprocesses left: {sum(each.left for each in outcomes)}; resumed with other weights: "
        f"{sum(each.resumed_equal is False for each in outcomes)} of {len(outcomes)}"
    )


LINE = "{:<33} {:<6} {:<9} {:>7} {:>7} {:>5} {:>5}  {}"


def _folder(root, name):
    folder = Path(root) / str(name)
    folder.mkdir()
    return folder


def recovery(client, directory):
    """Seconds from a SIGKILL to the first training step of the attempt that follows, on a warm cluster of two ranks."""
    mark = directory.with_suffix(".mark")
    run = launch(
        client,
        faults.inject(faults.train, "SIGKILL", mark=mark),
        workers=2,
        restarts=1,
        directory=directory,
    )
    restarted = next(
        number for number, record in enumerate(run.records) if record.get("event") == "restart"
    )
    return next(
        record["time"] for record in run.records[restarted + 1 :] if "loss" in record
    ) - faults.struck_at(mark)


@dataclass
class Survived:
    """A run that was killed `kills` times against one that was not: whether the weights are identical, and the relative difference."""

    kills: int
    identical: bool
    difference: float
    seconds: float


def survive_kills(client, folder, kills, ranks, seed=0):
    """Train while random ranks are killed at random times. `ranks` are the numbers of ranks that the attempts take in turn.

    One number: a single launch with that many restarts, dropout included. Several: a launch for each attempt, without dropout.
    """
    chance, directory, began = random.Random(seed), Path(folder) / "disturbed", time.time()
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
                pause=0.02,
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
    victim(*sys.argv[1:]) if sys.argv[1:] else main()
