"""The rank's side of a run: find the store, form the process group, choose the device.

Relies on the variables that torchrun sets, and our worker's agent likewise (RANK, WORLD_SIZE,
LOCAL_RANK, MASTER_ADDR, MASTER_PORT), or on those of a Slurm step (`slurm`). Without them there is
one rank, and everything works alone.

Promises: the backend is NCCL if every rank has a GPU of its own, else gloo; both use the network
interface through which the ranks reach each other; a rank that is missing or claimed twice is
named; a process that does not know the run's secret (`secret`), if there is one, can join neither
the store nor gloo's group.
"""

import contextlib
import ctypes
import datetime
import hmac
import os
import socket
import struct
import time
from collections.abc import Iterator

import psutil
import torch
import torch.distributed as dist

from ddp_common.errors import Error, first_line
from ddp_common.ranks import secret, slurm, store_port
from ddp_common.ranks.place import LOOPBACK, Place
from ddp_common.ranks.store import MAC, NONCE, Server, Store, StrangerError, connect, proof

JOIN_TIMEOUT = float(os.environ.get("DDP_JOIN_TIMEOUT", 60))  # seconds that ranks await each other
ANSWER_TIMEOUT = 5  # seconds that whoever answers at the store's port has to prove itself
FOREVER = datetime.timedelta(days=365)
PROBE_TIMEOUT = 1  # the same where several ports may be the right one
SO_ATTACH_FILTER = 26  # Linux, <asm/socket.h>

# Of this rank while it is in a process group, even if its own code has destroyed the group.
_place = None
_device = None
_store = None

# torch 2.13 hangs where the last reference to a gloo group goes right after a `backward`: the
# group waits for its threads, and these wait for Python's lock. A function that destroys the group
# in its last line would do so, when its model is freed. This reference stays.
_group = None


def rank() -> int:
    """This process's rank, 0 when alone."""
    if _place is not None:
        return _place.rank
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """The number of ranks, 1 when alone."""
    if _place is not None:
        return _place.world_size
    return dist.get_world_size() if dist.is_initialized() else 1


def current_store() -> Store | None:
    """The store of the process group that this rank is in, None when alone."""
    return _store


def has_left(peer: int) -> bool:
    """Whether a rank of this process group has left it, or has died."""
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
    store_socket: socket.socket | None = None,
    timeout: datetime.timedelta = datetime.timedelta(minutes=30),
) -> Iterator[torch.device]:
    """Be a member of the process group inside a `with` block; yields the device.

    `store_socket` is the bound socket of the store, which rank 0 has from its agent; without it
    rank 0 opens a port itself (`store_port`). `timeout` is that of collectives.

    A rank leaves the block once all ranks are in, so that nobody is still connecting to it. Rank 0
    leaves when every other rank has left or died, so that nobody loses the store. After an
    exception nobody waits.

    Raises `Error` if variables are missing, ranks do not appear in time, two processes claim one
    rank, or strangers stand in their place.
    """
    place = place_of_this_process()
    if place is None:
        yield device()
        return
    server, store = _join(place, store_socket, timeout)
    with _explain_second_group():
        yield device()
    # Not in a `finally`: after an exception nobody waits.
    _leave(place, server, store, timeout)


def _join(place, store_socket, timeout):
    """Become a member of the process group; returns the server (None but on rank 0), the store."""
    global _place, _device, _store, _group
    shared = secret.of_this_run()
    key = proof(shared, _name_of_this_attempt().encode())  # derived: of this attempt alone
    server, store = _join_store(place, store_socket, key)
    store.private = bool(shared)
    with _explain_lost_store(place):
        _claim_rank(store, place)
        interface = interface_towards(_address_for_all(store, place))
        os.environ["GLOO_SOCKET_IFNAME"] = interface
        os.environ["NCCL_SOCKET_IFNAME"] = f"={interface}"  # without it, eth1 also means eth10
        backend = _choose_backend(store, place)
        _form_group(backend, store, place, key, timeout)
    _group = dist.group.WORLD
    if server is not None:
        secret.remove_from_run_directory()
        server.slow_down()
    _device = device()
    _place = place
    _store = store
    if place.rank != 0:
        store.set_at_the_end([f"left/{place.rank}", f"stop/left/{place.rank}"])
    store.set(f"joined/{place.rank}", b"")
    return server, store


def _leave(place, server, store, timeout):
    """Leave the process group, the store last, and rank 0 as the last rank."""
    global _place, _device, _store
    everybody = range(place.world_size)
    store.wait([f"joined/{peer}" for peer in everybody], timeout)
    if place.rank == 0:
        store.set("left/0", b"")
        # However long a rank works on alone. One that has died counts as one that has left.
        store.wait([f"left/{peer}" for peer in everybody], FOREVER)
    # A script for torchrun destroys the group in its last line. After an exception nobody does:
    # that could wait for peers, and the process is about to end.
    if dist.is_initialized():
        dist.destroy_process_group()
    _place = None
    _device = None
    _store = None
    if place.rank != 0:
        # The last message: after it, rank 0 may close the store. If it does not arrive, rank 0
        # has failed, and reports that itself.
        with contextlib.suppress(dist.DistError):
            store.set(f"left/{place.rank}", b"")
    store.close()
    if server is not None:
        server.close()


@contextlib.contextmanager
def _explain_second_group():
    """A script for torchrun makes its process group itself, and learns here that it need not."""
    try:
        yield
    except ValueError as error:
        if "default process group twice" not in str(error):
            raise
        raise Error(
            "init_process_group was called in the training function, and the process group is "
            "there already: every rank is in it when the function begins. Remove that line, and "
            "use ddp.rank(), ddp.world_size() and ddp.device(); docs/migration.md has a table."
        ) from error


# What the launcher has told this process.


def place_of_this_process() -> Place | None:
    """The place that a launcher has given this process, None if there was no launcher.

    Raises `Error` if only some of the variables are set.
    """
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if name not in os.environ]
    if len(missing) == len(names):
        return slurm.place()
    if missing:
        raise Error(
            f"A launcher has set some of {', '.join(names)} but not {', '.join(missing)}. Start "
            "the ranks with torchrun or `make run`, or unset the others to run alone."
        )
    by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    all_ranks_are_local = os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]
    if by_torchrun and all_ranks_are_local:
        address = LOOPBACK
    else:
        address = os.environ["MASTER_ADDR"]
    return Place(
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        local_rank=int(os.environ.get("LOCAL_RANK", 0)),
        address=address,
        port=int(os.environ["MASTER_PORT"]),
    )


def _name_of_this_attempt():
    """What the ranks of an attempt have in common, but those of another one have not."""
    if "MASTER_PORT" not in os.environ:
        return slurm.token()
    names = (
        "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_RESTART_COUNT",  # torchrun's attempts
        "MASTER_PORT",
        "WORLD_SIZE",
    )
    return " ".join(os.environ.get(name, "") for name in names)


# The store: rank 0 opens it, the others find it.


def _join_store(place, store_socket, key):
    """(the server on rank 0, else None; this rank's `Store`)."""
    deadline = time.monotonic() + JOIN_TIMEOUT
    try:
        if place.rank != 0:
            return None, _find_store(place, key, deadline)
        if store_socket is None:
            store_socket = store_port.listen(place)
            store_port.say(place, store_socket.getsockname()[1], deadline)
        server = Server(store_socket, key)
        return server, connect(*server.address, key, JOIN_TIMEOUT)
    except (dist.DistError, RuntimeError, OSError) as error:
        verb = "open" if place.rank == 0 else "reach"
        reason = first_line(error)
        raise Error(
            f"Rank {place.rank} of {place.world_size} could not {verb} the store of rank 0 at "
            f"{store_port.in_words(place)}, within {JOIN_TIMEOUT} s: {reason}. "
            f"{_advice(place, error)}"
        ) from error


def _advice(place, error):
    if place.rank == 0:
        return "Another program holds the port: choose another MASTER_PORT."
    if isinstance(error, StrangerError):
        return (
            "It is another program, another run, or a rank 0 that cannot see the file in which "
            f"ranks agree on their secret: set {secret.VARIABLE} to the same random text for "
            "every rank, or CHECKPOINT to a folder that all of them see."
        )
    return "Is rank 0 alive, and does a firewall lie between the two hosts?"


def _find_store(place, key, deadline):
    """The store of rank 0, once it is there.

    Raises OSError when time is up: a `StrangerError` if somebody else answered.
    """
    problem = ConnectionError("nothing answers there")
    while time.monotonic() < deadline:
        ports = store_port.to_try(place, deadline)
        timeout = ANSWER_TIMEOUT if len(ports) == 1 else PROBE_TIMEOUT
        for port in ports:
            try:
                return connect(place.address, port, key, timeout)
            except StrangerError as error:
                problem = error
            except OSError:  # not there yet, or a stranger that says nothing
                continue
        time.sleep(0.05)
    raise problem


# Every rank claims its place in the store, and waits for all others.


def _claim_rank(store, place):
    # The last rank also says where rank 0 is. It does so before its claim: a rank that has seen
    # all claims then finds the address.
    if place.rank == place.world_size - 1:
        found = socket.getaddrinfo(place.address, None, type=socket.SOCK_STREAM)
        *_, socket_address = found[0]
        store.set("address", socket_address[0])
    me = f"process {os.getpid()} on {socket.gethostname()}"
    holder = store.compare_set(f"claims/{place.rank}", "", me).decode()
    if holder != me:
        raise Error(
            f"Rank {place.rank} is taken: {holder} has it, and {me} claims it too. Give every "
            "process a rank of its own; a process of an earlier run that still lives would also "
            "explain it."
        )


def _address_for_all(store, place):
    """The address of rank 0's host, as the last rank sees it.

    On rank 0's own host its name may lead to 127.0.1.1, which no other host reaches.
    """
    *_, address = _gather(store, place, "claims", "address")
    return address.decode()


def _gather(store, place, name, *more_keys):
    """Every rank's value of `name`, in the order of ranks, then the values of `more_keys`.

    Raises `Error` if a rank does not come.
    """
    keys = [f"{name}/{peer}" for peer in range(place.world_size)]
    try:
        return store.multi_get([*keys, *more_keys], datetime.timedelta(seconds=JOIN_TIMEOUT))
    except dist.DistStoreError:
        missing = [str(peer) for peer, key in enumerate(keys) if not store.check([key])]
        raise Error(
            f"Rank {place.rank} waited {JOIN_TIMEOUT} s for all {place.world_size} ranks; still "
            f"missing: rank {', '.join(missing)}. Were they started, and with the same "
            "MASTER_ADDR, MASTER_PORT and WORLD_SIZE?"
        ) from None


@contextlib.contextmanager
def _explain_lost_store(place):
    try:
        yield
    except dist.DistNetworkError:
        raise Error(
            f"Rank {place.rank} lost the store while it waited for the other ranks: rank 0 has "
            "given up or died. Its own message says why."
        ) from None


# The network interface and the backend.


def interface_towards(address: str) -> str:
    """The name of the network interface through which this host reaches `address`.

    gloo and NCCL would guess. Raises `Error` if no interface has the address used.
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


def _choose_backend(store, place):
    """NCCL if every rank has a GPU that no other rank has. The ranks compare in the store."""
    my_gpu = ""
    if torch.cuda.is_available() and dist.is_nccl_available():
        if os.environ.get("DDP_OWN_GPU_FIRST"):  # dask-cuda lists the worker's own GPU first
            index = 0
        else:  # where Slurm shows a rank only its own GPU, the count is 1, and this is 0
            index = place.local_rank % torch.cuda.device_count()
        torch.cuda.set_device(index)
        my_gpu = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    store.set(f"gpu/{place.rank}", my_gpu)
    gpus = [gpu.decode() for gpu in _gather(store, place, "gpu")]
    everybody_has_one = all(gpus)
    nobody_shares = len(set(gpus)) == place.world_size
    return "nccl" if everybody_has_one and nobody_shares else "gloo"


def _form_group(backend, store, place, key, timeout):
    """Make the default process group. With gloo, nobody but the run's own ranks gets in.

    NCCL's own ports stay open, see docs/security.md.
    """
    if backend == "nccl":
        # Else a thread of NCCL's asks the store once a second, even while Python ends.
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
    # gloo then asks for the addresses of all ranks at once.
    os.environ.setdefault("GLOO_ENABLE_STORE_V2_API", "1")
    before = _listening_sockets()
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("group", store),
        rank=place.rank,
        world_size=place.world_size,
        timeout=timeout,
        # NCCL would bind the group to GPU LOCAL_RANK, which under dask-cuda is another rank's.
        device_id=device() if backend == "nccl" else None,
    )
    if backend == "gloo":
        _prove_to_each_other(place, key)
        for name, descriptor in _listening_sockets().items():
            if name not in before:
                _drop_new_connections(descriptor)


# Proof of identity: gloo itself takes whoever first connects with a rank's number.


def _prove_to_each_other(place, key):
    """Each rank proves to each other one that it knows the key, on the connection they share.

    Raises `Error` if a peer cannot.
    """
    challenges = os.urandom(NONCE * place.world_size)  # one for each peer
    received = _exchange(challenges)
    proofs = [
        proof(key, f"{place.rank} to {peer}".encode(), challenge)
        for peer, challenge in enumerate(_parts(received, NONCE))
    ]
    answers = _exchange(b"".join(proofs))
    pairs = zip(_parts(challenges, NONCE), _parts(answers, MAC))
    for peer, (challenge, answer) in enumerate(pairs):
        expected = proof(key, f"{peer} to {place.rank}".encode(), challenge)
        if not hmac.compare_digest(answer, expected):
            raise Error(
                f"Rank {place.rank}: who has connected in the place of rank {peer} does not know "
                "the secret of this run. Another user of this host or network interferes, or a "
                "port scan was first. Start again; if it stays, tell those who run the host."
            )


def _parts(content, length):
    """`content` cut into pieces of `length` bytes, one for each rank."""
    return [content[start : start + length] for start in range(0, len(content), length)]


def _exchange(content):
    """Send each rank its part of `content` (bytes) on the connection between the two.

    Returns what they sent, in the order of ranks. Raises `Error` if one does not answer.
    """
    sent = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    received = torch.empty_like(sent)
    work = dist.all_to_all_single(received, sent, async_op=True)
    try:
        work.wait(datetime.timedelta(seconds=JOIN_TIMEOUT))
    except RuntimeError as error:
        reason = first_line(error)
        raise Error(
            f"A rank, or a stranger in its place, did not answer within {JOIN_TIMEOUT} s, or has "
            f"gone: {reason}. Start again."
        ) from error
    return received.numpy().tobytes()


def _listening_sockets():
    """This process's, where the system lists them: dict of 'socket:[inode]' -> descriptor."""
    found = {}
    with contextlib.suppress(FileNotFoundError):  # no /proc: not Linux
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            with contextlib.suppress(OSError):  # closed in the meantime
                name = os.readlink(f"/proc/self/fd/{descriptor}")
                if name.startswith("socket:") and _is_listening(descriptor):
                    found[name] = descriptor
    return found


def _is_listening(descriptor):
    with socket.socket(fileno=os.dup(descriptor)) as end:
        return bool(end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _drop_new_connections(descriptor):
    """From now on the kernel drops whoever connects to this listening socket (Linux only).

    Connections that exist already are not touched.
    """
    # A classic BPF program of one instruction, 'return 0': drop the packet.
    instruction = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0))
    program = struct.pack("HP", 1, ctypes.addressof(instruction))
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as end:
        end.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)
