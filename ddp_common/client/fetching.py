"""Rank 0's pickled result, fetched from its worker.

From the worker's memory if that is on this machine, else through Dask.
"""

import contextlib
import io
import os
import queue
import threading
from collections.abc import Callable
from typing import Any, BinaryIO

from distributed import CancelledError, Future

from ddp_common.messages import Ended

LOOK_INTERVAL = (
    0.05  # seconds between two looks at what else happens while the result is on its way
)


def open_result_here(place: Ended) -> BinaryIO | None:
    """The result as a file; None if it is not on this machine, or not ours to read.

    Once it is open it stays, also if the worker dies.
    """
    with contextlib.suppress(OSError):
        file = open(place.result_path, "rb")
        if os.readlink(f"/proc/self/fd/{file.fileno()}") == place.result_target:
            return file
        file.close()
    return None


def fetch_result(future: Future, is_worth_waiting: Callable[[], bool]) -> BinaryIO | None:
    """What a rank's task returned, as a file; None if that will never come.

    `is_worth_waiting` is asked again and again: the worker may die while the result is on its
    way. Raises what fetching raises.
    """
    fetched: queue.SimpleQueue = queue.SimpleQueue()

    def fetch() -> None:
        try:
            answer: tuple[Any, BaseException | None] = (future.result(), None)
        except BaseException as error:  # raised again below, in the thread of the caller
            answer = (None, error)
        fetched.put(answer)

    threading.Thread(target=fetch, daemon=True, name="ddp-result").start()
    while True:
        with contextlib.suppress(queue.Empty):
            pickled, error = fetched.get(timeout=LOOK_INTERVAL)
            if error is None:
                return io.BytesIO(pickled)
            if isinstance(error, CancelledError):
                return None
            raise error
        if not is_worth_waiting():
            return None
