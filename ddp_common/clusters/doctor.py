"""What usually goes wrong on a cluster, from the queue up to a sum over all ranks.

`make doctor CLUSTER=slurm` looks at the cluster of a profile, `make check` at this machine. Relies
on `connect`, whose errors say what to do. Promises: each check is a line as soon as it is made;
the first that fails is the last; none waits for ever; no cluster and no file is left.
"""

import contextlib
import math
import os
import re
import shutil
import socket
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle
import dask
import psutil
from distributed.comm import get_address_host

from ddp_common.client.launch import launch
from ddp_common.clusters.connect import connect
from ddp_common.clusters.jobs import check_commands, system_of
from ddp_common.clusters.profiles import gpus, is_batch, read_profile
from ddp_common.clusters.queues import ask
from ddp_common.errors import Error
from ddp_common.run.folders import new_directory
from ddp_common.values import whole_number
from ddp_common.without_dask.launchers import LAUNCHERS

OK, WARNING, FAILED = "ok", "warning", "FAILED"
ROW = "{:<10} {:<14} {}"

RANK_TIMEOUT = 60  # seconds for the ranks to find each other and to sum
SHORT = 600  # seconds: jobs that end sooner are worth a warning
GIB = 2**30
MEMORY = 2 * GIB  # that should be free for each worker
ROOM = 1 * GIB  # that must be free on the disk of the runs
NUMBERS = 2**22  # float32 in a tensor of 16 MiB

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers need not import all this


class Finding(NamedTuple):
    """What a check has found, and what to do about it, unless all is well."""

    found: str
    advice: str = ""


@dataclass
class Subject:
    """What is looked at, and what earlier checks leave for later ones."""

    name: str
    count: int
    client: Any = None
    workers: list[dict] = field(default_factory=list)  # what `facts` says of each


def examine(
    profile: str | None = None,
    workers: int | str | None = None,
    say: Callable[[str], None] = print,
) -> bool:
    """Check the cluster of `profile` with `workers` workers.

    They default to CLUSTER from the environment, else local, and to WORKERS, else 2, or 1 where
    there is one GPU. `say` gets
    each line as soon as it is known. Returns whether nothing has failed. Raises `Error` for a
    number of workers that is none, and for torchrun and srun, which start no cluster.
    """
    name = profile or os.environ.get("CLUSTER") or "local"
    wanted = workers or os.environ.get("WORKERS") or min(2, gpus() or 2)
    count = whole_number("WORKERS", wanted, least=1)
    if name in LAUNCHERS:
        raise Error(
            f"CLUSTER={name} starts ranks without Dask: there is no cluster to look at.\n"
            "Name the profile of one: CLUSTER=slurm, pbs, local."
        )
    say(f"Looking at CLUSTER={name} with {count} worker(s).\n")
    subject = Subject(name, count)
    try:
        for title, check in CHECKS.items():
            try:
                finding = check(subject)
            except Exception as error:  # of any kind: it is what the doctor was asked for
                kind = "" if isinstance(error, Error) else f"{type(error).__name__}: "
                _say(FAILED, title, f"{kind}{error}".strip(), say)
                say(f"\nNot ready to train: put {title} right first, then look again.")
                return False
            state = WARNING if finding.advice else OK
            advice = f"\n-> {finding.advice}" if finding.advice else ""
            _say(state, title, f"{finding.found}{advice}", say)
    finally:
        if subject.client is not None:
            subject.client.close()
    say("\nReady to train.")
    return True


def _say(state: str, title: str, found: str, say: Callable[[str], None]) -> None:
    first, *rest = found.splitlines()
    say(ROW.format(state, title, first))
    for line in rest:
        say(ROW.format("", "", line))


def check_queue(subject: Subject) -> Finding:
    """The profile can be read, the batch system's commands are here, and the queue is up."""
    profile = read_profile(subject.name)
    if not is_batch(profile):
        return Finding(f"none: the workers of {profile['cluster']} are no jobs")
    check_commands(profile)
    system = system_of(profile).name
    if system not in ("Slurm", "PBS"):
        return Finding(f"{system} is not asked for its queues")
    try:
        queues, defaults = queues_of(system)
    except (OSError, ValueError) as error:
        raise Error(
            f"{system} gave no answer: {error}\n"
            f"Try `{system_of(profile).commands[1]}` by hand, and ask those who run the cluster."
        ) from None
    from_dask = dask.config.get(f"jobqueue.{system.lower()}.queue", None)
    wanted = profile["options"].get("queue") or from_dask
    asked = str(wanted).split(",") if wanted else defaults  # one of several is enough
    up = [name for name in asked if queues.get(name)]
    if not up:
        names = ", ".join(asked)
        what = "is not up" if set(asked) & set(queues) else "does not exist"
        there = ", ".join(
            f"{name} ({'up' if is_up else 'down'})" for name, is_up in queues.items()
        )
        raise Error(
            f"{names} {what}; there is: {there}\n"
            "Change `queue:` in the profile to one that is up and that you may use."
        )
    return Finding(f"{system} answers; {', '.join(up)} is up")


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


def facts(dask_worker: Any) -> dict:
    """What a worker knows of itself: free memory (bytes), seconds until its job ends."""
    from ddp_common.worker.time_limit import time_left  # what travels by value must not hold it

    return {
        "address": dask_worker.address,
        "host": socket.gethostname(),
        "memory": psutil.virtual_memory().available,
        "left": time_left(),
    }


def check_workers(subject: Subject) -> Finding:
    """The cluster starts, and its workers come and answer, with memory and time."""
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
        return Finding(found, advice)
    if left < SHORT:
        advice = "For more time change `walltime` in the profile, or start the workers anew."
        return Finding(found, advice)
    return Finding(found)


def check_versions(subject: Subject) -> Finding:
    """All have the same packages; `connect` has refused workers that cannot train at all."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        versions = subject.client.get_versions(check=True, packages=["torch"])
    tables = [str(each.message) for each in caught if "Mismatched" in str(each.message)]
    if tables:
        advice = "Give client and workers one environment, or the versions of constraints.txt."
        return Finding(tables[0], advice)
    here = versions["client"]["packages"]
    names = ("python", "torch", "distributed")
    return Finding("all have " + ", ".join(f"{name} {here[name]}" for name in names))


def check_addresses(subject: Subject) -> Finding:
    """Workers are where other hosts reach them."""
    hosts = {worker["host"] for worker in subject.workers}
    for worker in subject.workers:
        address = get_address_host(worker["address"])
        if address.startswith("127.") and hosts != {socket.gethostname()}:
            raise Error(
                f"The worker on {worker['host']} is at {worker['address']}, which is nowhere else."
                "\nName the network that all hosts share: `interface: ib0` in the profile's "
                "options, or `dask worker --interface ib0`."
            )
    scheduler = subject.client.scheduler.address
    return Finding(f"the scheduler at {scheduler}, workers on {', '.join(sorted(hosts))}")


def check_run_directory(subject: Subject) -> Finding:
    """Runs can be written; whether workers see the same folder."""
    folder = new_directory("doctor").resolve()
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
        raise Error(f"{found}\nMake room on that disk, or choose another: RUNS=/a/folder.")
    if not is_shared:
        advice = "Training works, files travel through Dask; RUNS=/a/shared/folder saves that."
        return Finding(f"{found}; not all workers see it", advice)
    return Finding(f"{found}; all workers see it")


def leave_a_file(folder: str, dask_worker: Any) -> str | None:
    """On a worker: write a file in `folder`; returns its name, None if that is not possible."""
    path = Path(folder, f"{dask_worker.id}.tmp")
    try:
        path.touch()
        return path.rename(path.with_suffix("")).name  # as checkpoints are written
    except OSError:
        return None


def check_ranks(subject: Subject) -> Finding:
    """Ranks start, find each other, and sum without a fault."""
    with tempfile.TemporaryDirectory() as folder:
        run = launch(subject.client, add_up, directory=folder, stall_timeout=RANK_TIMEOUT)
    found = ", ".join(rank["where"] for rank in run.result)
    if not all(rank["is_right"] for rank in run.result):
        raise Error(
            f"The sum over all ranks is wrong: {found}\n"
            "The network or a GPU changes what passes through it: take other hosts."
        )
    if any(rank["has_idle_gpu"] for rank in run.result):
        return Finding(
            f"ranks train on the CPU though there is a GPU: {found}",
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
        "where": f"rank {rank} on {socket.gethostname()} ({dist.get_backend()}, {device})",
        "is_right": torch.equal(tensor, numbers * (world * (world + 1) // 2)),
        "has_idle_gpu": torch.cuda.is_available() and device.type == "cpu",
    }
    return exchange.gather(own)


CHECKS = {
    "queue": check_queue,
    "workers": check_workers,
    "versions": check_versions,
    "addresses": check_addresses,
    "run directory": check_run_directory,
    "ranks": check_ranks,
}
