"""The worker's side of a run: a Dask task that starts one rank as a process of its own, watches it, and ends it when told.

The rank is forked from a `multiprocessing` forkserver that has torch imported, so it starts in a fraction of a second, can be killed at
once, and leaves nothing behind in the worker. Relies on: the client's cancel turning the task's state to 'cancelled' while it runs
(also when the client died). Promises: one rank at a time; when the task ends, its rank is gone, and all that the rank has
started with it, in whatever session (see `descendants`); what the rank reported and printed, and how it ended, was sent to the client's
topic before.
"""

import collections
import contextlib
import json
import logging
import mmap
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import weakref
import zlib
from multiprocessing.connection import Connection, wait

import psutil
from distributed import Status, WorkerPlugin, get_worker
from distributed.comm import get_address_host

from ddp_common import batch, descendants, secret, transfer
from ddp_common import process as rank_process

TOPIC = "ddp_common"
PRELOAD = ["ddp_common._forkserver"]  # which imports the rest
POLL = 0.03  # seconds between looks at whether the client still wants this rank
FLUSH = 0.1  # seconds that reports and printed lines are gathered before they are sent
EXIT_TIMEOUT = 1.0  # seconds that a rank has to end by itself after its last word
STACK_TIMEOUT = 1.0  # seconds that a rank has to say where it is
LONGEST_FOLDER = 70  # characters, for temporary files: a socket's path below it has 108 at most
MEMORY_INTERVAL = 0.5  # seconds between two looks at a rank's memory, where the worker has a limit
MEMORY_SHARE = 50  # a look that takes long is followed by a pause of so many times as long
LONGEST_LINE = 10_000  # bytes of a printed line that are kept
STATE_INTERVAL = 5.0  # seconds between two states of a line that is drawn again and again, such as a progress bar
PRINT_BURST = 4 * 2**20  # bytes that a rank may print at once, and
PRINT_RATE = 2**18  # bytes a second that it may go on printing, before lines are left out
LINE_COST = 100  # bytes that a line counts for, beside its own
KEPT_LINES = 50  # the last of those that are left out, which are passed on after all
LARGE_RESULT = 32 * 2**20  # bytes of a result that the client is told of, because it takes a moment to fetch

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
        if (pid := _guard()) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, descendants.END)


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


def _guard():
    """The process that stands guard over the forkserver and all that its ranks have started; None before the first launch."""
    return multiprocessing.forkserver._forkserver._forkserver_pid


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
    """Run one rank to its end; the Dask task. Returns rank 0's pickled result (bytes-like), None for other ranks or when it failed.

    `spec` is a dict: run (id), rank, world_size, local_rank, local_world_size, store ((host, port, secret)), environment (dict of str).
    `payload` is the pickled (function, keyword arguments).
    """
    global _rank
    worker = get_worker()
    key = worker.get_current_task()
    with _one_rank:
        send, is_wanted = Sender(worker, spec["run"], spec["rank"]), lambda: _is_wanted(worker, key)
        try:
            result_file = _open_result_file(spec)
            process, ours, theirs = _make_process(worker, spec, payload, result_file)
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
            ended = _watch(process, messages, output, send, is_wanted, MemoryLimit(worker, process))
        finally:
            _rank = None
            left = _kill(process)
            for end in ours:
                end.close()
        for pid in left:
            send({"line": f"process {pid}, which this rank has started, does not end although it was killed (see its state with ps)"})
        result = ended.pop("result", None)
        if ended["how"] == "done" and result_file is not None:
            if result is None:
                result, ended["result"] = _take_result(result_file)
            else:
                ended["result"] = {"path": "", "target": None, "size": len(result)}
        send({"ended": ended})
        return result


def _open_result_file(spec):
    """A file in memory, into which rank 0 writes its result: a pipe would copy it four times. None for other ranks."""
    if spec["rank"] != 0:
        return None
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create(f"ddp-result-{spec['run']}"), "rb")
    return tempfile.TemporaryFile()


def _take_result(file):
    """(the content of rank 0's file; where a client on this machine finds it: path, target of that link, size).

    The file is closed with the content, when Dask forgets it.
    """
    size = os.fstat(file.fileno()).st_size
    path = f"/proc/{os.getpid()}/fd/{file.fileno()}"
    content = mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ)
    weakref.finalize(content, file.close)
    target = os.readlink(path) if os.path.exists(path) else None
    return memoryview(content), {"path": path, "target": target, "size": size}


def _is_wanted(worker, key):
    """False once the client has cancelled the task, closed or died, and when the worker itself is closing."""
    task = worker.state.tasks.get(key)
    return task is not None and task.state not in ("cancelled", "resumed") and worker.status in (Status.running, Status.paused)


class Sender:
    """Gathers this rank's messages for a moment, then sends them to the client as one event.

    They are packed into a few bytes: worker, scheduler and client each keep the last thousand events.
    """

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
            packed = zlib.compress(json.dumps(self.waiting).encode(), level=1)
            self.worker.log_event(TOPIC, {**self.envelope, "packed": packed})
        self.waiting, self.sent = [], time.monotonic()

    def flush_if_due(self):
        if time.monotonic() - self.sent > FLUSH:
            self.flush()


def messages_of(event):
    """The messages (list of dict) in an event of an agent; none in any other."""
    return json.loads(zlib.decompress(event["packed"])) if "packed" in event else []


def _make_process(worker, spec, payload, result_file):
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
    result_end = None if result_file is None else Connection(os.dup(result_file.fileno()))  # as such it travels
    ours, theirs = zip(*(context.Pipe(duplex=False) for _ in ("messages", "output", "stacks")))
    process = context.Process(target=rank_process.main, name=f"{descendants.RANK}{spec['rank']}", args=(
        {name: str(value) for name, value in environment.items()}, worker.state.nthreads, payload, listener, result_end, *theirs))
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


class MemoryLimit:
    """The worker's memory limit, held against its rank and all that the rank has started: Dask's nanny sees only the worker's process."""

    def __init__(self, worker, process):
        self.limit, self.pid, self.next_look = worker.memory_manager.memory_limit, process.pid, time.monotonic() + MEMORY_INTERVAL

    def exceeded(self):
        """A sentence once the rank is over the limit, else None."""
        began = time.monotonic()
        if not self.limit or began < self.next_look:
            return None
        living = descendants.of_rank(self.pid, _guard())
        used = descendants.memory_of(living, self.limit)
        now = time.monotonic()
        self.next_look = now + max(MEMORY_INTERVAL, MEMORY_SHARE * (now - began))
        if used <= self.limit:
            return None
        others = f" together with the {len(living) - 1} process(es) that it has started" if len(living) > 1 else ""
        return (f"it used {used / 2**30:.2f} GiB of memory{others}, and its worker's limit is {self.limit / 2**30:.2f} GiB. Take a smaller "
                "batch, more ranks, or a higher memory_limit in the profile")


def _watch(process, messages, output, send, is_wanted, memory):
    """Relay what the rank says until it ends or is no longer wanted. Returns how it ended (dict)."""
    outcome, lines, open_ends, deadline = {"how": "exited"}, Lines(send), [messages, output], float("inf")
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
        prints_on = output in ready and not is_late  # a child of it may hold its output open, and print for ever
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


class Lines:
    """Turns what a rank prints into lines, and passes each on; bounded, however much that is.

    Of a line that is drawn again and again (carriage returns: progress bars) the latest state counts, every few seconds and at its
    end. A line beyond `LONGEST_LINE` is cut. Of an avalanche of lines the first and the last are passed on, and how many were left out.
    """

    def __init__(self, send):
        self.send = send
        self.state, self.rest, self.beyond = b"", b"", 0  # of the line that has not ended: earlier state, present one, bytes cut off it
        self.shown, self.drawn = None, time.monotonic()  # the state that was passed on last, and when
        self.allowance, self.filled = PRINT_BURST, time.monotonic()
        self.last, self.left_out, self.told = collections.deque(maxlen=KEPT_LINES), 0, 0.0

    def read(self, connection):
        """Read once; False at the end of the stream."""
        chunk = os.read(connection.fileno(), 65536)
        now = time.monotonic()
        self.allowance = min(PRINT_BURST, self.allowance + PRINT_RATE * (now - self.filled))
        self.filled = now
        *ended, begun = chunk.split(b"\n")
        for piece in ended:
            self._go_on(piece)
            self._end_line()
        self._go_on(begun)
        return bool(chunk)

    def flush_if_due(self):
        """Pass on what has waited for its moment."""
        now = time.monotonic()
        if self.state and now - self.drawn > STATE_INTERVAL:
            self._draw(now)
        if self.last and now - self.told > STATE_INTERVAL:
            self._tell_last(now)

    def close(self):
        if self.state or self._present():
            self._end_line()
        if self.last:
            self._tell_last(time.monotonic())

    def _go_on(self, piece):
        *states, piece = piece.split(b"\r")
        if states:
            self._append(states[0])
            self.state = next(filter(None, reversed(states[1:])), self._present() or self.state)[:LONGEST_LINE]
            self.rest, self.beyond = b"", 0
        self._append(piece)

    def _append(self, piece):
        room = LONGEST_LINE - len(self.rest)
        self.rest += piece[:room]
        self.beyond += max(0, len(piece) - room)

    def _present(self):
        """The text of the line as it stands; empty right after a carriage return."""
        cut = b" ... [cut here: %d more bytes]" % self.beyond if self.beyond else b""
        return self.rest + cut

    def _draw(self, now):
        text = self._present() or self.state
        if text != self.shown:
            self._pass_on(text)
        self.shown, self.drawn = text, now

    def _end_line(self):
        text = self._present() or self.state
        if text != self.shown:
            self._pass_on(text)
        self.state, self.rest, self.beyond, self.shown = b"", b"", 0, None

    def _pass_on(self, text):
        line = text.decode(errors="replace")
        cost = len(text) + LINE_COST
        if self.allowance > cost and not self.last:
            self.allowance -= cost
            self.send({"line": line})
            return
        if not self.last:
            self.told = time.monotonic()
        self.left_out += len(self.last) == KEPT_LINES
        self.last.append(line)

    def _tell_last(self, now):
        if self.left_out:
            self.send({"line": f"... [{self.left_out:,} lines left out: they came faster than they can be kept] ..."})
        for line in self.last:
            self.send({"line": line})
        self.last.clear()
        self.left_out, self.told = 0, now


def _kill(process):
    """End the rank and all that it has started, and wait until it is gone; returns the process numbers of what is not.

    First its process group at one blow, which is most of it; then what has a session or group of its own, or lost its parent.
    """
    guard = _guard()
    _kill_group(process)
    return descendants.end(lambda: descendants.of_rank(process.pid, guard))


def _kill_group(process):
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            kill(process.pid, signal.SIGKILL)
    process.join()
