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

from ddp_common import DataLoader, ElasticSampler, EvalSampler, dealing, sampling

EXAMPLES = int(os.environ.get("DDP_EXAMPLES", "60"))
RANKS = st.integers(1, 4).flatmap(
    lambda ranks: st.tuples(st.integers(0, ranks - 1), st.just(ranks))
)
WALKS = st.sampled_from(["batches", "loader", "islice", "by hand"])


@dataclasses.dataclass(frozen=True)
class Loop:
    """A training program: what is dealt, to whom, how each epoch is walked through."""

    options: dict  # of the sampler
    rank: tuple  # (rank, number of ranks)
    walk: str
    epochs: int

    def sampler(self):
        return ElasticSampler(**self.options, seed=5)


@st.composite
def loops(draw):
    length, batch_size = draw(st.integers(1, 30)), draw(st.integers(1, 12))
    options = {
        "length": length,
        "batch_size": batch_size,
        "shuffle": draw(st.booleans()),
        "drop_last": length >= batch_size and draw(st.booleans()),
        "steps": draw(st.none() | st.integers(1, 4)),
    }
    return Loop(options, draw(RANKS), draw(WALKS), draw(st.integers(1, 3)))


def truth(loop):
    """Of each step of the whole program: epoch, step, indices, weight, what training draws."""
    rank, ranks = loop.rank
    length, batch_size = loop.options["length"], loop.options["batch_size"]
    steps = length // batch_size if loop.options["drop_last"] else -(-length // batch_size)
    steps = min(steps, loop.options["steps"] or steps)
    for epoch in range(loop.epochs):
        order = np.arange(length)
        if loop.options["shuffle"]:
            order = np.random.default_rng([5, epoch]).permutation(length)
        for step in range(steps):
            batch = order[step * batch_size : (step + 1) * batch_size]
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


def run(loop, sampler, crash_after=None):
    """What the program sees, step by step, until it crashes after so many steps."""
    seen = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        for module in (sampling, dealing):
            monkeypatch.setattr(module, "rank", lambda: loop.rank[0])
            monkeypatch.setattr(module, "world_size", lambda: loop.rank[1])
        try:
            for epoch in sampler.epochs(loop.epochs):
                for batch in walk_through(loop, sampler):
                    indices = batch if isinstance(batch, list) else batch.tolist()
                    seen.append(what_is_seen(sampler, indices))
                    if len(seen) == crash_after:
                        raise Crash
                state = sampler.state_dict()
                assert (state["epoch"], state["step"]) == (epoch + 1, 0)
        except Crash:
            pass
    return seen


def walk_through(loop, sampler):
    loader = DataLoader(range(loop.options["length"]), batch_sampler=sampler)
    if loop.walk == "batches":
        yield from sampler.batches()
    elif loop.walk == "loader":
        yield from loader
    elif loop.walk == "islice":
        yield from itertools.islice(loader, len(loader))
    else:
        batches = iter(loader)
        for _ in range(len(loader)):
            yield next(batches)


def what_is_seen(sampler, indices):
    drawn = torch.rand(()).item(), np.random.random(), random.random()
    for _ in EvalSampler(4, 2):
        pass
    assert sampler.steps_done == sampler.epoch * len(sampler) + sampler.step
    return sampler.epoch, sampler.step - 1, indices, sampler.weight, drawn


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize="DDP_EXAMPLES" not in os.environ,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(loops(), RANKS, WALKS, st.data())
def test_any_loop_sees_every_step_with_its_samples_weight_and_random_state_and_resumes_anywhere(
    loop, rank, walk, data
):
    expected = [*truth(loop)]
    assert run(loop, loop.sampler()) == expected
    steps = data.draw(st.integers(1, len(expected)), label="crashes after")
    crashed = loop.sampler()
    assert run(loop, crashed, crash_after=steps) == expected[:steps]

    other = dataclasses.replace(loop, rank=rank, walk=walk)
    resumed = loop.sampler()
    resumed.load_state_dict(crashed.state_dict())
    assert run(other, resumed) == [*truth(other)][steps:]
    assert run(loop, crashed) == expected[steps:]  # another loop over epochs() goes on too
