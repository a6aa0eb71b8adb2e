"""The rank's side of a run: find the store, form the process group, choose the device.

Relies on the variables that torchrun sets, and our worker's agent likewise (RANK, WORLD_SIZE,
LOCAL_RANK, MASTER_ADDR, MASTER_PORT); `without_dask` sets them in a Slurm step. Without them there
is one rank, and everything works alone. The ranks meet in a key-value store of torch (`TCPStore`),
which rank 0 holds, or torchrun. Relies on the launcher to end the other ranks
when one is killed, as our agents do, torchrun, and `srun --kill-on-bad-exit=1`.

Promises: the backend is NCCL if every rank has a GPU of its own, else gloo; both use the network
interface through which the ranks reach each other; a rank that is missing or claimed twice is
named; rank 0 leaves last.
"""

import contextlib
import datetime
import functools
import ipaddress
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

# Before torch is imported: it would print a stack of C++ for each connection that ends. (A rank of
# Dask has torch already: its fork server has set this.)
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import psutil
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ddp_common.errors import Error, first_line

JOIN_TIMEOUT = 60.0  # seconds that ranks await each other, unless DDP_JOIN_TIMEOUT says others
FOREVER = datetime.timedelta(days=24)  # torch's store counts milliseconds in 31 bits


@dataclass(frozen=True)
class Assignment:
    """Where this process stands among the ranks, and where their store is."""

    rank: int
    world_size: int
    local_rank: int
    address: str
    port: int
    attempt: str  # the same for all ranks of this attempt, another for any other attempt


# While this rank is in the group of a launcher, even if its own code has destroyed that
_assigned: Assignment | None = None
_store: dist.Store | None = None
_device: torch.device | None = None
# How often this process has joined a group: as often as its peers. Each time has its own keys.
_joins = 0

# torch 2.13 hangs where the last reference to a gloo group goes right after a `backward`: the
# group waits for its threads, and these wait for Python's lock. A program that destroys the group
# in its last line would do so, when its model is freed. This reference stays (`_keep_groups`).
_group: dist.ProcessGroup | None = None


@functools.cache
def _keep_groups() -> None:
    """From now on `init_process_group` keeps its group, and joins the one that is there."""
    original = dist.init_process_group

    @functools.wraps(original)
    def init_process_group(backend: str | None = None, *arguments: Any, **options: Any) -> None:
        global _group
        if dist.is_initialized() and (not backend or dist.get_backend() in backend):
            return
        original(backend, *arguments, **options)
        _group = dist.group.WORLD

    dist.init_process_group = distributed_c10d.init_process_group = init_process_group


def rank() -> int:
    """This process's rank, 0 when alone."""
    if _assigned is not None:
        return _assigned.rank
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """The number of ranks, 1 when alone."""
    if _assigned is not None:
        return _assigned.world_size
    return dist.get_world_size() if dist.is_initialized() else 1


def current_store() -> dist.Store | None:
    """The store of the process group that this rank is in, None when alone.

    Waiting for a key blocks the connection for other threads: a thread takes a `clone()`.
    """
    return _store


def has_left(peer: int) -> bool:
    """Whether a rank has left this process group, because it is done or by an exception."""
    return _store is not None and _store.check([f"left/{peer}"])


def device() -> torch.device:
    """The device of this rank: its own GPU if the backend is NCCL or it is alone, else the CPU."""
    if _device is not None:
        return _device
    alone = not dist.is_initialized()
    if torch.cuda.is_available() and (alone or dist.get_backend() == "nccl"):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


@contextlib.contextmanager
def process_group(
    store_socket: int | None = None,
    timeout: datetime.timedelta = datetime.timedelta(minutes=30),
    is_made_here: bool = True,
) -> Iterator[torch.device]:
    """Be a member of the process group inside a `with` block; yields the device.

    `store_socket` is the descriptor of the store's bound socket, which rank 0 has from its agent;
    without it the store is at MASTER_PORT. `timeout` is that of collectives. Where the group
    `is_made_here`, it is there in the block; else the ranks have met, and the program makes it.

    A rank leaves the block once all ranks are in, so that nobody is still connecting to it. Rank 0
    leaves when every other rank has left, so that nobody loses the store. After an exception
    nobody waits.

    Raises `Error` if variables are missing, the port is taken, ranks do not appear in time, two
    processes claim one rank, or rank 0 goes before the others.
    """
    assigned = assignment_of_this_process()
    if assigned is None:
        yield device()
        return
    store = _join(assigned, store_socket, timeout, is_made_here)
    try:
        yield device()
    except BaseException:
        _say_left(store, assigned)
        raise
    _leave(store, assigned, timeout)


def _join(
    assigned: Assignment, store_socket: int | None, timeout: datetime.timedelta, is_made_here: bool
) -> dist.Store:
    """Become a member of the process group; returns the store."""
    global _assigned, _store, _device, _joins
    _joins += 1
    _keep_groups()
    store = dist.PrefixStore(f"{assigned.attempt}/{_joins}", _open_store(assigned, store_socket))
    with explain_lost_store(assigned.rank):
        gpu = _take_gpu(assigned) if is_made_here else ""
        address, gpus = _meet(store, assigned, gpu)
        interface = interface_towards(address)
        os.environ["GLOO_SOCKET_IFNAME"] = interface
        os.environ["NCCL_SOCKET_IFNAME"] = f"={interface}"  # without it, eth1 also means eth10
        if is_made_here:
            _form_group(store, assigned, gpus, timeout)
        _assigned, _store, _device = assigned, store, device()
        store.set(f"joined/{assigned.rank}", "")
    return store


def _leave(store: dist.Store, assigned: Assignment, timeout: datetime.timedelta) -> None:
    """Leave the process group, the store last, and rank 0 as the last rank."""
    global _assigned, _store, _device
    with explain_lost_store(assigned.rank):
        everybody = range(assigned.world_size)
        store.wait([f"joined/{peer}" for peer in everybody], timeout)
        store.set(f"returned/{assigned.rank}", "")
        if dist.is_initialized() and dist.get_backend() == "nccl":
            # To destroy an NCCL group is a collective: ranks of a host that do not do so at the
            # same time wait for each other (NCCL's guide, ncclCommDestroy).
            store.wait([f"returned/{peer}" for peer in everybody], FOREVER)
            dist.destroy_process_group()
        if assigned.rank == 0 and assigned.world_size > 1:
            store.wait([f"left/{peer}" for peer in range(1, assigned.world_size)], FOREVER)
    # With gloo, which waits for nobody here. The function may have done so itself, as the last
    # line of a script for torchrun does.
    if dist.is_initialized():
        dist.destroy_process_group()
    _assigned = _store = _device = None
    _say_left(store, assigned)


def _say_left(store: dist.Store, assigned: Assignment) -> None:
    """The last message. If it does not arrive, rank 0 has failed, and reports that itself.

    Also after an exception, so that nobody waits for this rank. Its group is not destroyed then:
    that could wait for peers, and the process is about to end.
    """
    with contextlib.suppress(dist.DistError):
        store.set(f"returned/{assigned.rank}", "")
        store.set(f"left/{assigned.rank}", "")


@contextlib.contextmanager
def explain_lost_store(rank: int) -> Iterator[None]:
    """Turn torch's error of a lost store into one that says what has ended."""
    try:
        yield
    except dist.DistNetworkError:
        raise Error(
            f"Rank {rank} lost the store while it waited for other ranks (Connection closed by "
            "peer): rank 0, or torchrun, has ended. Its own message says why."
        ) from None


# What the launcher has told this process, and the store.


def assignment_of_this_process() -> Assignment | None:
    """The assignment that a launcher has given this process, None if there was no launcher.

    Raises `Error` if only some of the variables are set.
    """
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    given = os.environ
    missing = [name for name in names if not given.get(name)]
    if len(missing) == len(names):
        return None
    if missing:
        raise Error(
            f"A launcher has set some of {', '.join(names)} but not {', '.join(missing)}. Start "
            "the ranks with torchrun, or set these too: MASTER_ADDR is the host of rank 0, "
            "MASTER_PORT a free port there."
        )
    run_id = given.get("TORCHELASTIC_RUN_ID") or given.get("DDP_RUN_ID", "")
    # Then torchrun's store listens on loopback too, and the host's name may lead nowhere
    is_of_torchrun = run_id and "DDP_WORKER_PROCESS" not in given
    all_ranks_are_local = is_of_torchrun and given.get("LOCAL_WORLD_SIZE") == given["WORLD_SIZE"]
    return Assignment(
        rank=int(given["RANK"]),
        world_size=int(given["WORLD_SIZE"]),
        # Without it, ranks that follow each other on a host take its GPUs in turn
        local_rank=int(given.get("LOCAL_RANK", given["RANK"])),
        address="127.0.0.1" if all_ranks_are_local else given["MASTER_ADDR"],
        port=int(given["MASTER_PORT"]),
        attempt=f"{run_id}/{given.get('TORCHELASTIC_RESTART_COUNT', 0)}",
    )


def _join_timeout() -> datetime.timedelta:
    return datetime.timedelta(seconds=float(os.environ.get("DDP_JOIN_TIMEOUT", JOIN_TIMEOUT)))


def _open_store(assigned: Assignment, store_socket: int | None) -> dist.Store:
    """torch's store: rank 0 opens it, unless torchrun has; the others connect to it."""
    is_there = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and store_socket is None
    opens = assigned.rank == 0 and not is_there
    began = time.monotonic()
    try:
        if not opens:
            # The launcher's is there already, or cannot be reached
            seconds = JOIN_TIMEOUT if is_there else _join_timeout().total_seconds()
            _wait_until_somebody_listens(assigned, seconds)
        return dist.TCPStore(
            assigned.address,
            assigned.port,
            is_master=opens,
            wait_for_workers=False,  # it would not say for whom
            multi_tenant=True,  # a process that joins again finds the port taken by itself
            master_listen_fd=store_socket,  # the store owns it from now on
            timeout=_join_timeout(),
        )
    except (dist.DistError, OSError) as error:
        verb, advice = "reach", "Is rank 0 alive, and does a firewall lie between the two hosts?"
        if opens:
            verb, advice = "open", "Another program holds the port: choose another MASTER_PORT."
        raise Error(
            f"Rank {assigned.rank} of {assigned.world_size} could not {verb} the store of rank 0 "
            f"at {assigned.address}, port {assigned.port}, within "
            f"{time.monotonic() - began:.0f} s: {first_line(error)}. {advice}"
        ) from error


def _wait_until_somebody_listens(assigned: Assignment, seconds: float) -> None:
    """torch's client prints stacks of C++ when nobody does, and looks again after seconds only.

    Raises OSError when time is up.
    """
    deadline = time.monotonic() + seconds
    while True:
        left = deadline - time.monotonic()
        try:
            place = assigned.address, assigned.port
            socket.create_connection(place, timeout=max(left, 0.1)).close()
            return
        except OSError:
            if left < 0:
                raise
            time.sleep(0.05)


# Every rank claims its number in the store, and waits for all others.


def _meet(store: dist.Store, assigned: Assignment, gpu: str) -> tuple[str, list[str]]:
    """Claim this rank, which has this GPU, and wait until all are claimed.

    Returns the address of rank 0's host, and the GPU of each rank ('' for none), in their order.
    Raises `Error` if another process has this rank, or if one does not come in time.
    """
    me = f"process {os.getpid()} on {socket.gethostname()}"
    holder = store.compare_set(f"claims/{assigned.rank}", "", me).decode()
    if holder != me:
        raise Error(
            f"Rank {assigned.rank} is taken: {holder} has it, and {me} claims it too. Give every "
            "process a rank of its own, and end processes of an earlier run."
        )
    *_, (address, *_) = socket.getaddrinfo(assigned.address, None, type=socket.SOCK_STREAM)[0]
    store.set(f"here/{assigned.rank}", f"{address} {gpu}")
    keys = [f"here/{peer}" for peer in range(assigned.world_size)]
    try:
        store.wait(keys, _join_timeout())
    except dist.DistStoreError:
        missing = [str(peer) for peer, key in enumerate(keys) if not store.check([key])]
        raise Error(
            f"Rank {assigned.rank} waited {_join_timeout().total_seconds():g} s for all "
            f"{assigned.world_size} ranks; still missing: rank {', '.join(missing)}. Were they "
            "started, and with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE?"
        ) from None
    answers = [value.decode().split(" ") for value in store.multi_get(keys)]
    addresses, gpus = map(list, zip(*answers))
    return reached_by_others(addresses), gpus


def reached_by_others(addresses: list[str]) -> str:
    """The address of rank 0's host, of those that the ranks have found for its name.

    On the host itself the name may lead to 127.0.1.1, which no other host reaches.
    """
    outward = [each for each in addresses if not ipaddress.ip_address(each).is_loopback]
    return (outward or addresses)[0]


def _take_gpu(assigned: Assignment) -> str:
    """Make this rank's own GPU the current one; returns its unique name, '' without one."""
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        return ""
    # dask-cuda lists the worker's own first. Where Slurm shows a rank only its own, there is one
    number = 0 if os.environ.get("DDP_OWN_GPU_FIRST") else assigned.local_rank
    index = number % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return str(torch.cuda.get_device_properties(index).uuid)


# The network interface and the group.


def interface_towards(address: str) -> str:
    """The name of the network interface through which this host reaches `address`.

    Otherwise gloo and NCCL would guess. Raises `Error` if no interface has the address used.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # UDP sends nothing here: the kernel only picks the route
        mine = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.split("%")[0] == mine for entry in addresses):
            return name
    raise Error(
        f"No network interface of this host has the address {mine}, by which {address} is reached."
    )


def _form_group(
    store: dist.Store, assigned: Assignment, gpus: list[str], timeout: datetime.timedelta
) -> None:
    """Make the default process group: NCCL if every rank has a GPU that no other rank has."""
    takes_nccl = all(gpus) and len(set(gpus)) == assigned.world_size
    # Otherwise a thread of NCCL asks the store once a second, even while Python ends.
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
    # gloo then fetches the addresses of all ranks in one request.
    os.environ.setdefault("GLOO_ENABLE_STORE_V2_API", "1")
    dist.init_process_group(
        "nccl" if takes_nccl else "gloo",
        store=dist.PrefixStore("group", store),
        rank=assigned.rank,
        world_size=assigned.world_size,
        timeout=timeout,
        # Without it torch, from 2.15 on, takes GPU LOCAL_RANK, which need not be this rank's own.
        device_id=torch.device("cuda", torch.cuda.current_device()) if takes_nccl else None,
    )
