"""What the notebook `flights` teaches by functions.

Its exercises judge rightly, its test for leaks finds them, its data are checked.
"""

import re
import shutil
import subprocess
import sys

import nbformat
import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import average_precision_score
from tutorials_here import ROOT, clean_environment, names_of, script

import ddp_common as ddp


@pytest.fixture(scope="module")
def flights(tmp_path_factory):
    with names_of("flights", tmp_path_factory.mktemp("runs")) as names:
        yield names


CHECKS = {"check_deal": "my_deal", "check_features": "my_features", "check_order": "my_order"}


@pytest.mark.parametrize(("check", "solution"), CHECKS.items())
def test_the_checks_of_flights_accept_the_solutions(flights, capsys, check, solution):
    assert flights[check](flights[solution])
    assert capsys.readouterr().out.startswith("right")


@pytest.mark.parametrize("check", CHECKS)
def test_an_answer_to_flights_that_raises_is_shown_in_words(flights, capsys, check):
    ddp.judge(flights[check], flights["crashes"])
    said = capsys.readouterr().out
    assert said.startswith("not yet") and "ZeroDivisionError: division by zero" in said


@pytest.mark.parametrize("check", CHECKS)
def test_an_answer_to_flights_that_is_not_written_yet_is_refused_once(flights, capsys, check):
    ddp.judge(flights[check], lambda *given, **named: None)
    assert capsys.readouterr().out.count("not yet") == 1


def refused(flights, capsys, check, wrong):
    """What is said of a wrong answer."""
    ddp.judge(flights[check], wrong)
    said = capsys.readouterr().out
    assert said.count("not yet") == 1 and "right:" not in said, said
    assert "yours" in said and "expected" in said and "?" in said, said
    return said


# Exercise 1


def rows_of(lengths):
    return np.concatenate(
        [np.stack([np.full(rows, n), np.arange(rows)], 1) for n, rows in enumerate(lengths)]
    )


def cut(pairs, batch_size):
    return [pairs[start : start + batch_size] for start in range(0, len(pairs), batch_size)]


def one_permutation(flights, lengths, batch_size, seed):
    pairs = rows_of(lengths)
    return cut(np.random.default_rng(seed).permutation(pairs), batch_size)


def partition_after_partition(flights, lengths, batch_size, seed):
    random = np.random.default_rng(seed)
    pairs = rows_of(lengths)
    order = np.concatenate([random.permutation(rows) for rows in lengths])
    return cut(np.stack([pairs[:, 0], order], 1), batch_size)


def in_turn(flights, lengths, batch_size, seed):
    """A row of each partition, again and again; short ones are used up early."""
    pairs = rows_of(lengths)
    random = np.random.default_rng(seed)
    shuffled = np.concatenate([random.permutation(rows) for rows in lengths])
    turn = pairs[:, 1]
    return cut(np.stack([pairs[:, 0], shuffled], 1)[np.argsort(turn, kind="stable")], batch_size)


def not_shuffled(flights, lengths, batch_size, seed):
    pairs = rows_of(lengths)
    place = np.concatenate(flights["places"](lengths, seed))
    return cut(pairs[np.argsort(place, kind="stable")], batch_size)


def last_rows_dropped(flights, lengths, batch_size, seed):
    # a table whose rows fill its batches would have nothing to drop
    deal = flights["my_deal"](lengths, batch_size, seed)
    return [batch[: batch_size - 1] for batch in deal]


def last_batch_dropped(flights, lengths, batch_size, seed):
    return flights["my_deal"](lengths, batch_size, seed)[:-1]


def padded(flights, lengths, batch_size, seed):
    deal = flights["my_deal"](lengths, batch_size, seed)
    return [*deal, deal[0][:1]]


def no_seed(flights, lengths, batch_size, seed):
    return flights["my_deal"](lengths, batch_size, None)


def always_the_same_seed(flights, lengths, batch_size, seed):
    return flights["my_deal"](lengths, batch_size, 0)


def numpys_global_state(flights, lengths, batch_size, seed):
    return flights["my_deal"](lengths, batch_size, np.random.randint(10**6))


def row_numbers_alone(flights, lengths, batch_size, seed):
    return [batch[:, 1] for batch in flights["my_deal"](lengths, batch_size, seed)]


def batches_per_partition(flights, lengths, batch_size, seed):
    """As if every rank cut its own partition into batches of its own."""
    random = np.random.default_rng(seed)
    deal = []
    for n, rows in enumerate(lengths):
        order = random.permutation(rows)
        deal += cut(np.stack([np.full(rows, n), order], 1), batch_size)
    return deal


@pytest.mark.parametrize(
    "wrong",
    [
        one_permutation,
        partition_after_partition,
        in_turn,
        not_shuffled,
        last_rows_dropped,
        last_batch_dropped,
        padded,
        no_seed,
        always_the_same_seed,
        numpys_global_state,
        row_numbers_alone,
        batches_per_partition,
    ],
)
def test_a_wrong_deal_is_refused(flights, capsys, wrong):
    refused(flights, capsys, "check_deal", lambda *given: wrong(flights, *given))


def test_a_deal_with_random_beginnings_left_out_is_accepted(flights, capsys):
    """The shares are right all the same: the check asks for what was asked for."""

    def deal(lengths, batch_size, seed):
        random = np.random.default_rng(seed)
        place = [(np.arange(rows) + 0.5) / max(rows, 1) for rows in lengths]
        order = [random.permutation(rows) for rows in lengths]
        pairs = np.stack([rows_of(lengths)[:, 0], np.concatenate(order)], 1)
        return cut(pairs[np.argsort(np.concatenate(place), kind="stable")], batch_size)

    assert flights["check_deal"](deal)


# Exercise 2


def the_original(flights, month, weather):
    return flights["features_with_leaks"](month, weather)


def the_weather_alone_repaired(flights, month, weather):
    leaky, right = flights["features_with_leaks"], flights["my_features"]
    delay = leaky(month, weather)["delay of the carrier"]
    return right(month, weather).assign(**{"delay of the carrier": delay})


def the_delay_alone_repaired(flights, month, weather):
    leaky, right = flights["features_with_leaks"], flights["my_features"]
    delay = right(month, weather)["delay of the carrier"]
    return leaky(month, weather).assign(**{"delay of the carrier": delay})


def one_hour_the_wrong_way(flights, month, weather):
    after = weather.assign(time_hour=weather["time_hour"] - pd.Timedelta(hours=2))
    return flights["my_features"](month, after)


def suspicious_columns_dropped(flights, month, weather):
    return flights["my_features"](month, weather)[["distance", "evening"]]


def suspicious_columns_set_to_0(flights, month, weather):
    right = flights["my_features"](month, weather)
    return right.assign(rain=0.0, wind=0.0, **{"delay of the carrier": 0.0})


def weather_of_two_hours_before(flights, month, weather):
    older = weather.assign(time_hour=weather["time_hour"] + pd.Timedelta(hours=1))
    return flights["my_features"](month, older)


def mean_over_all_days(flights, month, weather):
    arrived = month.dropna(subset=["arr_delay"])
    mean = arrived.groupby("carrier")["arr_delay"].transform("mean").to_numpy("float64")
    return flights["my_features"](month, weather).assign(**{"delay of the carrier": mean})


def rows_lost_in_a_join(flights, month, weather):
    return flights["my_features"](month, weather).dropna()


def a_list(flights, month, weather):
    return list(flights["my_features"](month, weather))


@pytest.mark.parametrize(
    "wrong",
    [
        the_original,
        the_weather_alone_repaired,
        the_delay_alone_repaired,
        one_hour_the_wrong_way,
        suspicious_columns_dropped,
        suspicious_columns_set_to_0,
        weather_of_two_hours_before,
        mean_over_all_days,
        rows_lost_in_a_join,
        a_list,
    ],
)
def test_features_that_leak_or_give_knowledge_away_are_refused(flights, capsys, wrong):
    refused(flights, capsys, "check_features", lambda *given: wrong(flights, *given))


# Exercise 3


def by_largest_partition(tables, ranks):
    return sorted(tables, key=lambda name: max(tables[name]))


def by_largest_partition_and_fair_share(tables, ranks):
    """Right where partitions are many."""
    return sorted(tables, key=lambda name: max(max(tables[name]), sum(tables[name]) / ranks))


def by_number_of_partitions(tables, ranks):
    return sorted(tables, key=lambda name: -len(tables[name]))


def by_mean_length(tables, ranks):
    return sorted(tables, key=lambda name: np.mean(tables[name]))


def slowest_first(tables, ranks):
    from ddp_common.client.balance import assign

    def fullest(name):
        goes_to = assign(tables[name], [0] * len(tables[name]), ranks)
        return np.bincount(goes_to, weights=tables[name]).max()

    return sorted(tables, key=fullest, reverse=True)


@pytest.mark.parametrize(
    "wrong",
    [
        by_largest_partition,
        by_largest_partition_and_fair_share,
        by_number_of_partitions,
        by_mean_length,
        slowest_first,
    ],
)
def test_a_wrong_order_of_tables_is_refused(flights, capsys, wrong):
    refused(flights, capsys, "check_order", wrong)


def test_what_the_exercise_says_of_the_fullest_rank_is_what_a_launch_makes_of_it(flights):
    from ddp_common.client.balance import assign

    random = np.random.default_rng(0)
    for ranks in (2, 3, 4, 5):
        said = set()
        for lengths in flights["some_tables"](ranks, random).values():
            goes_to = assign(lengths, [0] * len(lengths), ranks)
            fullest = np.bincount(goes_to, weights=lengths, minlength=ranks).max()
            expected = flights["rows_of_fullest"](lengths, ranks)
            assert np.isclose(fullest, expected, rtol=0.1)
            said.add(round(expected / sum(lengths), 2))
        assert len(said) == 4, "no two of them take the same time"


# The museum


@pytest.mark.parametrize("month", [0, 6])
def test_the_features_of_flights_know_no_future_and_the_departure_delay_is_caught(flights, month):
    few, weather = flights["some_days"](month, count=2)
    check = flights["check_known_at_departure"]
    check(lambda *tables: flights["prepare"](*tables, flights["planes"]), few, weather)
    with pytest.raises(AssertionError, match="dep_delay: changes with the future"):
        check(flights["with_departure_delay"], few, weather)


def test_the_weather_of_the_hour_of_departure_is_caught(flights):
    few, weather = flights["some_days"](3, count=2)

    def same_hour(few, weather):
        earlier = weather.assign(time_hour=weather["time_hour"] - pd.Timedelta(hours=1))
        return flights["prepare"](few, earlier, flights["planes"])

    found = flights["leaks"](same_hour, few, weather)
    assert "temp" in found and "visib" in found and "distance" not in found


# What the notebook computes


def test_the_features_are_those_of_the_hour_before_and_of_the_aircraft(flights):
    month, weather = flights["some_days"](5, count=1)
    table = flights["prepare"](month, weather, flights["planes"])
    arrived = month.dropna(subset=["arr_delay"]).reset_index(drop=True)
    assert len(table) == len(arrived)
    for number in (0, 100, 300):
        flight, row = arrived.loc[number], table.iloc[number]
        there = weather[
            (weather["origin"] == flight["origin"])
            & (weather["time_hour"] == flight["time_hour"] - pd.Timedelta(hours=1))
        ]
        assert row["temp"] == there["temp"].iloc[0]
        assert row["late"] == float(flight["arr_delay"] > 15)
        assert row["hour"] == flight["sched_dep_time"] // 100
        assert row["date"] == pd.Timestamp(2013, flight["month"], flight["day"])


def test_held_out_days_have_no_part_in_categories_and_scales(flights):
    days = flights["days_of"]
    assert not set(days["training"]) & set(days["validation"] + days["test"])
    assert not set(days["validation"]) & set(days["test"])
    assert sum(map(len, days.values())) == len(flights["days"])
    there = flights["training"].compute()
    assert set(there["date"]) == set(days["training"])
    for name in ("distance", "temp"):
        assert np.isclose(there[name].mean(), flights["mean"][name], rtol=1e-5)
        assert abs(there[f"{name} scaled"].mean()) < 0.05
    assert not there[flights["SCALED"]].isna().any(axis=None)


def test_an_unknown_category_has_the_code_0_and_no_other_has(flights):
    part = flights["training"].partitions[0].compute()
    foreign = part.head(3).assign(dest="XXX")
    names = ("codes", "mean", "spread")
    encoded = flights["encode"](foreign, *(flights[name] for name in names))
    assert (encoded["dest code"] == 0).all()
    for name, size in zip(flights["CATEGORIES"], flights["sizes"]):
        assert part[f"{name} code"].between(0, size - 1).all()
        if name in ("hour", "carrier"):
            assert sorted(flights["codes"][name].values()) == list(range(1, size))


def test_average_precision_is_that_of_scikit_learn_also_with_ties_and_weights(flights):
    random = np.random.default_rng(0)
    for digits in (1, 6):
        late = (random.random(500) < 0.3).astype(float)
        score = np.round(random.random(500) + 0.2 * late, digits)
        weight = random.integers(0, 3, 500).astype(float)
        for given in (None, weight):
            ours = flights["average_precision"](late, score, given)
            assert np.isclose(ours, average_precision_score(late, score, sample_weight=given))


def test_a_prediction_that_is_20_points_too_high_is_told_from_a_calibrated_one(flights):
    random = np.random.default_rng(0)
    probability = random.uniform(0.1, 0.6, 40_000)
    late = (random.random(40_000) < probability).astype(float)
    weight = np.ones(len(late))
    for shift in (0.0, 0.2):
        _, off, nats = flights["measures"](late, probability + shift, weight)
        assert np.isclose(off, 100 * shift, atol=1)
        assert np.isclose(nats, flights["log_loss"](late, probability + shift))


def test_days_are_drawn_as_a_whole(flights):
    dates = np.repeat(np.arange(50), 7)
    weights = flights["draws_of_days"](dates, draws=20)
    assert weights.shape == (20, 350)
    assert (weights.sum(axis=1) == 350).all() and weights.max() > 1
    assert (weights.reshape(20, 50, 7) == weights[:, ::7, None]).all()


@pytest.mark.parametrize(
    ("low", "high", "says"),
    [
        (0.01, 0.02, "orders flights better"),
        (-0.02, -0.01, "orders them worse"),
        (-0.01, 0.01, "no difference shown"),
    ],
)
def test_what_is_said_of_an_interval_is_what_it_bears(flights, low, high, says):
    assert says in flights["verdict"](low, high)


def test_a_baseline_of_frequencies_leans_on_the_mean_where_it_has_seen_little(flights):
    table = pd.DataFrame({"carrier": ["AA"] * 4, "hour": [7] * 4, "late": [1.0, 1, 1, 0]})
    asked = pd.DataFrame({"carrier": ["AA", "ZZ"], "hour": [7, 7]})
    model = flights["Frequency"](4).fit(table)
    assert np.allclose(model.predict(asked), [(3 + 4 * 0.75) / 8, 0.75])


# Bad data


@pytest.fixture
def own(tmp_path):
    return shutil.copytree(ROOT / "data" / "flights", tmp_path / "mine")


def run_tutorial(tmp_path, values):
    """What `make run` does with these settings."""
    return subprocess.run(
        [sys.executable, "-m", "ddp_common", "run", "flights", "--set", values],
        cwd=ROOT,
        env=clean_environment(tmp_path / "runs"),
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(
    ("name", "key"), [("weather", "origin and time_hour"), ("planes", "tail")]
)
def test_a_row_that_would_repeat_flights_is_refused(flights, own, name, key):
    path = own / f"{name}.parquet"
    table = pd.read_parquet(path)
    pd.concat([table, table.head(2)]).to_parquet(path, index=False)
    with pytest.raises(ddp.Error, match=rf"{name}.parquet has 2 row\(s\) whose {key}"):
        flights["read_side_tables"](own)


def test_too_few_days_are_refused_in_one_message(own, tmp_path):
    path = own / "flights.parquet"
    table = pd.read_parquet(path)
    table[(table["month"] == 1) & (table["day"] < 6)].to_parquet(path, index=False)
    done = run_tutorial(tmp_path, f"data={own}")
    assert done.returncode == 1
    assert "holds flights of 5 day(s), and 10 are needed" in done.stderr
    assert "Traceback" not in done.stderr and done.stderr.count("Error") == 1


def test_a_folder_without_one_of_the_tables_is_refused_in_one_message(own, tmp_path):
    (own / "planes.parquet").unlink()
    done = run_tutorial(tmp_path, f"data={own}")
    assert done.returncode == 1
    assert "There is no table of planes" in done.stderr and "Traceback" not in done.stderr


# The page


def test_every_picture_of_flights_has_a_text_for_those_who_cannot_see_it():
    notebook = nbformat.read(ROOT / "tutorials" / "flights.ipynb", 4)
    pictures = [
        output
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if "image/png" in output.get("data", {})
    ]
    assert len(pictures) == 6
    for picture in pictures:
        assert len(picture.metadata["image/png"]["alt"]) > 60


def test_no_line_of_flights_is_cut_off_on_a_page():
    for cell in script("flights").cells:
        longest = max(map(len, cell.source.splitlines()))
        assert longest <= (88 if cell.cell_type == "code" else 86), cell.source


def test_the_minutes_of_flights_sum_to_75():
    notes = next(cell.source for cell in script("flights").cells if "Minutes: card" in cell.source)
    minutes = re.search(r"Minutes: (.*?)\. Sum: (\d+)", notes.replace("\n", " "))
    assert sum(map(int, re.findall(r"\d+", minutes[1]))) == int(minutes[2]) == 75
    exercises = [
        re.search(r"\((\d+) minutes\)", cell.source)
        for cell in script("flights").cells
        if "### Exercise" in cell.source
    ]
    assert sum(int(found[1]) for found in exercises) == 20
