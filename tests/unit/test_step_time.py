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


def test_known_parameters_come_back_from_noisy_steps():
    noise = np.exp(0.005 * np.random.default_rng(0).standard_normal(len(ALL)))
    model = fitted(ALL, noise)
    assert model.compute == pytest.approx(COMPUTE, rel=0.05)
    assert model.transfer == pytest.approx(1 / BANDWIDTH, rel=0.2)
    assert model.latency == pytest.approx(LATENCY, rel=0.2)
    assert 0.002 < model.miss < 0.05


def test_steps_that_were_not_measured_are_predicted():
    model = fitted([point for point in ALL if point[0] <= 4])
    for point in ALL:
        assert model.seconds(*point) == pytest.approx(seconds(*point))


def test_two_ranks_with_several_numbers_of_buckets_tell_all_terms_apart():
    model = fitted([point for point in ALL if point[0] <= 2])
    assert model.unknown == () and model.latency == pytest.approx(LATENCY)


def test_two_ranks_with_one_layout_of_buckets_do_not_tell_transfer_from_latency():
    points = [(ranks, 64, 4e7, 3) for ranks in (1, 2)]
    model = fitted(points)
    assert model.unknown == ("transfer", "latency")
    for point in points:
        assert model.seconds(*point) == pytest.approx(seconds(*point))
        assert model.span(*point) == pytest.approx((seconds(*point),) * 2)


def test_beyond_what_was_measured_the_span_holds_every_way_to_share_out_the_unknown():
    model = fitted([(ranks, 64, 4e7, 3) for ranks in (1, 2)])
    exchange = seconds(2, 64, 4e7, 3) - seconds(1, 64, 4e7, 3) / 2
    least, most = model.span(8, 64, 4e7, 3)
    assert least == pytest.approx(COMPUTE * 64 / 8 + exchange)  # all is latency
    assert most == pytest.approx(COMPUTE * 64 / 8 + 1.75 * exchange)  # all is transfer
    assert least < seconds(8, 64, 4e7, 3) < most


def test_three_numbers_of_ranks_tell_all_terms_apart_without_sizes():
    times = [0.1, 0.05 + 0.01 + 0.004, 0.025 + 0.015 + 0.004]
    model = fit([1, 2, 4], times)
    assert (model.compute, model.transfer, model.latency) == pytest.approx((0.1, 0.01, 0.004))
    assert model.unknown == () and model.seconds(8) == pytest.approx(0.0125 + 0.0175 + 0.004)


def test_no_term_is_negative_where_two_ranks_are_more_than_twice_as_fast():
    model = fit([1, 2, 4], [0.1, 0.04, 0.015])
    assert min(model.compute, model.transfer, model.latency) >= 0
    assert model.miss > 0.05, "the model cannot describe this, and must say so"


def test_computing_that_every_rank_repeats_passes_for_transfer_and_is_predicted_rightly():
    shared, repeated = 0.08, 0.02
    model = fit([1, 2, 4], [shared / ranks + repeated for ranks in (1, 2, 4)])
    assert (model.compute, model.transfer) == pytest.approx((0.1, repeated / 2))
    assert model.latency == pytest.approx(0, abs=1e-9)
    assert model.seconds(8) == pytest.approx(shared / 8 + repeated)


def test_ranks_that_do_not_average_tell_repeated_computing_from_transfer():
    alone, apart, exchange = 0.1, 0.07, 0.01
    repeated = 2 * apart / alone
    model = fit(
        [1, 2, 2, 2],
        [alone, apart, apart + exchange + 0.002, apart + exchange + 0.008],
        work=[1, repeated, repeated, repeated],
        size=[0, 0, 1, 1],
        messages=[0, 0, 2, 8],
    )
    assert (model.compute, model.transfer, model.latency) == pytest.approx((0.1, 0.01, 0.001))


@pytest.mark.parametrize(
    "times, dominant",
    [
        ([1.0, 0.51, 0.26], "compute"),
        ([0.1, 0.05 + 1.0, 0.025 + 1.5], "transfer"),
        ([0.1, 0.05 + 1.0, 0.025 + 1.0], "latency"),
    ],
)
def test_the_term_that_takes_most_of_a_step_is_named(times, dominant):
    assert fit([1, 2, 4], times).dominant(8) == dominant


def test_terms_that_are_not_told_apart_are_named_together():
    assert fit([1, 2], [0.1, 0.5]).dominant(8) == "transfer + latency"


@pytest.mark.parametrize(
    "ranks, times, said",
    [
        ([], [], "at least one"),
        ([1, 2], [0.1], "one entry for each"),
        ([1, 2], [0.1, 0.0], "took some time"),
        ([1, 2], [0.1, float("nan")], "took some time"),
        ([0, 2], [0.1, 0.1], "1 rank or more"),
        ([1, 1], [0.1, 0.1], "several ranks"),
    ],
)
def test_what_cannot_be_fitted_is_refused(ranks, times, said):
    with pytest.raises(ValueError, match=said):
        fit(ranks, times)
