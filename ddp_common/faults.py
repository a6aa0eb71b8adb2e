"""Break a rank on purpose, at a chosen step of a real run, to see what becomes of the run.

Relies on `ElasticSampler`, which calls the fault between two of its steps. Promises: nothing else
of the training function changes, and only the chosen rank is hit.
"""

import functools
import signal
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ddp_common.errors import Error


def inject(
    function: Callable,
    fault: str | Callable,
    *,
    rank: int = 1,
    step: int = 8,
    mark: str | Path | None = None,
) -> Callable:
    """Return `function` with a fault that strikes on `rank` as soon as `step` steps are done.

    `fault` is "raise" (an exception), "kill" (SIGKILL), "stop" (SIGSTOP, which suspends the
    process), "hang" (the rank waits for ever), or a function without arguments, which that rank
    calls. `function` must take its batches from an `ElasticSampler`.

    A run that is restarted comes to the same step again. With `mark`, the path of a new file in a
    folder that the rank can write to, the fault strikes once only.

    Raises `Error` for a fault of another name. Rank 0 warns where no rank is `rank`.
    """
    if not callable(fault) and fault not in list(FAULTS):
        raise Error(
            f"{fault!r} is not a fault.\n"
            f"Give one of {', '.join(map(repr, FAULTS))}, or a function for the rank to call."
        )
    mark = None if mark is None else str(Path(mark).absolute())
    faulty = functools.partial(_run_with_fault, function, fault, rank, step, mark)
    return functools.update_wrapper(faulty, function, updated=())


def _run_with_fault(
    function: Callable,
    fault: str | Callable,
    rank: int,
    step: int,
    mark: str | None,
    /,
    **arguments: Any,
) -> Any:
    from ddp_common import moments, rendezvous, sampling  # torch: the client does without

    if rank >= rendezvous.world_size() and rendezvous.rank() == 0:
        warnings.warn(
            f"inject(…, rank={rank}) strikes nobody: this run has {rendezvous.world_size()} "
            "rank(s), numbered from 0.",
            stacklevel=1,
        )
    act = fault if callable(fault) else FAULTS[fault]

    def strike(sampler: sampling.ElasticSampler) -> None:
        if sampler.steps_done == step and is_due(rank, mark):
            act()

    moments.injected.append(strike)
    try:
        return function(**arguments)
    finally:
        moments.injected.remove(strike)  # under torchrun other launches may follow


def is_due(rank: int, mark: str | None) -> bool:
    """Whether this process is that rank, and the fault has not struck before. Sets the mark."""
    from ddp_common import rendezvous

    if rendezvous.rank() != rank:
        return False
    try:
        if mark is not None:
            Path(mark).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _raise() -> None:
    raise ValueError("a fault on purpose")


FAULTS: dict[str, Callable] = {
    "raise": _raise,
    "kill": functools.partial(signal.raise_signal, signal.SIGKILL),
    "stop": functools.partial(signal.raise_signal, signal.SIGSTOP),
    "hang": lambda: threading.Event().wait(),
}
