"""The exercises of `flights` judge rightly, held-out days stay out, tables are checked."""

import shutil

import numpy as np
import pandas as pd
import pytest
from tutorials_here import ROOT, make_run, names_of

import ddp_common as ddp
from tutorials.checks import flights as checks
from tutorials.checks.common import Wrong, judge

HOUR = pd.Timedelta(hours=1)


@pytest.fixture(scope="module")
def flights(tmp_path_factory):
    with names_of("flights", tmp_path_factory.mktemp("runs")) as names:
        yield names


def question_of(check, answer):
    """What a check asks of a wrong answer."""
    with pytest.raises(Wrong) as caught:
        check(answer)
    return str(caught.value).splitlines()[-1]


# A deal


def in_order(order, begin=np.random.Generator.random, batch_type=np.array):
    """A deal in which the rows of a partition come as `order(rows, random)` has them."""

    def deal(lengths, batch_size, seed):
        random = np.random.default_rng(seed)
        place = [(np.arange(rows) + begin(random)) / max(rows, 1) for rows in lengths]
        pairs = [(n, row) for n, rows in enumerate(lengths) for row in order(rows, random)]
        dealt = [pairs[n] for n in np.argsort(np.concatenate(place), kind="stable")]
        starts = range(0, len(dealt), batch_size)
        return [batch_type(dealt[start : start + batch_size]) for start in starts]

    return deal


def permuted(rows, random):
    return random.permutation(rows)


RIGHT = in_order(permuted)


@pytest.mark.parametrize(
    "deal",
    [
        RIGHT,
        in_order(permuted, begin=lambda random: 0.5, batch_type=tuple),
        in_order(permuted, batch_type=lambda rows: np.array(rows, "float32")),
    ],
)
def test_a_deal_that_meets_the_criteria_is_right(deal):
    assert "not where the rows are" in checks.deal(deal)


def one_permutation(lengths, batch_size, seed):
    dealt = np.random.default_rng(seed).permutation(np.concatenate(RIGHT(lengths, batch_size, 0)))
    return [dealt[start : start + batch_size] for start in range(0, len(dealt), batch_size)]


@pytest.mark.parametrize(
    ("deal", "question"),
    [
        (in_order(lambda rows, random: range(rows)), "What shuffles"),
        (in_order(lambda rows, random: range(rows)[::-1]), "What shuffles"),
        (in_order(lambda rows, random: np.argsort(np.arange(rows) % 7)), "What shuffles"),
        (
            in_order(lambda rows, random: np.roll(range(rows), random.integers(60))),
            "What shuffles",
        ),
        (in_order(lambda rows, random: np.random.default_rng(0).permutation(rows)), "`seed` used"),
        (lambda lengths, size, seed: RIGHT(lengths, size, 0), "`seed` used"),
        (lambda lengths, size, seed: RIGHT(lengths, size, None), "Do they agree"),
        (lambda lengths, size, seed: RIGHT(lengths, size, seed)[:-1], "the last batch get"),
        (lambda lengths, size, seed: RIGHT(lengths, size + 1, seed), "do you cut"),
        (one_permutation, "the middle row of each partition"),
    ],
)
def test_a_wrong_deal_gets_a_question(deal, question):
    assert question in question_of(checks.deal, deal)


# Features that leak


def features_with(knows_of, weather_of=1):
    """Features that use the delays of a flight's carrier: of those that `knows_of` says.

    It gets two columns of tables: the flights whose delays may be known, and the flights asked of.
    """

    def features(flights, weather):
        arrived = flights.dropna(subset=["arr_delay"])
        columns = {name: arrived[name].to_numpy() for name in ("carrier", "day", "time_hour")}
        columns["landed"] = checks._arrival(arrived).to_numpy()
        now = {name: values[:, None] for name, values in columns.items()}
        known = knows_of(columns, now) & (columns["carrier"] == now["carrier"])
        with np.errstate(invalid="ignore"):
            delay = known @ arrived["arr_delay"].to_numpy("float64") / known.sum(axis=1)
        rain = weather.set_index(["origin", "time_hour"])["precip"]
        keys = zip(arrived["origin"], arrived["time_hour"] - weather_of * HOUR)
        rain = [rain.get(key, np.nan) for key in keys]
        distance = arrived["distance"].to_numpy()
        return pd.DataFrame({"rain": rain, "delay of the carrier": delay, "distance": distance})

    return features


def landed(of, now, hours=24):
    ago = now["time_hour"] - of["landed"]
    return (ago > 0 * HOUR) & (ago <= hours * HOUR)


def scheduled_one_hour_before(of, now):
    return of["time_hour"] == now["time_hour"] - HOUR


def scheduled_the_day_before(of, now):
    return of["day"] == now["day"] - 1


HONEST = features_with(landed)


@pytest.mark.parametrize(
    "features",
    [
        HONEST,
        lambda *tables: HONEST(*tables).astype("float32").round(2),
        lambda *tables: HONEST(*tables).to_dict("list"),
    ],
)
def test_features_that_know_no_more_than_had_arrived_are_right(features):
    assert "no leak was found" in checks.features(features)


@pytest.mark.parametrize(
    ("features", "question"),
    [
        (features_with(scheduled_one_hour_before), "known when the flight has arrived"),
        (features_with(scheduled_the_day_before), "known when the flight has arrived"),
        (features_with(landed, weather_of=0), "When was it measured"),
        (features_with(landed, weather_of=2), "nothing older"),
        (features_with(lambda *both: landed(*both, hours=12)), "all that was known"),
        (lambda *tables: HONEST(*tables).fillna(0), "Nothing was known"),
        (lambda *tables: HONEST(*tables)[["distance"]], "What do you return"),
        (lambda *tables: HONEST(*tables).head(9), "repeat or drop"),
    ],
)
def test_wrong_features_get_a_question(features, question):
    assert question in question_of(checks.features, features)


def test_what_the_notebook_solves_is_right_and_what_it_leaves_open_is_told_in_words(
    flights, capsys
):
    for check, name in (checks.deal, "my_deal"), (checks.features, "my_features"):
        judge(check, flights[name], timeout=240)
        judge(check, lambda *_: ..., timeout=240)
    said = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line[0] != " "]
    assert said == ["right:", "not", "right:", "not"]


def test_the_test_of_leaks_goes_by_the_time_of_arrival(flights):
    leaks, tables = flights["leaks"], checks._tables(np.random.default_rng(0))
    assert leaks(flights["my_features"], *tables) == []
    for known in (scheduled_one_hour_before, scheduled_the_day_before):
        assert leaks(features_with(known), *tables) == ["delay of the carrier"]
    assert leaks(flights["features_with_leaks"], *tables) == ["delay of the carrier", "rain"]


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


def test_durations_add_the_hours_between_time_zones(flights):
    table = pd.DataFrame(
        {  # New York to Los Angeles, to Chicago, and over midnight to Puerto Rico
            "sched_dep_time": [900, 900, 2_330],
            "sched_arr_time": [1_210, 1_030, 410],
            "distance": [2_475, 733, 1_598],
        }
    )
    assert flights["duration"](table).tolist() == [370, 150, 280]


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
