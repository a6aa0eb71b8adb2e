"""When checkpoints save, and when ranks leave: at two kinds of moments, and at no other.

A batch that training has taken is *open* until `Checkpoint.step()` says that what it was for is
done. At the two moments no batch is open: before the next batch is taken (`before_batch`), and in
`Checkpoint.save()` (`after_save`). After the last batch of an epoch there is only the second.
Where no loop over a sampler that has a Checkpoint is running, ranks leave before any next batch.
"""

import weakref
from collections.abc import Callable
from typing import Any, Protocol

from ddp_common import stopping

STEP = (
    "Write, after the optimizer's step:\n"
    "    checkpoint.step()  # the batches so far are trained: a checkpoint may be saved"
)


class SavesPosition(Protocol):
    """What saves the position of samplers: a `Checkpoint`."""

    def refuse_what_came_after_save(self) -> None:
        """Raise `Error` for what a checkpoint of the end of this epoch lacks."""

    def has_open_batches(self) -> bool:
        """Whether a batch of one of its samplers is open."""

    def begin_rest_of_epoch(self) -> None:
        """Take note of what the head of an epoch may not change where a run was resumed in it."""

    def save_if_due(self) -> None:
        """Save, if it is time. Raise `Error` for what the head of a resumed epoch has changed."""

    def save_and_wait(self) -> None:
        """Save before this rank leaves."""


class TakesBatches(Protocol):
    """What takes batches: an `ElasticSampler`."""

    checkpoints: list[SavesPosition]  # those that save its position
    open_batches: int

    @property
    def is_in_loop(self) -> bool:
        """Whether a loop over its epochs is running."""


# Those of this process that have begun a loop, by their number: several may train in turns
samplers: weakref.WeakValueDictionary[int, TakesBatches] = weakref.WeakValueDictionary()

# Called with each sampler between its steps, after its checkpoints; for `ddp.inject`
injected: list[Callable[[Any], None]] = []


def before_batch(sampler: TakesBatches) -> None:
    """Before a batch is taken: leave if the ranks were told to, and save if it is time."""
    if stopping.arrive() and (sampler.checkpoints or not _running_checkpoints()):
        _save_and_leave(saved=None)
    if not sampler.open_batches:
        for checkpoint in sampler.checkpoints:
            checkpoint.save_if_due()
    for call in injected:
        call(sampler)


def after_save(saved: SavesPosition) -> None:
    """In a `save()` of the program, which has `saved`: leave if the ranks were told to."""
    if stopping.arrive():
        _save_and_leave(saved)


def _running_checkpoints() -> list[SavesPosition]:
    """Those of samplers whose loops are running, each once, in the same order on every rank."""
    found = [
        checkpoint
        for sampler in samplers.values()
        if sampler.is_in_loop
        for checkpoint in sampler.checkpoints
    ]
    return list(dict.fromkeys(found))


def _save_and_leave(saved: SavesPosition | None) -> None:
    """Save all but what was `saved` just now, and leave.

    Returns while a batch is open of a sampler that is to be saved: ranks leave at a later moment.
    """
    checkpoints = _running_checkpoints()
    if any(checkpoint.has_open_batches() for checkpoint in checkpoints):
        return
    for checkpoint in checkpoints:
        if checkpoint is not saved:
            checkpoint.save_and_wait()
    stopping.leave()
