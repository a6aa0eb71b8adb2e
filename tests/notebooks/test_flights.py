"""The exercises of `flights` judge rightly, held-out days stay out, tables are checked."""

import shutil

import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import average_precision_score
from tutorials_here import ROOT, assert_judged, make_run, names_of

import ddp_common as ddp


@pytest.fixture(scope="module")
def flights(tmp_path_factory):
    with names_of("flights", tmp_path_factory.mktemp("runs")) as names:
        yield names


# A deal


def pairs_of(lengths):
    return np.concatenate(
        [np.stack([np.full(rows, n), np.arange(rows)], 1) for n, rows in enumerate(lengths)]
    )


def cut(pairs, batch_size):
    return [pairs[start : start + batch_size] for start in range(0, len(pairs), batch_size)]


def without_random_beginnings(lengths, batch_size, seed):
    random = np.random.default_rng(seed)
    place = [(np.arange(rows) + 0.5) / max(rows, 1) for rows in lengths]
    order = [random.permutation(rows) for rows in lengths]
    pairs = np.stack([pairs_of(lengths)[:, 0], np.concatenate(order)], 1)
    return cut(pairs[np.argsort(np.concatenate(place), kind="stable")], batch_size)


def one_permutation(lengths, batch_size, seed):
    return cut(np.random.default_rng(seed).permutation(pairs_of(lengths)), batch_size)


# Features that leak


def features_without_joins(flights, weather):
    """With maps in place of joins."""
    arrived = flights.dropna(subset=["arr_delay"]).reset_index(drop=True)
    hours = arrived["time_hour"] - pd.Timedelta(hours=1)
    there = weather.set_index(["origin", "time_hour"])
    before = there.reindex(pd.MultiIndex.from_arrays([arrived["origin"], hours]))
    delays = arrived.groupby(["day", "carrier"])["arr_delay"].mean().to_dict()
    yesterday = zip(arrived["day"] - 1, arrived["carrier"])
    return pd.DataFrame(
        {
            "distance": arrived["distance"],
            "evening": arrived["sched_dep_time"] >= 1_700,
            "rain": before["precip"].to_numpy(),
            "wind": before["wind_speed"].to_numpy(),
            "delay of the carrier": [delays.get(each, np.nan) for each in yesterday],
        }
    )


def weather_of_the_hour_itself(flights, weather):
    earlier = weather.assign(time_hour=weather["time_hour"] - pd.Timedelta(hours=1))
    return features_without_joins(flights, earlier)


# The order of tables


def by_a_heap(tables, ranks):
    import heapq

    def fullest(name):
        held = [0] * ranks
        for rows in sorted(tables[name])[::-1]:
            heapq.heapreplace(held, held[0] + rows)
        return max(held)

    return sorted(tables, key=fullest)


def by_largest_partition(tables, ranks):
    return sorted(tables, key=lambda name: max(tables[name]))


@pytest.mark.parametrize(
    ("check", "right", "wrong", "question"),
    [
        ("deal", without_random_beginnings, one_permutation, "the middle row of each partition"),
        ("features", features_without_joins, weather_of_the_hour_itself, "When was each measured"),
        ("order", by_a_heap, by_largest_partition, "Which rank do the others wait for"),
    ],
)
def test_the_exercises_of_flights_are_judged(flights, capsys, check, right, wrong, question):
    assert_judged(flights, capsys, f"check_{check}", right, wrong, question)


# What its conclusions rest on


def test_held_out_days_have_no_part_in_categories_and_scales(flights):
    days = flights["days_of"]
    assert not set(days["training"]) & set(days["validation"] + days["test"])
    assert not set(days["validation"]) & set(days["test"])
    assert sum(map(len, days.values())) == len(flights["days"])
    there = flights["training"].compute()
    assert set(there["date"]) == set(days["training"])
    for name in ("distance", "temp"):
        assert np.isclose(there[name].mean(), flights["mean"][name], rtol=1e-5)
    assert not there[flights["SCALED"]].isna().any(axis=None)


def test_average_precision_is_that_of_scikit_learn_also_with_ties_and_weights(flights):
    random = np.random.default_rng(0)
    for digits in (1, 6):
        late = (random.random(500) < 0.3).astype(float)
        score = np.round(random.random(500) + 0.2 * late, digits)
        weight = random.integers(0, 3, 500).astype(float)
        for given in (None, weight):
            ours = flights["average_precision"](late, score, given)
            assert np.isclose(ours, average_precision_score(late, score, sample_weight=given))


def test_days_are_drawn_as_a_whole(flights):
    weights = flights["draws_of_days"](np.repeat(np.arange(50), 7), draws=20)
    assert (weights.sum(axis=1) == 350).all() and weights.max() > 1
    assert (weights.reshape(20, 50, 7) == weights[:, ::7, None]).all()


# Tables of one's own


@pytest.fixture
def own(tmp_path):
    return shutil.copytree(ROOT / "data" / "flights", tmp_path / "mine")


def test_a_row_that_would_repeat_flights_is_refused(flights, own):
    path = own / "weather.parquet"
    table = pd.read_parquet(path)
    pd.concat([table, table.head(2)]).to_parquet(path, index=False)
    with pytest.raises(ddp.Error, match=r"weather.parquet has 2 row\(s\) whose origin and time_"):
        flights["read_side_tables"](own)


def test_too_few_days_are_refused_in_one_message(own, tmp_path):
    path = own / "flights.parquet"
    table = pd.read_parquet(path)
    table[(table["month"] == 1) & (table["day"] < 6)].to_parquet(path, index=False)
    done = make_run("flights", tmp_path / "runs", f"data={own}")
    assert done.returncode == 1
    assert "holds flights of 5 day(s), and 10 are needed" in done.stderr
    assert "Traceback" not in done.stderr and done.stderr.count("Error") == 1
