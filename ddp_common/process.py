"""The rank's own process: what happens in it before and after the training function.

Started by `agent` as a fork of a forkserver. Promises: the last message through the pipe is the function's pickled result or the
traceback; everything reported and printed was sent before; the process ends with its worker, whatever state either is in; on
SIGUSR1 it writes where it is, whatever it waits for.
"""

import faulthandler
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

from ddp_common._forkserver import die_with_parent
from ddp_common.errors import Error


def main(environment, threads, payload, listener, messages, output, stacks):
    """Be a rank: from the fork to the last message.

    `environment`: variables to set; `threads`: of torch; `payload`: pickled (function, keyword arguments, sources of notebook cells);
    `listener`: rank 0's store socket, else None; `messages`, `output`, `stacks`: the write ends of three pipes to the agent.
    """
    os.setsid()  # a terminal's Ctrl-C is for the client; and the agent can end all of this at once
    _die_with_the_worker()
    for stream in (1, 2):
        os.dup2(output.fileno(), stream)
    sys.stdout, sys.stderr = (open(stream, "w", buffering=1, closefd=False) for stream in (1, 2))
    faulthandler.enable(open(2, "w", closefd=False))
    faulthandler.register(signal.SIGUSR1, file=stacks.fileno())
    os.environ.update(environment)

    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from ddp_common import checkpoint, rendezvous, reporting, stopping

    torch.set_num_threads(threads)
    multiprocessing.set_start_method("fork", force=True)  # workers of a DataLoader then know a notebook's classes, as they would there
    register_optimizer_step_post_hook(reporting.made_progress)
    finish_reports = reporting.start(messages.send)
    try:
        stopping.listen_to_sigterm()
        function, arguments, sources = pickle.loads(payload)
        linecache.cache.update(sources)  # a traceback then shows the lines of a notebook's cells
        with rendezvous.process_group(listener):
            result = function(**arguments)
            checkpoint.finish_writing()
            reporting.post({"returned": reporting.position()})
        message = {"how": "done", "result": _pickle_result(result) if environment["RANK"] == "0" else None}
    except stopping.Stopped:
        message = {"how": "stopped", "told": stopping.was_told(), "in_loop": stopping.is_in_loop(), **reporting.position()}
    except Exception as error:
        message = {"how": "raised", "traceback": "".join(traceback.format_exception(error)), "message": _headline(error)}
    finally:
        finish_reports()
    messages.send(message)
    if message["how"] == "raised":
        sys.exit(1)


def _headline(error):
    """The exception in one line, as a traceback ends; an `Error` is written to be read by itself."""
    return str(error) if isinstance(error, Error) else "".join(traceback.format_exception_only(error)).strip()


def _die_with_the_worker():
    """When the worker dies its forkserver dies, and with that this rank, even if it is stopped; elsewhere a thread sees to it."""
    die_with_parent()
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (wait([parent.sentinel]), os._exit(1)), daemon=True).start()


def _pickle_result(result):
    """torch.save keeps tensors out of the pickle and lets the client load a GPU's tensors without one."""
    import torch

    buffer = io.BytesIO()
    try:
        torch.save(result, buffer)
    except Exception as error:
        raise TypeError(f"The training function returned something that cannot be pickled ({error}). Return tensors, numbers, "
                        f"a state_dict, or lists and dicts of these; not {type(result).__name__}.") from None
    return buffer.getvalue()


def training_stack(text):
    """Of the stacks of all threads, the part that is the user's and torch's: that of the main thread, without the launcher."""
    for thread in text.split("\n\n"):
        lines = thread.strip().splitlines()
        launcher = [number for number, line in enumerate(lines) if "ddp_common/process.py" in line and line.endswith(" in main")]
        if launcher:
            return "\n".join(lines[1:launcher[0]])
    return text
