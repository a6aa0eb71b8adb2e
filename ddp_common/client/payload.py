"""A training function and its arguments, made ready to travel."""

import copyreg
import importlib
import linecache
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import cloudpickle

from ddp_common.errors import Error

# Modules of a class of their own, which pickle refuses. Cloudpickle sends them with any
# function that has their last name in it, such as `images.classes`.
ODD_MODULES = ("torch.classes", "torch.ops")


def pickled(function: Callable, arguments: dict[str, Any]) -> bytes:
    """Pickle (function, arguments, sources of notebook cells).

    Raises `Error` for what cannot travel.
    """
    for module in ODD_MODULES:
        if module in sys.modules:
            copyreg.pickle(type(sys.modules[module]), _by_name)
    try:
        return cloudpickle.dumps((function, arguments, _sources_of_cells()))
    except Exception as error:
        name = getattr(function, "__name__", function)
        raise Error(
            f"{name!r} or its arguments cannot be sent to the workers: {error}. Open files, "
            "clients, locks and running processes cannot travel: make them inside the function."
        ) from None


def _by_name(module: ModuleType) -> tuple:
    return importlib.import_module, (module.__name__,)


def _sources_of_cells() -> dict[str, tuple]:
    """What Python's tracebacks need to show the lines of code that is in no file."""
    return {
        name: entry
        for name, entry in list(linecache.cache.items())
        if len(entry) == 4 and not os.path.exists(name)
    }
