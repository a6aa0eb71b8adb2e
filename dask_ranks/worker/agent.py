"""The worker's side of a run: a Dask task that starts one rank, follows it, and ends it.

The rank is a process of its own, forked from one that has torch imported (`fork_server`). So it
starts in a fraction of a second, can be killed at any moment, and leaves nothing behind in the
worker. Two threads read what the rank says, one its messages, one what it prints. They may wait: a
rank can be suspended in the middle of a message. One loop, which waits for neither, passes on what
they have read until the rank's process has ended, or nobody wants it any more. Then all that could
write is ended, and so the threads come to the end of their pipes.

Relies on Dask: when the client cancels the task, or dies, the task's state becomes 'cancelled'
while it runs; a worker that loses its scheduler closes. Promises: one rank at a time; when the
task ends, its rank is gone, and so is all that the rank has started, in whatever session, unless
the kernel cannot end it; before that, the client was sent what the rank reported and printed, and
how it ended. Of a rank that was cancelled, what it printed last may be missing.
"""

import contextlib
import errno
import math
import os
import pickle
import queue
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import BinaryIO

import psutil
from distributed import Status, Worker, get_worker
from distributed.comm import get_address_host

from dask_ranks.messages import ASK_WHERE, TOPIC, Ended, Line, Message, RankSpec, Started, pack
from dask_ranks.worker import time_limit
from dask_ranks.worker.rank_host import HOST
from dask_ranks.worker.supervisor import POLL, Supervisor

PAUSE = 0.25  # seconds in which messages gather: Dask works for each event, whatever is in it
EXIT_TIMEOUT = 30.0  # seconds that a rank has to end after its last word, on a busy machine too
# Seconds for what is left in the pipes. It takes none, unless a process stays that holds them open
DRAIN_TIMEOUT = 5.0
FLUSH = 0.1  # seconds for the last message: Dask sends events in batches, and a worker that closes
# tells the scheduler so beside them
PIECE = 2**16  # bytes read at once: as many as a pipe holds
FASTEST = 40 * 2**20  # bytes a second of messages that are larger than a piece
RATE = 2**20  # bytes a second that a rank may print
LINE_COST = 100  # bytes that a line counts for, beside its own

WHAT_TO_DO = {  # where a rank cannot be started
    errno.ENOENT: "Was the folder in which its worker runs removed? Start it in one that stays.",
    errno.EMFILE: "Start the workers with a higher limit: ulimit -n 4096.",
}

# Called by the client, with `client.run`, on the event loop of the worker


def listen(attempt_id: str, dask_worker: Worker) -> tuple[str, int]:
    """Bind a port for rank 0's store, on the address by which Dask reaches this worker.

    Returns (host, port).
    """
    host = get_address_host(dask_worker.address)
    return host, HOST.listen(attempt_id, host)


def tell_to_stop() -> None:
    """Send SIGTERM to the rank on this worker, if there is one; to a script only once."""
    if HOST.running is not None and HOST.sigterms > 0:
        HOST.sigterms -= 1
        HOST.signal(signal.SIGTERM)


def ask_where() -> str | None:
    """Ask the rank on this worker where it is; it answers with a `Whereabouts`.

    Returns the state of its process, in psutil's words; None without a rank. One that is
    suspended (by SIGSTOP, or a debugger) does not answer.
    """
    running = HOST.running  # read once: it may end at any moment
    if running is None:
        return None
    try:
        state = psutil.Process(running.pid).status()
    except psutil.NoSuchProcess:
        return None
    HOST.signal(ASK_WHERE)
    return state


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
        """Not once the client has cancelled the task, closed or died; nor if the worker closes."""
        task = worker.state.tasks.get(key)
        if task is None or task.state in ("cancelled", "resumed"):
            return False
        return worker.status in (Status.running, Status.paused)

    def send(messages: list[Message]) -> None:
        worker.log_event(TOPIC + spec.attempt, {"rank": spec.rank, "messages": pack(messages)})

    try:
        with HOST.one_rank:
            try:
                # Asked here, too: it may have waited for the end of an earlier rank
                process = _start(worker, spec, payload, tables, is_wanted) if is_wanted() else None
            except Exception as error:  # of any kind: the client waits for this rank
                send([_not_started(error)])
                return None
            if process is None:
                send([Ended("cancelled")])
                return None
            HOST.sigterms = 1 if spec.is_script else math.inf
            return _follow(process, send, is_wanted)
    finally:
        HOST.rank_is_gone(lambda do: worker.loop.add_callback(worker.loop.call_later, FLUSH, do))


def _not_started(error: Exception) -> Ended:
    """The last message of a rank that there was not; a traceback where the reason is ours."""
    message = f"The rank could not be started: {type(error).__name__}: {error}."
    if not isinstance(error, OSError):
        return Ended("raised", message=message, traceback=traceback.format_exc())
    advice = WHAT_TO_DO.get(error.errno or 0, "")
    return Ended("raised", message=f"{message}\n{advice}".rstrip())


class RankProcess:
    """A rank's process, and what it says: messages that wait in `said`, and how it ended."""

    def __init__(self, supervisor: Supervisor, messages: Connection, output: Connection):
        """`messages` and `output` (of the rank and its children) are read from now on."""
        self.supervisor = supervisor  # which has forked the process, and ends it
        self.said: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.ended: Ended | None = None
        self._is_gone = threading.Event()
        self._readers = [
            threading.Thread(target=read, args=(pipe,), daemon=True, name="ddp-reader")
            for read, pipe in ((self._read_messages, messages), (self._read_output, output))
        ]
        for reader in self._readers:
            reader.start()

    def take(self) -> list[Message]:
        """What has been said since the last call."""
        return [self.said.get() for _ in range(self.said.qsize())]

    def end(self) -> list[int]:
        """End the rank, and read to the end what it has said.

        Returns the numbers of processes that stay although they were killed.
        """
        left = self.supervisor.end()
        self._is_gone.set()
        deadline = time.monotonic() + DRAIN_TIMEOUT
        for reader in self._readers:
            reader.join(max(0.0, deadline - time.monotonic()))
        return left

    # In a thread each. They close their pipes themselves: who waits there may wait for long

    def _read_messages(self, pipe: Connection) -> None:
        with pipe:
            while True:
                try:
                    pickled = pipe.recv_bytes()
                except (EOFError, OSError):  # OSError: the end came within a message
                    return
                message = _unpickled(pickled)
                if isinstance(message, Ended):
                    self.ended = message
                else:
                    self.said.put(message)
                if len(pickled) > PIECE:  # slows down a rank that says more than can be sent
                    self._is_gone.wait(len(pickled) / FASTEST)

    def _read_output(self, pipe: Connection) -> None:
        begun: list[bytes] = []
        with pipe:
            while piece := os.read(pipe.fileno(), PIECE):
                lines = whole_lines(begun, piece)
                for line in lines:
                    self.said.put(Line(line))
                # Slows down a rank that prints more
                self._is_gone.wait((len(piece) + LINE_COST * len(lines)) / RATE)
        for line in whole_lines(begun, b"\n") if any(begun) else ():
            self.said.put(Line(line))


def whole_lines(begun: list[bytes], piece: bytes) -> list[str]:
    """The lines that end in this piece of what was printed; the next one has `begun`, in pieces.

    Of a line that is drawn again and again (a progress bar, which prints carriage returns) the
    last state counts.
    """
    begun.append(piece)
    if b"\n" not in piece and b"\r" not in piece:
        return []
    *whole, rest = map(_last_state, b"".join(begun).split(b"\n"))
    begun[:] = [rest]
    return [line.rstrip(b"\r").decode(errors="replace") for line in whole]


def _last_state(line: bytes) -> bytes:
    """Of a line that is drawn again and again, what a terminal would show of it."""
    text = line.rstrip(b"\r")
    _, _, state = text.rpartition(b"\r")
    return state + line[len(text) :][:1]


def _unpickled(message: bytes) -> Message:
    try:
        return pickle.loads(message)
    except Exception as error:  # it holds an object of a class that only the rank knows
        return Line(f"a message of this rank was lost: {type(error).__name__}: {error}")


def _start(
    worker: Worker,
    spec: RankSpec,
    payload: bytes,
    tables: BinaryIO | None,
    is_wanted: Callable[[], bool],
) -> RankProcess | None:
    """Have a rank's process forked; None if it was no longer wanted before it was there.

    The first start waits while the fork server imports torch.
    """
    # The rank's alone, once it has its own copies; and ours, which `RankProcess` closes
    with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:
        descriptors: dict[str, int] = {}
        if spec.rank == 0:
            store_socket = theirs.enter_context(HOST.take_store(spec.attempt))
            descriptors["store_socket"] = store_socket.fileno()
        if tables is not None:
            descriptors["tables"] = theirs.enter_context(tables).fileno()
        pipes = {}
        for name in ("messages", "output"):
            reader, writer = Pipe(duplex=False)
            pipes[name] = ours.enter_context(reader)
            descriptors[name] = theirs.enter_context(writer).fileno()
        threads = worker.state.nthreads
        arguments = {**spec.variables, **_variables(threads)}, threads, payload
        supervisor = HOST.fork(
            "dask_ranks.rank.process",
            "main",
            *arguments,
            descriptors=descriptors,
            is_wanted=is_wanted,
        )
        if supervisor is None:
            return None
        ours.pop_all()
    return RankProcess(supervisor, **pipes)


def _variables(threads: int) -> dict[str, str]:
    """What the rank's environment has of its worker."""
    variables = {
        "OMP_NUM_THREADS": threads,  # else accelerate sets a number of its own
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": 1,
        "DDP_JOIN_TIMEOUT": 3600,  # seconds: the client sees sooner which one has not started
        "DDP_WORKER_PROCESS": os.getpid(),  # for who looks at the processes of a run from outside
    }
    if "dask_cuda" in sys.modules:  # it has put this worker's own GPU first
        variables["DDP_OWN_GPU_FIRST"] = 1
    return {name: str(value) for name, value in variables.items()}


def _follow(
    process: RankProcess, send: Callable[[list[Message]], None], is_wanted: Callable[[], bool]
) -> bytes | None:
    """From the start of a rank's process to its last message; returns what `run_rank` does."""
    HOST.running = process.supervisor
    try:
        send([Started(process.supervisor.pid, socket.gethostname())])
        # A worker that was told to end while the rank started had no rank to tell
        was_wanted = not HOST.afterwards and _pass_on(process, send, is_wanted)
    finally:
        HOST.running = None
        is_overdue = not process.supervisor.connection.closed
        left = process.end()
    remarks = [
        f"process {pid}, which this rank has started, does not end although it was killed "
        "(see its state with ps)"
        for pid in left
    ]
    ended = process.ended or Ended("exited")
    if ended.got_sigterm and time_limit.time_left() <= time_limit.warning():
        ended.message = "near the time limit of its job"
    if not was_wanted:
        ended = Ended("cancelled")
    elif process.supervisor.exitcode is not None:
        ended.exitcode = process.supervisor.exitcode
    elif is_overdue:
        remarks.append(
            f"this rank did not end within {EXIT_TIMEOUT:g} s of its last word, and was killed: a "
            "thread that is no daemon, a function of atexit, or a finalizer takes longer"
        )
    result, ended.result = ended.result, None
    send([*process.take(), *map(Line, remarks), ended])
    HOST.keep(process.supervisor.connection)
    return result


def _pass_on(
    process: RankProcess, send: Callable[[list[Message]], None], is_wanted: Callable[[], bool]
) -> bool:
    """Pass on what the rank says until it ends, or has to; returns whether it was wanted.

    Its supervisor may have ended because the worker closes: then it was not.
    """
    next_send = 0.0
    deadline = math.inf  # for the end of the process
    with selectors.DefaultSelector() as selector:
        selector.register(process.supervisor.connection, selectors.EVENT_READ)
        while not selector.select(POLL):
            now = time.monotonic()
            if not is_wanted():
                return False
            if process.ended is not None:
                deadline = min(deadline, now + EXIT_TIMEOUT)
            if now > deadline:
                return True
            messages = process.take() if now > next_send else []
            if messages:
                send(messages)
                next_send = now + PAUSE
    process.supervisor.take_note()
    return process.supervisor.exitcode is not None or is_wanted()
