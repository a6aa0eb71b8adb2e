"""The exercises of `flights` judge rightly, held-out days stay out, tables are checked."""

import functools

import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import average_precision_score
from tutorials_here import names_of

from tests.mutants.answers.flights_my_features import WRONG
from tutorials import flights_tables
from tutorials.checks import flights as checks
from tutorials.checks.common import Wrong

HOUR = pd.Timedelta(hours=1)


@pytest.fixture(scope="module")
def flights(tmp_path_factory):
    with names_of("flights", tmp_path_factory.mktemp("runs")) as names:
        yield names


def assert_asks(check, answer, question):
    """A wrong answer gets this question."""
    with pytest.raises(Wrong) as caught:
        check(answer)
    assert question in str(caught.value).splitlines()[-1]


# A prediction


@pytest.mark.parametrize(
    "answer", ["too high", " Too High. ", "high", '"too high"', "far too high"]
)
def test_a_right_prediction_is_right_however_it_is_spelled(answer):
    assert ": right. Each rank counts half" in checks.without_weight(answer)


def test_each_wrong_prediction_gets_its_own_reply():
    replies = {checks.without_weight(answer) for answer in ("right", "too low")}
    assert len(replies) == 2 and all(": not right" in reply for reply in replies)


@pytest.mark.parametrize("answer", ["", 3, "high or low", "not right but too low", "biased"])
def test_what_is_not_one_option_is_asked_for_one(answer):
    assert "which one of right, too high, too low" in checks.without_weight(answer)


def test_no_prediction_is_no_wrong_one():
    assert "made no prediction" in checks.without_weight(None)


# Batches


def test_a_batch_of_another_size_is_named():
    with pytest.raises(Wrong, match=r"batch \d+ of 3 has 2 rows"):
        checks._batch_sizes([np.zeros((rows, 2)) for rows in (3, 2, 3)], batch_size=3)


# Features that leak


def test_the_test_of_leaks_goes_by_the_time_of_arrival(flights):
    tables = checks._tables(np.random.default_rng(0))
    leaks = functools.partial(flights_tables.leaks, hours=8)
    assert leaks(flights["my_features"], *tables) == []
    for name in ("just before", "a day before"):
        features, _ = WRONG[name]
        assert leaks(features, *tables) == ["delay of the carrier"]
    assert leaks(flights["features_with_leaks"], *tables) == ["delay of the carrier", "rain"]


# What its conclusions rest on


def test_held_out_days_have_no_part_in_categories_and_scales(flights):
    there, held_out = flights["training"].compute(), flights["test"].compute()
    days, others = set(there["date"]), set(held_out["date"])
    assert not days & others and len(days | others) == len(flights["days"])
    rows = flights["table"].compute()
    rows = rows[rows["date"].isin(days)]
    for name in ("distance", "temp"):
        assert np.isclose(rows[name].mean(), flights["mean"][name], rtol=1e-5)
    assert np.allclose(there[flights["SCALED"]].mean(), 0, atol=1e-3)
    assert set(flights["known"]["dest"]) == set(rows["dest"])


def test_a_missing_number_is_the_mean_and_an_unknown_category_has_the_code_0(flights):
    part = pd.DataFrame({name: [1.0] for name in flights["NUMBERS"]})
    part = part.assign(date=0, late=0, **dict.fromkeys(flights["CATEGORIES"], "nowhere"))
    part["temp"] = np.nan
    known, mean, spread = (flights[name] for name in ("known", "mean", "spread"))
    encoded = flights["encode"](part, known, mean, spread)
    assert encoded["temp scaled"].item() == 0 and (encoded[flights["CODES"]] == 0).all(axis=None)


def test_average_precision_is_that_of_scikit_learn_also_with_ties_and_weights():
    random = np.random.default_rng(0)
    late, guess = random.integers(0, 2, 500), random.integers(0, 20, 500) / 20
    weights = random.integers(0, 3, (4, 500)).astype("float32")
    ours = flights_tables.average_precision(late, guess, weights)
    theirs = [average_precision_score(late, guess, sample_weight=each) for each in weights]
    assert np.allclose(ours, theirs, rtol=1e-5)
    assert np.isclose(
        flights_tables.average_precision(late, guess)[0], average_precision_score(late, guess)
    )


def test_durations_add_the_hours_between_time_zones():
    table = pd.DataFrame(
        {  # New York to Los Angeles, to Chicago, and over midnight to Puerto Rico
            "sched_dep_time": [900, 900, 2_330],
            "sched_arr_time": [1_210, 1_030, 410],
            "distance": [2_475, 733, 1_598],
        }
    )
    assert flights_tables.duration(table).tolist() == [370, 150, 280]
