"""The worker's side of a run: a Dask task that starts one rank as a process of its own, watches it, and ends it when told.

The rank is forked from a `multiprocessing` forkserver that has torch imported, so it starts in a fraction of a second, can be killed at
once, and leaves nothing behind in the worker. Relies on: the client's cancel turning the task's state to 'cancelled' while it runs
(also when the client died). Promises: one rank at a time; when the task ends, its rank is gone, and all that the rank has
started with it, in whatever session (see `descendants`); what the rank reported and printed, and how it ended, was sent to the client's
topic before.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection, wait

import psutil
from distributed import Status, get_worker
from distributed.comm import get_address_host

from ddp_common.ranks import process as rank_process
from ddp_common.ranks import secret
from ddp_common.worker import descendants, forkserver
from ddp_common.worker.lines import Lines
from ddp_common.worker.memory import MemoryLimit
from ddp_common.worker.result import open_result_file, take_result
from ddp_common.worker.sender import Sender

POLL = 0.03  # seconds between looks at whether the client still wants this rank
EXIT_TIMEOUT = 1.0  # seconds that a rank has to end by itself after its last word
STACK_TIMEOUT = 1.0  # seconds that a rank has to say where it is

_one_rank = threading.Lock()
_listener = None  # (run id, socket) made by `listen`, until rank 0's agent takes it
_rank = None  # (process, read end of its stacks) while one runs


def listen(run_id, dask_worker):
    """Bind a free port on the address by which Dask reaches this worker; rank 0's store will listen there.

    Returns (host, port, secret): who knows the secret, which travels as Dask's own messages do, is one of the run's ranks.
    """
    global _listener
    if _listener is not None:  # of a launch that came no further
        _listener[1].close()
    host = get_address_host(dask_worker.address)
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    bound.bind((host, 0))
    bound.listen(1024)
    _listener = run_id, bound
    return host, bound.getsockname()[1], secret.new()


def tell_to_stop():
    """Send SIGTERM to the rank on this worker, if there is one."""
    if _rank is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(_rank[0].pid, signal.SIGTERM)


def where_is_it():
    """What the rank on this worker is doing: (state of its process, Python stack as text), or None without one."""
    if _rank is None:
        return None
    (process, stacks), text = _rank, b""
    with (
        contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError),
        Connection(os.dup(stacks.fileno())) as own,
    ):
        state = psutil.Process(process.pid).status()
        for number in (
            signal.SIGUSR1,
            signal.SIGCONT,
        ):  # a stopped process writes its stack as soon as it goes on
            os.kill(process.pid, number)
        while own.poll(STACK_TIMEOUT if not text else 0.05) and (
            piece := os.read(own.fileno(), 65536)
        ):
            text += piece
        return state, text.decode(errors="replace")


def run_rank(spec, payload):
    """Run one rank to its end; the Dask task. Returns rank 0's pickled result (bytes-like), None for other ranks or when it failed.

    `spec` is a dict: run (id), rank, world_size, local_rank, local_world_size, store ((host, port, secret)), environment (dict of str).
    `payload` is the pickled (function, keyword arguments).
    """
    global _rank
    worker = get_worker()
    key = worker.get_current_task()
    with _one_rank:
        send, is_wanted = (
            Sender(worker, spec["run"], spec["rank"]),
            lambda: _is_wanted(worker, key),
        )
        try:
            result_file = open_result_file(spec)
            process, ours, theirs = _make_process(worker, spec, payload, result_file)
            if not _start(process, theirs, is_wanted):
                send({"ended": {"how": "cancelled"}})
                return None
        except (
            Exception
        ):  # whatever it was, the client must learn of it: it waits for this rank's end
            send(
                {
                    "ended": {
                        "how": "raised",
                        "traceback": traceback.format_exc(),
                        "message": "The rank could not be started.",
                    }
                }
            )
            return None
        messages, output, stacks = ours
        _rank = process, stacks
        send({"started": {"pid": process.pid, "host": socket.gethostname()}})
        try:
            ended = _watch(
                process, messages, output, send, is_wanted, MemoryLimit(worker, process)
            )
        finally:
            _rank = None
            left = _kill(process)
            for end in ours:
                end.close()
        for pid in left:
            send(
                {
                    "line": f"process {pid}, which this rank has started, does not end although it was killed (see its state with ps)"
                }
            )
        result = ended.pop("result", None)
        if ended["how"] == "done" and result_file is not None:
            if result is None:
                result, ended["result"] = take_result(result_file)
            else:
                ended["result"] = {"path": "", "target": None, "size": len(result)}
        send({"ended": ended})
        return result


def _is_wanted(worker, key):
    """False once the client has cancelled the task, closed or died, and when the worker itself is closing."""
    task = worker.state.tasks.get(key)
    return (
        task is not None
        and task.state not in ("cancelled", "resumed")
        and worker.status in (Status.running, Status.paused)
    )


def _make_process(worker, spec, payload, result_file):
    """The rank's process, not started; our ends of its three pipes; and what is the rank's own, to be closed here once it has it."""
    global _listener
    listener = None
    if spec["rank"] == 0:
        (run_id, listener), _listener = _listener, None
        assert run_id == spec["run"], "another run's store"
    environment = {
        "RANK": spec["rank"],
        "WORLD_SIZE": spec["world_size"],
        "LOCAL_RANK": spec["local_rank"],
        "LOCAL_WORLD_SIZE": spec["local_world_size"],
        "MASTER_ADDR": spec["store"][0],
        "MASTER_PORT": spec["store"][1],
        secret.VARIABLE: spec["store"][2],
        **({"DDP_OWN_GPU_FIRST": 1} if "dask_cuda" in sys.modules else {}),
        **spec["environment"],
    }
    context = forkserver.start_forkserver()
    result_end = (
        None if result_file is None else Connection(os.dup(result_file.fileno()))
    )  # as such it travels
    ours, theirs = zip(*(context.Pipe(duplex=False) for _ in ("messages", "output", "stacks")))
    process = context.Process(
        target=rank_process.main,
        name=f"{descendants.RANK}{spec['rank']}",
        args=(
            {name: str(value) for name, value in environment.items()},
            worker.state.nthreads,
            payload,
            listener,
            result_end,
            *theirs,
        ),
    )
    return process, ours, [end for end in (*theirs, listener, result_end) if end is not None]


def _start(process, given, is_wanted):
    """Start the process; False if it was no longer wanted before it ran: the first start waits while the forkserver imports torch."""
    errors, abandoned = [], threading.Event()

    def start():
        try:
            process.start()
        except Exception as error:  # raised again below, in the agent's thread
            errors.append(error)
        for end in given:
            end.close()
        if abandoned.is_set() and not errors:
            _kill_group(process)  # what it may have started, the next rank's agent ends

    (starting := threading.Thread(target=start, daemon=True)).start()
    while starting.is_alive():
        starting.join(POLL)
        if starting.is_alive() and not is_wanted():
            abandoned.set()
            return False
    if errors:
        raise errors[0]
    return True


def _watch(process, messages, output, send, is_wanted, memory):
    """Relay what the rank says until it ends or is no longer wanted. Returns how it ended (dict)."""
    outcome, lines, open_ends, deadline = (
        {"how": "exited"},
        Lines(send),
        [messages, output],
        float("inf"),
    )
    while True:
        ready = wait([*open_ends, process.sentinel], timeout=POLL)
        if output in ready and not lines.read(output):
            open_ends.remove(output)
        if messages in ready:
            try:
                message = messages.recv()
            except (EOFError, OSError):
                open_ends.remove(messages)
            else:
                if "how" in message:
                    outcome, deadline = message, time.monotonic() + EXIT_TIMEOUT
                elif message:
                    send(message)
        lines.flush_if_due()
        send.flush_if_due()
        has_ended = process.sentinel in ready
        if has_ended:
            deadline = min(deadline, time.monotonic() + EXIT_TIMEOUT)
        is_late = time.monotonic() > deadline
        prints_on = (
            output in ready and not is_late
        )  # a child of it may hold its output open, and print for ever
        if (has_ended and messages not in ready and not prints_on) or (is_late and not has_ended):
            lines.close()
            process.join(0)
            return {**outcome, "exitcode": process.exitcode}
        if not is_wanted():
            lines.close()
            return {"how": "cancelled"}
        if too_much := memory.exceeded():
            lines.close()
            return {"how": "raised", "message": too_much, "traceback": ""}


def _kill(process):
    """End the rank and all that it has started, and wait until it is gone; returns the process numbers of what is not.

    First its process group at one blow, which is most of it; then what has a session or group of its own, or lost its parent.
    """
    guard = forkserver.guard()
    _kill_group(process)
    return descendants.end(lambda: descendants.of_rank(process.pid, guard))


def _kill_group(process):
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            kill(process.pid, signal.SIGKILL)
    process.join()
