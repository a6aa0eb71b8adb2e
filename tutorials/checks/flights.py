"""The checks of `flights`: batches of rows, a prediction, features that know no future."""

import itertools
from collections.abc import Callable

import numpy as np
import pandas as pd
from distributed import Client

from tutorials.checks.common import Wrong, named
from tutorials.flights_tables import arrival, change_future

HOUR = pd.Timedelta(hours=1)
CLOSE = {"distance": 0.5, "rain": 0.006, "delay of the carrier": 0.06}  # rounded is right


def batches(answer: Callable, *, client: Client) -> str:
    """Whether `answer(lengths, batch_size, seed)` makes batches of all partitions' rows.

    A worker of `client`, another process, must make the same.
    """
    random = np.random.default_rng()
    for last_is_full in (True, False, False):
        lengths = [0, 7, 300, 300, *random.integers(60, 400, size=3).tolist(), 900]
        batch_size, seed = (int(n) for n in random.integers([40, 1], [90, 1_000]))
        lengths[-1] += -sum(lengths) % batch_size if last_is_full else 0  # else, mostly, not
        random.shuffle(lengths)
        made = _batches(answer, lengths, batch_size, seed)
        _every_row_once(made, lengths)
        _batch_sizes(made, batch_size)
        _shares(made, lengths)
        given = lengths, batch_size, seed
        elsewhere = client.submit(_batches, answer, *given, pure=False).result()
        for where, others in (
            ("a second call", _batches(answer, *given)),
            ("another process", elsewhere),
        ):
            if not np.array_equal(np.concatenate(made), np.concatenate(others)):
                question = "Two ranks call it, each in its own process. Do they agree?"
                raise Wrong(f"other batches from {where}", "the same", question)
        orders = _orders(made, lengths)
        for another in (seed + 1, seed + 2):
            of_another = _orders(_batches(answer, lengths, batch_size, another), lengths)
            for partition, rows in enumerate(lengths):
                if rows > 50:
                    _order(orders[partition], of_another[partition], partition)
        _orders_differ([order for order in orders if len(order) > 50])
    return "the batches need lengths, batch size and seed, and not where the rows are."


def _batches(answer, lengths, batch_size, seed):
    batches = answer(list(lengths), batch_size, seed)
    if batches is None or isinstance(batches, (str, int, float)):
        raise Wrong(repr(batches), "a list of batches", "What do you return?")
    batches = [np.asarray(batch) for batch in batches]
    strange = [batch.shape for batch in batches if batch.shape[1:] != (2,)]
    if strange or not batches:
        yours = f"a batch of shape {strange[0]}" if strange else "no batch"
        raise Wrong(yours, "(rows, 2)", "Which two numbers name a row?")
    return batches


def _every_row_once(batches, lengths):
    found = [tuple(pair) for pair in np.concatenate(batches).tolist()]
    every = {(partition, row) for partition, rows in enumerate(lengths) for row in range(rows)}
    missing, strange = every - set(found), set(found) - every
    if missing or strange or len(found) != len(every):
        question = "What does the last batch get? Where do rows and partitions begin to count?"
        if len(found) > len(set(found)):
            question = "Which rows come more than once?"
        raise Wrong(
            f"{len(found)} rows; {len(missing)} of the table are missing, {len(strange)} are not "
            "in it",
            f"each of its {len(every)} rows once",
            question,
        )


def _batch_sizes(batches, batch_size):
    sizes = [len(batch) for batch in batches]
    wrong = [n for n, rows in enumerate(sizes[:-1]) if rows != batch_size]
    wrong += [len(sizes) - 1] if not 0 < sizes[-1] <= batch_size else []
    if wrong:
        yours = f"batch {wrong[0]} of {len(sizes)} has {sizes[wrong[0]]} rows"
        wanted = f"{batch_size} in each but the last, which has the rest"
        raise Wrong(yours, wanted, "Where do you cut?")


def _shares(batches, lengths):
    sizes = np.array([len(batch) for batch in batches])
    for partition, rows in enumerate(lengths):
        mine = np.array([(batch[:, 0] == partition).sum() for batch in batches])
        fair = sizes * rows / sum(lengths)
        worst = abs(mine - fair).argmax()
        if abs(mine - fair)[worst] > 3:
            raise Wrong(
                f"{mine[worst]} rows of partition {partition} in batch {worst}",
                f"{fair[worst]:.1f}, its share",
                "Where between 0 and 1 is the middle row of each partition?",
            )


def _orders(batches, lengths):
    """The rows of each partition, in the order in which they come."""
    rows = np.concatenate(batches).astype(int)
    return [rows[rows[:, 0] == partition, 1] for partition in range(len(lengths))]


def _order(order, of_another_seed, partition):
    """Whether the rows of a partition come at random, and otherwise with another seed.

    In a random order, the steps from one row to the next, modulo the number of rows, take 63 % of
    all values that there are. Reversed rows, or every seventh, have one or two. And neither its
    place nor the row before it tells which row comes, or whether its number is odd: correlations
    are within five standard errors of 0. If each half is shuffled by itself, two are about 0.75.
    """
    steps = np.diff(order) % len(order)
    place = range(len(order))
    pairs = (order, place), (order % 2, place), (order[1:], order[:-1])
    follows = [np.corrcoef(*pair) for pair in pairs]
    strongest = max(abs(pair[0, 1]) for pair in follows)
    if len(np.unique(steps)) < 0.4 * len(order) or strongest > 5 / np.sqrt(len(order)):
        raise Wrong(
            f"rows {order[:6].tolist()} … of partition {partition}, which has {len(order)}",
            "a random order",
            "What shuffles the rows of a partition? Can each of them come at each place?",
        )
    if _alike(order, of_another_seed):
        raise Wrong(
            f"one order of partition {partition} from two seeds", "two", "What is `seed` used for?"
        )


def _orders_differ(orders):
    """Whether each partition has an order of its own; of longer ones the first rows count."""
    for first, second in itertools.combinations(orders, 2):
        rows = min(len(first), len(second))
        if _alike(first[first < rows], second[second < rows]):
            raise Wrong(
                f"one order for two partitions: rows {second[:6].tolist()} …",
                "an order of its own for each",
                "When is the next permutation drawn, and from which state of `random`?",
            )


def _alike(order, other):
    """Whether many rows have the same neighbour in both orders; at random, one or two have."""
    neighbours, others = (set(zip(each[:-1], each[1:])) for each in (order, other))
    return len(neighbours & others) > 0.3 * len(neighbours)


REPLIES = {  # to a prediction of what training without `sampler.weight` gives
    "right": "not right. DDP averages the ranks' gradients as if each had equally many rows",
    "too high": "right. Each rank counts half, so the late flights count as if they were half",
    "too low": "not right. More rows do not help rank 0: its mean counts as much as rank 1's",
}


def without_weight(prediction: object) -> str:
    """What became of a prediction, one of `REPLIES`, however it is spelled."""
    if prediction is None or prediction is ...:
        return "You have made no prediction. Without the weight the guess is too high."
    said = named(prediction, REPLIES)
    if said is None:
        return f"Your prediction was {prediction!r}: which one of {', '.join(REPLIES)} is that?"
    return f"Your prediction was {prediction!r}: {REPLIES[said]}."


def features(answer: Callable) -> str:
    """Whether `answer(flights, weather)` gives what was known at the hour of each flight."""
    random = np.random.default_rng()
    for is_summer in (False, True):
        _at_a_time_of_year(answer, random, is_summer)
    return "no leak was found, and each column is the newest that was known."


def _at_a_time_of_year(answer, random, is_summer):
    flights, weather = _tables(random, is_summer)
    arrived = flights.dropna(subset=["arr_delay"]).reset_index(drop=True)
    given = flights.copy(), weather.copy()
    yours, again = (_columns(answer, *given, arrived) for _ in range(2))
    for name in CLOSE:
        if not np.array_equal(yours[name], again[name], equal_nan=True):
            question = "Does it change the tables that it gets?"
            raise Wrong(f"another {name} from a second call", "the same", question)
    hours = arrived["time_hour"].unique()
    last_day = hours[hours > hours.max() - 20 * HOUR]
    for hour in [last_day.min(), *random.choice(hours, 3)]:
        changed = _columns(answer, *change_future(flights, weather, hour, random), arrived)
        now = arrived["time_hour"] == hour
        for name in CLOSE:
            if not np.array_equal(yours[name][now], changed[name][now], equal_nan=True):
                question = "When was it measured? A delay is known when the flight has arrived."
                raise Wrong(f"{name}, which changes with the future", "none that does", question)
    for name, right in _known(arrived, weather).items():
        _compare(name, yours[name], right)


def _compare(name, yours, right):
    wrong = ~np.isclose(yours, right, rtol=0, atol=CLOSE[name], equal_nan=True)
    if not wrong.any():
        return
    filled = wrong & np.isnan(right)
    if filled.sum() == wrong.sum():
        question = "Nothing was known. Is that the same as this number?"
        if name == "rain" and len(np.unique(yours[wrong])) > 1:  # of another hour, not filled
            question = "`weather` has no row of the hour before. Of which hour is this number?"
        raise Wrong(f"{name} {yours[wrong][0]:.2f} in {wrong.sum()} rows", "NaN", question)
    question = "Nothing leaks. Does it use all that was known, nothing older, and this unit?"
    raise Wrong(
        f"{name} {yours[wrong][0]:.2f} in a row, and {wrong.sum()} rows differ",
        f"{right[wrong][0]:.2f}",
        question,
    )


def _columns(answer, flights, weather, arrived):
    """What an answer gives: {name: float64 array}, in the order of the flights that arrived."""
    yours = answer(flights, weather)
    if not isinstance(yours, (dict, pd.DataFrame)) or set(yours) != set(CLOSE):
        got = list(yours) if isinstance(yours, (dict, pd.DataFrame)) else type(yours).__name__
        raise Wrong(got, f"a DataFrame with the columns {list(CLOSE)}", "What do you return?")
    table = {name: pd.Series(yours[name]).to_numpy("float64", na_value=np.nan) for name in CLOSE}
    if {len(values) for values in table.values()} != {len(arrived)}:
        raise Wrong(
            f"{len(yours['distance']):,} rows",
            f"{len(arrived):,}",
            "Does a join repeat or drop some of the flights that arrived?",
        )
    return table


def _known(arrived, weather):
    """The right columns, flight by flight."""
    rain_of = weather.set_index(["origin", "time_hour"])["precip"].to_dict()
    landed, delay = arrival(arrived), arrived["arr_delay"].to_numpy("float64")
    rain, of_carrier = np.full((2, len(arrived)), np.nan)
    for row, (origin, carrier, hour) in enumerate(
        zip(arrived["origin"], arrived["carrier"], arrived["time_hour"])
    ):
        rain[row] = rain_of.get((origin, hour - HOUR), np.nan)
        known = (landed < hour) & (landed >= hour - 24 * HOUR) & (arrived["carrier"] == carrier)
        if known.any():
            of_carrier[row] = delay[known].mean()
    distance = arrived["distance"].to_numpy("float64")
    return {"distance": distance, "rain": rain, "delay of the carrier": of_carrier}


def _tables(random, is_summer=False):
    """Flights of three winter or summer days and their weather, of the types of the real ones.

    One flight in seven is many hours late, so that some arrive a day later; one in twenty never
    arrives. No flight arrives at a full hour, and a tenth of the weather is missing. The rows
    have no numbers in their order.
    """
    count = 180
    month, behind = random.choice([1, 2, 11, 12] if not is_summer else [6, 7]), 5 - is_summer
    first = pd.Timestamp(2013, month, random.integers(4, 20), behind)
    day, hour, minute = random.integers([0, 5, 0], [3, 23, 60], (count, 3)).T
    distance = random.integers(200, 2_600, count)
    flying = (distance / 8 + 60 + random.integers(-20, 20, count)).astype(int)
    lands = (60 * hour + minute + flying - 60 * (distance // 900)) % 1_440
    late = random.integers(-30, 90, count)
    late += np.where(random.random(count) < 1 / 7, random.integers(300, 2_400, count), 0)
    late += (minute + flying + late) % 60 == 0
    local = first - behind * HOUR + pd.to_timedelta(day, unit="D")
    flights = pd.DataFrame(
        {
            "time_hour": (first + pd.to_timedelta(24 * day + hour, unit="h")).tz_localize("UTC"),
            "month": local.month.astype("int8"),
            "day": local.day.astype("int8"),
            "sched_dep_time": (100 * hour + minute).astype("int16"),
            "sched_arr_time": (lands // 60 * 100 + lands % 60).astype("int16"),
            "dep_delay": pd.array(np.maximum(late - 10, -15), "Int16"),
            "arr_delay": pd.array(late, "Int16"),
            "carrier": random.choice(["AA", "DL"], count),
            "origin": random.choice(["EWR", "JFK", "LGA"], count),
            "distance": distance.astype("int16"),
        }
    ).sort_values(["time_hour", "sched_dep_time"], ignore_index=True)
    flights.loc[random.random(count) < 1 / 20, ["dep_delay", "arr_delay"]] = pd.NA
    flights.index = random.permutation(count)
    hours = pd.date_range(first - 24 * HOUR, periods=120, freq="h", tz="UTC")
    index = pd.MultiIndex.from_product(
        [["EWR", "JFK", "LGA"], hours], names=["origin", "time_hour"]
    )
    weather = pd.DataFrame(
        random.uniform(0, 5, (len(index), 7)).astype("float32"),
        index,
        ["temp", "dewp", "humid", "wind_speed", "precip", "pressure", "visib"],
    ).reset_index()
    return flights, weather.sample(frac=0.9, random_state=int(random.integers(1_000)))
