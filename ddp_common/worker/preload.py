"""What a worker does before its first launch.

It has torch imported, and leaves signals to the ranks. The worker of a job also loads this module
itself, by Dask's `--preload`: it takes a second or two to find its scheduler, and the client as
long to see that all workers are there, and torch is imported meanwhile.
"""

import logging
import signal
import threading

from distributed import Worker, WorkerPlugin

from ddp_common.worker import nursery
from ddp_common.worker.agent import tell_to_stop
from ddp_common.worker.time_limit import watch_time_limit


class Preload(WorkerPlugin):
    """Worker plugin: has a fork server import torch, while the cluster is still being waited for.

    It also makes the worker ignore Ctrl-C,
    which a terminal sends to every process, and SIGTERM, which a batch system sends: the client
    acts on the one, the ranks on the other, and they need their worker until they have saved. And
    it is no error if the scheduler is closed first.
    """

    name = "ddp-preload"
    idempotent = True  # a second client must not end the fork server, and with it all ranks

    def __init__(self, fork_server: str | None = None):
        self.fork_server = fork_server  # the path of one for all workers, if they share its host

    def setup(self, worker: Worker) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)
        logging.getLogger("distributed.worker").addFilter(_is_no_lost_connection)
        nursery.prepare(self.fork_server)
        watch_time_limit(tell_to_stop)

    def teardown(self, worker: Worker) -> None:
        nursery.close()


def dask_setup(worker: Worker) -> None:
    """Called by Dask in the worker of a job, before it connects to its scheduler."""
    nursery.prepare()


def dask_teardown(worker: Worker) -> None:
    """Called by Dask when that worker closes."""
    nursery.close()


def _is_no_lost_connection(record: logging.LogRecord) -> bool:
    _, error, _ = record.exc_info or (None, None, None)
    return not isinstance(error, OSError)
