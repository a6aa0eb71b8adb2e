"""The exercises of `flights` judge rightly, held-out days stay out, tables are checked."""

import functools
from random import Random

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.metrics import average_precision_score
from tutorials_here import names_of

from tutorials import flights_tables
from tutorials.checks import flights as checks
from tutorials.checks.common import Wrong, judge

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


def in_order(order, begin=np.random.Generator.random, batch_type=np.array):
    """Batches in which the rows of a partition come as `order(rows, random)` has them."""

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


def halves(rows, random):
    half = rows // 2
    return [*random.permutation(half), *half + random.permutation(rows - half)]


def even_numbers_first(rows, random):
    return [*random.permutation(np.arange(0, rows, 2)), *random.permutation(np.arange(1, rows, 2))]


def from_one_state(lengths, batch_size, seed):
    """Partitions of one length get one permutation."""
    return in_order(lambda rows, _: np.random.default_rng(seed).permutation(rows))(
        lengths, batch_size, seed
    )


def from_one_list(lengths, batch_size, seed):
    """All rows have keys by their number; each partition sorts its first ones."""
    keys = np.random.default_rng(seed).random(max(lengths))
    return in_order(lambda rows, _: np.argsort(keys[:rows]))(lengths, batch_size, seed)


def batch_by_batch(lengths, batch_size, seed):
    """Without places: each batch takes the next rows of each partition, in proportion."""
    random = np.random.default_rng(seed)
    rows = [random.permutation(length) for length in lengths]
    total, pairs, before = sum(lengths), [], [0] * len(lengths)
    for end in [*range(batch_size, total, batch_size), total]:
        until = [round(end * length / total) for length in lengths]
        for n, (start, stop) in enumerate(zip(before, until)):
            pairs += [(n, row) for row in rows[n][start:stop]]
        before = until
    return [np.array(pairs[k : k + batch_size]) for k in range(0, total, batch_size)]


def sorted_by_place(lengths, batch_size, seed):
    """Tuples that sort themselves, from the random module."""
    random = Random(seed)
    rows = []
    for n, length in enumerate(lengths):
        order = list(range(length))
        random.shuffle(order)
        begin = random.random()
        rows += [((k + begin) / length, n, row) for k, row in enumerate(order)]
    rows = [pair for _, *pair in sorted(rows)]
    return [rows[k : k + batch_size] for k in range(0, len(rows), batch_size)]


RIGHT = in_order(permuted)


def split_arrays(lengths, batch_size, seed):
    """Batches as a generator of tensors, from arrays that were cut by numpy."""
    whole = np.concatenate(RIGHT(lengths, batch_size, seed))
    for batch in np.split(whole, range(batch_size, len(whole), batch_size)):
        yield torch.tensor(batch)


def as_frames(lengths, batch_size, seed):
    """Each batch a DataFrame, its rows shuffled once more."""
    random = np.random.default_rng(seed)
    names = ["partition", "row"]
    batches = RIGHT(lengths, batch_size, seed)
    return [pd.DataFrame(random.permutation(batch), columns=names) for batch in batches]


def row_and_partition(lengths, batch_size, seed):
    return [batch[:, ::-1] for batch in RIGHT(lengths, batch_size, seed)]


def rows_alone(lengths, batch_size, seed):
    return [batch[:, 1] for batch in RIGHT(lengths, batch_size, seed)]


def one_too_many(lengths, batch_size, seed):
    """Cut as often as batches fit, and once more: that one may be empty."""
    batches = RIGHT(lengths, batch_size, seed)
    return batches + [batches[0][:0]] if len(batches[-1]) == batch_size else batches


def in_equal_parts(lengths, batch_size, seed):
    """As many batches as it takes, all of about one size."""
    batches = RIGHT(lengths, batch_size, seed)
    return np.array_split(np.concatenate(batches), len(batches))


def drawn_with_replacement(rows, random):
    return random.integers(0, max(rows, 1), rows)


def one_permutation(lengths, batch_size, seed):
    dealt = np.random.default_rng(seed).permutation(np.concatenate(RIGHT(lengths, batch_size, 0)))
    return [dealt[start : start + batch_size] for start in range(0, len(dealt), batch_size)]


def test_batches_that_meet_the_criteria_are_right():
    for deal in (
        RIGHT,
        in_order(permuted, begin=lambda random: 0.5, batch_type=tuple),
        in_order(permuted, batch_type=lambda rows: np.array(rows, "float32")),
        in_order(lambda rows, random: np.argsort(random.random(rows))),
        batch_by_batch,
        sorted_by_place,
        split_arrays,
        as_frames,
    ):
        assert "not where the rows are" in checks.batches(deal)


@pytest.mark.parametrize(
    ("deal", "question"),
    [
        (in_order(lambda rows, _: range(rows)[::-1]), "What shuffles"),
        (in_order(lambda rows, _: np.argsort(np.arange(rows) % 7)), "What shuffles"),
        (
            in_order(lambda rows, random: np.roll(range(rows), random.integers(60))),
            "What shuffles",
        ),
        (in_order(halves), "Can each of them come at each place"),
        (in_order(even_numbers_first), "Can each of them come at each place"),
        (from_one_state, "the next permutation drawn"),
        (from_one_list, "the next permutation drawn"),
        (in_order(lambda rows, _: np.random.default_rng(0).permutation(rows)), "`seed` used"),
        (lambda lengths, size, seed: RIGHT(lengths, size, 0), "`seed` used"),
        (lambda lengths, size, seed: RIGHT(lengths, size, None), "Do they agree"),
        (lambda lengths, size, seed: RIGHT(lengths, size, seed)[:-1], "the last batch get"),
        (lambda lengths, size, seed: RIGHT(lengths, size + 1, seed), "do you cut"),
        (one_too_many, "do you cut"),
        (in_order(drawn_with_replacement), "more than once"),
        (row_and_partition, "rows and partitions begin to count"),
        (rows_alone, "Which two numbers name a row"),
        (one_permutation, "the middle row of each partition"),
    ],
)
def test_wrong_batches_get_a_question(deal, question):
    assert_asks(checks.batches, deal, question)


def test_a_batch_of_another_size_is_named():
    with pytest.raises(Wrong, match=r"batch \d+ of 3 has 2 rows"):
        checks._batch_sizes([np.zeros((rows, 2)) for rows in (3, 2, 3)], batch_size=3)
    with pytest.raises(Wrong, match=r"batch \d+ of \d+ has \d+ rows"):
        for _ in range(20):  # by chance, all may be full
            checks.batches(in_equal_parts)


# Features that leak


def features_with(first, last=0, when="landed", weather_of=1):
    """Features that use delays from `first` to `last` hours before, by the time `when`."""

    def features(flights, weather):
        arrived = flights.dropna(subset=["arr_delay"]).reset_index(drop=True)
        arrived["landed"] = flights_tables.arrival(arrived)
        delay = []
        for carrier, hour in zip(arrived["carrier"], arrived["time_hour"]):
            ago = hour - arrived[when]
            known = (ago > last * HOUR) & (ago <= first * HOUR) & (arrived["carrier"] == carrier)
            delay.append(arrived.loc[known, "arr_delay"].astype("float64").mean())
        rain = weather.set_index(["origin", "time_hour"])["precip"]
        keys = zip(arrived["origin"], arrived["time_hour"] - weather_of * HOUR)
        rain = [rain.get(key, np.nan) for key in keys]
        return pd.DataFrame(
            {"rain": rain, "delay of the carrier": delay, "distance": arrived["distance"]}
        )

    return features


HONEST = features_with(24)
JUST_BEFORE = features_with(1, when="time_hour")  # scheduled then: most are in the air
A_DAY_BEFORE = features_with(36, 12, when="time_hour")  # some are many hours late


def moves_the_weather(flights, weather):
    weather["time_hour"] += HOUR  # and again in the next call
    return features_with(24, weather_of=0)(flights, weather)


def by_index_of_all_flights(flights, weather):
    """The rows keep the numbers that they have among all flights."""
    arrived = flights[flights["arr_delay"].notna()]
    when, delay = flights_tables.arrival(flights), flights["arr_delay"].astype("float64")
    known = [
        (when < hour) & (when >= hour - 24 * HOUR) & (flights["carrier"] == carrier)
        for carrier, hour in zip(arrived["carrier"], arrived["time_hour"])
    ]
    before = weather.assign(hour_after=weather["time_hour"] + HOUR)[
        ["origin", "hour_after", "precip"]
    ]
    keys = {"left_on": ["origin", "time_hour"], "right_on": ["origin", "hour_after"]}
    return {
        "distance": arrived["distance"],
        "rain": arrived.merge(before, how="left", **keys)["precip"],
        "delay of the carrier": [delay[rows].mean() for rows in known],
    }


def with_older_weather(flights, weather):
    """Where the hour before is missing, `merge_asof` takes an older one."""
    answer = HONEST(flights, weather)
    arrived = flights.dropna(subset=["arr_delay"]).reset_index(drop=True)
    asked = arrived.assign(row=arrived.index).sort_values("time_hour")[
        ["row", "origin", "time_hour"]
    ]
    given = weather.assign(time_hour=weather["time_hour"] + HOUR).sort_values("time_hour")
    found = pd.merge_asof(asked, given, on="time_hour", by="origin").sort_values("row")
    return answer.assign(rain=found["precip"].to_numpy())


def test_features_that_know_no_more_than_had_arrived_are_right():
    for features in (
        HONEST,
        lambda *tables: HONEST(*tables).astype("float32").round(2),
        lambda *tables: HONEST(*tables).to_dict("list"),
        by_index_of_all_flights,
    ):
        assert "no leak was found" in checks.features(features)


@pytest.mark.parametrize(
    ("features", "question"),
    [
        (JUST_BEFORE, "known when the flight has arrived"),
        (A_DAY_BEFORE, "known when the flight has arrived"),
        (features_with(24, weather_of=0), "When was it measured"),
        (features_with(24, weather_of=2), "nothing older"),
        (features_with(12), "all that was known"),
        (features_with(10_000), "nothing older"),
        (moves_the_weather, "change the tables"),
        (lambda *tables: HONEST(*tables).fillna(0), "Nothing was known"),
        (with_older_weather, "Of which hour is this number"),
        (lambda *tables: HONEST(*tables)[["distance"]], "What do you return"),
        (lambda *tables: HONEST(*tables).head(9), "repeat or drop"),
    ],
)
def test_wrong_features_get_a_question(features, question):
    assert_asks(checks.features, features, question)


def test_the_test_of_leaks_goes_by_the_time_of_arrival(flights):
    tables = checks._tables(np.random.default_rng(0))
    leaks = functools.partial(flights_tables.leaks, hours=8)
    assert leaks(flights["my_features"], *tables) == []
    for features in (JUST_BEFORE, A_DAY_BEFORE):
        assert leaks(features, *tables) == ["delay of the carrier"]
    assert leaks(flights["features_with_leaks"], *tables) == ["delay of the carrier", "rain"]


def test_what_the_notebook_solves_is_right_and_what_it_leaves_open_is_not(flights, capsys):
    for check, name in (checks.batches, "my_batches"), (checks.features, "my_features"):
        judge(check, flights[name], timeout=240)
        judge(check, lambda *_: ..., timeout=240)
    said = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line[0] != " "]
    assert said == ["right:", "not", "right:", "not"]


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
