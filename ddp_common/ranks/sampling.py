"""Which samples each rank trains on, step by step, now and after a restart.

Every rank computes the same order from (seed, epoch) alone, so nothing is communicated. A global
batch has a fixed size; rank r takes every world_size-th index of it, starting at the r-th
(`dealing`). The samples of a step are therefore the same for any number of ranks. So are its loss
and gradient, with `weight` and up to the order of floating-point sums, for a model without dropout
and batch normalisation. Of a table that Dask has prepared, a rank takes
the rows that lie on its worker (`dealing`): the samples of a step do not depend on where they lie.

A step begins when training takes its batch, whenever the loader has asked for it (`passes`):
position, weight and random state are always those of the batch that training has.

Two words are used throughout: a *pass* is one iteration over the sampler, usually one epoch; a
*peek* is a pass of one batch whose weight nobody has asked for, and does not count.
"""

import functools
import gc
import operator
import threading
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch.utils.data import DataLoader

from ddp_common.errors import Error
from ddp_common.ranks import reporting, stopping
from ddp_common.ranks.dealing import EvenDeal, PlacedDeal, Placement
from ddp_common.ranks.loaders import UNORDERED
from ddp_common.ranks.passes import MOVED, PassIterator, handled_exception
from ddp_common.ranks.rendezvous import rank, world_size
from ddp_common.ranks.rows import Partitioned

# Functions of a sampler, called last between its steps; for the fault lab
injected: list[Callable[["ElasticSampler"], None]] = []


class ElasticSampler:
    """Deals `length` samples in global batches of `batch_size`, and gives each rank its share.

    Where the samples are rows of a table that was an argument of `launch`, the table (`Rows`, or
    what its `tensors` gives) stands in place of the length: each rank is dealt rows that it holds.

    Use it as the `batch_sampler` of a `DataLoader`. Any loop will do. `for epoch in
    sampler.epochs(n)` counts the epochs and continues from the position that `load_state_dict`
    set, even in the middle of an epoch or at another world size. In a loop of your own, such as
    `for epoch in range(n)`, each pass is the next epoch. A loop that cannot be right is refused
    with an `Error` before it does harm; docs/loops.md has the table.

    Iterating yields lists of this rank's indices. Before each step torch's random state is set
    from (seed, epoch, step, rank): on the same number of ranks, dropout is the same however often
    a run was interrupted. All
    of this holds for a `DataLoader` with workers as well.

    `epoch` and `step` are the position: `step` steps of `epoch` have been taken. Shuffling costs
    4 bytes per sample while an epoch begins (8 from 2^31 samples on), of which each rank keeps
    its share, and time: 10^8 samples take 0.4 GB and about 8 s, on every rank, once per epoch.
    `shuffle=False` costs neither.
    """

    def __init__(
        self, length: int | Partitioned, batch_size: int, *, seed: int = 0, shuffle: bool = True
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
        self.length = length
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.epoch = 0
        self.step = 0
        # Functions to call before each step, once the last one is done
        self.between_steps: list[Callable[[], None]] = []
        # Functions to call before leaving, when told to leave
        self.before_stopping: list[Callable[[], None]] = []
        self._begin_anew()

    def _begin_anew(self):
        self._weight = 1.0
        self._taking_thread = None  # the thread that took the last batch
        self._last_pass = None  # the pass that took it; None if the position was set since then
        self._generation = 0  # grows whenever the position is set or another pass begins
        self._epochs_loop = None  # the loop over `epochs` that is running
        self._number_of_epochs = None  # of that loop
        self._is_restored = False  # from a checkpoint, and the loop has not said where it begins
        self._followed = None  # the pass that `follow` counts, while it makes a loader's iterator
        self._reporting_key = object()  # tells this sampler from others that report a position

    def __getstate__(self):
        """The position and nothing that runs here: a data set may take a copy to its workers."""
        names = ("length", "placement", "batch_size", "seed", "shuffle", "epoch", "step")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state):
        self.__dict__.update(state)
        self.between_steps = []
        self.before_stopping = []
        self._begin_anew()

    def __len__(self) -> int:
        """Steps in an epoch, including a ragged last one."""
        return -(-self.length // self.batch_size)

    # The order of an epoch.

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
        generator.shuffle(order)  # draws the same numbers as its `permutation`, for either type
        return order

    # Counting epochs.

    def epochs(self, n: int) -> Iterator[int]:
        """Yield the epochs from the current position on, below `n`, their number in the whole run.

        Each epoch has one pass over the samples. Raises `Error` for an `n` that is no number of
        epochs, and for a second loop within the first.
        """
        count = _whole_number(n)
        if count is None:
            raise Error(
                f"epochs takes the number of epochs of the whole run, 0 or more, not {n!r}."
            )
        return self._run_epochs(count)

    def _run_epochs(self, n):
        self._move_to_first_epoch()
        loop = object()
        self._epochs_loop = loop
        self._number_of_epochs = n
        self._is_restored = False
        try:
            while self.epoch < n:
                yield self.epoch
                if self._epochs_loop is not loop:
                    raise Error(
                        "A second loop over epochs() of this sampler has begun within the first, "
                        "which can't go on: they would count the same epochs. Give each loop an "
                        "ElasticSampler of its own."
                    )
                self._check_what_was_saved()
                self._move_to(self.epoch + 1, 0)
        finally:
            if self._epochs_loop is loop:
                self._epochs_loop = None
                self._number_of_epochs = None

    def _move_to_first_epoch(self):
        """Where a loop over `epochs` begins, after whatever was taken before it."""
        last = self._last_pass
        steps = len(self)
        if last is None:  # nothing was taken since the position was set
            if self.step == steps:
                self._move_to(self.epoch + 1, 0)
        elif last.is_peek(steps):  # somebody only looked: its epoch begins now
            self._check_what_was_saved(leaving_the_epoch=False)
            self._move_to(last.epoch, last.first_step)
        elif last.epochs_loop is not None and last.step < steps:  # go on in the middle
            self._move_to(last.epoch, last.step)
        else:  # that epoch is over, also where a loop of one's own left it early
            self._check_what_was_saved()
            self._move_to(last.epoch + 1, 0)

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next pass is, as for PyTorch's `DistributedSampler`.

        Needed in one case: a loop such as `for epoch in range(sampler.epoch, n)` after a
        checkpoint was restored. A position within `epoch` stays. Raises `Error` for an epoch that
        is over, since the position of a run only goes forward.
        """
        wanted = _whole_number(epoch)
        if wanted is None:
            raise Error(f"set_epoch takes the number of an epoch, 0 or more, not {epoch!r}.")
        if self._epochs_loop is not None:
            if wanted != self.epoch:
                raise Error(
                    f"set_epoch({wanted}) in epoch {self.epoch} of epochs(): epochs() counts for "
                    "itself. Leave set_epoch out."
                )
            return
        last = self._last_pass
        if last is not None and last.is_running(len(self)) and wanted == last.epoch:
            return
        next_epoch, next_step = self._next_start()
        if wanted < next_epoch:
            self._refuse_to_go_back(wanted, next_epoch, next_step)
        self._is_restored = False
        if last is None and wanted == next_epoch:
            return
        leaves_its_epoch = last is not None and wanted != last.epoch
        self._check_what_was_saved(leaving_the_epoch=leaves_its_epoch)
        if wanted == next_epoch:
            self._move_to(wanted, next_step)
        else:
            self._move_to(wanted, 0)

    def _refuse_to_go_back(self, wanted, next_epoch, next_step):
        if self._is_restored:
            raise Error(RESTORED.format(epoch=next_epoch, step=next_step))
        raise Error(
            f"set_epoch({wanted}): epoch {wanted} of this sampler is over, the next one is "
            f"{next_epoch}. A run's position goes forward only, or its checkpoints would "
            "contradict each other. For a second training in the same process make a new "
            "ElasticSampler."
        )

    def _move_to(self, epoch, step):
        """Set the position. A pass that is still running can't go on."""
        self.epoch = epoch
        self.step = step
        self._last_pass = None
        self._generation += 1

    # A pass begins.

    def __iter__(self) -> Iterator[list[int]]:
        """Begin a pass: yields this rank's indices of each step that is left in the epoch.

        A rank whose share of a small last batch is empty gets one sample of it, with weight 0, so
        that it takes part in the step.
        """
        if self._followed is not None:
            return self._followed.indices_of_all_steps()
        # Set here, not with the first batch: a loader's workers, which are started in between,
        # copy data sets that may look at the position.
        self.epoch, self.step = self._next_start()
        return PassIterator(self)

    def _next_start(self):
        """The position (epoch, step) of a pass that would begin now."""
        last = self._last_pass
        if last is None:
            return self.epoch, self.step
        if last.is_peek(len(self)):
            return last.epoch, last.first_step
        if self._epochs_loop is not None:
            return last.epoch, last.step  # refused with its first batch, by `_check_may_begin`
        return last.epoch + 1, 0

    def _check_may_begin(self):
        """Before a pass deals anything. Raises `Error` if it cannot be what the user means."""
        last = self._last_pass
        if self._epochs_loop is None:
            if self._is_restored:
                raise Error(RESTORED.format(epoch=self.epoch, step=self.step))
            return
        if last is not None and not last.is_peek(len(self)):
            self._check_nothing_runs()
            raise Error(
                f"A second pass within epoch {last.epoch} of epochs(), of which {last.step} of "
                f"{len(self)} steps are taken. epochs() counts one pass for each epoch, and a "
                "resume could not tell two apart. To train longer, ask for more epochs; to take "
                "fewer steps per epoch, leave the pass and let epochs() go on; to look at the "
                "data, or to evaluate, use another sampler (EvalSampler, or a second "
                "ElasticSampler)."
            )

    def _check_nothing_runs(self):
        last = self._last_pass
        steps = len(self)
        if last is None or last.is_peek(steps) or not last.is_running(steps):
            return
        gc.collect()  # an iterator that is only held by a reference cycle is not running
        if last.is_running(steps):
            raise Error(
                f"A pass over this sampler begins while another one is in step {last.step} of "
                f"{steps} of epoch {last.epoch}. One sampler has one position and one weight. Let "
                "the first pass end (or let go of its iterator: del it), or give each loader an "
                "ElasticSampler of its own."
            )

    def _check_what_was_saved(self, leaving_the_epoch=True):
        """Before a pass is left. Raises `Error` if a checkpoint says that the run continues it."""
        last = self._last_pass
        steps = len(self)
        if last is None or last.saved_at is None or last.step == steps:
            return
        is_left_where_saved = last.saved_at == last.step
        is_left_peek = leaving_the_epoch and last.is_peek(steps)
        if is_left_where_saved or is_left_peek:
            raise Error(
                f"A checkpoint was saved within the pass over epoch {last.epoch}, after step "
                f"{last.step} of {steps}, and the pass was left right there. A run resumed from "
                "it would go on with that epoch, this one does not. Leave the loop first (and let "
                "go of an iterator made by hand: del it), then save."
            )

    # A step begins.

    def _take(self, current, deal):
        """Training takes the next batch of the pass `current`, which `deal` deals."""
        if current.step == current.first_step:
            self._start_pass(current)
        elif self._last_pass is not current:
            raise Error(MOVED)
        self.epoch = current.epoch
        self.step = current.step
        self._taking_thread = threading.get_ident()
        self._finish_previous_step()
        self._start_step(deal)
        current.step = self.step

    def _start_pass(self, begun):
        """The first batch of a pass is taken."""
        if begun.generation != self._generation:
            raise Error(MOVED)
        self._check_nothing_runs()
        last = self._last_pass
        leaves_its_epoch = last is not None and begun.epoch != last.epoch
        self._check_what_was_saved(leaving_the_epoch=leaves_its_epoch)
        self._last_pass = begun
        self._generation += 1

    def _finish_previous_step(self):
        """Between two steps model and position belong together: the moment to save or to leave."""
        for call in self.between_steps:
            call()
        for call in injected:
            call(self)
        steps_of_this_run = self.steps_done + reporting.steps_of_others(self._reporting_key)
        if stopping.is_time_to_stop(steps_of_this_run):
            for call in self.before_stopping:
                call()
            stopping.leave()

    def _start_step(self, deal):
        """Set weight, random state and position for the batch that training takes."""
        mine = rank()
        ranks = world_size()
        first_sample = self.step * self.batch_size
        batch_length = min(self.batch_size, self.length - first_sample)

        # DDP averages the gradients of all ranks, each of which is a mean over the rank's samples.
        # Weighted by its share of the batch, the average is the mean over the whole batch.
        self._weight = ranks * deal.samples(self.step) / batch_length

        entropy = [self.seed, self.epoch, self.step, mine]
        high, low = np.random.SeedSequence(entropy).generate_state(2, np.uint32)
        _seed((int(high) << 31) ^ int(low))

        self.step += 1
        number_of_epochs = self._number_of_epochs
        total = None if number_of_epochs is None else number_of_epochs * self.length
        reporting.set_position(
            self._reporting_key,
            epoch=self.epoch,
            step=self.steps_done,
            samples=self.epoch * self.length + first_sample + batch_length,
            total_samples=total,
            epochs=number_of_epochs,
        )

    # What training asks for.

    @property
    def weight(self) -> float:
        """The weight of the batch that training took last.

        Multiply the loss by it: the averaged gradient is then that of the global batch. Raises
        `Error` when no batch is in training.
        """
        last = self._last_pass
        if last is None or last.is_over(len(self)):
            raise Error(
                "sampler.weight was asked for when no batch of the sampler was in training: none "
                "was taken yet, or its pass is over. Read it in the loop, when the batch is "
                "taken. Batches that are kept and used again (list(loader), "
                "itertools.cycle(loader)) each need their own weight: read it with the batch, or "
                "iterate over the loader anew for each epoch."
            )
        self._check_thread()
        last.weight_was_read = True
        return self._weight

    def _check_thread(self):
        if self._taking_thread not in (None, threading.get_ident()):
            raise Error(
                "Another thread takes this sampler's batches, ahead of training: weight and "
                "position are not those of the batch that is trained on. Iterate over the "
                "DataLoader in the thread that trains; num_workers loads ahead without harm."
            )

    @property
    def steps_done(self) -> int:
        """Steps since the run began, over all epochs and attempts.

        An epoch that was left early counts as a whole one.
        """
        return self.epoch * len(self) + self.step

    def follow(self, loader: DataLoader) -> Iterator:
        """Yield the batches of a `DataLoader` that has this sampler.

        Rarely needed: iterate over the loader itself. `follow` does not look into the loader, and
        is for loaders whose internals this version of the package does not know. Raises `Error`
        for a loader with another sampler, and for one that hands out batches in any order.
        """
        if loader.batch_sampler is not self:
            raise Error(
                "follow takes a DataLoader whose batch_sampler is this sampler: "
                "DataLoader(data, batch_sampler=sampler, num_workers=…)."
            )
        if not getattr(loader, "in_order", True):
            raise Error(UNORDERED)
        self.epoch, self.step = self._next_start()
        counter = PassIterator(self)
        counter.begin()
        self._followed = counter
        try:
            batches = iter(loader)
        finally:
            self._followed = None
        while not counter.is_through():
            counter.take()
            yield next(batches)

    # Saving and restoring.

    def state_dict(self) -> dict:
        """The position: what the next step needs, and what proves that the samples are the same.

        A pass that was left early is over ('ended'), and the next step is the first of the next
        epoch. Two cases differ, and the run goes on where it was: while an exception is handled,
        and after a whole loop over `epochs` was left.
        """
        last = self._last_pass
        epoch = self.epoch
        step = self.step
        ended = False
        if last is not None:
            epoch = last.epoch
            step = last.step
            if last.is_running(len(self)):
                self._check_thread()
            elif last.is_peek(len(self)):
                step = last.first_step
            elif last.first_step < step < len(self):
                handled = handled_exception()
                left_by_an_exception = handled is not None and handled != last.handled
                left_with_its_loop = last.epochs_loop is not self._epochs_loop
                ended = not left_by_an_exception and not left_with_its_loop
            last.saved_at = None if ended else step
        return {"epoch": epoch, "step": step, "ended": ended, **self._settings()}

    def _settings(self):
        """What decides which samples a position stands for."""
        return {
            "seed": self.seed,
            "length": self.length,
            "batch_size": self.batch_size,
            "shuffle": self.shuffle,
            "partitions": None if self.placement is None else self.placement.lengths.tolist(),
        }

    def load_state_dict(self, state: dict) -> None:
        """Continue at a saved position.

        Raises `Error` if it was saved with other data, another batch size, order or seed.
        """
        differing = []
        # Old checkpoints have no 'shuffle', no 'partitions', and no 'ended'
        saved = {"partitions": None, **state}
        for key, mine in self._settings().items():
            theirs = saved.get(key, mine)
            if theirs != mine:
                differing.append(f"{key} {theirs} there, {mine} here")
        if differing:
            raise Error(
                f"The checkpoint was written by another run: {'; '.join(differing)}. Resume with "
                "the settings in its config.json."
            )
        epoch_is_over = state.get("ended", False) or state["step"] == len(self)
        if epoch_is_over:
            self._move_to(state["epoch"] + 1, 0)
        else:
            self._move_to(state["epoch"], state["step"])
        self._is_restored = self.epoch > 0


def _seed(number):
    """As `torch.manual_seed`.

    That formats the stack three times in each step where CUDA is not in use: longer than a small
    step takes.
    """
    if _has_accelerator():
        torch.manual_seed(number)
    else:
        torch.default_generator.manual_seed(number)


@functools.cache
def _has_accelerator():
    return torch.accelerator.is_available()


def _whole_number(value):
    """`value` as an int if it is a whole number of at least 0, else None. A float never is one."""
    try:
        number = operator.index(value)
    except TypeError:
        return None
    return number if number >= 0 else None


RESTORED = (
    "A checkpoint was restored (epoch {epoch}, step {step}), and a loop of your own begins: "
    "whether it counts from 0, and would train all epochs once more, cannot be seen from here. "
    "Write `for epoch in sampler.epochs(n)`, which goes on where the checkpoint was. Or say where "
    "your loop begins: `for epoch in range(sampler.epoch, n)` with `sampler.set_epoch(epoch)` as "
    "its first line."
)


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
