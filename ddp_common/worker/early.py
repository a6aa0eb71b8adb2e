"""What the worker of a job imports first, by Dask's `--preload`: it has torch imported ahead.

A job's worker takes a second or two to find its scheduler, and the client as long to see that all
workers are there. The forkserver imports torch meanwhile. To import this module is to start it:
nothing but a worker may.
"""

import sys

from distributed import Worker

from ddp_common.worker.forkserver import end_forkserver, start_forkserver


def dask_teardown(worker: Worker) -> None:
    """Called by Dask when the worker closes."""
    end_forkserver()


# dask-cuda gives a worker its cores only once it has been made: the forkserver would have others.
if "dask_cuda" not in sys.modules:
    start_forkserver()
