"""Which samples each rank trains on, step by step, now and after a restart.

Every rank computes the same order from (seed, epoch) alone, so nothing is communicated. Rank r
takes every world_size-th index of a global batch, starting at the r-th; of a table that Dask has
prepared, it takes the rows that lie on its worker (`dealing`). Promises: the samples of a step
depend on (seed, epoch, step) alone, for any number of ranks. So do its loss and gradient, with
`weight` and up to the order of floating-point sums, for a model without dropout and batch
normalisation.

A *pass* is one iteration over the sampler, usually one epoch. One generator runs it (`_steps`): a
step counts when training takes its batch. A *peek* is a pass of one batch whose weight nobody has
asked for, and does not count. A `DataLoader` of torch with workers would take batches long before
training does, and so may something between a loader and the sampler: both are refused where the
loader is iterated over (`_check_loader`).
"""

import dataclasses
import functools
import gc
import operator
import random
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from ddp_common.errors import Error
from ddp_common.ranks import reporting, stopping
from ddp_common.ranks.dealing import EvenDeal, PlacedDeal, Placement
from ddp_common.ranks.rendezvous import rank, world_size
from ddp_common.ranks.rows import Partitioned

LONGEST_LIST = 100  # longer lists and sets are not searched for samplers: they hold samples

# Called with each sampler between its steps, after its own `between_steps`; for `ddp.inject`
injected: list[Callable[["ElasticSampler"], None]] = []


@dataclasses.dataclass(eq=False)
class Pass:
    """One iteration over a sampler: where it began, and how far training has come."""

    epoch: int
    first_step: int
    step: int  # steps of the epoch that have been taken
    loop: object  # the loop over `epochs` in which it began; None in a loop of the user's own
    handled: int | None  # id of the exception that was being handled when it began
    is_open: bool = True  # somebody may still ask for a batch
    weight_was_read: bool = False

    def is_peek(self, steps: int) -> bool:
        """`next(iter(loader))`, to see what a batch looks like."""
        took_at_most_one = self.step - self.first_step <= 1
        return took_at_most_one and self.step < steps and not self.weight_was_read


class ElasticSampler:
    """Deals `length` samples in global batches of `batch_size`, and gives each rank its share.

    Where the samples are rows of a table that was an argument of `launch`, the table (`Rows`, or
    what its `tensors` gives) stands in place of the length: each rank is dealt rows that it holds.
    `drop_last` leaves out a last batch that is not full.

    Use it as the `batch_sampler` of a `ddp.DataLoader`, or of torch's without workers, or iterate
    over it: it yields lists of this rank's indices. `for epoch in sampler.epochs(n)` counts the
    epochs and continues from the position that `load_state_dict` set, even in the middle of an
    epoch or at another world size. In a loop of your own, such as `for epoch in range(n)`, each
    pass is the next epoch. A loop that cannot be right is refused with an `Error`; docs/loops.md
    has the table.

    Before each step the random state of torch, NumPy and `random` is set from (seed, epoch, step,
    rank): on the same number of ranks, dropout is the same however often a run was interrupted.

    `epoch` and `step` are the position: `step` steps of `epoch` have been taken. Shuffling costs
    4 bytes per sample while an epoch begins (8 from 2^31 samples on), of which each rank keeps
    its share, and time: 10^8 samples take 0.4 GB and about 8 s, on every rank, once per epoch.
    `shuffle=False` costs neither.
    """

    def __init__(
        self,
        length: int | Partitioned,
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
    ):
        self.placement = None  # where the rows of a table lie
        if isinstance(length, Partitioned):
            self.placement = length.placement
            length = len(length)
        if not _whole_number(length) or not _whole_number(batch_size):
            raise Error(
                "ElasticSampler needs at least one sample and a batch size of at least 1, whole "
                f"numbers, not {length!r} and {batch_size!r}."
            )
        if _whole_number(seed) is None:
            raise Error(
                f"The seed of an ElasticSampler is a whole number from 0 on, not {seed!r}."
            )
        self.length = int(length)
        self.batch_size = int(batch_size)
        self.seed = int(seed)
        self.shuffle = shuffle
        self.drop_last = drop_last
        if len(self) == 0:
            raise Error(
                f"drop_last=True leaves nothing of {length} samples in batches of {batch_size}. "
                "Choose a smaller batch_size, or leave drop_last out."
            )
        self.epoch = 0
        self.step = 0
        self.listeners: list[Any] = []  # the checkpoints that save this position
        self._weight: float | None = None  # of the batch in training
        self._thread: int | None = None  # that took it
        self._last: Pass | None = None  # the last pass; None if the position was set since then
        self._loop: object = None  # the loop over `epochs` that is running
        self._number_of_epochs: int | None = None  # of that loop
        # The position that a checkpoint has got since the last step: a resume would begin there
        self._saved_at: tuple[int, int] | None = None
        # A position was loaded; neither epochs() nor set_epoch() has said where the loop begins
        self._is_restored = False
        self._reporting_key = object()  # tells this sampler from others that report a position

    def __len__(self) -> int:
        """Steps in an epoch, including a ragged last one unless `drop_last`."""
        full_batches, rest = divmod(self.length, self.batch_size)
        return full_batches if self.drop_last or rest == 0 else full_batches + 1

    # The order of an epoch

    def permutation(self, epoch: int) -> np.ndarray:
        """The order of all samples in `epoch`: int64, shape (length,), the same on every rank."""
        if self.placement is not None:
            everything = Placement(self.placement.lengths, range(len(self.placement.lengths)))
            return self._placed_deal(everything, epoch).rows
        return np.asarray(self._order(epoch), dtype=np.int64)

    def _deal(self, epoch):
        """This rank's shares of an epoch."""
        if self.placement is not None:
            return self._placed_deal(self.placement, epoch)
        return EvenDeal(self._order(epoch), self.batch_size)

    def _placed_deal(self, placement, epoch):
        return PlacedDeal(placement, self.batch_size, self.seed, epoch, self.shuffle)

    def _order(self, epoch):
        """The order of an epoch, in its cheapest form: a range, or an array of a small type."""
        if not self.shuffle:
            return range(self.length)
        dtype = np.int32 if self.length < 2**31 else np.int64
        order = np.arange(self.length, dtype=dtype)
        generator = np.random.default_rng([self.seed, epoch])
        generator.shuffle(order)  # draws as `Generator.permutation` would, for either type
        return order

    # Counting epochs

    def epochs(self, n: int) -> Iterator[int]:
        """Yield the epochs from the current position on, below `n`, their number in the whole run.

        Each epoch has one pass over the samples. Raises `Error` for an `n` that is no number of
        epochs, and for a second loop within the first.
        """
        number = _whole_number(n)
        if number is None:
            raise Error(
                f"epochs takes the number of epochs of the whole run, 0 or more, not {n!r}."
            )
        self._move_to(*self._next_start())
        self._loop = loop = object()
        self._number_of_epochs = number
        self._is_restored = False
        try:
            while self.epoch < number:
                yield self.epoch
                if self._loop is not loop:
                    raise Error(
                        "A second loop over epochs() of this sampler has begun within the first, "
                        "which can't go on: they would count the same epochs. Give each loop an "
                        "ElasticSampler of its own."
                    )
                self._move_to(self.epoch + 1, 0)
        finally:
            if self._loop is loop:
                self._loop = None
                self._number_of_epochs = None

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next pass is, as for PyTorch's `DistributedSampler`.

        Needed in one case: a loop such as `for epoch in range(sampler.epoch, n)` after a
        checkpoint was restored. A position within `epoch` stays. Raises `Error` for an epoch that
        is over, since the position of a run only goes forward.
        """
        wanted = _whole_number(epoch)
        if wanted is None:
            raise Error(f"set_epoch takes the number of an epoch, 0 or more, not {epoch!r}.")
        if self._loop is not None:
            if wanted != self.epoch:
                raise Error(
                    f"set_epoch({wanted}) in epoch {self.epoch} of epochs(): epochs() counts for "
                    "itself. Leave set_epoch out."
                )
            return
        if self._is_running() and wanted == self.epoch:
            return
        next_epoch, next_step = self._next_start()
        if wanted < next_epoch and self._is_restored:
            raise Error(RESTORED.format(epoch=next_epoch, step=next_step))
        if wanted < next_epoch:
            raise Error(
                f"set_epoch({wanted}): epoch {wanted} of this sampler is over, the next one is "
                f"{next_epoch}. A run's position goes forward only, or its checkpoints would "
                "contradict each other. For a second training in the same process make a new "
                "ElasticSampler."
            )
        self._is_restored = False
        self._move_to(wanted, next_step if wanted == next_epoch else 0)

    def _move_to(self, epoch, step):
        """Set the position. A pass that is still running can't go on."""
        self._check_what_was_saved(epoch, step)
        self.epoch = epoch
        self.step = step
        self._last = None
        self._weight = None

    def _check_what_was_saved(self, epoch, step):
        """Raises `Error` if a resume would go on within an epoch, and training does not."""
        if self._saved_at is None or self._saved_at == (epoch, step) or self._saved_at[1] == 0:
            return
        saved_epoch, saved_step = self._saved_at
        raise Error(
            f"A checkpoint was saved within the pass over epoch {saved_epoch}, after step "
            f"{saved_step} of {len(self)}, and the pass was left right there. A run resumed from "
            "it would go on with that epoch, this one does not. Leave the loop first (and let go "
            "of an iterator made by hand: del it), then save."
        )

    # A pass

    def batches(self) -> Iterator[list[int]]:
        """One pass over an epoch."""
        return iter(self)

    def __iter__(self) -> Iterator[list[int]]:
        """Begin a pass: yields this rank's indices of each step that is left in the epoch.

        A rank whose share of a small last batch is empty gets one sample of it, with weight 0, so
        that it takes part in the step.
        """
        return self._steps(lambda shares: (indices for _, indices in shares))

    def _steps(self, load: Callable[["Shares"], Iterator]) -> Iterator:
        """One pass: a step counts when training takes its batch, however early it was loaded.

        `load` makes an iterator over the batches of this rank's shares.
        """
        current = self._begin_pass()
        deal = self._deal(current.epoch)
        try:
            batches = load(Shares(self, current, deal))
            for _ in range(current.first_step, len(self)):
                if self._last is not current:
                    raise Error(MOVED)
                self._between_steps()
                batch = next(batches)
                self._start_step(current, deal)
                yield batch
        finally:
            current.is_open = False
            is_over = current.step == len(self)
            # The only batch of an epoch may be kept (list(loader)): its weight stays right.
            if self._last is current and is_over and len(self) > 1:
                self._weight = None

    def _begin_pass(self) -> Pass:
        last = self._last
        if last is not None and not last.is_peek(len(self)):
            if self._is_running():
                raise Error(
                    f"A pass over this sampler begins while another one is in step {last.step} "
                    f"of {len(self)} of epoch {last.epoch}. One sampler has one position and one "
                    "weight. Let the first pass end (or let go of its iterator: del it), or give "
                    "each loader an ElasticSampler of its own."
                )
            if self._loop is not None:
                raise Error(
                    f"A second pass within epoch {last.epoch} of epochs(), of which {last.step} "
                    f"of {len(self)} steps are taken: a resume could not tell the two apart. To "
                    "train longer, ask for more epochs; to look at the data, or to evaluate, use "
                    "another sampler (EvalSampler, or a second ElasticSampler)."
                )
        epoch, step = self._next_start()
        if self._is_restored and self._loop is None:
            raise Error(RESTORED.format(epoch=epoch, step=step))
        self._move_to(epoch, step)
        self._last = Pass(epoch, step, step, self._loop, _handled_exception())
        return self._last

    def _next_start(self):
        """The position (epoch, step) of a pass that would begin now."""
        last = self._last
        if last is None:  # nothing was taken since the position was set
            return self.epoch, self.step
        if last.is_peek(len(self)):  # it did not count
            return last.epoch, last.first_step
        loop_was_left = last.loop is not None and last.loop is not self._loop
        if loop_was_left and last.step < len(self):  # a loop over epochs() goes on where it was
            return last.epoch, last.step
        return last.epoch + 1, 0  # any other pass, whole or left early, has used its epoch

    def _is_running(self):
        last = self._last
        return last is not None and last.is_open and last.step < len(self)

    # A step

    def _between_steps(self):
        """Between two steps model and position belong together: the moment to save or to leave."""
        for each in self.listeners:
            each.save_if_due()
        for call in injected:
            call(self)
        steps_of_this_run = self.steps_done + reporting.steps_of_others(self._reporting_key)
        is_time = stopping.is_time_to_stop(steps_of_this_run)
        if is_time and all(each.is_at_boundary() for each in self.listeners):
            for each in self.listeners:
                each.save_and_wait()
            stopping.leave()

    def _start_step(self, current, deal):
        """Set weight, random state and position for the batch that training takes."""
        for each in self.listeners:
            each.batch_taken()
        first_sample = self.step * self.batch_size
        batch_length = min(self.batch_size, self.length - first_sample)
        # DDP averages the gradients of all ranks, each of which is a mean over the rank's samples.
        # Weighted by its share of the batch, the average is the mean over the whole batch.
        self._weight = world_size() * deal.samples(self.step) / batch_length
        _seed_step([self.seed, self.epoch, self.step, rank()])
        self._thread = threading.get_ident()
        self._saved_at = None
        self.step += 1
        current.step = self.step

        samples_per_epoch = min(self.length, len(self) * self.batch_size)
        n = self._number_of_epochs
        reporting.set_position(
            self._reporting_key,
            epoch=self.epoch,
            step=self.steps_done,
            samples=self.epoch * samples_per_epoch + first_sample + batch_length,
            total_samples=None if n is None else n * samples_per_epoch,
            epochs=n,
        )

    @property
    def weight(self) -> float:
        """The weight of the batch that training took last.

        Multiply a loss that is the mean over this rank's samples by it: the averaged gradient is
        then that of the global batch. Raises `Error` when no batch is in training.
        """
        if self._weight is None or self._last is None:
            raise Error(
                "sampler.weight was asked for when no batch of the sampler was in training: none "
                "was taken yet, or its pass is over. Read it in the loop, when the batch is "
                "taken. Batches that are kept and used again (list(loader), "
                "itertools.cycle(loader)) each need their own weight: read it with the batch, or "
                "iterate over the loader anew for each epoch."
            )
        if self._thread != threading.get_ident():
            raise Error(
                "Another thread takes this sampler's batches, ahead of training: weight and "
                "position are not those of the batch that is trained on. Iterate over the loader "
                "in the thread that trains; num_workers of a ddp.DataLoader loads ahead without "
                "harm."
            )
        self._last.weight_was_read = True
        return self._weight

    @property
    def steps_done(self) -> int:
        """Steps since the run began, over all epochs and attempts.

        An epoch that was left early counts as a whole one.
        """
        return self.epoch * len(self) + self.step

    # Saving and restoring

    def state_dict(self) -> dict:
        """The position: what the next step needs, and what proves that the samples are the same.

        A pass that was left early is over, and the next step is the first of the next epoch. Two
        cases differ, and the run goes on where it was: while an exception is handled, and after a
        whole loop over `epochs` was left.
        """
        last = self._last
        if last is not None and self._is_in_the_middle(last):
            epoch, step = last.epoch, last.step
        else:
            epoch, step = self._next_start()
        self._saved_at = (epoch, step)
        return {"epoch": epoch, "step": step, **self._settings()}

    def _is_in_the_middle(self, last):
        """Whether a run that is resumed goes on within the last pass."""
        if self._is_running():
            return True
        is_unfinished = last.step < len(self) and not last.is_peek(len(self))
        return is_unfinished and _handled_exception() not in (None, last.handled)

    def _settings(self):
        """What decides which samples a position stands for."""
        return {
            "seed": self.seed,
            "length": self.length,
            "batch_size": self.batch_size,
            "shuffle": self.shuffle,
            "drop_last": self.drop_last,
            "partitions": None if self.placement is None else self.placement.lengths.tolist(),
        }

    def load_state_dict(self, state: dict) -> None:
        """Continue at a saved position.

        Raises `Error` if it was saved with other data, another batch size, order or seed.
        """
        differing = [
            f"{key} {state[key]} there, {mine} here"
            for key, mine in self._settings().items()
            if state[key] != mine
        ]
        if differing:
            raise Error(
                f"The checkpoint was written by another run: {'; '.join(differing)}. Resume with "
                "the settings in its config.json."
            )
        self._saved_at = None
        self._move_to(state["epoch"], state["step"])
        self._is_restored = self.epoch > 0


MOVED = (
    "This pass over the sampler can't go on: since it took its last batch, the sampler's position "
    "was set anew, by another pass, load_state_dict, set_epoch or epochs(). Make a new iterator, "
    "iter(loader), after that; two loaders that take turns need an ElasticSampler each."
)
RESTORED = (
    "A checkpoint was restored (epoch {epoch}, step {step}), and a loop of your own begins: "
    "whether it counts from 0, and would train all epochs once more, cannot be seen from here. "
    "Write `for epoch in sampler.epochs(n)`, which goes on where the checkpoint was. Or say where "
    "your loop begins: `for epoch in range(sampler.epoch, n)` with `sampler.set_epoch(epoch)` as "
    "its first line."
)


@dataclasses.dataclass
class Shares:
    """The batch sampler inside a `ddp.DataLoader`: asking it, even early, moves no position.

    Yields (epoch, this rank's indices) of each step that was left when the pass `current` began.
    """

    sampler: ElasticSampler
    current: Pass | None = None
    deal: Any = None

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[tuple[int, list[int]]]:
        assert self.current is not None, "a pass begins before its loader asks"
        for step in range(self.current.first_step, len(self.sampler)):
            yield self.current.epoch, self.deal.share(step)


def _seed_step(entropy):
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


@functools.cache
def _has_accelerator():
    return torch.accelerator.is_available()


def _handled_exception():
    error = sys.exception()
    return None if error is None else id(error)


def _whole_number(value):
    """`value` as an int if it is a whole number of at least 0, else None. A float never is one."""
    try:
        number = operator.index(value)
    except TypeError:
        return None
    return number if number >= 0 else None


# Loaders that would count wrongly. A sampler is not told who asks it, so torch's `DataLoader`
# checks its batch sampler when it is iterated over, in every process that imports this module.


def _check_loader(loader: torch.utils.data.DataLoader) -> None:
    """Raises `Error` if an `ElasticSampler` would count batches that training does not take."""
    asked = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    if isinstance(asked, Shares):
        return
    if not isinstance(asked, ElasticSampler):
        if _holds_an_elastic_sampler(asked):
            raise Error(
                f"Something stands between a DataLoader and an ElasticSampler "
                f"({type(asked).__name__}). It may drop, regroup or take ahead what the sampler "
                "deals, which deals each rank its share already. Give the sampler itself to the "
                "loader: ddp.DataLoader(data, batch_sampler=sampler), without sampler=, and "
                "without prepare() of accelerate or the like."
            )
    elif loader.num_workers:
        raise Error(
            f"torch's DataLoader with num_workers={loader.num_workers} takes batches from the "
            "sampler long before training does: position and weight would be those of other "
            "batches. Write ddp.DataLoader(data, batch_sampler=sampler, num_workers=…), which is "
            "torch's own but for this."
        )


def _holds_an_elastic_sampler(sampler, depth=6):
    """Whether `sampler` refers to one: by an attribute, in a short list, as an iterator does."""
    if isinstance(sampler, ElasticSampler):
        return True
    if isinstance(sampler, (list, tuple, dict, set, frozenset)):
        may_hold_one = len(sampler) <= LONGEST_LIST
    else:
        may_hold_one = hasattr(sampler, "__iter__") and not hasattr(sampler, "__getitem__")
    if depth == 0 or isinstance(sampler, type) or not may_hold_one:
        return False
    return any(_holds_an_elastic_sampler(each, depth - 1) for each in gc.get_referents(sampler))


_iterate = torch.utils.data.DataLoader.__iter__


@functools.wraps(_iterate)
def _check_and_iterate(loader):
    _check_loader(loader)
    return _iterate(loader)


torch.utils.data.DataLoader.__iter__ = _check_and_iterate  # type: ignore[method-assign]


class EvalSampler:
    """Deals each of `length` samples to exactly one rank, in order and without padding.

    `length` may be a table, as for an `ElasticSampler`: each rank is dealt all rows that it holds.
    A rank may get none. Iterating yields lists of at most `batch_size` indices. Evaluate on
    `model.module`: a forward pass of the DDP wrapper may wait for ranks that have fewer batches.
    """

    def __init__(self, length: int | Partitioned, batch_size: int):
        self.batch_size = batch_size
        self.indices: range | np.ndarray
        if not _whole_number(batch_size):
            raise Error(f"EvalSampler needs a whole batch size of at least 1, not {batch_size!r}.")
        if isinstance(length, Partitioned):
            self.indices = length.rows
        elif _whole_number(length) is None:
            raise Error(f"EvalSampler takes the number of samples, or a table, not {length!r}.")
        else:
            self.indices = range(rank(), length, world_size())

    def __len__(self) -> int:
        """Batches of this rank."""
        return -(-len(self.indices) // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        for start in range(0, len(self.indices), self.batch_size):
            reporting.made_progress()
            batch = self.indices[start : start + self.batch_size]
            yield list(batch) if isinstance(batch, range) else batch.tolist()
