"""Moments in which Dask prints nothing, or Ctrl-C waits.

All are context managers. Promises: afterwards logging and the handler of SIGINT are as before.
"""

import contextlib
import logging
import signal
import threading


@contextlib.contextmanager
def quiet():
    """Dask's log is silent: what failed is said once, by us."""
    logger = logging.getLogger("distributed")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def interrupts_held():
    """Ctrl-C waits until the cluster stands: Dask cannot close half of one."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pressed = []
    handler = signal.signal(signal.SIGINT, lambda *_: pressed.append(True))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if pressed:  # whatever became of the cluster: its workers got the signal, too
            raise KeyboardInterrupt from None


@contextlib.contextmanager
def interrupts_as_before():
    """Ctrl-C does afterwards what it did: to import dask-jobqueue 0.9 has it end the program."""
    handler = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        if handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, handler)
