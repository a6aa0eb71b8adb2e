"""The worker's side of a run: a Dask task that starts one rank as a process of its own, watches it, and ends it when told.

The rank is forked from a `multiprocessing` forkserver that has torch imported, so it starts in a fraction of a second, can be killed at
once, and leaves nothing behind in the worker. Relies on: the client's cancel turning the task's state to 'cancelled' while it runs
(also when the client died). Promises: one rank at a time; when the task ends, its rank and the rank's children are gone; what
the rank reported and printed, and how it ended, was sent to the client's topic before.
"""

import contextlib
import logging
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from multiprocessing.connection import Connection, wait

import psutil
from distributed import Status, WorkerPlugin, get_worker
from distributed.comm import get_address_host

from ddp_common import batch, secret, transfer
from ddp_common import process as rank_process

TOPIC = "ddp_common"
PRELOAD = ["ddp_common._forkserver", "torch", "torch.distributed", "torch._dynamo", "torch.nn.parallel", "ddp_common.process",
           "ddp_common.rendezvous", "ddp_common.sampling", "ddp_common.checkpoint", "ddp_common.stopping"]
POLL = 0.03  # seconds between looks at whether the client still wants this rank
FLUSH = 0.1  # seconds that reports and printed lines are gathered before they are sent
EXIT_TIMEOUT = 1.0  # seconds that a rank has to end by itself after its last word
STACK_TIMEOUT = 1.0  # seconds that a rank has to say where it is
LONGEST_FOLDER = 70  # characters, for temporary files: a socket's path below it has 108 at most
MEMORY_INTERVAL = 0.5  # seconds between two looks at a rank's memory, where the worker has a limit

_one_rank = threading.Lock()
_listener = None  # (run id, socket) made by `listen`, until rank 0's agent takes it
_rank = None  # (process, read end of its stacks) while one runs


class Preload(WorkerPlugin):
    """Worker plugin: imports torch in the forkserver while the cluster is still being waited for.

    It also makes the worker deaf to Ctrl-C, which a terminal sends to every process, and to SIGTERM, which a batch system does: the client acts
    on the one, the ranks on the other, and they need their worker until they have saved. And a scheduler that is closed first is no error.
    """

    name = "ddp-preload"
    idempotent = True  # a second client that connects must not end the forkserver, and with it the ranks, of the first

    def setup(self, worker):
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)
        logging.getLogger("distributed.worker").addFilter(lambda record: not isinstance((record.exc_info or (None, None))[1], OSError))
        start_forkserver()
        batch.watch_time_limit(tell_to_stop)

    def teardown(self, worker):
        """End the forkserver now: while it imports torch it does not notice that its worker leaves, and the worker would wait."""
        if pid := multiprocessing.forkserver._forkserver._forkserver_pid:
            os.kill(pid, signal.SIGKILL)


def start_forkserver():
    """Start the forkserver if it does not run.

    Two things that the nanny gives a worker must not reach the ranks: a daemonic process may have no children, and a malloc that
    returns every 64 KB to the system makes each training step fault its memory in again. Its socket's path must be short (unix(7)).
    """
    multiprocessing.current_process()._config["daemon"] = False
    os.environ.pop("MALLOC_TRIM_THRESHOLD_", None)
    if len(tempfile.gettempdir()) > LONGEST_FOLDER:
        tempfile.tempdir = "/tmp"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    multiprocessing.forkserver.ensure_running()
    return context


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
    with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError), Connection(os.dup(stacks.fileno())) as own:
        state = psutil.Process(process.pid).status()
        for number in (signal.SIGUSR1, signal.SIGCONT):  # a stopped process writes its stack as soon as it goes on
            os.kill(process.pid, number)
        while own.poll(STACK_TIMEOUT if not text else 0.05) and (piece := os.read(own.fileno(), 65536)):
            text += piece
        return state, text.decode(errors="replace")


def run_rank(spec, payload):
    """Run one rank to its end; the Dask task. Returns rank 0's pickled result (bytes), None for other ranks or when it failed.

    `spec` is a dict: run (id), rank, world_size, local_rank, local_world_size, store ((host, port, secret)), environment (dict of str).
    `payload` is the pickled (function, keyword arguments).
    """
    global _rank
    worker = get_worker()
    key = worker.get_current_task()
    with _one_rank:
        send, is_wanted = Sender(worker, spec["run"], spec["rank"]), lambda: _is_wanted(worker, key)
        try:
            process, ours, theirs = _make_process(worker, spec, payload)
            if not _start(process, theirs, is_wanted):
                send({"ended": {"how": "cancelled"}})
                return None
        except Exception:  # whatever it was, the client must learn of it: it waits for this rank's end
            send({"ended": {"how": "raised", "traceback": traceback.format_exc(), "message": "The rank could not be started."}})
            return None
        messages, output, stacks = ours
        _rank = process, stacks
        send({"started": {"pid": process.pid, "host": socket.gethostname()}})
        try:
            ended, result = _watch(process, messages, output, send, is_wanted, MemoryLimit(worker, process))
        finally:
            _rank = None
            _kill(process)
            for end in ours:
                end.close()
        send({"ended": ended})
        return result


def _is_wanted(worker, key):
    """False once the client has cancelled the task, closed or died, and when the worker itself is closing."""
    task = worker.state.tasks.get(key)
    return task is not None and task.state not in ("cancelled", "resumed") and worker.status in (Status.running, Status.paused)


class Sender:
    """Gathers this rank's messages for a moment, then sends them to the client as one event."""

    def __init__(self, worker, run_id, rank):
        self.worker, self.envelope, self.waiting, self.sent = worker, {"run": run_id, "rank": rank}, [], time.monotonic()

    def __call__(self, message):
        if "content" in message:  # too large for an event: the client fetches it
            message["token"] = f"{self.envelope['run']}/{self.envelope['rank']}/{time.monotonic_ns()}"
            transfer.keep_file(message["token"], message.pop("content"))
        self.waiting.append(message)
        if {"started", "returned", "ended"} & set(message):
            self.flush()

    def flush(self):
        if self.waiting:
            self.worker.log_event(TOPIC, {**self.envelope, "messages": self.waiting})
        self.waiting, self.sent = [], time.monotonic()

    def flush_if_due(self):
        if time.monotonic() - self.sent > FLUSH:
            self.flush()


def _make_process(worker, spec, payload):
    """The rank's process, not started; our ends of its three pipes; and what is the rank's own, to be closed here once it has it."""
    global _listener
    listener = None
    if spec["rank"] == 0:
        (run_id, listener), _listener = _listener, None
        assert run_id == spec["run"], "another run's store"
    environment = {
        "RANK": spec["rank"], "WORLD_SIZE": spec["world_size"], "LOCAL_RANK": spec["local_rank"],
        "LOCAL_WORLD_SIZE": spec["local_world_size"], "MASTER_ADDR": spec["store"][0], "MASTER_PORT": spec["store"][1], secret.VARIABLE: spec["store"][2],
        **({"DDP_OWN_GPU_FIRST": 1} if "dask_cuda" in sys.modules else {}), **spec["environment"],
    }
    context = start_forkserver()
    ours, theirs = zip(*(context.Pipe(duplex=False) for _ in ("messages", "output", "stacks")))
    process = context.Process(target=rank_process.main, name=f"rank-{spec['rank']}", args=(
        {name: str(value) for name, value in environment.items()}, worker.state.nthreads, payload, listener, *theirs))
    return process, ours, [end for end in (*theirs, listener) if end is not None]


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
            _kill(process)

    (starting := threading.Thread(target=start, daemon=True)).start()
    while starting.is_alive():
        starting.join(POLL)
        if starting.is_alive() and not is_wanted():
            abandoned.set()
            return False
    if errors:
        raise errors[0]
    return True


class MemoryLimit:
    """The worker's memory limit, held against its rank: Dask's nanny sees only the worker's own process."""

    def __init__(self, worker, process):
        self.limit, self.pid, self.looked = worker.memory_manager.memory_limit, process.pid, time.monotonic()

    def exceeded(self):
        """A sentence once the rank is over the limit, else None."""
        if not self.limit or time.monotonic() - self.looked < MEMORY_INTERVAL:
            return None
        self.looked = time.monotonic()
        try:
            used = psutil.Process(self.pid).memory_info().rss
        except psutil.NoSuchProcess:
            return None
        return None if used <= self.limit else (
            f"it used {used / 2**30:.2f} GiB of memory, and its worker's limit is {self.limit / 2**30:.2f} GiB. Take a smaller batch, more ranks, "
            "or a higher memory_limit in the profile")


def _watch(process, messages, output, send, is_wanted, memory):
    """Relay what the rank says until it ends or is no longer wanted. Returns (how it ended: dict, result bytes or None)."""
    outcome, result, lines, open_ends, deadline = {"how": "exited"}, None, Lines(send), [messages, output], float("inf")
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
                    result = message.pop("result", None)
                    outcome, deadline = message, time.monotonic() + EXIT_TIMEOUT
                elif message:
                    send(message)
        send.flush_if_due()
        if (process.sentinel in ready and not set(ready) & set(open_ends)) or time.monotonic() > deadline:
            lines.close()
            process.join(0)
            return {**outcome, "exitcode": process.exitcode}, result
        if not is_wanted():
            lines.close()
            return {"how": "cancelled"}, None
        if too_much := memory.exceeded():
            lines.close()
            return {"how": "raised", "message": too_much, "traceback": ""}, None


class Lines:
    """Turns what a rank prints into lines, and passes each on."""

    def __init__(self, send):
        self.send, self.rest = send, b""

    def read(self, connection):
        """Read once; False at the end of the stream."""
        chunk = os.read(connection.fileno(), 65536)
        *lines, self.rest = (self.rest + chunk).split(b"\n")
        for line in lines:
            self.send({"line": line.decode(errors="replace")})
        return bool(chunk)

    def close(self):
        if self.rest:
            self.send({"line": self.rest.decode(errors="replace")})


def _kill(process):
    """End the rank and all that it started (it leads a process group of its own), and wait until it is gone."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            kill(process.pid, signal.SIGKILL)
    process.join()
