r"""torchrun and the ranks that it starts, forked from one process that has torch imported.

    python -m ddp_common.teaching.forked_torchrun FOLDER TORCHRUN-OPTION … \
        --module ddp_common.teaching.forked_rank SCRIPT [ARGUMENT …]

torchrun and each of its ranks would import torch for themselves: some two seconds of a core for
each, far more than the script of an exercise computes. Here torch is imported once. In place of a
rank torchrun starts a `forked_rank`: a small process that has this one fork the rank. FOLDER must
be private to the user.

Promises: a script finds what it would find under torchrun, and its end is told to torchrun as it
was. What differs: torch has been imported before the script sets variables that torch reads then
(`OMP_NUM_THREADS`), and strings have the same hashes on all ranks. Relies on pidfd_open(2).
"""

import contextlib
import functools
import json
import os
import select
import signal
import socket
import sys
from typing import Any, NamedTuple

from ddp_common.teaching import whole_lines
from ddp_common.teaching.forked_rank import EXIT_CODE, FOLDER, LENGTH, NAME, TERMINATE, inside
from ddp_common.worker.nursery import import_ahead

NEEDED = [
    "torch",
    "torch.distributed.run",
    "torch._dynamo",  # by the first DistributedDataParallel
    "torch.nn.parallel",
    "torch.utils.data",
]


class Request(NamedTuple):
    """What a `forked_rank` wants to be run."""

    arguments: list[str]  # the script first
    environment: dict[str, str]
    folder: str
    output_fd: int
    error_fd: int


class Rank(NamedTuple):
    """A rank, and the `forked_rank` that stands for it."""

    pid: int
    pidfd: int  # readable when the rank has ended
    connection: socket.socket


def main(folder: str, *arguments: str) -> None:
    """Import torch, then be torchrun, or one of the ranks, or the process that forks them."""
    import_ahead(NEEDED)
    os.environ[FOLDER] = folder
    with socket.socket(socket.AF_UNIX) as listener:
        with inside(folder):
            listener.bind(NAME)
        listener.listen()
        agent = os.fork()
        request = None if agent == 0 else serve(listener, agent)
    if request is None:
        from torch.distributed import run  # not before there is torch

        run.main(list(arguments))
    else:
        be_rank(request)


def serve(listener: socket.socket, agent: int) -> Request:
    """Fork a rank for each `forked_rank` that asks. Returns in a rank only, what it shall run.

    Raises SystemExit when torchrun, the process `agent`, has ended, with its exit code.
    """
    of_agent = os.pidfd_open(agent)
    ranks: dict[int, Rank] = {}  # by each of its two descriptors
    while True:
        watched: list[Any] = [listener, of_agent, *ranks]
        readable, _, _ = select.select(watched, [], [])
        if of_agent in readable:
            sys.exit(abs(exit_code(agent)))
        if listener in readable:
            connection, _ = listener.accept()
            request = received(connection)
            pid = os.fork()
            if pid == 0:
                os.close(of_agent)
                forget(ranks, connection)
                return request
            os.close(request.output_fd)
            os.close(request.error_fd)
            rank = Rank(pid, os.pidfd_open(pid), connection)
            ranks[rank.pidfd] = ranks[connection.fileno()] = rank
        for descriptor in readable:
            if descriptor in ranks:
                attend(ranks, ranks[descriptor], has_ended=descriptor == ranks[descriptor].pidfd)


def received(connection: socket.socket) -> Request:
    """The request of a `forked_rank`."""
    announced, descriptors, _, _ = socket.recv_fds(connection, LENGTH.size, 2)
    (length,) = LENGTH.unpack(announced)
    with connection.makefile("rb") as stream:
        content = json.loads(stream.read(length))
    return Request(**content, output_fd=descriptors[0], error_fd=descriptors[1])


def attend(ranks: dict[int, Rank], rank: Rank, has_ended: bool) -> None:
    """Tell how a rank has ended; or pass on what its `forked_rank` says."""
    if not has_ended:
        is_gone = not rank.connection.recv(len(TERMINATE))
        number = signal.SIGKILL if is_gone else signal.SIGTERM
        signal.pidfd_send_signal(rank.pidfd, number)
        if is_gone:
            del ranks[rank.connection.fileno()]  # its end will be noticed
        return
    code = exit_code(rank.pid)
    with contextlib.suppress(OSError):  # nobody waits for it any more
        rank.connection.sendall(EXIT_CODE.pack(code))
    ranks.pop(rank.connection.fileno(), None)
    del ranks[rank.pidfd]
    os.close(rank.pidfd)
    rank.connection.close()


def exit_code(pid: int) -> int:
    """Of a child that has ended: its exit code, or minus the signal that has ended it."""
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def forget(ranks: dict[int, Rank], connection: socket.socket) -> None:
    """In a new rank: close what belongs to the others, and the connection of its own."""
    for rank in {*ranks.values()}:
        os.close(rank.pidfd)
        rank.connection.close()
    connection.close()


def be_rank(request: Request) -> None:
    """Run the script as a program of its own would."""
    for descriptor, stream in ((request.output_fd, 1), (request.error_fd, 2)):
        os.dup2(descriptor, stream)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(request.environment)
    os.chdir(request.folder)
    if "numpy" in sys.modules:  # Python's own `random` does so by itself
        sys.modules["numpy"].random.seed()
    keep_process_groups()
    whole_lines.main(*request.arguments)


def keep_process_groups() -> None:
    """Keep a reference to the process group that the script makes, also when it destroys it.

    torch 2.13 hangs where the last reference to a gloo group goes right after a `backward`: the
    group waits for its threads, and these wait for Python's lock. A script that is right would
    not end.
    """
    import torch.distributed as dist  # not before there is torch

    make = dist.init_process_group
    kept = []

    @functools.wraps(make)
    def init_process_group(*arguments: Any, **named: Any) -> None:
        make(*arguments, **named)
        kept.append(dist.group.WORLD)

    dist.init_process_group = init_process_group


if __name__ == "__main__":
    main(*sys.argv[1:])
