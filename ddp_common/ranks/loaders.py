"""Which `DataLoader` asks a sampler for batches, and how far ahead of training it asks.

A loader does not tell its sampler who it is, and torch offers no other way: so this looks at who
calls (Python's frames), and at attributes of torch's loader iterators that are private to torch.
Whatever is not as expected is refused with an `Error`, before a batch could be counted wrongly.
"""

from types import FrameType
from typing import Any, NoReturn

import torch

from ddp_common.errors import Error

UNORDERED = (
    "A DataLoader with in_order=False hands out batches in any order: sampler.weight and the "
    "position would not be those of the batch that is trained on. Leave in_order out."
)
UNKNOWN_LOADER = (
    "This DataLoader ({kind}, torch {version}) asks for batches in a way that this version of "
    "ddp_common does not know: {what}. Position and weight could be those of another batch. Write "
    "`for batch in sampler.follow(loader)`, or use num_workers=0."
)
STAYS_IN_ITS_EPOCH = (
    "The images of {kind} are others in each epoch, and workers with persistent_workers=True keep "
    "the copy of it that they got in the first: every epoch would have the same. Leave "
    "persistent_workers out."
)
DEEPEST = 10  # data sets within data sets, such as a Subset


def find_loader(caller: FrameType) -> tuple[Any, int]:
    """Who asks for batches, from the frame that asks for the first.

    Returns (iterator of the DataLoader, how many batches its workers are ahead of training);
    (None, 0) if something else asks. Raises `Error` for a loader whose batches cannot be counted.
    """
    if _module_of(caller) == "torch.utils.data.sampler":
        raise Error(
            "An ElasticSampler deals whole batches: DataLoader(data, batch_sampler=sampler), "
            "without batch_size and shuffle, not sampler=."
        )
    if not _belongs_to_a_loader(caller):
        _check_no_loader_behind(caller)
        return None, 0
    loader_iterator = caller.f_locals.get("self")
    workers = getattr(loader_iterator, "_num_workers", None)
    prefetch_factor = getattr(loader_iterator, "_prefetch_factor", None)
    if workers == 0:
        return loader_iterator, 0
    if not isinstance(workers, int) or not isinstance(prefetch_factor, int):
        _refuse(loader_iterator, "it does not say how far its workers are ahead")
    if not getattr(loader_iterator, "_in_order", True):
        raise Error(UNORDERED)
    _check_workers_follow_the_epoch(loader_iterator)
    return loader_iterator, workers * prefetch_factor


def _check_workers_follow_the_epoch(loader_iterator):
    """Raises `Error` if workers stay for all epochs, with data that change in each of them."""
    if not getattr(loader_iterator, "_persistent_workers", False):
        return
    dataset = getattr(loader_iterator, "_dataset", None)
    for _ in range(DEEPEST):
        if getattr(dataset, "changes_with_epoch", False) is True:
            raise Error(STAYS_IN_ITS_EPOCH.format(kind=type(dataset).__name__))
        dataset = getattr(dataset, "dataset", None)


def check_batches_taken(loader_iterator: Any, taken: int) -> None:
    """Raises `Error` unless the loader, too, counts that training has taken so many batches."""
    handed_out = getattr(loader_iterator, "_rcvd_idx", None)
    if handed_out != taken:
        _refuse(
            loader_iterator,
            f"by its own count it hands out batch {handed_out}, by its questions batch {taken}",
        )


def _check_no_loader_behind(caller):
    """Raises `Error` if a loader with workers asks through something in between."""
    frame = caller.f_back
    while frame is not None:
        if _belongs_to_a_loader(frame):
            loader_iterator = frame.f_locals.get("self")
            if getattr(loader_iterator, "_num_workers", 0):
                _refuse(loader_iterator, "something stands between the loader and the sampler")
        frame = frame.f_back


def _refuse(loader_iterator: Any, what: str) -> NoReturn:
    kind = type(loader_iterator).__name__
    raise Error(UNKNOWN_LOADER.format(kind=kind, version=torch.__version__, what=what))


def _belongs_to_a_loader(frame):
    module = _module_of(frame)
    return module == "torch.utils.data.dataloader" or module.startswith("torchdata.")


def _module_of(frame):
    return frame.f_globals.get("__name__") or ""
