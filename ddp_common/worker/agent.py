"""The worker's side of a run: a Dask task that starts one rank, watches it, and ends it.

The rank is a process of its own, and ended when the client says so. It is forked from a process
that has torch imported (`nursery`), so it starts in a fraction of a second, can be killed at any
moment, and leaves nothing behind in the worker. Relies on Dask: when the client cancels the task,
or dies, the task's state becomes 'cancelled' while it runs. Promises: one rank at a time; when the
task ends, its rank is gone, and so is all that the rank has started, in whatever session; before
that, the client was sent what the rank reported and printed, and how it ended. Of a rank that was
cancelled, what it printed last may be missing.
"""

import contextlib
import json
import os
import re
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

from ddp_common.messages import (
    LAST_WORDS,
    SUSPENDED,
    Collective,
    Done,
    Ended,
    Line,
    Message,
    Raised,
    RankSpec,
    Started,
    Stopped,
    Whereabouts,
)
from ddp_common.ranks import pipe
from ddp_common.worker import nursery
from ddp_common.worker.lines import Lines
from ddp_common.worker.nursery import Nursery
from ddp_common.worker.result import open_result_file, take_result
from ddp_common.worker.sender import Sender

POLL = 0.03  # seconds between looks at whether the client still wants this rank
EXIT_TIMEOUT = 1.0  # seconds that a rank has to end after its last word
STACK_TIMEOUT = 10.0  # seconds that a rank has to write its stack, on a busy machine
ANSWER_TIMEOUT = 8.0  # seconds that a rank has to say which collectives it is in
WARM_UP_TIMEOUT = 300  # seconds that torch may take to be imported
OUTER_FRAMES_TIMEOUT = 0.4  # seconds for the frames around the rank's own, which nobody reads
OWN_OUTERMOST_FRAME = re.compile(rb'ranks/process\.py", line \d+ in main\b')

_one_rank = threading.Lock()
_store_socket = None  # (attempt id, socket) made by `listen`, until rank 0's agent takes it
_running = None  # the `RankProcess` on this worker, while there is one
_closing = threading.Lock()  # held while a pipe of `_running` is duplicated or closed
_questions = 0  # how often a rank was asked for its collectives


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
    child = _running  # read once: it may end at any moment
    if child is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGTERM)


def where_is_it(wake: bool) -> Whereabouts | None:
    """Where the rank on this worker is.

    None without a rank. A rank that is suspended (by SIGSTOP, or a debugger) cannot write its
    stack: without `wake` that is None in the answer. With `wake` the rank is continued first, and
    so its peers go on too: ask them before.
    """
    child = _running  # read once: it may end at any moment
    if child is None:
        return None
    try:
        with _closing:
            stacks = Connection(os.dup(child.stacks.fileno()))
            questions = Connection(os.dup(child.questions.fileno()))
        with stacks, questions:
            state = psutil.Process(child.pid).status()
            if state in SUSPENDED and not wake:
                return Whereabouts(state, None)
            _drop(stacks)
            os.kill(child.pid, signal.SIGUSR1)
            os.kill(child.pid, signal.SIGCONT)
            stack = _read_stack(stacks).decode(errors="replace")
            if state in SUSPENDED:  # and goes on by now
                return Whereabouts(state, stack)
            return Whereabouts(state, stack, _ask_for_collectives(questions))
    except (psutil.NoSuchProcess, OSError):  # it has ended meanwhile
        return None


def _drop(stacks: Connection) -> None:
    """Drop the stacks that somebody else's SIGUSR1 has left in the pipe."""
    while stacks.poll():
        if not os.read(stacks.fileno(), 65536):
            break


def _read_stack(connection: Connection) -> bytes:
    """All threads' stacks: the main thread's is the last of them."""
    text = b""
    timeout = STACK_TIMEOUT
    while connection.poll(timeout):
        piece = os.read(connection.fileno(), 65536)
        if not piece:
            break
        text += piece
        if OWN_OUTERMOST_FRAME.search(text):
            timeout = OUTER_FRAMES_TIMEOUT
    return text


def _ask_for_collectives(questions: Connection) -> list[Collective] | None:
    """A rank's latest collectives.

    None if it does not answer in time: it has ended meanwhile, or a thread of it keeps Python.
    """
    global _questions
    _questions += 1
    deadline = time.monotonic() + ANSWER_TIMEOUT
    text = b""
    try:
        os.write(questions.fileno(), b"%d\n" % _questions)
        while questions.poll(max(0, deadline - time.monotonic())):
            piece = os.read(questions.fileno(), 65536)
            if not piece:
                return None
            text += piece
            *answers, text = text.split(b"\n")
            for answer in answers:  # some may have come too late for an earlier question
                number, collectives = json.loads(answer)
                if number == _questions and collectives is not None:
                    return [Collective(**fields) for fields in collectives]
                if number == _questions:
                    return None
    except (OSError, ValueError, TypeError):
        return None
    return None


# Dask tasks


def warm_up() -> None:
    """Wait until this worker can start a rank at once: its fork server has imported torch.

    Raises RuntimeError if a process from there cannot import it, or does not end in time.
    """
    trial = nursery.connect()
    assert trial is not None, "it is wanted"
    try:
        trial.start("importlib", "import_module", "torch.distributed", descriptors={})
        if trial.connection.poll(WARM_UP_TIMEOUT):
            trial.take_note()
    finally:
        trial.end()
    if trial.exitcode != 0:
        raise RuntimeError(f"this worker cannot start ranks (exit code {trial.exitcode})")


def run_rank(
    spec: RankSpec, payload: bytes, tables: BinaryIO | None = None
) -> bytes | memoryview | None:
    """Run one rank from start to end.

    `payload` is the pickled training function with its arguments, `tables` a file with what they
    need of Dask's collections. Returns rank 0's pickled result; None for other ranks, and for a
    rank that failed. Raises nothing: how the rank ended is a message.
    """
    worker = get_worker()
    key = worker.get_current_task()

    def is_wanted() -> bool:
        return _is_wanted(worker, key)

    with _one_rank:
        send = Sender(worker, spec.attempt, spec.rank)
        try:
            child = _start_rank(worker, spec, payload, tables, is_wanted)
        except Exception:  # of any kind: the client, which waits for this rank, must learn of it
            message = "The rank could not be started."
            send(Ended("raised", message=message, traceback=traceback.format_exc()))
            return None
        if child is None:
            send(Ended("cancelled"))
            return None
        return _follow(child, send, is_wanted)


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
class RankProcess:
    """A rank's process and our ends of what connects us with it."""

    nursery: Nursery  # which has forked it, and ends it
    messages: Connection  # from the rank: objects of `ddp_common.messages`
    output: Connection  # from the rank: what it prints, and all that it starts
    stacks: Connection  # from the rank: its Python stack, on SIGUSR1
    questions: Connection  # to the rank and back: which collectives it is in
    result_file: BinaryIO | None  # for rank 0's result

    @property
    def pid(self) -> int:
        return self.nursery.pid

    def close(self) -> None:
        with _closing:
            for end in (self.messages, self.output, self.stacks, self.questions):
                end.close()


def _start_rank(
    worker: Worker,
    spec: RankSpec,
    payload: bytes,
    tables: BinaryIO | None,
    is_wanted: Callable[[], bool],
) -> RankProcess | None:
    """Have a rank's process forked; None if it was no longer wanted before it was there.

    The first start waits while the fork server imports torch.
    """
    global _store_socket
    with contextlib.ExitStack() as ours:  # what is the rank's alone, once it has its own copies
        descriptors: dict[str, int] = {}
        result_file = None
        if spec.rank == 0:
            assert _store_socket is not None, "the client calls `listen` first"
            attempt_id, store_socket = _store_socket
            assert attempt_id == spec.attempt, "the socket is that of another attempt"
            _store_socket = None
            descriptors["store_socket"] = ours.enter_context(store_socket).fileno()
            result_file = open_result_file(spec.attempt)
            descriptors["result_file"] = result_file.fileno()
        if tables is not None:
            descriptors["tables"] = ours.enter_context(tables).fileno()
        place = nursery.connect(is_wanted)
        if place is None:
            return None
        connections = {}
        for name in ("messages", "output", "stacks", "questions"):
            connections[name], theirs = Pipe(duplex=name == "questions")
            descriptors[name] = ours.enter_context(theirs).fileno()
        child = RankProcess(place, result_file=result_file, **connections)
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
            place.end()
            child.close()
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
        "DDP_WORKER_PROCESS": os.getpid(),
    }
    if "dask_cuda" in sys.modules:  # it has put this worker's own GPU first
        variables["DDP_OWN_GPU_FIRST"] = 1
    variables.update(spec.environment)
    return {name: str(value) for name, value in variables.items()}


def _follow(
    child: RankProcess, send: Sender, is_wanted: Callable[[], bool]
) -> bytes | memoryview | None:
    """From the start of a rank's process to its last message; returns what `run_rank` does."""
    global _running
    _running = child
    send(Started(child.pid, socket.gethostname()))
    try:
        ending, as_bytes = _watch(child, send, is_wanted)
    finally:
        _running = None
        left = child.nursery.end()
        child.close()
    for pid in left:
        text = (
            f"process {pid}, which this rank has started, does not end although it was killed "
            "(see its state with ps)"
        )
        send(Line(text))
    result: bytes | memoryview | None = None
    if ending.how == "done" and child.result_file is not None:
        if as_bytes is not None:
            result = as_bytes
            ending.result_size = len(as_bytes)
        else:
            result, where_it_is = take_result(child.result_file)
            vars(ending).update(where_it_is)
    send(ending)
    return result


def _watch(
    child: RankProcess, send: Sender, is_wanted: Callable[[], bool]
) -> tuple[Ended, bytes | None]:
    """Pass on what the rank says until it ends or is no longer wanted.

    Returns how it ended, and its result if that came through the pipe.
    """
    lines = Lines(send)
    messages = pipe.Reader(child.messages)
    open_ends = [child.messages, child.output, child.nursery.connection]
    last_word: Message | None = None
    deadline = float("inf")  # for the end of the process
    while True:
        ready = wait(open_ends, timeout=POLL)
        if child.output in ready and not lines.read(child.output):
            open_ends.remove(child.output)
        if child.messages in ready:
            for message in messages.read():
                if isinstance(message, LAST_WORDS):
                    last_word = message
                    deadline = time.monotonic() + EXIT_TIMEOUT
                else:
                    send(message)
            if not messages.is_open:
                open_ends.remove(child.messages)
        lines.flush_if_due()
        send.flush_if_due()

        if child.nursery.connection in ready:
            child.nursery.take_note()
            open_ends.remove(child.nursery.connection)
        has_ended = child.nursery.has_ended
        if has_ended:
            deadline = min(deadline, time.monotonic() + EXIT_TIMEOUT)
        is_late = time.monotonic() > deadline
        # A child of the rank may hold its output open, and print for ever.
        still_prints = child.output in ready and not is_late
        all_is_read = child.messages not in ready and not still_prints
        # Over: it has ended, and all is read; or it has said its last word, and does not end.
        is_over = all_is_read if has_ended else is_late
        if is_over:
            ending = _ending(last_word, child.nursery.exitcode)
            break
        if not is_wanted():
            ending = Ended("cancelled"), None
            break
    lines.close()
    return ending


def _ending(last_word: Message | None, exitcode: int | None) -> tuple[Ended, bytes | None]:
    """What a rank's last word and exit code say; and the result, if the last word brought it."""
    if isinstance(last_word, Done):
        return Ended("done", exitcode), last_word.result
    if isinstance(last_word, Raised):
        ended = Ended("raised", **vars(last_word))
        if exitcode is not None:  # None: it has not ended in time
            ended.exitcode = exitcode
        return ended, None
    if isinstance(last_word, Stopped):
        return Ended("stopped", exitcode, **vars(last_word)), None
    return Ended("exited", exitcode), None
