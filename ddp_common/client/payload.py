"""A training function and its arguments, made ready to travel."""

import copyreg
import importlib
import linecache
import os
import sys

import cloudpickle

from ddp_common.errors import Error


def pickled(function, arguments):
    for name in (
        "torch.classes",
        "torch.ops",
    ):  # of a class of their own; cloudpickle sends them with any function that says `images.classes`
        if name in sys.modules:
            copyreg.pickle(
                type(sys.modules[name]),
                lambda module: (importlib.import_module, (module.__name__,)),
            )
    cells = {
        name: entry
        for name, entry in list(linecache.cache.items())
        if len(entry) == 4 and not os.path.exists(name)
    }
    try:
        return cloudpickle.dumps((function, arguments, cells))
    except Exception as error:
        raise Error(
            f"{getattr(function, '__name__', function)!r} or its arguments cannot be sent to the workers: {error}. Open files, "
            "clients, locks and running processes cannot travel: make them inside the function."
        ) from None
