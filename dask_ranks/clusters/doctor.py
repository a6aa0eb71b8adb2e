"""What usually goes wrong on a cluster, from the queue up to a sum over all ranks.

`make doctor CLUSTER=slurm` looks at the cluster of a profile, `make check` at this machine. Relies
on `connect`, whose errors say what to do. Promises: each check is a line as soon as it is made;
the first that fails is the last; none waits for ever; no cluster and no file is left.
"""

import os
import shutil
import socket
import sys
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import cloudpickle
import psutil
from distributed.comm import get_address_host

from dask_ranks.client.launch import launch
from dask_ranks.client.rpc import ask_all
from dask_ranks.clusters.connect import connect
from dask_ranks.clusters.jobs import check_commands
from dask_ranks.clusters.profiles import gpus, is_batch, read_profile
from dask_ranks.clusters.queues import SYSTEMS
from dask_ranks.run.folders import new_directory
from dask_ranks.run.job import whole_number
from dask_ranks.without_dask.launchers import LAUNCHERS
from ddp_common.errors import Error

OK, WARNING, FAILED = "ok", "warning", "FAILED"
ROW = "{:<10} {:<14} {}"

RANK_TIMEOUT = 60  # seconds for the ranks to find each other and to sum
GIB = 2**30
MEMORY = 2 * GIB  # that should be free for each worker
ROOM = 1 * GIB  # that must be free on the disk of the runs
NUMBERS = 2**22  # float32 in a tensor of 16 MiB

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers need not import all this


Finding = tuple[str, str]  # what a check has found, and what to do about it, or ''


def examine(
    profile: str | None = None,
    workers: int | str | None = None,
    say: Callable[[str], None] = print,
) -> bool:
    """Check the cluster of `profile` with `workers` workers.

    They default to CLUSTER from the environment, else local, and to WORKERS, else 2, or 1 where
    there is one GPU. `say` gets each line as soon as it is known. Returns whether nothing has
    failed. Raises `Error` for a number of workers that is none, and for torchrun and srun, which
    start no cluster.
    """
    name = profile or os.environ.get("CLUSTER") or "local"
    wanted = workers or os.environ.get("WORKERS") or min(2, gpus() or 2)
    count = whole_number("WORKERS", wanted, least=1)
    if name in LAUNCHERS:
        raise Error(
            f"CLUSTER={name} starts ranks without Dask: there is no cluster to look at.\n"
            "Name the profile of one: CLUSTER=slurm, pbs, local."
        )

    def report(state: str, title: str, found: str) -> None:
        say(ROW.format(state, title, found.replace("\n", "\n" + ROW.format("", "", ""))))

    say(f"Looking at CLUSTER={name} with {count} worker(s).\n")
    title = "queue"
    try:
        report(OK, title, check_queue(name))
        title = "workers"
        with connect(name, count) as client:
            for title, check in CHECKS.items():
                found, advice = check(client)
                words = f"{found}\n-> {advice}" if advice else found
                report(WARNING if advice else OK, title, words)
    except Exception as error:  # of any kind: it is what the doctor was asked for
        kind = "" if isinstance(error, Error) else f"{type(error).__name__}: "
        report(FAILED, title, f"{kind}{error}".strip())
        say(f"\nNot ready to train: put {title} right first, then look again.")
        return False
    say("\nReady to train.")
    return True


def check_queue(name: str) -> str:
    """The profile can be read, the batch system answers, and the profile's queue is up."""
    profile = read_profile(name)
    if not is_batch(profile):
        return f"none: the workers of {profile['cluster']} are no jobs"
    check_commands(profile)
    system = SYSTEMS[profile["cluster"]]
    queues = system.queues()
    there = ", ".join(f"{each} ({'up' if is_up else 'down'})" for each, is_up in queues.items())
    wanted = profile["options"].get("queue")
    if wanted and not any(queues.get(each) for each in str(wanted).split(",")):
        raise Error(
            f"{wanted} is not up; there is: {there}\n"
            "Change `queue:` in the profile to one that is up and that you may use."
        )
    return f"{system.name} answers; there is: {there}"


def check_workers(client: Any) -> Finding:
    """The workers answer, and have memory."""
    hosts = ask_all(client, socket.gethostname)
    memory = ask_all(client, psutil.virtual_memory)
    names = list(hosts.values())
    least = min(memory[at].available / names.count(host) for at, host in hosts.items())
    found = f"{len(hosts)} have come, {least / GIB:.1f} GiB free for each"
    few = "Close programs or ask for fewer workers: with little memory they are killed."
    return found, few if least < MEMORY else ""


def check_versions(client: Any) -> Finding:
    """Client, scheduler and workers have the same packages."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        versions = client.get_versions(check=True, packages=["torch"])
    tables = [str(each.message) for each in caught if "Mismatched" in str(each.message)]
    if tables:
        advice = "Give client and workers one environment, or the versions of constraints.txt."
        return tables[0], advice
    here = versions["client"]["packages"]
    names = ("python", "torch", "distributed")
    return "all have " + ", ".join(f"{name} {here[name]}" for name in names), ""


def check_addresses(client: Any) -> Finding:
    """Workers are where other hosts reach them."""
    hosts = ask_all(client, socket.gethostname)
    names = set(hosts.values())
    for address, host in hosts.items():
        if get_address_host(address).startswith("127.") and names != {socket.gethostname()}:
            raise Error(
                f"The worker on {host} is at {address}, which is nowhere else.\n"
                "Name the network that all hosts share: `interface: ib0` in the profile's "
                "options, or `dask worker --interface ib0`."
            )
    return f"scheduler at {client.scheduler.address}, workers on {', '.join(names)}", ""


def check_run_directory(client: Any) -> Finding:
    """Runs can be written; whether workers see the same folder."""
    folder = new_directory("").resolve()
    try:
        (folder / "here").touch()
        is_shared = all(ask_all(client, os.path.exists, str(folder / "here")).values())
        free = shutil.disk_usage(folder).free
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    found = f"{folder.parent}, {free / GIB:.0f} GiB free"
    if free < ROOM:
        raise Error(f"{found}\nMake room on that disk, or choose another: RUNS=/a/folder.")
    if not is_shared:
        advice = "Training works, files travel through Dask; RUNS=/a/shared/folder saves that."
        return f"{found}; not all workers see it", advice
    return f"{found}; all workers see it", ""


def check_ranks(client: Any) -> Finding:
    """Ranks start, find each other, and sum without a fault."""
    with tempfile.TemporaryDirectory() as folder:
        run = launch(client, add_up, directory=folder, stall_timeout=RANK_TIMEOUT)
    found = ", ".join(rank["where"] for rank in run.result)
    if not all(rank["is_right"] for rank in run.result):
        raise Error(
            f"The sum over all ranks is wrong: {found}\n"
            "The network or a GPU changes what passes through it: take other hosts."
        )
    if any(rank["has_idle_gpu"] for rank in run.result):
        advice = (
            "Take as many workers as there are GPUs (WORKERS=), with dask-cuda "
            "(worker_command: dask_cuda.cli), and a torch that has NCCL."
        )
        return f"ranks train on the CPU though there is a GPU: {found}", advice
    return f"the sum over all ranks is right: {found}", ""


def add_up() -> list[dict]:
    """On every rank: sum a tensor of 16 MiB over all ranks. Returns a dict for each of them."""
    import torch  # here: the command line starts without it
    import torch.distributed as dist

    from ddp_common import exchange, rendezvous

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
    "workers": check_workers,
    "versions": check_versions,
    "addresses": check_addresses,
    "run directory": check_run_directory,
    "ranks": check_ranks,
}
