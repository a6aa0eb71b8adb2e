"""Garbage collection, and why it pauses while Dask starts or stops a thread of its own."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Meanwhile Python looks for no cycles of objects that nobody uses any more.

    Dask starts the thread of an event loop under a lock, and waits 10 s for it. If the collector
    happens to run in the new thread, and finds a client that was never closed, that client wants
    to stop its own loop and waits for the same lock: nobody goes on, and the new cluster fails.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
