"""Which samples each rank trains on, step by step, now and after a restart.

Every rank computes the same order from (seed, epoch) alone, so nothing is communicated. Rank r
takes every world_size-th index of a global batch, starting at the r-th; of a table that Dask has
prepared, it takes the rows that lie on its worker (`dealing`). Promises: the samples of a step
depend on (seed, epoch, step) alone, for any number of ranks. So do its loss and gradient, with
`weight` and up to the order of floating-point sums, for a model without dropout and batch
normalisation.

There is one way to loop: `for epoch in sampler.epochs(n)`, and in each epoch one *pass* over its
batches, by `ddp.DataLoader` or `batches()`. Any other loop is an `Error` that shows this one. The
position is (epoch, step). A step counts when training takes its batch, however early that was
loaded.

When checkpoints save, and ranks leave, `moments` says.
"""

import functools
import itertools
import operator
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import numpy as np
import torch

from ddp_common import moments, reporting, same_data
from ddp_common.dealing import EvenDeal, PlacedDeal, Placement
from ddp_common.errors import Error
from ddp_common.rendezvous import rank, world_size
from ddp_common.rows import Partitioned

THE_LOOP = (
    "Write, with one pass in each epoch:\n"
    "    for epoch in sampler.epochs(n):\n"
    "        for batch in ddp.DataLoader(data, batch_sampler=sampler):  # or sampler.batches()"
)
UNWEIGHTED = (
    "sampler.weight was not read in an epoch in which ranks had different numbers of samples: the "
    "fewer count more. Multiply the loss by it (docs/loops.md)."
)

EPOCH_BEGINS = 2**32 - 1  # in place of a step, for what draws before the first
_numbers = itertools.count()


def whole_or_none(value: Any) -> int | None:
    """`value` as an int if it is a whole number of at least 0, else None. A float never is one."""
    try:
        number = operator.index(value)
    except TypeError:
        return None
    return number if number >= 0 else None


class ElasticSampler:
    """Deals `length` samples in global batches of `batch_size`, and gives each rank its share.

    Where the samples are rows of a table that was an argument of `launch`, the table (`Rows`, or
    what its `tensors` gives) stands in place of the length: each rank is dealt rows that it holds.
    Other data may stand there too, such as a tensor or a data set. Before the first batch of a
    process the ranks compare their samplers and two samples (`same_data`): a `ddp.DataLoader`
    fetches them, or this data gives them. `drop_last` leaves out a last batch that is not full.
    With `steps` an epoch ends after so many steps at most; the next one has an order of its own.

        for epoch in sampler.epochs(n):
            for batch in ddp.DataLoader(data, batch_sampler=sampler):

    `for rows in sampler.batches()` gives lists of this rank's indices instead. The loop continues
    from the position that `load_state_dict` set, even in the middle of an epoch or at another
    world size. Any other loop is refused with an `Error`; docs/loops.md has the table.

    Before each step, and before an epoch, the random state of torch, NumPy and `random` is set
    from (seed, epoch, step, rank): on the same number of ranks, dropout is the same however often
    a run was interrupted.

    `epoch` and `step` are the position: `step` steps of `epoch` have been taken. Shuffling costs
    4 bytes per sample (8 from 2^31 samples on), and time when an epoch begins: 10^8 samples take
    0.4 GB and about 8 s, on every rank. `shuffle=False` costs neither.
    """

    def __init__(
        self,
        length: int | Partitioned | Any,
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        steps: int | None = None,
    ):
        self.placement: Placement | None = None  # where the rows of a table lie
        if isinstance(length, Partitioned):
            self.placement = length.placement
            length = len(length)
        self._data: Any = None  # whose rows are compared where no loader fetches them
        if hasattr(length, "__len__") and hasattr(length, "__getitem__"):
            self._data, length = length, len(length)
        at_least_1 = (length, batch_size, 1 if steps is None else steps)
        if not all(map(whole_or_none, at_least_1)) or whole_or_none(seed) is None:
            raise Error(
                "An ElasticSampler takes at least one sample, a batch_size and, if given, steps "
                "of at least 1, and a seed of at least 0, all whole numbers, not "
                f"{length!r}, batch_size={batch_size!r}, steps={steps!r}, seed={seed!r}."
            )
        self.length = int(length)
        self.batch_size = int(batch_size)
        self.seed = int(seed)
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.steps = None if steps is None else int(steps)
        if len(self) == 0:
            raise Error(
                f"drop_last=True leaves nothing of {length} samples in batches of {batch_size}. "
                "Choose a smaller batch_size, or leave drop_last out."
            )
        self.epoch = 0
        self.step = 0
        self.checkpoints: list[moments.SavesPosition] = []  # those that save its position
        self.open_batches = 0  # taken since `Checkpoint.step()` was called
        self._is_compared = False  # in this process, with the samplers of the other ranks
        self._samples: same_data.Found | None = None  # what was compared of the data
        self._number = next(_numbers)
        self._loop: object = None  # the loop over `epochs` that is running
        self._number_of_epochs = 0  # of that loop
        # What the pass over this epoch deals; None before it begins
        self._deal: EvenDeal | PlacedDeal | None = None
        self._first_step = 0  # of that pass
        self._weight: float | None = None  # of the batch in training
        self._was_read: bool | None = None  # a weight, in an epoch in which one was not 1
        self._thread: int | None = None  # that took it
        self._reporting_key = object()  # tells this sampler from others that report a position

    def __len__(self) -> int:
        """Steps in an epoch, including a ragged last one unless `drop_last`."""
        full_batches, rest = divmod(self.length, self.batch_size)
        batches = full_batches if self.drop_last or rest == 0 else full_batches + 1
        return batches if self.steps is None else min(batches, self.steps)

    @property
    def is_in_loop(self) -> bool:
        """Whether a loop over `epochs` is running."""
        return self._loop is not None

    @property
    def batches_in_pass(self) -> int:
        """Batches that the pass over this epoch gives: fewer where a run was resumed within it.

        Outside of a loop over `epochs` there is no pass: the steps in an epoch.
        """
        if self._loop is None:
            return len(self)
        return len(self) - (self.step if self._deal is None else self._first_step)

    # The order of an epoch

    def _order(self, epoch: int) -> range | np.ndarray:
        """The order of an epoch, in its cheapest form: a range, or an array of a small type."""
        if not self.shuffle:
            return range(self.length)
        dtype = np.int32 if self.length < 2**31 else np.int64
        order = np.arange(self.length, dtype=dtype)
        generator = np.random.default_rng([self.seed, epoch])
        generator.shuffle(order)  # draws as `Generator.permutation` would, for either type
        return order

    # The loop over epochs

    def epochs(self, n: int) -> Iterator[int]:
        """Yield the epochs from the current position on, below `n`, their number in the whole run.

        Each epoch has one pass over its batches. The loop raises `Error` as it begins, for an `n`
        that is no number of epochs; as it goes on, for an epoch whose pass was left before its
        end, and for a second loop within this one.
        """
        number = whole_or_none(n)
        if number is None:
            raise Error(
                f"epochs takes the number of epochs of the whole run, 0 or more, not {n!r}."
            )
        self._move_to(*self._next_position())
        self._loop = loop = object()
        moments.samplers[self._number] = self
        self._number_of_epochs = number
        try:
            while self.epoch < number:
                _seed_step([self.seed, self.epoch, EPOCH_BEGINS, rank()])
                for checkpoint in self.checkpoints if self.step else []:
                    checkpoint.begin_rest_of_epoch()
                yield self.epoch
                self._check_epoch(loop)
                if self.epoch + 1 < number:
                    for checkpoint in self.checkpoints:
                        checkpoint.refuse_what_came_after_save()
                self._move_to(self.epoch + 1, 0)
        finally:
            if self._loop is loop:
                self._loop = None
                self._deal = None  # its pass can't go on outside of the loop

    def _check_epoch(self, loop: object) -> None:
        """Raises `Error` where a loop could not be repeated as it was by a run that resumes."""
        if self._loop is not loop:
            raise Error(
                "This loop over epochs() can't go on: a second loop over epochs(), or "
                "load_state_dict, has set the position. Give each loop an ElasticSampler of its "
                "own."
            )
        if self.step == 0:
            raise Error(
                f"Epoch {self.epoch} had no pass over this sampler's batches. With a loader of "
                f"torch's own, each rank trains on everything. {THE_LOOP}"
            )
        if self.step < len(self):
            raise Error(
                f"The pass over epoch {self.epoch} was left after {self.step} of {len(self)} "
                "steps: a run that resumes would take the rest of them. Say how long an epoch is: "
                f"ElasticSampler(…, steps={self.step})."
            )
        if self._was_read is False:
            reporting.post(reporting.Problem(UNWEIGHTED))
        self._check_thread()

    def _next_position(self) -> tuple[int, int]:
        """Epoch and step of the batch that training takes next."""
        return divmod(self.steps_done, len(self))

    def _move_to(self, epoch: int, step: int) -> None:
        """Set the position. A pass that is still running can't go on."""
        self.epoch = epoch
        self.step = step
        self._deal = None
        self._weight = None
        self._was_read = None
        self._thread = None

    # The pass over an epoch

    def batches(self) -> Iterator[list[int]]:
        """The pass over an epoch: yields this rank's indices of each step that is left in it.

        A rank whose share of a small last batch is empty gets one sample of it, with weight 0, so
        that it takes part in the step. As it begins, the pass raises `Error` outside of `epochs`,
        and where the epoch had one.
        """
        return self._steps(self._begin)

    def _begin(self) -> Iterator[list[int]]:
        if self._data is not None and not self._is_compared:
            indices = same_data.chosen(self.seed, self.length)
            rows = [self._data[index] for index in indices]
            self._compare(same_data.fingerprints(indices, rows))
        self._compare(None)
        return self._shares()

    def _compare(self, found: same_data.Found | None) -> None:
        """Once in a process, compare settings, and samples that were fetched, with other ranks."""
        if not self._is_compared:
            self._samples = same_data.compare(self._settings(), found, self._samples)
            self._is_compared = True

    def __iter__(self) -> NoReturn:
        raise Error(
            "The ElasticSampler itself was iterated over, by `for … in sampler`, by torch's "
            f"DataLoader or by something around the sampler. {THE_LOOP}"
        )

    def _steps(self, load: Callable[[], Iterator]) -> Iterator:
        """The pass: a step counts when training takes its batch, however early it was loaded.

        `load` begins an iterator over the batches of `_shares`.
        """
        deal = self._begin_pass()
        batches = load()
        try:
            while self.step < len(self):
                moments.before_batch(self)
                batch = next(batches)
                self._start_step(deal)
                yield batch
                if self._deal is not deal:
                    raise Error(
                        "This iterator can't go on: its epoch is over, or its loop over epochs() "
                        f"was left, or a position was loaded. {THE_LOOP}"
                    )
        finally:
            # The only batch of an epoch may be kept (list(loader)): its weight stays right.
            if self._deal is deal and self.step == len(self) > 1:
                self._weight = None

    def _begin_pass(self) -> EvenDeal | PlacedDeal:
        if self._loop is None:
            raise Error(f"A pass over the sampler begins outside of epochs(). {THE_LOOP}")
        if self._deal is not None:
            raise Error(
                f"A second pass over epoch {self.epoch} begins; {self.step} of its {len(self)} "
                f"steps are taken. To look at data, take them from the data set itself. {THE_LOOP}"
            )
        if self.checkpoints and self.open_batches >= len(self):
            raise Error(
                f"A Checkpoint has this sampler, and its step() was not called in a whole epoch, "
                f"before epoch {self.epoch}: it could save nothing when a job ends. {moments.STEP}"
            )
        self._first_step = self.step
        if self.placement is not None:
            self._deal = PlacedDeal(
                self.placement, self.batch_size, self.seed, self.epoch, self.shuffle
            )
        else:
            self._deal = EvenDeal(self._order(self.epoch), self.batch_size)
        return self._deal

    def _shares(self) -> Iterator[list[int]]:
        """This rank's indices of each step that is left. To ask, even early, moves no position."""
        deal = self._deal
        assert deal is not None, "a pass begins before its batches are asked for"
        for step in range(self.step, len(self)):
            yield deal.share(step)

    # A step

    def _start_step(self, deal: EvenDeal | PlacedDeal) -> None:
        """Set weight, random state and position for the batch that training takes."""
        first_sample = self.step * self.batch_size
        batch_length = min(self.batch_size, self.length - first_sample)
        # DDP averages the gradients of all ranks, each of which is a mean over the rank's samples.
        # Weighted by its share of the batch, the average is the mean over the whole batch.
        self._weight = world_size() * deal.samples(self.step) / batch_length
        if self._weight != 1:
            self._was_read = bool(self._was_read)
        _seed_step([self.seed, self.epoch, self.step, rank()])
        self._thread = threading.get_ident()
        self.step += 1
        self.open_batches += 1
        samples_per_epoch = min(self.length, len(self) * self.batch_size)
        reporting.set_position(
            self._reporting_key,
            epoch=self.epoch,
            step=self.steps_done,
            samples=self.epoch * samples_per_epoch + first_sample + batch_length,
            batch=batch_length,
            total_samples=self._number_of_epochs * samples_per_epoch,
            epochs=self._number_of_epochs,
        )

    @property
    def weight(self) -> float:
        """The weight of the batch that training took last.

        Multiply a loss that is the mean over this rank's samples by it: the averaged gradient is
        then that of the global batch. Raises `Error` when no batch is in training.
        """
        if self._weight is None:
            raise Error(
                "sampler.weight was asked for when no batch of the sampler was in training. Take "
                "batches from ddp.DataLoader(data, batch_sampler=sampler), and read the weight as "
                "one is taken; keep it with a batch that is kept (list, itertools.cycle)."
            )
        self._check_thread()
        self._was_read = True
        return self._weight

    def _check_thread(self) -> None:
        if self._thread not in (None, threading.get_ident()):
            raise Error(
                "Another thread takes this sampler's batches, ahead of training: weight and "
                "position are not those of the batch that is trained on. Iterate in the thread "
                "that trains; to load ahead, give ddp.DataLoader num_workers."
            )

    @property
    def steps_done(self) -> int:
        """Steps since the run began, over all epochs and attempts."""
        return self.epoch * len(self) + self.step

    # Saving and restoring

    def state_dict(self) -> dict:
        """The position of the next step, and what proves that its samples are the same."""
        epoch, step = self._next_position()
        return {"epoch": epoch, "step": step, "samples": self._samples, **self._settings()}

    def _settings(self) -> dict[str, Any]:
        """What decides which samples a position stands for."""
        return {
            "seed": self.seed,
            "length": self.length,
            "batch_size": self.batch_size,
            "shuffle": self.shuffle,
            "drop_last": self.drop_last,
            "steps": self.steps,
            "partitions": None if self.placement is None else self.placement.lengths.tolist(),
        }

    def load_state_dict(self, state: dict) -> None:
        """Continue at a saved position, in a loop over `epochs` that begins afterwards.

        Raises `Error` if it was saved with other data, another batch size, order or seed.
        """
        differing = [
            f"{key} {state.get(key)} there, {mine} here"
            for key, mine in self._settings().items()
            if state.get(key) != mine
        ]
        if differing:
            raise Error(
                f"The checkpoint was written by another run: {'; '.join(differing)}. Resume with "
                "the settings in its config.json."
            )
        epoch = whole_or_none(state.get("epoch"))
        step = whole_or_none(state.get("step"))
        if epoch is None or step is None or step >= len(self):
            raise Error(
                "The checkpoint has no position of this sampler: epoch "
                f"{state.get('epoch')!r}, step {state.get('step')!r} of {len(self)}."
            )
        self._move_to(epoch, step)
        self._samples = state.get("samples")
        self._is_compared = False
        self._loop = None
        self.open_batches = 0


def _seed_step(entropy: list[int]) -> None:
    """Set the random state of torch (all devices), NumPy and `random`."""
    high, low, third, fourth = np.random.SeedSequence(entropy).generate_state(4, np.uint32)
    for_torch = (int(high) << 31) ^ int(low)
    if _has_accelerator():
        torch.manual_seed(for_torch)
    else:
        # torch.manual_seed formats the stack three times: longer than a small step takes.
        torch.default_generator.manual_seed(for_torch)
    np.random.seed(int(third))
    random.seed(int(fourth))


_has_accelerator = functools.cache(torch.accelerator.is_available)
