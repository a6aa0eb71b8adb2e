"""What the doctor asks of workers: what each one is, and whether ranks on them can train together.

A check takes a connected client and what `facts` says of each worker, and yields findings. The
functions beside the checks, without an underscore, run on workers or ranks. They travel by value,
so that also a worker with another ddp_common can be looked at. Promises: none of them waits
forever, and no file or socket is left.
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
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import cloudpickle
import psutil
from dask.system import cpu_count
from distributed import Client
from distributed.comm import get_address_host

from ddp_common.client.launch import launch
from ddp_common.clusters import shipping
from ddp_common.run.places import new_directory

OK, WARNING, FAILED, SKIPPED = "ok", "warning", "FAILED", "skipped"
ROUND_TRIPS = 20
CONNECT_TIMEOUT = 5.0  # seconds for a connection from worker to worker
# Seconds until a file appears elsewhere: NFS remembers for a while what was not there.
SHARED_TIMEOUT = 5.0
RANK_TIMEOUT = 60.0  # seconds for the ranks to find each other and to sum
SKEW_LIMIT = 1.0  # seconds: clocks that differ by more are worth a warning
TIME_LIMIT = 600  # seconds: jobs that end sooner are worth a warning
NUMBERS = 2**24  # float32 in a tensor of 64 MiB
GIB = 2**30
LOOPBACK = (
    "Nobody on another host reaches an address 127.*: say which network to take, "
    "`interface: ib0` in the profile's options or `dask worker --interface ib0`; "
    "`ip address` lists those of a host."
)

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Finding(NamedTuple):
    """One row of the doctor's table."""

    check: str
    found: str
    state: str = OK  # or WARNING, FAILED, SKIPPED
    advice: str = ""  # what to do unless all is well


def facts(dask_worker) -> dict:
    """What a worker knows of itself; memory in bytes, None for no limit."""
    return {
        "address": dask_worker.address,
        "host": socket.gethostname(),
        "versions": versions(),
        "threads": dask_worker.state.nthreads,
        "interface": interface_towards(get_address_host(dask_worker.scheduler.address)),
        "job_end": os.environ.get("DDP_JOB_END"),
        "cores": own_cores(),
        "quota": cpu_count(),
        "free": psutil.virtual_memory().available,
        "limit": dask_worker.memory_manager.memory_limit,
    }


def own_cores() -> list[int]:
    """The numbers of the cores on which this process may run."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(cpu_count()))


def interface_towards(host: str) -> str | None:
    """The network interface by which `host` is reached from here, None if there is no way."""
    from ddp_common.ranks import rendezvous  # not above: it imports torch

    try:
        return rendezvous.interface_towards(host)
    except Exception:  # then the place of its name stays empty, which is a finding
        return None


def versions() -> dict[str, str | None]:
    """What must be the same everywhere; of ddp_common a digest of its source."""
    return {**shipping.installed(), "python": platform.python_version()}


def check_versions(client: Client, workers: list[dict]) -> Iterator[Finding]:
    here = versions()
    for number, worker in enumerate(workers):
        there = worker["versions"]
        different = [name for name in here if there[name] != here[name]]
        if not different:
            continue
        listing = ", ".join(f"{name} {there[name]} (here {here[name]})" for name in different)
        # Dask talks to neighbouring versions of itself.
        is_tolerable = {**there, "distributed": ""} == {**here, "distributed": ""}
        yield Finding(
            "versions",
            f"worker {number} on {worker['host']} has {listing}",
            WARNING if is_tolerable else FAILED,
            "Give client and workers one environment, on a disk that all see, "
            "or install the versions of constraints.txt in both.",
        )
    if all(worker["versions"] == here for worker in workers):
        listing = ", ".join(f"{name} {version}" for name, version in here.items())
        yield Finding("versions", f"all have {listing}")


def check_cores(client: Client, workers: list[dict]) -> Iterator[Finding]:
    # Workers on one host may share its cores, or have been given some each.
    threads_on: dict[str, int] = {}
    cores_on: dict[str, set[int]] = {}
    for worker in workers:
        host = worker["host"]
        threads_on[host] = threads_on.get(host, 0) + worker["threads"]
        cores_on[host] = cores_on.get(host, set()) | set(worker["cores"])
    for number, worker in enumerate(workers):
        host = worker["host"]
        found = (
            f"worker {number} on {host}: threads {worker['threads']}, cores {worker['quota']}, "
            f"{worker['free'] / GIB:.1f} GiB of memory free"
        )
        if worker["limit"]:
            found += f", limit {worker['limit'] / GIB:.1f} GiB"
        is_crowded = worker["threads"] > worker["quota"] or threads_on[host] > len(cores_on[host])
        if is_crowded:
            found += f"; {threads_on[host]} threads share {len(cores_on[host])} cores there"
        yield Finding(
            "cores",
            found,
            WARNING if is_crowded else OK,
            "Ranks that share cores slow each other down. Take fewer (WORKERS=), or fewer "
            "threads each: threads_per_worker, or cores and processes of a job.",
        )


def check_time_left(client: Client, workers: list[dict]) -> Iterator[Finding]:
    ends = [
        (float(worker["job_end"]), number)
        for number, worker in enumerate(workers)
        if worker["job_end"]
    ]
    if not ends:
        yield Finding("time left", "no limit known (DDP_JOB_END is not set on the workers)")
        return
    end, number = min(ends)
    left = end - time.time()
    clock = time.strftime("%H:%M", time.localtime(end))
    yield Finding(
        "time left",
        f"{left / 60:.0f} min, until {clock}, when the job of worker {number} ends",
        WARNING if left < TIME_LIMIT else OK,
        "Training ends there; another job can go on from its newest checkpoint (RESUME=). "
        "For more time change walltime in the profile, or start workers anew.",
    )


def check_clocks(client: Client, workers: list[dict]) -> Iterator[Finding]:
    skews = []
    medians = []
    for worker in workers:
        trips = [_clock_trip(client, worker["address"]) for _ in range(ROUND_TRIPS)]
        _, skew = min(trips)  # the shortest trip knows best
        skews.append(skew)
        medians.append(statistics.median(seconds for seconds, _ in trips))
    listing = ", ".join(
        f"{number}: {median * 1e3:.1f} ms" for number, median in enumerate(medians)
    )
    yield Finding("round trip", f"client to worker and back: {listing}")
    number = max(range(len(skews)), key=lambda number: abs(skews[number]))
    yield Finding(
        "clocks",
        f"largest difference from here: {skews[number]:+.3f} s (worker {number})",
        WARNING if abs(skews[number]) > SKEW_LIMIT else OK,
        "Times in logs and metrics will not fit together. "
        f"The staff of {workers[number]['host']} can put its clock right (NTP, chrony).",
    )


def _clock_trip(client, address):
    """(seconds to a worker and back, seconds by which its clock is ahead of the one here)."""
    began = time.time()
    there = client.run(lambda: time.time(), workers=[address])[address]
    ended = time.time()
    return ended - began, there - (began + ended) / 2


def check_addresses(client: Client, workers: list[dict]) -> Iterator[Finding]:
    is_remote = _has_other_hosts(client, workers)
    where = "" if is_remote else " on this host"
    yield Finding("addresses", f"scheduler: {client.scheduler.address}{where}")
    for number, worker in enumerate(workers):
        found = (
            f"worker {number}: {worker['address']} on {worker['host']}, "
            f"interface {worker['interface'] or 'unknown'}"
        )
        if is_remote and _is_loopback(get_address_host(worker["address"])):
            yield Finding("addresses", found, FAILED, LOOPBACK)
            continue
        yield Finding(
            "addresses",
            found,
            OK if worker["interface"] else FAILED,
            "gloo and NCCL need the interface by which this host reaches the scheduler. "
            "Name the network that all hosts share: `interface:` in the profile's options.",
        )


def _has_other_hosts(client, workers):
    """Whether the scheduler is on another host, or workers are on several."""
    if len({worker["host"] for worker in workers}) > 1:
        return True
    scheduler = get_address_host(client.scheduler.address)
    if _is_loopback(scheduler):
        return False
    for addresses in psutil.net_if_addrs().values():
        if scheduler in [entry.address.split("%")[0] for entry in addresses]:
            return False
    return True


def _is_loopback(host):
    return host.startswith("127.") or host in ("::1", "localhost")


def echo(dask_worker) -> tuple[str, int]:
    """Listen on a free port of the worker's own address, and send back what comes.

    For one connection. Returns (host, port).
    """
    host = get_address_host(dask_worker.address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    server = socket.create_server((host, 0), family=family)
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


def ping(host: str, port: int) -> float:
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


def check_between_workers(client: Client, workers: list[dict]) -> Iterator[Finding]:
    """Each worker to its neighbours in a ring, which is the way of an all-reduce."""
    count = len(workers)
    for source in range(count):
        for target in sorted({(source + 1) % count, (source - 1) % count}):
            answer = _ping_from(client, workers[source], workers[target])
            has_failed = isinstance(answer, Exception)
            if has_failed:
                said = f"{type(answer).__name__}: {answer}"
            else:
                said = f"{answer * 1e3:.2f} ms"
            yield Finding(
                "between workers",
                f"{source} to {target} and back: {said}",
                FAILED if has_failed else OK,
                "Ranks talk on ports that the system chooses: TCP must pass on all from 1024 "
                f"between {workers[source]['host']} and {workers[target]['host']}. "
                "Have the firewall opened within the cluster, "
                "or name another network (interface: in the profile).",
            )


def _ping_from(client, source, target):
    """Seconds from worker to worker and back, or the exception that one of them has raised."""
    here, there = source["address"], target["address"]
    answer = client.run(echo, workers=[there], on_error="return")[there]
    if isinstance(answer, Exception):
        return answer
    return client.run(ping, *answer, workers=[here], on_error="return")[here]


@contextlib.contextmanager
def _directory_of_a_run():
    """A run directory where runs go (for a URL: anywhere), gone afterwards."""
    is_remote = "://" in os.environ.get("RUNS", "")
    path = Path(tempfile.mkdtemp() if is_remote else new_directory("doctor")).resolve()
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        if not is_remote:
            with contextlib.suppress(OSError):  # others are looking, too
                path.parent.rmdir()


def put(directory: str | Path, name: str) -> None:
    """Write a file under a temporary name and rename it, as checkpoints are written."""
    temporary = Path(directory, f".{name}.tmp")
    temporary.write_text(name)
    temporary.rename(Path(directory, name))


def appears(directory: str | Path, name: str) -> None:
    """Wait for a file that somebody else has `put`. Raises OSError."""
    deadline = time.monotonic() + SHARED_TIMEOUT
    while name not in os.listdir(directory) or Path(directory, name).read_text() != name:
        if time.monotonic() > deadline:
            raise FileNotFoundError(
                f"a file that was renamed to {name} does not appear on {socket.gethostname()}"
            )
        time.sleep(0.1)


def check_run_directory(client: Client, workers: list[dict]) -> Iterator[Finding]:
    runs = os.environ.get("RUNS", "")
    if "://" in runs:
        yield _write_to_url(runs)
        return
    with _directory_of_a_run() as directory:
        put(directory, "client")
        apart = []
        for number, worker in enumerate(workers):
            here = [worker["address"]]
            try:
                client.run(appears, str(directory), "client", workers=here)
                client.run(put, str(directory), f"worker-{number}", workers=here)
                appears(directory, f"worker-{number}")
            except OSError as error:
                apart.append(f"worker {number} on {worker['host']}: {error}")
        if apart:
            found = f"not shared with {'; '.join(apart)}"
        else:
            found = f"{directory.parents[1]} is one for the client and all workers; renaming works"
        yield Finding(
            "run directory",
            found,
            WARNING if apart else OK,
            "Training works without it: files travel through Dask. "
            "On a cluster with a shared disk, RUNS=/a/folder/there saves these transfers.",
        )


def _write_to_url(runs):
    import fsspec  # not above: it takes time, and only URLs need it

    filesystem, root = fsspec.url_to_fs(runs)
    filesystem.pipe_file(f"{root}/doctor", b"can this be written?")
    filesystem.rm_file(f"{root}/doctor")
    return Finding("run directory", f"{runs} can be written from here; workers need not reach it")


def reduce() -> list[dict]:
    """On every rank: sum a tensor of 64 MiB over all ranks, once with each backend.

    Returns a dict for each rank: what it `has` (text), `idle_gpu` (whether it has a GPU and does
    not train on it), `sums` (backend -> (seconds, whether the sum is right)).
    """
    import torch  # here: the command line starts without it
    import torch.distributed as dist

    from ddp_common.ranks import exchange, rendezvous

    world = dist.get_world_size()
    rank = dist.get_rank()
    device = rendezvous.device()
    gloo = dist.new_group(backend="gloo")
    has_gpu = torch.cuda.is_available()
    sums = {}
    for backend, group in {"gloo": gloo, dist.get_backend(): dist.group.WORLD}.items():
        place = device if backend == "nccl" else "cpu"
        numbers = (torch.arange(NUMBERS, device=place) % 1000).float()  # small: sums are exact
        trips = []
        for _ in range(4):
            tensor = numbers * (rank + 1)
            tensor[0].item()  # a GPU is done with it then
            began = time.perf_counter()
            dist.all_reduce(tensor, group=group)
            tensor[0].item()
            trips.append(time.perf_counter() - began)
        seconds = statistics.median(trips[1:])  # the first trip connects
        is_right = torch.equal(tensor, numbers * (world * (world + 1) // 2))
        sums[backend] = (seconds, is_right)
    gpu = "no GPU"
    if has_gpu:
        free = torch.cuda.mem_get_info()[0]
        gpu = f"{torch.cuda.get_device_name()} with {free / GIB:.1f} GiB free"
    memory = f"{psutil.virtual_memory().available / GIB:.1f} GiB of memory free"
    own = {
        "has": f"rank {rank} on {socket.gethostname()}: device {device}, {gpu}, {memory}",
        "sums": sums,
        "idle_gpu": has_gpu and device.type == "cpu",
    }
    return exchange.gather(own, group=gloo)


def check_ranks(client: Client, workers: list[dict]) -> Iterator[Finding]:
    with _directory_of_a_run() as directory:
        ranks = launch(client, reduce, directory=directory, stall_timeout=RANK_TIMEOUT).result
    for rank in ranks:
        yield Finding(
            "ranks",
            rank["has"],
            WARNING if rank["idle_gpu"] else OK,
            "There is a GPU, but not one for each rank, or torch has no NCCL: so ranks train on "
            "the CPU. Take as many workers as there are GPUs (WORKERS=), with dask-cuda: "
            "worker_command: dask_cuda.cli.",
        )
    if len(ranks) == 1:
        yield Finding("all-reduce", "needs two workers: WORKERS=2", SKIPPED)
        return
    for backend, (seconds, _) in ranks[0]["sums"].items():
        wrong = [str(number) for number, rank in enumerate(ranks) if not rank["sums"][backend][1]]
        verdict = f"wrong on rank {', '.join(wrong)}" if wrong else "right"
        yield Finding(
            "all-reduce",
            f"{backend}: 64 MiB over {len(ranks)} ranks in {seconds * 1e3:.0f} ms, "
            f"{NUMBERS * 4 / seconds / 1e9:.2f} GB/s; the sum is {verdict}",
            FAILED if wrong else OK,
            "The network or a GPU changes what passes through it: training would be wrong "
            "without any error. Take other hosts.",
        )
