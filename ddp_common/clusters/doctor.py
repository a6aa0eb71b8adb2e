"""Checks of what usually goes wrong, from the packages up to a sum over all ranks.

`make doctor CLUSTER=slurm` looks at the cluster of a profile. Relies on `connect` for the cluster.
Promises: each check is a line as soon as it is made, with what to do unless all is well; none
waits for ever; nothing is downloaded; no cluster and no file is left.
"""

import contextlib
import importlib.metadata
import math
import os
import platform
import re
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle
import dask
import psutil
from distributed.comm import get_address_host

from ddp_common.client.launch import launch
from ddp_common.clusters import shipping
from ddp_common.clusters.connect import connect
from ddp_common.clusters.jobs import system_of
from ddp_common.clusters.profiles import is_batch, read_profile
from ddp_common.clusters.queues import ask
from ddp_common.errors import Error
from ddp_common.run.places import IS_CLONE, REPOSITORY, new_directory
from ddp_common.values import whole_number
from ddp_common.without_dask.launchers import LAUNCHERS

OK, WARNING, FAILED, NOT_TRIED = "ok", "warning", "FAILED", "not tried"
ROW = "{:<10} {:<14} {}"

RANK_TIMEOUT = 60  # seconds for the ranks to find each other and to sum
SHORT = 600  # seconds: jobs that end sooner are worth a warning
GIB = 2**30
MEMORY = 2 * GIB  # that should be free for each worker
ROOM = 1 * GIB  # that must be free on the disk of the runs
NUMBERS = 2**22  # float32 in a tensor of 16 MiB

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers need not import all this


class Finding(NamedTuple):
    """What a check has found, and what to do about it unless all is well."""

    found: str
    state: str = OK  # or WARNING, FAILED
    advice: str = ""


@dataclass
class Subject:
    """What is looked at, and what earlier checks leave for later ones."""

    name: str
    count: int
    profile: dict = field(default_factory=dict)
    client: Any = None
    workers: list[dict] = field(default_factory=list)  # what `facts` says of each


def examine(
    profile: str | None = None,
    workers: int | str | None = None,
    say: Callable[[str], None] = print,
) -> bool:
    """Check the cluster of `profile` with `workers` workers.

    They default to CLUSTER from the environment, else local, and to WORKERS, else 2. `say` gets
    each line as soon as it is known. Returns whether nothing has failed. Raises `Error` for a
    number of workers that is none, and for torchrun and srun, which start no cluster.
    """
    name = profile or os.environ.get("CLUSTER") or "local"
    count = whole_number("WORKERS", workers or os.environ.get("WORKERS") or 2, least=1)
    if name in LAUNCHERS:
        raise Error(
            f"CLUSTER={name} starts ranks without Dask, so there is no cluster to look at. "
            "Name the profile of one: CLUSTER=slurm, pbs, local."
        )
    say(f"Looking at CLUSTER={name} with {count} worker(s).\n")
    subject = Subject(name, count)
    states: dict[str | None, str] = {}
    try:
        for title, check, advice, needs in CHECKS:
            if states.get(needs) in (FAILED, NOT_TRIED):
                finding = Finding(f"it needs this first: {needs}", NOT_TRIED)
            else:
                finding = _finding(check, subject, advice)
            states[title] = finding.state
            _say(title, finding, say)
    finally:
        if subject.client is not None:
            subject.client.close()
    failed = [str(title) for title, state in states.items() if state == FAILED]
    if failed:
        say(f"\nNot ready to train: put {failed[0]} right first, then look again.")
    else:
        say("\nReady to train.")
    return not failed


def _finding(check, subject, advice):
    try:
        return check(subject)
    except Exception as error:  # whatever it was, the other checks are still to be made
        words = str(error) if isinstance(error, Error) else f"{type(error).__name__}: {error}"
        return Finding(words.strip(), FAILED, advice or _why_no_workers(subject))


def _say(title, finding, say):
    first, *rest = finding.found.splitlines()
    if finding.state in (WARNING, FAILED):
        rest.append(f"-> {finding.advice}")
    say(ROW.format(finding.state, title, first))
    for line in rest:
        say(ROW.format("", "", line))


def check_packages(subject: Subject) -> Finding:
    """Whether all packages are here, in the versions that were tested."""
    tested = {}
    if IS_CLONE:
        lines = (REPOSITORY / "constraints.txt").read_text().lower().splitlines()
        tested = dict(line.split("==") for line in lines if "==" in line)
    missing, others = [], []
    for requirement in importlib.metadata.requires("ddp-common") or []:
        name = re.split(r"[^\w.-]", requirement)[0]
        is_for_the_course = IS_CLONE and 'extra == "course"' in requirement
        if "extra ==" in requirement and not is_for_the_course:
            continue
        try:
            version = importlib.metadata.version(name).partition("+")[0]  # 2.13.0+cu130
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
            continue
        if version != tested.get(name, version):
            others.append(f"{name} {version} (tested: {tested[name]})")
    if missing:
        return Finding(f"missing: {', '.join(missing)}", FAILED, "`make setup` installs them.")
    if others:
        advice = "Should something fail, `make setup` installs the tested versions."
        return Finding(", ".join(others), WARNING, advice)
    return Finding(f"all there, for Python {platform.python_version()}")


def check_profile(subject: Subject) -> Finding:
    subject.profile = read_profile(subject.name)
    return Finding(subject.profile["cluster"])


def check_queue(subject: Subject) -> Finding:
    """Whether the batch system's commands are here, it answers, and the queue is up."""
    if not is_batch(subject.profile):
        return Finding("none: these workers are no jobs")
    system = system_of(subject.profile)
    missing = [command for command in system.commands if shutil.which(command) is None]
    if missing:
        advice = f"Run this where {system.name} is: on a login node, perhaps after `module load`."
        return Finding(f"not on PATH: {', '.join(missing)}", FAILED, advice)
    if system.name not in ("Slurm", "PBS"):
        return Finding(f"{system.name} is not asked for its queues")
    try:
        queues, defaults = queues_of(system.name)
    except (OSError, ValueError) as error:
        return Finding(
            f"{system.name} gave no answer: {error}",
            FAILED,
            f"It is down or cannot be reached from here: try `{system.commands[1]}` by hand; "
            "if that fails too, ask those who run the cluster.",
        )
    from_dask = dask.config.get(f"jobqueue.{system.name.lower()}.queue", None)
    wanted = subject.profile["options"].get("queue") or from_dask
    asked = str(wanted).split(",") if wanted else defaults  # one of several is enough
    listing = ", ".join(f"{name} ({'up' if is_up else 'down'})" for name, is_up in queues.items())
    advice = "Change `queue:` in the profile to one that is up and that you may use."
    unknown = [name for name in asked if name not in queues]
    if unknown:
        found = f"{', '.join(unknown)} does not exist; there is: {listing}"
        return Finding(found, FAILED, advice)
    up = [name for name in asked if queues[name]]
    if not up:
        found = f"{', '.join(asked)} is not up: jobs wait in it for ever; there is: {listing}"
        return Finding(found, FAILED, advice)
    return Finding(f"{system.name} answers; {', '.join(up)} is up")


def queues_of(system: str) -> tuple[dict[str, bool], list[str]]:
    """(queue or partition -> whether it is up, the default one) of a batch system.

    All are the default where it does not say which is. Raises `OSError` if it does not answer.
    """
    queues, defaults = {}, []
    if system == "Slurm":
        for line in ask("sinfo", "-a", "-h", "-o", "%P %a").splitlines():
            name, state = line.split()
            queues[name.rstrip("*")] = state == "up"
            if name.endswith("*"):
                defaults.append(name.rstrip("*"))
    else:
        for text in re.split(r"^Queue:", ask("qstat", "-Q", "-f"), flags=re.M)[1:]:
            name = text.split()[0]
            queues[name] = not re.search(r"(?i)\b(enabled|started) = (false|no)\b", text)
    return queues, defaults or list(queues)


def facts(dask_worker) -> dict:
    """What a worker knows of itself: free memory (bytes), seconds until its job ends."""
    from ddp_common.worker.time_limit import time_left  # what travels by value must not hold it

    return {
        "address": dask_worker.address,
        "host": socket.gethostname(),
        "versions": shipping.installed(),
        "memory": psutil.virtual_memory().available,
        "left": time_left(),
    }


def check_workers(subject: Subject) -> Finding:
    """Whether the cluster starts, and its workers come and answer, with memory and time."""
    began = time.monotonic()
    subject.client = connect(subject.name, subject.count)
    subject.workers = list(subject.client.run(facts).values())
    seconds = time.monotonic() - began
    hosts = [worker["host"] for worker in subject.workers]
    memory = min(worker["memory"] / hosts.count(worker["host"]) for worker in subject.workers)
    left = min(worker["left"] for worker in subject.workers)
    found = f"{len(hosts)} came within {seconds:.1f} s, {memory / GIB:.1f} GiB free for each"
    if left < math.inf:
        found += f", the first job ends in {left / 60:.0f} min"
    if memory < MEMORY:
        advice = "Close programs or ask for fewer workers: with little memory they are killed."
        return Finding(found, WARNING, advice)
    if left < SHORT:
        advice = "For more time change `walltime` in the profile, or start the workers anew."
        return Finding(found, WARNING, advice)
    return Finding(found)


def _why_no_workers(subject):
    """What to do when a cluster did not start, or its workers did not come or answer."""
    if "://" in subject.name:
        return f"A firewall may lie between here and the workers. {LOOPBACK}"
    if not is_batch(subject.profile):
        return "Close other clusters on this machine, or ask for fewer workers: WORKERS=1."
    python = subject.profile["options"].get("python") or sys.executable
    return (
        f"A job starts {python}: this file must exist on the compute nodes, on a disk that they "
        "see; a job that runs without its worker coming cannot reach the scheduler here: name "
        "the network that both share, `interface:` and scheduler_options: interface."
    )


def check_versions(subject: Subject) -> Finding:
    here = shipping.installed()
    for worker in subject.workers:
        there = worker["versions"]
        different = [name for name in here if there[name] != here[name]]
        if different:
            listing = ", ".join(f"{name} {there[name]} (here {here[name]})" for name in different)
            return Finding(
                f"the worker on {worker['host']} has {listing}",
                WARNING if different == ["distributed"] else FAILED,
                "Give client and workers one environment, on a disk that all see, or install "
                "the versions of constraints.txt in both.",
            )
    return Finding("all have " + ", ".join(f"{name} {here[name]}" for name in here))


def check_addresses(subject: Subject) -> Finding:
    """Whether workers are where other hosts reach them."""
    hosts = {worker["host"] for worker in subject.workers}
    for worker in subject.workers:
        address = get_address_host(worker["address"])
        if address.startswith("127.") and hosts != {socket.gethostname()}:
            found = f"the worker on {worker['host']} is at {worker['address']}"
            return Finding(found, FAILED, LOOPBACK)
    scheduler = subject.client.scheduler.address
    return Finding(f"the scheduler at {scheduler}, workers on {', '.join(sorted(hosts))}")


def check_run_directory(subject: Subject) -> Finding:
    """Whether runs can be written, and whether workers see the same folder."""
    runs = os.environ.get("RUNS", "")
    if "://" in runs:
        import fsspec  # here: it takes time, and only URLs need it

        filesystem, root = fsspec.url_to_fs(runs)
        filesystem.pipe_file(f"{root}/doctor", b"can this be written?")
        filesystem.rm_file(f"{root}/doctor")
        return Finding(f"{runs} can be written from here; workers need not reach it")
    folder = Path(new_directory("doctor")).resolve()
    try:
        names = subject.client.run(leave_a_file, str(folder)).values()
        is_shared = all(name is not None and (folder / name).exists() for name in names)
        free = shutil.disk_usage(folder).free
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # others are looking, too
            folder.parent.rmdir()
    found = f"{folder.parents[1]}, {free / GIB:.0f} GiB free"
    if free < ROOM:
        return Finding(found, FAILED, "Make room on that disk, or choose another: RUNS=/a/folder.")
    if not is_shared:
        advice = "Training works, files travel through Dask; RUNS=/a/shared/folder saves that."
        return Finding(f"{found}; not all workers see it", WARNING, advice)
    return Finding(f"{found}; all workers see it")


def leave_a_file(folder: str, dask_worker) -> str | None:
    """On a worker: write a file in `folder`; returns its name, None if that is not possible."""
    path = Path(folder, f"{dask_worker.id}.tmp")
    try:
        path.touch()
        return path.rename(path.with_suffix("")).name  # as checkpoints are written
    except OSError:
        return None


def check_ranks(subject: Subject) -> Finding:
    """Whether ranks start, find each other, and sum without a fault."""
    with tempfile.TemporaryDirectory() as folder:
        run = launch(subject.client, add_up, directory=folder, stall_timeout=RANK_TIMEOUT)
    found = ", ".join(rank["place"] for rank in run.result)
    if not all(rank["is_right"] for rank in run.result):
        advice = "The network or a GPU changes what passes through it: take other hosts."
        return Finding(f"the sum over all ranks is wrong: {found}", FAILED, advice)
    if any(rank["has_idle_gpu"] for rank in run.result):
        return Finding(
            f"ranks train on the CPU though there is a GPU: {found}",
            WARNING,
            "Take as many workers as there are GPUs (WORKERS=), with dask-cuda "
            "(worker_command: dask_cuda.cli), and a torch that has NCCL.",
        )
    return Finding(f"the sum over all ranks is right: {found}")


def add_up() -> list[dict]:
    """On every rank: sum a tensor of 16 MiB over all ranks. Returns a dict for each of them."""
    import torch  # here: the command line starts without it
    import torch.distributed as dist

    from ddp_common.ranks import exchange, rendezvous

    rank, world = dist.get_rank(), dist.get_world_size()
    device = rendezvous.device()
    numbers = (torch.arange(NUMBERS, device=device) % 1000).float()  # small: sums are exact
    tensor = numbers * (rank + 1)
    dist.all_reduce(tensor)
    own = {
        "place": f"rank {rank} on {socket.gethostname()} ({dist.get_backend()}, {device})",
        "is_right": torch.equal(tensor, numbers * (world * (world + 1) // 2)),
        "has_idle_gpu": torch.cuda.is_available() and device.type == "cpu",
    }
    return exchange.gather(own)


LOOPBACK = (
    "Nobody on another host reaches an address 127.*: name the network that all hosts share, "
    "`interface: ib0` in the profile's options or `dask worker --interface ib0`."
)
SETUP = "Run `make setup` again."
# In this order: title, check, what to do if it raises (None: as for workers that do not come), and
# the check without which it cannot be tried.
CHECKS = [
    ("packages", check_packages, SETUP, None),
    ("profile", check_profile, "Put it right, or take one of those in clusters/.", None),
    ("queue", check_queue, "Put the profile right.", "profile"),
    ("workers", check_workers, None, "queue"),
    ("versions", check_versions, None, "workers"),
    ("addresses", check_addresses, None, "workers"),
    ("run directory", check_run_directory, "Choose a place for runs: RUNS=/a/folder.", "workers"),
    (
        "ranks",
        check_ranks,
        "Ranks that start and do not find each other: see that TCP passes between the hosts on "
        "all ports from 1024, or name another network, `interface:` in the profile.",
        "addresses",
    ),
]
