"""Random loops over an ElasticSampler against the truth.

Who has which samples at which (epoch, step), at which weight, with which random state. The truth
is computed here from NumPy alone. DDP_EXAMPLES sets how many loops are tried.
"""

import dataclasses
import itertools
import multiprocessing
import os

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from ddp_common import ElasticSampler, Error, EvalSampler
from ddp_common.ranks import dealing, sampling

EXAMPLES = int(os.environ.get("DDP_EXAMPLES", "30"))
# Loader workers come from a forkserver: pytest's process has threads after other tests, and what
# is forked from it may wait for ever.
LOADER_WORKERS = multiprocessing.get_context("forkserver")
LOADER_WORKERS.set_forkserver_preload(["torch"])
quietly = dict(
    deadline=None,
    derandomize="DDP_EXAMPLES" not in os.environ,
    database=None,
    suppress_health_check=list(HealthCheck),
)


@dataclasses.dataclass(frozen=True)
class Loop:
    """A training program: what is dealt, how it is loaded, how each epoch is walked through."""

    length: int
    batch_size: int
    shuffle: bool
    rank: int
    ranks: int
    counts: str  # epochs, range, set_epoch
    walk: str  # for, enumerate, islice, zip, hand, follow, bare (no loader)
    workers: int
    prefetch: int
    persistent: bool
    new_loader: bool  # one for each epoch
    looks: bool  # next(iter(loader)) before the first epoch
    validates: bool  # in the middle of an epoch
    takes: tuple  # of each epoch: how many steps

    @property
    def steps(self):
        return -(-self.length // self.batch_size)

    def sampler(self):
        return ElasticSampler(self.length, self.batch_size, seed=5, shuffle=self.shuffle)


def loops(workers, walks=("for", "enumerate", "islice", "zip", "hand", "follow", "bare")):
    @st.composite
    def draw_loop(draw):
        length, batch_size = draw(st.integers(1, 30)), draw(st.integers(1, 12))
        steps, ranks = -(-length // batch_size), draw(st.integers(1, 4))
        takes = st.integers(1, steps) | st.just(steps)
        return Loop(
            length,
            batch_size,
            draw(st.booleans()),
            draw(st.integers(0, ranks - 1)),
            ranks,
            draw(st.sampled_from(["epochs", "range", "set_epoch"])),
            draw(st.sampled_from(walks)),
            draw(st.sampled_from(workers)),
            draw(st.integers(1, 3)),
            draw(st.booleans()),
            draw(st.booleans()),
            draw(st.booleans()),
            draw(st.booleans()),
            tuple(draw(st.lists(takes, min_size=1, max_size=3))),
        )

    return draw_loop()


def truth(loop):
    """The steps of the whole program.

    Each is (epoch, step, this rank's indices, weight, the first number drawn).
    """
    return [
        true_step(loop, epoch, step)
        for epoch, takes in enumerate(loop.takes)
        for step in range(takes)
    ]


def true_step(loop, epoch, step):
    order = (
        np.random.default_rng([5, epoch]).permutation(loop.length)
        if loop.shuffle
        else np.arange(loop.length)
    )
    batch = order[step * loop.batch_size : (step + 1) * loop.batch_size]
    mine = batch[loop.rank :: loop.ranks]
    words = np.random.SeedSequence([5, epoch, step, loop.rank]).generate_state(2, np.uint32)
    generator = torch.Generator().manual_seed(int(words[0]) << 31 ^ int(words[1]))
    drawn = torch.rand((), generator=generator).item()
    return (
        epoch,
        step,
        (mine if len(mine) else batch[:1]).tolist(),
        loop.ranks * len(mine) / len(batch),
        drawn,
    )


class Crash(Exception):
    pass


class Program:
    """Runs a Loop, and notes what it sees.

    It may stop where it saves: in a step, or between two epochs.
    """

    def __init__(self, loop, state=None, save=None, crash=True):
        self.loop, self.save, self.crash, self.seen, self.saved = loop, save, crash, [], None
        self.sampler = loop.sampler()
        self.restored = state is not None
        if self.restored:
            self.sampler.load_state_dict(state)
        self.loader = None

    def run(self):
        try:
            for epoch in self.epochs():
                if epoch < len(self.loop.takes):
                    self.walk_through(epoch)
                    self.save_at(epoch, "end")
        except Crash:
            pass
        return self.seen

    def epochs(self):
        number = len(self.loop.takes)
        if self.loop.looks and not self.restored:
            self.look()
        if self.loop.counts == "epochs":
            yield from self.sampler.epochs(number)
        elif self.loop.counts == "range" and not self.restored:
            yield from range(number)
        else:
            for epoch in range(self.sampler.epoch, number):
                self.sampler.set_epoch(epoch)
                yield epoch

    def look(self):
        next(iter(self.batches()))

    def batches(self):
        if self.loop.walk == "bare":
            return self.sampler
        if self.loader is None or self.loop.new_loader:
            workers = self.loop.workers
            options = {}
            if workers:
                options = {
                    "prefetch_factor": self.loop.prefetch,
                    "persistent_workers": self.loop.persistent,
                    "multiprocessing_context": LOADER_WORKERS,
                }
            self.loader = DataLoader(
                range(self.loop.length), batch_sampler=self.sampler, num_workers=workers, **options
            )
        return self.loader

    def walk_through(self, epoch):
        batches, takes = self.batches(), self.loop.takes[epoch]
        begun = self.sampler.step if self.restored and self.sampler.epoch == epoch else 0
        self.restored = False
        if begun >= takes:
            return
        if self.loop.walk == "hand":
            batches = iter(batches)
            for _ in range(takes - begun):
                self.step(epoch, next(batches))
        elif self.loop.walk == "islice":
            for batch in itertools.islice(batches, takes - begun):
                self.step(epoch, batch)
        else:

            def plainly():
                return ((each, None) for each in batches)

            walks = {
                "enumerate": lambda: ((each, number) for number, each in enumerate(batches)),
                "zip": lambda: zip(batches, itertools.count()),
                "follow": lambda: zip(self.sampler.follow(batches), itertools.count()),
            }
            walk = walks.get(self.loop.walk, plainly)
            for batch, _ in walk():
                self.step(epoch, batch)
                if self.sampler.step == takes:
                    break

    def step(self, epoch, batch):
        sampler = self.sampler
        drawn = torch.rand(()).item()
        if self.loop.validates and sampler.step == 2:
            for _ in DataLoader(range(4), batch_size=2):
                pass
            for _ in DataLoader(range(4), batch_sampler=EvalSampler(4, 2)):
                pass
        indices = batch if self.loop.walk == "bare" else batch.tolist()
        assert sampler.steps_done == epoch * self.loop.steps + sampler.step
        self.seen.append((sampler.epoch, sampler.step - 1, indices, sampler.weight, drawn))
        assert sampler.epoch == epoch
        self.save_at(epoch, sampler.step)

    def save_at(self, epoch, where):
        if self.save == (epoch, where):
            self.saved = self.sampler.state_dict()
            if self.crash:
                raise Crash


def equal(seen, expected):
    assert seen == expected


def as_rank(loop, monkeypatch):
    for module in (sampling, dealing):
        monkeypatch.setattr(module, "rank", lambda: loop.rank)
        monkeypatch.setattr(module, "world_size", lambda: loop.ranks)


def check(loop, data, resumed_with):
    with pytest.MonkeyPatch.context() as monkeypatch:
        as_rank(loop, monkeypatch)
        expected = truth(loop)
        if loop.looks and loop.steps == 1:  # a look at the only batch is a pass
            loop = dataclasses.replace(loop, looks=False)
        equal(Program(loop).run(), expected)
        epoch = data.draw(st.integers(0, len(loop.takes) - 1), label="saved in epoch")
        takes = loop.takes[epoch]
        where = data.draw(st.sampled_from([*range(1, takes + 1), "end"]), label="saved at")
        left_at_once = where == takes < loop.steps
        if left_at_once and epoch + 1 < len(loop.takes):
            with pytest.raises(Error, match="saved within the pass"):
                Program(loop, save=(epoch, where), crash=False).run()
        begun = Program(loop, save=(epoch, where))
        seen = begun.run()
        if left_at_once:
            return
        other = dataclasses.replace(loop, **data.draw(resumed_with, label="resumed with"))
        as_rank(other, monkeypatch)
        equal(seen, expected[: len(seen)])
        equal(Program(other, state=begun.saved).run(), truth(other)[len(seen) :])


@settings(max_examples=EXAMPLES * 4, **quietly)
@given(loops([0]), st.data())
def test_any_loop_sees_every_step_with_its_samples_weight_and_random_state_and_resumes_anywhere(
    loop, data
):
    others = st.fixed_dictionaries(
        {
            "ranks": st.just(4),
            "rank": st.integers(0, 3),
            "walk": st.sampled_from(
                ["for", "enumerate", "islice", "zip", "hand", "follow", "bare"]
            ),
            "counts": st.sampled_from(["epochs", "set_epoch"]),
        }
    )
    check(loop, data, others)


@settings(max_examples=max(1, EXAMPLES // 6), **quietly)
@given(loops([1, 2, 4], walks=("for", "enumerate", "islice", "zip", "hand", "follow")), st.data())
def test_so_does_a_loader_with_workers_that_ask_ahead(loop, data):
    others = st.fixed_dictionaries(
        {
            "workers": st.sampled_from([0, 2]),
            "prefetch": st.integers(1, 2),
            "walk": st.sampled_from(["for", "islice", "follow"]),
            "counts": st.sampled_from(["epochs", "set_epoch"]),
        }
    )
    check(loop, data, others)
