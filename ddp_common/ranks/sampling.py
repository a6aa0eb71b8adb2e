"""Which sample goes to which rank, now and after a restart.

Every rank computes the same deal from (seed, epoch) alone, so nothing is communicated. A global batch has a fixed size; rank r takes
every world_size-th index of it. The samples of a step are therefore the same for any number of ranks, and so are, but for the order
of floating-point sums, its loss and gradient.

A step begins when training takes its batch. A `DataLoader` with workers asks for batches long before that: w workers with a prefetch
factor of p ask w * p times at once, and from then on once for each batch that training takes. So `_Batches` counts what training
takes, and not what the loader asks for; position, weight and random state are always those of the batch that training has.
"""

import dataclasses
import gc
import math
import operator
import sys
import threading
import weakref

import numpy as np
import torch

from ddp_common.errors import Error
from ddp_common.ranks import reporting, stopping
from ddp_common.ranks.rendezvous import rank, world_size

injected = []  # functions of a sampler, called between its steps after all else; the fault lab's way in


class ElasticSampler:
    """Deals `length` samples in global batches of `batch_size`, of which each rank gets its share; a `DataLoader`'s `batch_sampler`.

    Any loop will do. `for epoch in sampler.epochs(n)` counts the epochs and goes on from the position that `load_state_dict` set, also
    in the middle of an epoch and at another world size. In a loop of your own, such as `for epoch in range(n)`, each pass is the next
    epoch. What could not be right is refused with an `Error` before it does harm; docs/loops.md has the table.

    Iterating yields lists of this rank's indices. Before each step torch's random state is set from (seed, epoch, step, rank):
    dropout is the same however often a run was interrupted. All of this holds for a `DataLoader` with workers as well.

    `epoch` and `step` are the position: `step` steps of `epoch` are taken. Shuffling costs 4 bytes per sample while an epoch begins
    (8 from 2^31 samples on), of which each rank keeps its share, and time: 10^8 samples take 0.4 GB and about 8 s, on every rank, once
    an epoch. `shuffle=False` costs neither.
    """

    def __init__(self, length, batch_size, *, seed=0, shuffle=True):
        if length < 1 or batch_size < 1:
            raise Error(
                f"ElasticSampler needs at least one sample and a batch size of at least 1, not {length} and {batch_size}."
            )
        self.length, self.batch_size, self.seed, self.shuffle = length, batch_size, seed, shuffle
        self.epoch, self.step = 0, 0
        self.between_steps = []  # functions to call before each step, when everything of the steps before it is done
        self.before_stopping = []  # and before leaving because a rank was told to
        self._forget_passes()

    def _forget_passes(self):
        self._weight = 1.0
        self._taker = None  # the thread that took the last batch
        self._last = (
            None  # the pass that took it; None when the position was set by other means since
        )
        self._moves = 0  # how often the position was set by other means, or another pass began
        self._loop = None  # the loop over `epochs` that is running
        self._epochs = None  # its number of epochs
        self._restored = (
            False  # the position is a checkpoint's, and nobody has said where the loop begins
        )
        self._followed = None  # what counts the steps while `follow` makes a loader's iterator
        self._name = object()  # of this sampler, among those that report where training is

    def __getstate__(self):
        """A copy, such as a data set takes along to a loader's workers, knows the position and nothing of what is running here."""
        names = ("length", "batch_size", "seed", "shuffle", "epoch", "step")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state):
        self.__dict__.update(state, between_steps=[], before_stopping=[])
        self._forget_passes()

    def __len__(self):
        """Steps in an epoch, the ragged last one included."""
        return -(-self.length // self.batch_size)

    def permutation(self, epoch):
        """The order of all samples in `epoch`: an int64 array of shape (length,), the same on every rank."""
        return np.asarray(self._order(epoch), dtype=np.int64)

    def _order(self, epoch):
        """The same as what costs least: a range, or an array of 4 bytes per sample where that is enough."""
        if not self.shuffle:
            return range(self.length)
        order = np.arange(self.length, dtype=np.int32 if self.length < 2**31 else np.int64)
        np.random.default_rng([self.seed, epoch]).shuffle(
            order
        )  # draws as `permutation` does, whatever the type
        return order

    def epochs(self, n):
        """Yield the numbers of the epochs, from the current position up to `n`. Each has one pass over the samples."""
        count = _whole_number(n)
        if count is None:
            raise Error(
                f"epochs takes the number of epochs of the whole run, 0 or more, not {n!r}."
            )
        return self._run_epochs(count)

    def _run_epochs(self, n):
        self._leave_for_epochs()
        loop = object()
        self._loop, self._epochs, self._restored = loop, n, False
        try:
            while self.epoch < n:
                yield self.epoch
                if self._loop is not loop:
                    raise Error(
                        "A second loop over epochs() of this sampler has begun within the first, which can't go on: they "
                        "would count the same epochs. Give each loop an ElasticSampler of its own."
                    )
                self._check_what_was_saved()
                self._move_to(self.epoch + 1, 0)
        finally:
            if self._loop is loop:
                self._loop, self._epochs = None, None

    def _leave_for_epochs(self):
        """Where a loop over `epochs` begins: where another one was left, or else with a whole epoch."""
        last = self._last
        if last is not None:
            goes_on = last.loop is not None and not last.is_a_look(len(self))
            if not goes_on:
                self._check_what_was_saved(leaving_the_epoch=False)
            self._move_to(last.epoch, last.step if goes_on else last.first)
            if last.step == len(self):
                self._move_to(last.epoch + 1, 0)
        elif self.step == len(self):
            self._move_to(self.epoch + 1, 0)

    def set_epoch(self, epoch):
        """Say which epoch the next pass is, as for PyTorch's `DistributedSampler`.

        Needed in one case: a loop such as `for epoch in range(sampler.epoch, n)` after a checkpoint was restored. A position within
        `epoch` stays. Raises `Error` for an epoch that is over, since the position of a run goes forward only.
        """
        wanted = _whole_number(epoch)
        if wanted is None:
            raise Error(f"set_epoch takes the number of an epoch, 0 or more, not {epoch!r}.")
        if self._loop is not None and wanted != self.epoch:
            raise Error(
                f"set_epoch({wanted}) in epoch {self.epoch} of epochs(): epochs() counts for itself. Leave set_epoch out."
            )
        last = self._last
        if (
            self._loop is not None
            or last is not None
            and last.is_running(len(self))
            and wanted == last.epoch
        ):
            return
        following, step = self._next_start()
        if wanted < following and self._restored:
            raise Error(RESTORED.format(epoch=following, step=step))
        if wanted < following:
            raise Error(
                f"set_epoch({wanted}): epoch {wanted} of this sampler is over, the next one is {following}. A run's position "
                "goes forward only, or its checkpoints would contradict each other. For a second training in the same process make "
                "a new ElasticSampler."
            )
        self._restored = False
        if last is not None or wanted != following:
            self._check_what_was_saved(leaving_the_epoch=last is not None and wanted != last.epoch)
            self._move_to(wanted, step if wanted == following else 0)

    def _move_to(self, epoch, step):
        """Set the position: a pass that is still running can't go on."""
        self.epoch, self.step, self._last = epoch, step, None
        self._moves += 1

    def __iter__(self):
        """Begin a pass: an iterator of this rank's indices (list of int) of each step left in the epoch.

        A rank whose share of a small last batch is empty gets one sample of it with weight 0, so that it takes part in the step.
        """
        if self._followed is not None:
            return self._followed.deal_all()
        self.epoch, self.step = (
            self._next_start()
        )  # already now: a loader's workers, made next, copy data sets that look at it
        return _Batches(self)

    def _next_start(self):
        """The position (epoch, step) at which a pass begins that begins now."""
        last = self._last
        if last is None:
            return self.epoch, self.step
        if last.is_a_look(len(self)):
            return last.epoch, last.first
        if self._loop is not None:
            return last.epoch, last.step  # refused as soon as something is asked of it
        return last.epoch + 1, 0

    def _check_may_begin(self):
        """Before a pass deals anything. Raises `Error` where it could not be what a person means."""
        last = self._last
        if self._loop is None and self._restored:
            raise Error(RESTORED.format(epoch=self.epoch, step=self.step))
        if self._loop is not None and last is not None and not last.is_a_look(len(self)):
            self._check_nothing_runs()
            raise Error(
                f"A second pass within epoch {last.epoch} of epochs(), of which {last.step} of {len(self)} steps are taken. epochs() "
                "counts one pass for each epoch, and a resume could not tell two apart. To train longer, ask for more epochs; to take "
                "fewer steps per epoch, leave the pass and let epochs() go on; to look at the data, or to evaluate, use another sampler "
                "(EvalSampler, or a second ElasticSampler)."
            )

    def _check_nothing_runs(self):
        last = self._last
        if last is None or last.is_a_look(len(self)) or not last.is_running(len(self)):
            return
        gc.collect()  # what only a cycle of references holds is not running
        if last.is_running(len(self)):
            raise Error(
                f"A pass over this sampler begins while another one is in step {last.step} of {len(self)} of epoch {last.epoch}. One "
                "sampler has one position and one weight. Let the first pass end (or let go of its iterator: del it), or give each "
                "loader an ElasticSampler of its own."
            )

    def _check_what_was_saved(self, leaving_the_epoch=True):
        """Before a pass is given up. Raises `Error` if a checkpoint has said that the run goes on with it."""
        last = self._last
        if last is None or last.saved_at is None or last.step == len(self):
            return
        if last.saved_at == last.step or leaving_the_epoch and last.is_a_look(len(self)):
            raise Error(
                f"A checkpoint was saved within the pass over epoch {last.epoch}, after step {last.step} of {len(self)}, and the pass was "
                "left right there. A run resumed from it would go on with that epoch, this one does not. Leave the loop first (and let "
                "go of an iterator made by hand: del it), then save."
            )

    def _start_pass(self, begun):
        """The first batch of a pass is taken."""
        if begun.moves != self._moves:
            raise Error(MOVED)
        self._check_nothing_runs()
        self._check_what_was_saved(
            leaving_the_epoch=self._last is not None and begun.epoch != self._last.epoch
        )
        self._last = begun
        self._moves += 1

    def _take(self, running):
        """Training takes the next batch of a pass."""
        if running.step == running.first:
            self._start_pass(running)
        elif self._last is not running:
            raise Error(MOVED)
        self.epoch, self.step, self._taker = running.epoch, running.step, threading.get_ident()
        self._pause()
        self._start_step()
        running.step = self.step

    def follow(self, loader):
        """Yield the batches of a `DataLoader` with this sampler. Not needed: iterate over the loader itself.

        It does not look into the loader, and is for a loader whose inner workings this version of the package does not know.
        """
        if loader.batch_sampler is not self:
            raise Error(
                "follow takes a DataLoader whose batch_sampler is this sampler: DataLoader(data, batch_sampler=sampler, num_workers=…)."
            )
        if not getattr(loader, "in_order", True):
            raise Error(UNORDERED)
        self.epoch, self.step = self._next_start()
        counter = _Batches(self)
        counter.begin()
        self._followed = counter
        try:
            batches = iter(loader)
        finally:
            self._followed = None
        while not counter.is_through():
            counter.take()
            yield next(batches)

    @property
    def weight(self):
        """Of the batch that training took last: multiply the loss by it, and the averaged gradient is that of the global batch."""
        last = self._last
        if self._taker is None:
            return self._weight
        if last is None or last.is_over(len(self)):
            raise Error(
                "sampler.weight was asked for when no batch of the sampler was in training: its pass is over. Batches that are kept and "
                "used again (list(loader), itertools.cycle(loader)) each need their own weight: read it when the batch is taken, or "
                "iterate over the loader anew for each epoch."
            )
        self._check_thread()
        last.was_weighed = True
        return self._weight

    def _check_thread(self):
        if self._taker not in (None, threading.get_ident()):
            raise Error(
                "Another thread takes this sampler's batches, ahead of training: weight and position are not those of the batch that is "
                "trained on. Iterate over the DataLoader in the thread that trains; num_workers loads ahead without harm."
            )

    @property
    def steps_done(self):
        """Steps since the beginning of the run, over all its epochs and attempts. An epoch that was left early counts whole."""
        return self.epoch * len(self) + self.step

    def _pause(self):
        """Between two steps, every rank's state belongs to the same position: the moment to save, and to leave."""
        for call in self.between_steps:
            call()
        for call in injected:
            call(self)
        if stopping.is_time_to_stop(self.steps_done + reporting.steps_of_others(self._name)):
            for call in self.before_stopping:
                call()
            raise stopping.Stopped

    def _start_step(self):
        size, mine, first = world_size(), rank(), self.step * self.batch_size
        batch_length = min(self.batch_size, self.length - first)
        self._weight = size * len(range(mine, batch_length, size)) / batch_length
        step_seed = np.random.SeedSequence(
            [self.seed, self.epoch, self.step, mine]
        ).generate_state(2, np.uint32)
        torch.manual_seed(int(step_seed[0]) << 31 ^ int(step_seed[1]))
        self.step += 1
        total = None if self._epochs is None else self._epochs * self.length
        reporting.set_position(
            self._name,
            epoch=self.epoch,
            step=self.steps_done,
            samples=self.epoch * self.length + first + batch_length,
            total_samples=total,
            epochs=self._epochs,
        )

    def state_dict(self):
        """The position: what the next step needs, and what proves that the samples are the same ones.

        A pass that was left early ('ended') is over, and the next step is the first of the next epoch; unless an exception is being
        handled, or a whole loop over `epochs` was left: then the run goes on where it was.
        """
        last, epoch, step, ended = self._last, self.epoch, self.step, False
        if last is not None:
            epoch, step = last.epoch, last.step
            if last.is_running(len(self)):
                self._check_thread()
            elif last.is_a_look(len(self)):
                step = last.first
            elif last.first < step < len(self):
                left_by_an_exception = _handled_exception() not in (None, last.handled)
                ended = last.loop is self._loop and not left_by_an_exception
            last.saved_at = None if ended else step
        return {"epoch": epoch, "step": step, "ended": ended, **self._deal()}

    def _deal(self):
        """What decides which samples a position means."""
        return {name: getattr(self, name) for name in ("seed", "length", "batch_size", "shuffle")}

    def load_state_dict(self, state):
        """Go on at a saved position. Raises `Error` when it was saved for other data, batches, order or another seed."""
        differing = [
            f"{key} {state[key]} there, {mine} here"
            for key, mine in self._deal().items()
            if state.get(key, mine) != mine
        ]  # 'shuffle' and 'ended' are not in old checkpoints
        if differing:
            raise Error(
                f"The checkpoint was written by another run: {'; '.join(differing)}. Resume with the settings in its config.json."
            )
        if state.get("ended", False) or state["step"] == len(self):
            self._move_to(state["epoch"] + 1, 0)
        else:
            self._move_to(state["epoch"], state["step"])
        self._restored = self.epoch > 0


def _whole_number(value):
    """`value` as an int if it is a whole number of at least 0, else None: a float is none, whatever its value."""
    try:
        number = operator.index(value)
    except TypeError:
        return None
    return number if number >= 0 else None


RESTORED = (
    "A checkpoint was restored (epoch {epoch}, step {step}), and a loop of your own begins: whether it counts from 0, and would train all "
    "epochs once more, cannot be seen from here. Write `for epoch in sampler.epochs(n)`, which goes on where the checkpoint was. Or say where "
    "your loop begins: `for epoch in range(sampler.epoch, n)` with `sampler.set_epoch(epoch)` as its first line."
)
MOVED = (
    "This pass over the sampler can't go on: since it began or took its last batch, the sampler's position was set anew, by another pass, "
    "load_state_dict, set_epoch or epochs(). Make a new iterator, iter(loader), after that; two loaders that take turns need an ElasticSampler each."
)
UNORDERED = (
    "A DataLoader with in_order=False hands out batches in any order: sampler.weight and the position would not be those of the batch that is "
    "trained on. Leave in_order out."
)
UNKNOWN_LOADER = (
    "This DataLoader ({kind}, torch {version}) asks for batches in a way that this version of ddp_common does not know: {what}. Position and "
    "weight could be those of another batch. Write `for batch in sampler.follow(loader)`, or use num_workers=0."
)


@dataclasses.dataclass(eq=False)
class _Pass:
    """What is known of a pass over a sampler, also after its iterator has gone."""

    epoch: int
    first: int  # the step at which it began
    step: int  # steps of the epoch that are taken
    loop: object  # the loop over `epochs` in which it began; None in a loop of the user's own
    moves: int  # the sampler's count of moves when it began
    holder: weakref.ref  # the iterator
    loader_iterator: weakref.ref | None  # who asks it, if that is a DataLoader
    handled: int | None  # the exception (id) that was being handled already when it began
    was_weighed: bool = False  # somebody has asked for a weight
    exhausted: bool = False
    saved_at: int | None = (
        None  # the step at which, as a checkpoint has it, the run goes on in this epoch
    )

    def is_held(self):
        """Whether anybody could still ask for a batch."""
        if self.holder() is None:
            return False
        if self.loader_iterator is None or not getattr(
            self.loader_iterator(), "_persistent_workers", False
        ):
            return True
        return (
            sys.getrefcount(self.loader_iterator()) > HELD_ONCE
        )  # the loader itself keeps such an iterator, for its next pass

    def is_running(self, steps):
        return not self.exhausted and self.step < steps and self.is_held()

    def is_over(self, steps):
        """Whether its last batch was taken and is done with. (Of an epoch of one step the batch may be kept: its weight stays right.)"""
        return steps > 1 and (self.exhausted or self.step == steps and not self.is_held())

    def is_a_look(self, steps):
        """`next(iter(loader))`, to see what a batch looks like: it does not count."""
        return (
            self.step - self.first <= 1
            and self.step < steps
            and not self.was_weighed
            and not self.exhausted
        )


class _Held:
    pass


_held = _Held()
_reference = weakref.ref(_held)
HELD_ONCE = sys.getrefcount(_reference())  # of an object that nothing but one attribute refers to


class _Batches:
    """The iterator of one pass: deals this rank's indices to whoever asks, and counts a step when training takes its batch."""

    def __init__(self, sampler):
        self.sampler = sampler
        self.now = None  # the _Pass, from the first question on
        self.asked = 0  # how often it was asked for a batch
        self.ahead = (
            0  # how many batches a loader with workers asks for before training takes the first
        )

    def __iter__(self):
        return self

    def __next__(self):
        if self.now is None:
            self.begin(sys._getframe(1))
        self.asked += 1
        if self.ahead and self._is_asked_ahead():
            return self._deal(self.asked - 1)
        if not self.is_through():
            self.take()
        elif not self.ahead:
            if self.sampler._last is not self.now:
                raise Error(MOVED)
            self.now.exhausted = True
        return self._deal(self.asked - 1)

    def begin(self, caller=None):
        """Fix where the pass begins, and find out who asks."""
        loader_iterator = self._look_at(caller) if caller is not None else None
        sampler = self.sampler
        sampler._check_may_begin()
        sampler.epoch, sampler.step = epoch, step = sampler._next_start()
        if step == len(sampler):
            raise Error(
                f"All {step} steps of epoch {epoch} are taken. Write `for epoch in sampler.epochs(n)`, which goes on with the next one."
            )
        self.now = _Pass(
            epoch,
            step,
            step,
            sampler._loop,
            sampler._moves,
            weakref.ref(self),
            None if loader_iterator is None else weakref.ref(loader_iterator),
            _handled_exception(),
        )
        self._share_out(sampler._order(epoch))

    def take(self):
        self.sampler._take(self.now)

    def is_through(self):
        return self.now.step == len(self.sampler)

    def deal_all(self):
        for number in range(len(self.sampler) - self.now.first):
            yield self._deal(number)

    def _look_at(self, caller):
        """The DataLoader's iterator that asks, None if it is somebody else. Raises `Error` for one that can't be counted."""
        if _module_of(caller) == "torch.utils.data.sampler":
            raise Error(
                "An ElasticSampler deals whole batches: DataLoader(data, batch_sampler=sampler), without batch_size and shuffle, not "
                "sampler=."
            )
        if not _is_of_a_loader(caller):
            while (caller := caller.f_back) is not None:
                if _is_of_a_loader(caller) and getattr(
                    caller.f_locals.get("self"), "_num_workers", 0
                ):
                    self._refuse(
                        caller.f_locals["self"],
                        "something stands between the loader and the sampler",
                    )
            return None
        loader_iterator = caller.f_locals.get("self")
        workers, prefetch = (
            getattr(loader_iterator, name, None) for name in ("_num_workers", "_prefetch_factor")
        )
        if workers == 0:
            return loader_iterator
        if not isinstance(workers, int) or not isinstance(prefetch, int):
            self._refuse(loader_iterator, "it does not say how far its workers are ahead")
        if not getattr(loader_iterator, "_in_order", True):
            raise Error(UNORDERED)
        self.ahead = workers * prefetch
        return loader_iterator

    def _is_asked_ahead(self):
        """Whether a loader with workers asks before training takes a batch: the first questions. Raises `Error` if its own count differs."""
        taken = max(0, self.asked - self.ahead)
        loader_iterator = self.now.loader_iterator()
        handed_out = getattr(loader_iterator, "_rcvd_idx", None)
        if handed_out != taken:
            self._refuse(
                loader_iterator,
                f"by its own count it hands out batch {handed_out}, by its questions batch {taken}",
            )
        return taken == 0

    def _refuse(self, loader_iterator, what):
        raise Error(
            UNKNOWN_LOADER.format(
                kind=type(loader_iterator).__name__, version=torch.__version__, what=what
            )
        )

    def _share_out(self, order):
        """Keep this rank's share of an epoch's order, of each whole batch a row; of a range nothing has to be kept."""
        size, mine, length = world_size(), rank(), self.sampler.batch_size
        if isinstance(order, range):
            self.shares = order
            return
        whole = len(order) // length * length
        batches = order[:whole].reshape(-1, length)
        self.shares = np.ascontiguousarray(
            batches[:, mine::size] if mine < length else batches[:, :1]
        )
        self.ragged = _share_of(order[whole:], mine, size).copy()

    def _deal(self, number):
        """This rank's indices of the batch that comes `number` steps after the first of this pass."""
        step = self.now.first + number
        if step >= len(self.sampler):
            raise StopIteration
        if isinstance(self.shares, range):
            batch = self.shares[step * self.sampler.batch_size :][: self.sampler.batch_size]
            return list(_share_of(batch, rank(), world_size()))
        return (self.shares[step] if step < len(self.shares) else self.ragged).tolist()


def _handled_exception():
    error = sys.exc_info()[1]
    return None if error is None else id(error)


def _share_of(batch, mine, size):
    share = batch[mine::size]
    return share if len(share) else batch[:1]


def _module_of(frame):
    return frame.f_globals.get("__name__") or ""


def _is_of_a_loader(frame):
    return _module_of(frame) == "torch.utils.data.dataloader" or _module_of(frame).startswith(
        "torchdata."
    )


class EvalSampler:
    """Deals every one of `length` samples to exactly one rank, in order, with no padding; a rank may get none.

    Iterating yields lists of at most `batch_size` indices. Evaluate on `model.module`: a forward pass of the DDP wrapper may wait
    for ranks that have fewer batches.
    """

    def __init__(self, length, batch_size):
        self.batch_size, self.indices = batch_size, range(rank(), length, world_size())

    def __len__(self):
        return -(-len(self.indices) // self.batch_size)

    def __iter__(self):
        for start in range(0, len(self.indices), self.batch_size):
            reporting.made_progress()
            yield list(self.indices[start : start + self.batch_size])


def split(length, fractions, *, seed=0):
    """Split `range(length)` at random into disjoint parts, the same on every rank.

    `fractions` are the shares of all parts but the first, which gets the rest: `split(100, [0.1])` returns (90 indices, 10 indices).
    Returns a list of sorted int64 arrays. Raises `Error` unless the shares are positive and leave something for the first part.
    """
    if not all(share > 0 for share in fractions) or not sum(fractions) < 1:
        raise Error(f"split takes positive fractions that sum to less than 1, not {fractions}.")
    order = np.random.default_rng(seed).permutation(length)
    first = 1 - sum(fractions)
    bounds = np.round(length * np.cumsum([first, *fractions])[:-1]).astype(int)
    return [np.sort(part) for part in np.split(order, bounds)]


def stratified_split(targets, fractions, *, seed=0):
    """Split the samples at random into disjoint parts, the same on every rank, each with every class in its proportion.

    `targets` is the class (int) of each sample; `fractions` are those of `split`. A class has at least one sample in each part.
    Returns a list of sorted int64 arrays. Raises `Error` for fractions that `split` refuses, and for a class that is too small.
    """
    split(1, fractions)
    targets, parts = np.asarray(targets), [[] for _ in range(len(fractions) + 1)]
    for label in np.unique(targets):
        members = np.random.default_rng([seed, label]).permutation(
            np.flatnonzero(targets == label)
        )
        counts = [max(1, math.floor(len(members) * share + 1e-9)) for share in fractions]
        if sum(counts) >= len(members):
            raise Error(
                f"Class {label} has only {len(members)} samples, too few for {len(parts)} parts in which it must not be missing. "
                "Add samples, or leave the class out."
            )
        for part, chosen in zip(
            parts, np.split(members, np.cumsum([len(members) - sum(counts), *counts])[:-1])
        ):
            part.append(chosen)
    return [np.sort(np.concatenate(part)) for part in parts]
