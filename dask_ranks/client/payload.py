"""A training function and its arguments, made ready to travel."""

import functools
import importlib
import inspect
import io
import linecache
import logging
import os
import sys
from collections.abc import Callable, Collection
from types import CodeType, ModuleType
from typing import Any

import cloudpickle
import dask
from distributed import Future

from dask_ranks import handover
from ddp_common.errors import Error


def refuse_wrong_arguments(
    function: Callable, arguments: dict[str, Any], options: Collection[str]
) -> None:
    """Raise `Error` if `function` cannot be called with `arguments`.

    `options` are the names that `launch` takes for itself: the function cannot have them. A
    function that does not tell its arguments is not judged.
    """
    if not callable(function):
        raise Error(f"launch runs a function on every rank, and {function!r} is none.")
    try:
        # not that of what a decorator has wrapped: the decorator may add arguments of its own
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):
        return
    called = getattr(function, "__name__", repr(function))
    taken = [name for name in signature.parameters if name in options]
    if taken:
        raise Error(
            f"{called} has a parameter {taken[0]!r}, which launch takes for itself.\n"
            "Give the parameter another name."
        )
    try:
        signature.bind(**arguments)
    except TypeError as error:
        parameters = ", ".join(signature.parameters)
        raise Error(
            f"{called}({parameters}) cannot be called with the arguments of launch: {error}.\n"
            f"launch itself takes {', '.join(options)}."
        ) from None


def pickled(function: Callable, arguments: dict[str, Any]) -> bytes:
    """Pickle (function, arguments, sources of notebook cells, calls that set what is set here).

    Raises `Error` for what cannot travel.
    """
    buffer = io.BytesIO()
    # What Python's tracebacks need to show the lines of code that is in no file
    sources = {
        name: entry
        for name, entry in list(linecache.cache.items())
        if len(entry) == 4 and not os.path.exists(name)
    }
    try:
        _Pickler(buffer).dump((function, arguments, sources, _what_is_set()))
        return buffer.getvalue()
    except Error:
        raise
    except Exception as error:
        name = getattr(function, "__name__", function)
        advice = "Make open files, clients, locks and running processes inside the function."
        if "sqlite3.Connection" in str(error):  # of IPython's history
            advice = "Take %magics and !commands out of the function: they hold all of IPython."
        raise Error(
            f"{name!r} or its arguments cannot be sent to the workers: {error}.\n{advice}"
        ) from None


class _Pickler(cloudpickle.Pickler):
    """Refuses what belongs to the cluster: a rank has no client that could fetch it.

    Modules of a class of their own, such as `torch.backends.cudnn`, which pickle refuses, travel
    by their name. Code keeps the name of its file, for tracebacks and hangs: cloudpickle 3.1.3
    and later call it `<dynamic-code>`.
    """

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, ModuleType) and type(value) is not ModuleType:
            if sys.modules.get(value.__name__) is value:
                return importlib.import_module, (value.__name__,)
        if isinstance(value, CodeType):
            _, parts = self.dispatch_table[CodeType](value)
            return handover.code_of_file, (value.co_filename, parts)
        # By the type: an instance may have a word for any name
        is_collection = hasattr(type(value), "__dask_graph__") and dask.is_dask_collection(value)
        if is_collection or isinstance(value, Future):
            raise Error(
                f"The function, or an argument, holds a Dask {type(value).__name__} in a closure, "
                "a partial, an object or a global variable.\n"
                "Make it an argument of the function: launch(client, train, table=table)."
            )
        return super().reducer_override(value)


def _what_is_set() -> list[Callable[[], Any]]:
    """Calls that set in a rank what holds for this program: argv, folder, logging, torch's own.

    Where this program has no handler of logging, the function may set one.
    """
    as_here = functools.partial(handover.be_as_in, [*sys.argv], os.getcwd())
    calls: list[Callable[[], Any]] = [as_here]
    if logging.getLogger().handlers:
        calls.append(functools.partial(logging.basicConfig, level=logging.getLogger().level))
    torch = sys.modules.get("torch")
    if torch is not None:
        calls += [
            functools.partial(torch.set_default_dtype, torch.get_default_dtype()),
            functools.partial(
                torch.set_float32_matmul_precision, torch.get_float32_matmul_precision()
            ),
            functools.partial(
                torch.use_deterministic_algorithms,
                torch.are_deterministic_algorithms_enabled(),
                warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
            ),
        ]
    return calls
