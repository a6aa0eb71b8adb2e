"""What a worker does before its first launch.

It has torch imported, and leaves signals to the ranks.
"""

import logging
import signal
import threading

from distributed import Worker, WorkerPlugin

from ddp_common.worker.agent import tell_to_stop
from ddp_common.worker.forkserver import end_forkserver, start_forkserver
from ddp_common.worker.time_limit import watch_time_limit
from ddp_common.worker.zygote import Address


class Preload(WorkerPlugin):
    """Worker plugin: imports torch in the forkserver.

    It does so while the cluster is still being waited for. It also makes the worker ignore Ctrl-C,
    which a terminal sends to every process, and SIGTERM, which a batch system sends: the client
    acts on the one, the ranks on the other, and they need their worker until they have saved. And
    it is no error if the scheduler is closed first.
    """

    name = "ddp-preload"
    idempotent = (
        True  # a second client must not end the forkserver, and with it the first one's ranks
    )

    def __init__(self, zygote: Address | None = None):
        self.zygote = zygote  # of the workers' host, if they are all on one

    def setup(self, worker: Worker) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)
        logging.getLogger("distributed.worker").addFilter(_is_no_lost_connection)
        start_forkserver(self.zygote)
        watch_time_limit(tell_to_stop)

    def teardown(self, worker: Worker) -> None:
        """End the forkserver now."""
        end_forkserver()


def _is_no_lost_connection(record: logging.LogRecord) -> bool:
    _, error, _ = record.exc_info or (None, None, None)
    return not isinstance(error, OSError)
