"""Which sample goes to which rank, now and after a restart.

Every rank computes the same deal from (seed, epoch) alone, so nothing is communicated. A global batch has a fixed size; rank r takes
every world_size-th index of it. The samples of a step are therefore the same for any number of ranks, and so are, but for the order
of floating-point sums, its loss and gradient.
"""

import math

import numpy as np
import torch

from ddp_common import reporting, stopping
from ddp_common.errors import Error
from ddp_common.rendezvous import rank, world_size


injected = []  # functions of a sampler, called between its steps after all else; the fault lab's way in


class ElasticSampler:
    """Deals `length` samples in global batches of `batch_size`, of which each rank gets its share; a `DataLoader`'s `batch_sampler`.

    `epochs(n)` yields the epochs still to run and iterating yields lists of this rank's indices. Both go on from the position that
    `load_state_dict` set, also in the middle of an epoch and at another world size. Before each step torch's random state is set
    from (seed, epoch, step, rank): dropout is the same however often a run was interrupted. A `DataLoader` with workers asks for
    batches before training is there: iterate over `sampler.follow(loader)` instead of `loader`, and the position is that of training.
    """

    def __init__(self, length, batch_size, *, seed=0, shuffle=True):
        if length < 1 or batch_size < 1:
            raise Error(f"ElasticSampler needs at least one sample and a batch size of at least 1, not {length} and {batch_size}.")
        self.length, self.batch_size, self.seed, self.shuffle = length, batch_size, seed, shuffle
        self.epoch, self.step, self.weight = 0, 0, 1.0
        self._epochs, self._followed_from = None, None
        self.between_steps = []  # functions to call before each step, when everything of the steps before it is done
        self.before_stopping = []  # and before leaving because a rank was told to

    def __len__(self):
        """Steps in an epoch, the ragged last one included."""
        return -(-self.length // self.batch_size)

    def permutation(self, epoch):
        """The order of all samples in `epoch`: an int64 array of shape (length,), the same on every rank."""
        if not self.shuffle:
            return np.arange(self.length)
        return np.random.default_rng([self.seed, epoch]).permutation(self.length)

    def epochs(self, n):
        """Yield the numbers of the epochs, from the current position up to `n`."""
        self._epochs = n
        if self.step == len(self):  # the checkpoint was written at the end of an epoch
            self.epoch, self.step = self.epoch + 1, 0
        while self.epoch < n:
            yield self.epoch
            self.epoch, self.step = self.epoch + 1, 0

    def __iter__(self):
        """Yield this rank's indices (list of int) of each step left in the current epoch.

        A rank whose share of a small last batch is empty gets one sample of it with weight 0, so that it takes part in the step.
        """
        order, ahead_from, self._followed_from = self.permutation(self.epoch), self._followed_from, None
        for step in range(self.step if ahead_from is None else ahead_from, len(self)):
            if ahead_from is None:
                self._pause()
                self._start_step()
            batch = order[step * self.batch_size:][:self.batch_size]
            share = batch[rank()::world_size()]
            yield (share if len(share) else batch[:1]).tolist()

    def follow(self, loader):
        """Yield the batches of a `DataLoader` with this sampler and any number of workers; a step counts when training takes its batch."""
        if loader.batch_sampler is not self:
            raise Error("follow takes a DataLoader whose batch_sampler is this sampler: DataLoader(data, batch_sampler=sampler, num_workers=…).")
        self._followed_from = self.step
        batches = iter(loader)
        while self.step < len(self):
            self._pause()
            self._start_step()
            yield next(batches)

    @property
    def steps_done(self):
        """Steps since the beginning of the run, over all its epochs and attempts."""
        return self.epoch * len(self) + self.step

    def _pause(self):
        """Between two steps, every rank's state belongs to the same position: the moment to save, and to leave."""
        for call in self.between_steps:
            call()
        for call in injected:
            call(self)
        if stopping.is_time_to_stop(self.steps_done):
            for call in self.before_stopping:
                call()
            raise stopping.Stopped

    def _start_step(self):
        size, mine, first = world_size(), rank(), self.step * self.batch_size
        batch_length = min(self.batch_size, self.length - first)
        self.weight = size * len(range(mine, batch_length, size)) / batch_length
        step_seed = np.random.SeedSequence([self.seed, self.epoch, self.step, mine]).generate_state(2, np.uint32)
        torch.manual_seed(int(step_seed[0]) << 31 ^ int(step_seed[1]))
        self.step += 1
        total = None if self._epochs is None else self._epochs * self.length
        reporting.set_position(epoch=self.epoch, step=self.steps_done, samples=self.epoch * self.length + first + batch_length,
                               total_samples=total, epochs=self._epochs)

    def state_dict(self):
        """The position: what the next step needs, and what proves that the samples are the same ones."""
        return {"epoch": self.epoch, "step": self.step, "seed": self.seed, "length": self.length, "batch_size": self.batch_size}

    def load_state_dict(self, state):
        """Go on at a saved position. Raises `Error` when it was saved for other data, batches or another seed."""
        mine = self.state_dict()
        differing = [f"{key} {state[key]} there, {mine[key]} here" for key in ("seed", "length", "batch_size") if state[key] != mine[key]]
        if differing:
            raise Error(f"The checkpoint was written by another run: {'; '.join(differing)}. Resume with the settings in its config.json.")
        self.epoch, self.step = state["epoch"], state["step"]


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
            yield list(self.indices[start:start + self.batch_size])


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
        members = np.random.default_rng([seed, label]).permutation(np.flatnonzero(targets == label))
        counts = [max(1, math.floor(len(members) * share + 1e-9)) for share in fractions]
        if sum(counts) >= len(members):
            raise Error(f"Class {label} has only {len(members)} samples, too few for {len(parts)} parts in which it must not be missing. "
                        "Add samples, or leave the class out.")
        for part, chosen in zip(parts, np.split(members, np.cumsum([len(members) - sum(counts), *counts])[:-1])):
            part.append(chosen)
    return [np.sort(np.concatenate(part)) for part in parts]
