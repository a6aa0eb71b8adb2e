"""The rank's own process: what happens in it before and after the training function.

Forked by a nursery of its worker, which ends it (`worker.nursery`). Promises: it sends an `Ended`,
whatever the training function has done, unless that has ended the process; everything that was
reported and printed was sent before; it has random numbers of its own, though all ranks are forked
from one state; on SIGUSR1 it says where it is, also while it waits in a collective. Relies on the
nursery to have blocked SIGTERM and SIGUSR1: one that comes early waits.
"""

import base64
import contextlib
import faulthandler
import functools
import io
import linecache
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

from ddp_common.errors import Error
from ddp_common.messages import Ended, Position
from ddp_common.ranks import handover, main_module, pipe, whereabouts

LONGEST_MESSAGE = 10_000  # characters of an exception's own message
LONGEST_TRACEBACK = 100_000  # characters
# Bytes of a pickled exception; a larger one does not travel, its message does
LARGEST_EXCEPTION = 2**20
HINTS = {  # what to do about an error of torch or Python, by a part of its text
    "No module named": (
        "A rank can import what its worker can. For a module beside your script: start the "
        "workers in its folder, put that on their PYTHONPATH, or send it with client.upload_file."
    ),
    "received 0 items of ancdata": (
        "The rank has too many open files, as its loader workers send many tensors: raise `ulimit "
        "-n`, or call torch.multiprocessing.set_sharing_strategy('file_system') in the function."
    ),
    "unable to allocate shared memory": (
        "/dev/shm is full: give the container more (docker run --shm-size=2g), or use fewer "
        "loader workers."
    ),
    "BdbQuit": (
        "A rank has no keyboard, so breakpoint() and pdb cannot ask. Print instead, or run the "
        "program under torchrun with one rank."
    ),
    "Expected more than 1 value per channel when training": (
        "Batch normalisation got one sample: this rank's share of a small last batch. Leave that "
        "batch out, with ddp.ElasticSampler(…, drop_last=True)."
    ),
    "default process group twice": (
        "The process group is there already: every rank is in it when the function begins. Remove "
        "that line; docs/coming-from-elsewhere.md has a table."
    ),
    "context has already been set": (
        "A rank has set its start method already. Set that of loader workers in the loader: "
        "ddp.DataLoader(…, multiprocessing_context='spawn')."
    ),
}


def main(
    environment: dict[str, str],
    threads: int,
    payload: bytes,
    *,
    messages: int,
    output: int,
    tables: int | None = None,
    store_socket: int | None = None,
) -> None:
    """Be a rank: from the fork to its last word.

    `environment`: variables to set; `threads`: of torch; `payload`: pickled (function, keyword
    arguments, sources of notebook cells, functions that repeat torch's global settings of the
    client's program). The others are file descriptors: `messages` and `output` are the write ends
    of two pipes to the agent, `tables` is a file with the Dask collections among the arguments
    (`handover`). Rank 0 alone has `store_socket`, on which the ranks' key-value store listens.
    """
    os.setsid()  # a terminal's Ctrl-C is for the client
    _attach_output(output)
    faulthandler.enable()
    # The fork server ignores SIGINT, and programs that the rank starts would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    to_agent = Connection(messages)
    whereabouts.answer_questions(functools.partial(pipe.write, to_agent))
    try:
        last_word = _train(
            environment,
            threads,
            payload,
            tables,
            socket.socket(fileno=store_socket) if store_socket is not None else None,
            to_agent,
        )
    except BaseException as error:  # whatever it is: the client must know
        last_word = _raised(error)
    _flush()
    pipe.write(to_agent, last_word)
    if last_word.how == "raised":
        sys.exit(last_word.exitcode)


def _attach_output(output: int) -> None:
    """From now on, what this process and its children print goes to the agent."""
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)
    sys.stdout = open(1, "w", buffering=1, closefd=False)
    sys.stderr = open(2, "w", buffering=1, closefd=False)


def _train(
    environment: dict[str, str],
    threads: int,
    payload: bytes,
    tables: int | None,
    store_socket: socket.socket | None,
    to_agent: Connection,
) -> Ended:
    """Call the training function; returns the rank's last word."""
    is_rank_0 = environment["RANK"] == "0"
    os.environ.update(environment)
    # Every process that the rank starts has this mark.
    os.environ["DDP_RANK_PROCESS"] = str(os.getpid())

    # Not at the top: the client imports this module too, and torch takes a second.
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from ddp_common.ranks import checkpoint, rendezvous, reporting, stopping

    torch.set_num_threads(threads)
    _draw_a_random_state()
    # By fork, the workers of a DataLoader know a notebook's classes, as they would in the
    # notebook itself.
    multiprocessing.set_start_method("fork", force=True)
    register_optimizer_step_post_hook(reporting.made_progress)
    finish_reports = reporting.start(functools.partial(pipe.write, to_agent))
    try:
        stopping.listen_to_sigterm()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        handler = signal.getsignal(signal.SIGTERM)
        os.register_at_fork(after_in_child=functools.partial(_be_no_rank, handler))
        if tables is not None:
            handover.receive(tables)
        function, arguments, sources, what_is_set = main_module.loads(payload)
        linecache.cache.update(sources)  # a traceback then shows the lines of a notebook's cells
        for set_it in what_is_set:
            set_it()
        whereabouts.keep_collectives()
        with rendezvous.process_group(store_socket), stopping.in_agreement():
            result = _call(function, arguments)
            stopping.training_has_ended()
            checkpoint.finish_writing()
            reporting.post(Position(**reporting.position(), has_returned=True))
        return Ended("done", result=pickled_result(result) if is_rank_0 else None)
    except stopping.Stopped:
        step = reporting.position().get("step", 0)
        return Ended(
            "stopped",
            got_sigterm=stopping.was_told(),
            in_loop=stopping.is_in_loop(),
            step=step,
        )
    finally:
        stopping.training_has_ended()
        finish_reports()


def _call(function: Callable, arguments: dict) -> Any:
    """Call the training function.

    A process that it has forked (os.fork) may come back from it too: that one is not the rank,
    and ends here.
    """
    own_pid = os.getpid()
    try:
        return function(**arguments)
    finally:
        if os.getpid() != own_pid:
            error = sys.exception()
            try:
                if error is not None and not isinstance(error, SystemExit):
                    traceback.print_exception(error)
                _flush()
            finally:
                os._exit(_exit_code(error))


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # the training function has closed it
            stream.flush()


def _draw_a_random_state() -> None:
    """Seed NumPy and torch from the operating system, as a new process does.

    What this process was forked from has one state for all ranks. `random` does so by itself.
    """
    import numpy
    import torch

    numpy.random.seed()
    torch.seed()


def pickled_result(result: Any) -> bytes:
    """The result as torch.save writes it: the client can load a GPU's tensors without a GPU.

    What pickle refuses, such as a function made in a function, cloudpickle may take. Raises
    TypeError for what cannot be pickled.
    """
    import cloudpickle
    import torch

    buffer = io.BytesIO()
    with contextlib.suppress(Exception):
        torch.save(result, buffer)
        return buffer.getvalue()
    buffer = io.BytesIO()
    try:
        torch.save(result, buffer, pickle_module=cloudpickle)
    except Exception as error:
        raise TypeError(
            f"The training function returned something that cannot be pickled ({error}). Return "
            "tensors, numbers, a state_dict, or lists and dicts of these; not "
            f"{type(result).__name__}."
        ) from None
    return buffer.getvalue()


def _be_no_rank(handler: Any) -> None:
    """In what the rank has forked, such as a DataLoader's worker.

    Nobody listens to its reports, and SIGTERM ends it as it would end any process.
    """
    from ddp_common.ranks import reporting

    reporting.stop()
    whereabouts.unblock_signal()
    if signal.getsignal(signal.SIGTERM) is handler:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


# How an exception travels


def _raised(error: BaseException) -> Ended:
    """The last word of a rank that ended with an exception.

    The message of an `Error` is enough to read.
    """
    if isinstance(error, Error):
        headline = str(error)
    else:
        headline = "".join(traceback.format_exception_only(error)).strip()
    headline = shortened(headline, LONGEST_MESSAGE)
    for part, hint in HINTS.items():
        if part in headline:
            headline = f"{headline}. {hint}"
    code = _exit_code(error)
    if isinstance(error, SystemExit):
        headline = f"it left with exit code {code} before its function returned: {headline}"
    frames = _from_the_function_on(error.__traceback__)
    text = "".join(traceback.format_exception(type(error), error, frames))
    if isinstance(error, Error):  # its message can be long, and is the headline
        text = text.removesuffix("".join(traceback.format_exception_only(error)))
    text = shortened(text, LONGEST_TRACEBACK)
    return Ended("raised", code, headline, text, _pickle_exception(error))


def _from_the_function_on(frames: TracebackType | None) -> TracebackType | None:
    """The traceback without the frames before the training function; all if it was not called."""
    each = frames
    while each is not None and each.tb_frame.f_code is not _call.__code__:
        each = each.tb_next
    return each.tb_next if each is not None and each.tb_next is not None else frames


def shortened(text: str, length: int) -> str:
    """`text`, or its head, how much is left out, and its tail."""
    left_out = len(text) - length
    if left_out <= 0:
        return text
    head = text[: length // 2]
    tail = text[-length // 2 :]
    return f"{head}\n… [{left_out:,} characters left out] …\n{tail}"


def _exit_code(error: BaseException | None) -> int:
    """The exit code that Python would give a process which ends with this exception."""
    if error is None:
        return 0
    if not isinstance(error, SystemExit):
        return 1
    if isinstance(error.code, int):
        return error.code & 0xFF
    return 0 if error.code is None else 1


def _pickle_exception(error: BaseException) -> str | None:
    """The exception for the caller's `RankFailed.__cause__`, as base64.

    None if it cannot travel.
    """
    import cloudpickle  # not at the top: only a rank that fails needs it

    with contextlib.suppress(Exception):  # its classes can do anything here
        pickled = cloudpickle.dumps(error)
        if len(pickled) <= LARGEST_EXCEPTION and isinstance(pickle.loads(pickled), BaseException):
            return base64.b64encode(pickled).decode()
    return None


# On the client


def unpickle_exception(text: str) -> BaseException | None:
    """What `_pickle_exception` has packed; None if it cannot be loaded here."""
    try:
        return pickle.loads(base64.b64decode(text))
    except Exception:
        # A class that the client cannot import, a tensor on a GPU that it does not have
        return None
