"""`ddp.DataLoader`: torch's own, whose workers may load ahead of an `ElasticSampler`.

Promises: a step counts when training takes its batch. In a data set the random state of torch,
NumPy and `random` follows from (seed, epoch, index of the sample): an augmentation is the same
with any number of loader workers and ranks, and after a resume. SIGTERM ends no worker while its
rank trains: torchrun and Slurm send it to the workers too, and the rank finishes its step first.
Relies on the epoch travelling with the indices of a batch, to workers that may outlive it.
"""

import atexit
import contextlib
import copy
import functools
import multiprocessing
import os
import random
import signal
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from types import FrameType
from typing import Any

import cloudpickle
import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

from ddp_common import loader_workers, same_data, stopping
from ddp_common.errors import Error
from ddp_common.rows import Partitioned
from ddp_common.sampling import EPOCH_BEGINS, ElasticSampler

ALL_64_BITS = 2**64 - 1


class DataLoader(torch.utils.data.DataLoader):
    """torch's `DataLoader`, whose workers may load ahead of an `ElasticSampler`.

    `options` are torch's. With an `ElasticSampler`, the random state of torch, NumPy and `random`
    in the data set follows from (seed, epoch, index of the sample); a generator that the data set
    makes itself is not one of these. The data set is asked for one sample at a time.
    `batched=True` says that its `__getitems__` takes the indices of a whole batch, and draws
    nothing: a table of Dask needs no word. Before the first batch of a process the ranks compare
    two samples, one of them fetched twice; `compare=False` says that they differ on purpose.

    `len()` is the number of batches of a pass: in the middle of an epoch that was resumed, of the
    batches that were left.

    Raises `Error` for an `IterableDataset`, which no sampler deals, and for `in_order=False`; with
    the first batch, for samples that are not the same on all ranks.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        batch_sampler: Any,
        batched: bool = False,
        compare: bool = True,
        **options: Any,
    ):
        if isinstance(dataset, IterableDataset):
            raise Error(
                f"{type(dataset).__name__} is an IterableDataset: it has no indices that a "
                "sampler could deal. Give a data set with __getitem__, or let each rank read its "
                "own part, with torch's DataLoader (docs/recipes.md, 'Data without indices')."
            )
        if not options.get("in_order", True) and isinstance(batch_sampler, ElasticSampler):
            raise Error(
                "A DataLoader with in_order=False hands out batches in any order: weight and "
                "position would not be those of the batch that is trained on. Leave in_order out."
            )
        if batched and not hasattr(dataset, "__getitems__"):
            raise Error(
                f"batched=True says that __getitems__ takes whole batches, and "
                f"{type(dataset).__name__} has none. Write it, or leave batched out."
            )
        super().__init__(dataset, batch_sampler=batch_sampler, **options)
        if isinstance(batch_sampler, ElasticSampler):
            self._requests = Requests(batch_sampler)
            self._compares = compare and not isinstance(dataset, Partitioned)
            is_batched = batched or isinstance(dataset, Partitioned)
            self._seeded = SeededBySample(dataset, batch_sampler.seed, is_batched)

    def __len__(self) -> int:
        if isinstance(self.batch_sampler, ElasticSampler):
            return self.batch_sampler.batches_in_pass
        return super().__len__()

    def __iter__(self) -> Iterator:  # type: ignore[override]
        if isinstance(self.batch_sampler, ElasticSampler):
            return self.batch_sampler._steps(self._begin)
        return super().__iter__()

    def _begin(self) -> Iterator:
        """The batches of a pass, after what is compared before the first."""
        sampler = self._requests.sampler
        is_to_compare = self._requests.is_to_compare = self._compares and not sampler._is_compared
        batches = super().__iter__()
        sampler._compare(next(batches) if is_to_compare else None)
        return batches

    def _get_iterator(self) -> Any:
        """torch's own iterator, over a copy of this loader that asks for `Requests`.

        So this loader keeps the attributes that the user has given.
        """
        loader = copy.copy(self)
        attributes = vars(loader)  # torch's __setattr__ takes no other data set or sampler
        if isinstance(self.batch_sampler, ElasticSampler):
            attributes["batch_sampler"] = self._requests
            attributes["dataset"] = self._seeded
            attributes["collate_fn"] = functools.partial(_collated, self.collate_fn)
        if self.num_workers:
            begin = self.worker_init_fn
            begin = None if begin is None else ByValue(begin)
            attributes["worker_init_fn"] = functools.partial(
                _begin_worker, begin, stopping.state.is_training
            )
            attributes["collate_fn"] = ByValue(loader.collate_fn)
            loader.multiprocessing_context = loader_workers.loader_context(
                self.multiprocessing_context
            )
        with self._sigterm_held_back() if self.num_workers else contextlib.nullcontext():
            return torch.utils.data.DataLoader._get_iterator(loader)

    @contextlib.contextmanager
    def _sigterm_held_back(self) -> Iterator[None]:
        """A worker that starts inherits it, and takes the signal once it has its handler."""
        context = self.multiprocessing_context or multiprocessing
        if context.get_start_method() != "fork":
            resource_tracker.ensure_running()  # to start it later would let the signal through
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Requests:
    """(epoch, this rank's indices) of each step that is left; to ask moves no position.

    Before them, where samples are to be compared, (None, their indices).
    """

    def __init__(self, sampler: ElasticSampler):
        self.sampler = sampler
        self.is_to_compare = False

    def __iter__(self) -> Iterator[tuple[int | None, list[int]]]:
        if self.is_to_compare:
            yield None, same_data.chosen(self.sampler.seed, self.sampler.length)
        epoch = self.sampler.epoch
        for indices in self.sampler._shares():
            yield epoch, indices


class SeededBySample(Dataset):
    """`data`, with a random state of its own for each sample of an epoch."""

    def __init__(self, data: Any, seed: int, is_batched: bool):
        self.data = data
        self.seed = seed
        self.is_batched = is_batched  # whole batches are asked for, and nothing is seeded

    def __getitems__(self, request: tuple[int | None, list[int]]) -> list:
        """The samples of (epoch, indices), which a fetcher asks for; of no epoch fingerprints."""
        epoch, indices = request
        if epoch is None:
            fetched = [self._fetch(EPOCH_BEGINS, [index]) for index in indices]
            if not self.is_batched:  # else these may be whole batches, of one sample each
                fetched = [sample for (sample,) in fetched]
            return Fingerprints(same_data.fingerprints(indices, fetched))
        return self._fetch(epoch, indices)

    def _fetch(self, epoch: int, indices: list[int]) -> list:
        if self.is_batched:
            return self.data.__getitems__(indices)
        whole_batch = getattr(self.data, "__getitems__", None)
        fetched = []
        for index in indices:
            _seed(_mixed(self.seed, epoch, index))
            fetched.append(self.data[index] if whole_batch is None else whole_batch([index])[0])
        return fetched

    def __reduce__(self) -> tuple:
        return SeededBySample, (ByValue(self.data), self.seed, self.is_batched)


class Fingerprints(list):
    """What is compared of samples, in place of a batch: it is not collated."""


def _collated(collate: Callable, fetched: list) -> Any:
    return list(fetched) if isinstance(fetched, Fingerprints) else collate(fetched)


class ByValue:
    """Goes to a spawned worker by value, and is gone there: the thing itself arrives.

    It may be defined in the user's script, which a spawned worker does not import.
    """

    def __init__(self, thing: Any):
        self.thing = thing

    def __call__(self, *arguments: Any) -> Any:
        return self.thing(*arguments)

    def __reduce__(self) -> tuple:
        return cloudpickle.loads, (cloudpickle.dumps(self.thing),)


def _seed(number: int) -> None:
    """Seed torch's generator of the CPU, NumPy's and Python's with different parts of 64 bits."""
    torch.default_generator.manual_seed(number & 0xFFFFFFFF)
    np.random.seed(number >> 32)
    random.seed(number)


def _mixed(*numbers: int) -> int:
    """64 bits in which each number has a part: splitmix64, in 1/20 of SeedSequence's time."""
    bits = 0
    for number in numbers:
        bits = ((bits ^ number) + 0x9E3779B97F4A7C15) & ALL_64_BITS
        bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & ALL_64_BITS
        bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & ALL_64_BITS
        bits ^= bits >> 31
    return bits


# Workers


def _begin_worker(worker_init_fn: Callable | None, is_training: Any, worker: int) -> None:
    if is_training is not None:
        signal.signal(signal.SIGTERM, functools.partial(_on_sigterm, is_training, os.getppid()))
        # A spawned worker's interpreter lets its handlers go before it has ended.
        atexit.register(signal.signal, signal.SIGTERM, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    info = torch.utils.data.get_worker_info()
    seeded = getattr(info, "dataset", None)
    if isinstance(seeded, SeededBySample):
        # The user's own, for `worker_init_fn`: torch's dataclass is frozen.
        object.__setattr__(info, "dataset", seeded.data)
    if worker_init_fn is not None:
        worker_init_fn(worker)


def _on_sigterm(is_training: Any, rank: int, number: int, frame: FrameType | None) -> None:
    """Stay while the rank, whose pid this is, trains.

    torch ends its workers in another way, or they end with it. Else they end as torch's own do:
    an end by the signal itself would be an error in the rank.
    """
    if not is_training.value or os.getppid() != rank:
        os._exit(0)
