"""One iteration over an `ElasticSampler`: its indices, and how many of its batches were taken.

A `DataLoader` with workers asks for batches long before training takes the first: w workers with a
prefetch factor of p ask for w * p batches at once, then for one more each time training takes one.
So `PassIterator` counts what training takes, not what the loader asks for (`loaders` says how far
that is ahead). The two classes and the sampler know each other's private parts: they are one thing
in two files, the idea there, the counting here.
"""

import dataclasses
import sys
import weakref

from ddp_common.errors import Error
from ddp_common.ranks import loaders

MOVED = (
    "This pass over the sampler can't go on: since it began or took its last batch, the sampler's "
    "position was set anew, by another pass, load_state_dict, set_epoch or epochs(). Make a new "
    "iterator, iter(loader), after that; two loaders that take turns need an ElasticSampler each."
)


@dataclasses.dataclass(eq=False)
class Pass:
    """What is known of a pass over a sampler, even after its iterator has gone."""

    epoch: int
    first_step: int  # at which it began
    step: int  # steps of the epoch that have been taken
    epochs_loop: object  # the loop over `epochs` in which it began; None in the user's own loop
    generation: int  # the sampler's when it began
    iterator: weakref.ref
    loader_iterator: weakref.ref | None  # who asks for batches, if that is a DataLoader
    handled: int | None  # id of the exception that was already being handled when it began
    weight_was_read: bool = False
    exhausted: bool = False
    saved_at: int | None = None  # step at which a run resumed from a checkpoint would continue it

    def is_held(self):
        """Whether anybody could still ask for a batch."""
        if self.iterator() is None:
            return False
        if self.loader_iterator is None:
            return True
        is_persistent = getattr(self.loader_iterator(), "_persistent_workers", False)
        if not is_persistent:
            return True
        # The loader itself keeps such an iterator for its next pass: that alone does not count.
        return _count_references(self.loader_iterator) > HELD_ONCE

    def is_running(self, steps):
        return not self.exhausted and self.step < steps and self.is_held()

    def is_over(self, steps):
        """Whether its last batch was taken and training is done with it.

        The batch of an epoch of one step may be kept: its weight stays right.
        """
        if steps <= 1:
            return False
        return self.exhausted or (self.step == steps and not self.is_held())

    def is_peek(self, steps):
        """`next(iter(loader))`, to see what a batch looks like: it does not count as a pass."""
        took_at_most_one = self.step - self.first_step <= 1
        is_unfinished = self.step < steps and not self.exhausted
        return took_at_most_one and is_unfinished and not self.weight_was_read


def _count_references(reference):
    return sys.getrefcount(reference())


class _Held:
    pass


_held = _Held()
HELD_ONCE = _count_references(weakref.ref(_held))  # of an object with one reference to it


class PassIterator:
    """The iterator of one pass.

    Gives this rank's indices to whoever asks, and counts a step when training takes its batch.
    """

    def __init__(self, sampler):
        self.sampler = sampler
        self.current = None  # the `Pass`, from the first request on
        self.requests = 0  # how many batches it was asked for
        self.prefetch_depth = 0  # batches a loader requests before training takes the first
        self.deal = None  # which indices are this rank's; from the first request on

    def __iter__(self):
        return self

    def __next__(self):
        if self.current is None:
            self.begin(caller=sys._getframe(1))
        number = self.requests
        self.requests += 1
        if self.prefetch_depth and self._is_prefetch():
            return self._indices_of(number)
        if not self.is_through():
            self.take()
        elif not self.prefetch_depth:
            if self.sampler._last_pass is not self.current:
                raise Error(MOVED)
            self.current.exhausted = True
        return self._indices_of(number)

    def begin(self, caller=None):
        """Fix where the pass begins. `caller` is the frame that asks for the first batch."""
        loader_iterator = None
        if caller is not None:
            loader_iterator, self.prefetch_depth = loaders.find_loader(caller)
        sampler = self.sampler
        sampler._check_may_begin()
        epoch, step = sampler._next_start()
        sampler.epoch = epoch
        sampler.step = step
        if step == len(sampler):
            raise Error(
                f"All {step} steps of epoch {epoch} are taken. Write "
                "`for epoch in sampler.epochs(n)`, which goes on with the next one."
            )
        self.current = Pass(
            epoch=epoch,
            first_step=step,
            step=step,
            epochs_loop=sampler._epochs_loop,
            generation=sampler._generation,
            iterator=weakref.ref(self),
            loader_iterator=None if loader_iterator is None else weakref.ref(loader_iterator),
            handled=handled_exception(),
        )
        self.deal = sampler._deal(epoch)

    def take(self):
        self.sampler._take(self.current, self.deal)

    def is_through(self):
        return self.current.step == len(self.sampler)

    def _is_prefetch(self):
        """Whether a loader with workers asks before training takes its first batch.

        Raises `Error` if the loader's own count is another one.
        """
        taken = max(0, self.requests - self.prefetch_depth)
        loaders.check_batches_taken(self.current.loader_iterator(), taken)
        return taken == 0

    # The indices.

    def _indices_of(self, number):
        """This rank's indices of the batch that comes `number` steps after this pass began."""
        step = self.current.first_step + number
        if step >= len(self.sampler):
            raise StopIteration
        return self.deal.share(step)

    def indices_of_all_steps(self):
        for number in range(len(self.sampler) - self.current.first_step):
            yield self._indices_of(number)


def handled_exception():
    error = sys.exc_info()[1]
    return None if error is None else id(error)
