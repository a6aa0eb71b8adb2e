"""The rank's side of a run: find the store, form the process group, choose the device.

Relies on the six variables that torchrun sets and that `agent` sets in the same way: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
MASTER_ADDR, MASTER_PORT. Without them there is one rank, and everything works alone. Promises: the backend is NCCL when every rank
has a GPU of its own, else gloo; both talk through the network interface by which the ranks' addresses are reached.
"""

import contextlib
import datetime
import os
import socket

import psutil
import torch
import torch.distributed as dist

from ddp_common.errors import Error

JOIN_TIMEOUT = 60  # seconds that ranks wait for each other to appear

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

    `listener` is the bound socket of the store, given to rank 0 by its agent; without it rank 0 opens MASTER_PORT itself.
    `timeout` is that of collectives. Leaving the block waits until every rank has left it, so that nobody loses the store; leaving
    it with an exception waits for nobody. Raises `Error` when variables are missing or ranks do not appear in time.
    """
    place = _read_environment()
    if place is None:
        yield device()
        return
    global _store
    my_rank, size, address, port = place
    store = _store = _connect(my_rank, size, address, port, listener)
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = interface_towards(address, port)
    backend = _choose_backend(store, my_rank, size)
    dist.init_process_group(backend, store=dist.PrefixStore("group", store), rank=my_rank, world_size=size, timeout=timeout)
    yield device()
    store.set(f"left/{my_rank}", b"")
    if my_rank == 0:
        store.wait([f"left/{peer}" for peer in range(size)], timeout)
    _store = None
    dist.destroy_process_group()  # not after an exception: it could wait for peers, and the process is about to end


def _read_environment():
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if name not in os.environ]
    if len(missing) == len(names):
        return None
    if missing:
        raise Error(f"A launcher has set some of {', '.join(names)} but not {', '.join(missing)}. Start the ranks with torchrun or "
                    "`make run`, or unset the others to run alone.")
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])


def _connect(my_rank, size, address, port, listener):
    hosted_by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    hosting = my_rank == 0 and not hosted_by_torchrun
    deadline = datetime.timedelta(seconds=JOIN_TIMEOUT)
    try:
        return dist.TCPStore(address, port, None, is_master=hosting, wait_for_workers=False, timeout=deadline,
                             master_listen_fd=listener.detach() if hosting and listener is not None else None)
    except (dist.DistError, RuntimeError) as error:
        raise Error(f"Rank {my_rank} of {size} could not reach the store of rank 0 at {address}:{port} within {JOIN_TIMEOUT} s: "
                    f"{error}. Is rank 0 alive, and does a firewall lie between the two hosts?") from error


def interface_towards(address, port):
    """The name of the network interface that holds this host's address as `address` sees it; gloo and NCCL would guess."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, port))  # a UDP socket sends nothing here: the kernel only picks the route
        mine = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.split("%")[0] == mine for entry in addresses):
            return name
    raise Error(f"No network interface of this host has the address {mine}, by which {address} is reached.")


def _choose_backend(store, my_rank, size):
    """NCCL if every rank has a GPU that no other rank has. The ranks tell each other through the store."""
    mine = ""
    if torch.cuda.is_available() and dist.is_nccl_available():
        local = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()  # dask-cuda: own GPU first, Slurm: only own GPU
        torch.cuda.set_device(0 if os.environ.get("DDP_OWN_GPU_FIRST") else local)
        mine = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    store.set(f"gpu/{my_rank}", mine)
    try:
        store.wait([f"gpu/{peer}" for peer in range(size)], datetime.timedelta(seconds=JOIN_TIMEOUT))
    except dist.DistStoreError:
        missing = [str(peer) for peer in range(size) if not store.check([f"gpu/{peer}"])]
        raise Error(f"Rank {my_rank} waited {JOIN_TIMEOUT} s for all {size} ranks; still missing: rank {', '.join(missing)}. "
                    "Were they started, and with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE?") from None
    all_gpus = [bytes(store.get(f"gpu/{peer}")).decode() for peer in range(size)]
    return "nccl" if all(all_gpus) and len(set(all_gpus)) == size else "gloo"
