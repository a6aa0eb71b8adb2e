"""The process from which a worker forks its ranks.

It has torch imported, so that a rank starts in a fraction of a second. `guard` is what runs in
it first.
"""

import multiprocessing
import multiprocessing.forkserver
import os
import tempfile
from multiprocessing.context import ForkServerContext

PRELOAD = ["ddp_common.worker.guard"]  # which imports the rest
LONGEST_FOLDER = 70  # characters, for temporary files: a socket's path below it has 108 at most


def start_forkserver() -> ForkServerContext:
    """Start the forkserver unless it runs already.

    Returns the context from which to make processes. Two things that the nanny gives a worker must
    not reach the ranks: a daemonic process may have no children, and a malloc that returns every
    64 KB to the system makes each training step fault its memory in again. The path of its socket
    must be short (unix(7)).
    """
    process = multiprocessing.current_process()
    process._config["daemon"] = False  # type: ignore[attr-defined]  # private to multiprocessing
    os.environ.pop("MALLOC_TRIM_THRESHOLD_", None)
    if len(tempfile.gettempdir()) > LONGEST_FOLDER:
        tempfile.tempdir = "/tmp"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    multiprocessing.forkserver.ensure_running()
    return context


def guard() -> int | None:
    """The number of the process that stands guard over the forkserver and its ranks.

    It guards all that these have started. None before the forkserver has been started.
    """
    server = multiprocessing.forkserver._forkserver
    return server._forkserver_pid  # type: ignore[attr-defined]  # private to multiprocessing
