"""The rank's side of a run: find the store, form the process group, choose the device.

Relies on the variables that torchrun sets, and `agent` in the same way (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT), or on
those of a Slurm step (`slurm`). Without them there is one rank, and everything works alone. Promises: the backend is NCCL when every
rank has a GPU of its own, else gloo; both talk through the network interface by which the ranks reach each other; a rank that is
missing or doubled is named.
"""

import contextlib
import datetime
import os
import socket
import time
from dataclasses import dataclass

import psutil
import torch
import torch.distributed as dist

from ddp_common import slurm
from ddp_common.errors import Error

JOIN_TIMEOUT = float(os.environ.get("DDP_JOIN_TIMEOUT", 60))  # seconds that ranks wait for each other to appear

_store = None


def rank():
    """This process's rank, 0 when alone."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size():
    """The number of ranks, 1 when alone."""
    return dist.get_world_size() if dist.is_initialized() else 1


def current_store():
    """The store of the process group that this rank is in, None when alone."""
    return _store


def device():
    """The `torch.device` of this rank: its own GPU when the backend is NCCL or it is alone with one, else the CPU."""
    alone = not dist.is_initialized()
    if torch.cuda.is_available() and (alone or dist.get_backend() == "nccl"):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


@contextlib.contextmanager
def process_group(listener=None, timeout=datetime.timedelta(minutes=30)):
    """Be a member of the process group inside a `with` block; yields the device.

    `listener` is the bound socket of the store, given to rank 0 by its agent; without it rank 0 opens MASTER_PORT itself, or in a Slurm
    step any free port. `timeout` is that of collectives. Rank 0 leaves the block when every rank has left it, so that nobody loses the
    store, and the others when every rank is in, so that nobody still connects to them; with an exception nobody waits. Raises `Error`
    when variables are missing, ranks do not appear in time, or two processes claim one rank.
    """
    global _store
    place = place_of_this_process()
    if place is None:
        yield device()
        return
    # torchrun's own store outlives a restart of the ranks: the count keeps the attempts apart
    store = _store = dist.PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", _connect(place, listener))
    _claim_rank(store, place)
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = interface_towards(_address_for_all(store, place))
    backend = _choose_backend(store, place)
    dist.init_process_group(backend, store=dist.PrefixStore("group", store), rank=place.rank, world_size=place.world_size, timeout=timeout)
    store.set(f"joined/{place.rank}", b"")
    yield device()
    store.set(f"left/{place.rank}", b"")
    awaited = "left" if place.rank == 0 else "joined"
    store.wait([f"{awaited}/{peer}" for peer in range(place.world_size)], timeout)
    _store = None
    dist.destroy_process_group()  # not after an exception: it could wait for peers, and the process is about to end


@dataclass(frozen=True)
class Place:
    """Where this process stands among the ranks, and where their store is. `port` is None in a Slurm step: there a beacon tells it."""

    rank: int
    world_size: int
    local_rank: int
    address: str
    port: int | None = None


def place_of_this_process():
    """The `Place` that a launcher has given this process, None if there was no launcher. Raises `Error` for half a set of variables."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if name not in os.environ]
    if len(missing) == len(names):
        return slurm.place()
    if missing:
        raise Error(f"A launcher has set some of {', '.join(names)} but not {', '.join(missing)}. Start the ranks with torchrun or "
                    "`make run`, or unset the others to run alone.")
    return Place(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ.get("LOCAL_RANK", 0)), os.environ["MASTER_ADDR"],
                 int(os.environ["MASTER_PORT"]))


def _connect(place, listener):
    hosting = place.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    deadline, options = time.monotonic() + JOIN_TIMEOUT, {"wait_for_workers": False, "timeout": datetime.timedelta(seconds=JOIN_TIMEOUT)}
    try:
        if hosting:
            store = dist.TCPStore(place.address, place.port or 0, None, is_master=True,
                                  master_listen_fd=listener.detach() if listener is not None else None, **options)
            if place.port is None:
                slurm.light_beacon(store.port)
            return store
        port = place.port or slurm.find_beacon(place.address, deadline)
        while not _answers(place.address, port):  # a store's own client would wait for ever on a silent stranger
            if time.monotonic() > deadline:
                raise ConnectionError("nothing answers there")
            time.sleep(0.1)
        return dist.TCPStore(place.address, port, None, is_master=False, **options)
    except (dist.DistError, RuntimeError, OSError) as error:
        where = f"{place.address}, port {place.port or 'of its beacon'}"
        raise Error(f"Rank {place.rank} of {place.world_size} could not {'open' if hosting else 'reach'} the store of rank 0 at {where}, within "
                    f"{JOIN_TIMEOUT} s: {str(error).splitlines()[0]}. "
                    + ("Another program holds the port: choose another MASTER_PORT." if hosting else
                       "Is rank 0 alive, and does a firewall lie between the two hosts?")) from error


def _answers(address, port):
    try:
        socket.create_connection((address, port), timeout=1).close()
    except OSError:
        return False
    return True


def _claim_rank(store, place):
    me = f"process {os.getpid()} on {socket.gethostname()}"
    if store.add(f"claims/{place.rank}", 1) > 1:
        other = store.get(f"who/{place.rank}").decode()
        raise Error(f"Rank {place.rank} is taken: {other} has it, and {me} claims it too. Give every process a rank of its own; a process "
                    "of an earlier run that still lives would also explain it.")
    store.set(f"who/{place.rank}", me)


def _address_for_all(store, place):
    """The address of rank 0's host as the last rank sees it: on its own host a name may lead to 127.0.1.1, which nobody else reaches."""
    if place.rank == place.world_size - 1:
        store.set("address", socket.getaddrinfo(place.address, None, type=socket.SOCK_STREAM)[0][4][0])
    _wait_for_all(store, place, "claims")
    return store.get("address").decode()


def _wait_for_all(store, place, what):
    keys = [f"{what}/{peer}" for peer in range(place.world_size)]
    try:
        store.wait(keys, datetime.timedelta(seconds=JOIN_TIMEOUT))
    except dist.DistStoreError:
        missing = [str(peer) for peer, key in enumerate(keys) if not store.check([key])]
        raise Error(f"Rank {place.rank} waited {JOIN_TIMEOUT} s for all {place.world_size} ranks; still missing: rank {', '.join(missing)}. "
                    "Were they started, and with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE?") from None
    except dist.DistError:
        raise Error(f"Rank {place.rank} lost the store while it waited for the other ranks: rank 0 has given up or died. Its own message says "
                    "why.") from None


def interface_towards(address):
    """The name of the network interface that holds this host's address as `address` sees it; gloo and NCCL would guess."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # a UDP socket sends nothing here: the kernel only picks the route
        mine = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.split("%")[0] == mine for entry in addresses):
            return name
    raise Error(f"No network interface of this host has the address {mine}, by which {address} is reached.")


def _choose_backend(store, place):
    """NCCL if every rank has a GPU that no other rank has. The ranks tell each other through the store."""
    mine = ""
    if torch.cuda.is_available() and dist.is_nccl_available():
        local = place.local_rank % torch.cuda.device_count()  # dask-cuda: own GPU first, Slurm: only own GPU
        torch.cuda.set_device(0 if os.environ.get("DDP_OWN_GPU_FIRST") else local)
        mine = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    store.set(f"gpu/{place.rank}", mine)
    _wait_for_all(store, place, "gpu")
    all_gpus = [bytes(gpu).decode() for gpu in store.multi_get([f"gpu/{peer}" for peer in range(place.world_size)])]  # one question, not one for each
    return "nccl" if all(all_gpus) and len(set(all_gpus)) == place.world_size else "gloo"
