"""The doctor's looks at workers: what each one is, what lies between them, and whether ranks on them can train together.

A check is a generator of findings; the functions beside it, without an underscore, run on workers or ranks. They travel by value, so that
also a worker with another ddp_common can be looked at. Promises: none of them waits for ever, and no file or socket is left.
"""

import contextlib
import os
import platform
import shutil
import socket
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

import cloudpickle
import psutil
from dask.system import cpu_count
from distributed.comm import get_address_host

from ddp_common.client.launch import launch
from ddp_common.clusters import shipping
from ddp_common.run.places import new_directory

OK, WARNING, FAILED, SKIPPED = "ok", "warning", "FAILED", "skipped"
ROUND_TRIPS = 20
CONNECT_TIMEOUT = 5.0  # seconds for a connection from worker to worker
SHARED_TIMEOUT = 5.0  # seconds that a file may need to appear elsewhere: NFS remembers for a while what was not there
RANK_TIMEOUT = 60.0  # seconds for the ranks to find each other and to sum
SKEW_LIMIT, TIME_LIMIT = (
    1.0,
    600,
)  # seconds: clocks that differ by more, jobs that end sooner are worth a warning
NUMBERS = 2**24  # float32 in a tensor of 64 MiB
LOOPBACK = (
    "Nobody on another host reaches an address 127.*: say which network to take, `interface: ib0` in the profile's options or "
    "`dask worker --interface ib0`; `ip address` lists those of a host."
)

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Finding(NamedTuple):
    """One row of the doctor's table: what was checked, what was found, its state, and what to do unless all is well."""

    check: str
    found: str
    state: str = OK
    advice: str = ""


def facts(dask_worker):
    """What a worker knows of itself (dict)."""
    return {
        "address": dask_worker.address,
        "host": socket.gethostname(),
        "versions": versions(),
        "threads": dask_worker.state.nthreads,
        "interface": interface_towards(get_address_host(dask_worker.scheduler.address)),
        "job_end": os.environ.get("DDP_JOB_END"),
        "cores": sorted(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else list(range(cpu_count())),
        "quota": cpu_count(),
        "free": psutil.virtual_memory().available,
        "limit": dask_worker.memory_manager.memory_limit,
    }


def interface_towards(host):
    """The network interface by which `host` is reached from here, None if there is no way."""
    from ddp_common.ranks import rendezvous  # not above: it imports torch

    with contextlib.suppress(
        Exception
    ):  # then the place of its name stays empty, which is a finding
        return rendezvous.interface_towards(host)


def versions():
    """What must be the same everywhere; of ddp_common a digest of its source."""
    return {**shipping.installed(), "python": platform.python_version()}


def check_versions(client, workers):
    here = versions()
    for number, worker in enumerate(workers):
        there = worker["versions"]
        if different := [
            f"{name} {there[name]} (here {here[name]})"
            for name in here
            if there[name] != here[name]
        ]:
            tolerable = {**there, "distributed": ""} == {
                **here,
                "distributed": "",
            }  # Dask talks to its neighbouring versions
            yield Finding(
                "versions",
                f"worker {number} on {worker['host']} has {', '.join(different)}",
                WARNING if tolerable else FAILED,
                "Give client and workers one environment, on a disk that all see, or install the versions of constraints.txt in both.",
            )
    if all(worker["versions"] == here for worker in workers):
        yield Finding(
            "versions",
            f"all have {', '.join(f'{name} {version}' for name, version in here.items())}",
        )


def check_cores(client, workers):
    threads, cores = {}, {}
    for worker in workers:  # those on one host may share its cores, or have been given some each
        threads[worker["host"]] = threads.get(worker["host"], 0) + worker["threads"]
        cores[worker["host"]] = cores.get(worker["host"], set()) | set(worker["cores"])
    for number, worker in enumerate(workers):
        host, limit = (
            worker["host"],
            f", limit {worker['limit'] / 2**30:.1f} GiB" if worker["limit"] else "",
        )
        found = f"worker {number} on {host}: threads {worker['threads']}, cores {worker['quota']}, {worker['free'] / 2**30:.1f} GiB of memory free{limit}"
        if crowded := worker["threads"] > worker["quota"] or threads[host] > len(cores[host]):
            found += f"; {threads[host]} threads share {len(cores[host])} cores there"
        yield Finding(
            "cores",
            found,
            WARNING if crowded else OK,
            "Ranks that share cores slow each other down. Take fewer (WORKERS=), or fewer threads "
            "each: threads_per_worker, or cores and processes of a job.",
        )


def check_time_left(client, workers):
    ends = {
        number: worker["job_end"] for number, worker in enumerate(workers) if worker["job_end"]
    }
    if not ends:
        yield Finding("time left", "no limit known (DDP_JOB_END is not set on the workers)")
        return
    number, end = min(
        ((number, float(end)) for number, end in ends.items()), key=lambda each: each[1]
    )
    left = end - time.time()
    yield Finding(
        "time left",
        f"{left / 60:.0f} min, until {time.strftime('%H:%M', time.localtime(end))}, when the job of worker {number} ends",
        WARNING if left < TIME_LIMIT else OK,
        "Training ends there, from its newest checkpoint another job can go on (RESUME=). For more time "
        "change walltime in the profile, or start workers anew.",
    )


def check_clocks(client, workers):
    skews, medians = [], []
    for worker in workers:
        trips = []
        for _ in range(ROUND_TRIPS):
            began = time.time()
            there = client.run(lambda: time.time(), workers=[worker["address"]])[worker["address"]]
            ended = time.time()
            trips.append(
                (ended - began, there - (began + ended) / 2)
            )  # the shortest trip knows best
        skews.append(min(trips)[1])
        medians.append(statistics.median(trip for trip, _ in trips))
    yield Finding(
        "round trip",
        "client to worker and back: "
        + ", ".join(f"{number}: {median * 1e3:.1f} ms" for number, median in enumerate(medians)),
    )
    number = max(range(len(skews)), key=lambda number: abs(skews[number]))
    yield Finding(
        "clocks",
        f"largest difference from here: {skews[number]:+.3f} s (worker {number})",
        WARNING if abs(skews[number]) > SKEW_LIMIT else OK,
        f"Times in logs and metrics will not fit together. The staff of {workers[number]['host']} can put its clock right (NTP, chrony).",
    )


def check_addresses(client, workers):
    scheduler = get_address_host(client.scheduler.address)
    own = {
        entry.address.split("%")[0]
        for entries in psutil.net_if_addrs().values()
        for entry in entries
    }
    remote = (
        not (_is_loopback(scheduler) or scheduler in own)
        or len({worker["host"] for worker in workers}) > 1
    )
    yield Finding(
        "addresses", f"scheduler: {client.scheduler.address}{'' if remote else ' on this host'}"
    )
    for number, worker in enumerate(workers):
        found = f"worker {number}: {worker['address']} on {worker['host']}, interface {worker['interface'] or 'unknown'}"
        if remote and _is_loopback(get_address_host(worker["address"])):
            yield Finding("addresses", found, FAILED, LOOPBACK)
        else:
            yield Finding(
                "addresses",
                found,
                OK if worker["interface"] else FAILED,
                "gloo and NCCL need the interface by which this host reaches the "
                "scheduler. Name the network that all hosts share: `interface:` in the profile's options.",
            )


def _is_loopback(host):
    return host.startswith("127.") or host in ("::1", "localhost")


def echo(dask_worker):
    """Listen on a free port of the worker's own address, for one connection, and send back what comes. Returns (host, port)."""
    host = get_address_host(dask_worker.address)
    server = socket.create_server(
        (host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET
    )
    server.settimeout(2 * CONNECT_TIMEOUT)

    def serve():
        with server, contextlib.suppress(OSError):
            connection, _ = server.accept()
            connection.settimeout(CONNECT_TIMEOUT)
            with connection:
                while data := connection.recv(1):
                    connection.sendall(data)

    threading.Thread(target=serve, daemon=True).start()
    return host, server.getsockname()[1]


def ping(host, port):
    """Median seconds of a byte to an `echo` and back. Raises OSError."""
    trips = []
    with socket.create_connection((host, port), timeout=CONNECT_TIMEOUT) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(ROUND_TRIPS):
            began = time.perf_counter()
            connection.sendall(b"x")
            if not connection.recv(1):
                raise ConnectionError("the connection was closed")
            trips.append(time.perf_counter() - began)
    return statistics.median(trips)


def check_between_workers(client, workers):
    for source in range(
        len(workers)
    ):  # each to its neighbours in a ring, which is how an all-reduce goes
        for target in sorted({(source + 1) % len(workers), (source - 1) % len(workers)}):
            here, there = workers[source]["address"], workers[target]["address"]
            answer = client.run(echo, workers=[there], on_error="return")[there]
            if not isinstance(answer, Exception):
                answer = client.run(ping, *answer, workers=[here], on_error="return")[here]
            failed = isinstance(answer, Exception)
            found = f"{source} to {target} and back: {f'{type(answer).__name__}: {answer}' if failed else f'{answer * 1e3:.2f} ms'}"
            yield Finding(
                "between workers",
                found,
                FAILED if failed else OK,
                "Ranks talk on ports that the system chooses: TCP must pass on all from "
                f"1024 between {workers[source]['host']} and {workers[target]['host']}. Have the firewall opened within the cluster, or "
                "name another network (interface: in the profile).",
            )


@contextlib.contextmanager
def _directory_of_a_run():
    """A run directory where runs go (for a URL: anywhere), gone afterwards."""
    remote = "://" in os.environ.get("RUNS", "")
    path = Path(tempfile.mkdtemp() if remote else new_directory("doctor")).resolve()
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        if not remote:
            with contextlib.suppress(OSError):  # others are looking too
                path.parent.rmdir()


def put(directory, name):
    """Write a file under a temporary name and rename it, as checkpoints are written."""
    temporary = Path(directory, f".{name}.tmp")
    temporary.write_text(name)
    temporary.rename(Path(directory, name))


def appears(directory, name):
    """Wait for a file that somebody else has `put`. Raises OSError."""
    deadline = time.monotonic() + SHARED_TIMEOUT
    while name not in os.listdir(directory) or Path(directory, name).read_text() != name:
        if time.monotonic() > deadline:
            raise FileNotFoundError(
                f"a file that was renamed to {name} does not appear on {socket.gethostname()}"
            )
        time.sleep(0.1)


def check_run_directory(client, workers):
    if "://" in (runs := os.environ.get("RUNS", "")):
        import fsspec

        filesystem, root = fsspec.url_to_fs(runs)
        filesystem.pipe_file(f"{root}/doctor", b"can this be written?")
        filesystem.rm_file(f"{root}/doctor")
        yield Finding(
            "run directory", f"{runs} can be written from here; workers need not reach it"
        )
        return
    with _directory_of_a_run() as directory:
        put(directory, "client")
        apart = []
        for number, worker in enumerate(workers):
            try:
                for function, name in ((appears, "client"), (put, f"worker-{number}")):
                    client.run(function, str(directory), name, workers=[worker["address"]])
                appears(directory, f"worker-{number}")
            except OSError as error:
                apart.append(f"worker {number} on {worker['host']}: {error}")
        found = (
            f"not shared with {'; '.join(apart)}"
            if apart
            else f"{directory.parents[1]} is one for the client and all workers; renaming works"
        )
        yield Finding(
            "run directory",
            found,
            WARNING if apart else OK,
            "It works all the same: files travel through Dask. On a cluster with a "
            "shared disk, RUNS=/a/folder/there spares them the way.",
        )


def reduce():
    """Sum a tensor of 64 MiB over all ranks. Returns for each a dict: what it `has`, `idle_gpu`, `sums` (backend -> seconds, whether right)."""
    import torch
    import torch.distributed as dist

    from ddp_common.ranks import rendezvous

    world, rank, device, sums = dist.get_world_size(), dist.get_rank(), rendezvous.device(), {}
    gloo, gpu = dist.new_group(backend="gloo"), torch.cuda.is_available()
    for backend, group in {"gloo": gloo, dist.get_backend(): dist.group.WORLD}.items():
        numbers = (
            torch.arange(NUMBERS, device=device if backend == "nccl" else "cpu") % 1000
        ).float()  # small enough for exact sums
        trips = []
        for _ in range(4):
            tensor = numbers * (rank + 1)
            tensor[0].item()  # a GPU is done with it then
            began = time.perf_counter()
            dist.all_reduce(tensor, group=group)
            tensor[0].item()
            trips.append(time.perf_counter() - began)
        sums[backend] = (
            statistics.median(trips[1:]),
            torch.equal(tensor, numbers * (world * (world + 1) // 2)),
        )  # the first trip connects
    memory = f"{psutil.virtual_memory().available / 2**30:.1f} GiB of memory free"
    name = (
        f"{torch.cuda.get_device_name()} with {torch.cuda.mem_get_info()[0] / 2**30:.1f} GiB free"
        if gpu
        else "no GPU"
    )
    everybody = [None] * world
    dist.all_gather_object(
        everybody,
        {
            "has": f"rank {rank} on {socket.gethostname()}: device {device}, {name}, {memory}",
            "sums": sums,
            "idle_gpu": gpu and device.type == "cpu",
        },
        group=gloo,
    )
    return everybody


def check_ranks(client, workers):
    with _directory_of_a_run() as directory:
        ranks = launch(client, reduce, directory=directory, stall_timeout=RANK_TIMEOUT).result
    for rank in ranks:
        yield Finding(
            "ranks",
            rank["has"],
            WARNING if rank["idle_gpu"] else OK,
            "There is a GPU, but not one for each rank, or torch has no NCCL: so "
            "ranks train on the CPU. Take as many workers as there are GPUs (WORKERS=), with dask-cuda: worker_command: dask_cuda.cli.",
        )
    for backend, (seconds, _) in ranks[0]["sums"].items() if len(ranks) > 1 else ():
        found = f"{backend}: 64 MiB over {len(ranks)} ranks in {seconds * 1e3:.0f} ms, {NUMBERS * 4 / seconds / 1e9:.2f} GB/s"
        wrong = ", ".join(
            str(number) for number, rank in enumerate(ranks) if not rank["sums"][backend][1]
        )
        yield Finding(
            "all-reduce",
            f"{found}; the sum is {f'wrong on rank {wrong}' if wrong else 'right'}",
            FAILED if wrong else OK,
            "The network or a GPU changes what passes through it: training would be wrong without a word. Take other hosts.",
        )
    if len(ranks) == 1:
        yield Finding("all-reduce", "needs two workers: WORKERS=2", SKIPPED)
