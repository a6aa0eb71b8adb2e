"""The model of the time of a step: known parameters come back, what is unknown is said."""

import itertools

import numpy as np
import pytest

from ddp_common.teaching.step_time import fit

COMPUTE, BANDWIDTH, LATENCY = 2e-3, 1e9, 4e-4  # s per sample, bytes per s, s per bucket
ALL = [
    (ranks, batch, size, buckets)
    for ranks, batch, (size, buckets) in itertools.product(
        (1, 2, 4, 8), (32, 128), ((4e6, 1), (4e7, 3), (4e7, 12))
    )
]


def seconds(ranks, batch, size, buckets):
    """The model, written out once more."""
    exchange = 2 * (ranks - 1) / ranks * size / BANDWIDTH + LATENCY * buckets * (ranks > 1)
    return COMPUTE * batch / ranks + exchange


def fitted(points, noise=None):
    times = np.array([seconds(*point) for point in points])
    if noise is not None:
        times = times * noise
    ranks, batches, sizes, buckets = zip(*points)
    return fit(ranks, times, work=batches, size=sizes, messages=buckets)


def test_known_parameters_come_back():
    model = fitted(ALL)
    assert model.compute == pytest.approx(COMPUTE)
    assert model.transfer == pytest.approx(1 / BANDWIDTH)
    assert model.latency == pytest.approx(LATENCY)
    assert model.unknown == () and model.miss < 1e-6


def test_two_ranks_with_one_layout_of_buckets_do_not_tell_transfer_from_latency():
    points = [(ranks, 64, 4e7, 3) for ranks in (1, 2)]
    model = fitted(points)
    assert model.unknown == ("transfer", "latency")
    for point in points:
        assert model.seconds(*point) == pytest.approx(seconds(*point))
        assert model.span(*point) == pytest.approx((seconds(*point),) * 2)
