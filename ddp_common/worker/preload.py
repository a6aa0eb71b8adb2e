"""What a worker does before its first launch."""

import contextlib
import logging
import os
import signal
import threading

from distributed import WorkerPlugin

from ddp_common.worker import descendants
from ddp_common.worker.agent import tell_to_stop
from ddp_common.worker.forkserver import guard, start_forkserver
from ddp_common.worker.time_limit import watch_time_limit


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
        logging.getLogger("distributed.worker").addFilter(
            lambda record: not isinstance((record.exc_info or (None, None))[1], OSError)
        )
        start_forkserver()
        watch_time_limit(tell_to_stop)

    def teardown(self, worker):
        """End the forkserver now: while it imports torch it does not notice that its worker leaves, and the worker would wait."""
        if (pid := guard()) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, descendants.END)
