"""Random loops over an ElasticSampler against the truth.

Who has which samples at which (epoch, step), at which weight, with which random state. The truth
is computed here from NumPy alone. DDP_EXAMPLES sets how many loops are tried.
"""

import dataclasses
import itertools
import os
import random

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ddp_common import DataLoader, ElasticSampler, EvalSampler
from ddp_common.ranks import dealing, sampling

EXAMPLES = int(os.environ.get("DDP_EXAMPLES", "60"))
RANKS = st.integers(1, 4).flatmap(
    lambda ranks: st.tuples(st.integers(0, ranks - 1), st.just(ranks))
)
COUNTS = ["epochs", "range", "set_epoch"]
WALKS = ["for", "islice", "hand", "loader", "torchs_loader"]


@dataclasses.dataclass(frozen=True)
class Loop:
    """A training program: what is dealt, to whom, how each epoch is walked through."""

    length: int
    batch_size: int
    shuffle: bool
    drop_last: bool
    rank: tuple  # (rank, number of ranks)
    counts: str
    walk: str
    looks: bool  # next(iter(loader)) before the first epoch
    takes: tuple  # of each epoch: how many steps


@st.composite
def loops(draw):
    length, batch_size = draw(st.integers(1, 30)), draw(st.integers(1, 12))
    drop_last = length >= batch_size and draw(st.booleans())
    steps = length // batch_size if drop_last else -(-length // batch_size)
    takes = st.lists(st.integers(1, steps) | st.just(steps), min_size=1, max_size=3)
    looks = steps > 1 and draw(st.booleans())  # a look at the only batch is a pass
    choices = draw(RANKS), draw(st.sampled_from(COUNTS)), draw(st.sampled_from(WALKS))
    return Loop(
        length, batch_size, draw(st.booleans()), drop_last, *choices, looks, tuple(draw(takes))
    )


def truth(loop):
    """Of each step of the whole program: epoch, step, indices, weight, what training draws."""
    rank, ranks = loop.rank
    for epoch, takes in enumerate(loop.takes):
        order = np.arange(loop.length)
        if loop.shuffle:
            order = np.random.default_rng([5, epoch]).permutation(loop.length)
        for step in range(takes):
            batch = order[step * loop.batch_size : (step + 1) * loop.batch_size]
            mine = batch[rank::ranks]
            entropy = np.random.SeedSequence([5, epoch, step, rank])
            words = [int(word) for word in entropy.generate_state(4, np.uint32)]
            generator = torch.Generator().manual_seed(words[0] << 31 ^ words[1])
            drawn = (
                torch.rand((), generator=generator).item(),
                np.random.RandomState(words[2]).random(),
                random.Random(words[3]).random(),
            )
            indices = (mine if len(mine) else batch[:1]).tolist()
            yield epoch, step, indices, ranks * len(mine) / len(batch), drawn


class Crash(Exception):
    pass


class Program:
    """Runs a Loop and notes what it sees; it may save and crash in a step or after an epoch."""

    def __init__(self, loop, state=None, crash_at=None):
        self.loop = loop
        self.crash_at = crash_at
        self.seen = []
        self.saved = None
        self.is_resumed = state is not None
        self.sampler = ElasticSampler(
            loop.length, loop.batch_size, seed=5, shuffle=loop.shuffle, drop_last=loop.drop_last
        )
        if self.is_resumed:
            self.sampler.load_state_dict(state)
        self.batches = self.sampler
        if "loader" in loop.walk:
            kind = DataLoader if loop.walk == "loader" else torch.utils.data.DataLoader
            self.batches = kind(range(loop.length), batch_sampler=self.sampler)

    def run(self):
        with pytest.MonkeyPatch.context() as monkeypatch:
            for module in (sampling, dealing):
                monkeypatch.setattr(module, "rank", lambda: self.loop.rank[0])
                monkeypatch.setattr(module, "world_size", lambda: self.loop.rank[1])
            try:
                for epoch in self.epochs():
                    self.walk_through(epoch)
                    self.save_at(epoch, "end")
            except Crash:
                pass
        return self.seen

    def epochs(self):
        n = len(self.loop.takes)
        if self.loop.looks and not self.is_resumed:
            next(iter(self.batches))
        if self.loop.counts == "epochs":
            yield from self.sampler.epochs(n)
        elif self.loop.counts == "range" and not self.is_resumed:
            yield from range(n)
        else:
            for epoch in range(self.sampler.epoch, n):
                self.sampler.set_epoch(epoch)
                yield epoch

    def walk_through(self, epoch):
        begun = self.sampler.step if self.is_resumed and self.sampler.epoch == epoch else 0
        self.is_resumed = False
        takes = self.loop.takes[epoch] - begun
        if takes <= 0:
            return
        if self.loop.walk == "hand":
            batches = iter(self.batches)
            for _ in range(takes):
                self.step(epoch, next(batches))
        elif self.loop.walk == "islice":
            for batch in itertools.islice(self.batches, takes):
                self.step(epoch, batch)
        else:
            for number, batch in enumerate(self.batches, 1):
                self.step(epoch, batch)
                if number == takes:
                    break

    def step(self, epoch, batch):
        sampler = self.sampler
        drawn = torch.rand(()).item(), np.random.random(), random.random()
        for _ in EvalSampler(4, 2):
            pass
        assert sampler.steps_done == epoch * len(sampler) + sampler.step
        indices = batch if isinstance(batch, list) else batch.tolist()
        self.seen.append((sampler.epoch, sampler.step - 1, indices, sampler.weight, drawn))
        self.save_at(epoch, sampler.step)

    def save_at(self, epoch, where):
        if self.crash_at == (epoch, where):
            self.saved = self.sampler.state_dict()
            raise Crash


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize="DDP_EXAMPLES" not in os.environ,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(loops(), RANKS, st.sampled_from(["epochs", "set_epoch"]), st.sampled_from(WALKS), st.data())
def test_any_loop_sees_every_step_with_its_samples_weight_and_random_state_and_resumes_anywhere(
    loop, rank, counts, walk, data
):
    expected = [*truth(loop)]
    assert Program(loop).run() == expected
    epoch = data.draw(st.integers(0, len(loop.takes) - 1), label="saved in epoch")
    takes = loop.takes[epoch]
    where = data.draw(st.sampled_from([*range(1, takes + 1), "end"]), label="saved at")
    begun = Program(loop, crash_at=(epoch, where))
    seen = begun.run()
    assert seen == expected[: len(seen)]
    steps = len(begun.sampler)
    if where == takes < steps:  # a resume would go on with this epoch, which the loop leaves
        return
    other = dataclasses.replace(loop, rank=rank, counts=counts, walk=walk)
    assert Program(other, state=begun.saved).run() == [*truth(other)][len(seen) :]
