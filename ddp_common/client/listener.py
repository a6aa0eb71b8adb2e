"""`on_report`: the caller's own function is called with every record of a run.

It is called in the thread that called `launch`, between two looks at the ranks, so that plots and
trackers need not care about threads. Training does not wait for it, and neither do records take
more memory where it is slow: they are in the run directory's list, and this is a place in that
list. Promises: every record once, in order; what the function raises reaches the caller as it is.
"""

import threading
import time
from collections.abc import Callable

from ddp_common.errors import Error
from ddp_common.run.run_directory import RunDirectory

SLOW = 1.0  # seconds for one record, from which on it is said

_inside = threading.local()  # of each thread: `calling`, whether it is inside of an `on_report`


class FromCallback(BaseException):
    """Carries what `on_report` raised past all that handles failures of ranks."""

    def __init__(self, error: BaseException):
        super().__init__(error)
        self.error = error


def refuse_inside() -> None:
    """Raises `Error` for a launch that an `on_report` has called: it would wait for itself."""
    if getattr(_inside, "calling", False):
        raise Error(
            "launch was called from on_report of another launch, which waits for it meanwhile. "
            "Let on_report return, and launch when the first launch has ended."
        )


class Listener:
    """What is still to be told of a run's records.

    `function` is None if nobody listens. `directory` has the records; those that are there now, of
    a run that is resumed, are not told.
    """

    def __init__(self, function: Callable | None, directory: RunDirectory):
        self.function = function
        self.directory = directory
        self.told = len(directory.records)
        self.has_said_slow = False

    def is_behind(self) -> bool:
        return self.function is not None and self.told < len(self.directory.records)

    def tell_next(self) -> None:
        """Call the function with the next record. Raises `FromCallback`, `KeyboardInterrupt`."""
        assert self.function is not None, "somebody listens"
        record = self.directory.records[self.told]
        self.told += 1
        began = time.monotonic()
        _call(self.function, record)
        seconds = time.monotonic() - began
        if seconds > SLOW and not self.has_said_slow:
            self.has_said_slow = True
            self.directory.log(
                f"on_report took {seconds:.1f} s for one record. Training goes on meanwhile, but "
                "a failure, or Ctrl-C, is noticed only when it returns."
            )

    def tell_all(self) -> None:
        """The same with all that are left."""
        while self.is_behind():
            self.tell_next()


def _call(function: Callable, record: dict) -> None:
    _inside.calling = True
    try:
        function(record)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever it is: it is not ours, and goes to the caller
        raise FromCallback(error) from None
    finally:
        _inside.calling = False
