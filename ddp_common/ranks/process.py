"""The rank's own process: what happens in it before and after the training function.

Started by `agent` as a fork of a forkserver. Promises: the last message through the pipe says that the function's result lies in
the file given for it, or holds the traceback of whatever went wrong since the fork; everything reported and printed was sent before;
the process ends with its worker, whatever state either is in; on SIGUSR1 it writes where it is, whatever it waits for.
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
import sys
import threading
import traceback
from multiprocessing.connection import wait

from ddp_common.errors import Error
from ddp_common.ranks.parent import die_with_parent

LONGEST_MESSAGE = 10_000  # characters of an exception's own words
LONGEST_TRACEBACK = 100_000  # characters
LARGEST_EXCEPTION = (
    2**20
)  # bytes of a pickled exception; a larger one does not travel, its words do


def main(environment, threads, payload, listener, result_file, messages, output, stacks):
    """Be a rank: from the fork to the last message.

    `environment`: variables to set; `threads`: of torch; `payload`: pickled (function, keyword arguments, sources of notebook cells);
    `listener`: rank 0's store socket, else None; `result_file`: a connection around the file for rank 0's result, else None;
    `messages`, `output`, `stacks`: the write ends of three pipes to the agent.
    """
    os.setsid()  # a terminal's Ctrl-C is for the client; and the agent can end all of this at once
    _die_with_the_worker()
    for stream in (1, 2):
        os.dup2(output.fileno(), stream)
    sys.stdout, sys.stderr = (open(stream, "w", buffering=1, closefd=False) for stream in (1, 2))
    faulthandler.enable(open(2, "w", closefd=False))
    faulthandler.register(signal.SIGUSR1, file=stacks.fileno())
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # the worker is deaf to it; what a rank starts need not be
    code = 0
    try:
        message = _train(environment, threads, payload, listener, result_file, messages)
    except (
        BaseException
    ) as error:  # whatever it is, and wherever it came from: the client is to know
        message, code = _failure(error), _exit_code(error)
    messages.send(message)
    if message["how"] == "raised":
        sys.exit(code)


def _train(environment, threads, payload, listener, result_file, messages):
    """Call the training function; returns the rank's last message."""
    os.environ.update(
        environment, DDP_RANK_PROCESS=str(os.getpid())
    )  # by which what it starts can be found, whatever becomes of its parents

    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from ddp_common.ranks import checkpoint, rendezvous, reporting, stopping

    torch.set_num_threads(threads)
    multiprocessing.set_start_method(
        "fork", force=True
    )  # workers of a DataLoader then know a notebook's classes, as they would there
    register_optimizer_step_post_hook(reporting.made_progress)
    finish_reports = reporting.start(messages.send)
    try:
        stopping.listen_to_sigterm()
        os.register_at_fork(
            after_in_child=functools.partial(_be_no_rank, signal.getsignal(signal.SIGTERM))
        )
        function, arguments, sources = pickle.loads(payload)
        linecache.cache.update(sources)  # a traceback then shows the lines of a notebook's cells
        _publish_main(function)
        with rendezvous.process_group(listener):
            result = _call(function, arguments)
            checkpoint.finish_writing()
            reporting.post({"returned": reporting.position()})
        as_bytes = _write_result(result, result_file) if result_file is not None else None
        return {"how": "done", "result": as_bytes}
    except stopping.Stopped:
        return {
            "how": "stopped",
            "told": stopping.was_told(),
            "in_loop": stopping.is_in_loop(),
            **reporting.position(),
        }
    finally:
        finish_reports()


def _call(function, arguments):
    """Call the training function. A process that it has forked may come back from it too (os.fork): that is not the rank, and ends here."""
    rank = os.getpid()
    try:
        return function(**arguments)
    finally:
        if os.getpid() != rank:
            error = sys.exception()
            if error is not None and not isinstance(error, SystemExit):
                traceback.print_exception(error)
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(_exit_code(error))


def _be_no_rank(handler):
    """In what the rank has forked, such as a DataLoader's worker: nobody listens to its reports, and SIGTERM ends it as it would elsewhere."""
    from ddp_common.ranks import reporting

    reporting.stop()
    if signal.getsignal(signal.SIGTERM) is handler:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _publish_main(function):
    """Let the classes of the user's script or notebook be found in `__main__`, where pickle looks for them, say between a DataLoader and
    its workers. They came with the function, by value."""
    while function is not None:
        namespace = getattr(function, "__globals__", {})
        if namespace.get("__name__") == "__main__":
            own = {
                name: value
                for name, value in namespace.items()
                if getattr(value, "__module__", None) == "__main__"
            }
            vars(sys.modules["__main__"]).update(own)
        function = getattr(function, "__wrapped__", None) or getattr(function, "func", None)


def _failure(error):
    """The last message of a rank that ended with an exception. An `Error` is written to be read by itself."""
    headline = (
        str(error)
        if isinstance(error, Error)
        else "".join(traceback.format_exception_only(error)).strip()
    )
    headline = shortened(headline, LONGEST_MESSAGE)
    if isinstance(error, SystemExit):
        headline = (
            f"it left with exit code {_exit_code(error)} before its function returned: {headline}"
        )
    text = shortened("".join(traceback.format_exception(error)), LONGEST_TRACEBACK)
    return {
        "how": "raised",
        "traceback": text,
        "message": headline,
        "exception": _pickle_exception(error),
    }


def shortened(text, length):
    """`text`, or its head and its tail and how much lies between them."""
    left_out = len(text) - length
    return (
        text
        if left_out <= 0
        else f"{text[: length // 2]}\n… [{left_out:,} characters left out] …\n{text[-length // 2 :]}"
    )


def _exit_code(error):
    """The exit code that Python would give a process which ends with this exception."""
    code = error.code if isinstance(error, SystemExit) else error and 1
    return code if isinstance(code, int) else int(code is not None)


def _pickle_exception(error):
    """The exception for the caller's `RankFailed.__cause__`, as base64; None if it cannot travel."""
    import cloudpickle

    try:
        pickled = cloudpickle.dumps(error)
        if len(pickled) <= LARGEST_EXCEPTION and isinstance(pickle.loads(pickled), BaseException):
            return base64.b64encode(pickled).decode()
    except Exception:  # its classes can do anything here
        return None
    return None


def _die_with_the_worker():
    """When the worker dies its forkserver dies, and with that this rank, even if it is stopped; elsewhere a thread sees to it."""
    die_with_parent()
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (wait([parent.sentinel]), os._exit(1)), daemon=True).start()


def unpickle_exception(text):
    """On the client: what `_pickle_exception` has packed; None if it cannot be had here."""
    try:
        return pickle.loads(base64.b64decode(text))
    except (
        Exception
    ):  # a class that the client cannot import, a tensor on a GPU that it does not have
        return None


def _write_result(result, result_file):
    """Pickle the result into its file; returns it as bytes if it cannot be written there, as with a limit on the size of files, else None.

    torch.save keeps tensors out of the pickle and lets the client load a GPU's tensors without one.
    """
    import torch

    with contextlib.suppress(Exception), open(result_file.fileno(), "wb", closefd=False) as file:
        torch.save(result, file)
        file.flush()
        return None
    buffer = io.BytesIO()
    try:
        torch.save(result, buffer)
    except Exception as error:
        raise TypeError(
            f"The training function returned something that cannot be pickled ({error}). Return tensors, numbers, "
            f"a state_dict, or lists and dicts of these; not {type(result).__name__}."
        ) from None
    return buffer.getvalue()


def training_stack(text):
    """Of the stacks of all threads, the part that is the user's and torch's: that of the main thread, without the launcher."""
    for thread in text.split("\n\n"):
        lines = thread.strip().splitlines()
        launcher = [
            number
            for number, line in enumerate(lines)
            if "ddp_common/ranks/process.py" in line and line.endswith((" in _call", " in main"))
        ]
        if launcher:
            return "\n".join(lines[1 : launcher[0]])
    return text
