"""The rank's side of a run: find the store, form the process group, choose the device.

Relies on the variables that torchrun sets, and `agent` in the same way (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT), or on
those of a Slurm step (`slurm`). Without them there is one rank, and everything works alone. Promises: the backend is NCCL when every
rank has a GPU of its own, else gloo; both talk through the network interface by which the ranks reach each other; a rank that is
missing or doubled is named; who does not know the run's secret (`secret`) becomes no rank.
"""

import contextlib
import ctypes
import datetime
import hmac
import os
import socket
import struct
import time

import psutil
import torch
import torch.distributed as dist

from ddp_common.errors import Error
from ddp_common.ranks import secret, slurm
from ddp_common.ranks.place import LOOPBACK, Place
from ddp_common.ranks.store import MAC, NONCE, Server, StrangerError, connect, proof

JOIN_TIMEOUT = float(
    os.environ.get("DDP_JOIN_TIMEOUT", 60)
)  # seconds that ranks wait for each other to appear
ANSWER_TIMEOUT = 5  # seconds that whoever answers at the store's port has to say who it is
PROBE_TIMEOUT = 1  # the same where several ports may be the right one
SO_ATTACH_FILTER = 26  # Linux, <asm/socket.h>

_place = _device = _store = (
    None  # of this rank, as long as it is in a process group, also when its own code has destroyed that
)


def rank():
    """This process's rank, 0 when alone."""
    if _place is not None:
        return _place.rank
    return dist.get_rank() if dist.is_initialized() else 0


def world_size():
    """The number of ranks, 1 when alone."""
    if _place is not None:
        return _place.world_size
    return dist.get_world_size() if dist.is_initialized() else 1


def current_store():
    """The `store.Store` of the process group that this rank is in, None when alone."""
    return _store


def device():
    """The `torch.device` of this rank: its own GPU when the backend is NCCL or it is alone with one, else the CPU."""
    if _device is not None:
        return _device
    alone = not dist.is_initialized()
    if torch.cuda.is_available() and (alone or dist.get_backend() == "nccl"):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


@contextlib.contextmanager
def process_group(listener=None, timeout=datetime.timedelta(minutes=30)):
    """Be a member of the process group inside a `with` block; yields the device.

    `listener` is the bound socket of the store, given to rank 0 by its agent; without it rank 0 opens MASTER_PORT itself, or in a Slurm
    step any free port. `timeout` is that of collectives. Every rank leaves the block when all ranks are in, so that nobody still
    connects to it, and rank 0 when every rank has left it, so that nobody loses the store; with an exception nobody waits. Raises
    `Error` when variables are missing, ranks do not appear in time, two processes claim one rank, or strangers stand in their place.
    """
    global _place, _device, _store
    place = place_of_this_process()
    if place is None:
        yield device()
        return
    shared = secret.of_this_run()
    key = proof(shared, _name_of_this_run().encode())
    server, store = _join_store(place, listener, key)
    store.private = bool(shared)
    with _said_if_lost(place):
        _claim_rank(store, place)
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = interface_towards(
            _address_for_all(store, place)
        )
        _form_group(_choose_backend(store, place), store, place, key, timeout)
    if server is not None:
        secret.remove_from_run_directory()
        server.slow_down()
    _device = device()
    _place, _store = place, store
    everybody = range(place.world_size)
    store.set(f"joined/{place.rank}", b"")
    with _explained():
        yield _device
    store.wait([f"joined/{peer}" for peer in everybody], timeout)
    if place.rank == 0:
        store.set("left/0", b"")
        store.wait([f"left/{peer}" for peer in everybody], timeout)
    if dist.is_initialized():  # scripts for torchrun destroy it in their last line
        dist.destroy_process_group()  # not after an exception: it could wait for peers, and the process is about to end
    _place = _device = _store = None
    if place.rank != 0:
        with contextlib.suppress(
            dist.DistError
        ):  # nobody has to hear it: rank 0 itself says if it has failed
            store.set(
                f"left/{place.rank}", b""
            )  # the last word: with it, rank 0 may close the store
    store.close()
    if server is not None:
        server.close()


@contextlib.contextmanager
def _explained():
    """A script for torchrun makes its process group itself, and is told here that it need not."""
    try:
        yield
    except ValueError as error:
        if "default process group twice" not in str(error):
            raise
        raise Error(
            "init_process_group was called in the training function, and the process group is there already: every rank is in it "
            "when the function begins. Remove that line, and use ddp.rank(), ddp.world_size() and ddp.device(); docs/migration.md "
            "has a table."
        ) from error


def place_of_this_process():
    """The `Place` that a launcher has given this process, None if there was no launcher. Raises `Error` for half a set of variables."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if name not in os.environ]
    if len(missing) == len(names):
        return slurm.place()
    if missing:
        raise Error(
            f"A launcher has set some of {', '.join(names)} but not {', '.join(missing)}. Start the ranks with torchrun or "
            "`make run`, or unset the others to run alone."
        )
    one_host = (
        "TORCHELASTIC_RUN_ID" in os.environ
        and os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]
    )
    return Place(
        int(os.environ["RANK"]),
        int(os.environ["WORLD_SIZE"]),
        int(os.environ.get("LOCAL_RANK", 0)),
        LOOPBACK if one_host else os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
    )


def _name_of_this_run():
    """What a run's ranks have in common and another run with the same secret has not; torchrun counts the attempts."""
    if "MASTER_PORT" not in os.environ:
        return slurm.token()
    return " ".join(
        os.environ.get(name, "")
        for name in (
            "TORCHELASTIC_RUN_ID",
            "TORCHELASTIC_RESTART_COUNT",
            "MASTER_PORT",
            "WORLD_SIZE",
        )
    )


def _join_store(place, listener, key):
    """(the server if this is rank 0, else None; the `Store`)."""
    deadline = time.monotonic() + JOIN_TIMEOUT
    try:
        if place.rank != 0:
            return None, _find_store(place, key, deadline)
        server = Server(listener if listener is not None else _open_port(place), key)
        if _is_agents_port():
            _store_of_torchrun(place, deadline).set(_key_of_port(), str(server.port))
        return server, connect(*server.address, key, JOIN_TIMEOUT)
    except (dist.DistError, RuntimeError, OSError) as error:
        where = f"{place.address}, port {place.port or ', '.join(map(str, slurm.candidates()))}"
        raise Error(
            f"Rank {place.rank} of {place.world_size} could not {'open' if place.rank == 0 else 'reach'} the store of rank 0 at "
            f"{where}, within {JOIN_TIMEOUT} s: {str(error).splitlines()[0]}. {_advice(place, error)}"
        ) from error


def _advice(place, error):
    if place.rank == 0:
        return "Another program holds the port: choose another MASTER_PORT."
    if isinstance(error, StrangerError):
        return (
            "It is another program, another run, or a rank 0 that cannot see the file in which ranks agree on their secret: set "
            f"{secret.VARIABLE} to the same random text for every rank, or CHECKPOINT to a folder that all of them see."
        )
    return "Is rank 0 alive, and does a firewall lie between the two hosts?"


def _open_port(place):
    """A socket that listens for the other ranks, on the loopback interface if they are all on this host."""
    if place.port is None:
        return slurm.open_port(place.address)
    host = place.address if place.address == LOOPBACK else ""
    dual = not host and socket.has_dualstack_ipv6()
    return socket.create_server(
        (host, 0 if _is_agents_port() else place.port),
        family=socket.AF_INET6 if dual else socket.AF_INET,
        dualstack_ipv6=dual,
        backlog=1024,
    )


def _find_store(place, key, deadline):
    """The store of rank 0, once it is there. Raises OSError when time is up: a `StrangerError` if somebody else was."""
    problem = ConnectionError("nothing answers there")
    while time.monotonic() < deadline:
        ports = slurm.candidates() if place.port is None else [place.port]
        if _is_agents_port():
            ports = [_told_port(place, deadline)]
        for port in ports:
            try:
                return connect(
                    place.address, port, key, ANSWER_TIMEOUT if len(ports) == 1 else PROBE_TIMEOUT
                )
            except StrangerError as error:
                problem = error
            except OSError:  # not there yet, or a stranger that says nothing
                continue
        time.sleep(0.05)
    raise problem


def _is_agents_port():
    """Whether torchrun itself has a store at MASTER_PORT: then rank 0 takes another port, and says there which."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _key_of_port():
    return f"ddp/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}/port"


def _told_port(place, deadline):
    try:
        return int(_store_of_torchrun(place, deadline).get(_key_of_port()))
    except ValueError:
        raise ConnectionError("torchrun's store says something else than a port") from None


def _store_of_torchrun(place, deadline):
    while not _answers(
        place.address, place.port
    ):  # a store's own client would wait for ever on a silent stranger
        if time.monotonic() > deadline:
            raise ConnectionError("nothing answers there")
        time.sleep(0.1)
    left = datetime.timedelta(seconds=max(1.0, deadline - time.monotonic()))
    return dist.TCPStore(
        place.address, place.port, None, is_master=False, wait_for_workers=False, timeout=left
    )


def _answers(address, port):
    try:
        socket.create_connection((address, port), timeout=1).close()
    except OSError:
        return False
    return True


def _claim_rank(store, place):
    if (
        place.rank == place.world_size - 1
    ):  # before its claim: who has seen that one finds the address
        store.set(
            "address", socket.getaddrinfo(place.address, None, type=socket.SOCK_STREAM)[0][4][0]
        )
    me = f"process {os.getpid()} on {socket.gethostname()}"
    other = store.compare_set(f"claims/{place.rank}", "", me).decode()
    if other != me:
        raise Error(
            f"Rank {place.rank} is taken: {other} has it, and {me} claims it too. Give every process a rank of its own; a process "
            "of an earlier run that still lives would also explain it."
        )


def _address_for_all(store, place):
    """The address of rank 0's host as the last rank sees it: on its own host a name may lead to 127.0.1.1, which nobody else reaches."""
    return _everybodys(store, place, "claims", "address")[-1].decode()


def _everybodys(store, place, what, *more):
    """The values of the key `what` of all ranks, in their order, and of `more` keys. Raises `Error` if a rank does not come."""
    keys = [f"{what}/{peer}" for peer in range(place.world_size)]
    try:
        return store.multi_get([*keys, *more], datetime.timedelta(seconds=JOIN_TIMEOUT))
    except dist.DistStoreError:
        missing = [str(peer) for peer, key in enumerate(keys) if not store.check([key])]
        raise Error(
            f"Rank {place.rank} waited {JOIN_TIMEOUT} s for all {place.world_size} ranks; still missing: rank {', '.join(missing)}. "
            "Were they started, and with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE?"
        ) from None


@contextlib.contextmanager
def _said_if_lost(place):
    try:
        yield
    except dist.DistNetworkError:
        raise Error(
            f"Rank {place.rank} lost the store while it waited for the other ranks: rank 0 has given up or died. Its own message says "
            "why."
        ) from None


def interface_towards(address):
    """The name of the network interface that holds this host's address as `address` sees it; gloo and NCCL would guess."""
    with socket.socket(
        socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM
    ) as probe:
        probe.connect(
            (address, 9)
        )  # a UDP socket sends nothing here: the kernel only picks the route
        mine = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.split("%")[0] == mine for entry in addresses):
            return name
    raise Error(
        f"No network interface of this host has the address {mine}, by which {address} is reached."
    )


def _choose_backend(store, place):
    """NCCL if every rank has a GPU that no other rank has. The ranks tell each other through the store."""
    mine = ""
    if torch.cuda.is_available() and dist.is_nccl_available():
        local = (
            place.local_rank % torch.cuda.device_count()
        )  # dask-cuda: own GPU first, Slurm: only own GPU
        torch.cuda.set_device(0 if os.environ.get("DDP_OWN_GPU_FIRST") else local)
        mine = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    store.set(f"gpu/{place.rank}", mine)
    all_gpus = [gpu.decode() for gpu in _everybodys(store, place, "gpu")]
    return "nccl" if all(all_gpus) and len(set(all_gpus)) == place.world_size else "gloo"


def _form_group(backend, store, place, key, timeout):
    """Make the default process group; each rank then proves to each other one that it is no stranger, and nobody else gets in."""
    if (
        backend == "nccl"
    ):  # else its thread looks into the store once a second, even while Python ends
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
    os.environ.setdefault(
        "GLOO_ENABLE_STORE_V2_API", "1"
    )  # gloo then asks for all ranks' addresses at once
    before = _listening_sockets()
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("group", store),
        rank=place.rank,
        world_size=place.world_size,
        timeout=timeout,
    )
    if backend == "gloo":
        _prove_to_each_other(place, key)
        for inode, number in _listening_sockets().items():
            if inode not in before:
                _admit_nobody(number)


def _prove_to_each_other(place, key):
    """Whoever was first at gloo's port with the right number counts as a rank there: every connection must show that it knows the key."""
    size = place.world_size
    asked = os.urandom(NONCE * size)
    to_answer = _exchange(asked, size)
    parts = [to_answer[NONCE * peer :][:NONCE] for peer in range(size)]
    answers = _exchange(
        b"".join(
            proof(key, f"{place.rank} to {peer}".encode(), part) for peer, part in enumerate(parts)
        ),
        size,
    )
    for peer in range(size):
        expected = proof(key, f"{peer} to {place.rank}".encode(), asked[NONCE * peer :][:NONCE])
        if not hmac.compare_digest(answers[MAC * peer :][:MAC], expected):
            raise Error(
                f"Rank {place.rank}: who has connected in the place of rank {peer} does not know the secret of this run. Another user of "
                "this host or network interferes, or a port scan was first. Start again; if it stays, tell those who run the host."
            )


def _exchange(content, size):
    """Send each rank its part of `content` (bytes), by the connection between the two; returns what they sent."""
    sent = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    received = torch.empty_like(sent)
    work = dist.all_to_all_single(received, sent, async_op=True)
    try:
        work.wait(datetime.timedelta(seconds=JOIN_TIMEOUT))
    except RuntimeError as error:
        raise Error(
            f"A rank, or a stranger in its place, did not answer within {JOIN_TIMEOUT} s, or has gone: {str(error).splitlines()[0]}. "
            "Start again."
        ) from error
    return received.numpy().tobytes()


def _listening_sockets():
    """Those of this process, on systems that tell: dict of 'socket:[inode]' -> file descriptor."""
    found = {}
    with contextlib.suppress(FileNotFoundError):
        for number in map(int, os.listdir("/proc/self/fd")):
            with contextlib.suppress(OSError):  # closed by now
                name = os.readlink(f"/proc/self/fd/{number}")
                if name.startswith("socket:") and _is_listening(number):
                    found[name] = number
    return found


def _is_listening(number):
    with socket.socket(fileno=os.dup(number)) as end:
        return bool(end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _admit_nobody(number):
    """From now on the kernel drops what knocks at this listening socket; connections that stand are not touched. Linux only."""
    instruction = ctypes.create_string_buffer(
        struct.pack("HBBI", 6, 0, 0, 0)
    )  # of a classic BPF program: return 0, drop it
    program = struct.pack("HP", 1, ctypes.addressof(instruction))
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as end:
        end.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)
