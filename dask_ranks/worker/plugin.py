"""What a worker does before its first launch.

It has torch imported, leaves signals to the ranks, and survives that connections end.
"""

import contextlib
import logging
import signal
import ssl
import threading
from types import FrameType
from typing import Any

from distributed import Worker, WorkerPlugin

from dask_ranks.worker.agent import tell_to_stop
from dask_ranks.worker.rank_host import HOST
from dask_ranks.worker.time_limit import watch_time_limit

NAME = "ddp-preload"  # of the plugin
LOST_SCHEDULER = "Failed to communicate with scheduler during heartbeat."  # logs Dask's worker


class Preload(WorkerPlugin):
    """Worker plugin: has a fork server import torch, while the cluster is still being waited for.

    It also keeps the worker until its rank has saved when SIGTERM comes, which a batch system
    sends to every process, or Ctrl-C, which a terminal does. And it is no error if the scheduler
    of our own cluster is closed first. A worker that goes on without it is as it was before.
    """

    name = NAME
    idempotent = True  # a second client must not end the fork server, and with it all ranks

    def __init__(self, is_own_cluster: bool, fork_server: str | None = None):
        self.is_own_cluster = is_own_cluster  # `connect` has started it, and closes it
        self.fork_server = fork_server  # the path of one for all workers, if they share its host

    def setup(self, worker: Worker) -> None:
        self.undo = contextlib.ExitStack()
        self.undo.callback(HOST.close)
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                # A nanny ends the worker itself
                handler = signal.SIG_IGN if worker.nanny else _handler(number)
                self.undo.callback(signal.signal, number, signal.signal(number, handler))
            for number in (signal.SIGUSR1, signal.SIGUSR2):  # for the program in a rank
                self.undo.callback(signal.signal, number, signal.signal(number, signal.SIG_IGN))
        for context in filter(None, tls_contexts(worker)):
            self.undo.callback(setattr, context, "options", context.options)
            allow_ends_without_notice(context)
        if self.is_own_cluster and worker.nanny:  # else this process may outlive the cluster
            logger = logging.getLogger("distributed.worker")
            logger.addFilter(lambda record: record.msg != LOST_SCHEDULER)
        HOST.prepare(self.fork_server)
        self.undo.callback(watch_time_limit(tell_to_stop).set)

    def teardown(self, worker: Worker) -> None:
        self.undo.close()


def allow_ends_without_notice(context: ssl.SSLContext | None) -> None:
    """Let TLS connections end as Dask ends them: by closing the socket, without `close_notify`.

    OpenSSL answers such an end with an alert (seen in 3.5.9 and 3.6.5, not in 3.0.22). It cannot
    be sent; its EPIPE stays in the thread's queue of errors, and Python takes it for that of the
    next read, of another connection: in one of four starts a worker was lost. Nothing is given up,
    as each message of Dask says how long it is.
    """
    if context is not None:  # else there is no TLS
        context.options |= ssl.OP_IGNORE_UNEXPECTED_EOF


def tls_contexts(worker: Worker) -> list[ssl.SSLContext | None]:
    """Those of the connections that a worker makes, and of those that it accepts, from now on."""
    listening = [getattr(each, "server_args", {}).get("ssl_options") for each in worker.listeners]
    return [worker.connection_args.get("ssl_context"), *listening]


def _handler(number: signal.Signals) -> Any:
    """A handler that has the rank save and leave, and then does what the present one does."""
    previous = signal.getsignal(number)
    if not callable(previous):
        return signal.SIG_IGN

    def tell_the_rank_first(number: int, frame: FrameType | None) -> None:
        tell_to_stop()
        HOST.after_the_rank(lambda: previous(number, None))

    return tell_the_rank_first
