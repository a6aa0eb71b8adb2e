"""The port of the ranks' store: which one rank 0 opens, and how the other ranks learn it.

There are four cases, by what has started the ranks:

- `make run` with torchrun, and `run_script`: rank 0 opens any free port, and writes its number to
  a file in a folder that only the user may read. The variable `PORT_FOLDER` names the folder.
- torchrun as the user has started it: torchrun's own store is at MASTER_PORT. Rank 0 opens any
  free port, and puts its number there.
- A Slurm step: it is one of a few (`slurm.candidates`).
- Somebody who has set MASTER_PORT: it is that one.

A port that is only chosen beforehand may be taken by the time rank 0 opens it, because a rank
needs seconds to start, and every outgoing connection takes a free port. So where there is a choice
rank 0 opens the port first, and says its number afterwards.
"""

import datetime
import os
import socket
import time
from pathlib import Path

import torch.distributed as dist

from ddp_common.ranks import slurm
from ddp_common.ranks.place import LOOPBACK, PORT_FOLDER, Place


def listen(place: Place) -> socket.socket:
    """A listening socket for the other ranks: on loopback only, if they are all on this host.

    Raises OSError if the port is taken.
    """
    if place.port is None:
        return slurm.open_port(place.address)
    host = LOOPBACK if place.address == LOOPBACK else ""
    port = 0 if _is_said_later() else place.port
    dual = not host and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    return socket.create_server((host, port), family=family, dualstack_ipv6=dual, backlog=1024)


def say(place: Place, port: int, deadline: float) -> None:
    """Tell the other ranks at which port the store is, where they cannot know it.

    `deadline` is a time of `time.monotonic()`. Raises `dist.DistError` or OSError if torchrun's
    store, or the folder, is not there.
    """
    if PORT_FOLDER in os.environ:
        file = _file_of_this_attempt()
        unfinished = file.with_suffix(".part")
        unfinished.write_text(str(port), encoding="ascii")
        unfinished.rename(file)
    elif _torchrun_has_a_store():
        _store_of_torchrun(place, deadline).set(_key_of_this_attempt(), str(port))


def to_try(place: Place, deadline: float) -> list[int]:
    """The ports at which the store may be; none as long as rank 0 has not written its own.

    Raises `dist.DistError` or OSError if torchrun's store says nothing until the `deadline`.
    """
    if PORT_FOLDER in os.environ:
        file = _file_of_this_attempt()
        return [int(file.read_text(encoding="ascii"))] if file.exists() else []
    if _torchrun_has_a_store():
        return [_port_from_torchrun(place, deadline)]
    if place.port is None:
        return slurm.candidates()
    return [place.port]


def in_words(place: Place) -> str:
    """Where the store is or should be, for messages."""
    if PORT_FOLDER in os.environ:
        return f"{place.address}, at the port that {_file_of_this_attempt()} says"
    ports = [place.port] if place.port is not None else slurm.candidates()
    return f"{place.address}, port {', '.join(map(str, ports))}"


def _is_said_later():
    """Whether any port will do, because `say` tells the others which it is."""
    return PORT_FOLDER in os.environ or _torchrun_has_a_store()


def _file_of_this_attempt():
    """The file in which rank 0 says its port: one for each time torchrun starts the ranks."""
    return Path(os.environ[PORT_FOLDER]) / f"port-{_attempt()}"


def _attempt():
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


# torchrun's own store.


def _torchrun_has_a_store():
    """Whether torchrun's own store is at MASTER_PORT."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _key_of_this_attempt():
    """The key in torchrun's store under which rank 0 says its port."""
    return f"ddp/{_attempt()}/port"


def _port_from_torchrun(place, deadline):
    try:
        return int(_store_of_torchrun(place, deadline).get(_key_of_this_attempt()))
    except ValueError:
        raise ConnectionError("torchrun's store says something else than a port") from None


def _store_of_torchrun(place, deadline):
    # torch's own client would wait for ever for a stranger that accepts and says nothing.
    while not _accepts_connections(place.address, place.port):
        if time.monotonic() > deadline:
            raise ConnectionError("nothing answers there")
        time.sleep(0.1)
    left = datetime.timedelta(seconds=max(1.0, deadline - time.monotonic()))
    return dist.TCPStore(
        place.address, place.port, None, is_master=False, wait_for_workers=False, timeout=left
    )


def _accepts_connections(address, port):
    try:
        socket.create_connection((address, port), timeout=1).close()
    except OSError:
        return False
    return True
