"""The worker's side of a run: a Dask task that starts one rank, watches it, and ends it.

The rank is a process of its own, and ended when the client says so. It is forked from a
`multiprocessing` forkserver that has torch imported (`forkserver`), so it starts in a fraction of
a second, can be killed at any moment, and leaves nothing behind in the worker. Relies on Dask:
when the client cancels the task, or dies, the task's state becomes 'cancelled' while it runs.
Promises: one rank at a time; when the task ends, its rank is gone, and so is all that the rank has
started, in whatever session (`descendants`); before that, the client was sent what the rank
reported and printed, and how it ended. Of a rank that was cancelled, what it printed last may be
missing; one that was cancelled while its process was being started is killed as soon as that is
there.
"""

import contextlib
import importlib
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
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
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
from ddp_common.ranks import process as rank_process
from ddp_common.worker import descendants, forkserver
from ddp_common.worker.handover import Handover
from ddp_common.worker.lines import Lines
from ddp_common.worker.memory import MemoryLimit
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
            os.kill(child.pid, signal.SIGUSR1)
            os.kill(child.pid, signal.SIGCONT)
            stack = _read_stack(stacks).decode(errors="replace")
            if state in SUSPENDED:  # and goes on by now
                return Whereabouts(state, stack)
            return Whereabouts(state, stack, _ask_for_collectives(questions))
    except (psutil.NoSuchProcess, OSError):  # it has ended meanwhile
        return None


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
    """Wait until this worker can start a rank at once: its forkserver has imported torch.

    Raises RuntimeError if a process from there cannot import it, or does not end in time.
    """
    process = forkserver.start_forkserver().Process(
        target=importlib.import_module, args=("torch.distributed",)
    )
    process.start()
    process.join(WARM_UP_TIMEOUT)
    if process.exitcode is None:
        process.kill()
        process.join()
    if process.exitcode != 0:
        raise RuntimeError(f"this worker cannot start ranks (exit code {process.exitcode})")


def run_rank(
    spec: RankSpec, payload: bytes, tables: Handover | None = None
) -> bytes | memoryview | None:
    """Run one rank from start to end.

    `payload` is the pickled training function with its arguments, `tables` what they need of
    Dask's collections. Returns rank 0's pickled result; None for other ranks, and for a rank that
    failed. Raises nothing: how the rank ended is a message.
    """
    worker = get_worker()
    key = worker.get_current_task()

    def is_wanted() -> bool:
        return _is_wanted(worker, key)

    with _one_rank:
        send = Sender(worker, spec.attempt, spec.rank)
        try:
            child = _make_rank(worker, spec, payload, tables)
            has_started = _start(child, is_wanted)
        except Exception:  # of any kind: the client, which waits for this rank, must learn of it
            message = "The rank could not be started."
            send(Ended("raised", message=message, traceback=traceback.format_exc()))
            return None
        if not has_started:
            send(Ended("cancelled"))
            return None
        return _follow(child, worker, send, is_wanted)


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

    process: BaseProcess
    messages: Connection  # from the rank: objects of `ddp_common.messages`
    output: Connection  # from the rank: what it prints, and all that it starts
    stacks: Connection  # from the rank: its Python stack, on SIGUSR1
    questions: Connection  # to the rank and back: which collectives it is in
    result_file: BinaryIO | None  # for rank 0's result
    child_ends: list  # the other ends; we close our copies of them once the process has its own

    @property
    def pid(self) -> int:
        """The number of the process, once it has been started."""
        pid = self.process.pid
        assert pid is not None
        return pid

    def close(self) -> None:
        with _closing:
            for end in (self.messages, self.output, self.stacks, self.questions):
                end.close()


def _make_rank(
    worker: Worker, spec: RankSpec, payload: bytes, tables: Handover | None
) -> RankProcess:
    """A rank whose process is not started yet."""
    global _store_socket
    store_socket = result_file = result_end = None
    if spec.rank == 0:
        assert _store_socket is not None, "the client calls `listen` first"
        attempt_id, store_socket = _store_socket
        assert attempt_id == spec.attempt, "the socket is that of another attempt"
        _store_socket = None
        result_file = open_result_file(spec.attempt)
        result_end = Connection(os.dup(result_file.fileno()))  # as a connection it can be sent
    tables_end = tables.take() if tables is not None else None
    context = forkserver.start_forkserver()
    messages, their_messages = context.Pipe(duplex=False)
    output, their_output = context.Pipe(duplex=False)
    stacks, their_stacks = context.Pipe(duplex=False)
    questions, their_questions = context.Pipe(duplex=True)
    process = context.Process(
        target=rank_process.main,
        name=f"{descendants.RANK}{spec.rank}",
        args=(
            _environment(spec),
            worker.state.nthreads,
            payload,
            tables_end,
            store_socket,
            result_end,
            their_messages,
            their_output,
            their_stacks,
            their_questions,
        ),
    )
    always = [their_messages, their_output, their_stacks, their_questions]
    sometimes = [end for end in (tables_end, store_socket, result_end) if end is not None]
    child_ends = always + sometimes
    return RankProcess(process, messages, output, stacks, questions, result_file, child_ends)


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


def _start(child: RankProcess, is_wanted: Callable[[], bool]) -> bool:
    """Start the process; False if it was no longer wanted before it ran.

    A thread does it, because the first start waits while the forkserver imports torch. If the
    rank is not wanted any more meanwhile, this returns, and the thread kills what it has started.
    """
    errors: list[Exception] = []
    deciding = threading.Lock()  # either the thread has started the rank, or it is abandoned
    has_started = threading.Event()
    abandoned = threading.Event()

    def start() -> None:
        try:
            forkserver.start_process(child.process)
        except Exception as error:  # raised again below, in the agent's thread
            errors.append(error)
        for end in child.child_ends:
            end.close()
        with deciding:
            has_started.set()
        if abandoned.is_set() and not errors:
            # If it has started processes, the agent of the next rank ends them.
            _kill_group(child)

    threading.Thread(target=start, daemon=True).start()
    while not has_started.wait(POLL):
        with deciding:
            if not has_started.is_set() and not is_wanted():
                abandoned.set()
                return False
    if errors:
        raise errors[0]
    return True


def _follow(
    child: RankProcess, worker: Worker, send: Sender, is_wanted: Callable[[], bool]
) -> bytes | memoryview | None:
    """From the start of a rank's process to its last message; returns what `run_rank` does."""
    global _running
    _running = child
    send(Started(child.pid, socket.gethostname()))
    try:
        ending, as_bytes = _watch(child, send, is_wanted, MemoryLimit(worker, child.pid))
    finally:
        _running = None
        left = _kill(child)
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
    child: RankProcess, send: Sender, is_wanted: Callable[[], bool], memory: MemoryLimit
) -> tuple[Ended, bytes | None]:
    """Pass on what the rank says until it ends or is no longer wanted.

    Returns how it ended, and its result if that came through the pipe.
    """
    process = child.process
    lines = Lines(send)
    messages = pipe.Reader(child.messages)
    open_ends = [child.messages, child.output]
    last_word: Message | None = None
    deadline = float("inf")  # for the end of the process
    while True:
        ready = wait([*open_ends, process.sentinel], timeout=POLL)
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

        has_ended = process.sentinel in ready
        if has_ended:
            deadline = min(deadline, time.monotonic() + EXIT_TIMEOUT)
        is_late = time.monotonic() > deadline
        # A child of the rank may hold its output open, and print for ever.
        still_prints = child.output in ready and not is_late
        all_is_read = child.messages not in ready and not still_prints
        # Over: it has ended, and all is read; or it has said its last word, and does not end.
        is_over = all_is_read if has_ended else is_late
        if is_over:
            process.join(0)
            ending = _ending(last_word, process.exitcode)
            break
        if not is_wanted():
            ending = Ended("cancelled"), None
            break
        too_much = memory.exceeded()
        if too_much is not None:
            ending = Ended("raised", message=too_much), None
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


def _kill(child: RankProcess) -> list[int]:
    """End the rank and all that it has started, and wait until it is gone.

    First its process group at one blow, which is most of it; then what has a session or group of
    its own, or lost its parent. Returns the numbers of processes that are not gone.
    """
    guard = forkserver.guard()  # the process that adopts what a rank has left behind
    _kill_group(child)
    return descendants.end(lambda: descendants.of_rank(child.pid, guard))


def _kill_group(child: RankProcess) -> None:
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            kill(child.pid, signal.SIGKILL)
    child.process.join()
