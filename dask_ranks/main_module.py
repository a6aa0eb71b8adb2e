"""What a rank has of the client's program: its `__main__`, its arguments, its folder.

Cloudpickle sends functions and classes of a script or a notebook by value. Pickle, which sends
them on between a DataLoader and its workers and back to the client, looks for them by their name
in `__main__`. Relies on cloudpickle filling a class or a function that it has made by one of
`FILLS`, as versions 2 and 3 do.
"""

import contextlib
import io
import os
import pickle
import sys
from collections.abc import Callable, Iterable
from typing import Any

FILLS = ("_class_setstate", "_function_setstate")


def loads(pickled: bytes | memoryview, buffers: Iterable = ()) -> Any:
    """As `pickle.loads`; classes and functions that are made of `__main__` are put there."""
    return _Unpickler(io.BytesIO(pickled), buffers=buffers).load()


def be_as_in(argv: list[str], folder: str) -> None:
    """Have the arguments of the client's program, and its folder where this host has that."""
    sys.argv[:] = argv
    with contextlib.suppress(OSError):
        os.chdir(folder)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        if module.partition(".")[0] == "cloudpickle" and name in FILLS:
            return _publishing(found)
        return found


def _publishing(fill: Callable) -> Callable:
    def fill_and_publish(made: Any, state: Any) -> Any:
        fill(made, state)
        if made.__module__ == "__main__" and made.__qualname__.isidentifier():
            setattr(sys.modules["__main__"], made.__qualname__, made)
        return made

    return fill_and_publish
