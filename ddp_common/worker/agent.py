"""The worker's side of a run: a Dask task that starts one rank, follows it, and ends it.

The rank is a process of its own, forked from a process that has torch imported (`nursery`). So it
starts in a fraction of a second, can be killed at any moment, and leaves nothing behind in the
worker. One loop looks at the rank's messages, at what it prints, and at its process, until one of
three things happens: it has said its last word, its process is gone, or nobody wants it any more.

Relies on Dask: when the client cancels the task, or dies, the task's state becomes 'cancelled'
while it runs. Promises: one rank at a time; when the task ends, its rank is gone, and so is all
that the rank has started, in whatever session; before that, the client was sent what the rank
reported and printed, and how it ended. Of a rank that was cancelled, what it printed last may be
missing.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import BinaryIO

import psutil
from dask.typing import Key
from distributed import Status, Worker, get_worker
from distributed.comm import get_address_host

from ddp_common.messages import TOPIC, Ended, Line, Message, RankSpec, Started, pack
from ddp_common.ranks import pipe
from ddp_common.worker import nursery
from ddp_common.worker.nursery import Nursery
from ddp_common.worker.output import Output

POLL = 0.03  # seconds between looks at whether the client still wants this rank
PAUSE = 0.1  # seconds in which messages gather: Dask works for each event, whatever is in it
EXIT_TIMEOUT = 5.0  # seconds that a rank has to end after its last word
DRAIN_TIMEOUT = 1.0  # seconds for what a rank that is gone has left in the pipes
FLUSH = 0.1  # seconds for the last message: Dask sends events in batches, and a worker that closes
# tells the scheduler so beside them
PIECE = 2**16  # bytes of output read at once

_one_rank = threading.Lock()
_store_socket: tuple[str, socket.socket] | None = None  # of an attempt, until rank 0 takes it
_running: Nursery | None = None  # of the rank on this worker, while there is one
_afterwards: list[Callable[[], None]] = []  # what is to be done when that rank is gone


# Called by the client, with `client.run`


def listen(attempt_id: str, dask_worker: Worker) -> tuple[str, int]:
    """Bind a port for rank 0's store, on the address by which Dask reaches this worker.

    The port is any that is free. Returns (host, port).
    """
    global _store_socket
    if _store_socket is not None:  # left by a launch that came no further
        _, earlier = _store_socket
        earlier.close()
    host = get_address_host(dask_worker.address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family)
    bound.bind((host, 0))
    bound.listen(1024)
    _store_socket = attempt_id, bound
    port = bound.getsockname()[1]
    return host, port


def tell_to_stop() -> None:
    """Send SIGTERM to the rank on this worker, if there is one."""
    _signal_rank(signal.SIGTERM)


def ask_where() -> str | None:
    """Ask the rank on this worker where it is; it answers with a `Whereabouts`.

    Returns the state of its process, in psutil's words; None without a rank. One that is
    suspended (by SIGSTOP, or a debugger) does not answer.
    """
    place = _running  # read once: it may end at any moment
    if place is None:
        return None
    try:
        state = psutil.Process(place.pid).status()
    except psutil.NoSuchProcess:
        return None
    _signal_rank(signal.SIGUSR1)
    return state


def after_the_rank(do: Callable[[], None]) -> None:
    """Call `do` in the worker's event loop when its rank is gone; at once if there is none."""
    if _running is None:
        do()
    else:
        _afterwards.append(do)


def _signal_rank(number: signal.Signals) -> None:
    place = _running
    if place is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(place.pid, number)


# The Dask task


def run_rank(spec: RankSpec, payload: bytes, tables: BinaryIO | None = None) -> bytes | None:
    """Run one rank from start to end.

    `payload` is the pickled training function with its arguments, `tables` a file with what they
    need of Dask's collections. Returns rank 0's pickled result; None for other ranks, and for a
    rank that failed: how a rank ended is a message.
    """
    worker = get_worker()
    key = worker.get_current_task()

    def is_wanted() -> bool:
        return _is_wanted(worker, key)

    def send(messages: list[Message]) -> None:
        event = {"attempt": spec.attempt, "rank": spec.rank, "messages": pack(messages)}
        worker.log_event(TOPIC, event)

    with _one_rank:
        try:
            child = _start(worker, spec, payload, tables, is_wanted)
        except Exception:  # of any kind: the client, which waits for this rank, must learn of it
            message = "The rank could not be started."
            send([Ended("raised", message=message, traceback=traceback.format_exc())])
            return None
        if child is None:
            send([Ended("cancelled")])
            return None
        try:
            return _follow(child, send, is_wanted)
        finally:
            while _afterwards:
                worker.loop.add_callback(worker.loop.call_later, FLUSH, _afterwards.pop())


def _is_wanted(worker: Worker, key: Key) -> bool:
    """Whether the client still wants a rank.

    It does not once it has cancelled the task, closed or died; nor is a rank wanted when the
    worker itself is closing.
    """
    task = worker.state.tasks.get(key)
    if task is None or task.state in ("cancelled", "resumed"):
        return False
    return worker.status in (Status.running, Status.paused)


@dataclass
class Child:
    """A rank's process and our ends of what connects us with it."""

    nursery: Nursery  # which has forked it, and ends it
    messages: Connection  # of `ddp_common.messages`
    output: Connection  # what it prints, and all that it starts

    def end(self) -> list[int]:
        """End the rank; returns the numbers of processes that stay although they were killed."""
        left = self.nursery.end()
        self.messages.close()
        self.output.close()
        return left


def _start(
    worker: Worker,
    spec: RankSpec,
    payload: bytes,
    tables: BinaryIO | None,
    is_wanted: Callable[[], bool],
) -> Child | None:
    """Have a rank's process forked; None if it was no longer wanted before it was there.

    The first start waits while the fork server imports torch.
    """
    global _store_socket
    with contextlib.ExitStack() as ours:  # what is the rank's alone, once it has its own copies
        descriptors: dict[str, int] = {}
        if spec.rank == 0:
            assert _store_socket is not None, "the client calls `listen` first"
            attempt_id, store_socket = _store_socket
            assert attempt_id == spec.attempt, "the socket is that of another attempt"
            _store_socket = None
            descriptors["store_socket"] = ours.enter_context(store_socket).fileno()
        if tables is not None:
            descriptors["tables"] = ours.enter_context(tables).fileno()
        place = nursery.connect(is_wanted)
        if place is None:
            return None
        connections = {}
        for name in ("messages", "output"):
            connections[name], theirs = Pipe(duplex=False)
            descriptors[name] = ours.enter_context(theirs).fileno()
        child = Child(place, **connections)
        try:
            place.start(
                "ddp_common.ranks.process",
                "main",
                _environment(spec),
                worker.state.nthreads,
                payload,
                descriptors=descriptors,
            )
        except BaseException:
            child.end()
            raise
    return child


def _environment(spec: RankSpec) -> dict[str, str]:
    """The variables that torchrun would set, and ours."""
    host, port = spec.store
    variables = {
        "RANK": spec.rank,
        "WORLD_SIZE": spec.world_size,
        "LOCAL_RANK": spec.local_rank,
        "LOCAL_WORLD_SIZE": spec.local_world_size,
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
        "DDP_CHECKPOINTS": spec.checkpoints,
        "DDP_WORKER_PROCESS": os.getpid(),  # for who looks at the processes of a run from outside
    }
    if "dask_cuda" in sys.modules:  # it has put this worker's own GPU first
        variables["DDP_OWN_GPU_FIRST"] = 1
    return {name: str(value) for name, value in variables.items()}


def _follow(
    child: Child, send: Callable[[list[Message]], None], is_wanted: Callable[[], bool]
) -> bytes | None:
    """From the start of a rank's process to its last message; returns what `run_rank` does."""
    global _running
    _running = child.nursery
    send([Started(child.nursery.pid, socket.gethostname())])
    output = Output()
    try:
        was_wanted, last_word = _pass_on(child, output, send, is_wanted)
    finally:
        _running = None
        left = child.end()
    lines = output.rest()
    for pid in left:
        lines.append(
            f"process {pid}, which this rank has started, does not end although it was killed "
            "(see its state with ps)"
        )
    if was_wanted and last_word is not None and child.nursery.exitcode is None:
        lines.append(
            f"this rank did not end within {EXIT_TIMEOUT:g} s of its last word, and was killed: a "
            "thread that is no daemon, or a function of atexit, takes longer"
        )
    ended = (last_word or Ended("exited")) if was_wanted else Ended("cancelled")
    if was_wanted and child.nursery.exitcode is not None:  # None: it has not ended in time
        ended.exitcode = child.nursery.exitcode
    result, ended.result = ended.result, None
    send([*map(Line, lines), ended])
    return result


def _pass_on(
    child: Child,
    output: Output,
    send: Callable[[list[Message]], None],
    is_wanted: Callable[[], bool],
) -> tuple[bool, Ended | None]:
    """Pass on what the rank says until it ends, or is not wanted any more.

    Returns whether it was wanted to the end, and its last word.
    """
    reader = pipe.Reader(child.messages)
    open_ends = [child.messages, child.output, child.nursery.connection]
    last_word: Ended | None = None
    deadline = float("inf")  # for the end of the process
    due = 0.0  # when to read again
    while True:
        is_due = time.monotonic() >= due and output.is_due()
        may_read = is_due or child.nursery.has_ended
        timeout = 0 if child.nursery.has_ended else POLL  # all that it wrote is in the pipes
        ready = wait(open_ends if may_read else [child.nursery.connection], timeout)
        said: list[Message] = []
        if child.output in ready:
            piece = os.read(child.output.fileno(), PIECE)
            said += map(Line, output.lines(piece))
            if not piece:
                open_ends.remove(child.output)
        if child.messages in ready:
            for message in reader.read():
                if isinstance(message, Ended):
                    last_word = message
                    deadline = time.monotonic() + EXIT_TIMEOUT
                else:
                    said.append(message)
            if not reader.is_open:
                open_ends.remove(child.messages)
        if said:
            send(said)
            due = time.monotonic() + PAUSE
        if child.nursery.connection in ready:
            child.nursery.take_note()
            open_ends.remove(child.nursery.connection)
            deadline = min(deadline, time.monotonic() + DRAIN_TIMEOUT)
        is_late = time.monotonic() > deadline
        # A child of the rank may hold its output open, and print for ever.
        still_prints = (child.output in ready or not may_read) and not is_late
        all_is_read = child.messages not in ready and not still_prints
        # Over: it has ended, and all is read; or it has said its last word, and does not end.
        is_over = all_is_read if child.nursery.has_ended else is_late
        if is_over:
            return True, last_word
        if not is_wanted():
            return False, last_word
