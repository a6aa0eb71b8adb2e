"""Answers to exercise B of `flights`: features that know no future."""

import numpy as np
import pandas as pd

from tutorials import flights_tables

HOUR = pd.Timedelta(hours=1)


def features_with(first, last=0, when="landed", weather_of=1, arrival=flights_tables.arrival):
    """Features that use delays from `first` to `last` hours before, by the time `when`."""

    def features(flights, weather):
        arrived = flights.dropna(subset=["arr_delay"]).reset_index(drop=True)
        arrived["landed"] = arrival(arrived)
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


def as_positions(flights, weather):
    """Numbers of rows are taken for places in the table."""
    answer = by_index_of_all_flights(flights, weather)
    delay = flights["arr_delay"].astype("float64").to_numpy()
    when = flights_tables.arrival(flights)
    arrived = flights[flights["arr_delay"].notna()]
    found = []
    for carrier, hour in zip(arrived["carrier"], arrived["time_hour"]):
        known = when[(when < hour) & (when >= hour - 24 * HOUR) & (flights["carrier"] == carrier)]
        found.append(delay[known.index].mean() if len(known) else np.nan)
    return answer | {"delay of the carrier": found}


def five_hours_behind(flights):
    """The time of arrival from New York's clock in winter."""
    late = flights["arr_delay"].astype("float64")
    day = pd.to_datetime(dict(year=2013, month=flights["month"], day=flights["day"]))
    minutes = flights_tables.minutes(flights["sched_dep_time"]) + flights_tables.duration(flights)
    local = day + pd.to_timedelta(minutes + late, unit="min")
    return (local + 5 * HOUR).dt.tz_localize("UTC")


def in_one_loop(flights, weather):
    """Rows of plain Python, and a dict of lists."""
    arrived = flights.dropna(subset=["arr_delay"])
    landed = flights_tables.arrival(arrived)
    rain_of = {
        (o, t): p for o, t, p in zip(weather["origin"], weather["time_hour"], weather["precip"])
    }
    found = {"distance": [], "rain": [], "delay of the carrier": []}
    for _, flight in arrived.iterrows():
        hour = flight["time_hour"]
        late = [
            delay
            for delay, carrier, time in zip(arrived["arr_delay"], arrived["carrier"], landed)
            if carrier == flight["carrier"] and hour - 24 * HOUR <= time < hour
        ]
        found["distance"].append(flight["distance"])
        found["rain"].append(rain_of.get((flight["origin"], hour - HOUR), np.nan))
        found["delay of the carrier"].append(np.mean(late) if late else np.nan)
    return found


def on_honest(change):
    return lambda *tables: change(HONEST(*tables))


def of_any_carrier(flights, weather):
    return HONEST(flights, weather).assign(
        **{
            "delay of the carrier": HONEST(flights.assign(carrier="AA"), weather)[
                "delay of the carrier"
            ]
        }
    )


def of_one_airport(flights, weather):
    return HONEST(flights, weather).assign(
        rain=HONEST(flights.assign(origin="JFK"), weather)["rain"]
    )


RIGHT = {
    "as told": HONEST,
    "rounded": on_honest(lambda table: table.astype("float32").round(2)),
    "a dict": on_honest(lambda table: table.to_dict("list")),
    "by index of all flights": by_index_of_all_flights,
    "in one loop": in_one_loop,
    "other index": on_honest(lambda table: table.set_index(table.index + 7)),
    "columns in another order": on_honest(lambda table: table[sorted(table)]),
}
WRONG = {
    "just before": (features_with(1, when="time_hour"), "known when the flight has arrived"),
    "a day before": (features_with(36, 12, when="time_hour"), "known when the flight has arrived"),
    "by departure": (features_with(24, when="time_hour"), "known when the flight has arrived"),
    "of this hour": (features_with(24, weather_of=0), "When was it measured"),
    "of the next hour": (features_with(24, weather_of=-1), "When was it measured"),
    "of two hours before": (features_with(24, weather_of=2), "nothing older"),
    "of half a day": (features_with(12), "all that was known"),
    "of all days": (features_with(10_000), "nothing older"),
    "of two days": (features_with(48), "nothing older"),
    "an hour late": (features_with(24, 1), "all that was known"),
    "moves the weather": (moves_the_weather, "change the tables"),
    "0 for nothing": (on_honest(lambda table: table.fillna(0)), "Nothing was known"),
    "the mean for nothing": (
        on_honest(lambda table: table.fillna(table.mean())),
        "Nothing was known|When was it measured",
    ),
    "the row above for nothing": (
        on_honest(lambda table: table.ffill()),
        "Nothing was known|Of which",
    ),
    "with older weather": (with_older_weather, "Of which hour is this number"),
    "a column": (on_honest(lambda table: table[["distance"]]), "What do you return"),
    "nine rows": (on_honest(lambda table: table.head(9)), "repeat or drop"),
    "rows without gaps": (on_honest(lambda table: table.dropna()), "repeat or drop"),
    "all flights": (
        lambda flights, weather: HONEST(flights.fillna({"arr_delay": 0}), weather),
        "repeat or drop",
    ),
    "hours for minutes": (
        on_honest(lambda t: t.assign(**{"delay of the carrier": t["delay of the carrier"] / 60})),
        "this unit",
    ),
    "inches for millimetres": (on_honest(lambda t: t.assign(rain=t["rain"] / 25.4)), "this unit"),
    "of any carrier": (of_any_carrier, "all that was known"),
    "of one airport": (of_one_airport, "all that was known|Nothing was known"),
    "numbers as places": (as_positions, "all that was known|arrived|cannot be judged"),
    "five hours written in": (
        features_with(24, arrival=five_hours_behind),
        "all that was known|has arrived",
    ),
    "sorted": (on_honest(lambda table: table.sort_values("distance")), r"\?"),
}
EQUIVALENT = {
    "line 4: flights.dropna(subset=['arr_delay']).reset_index(drop=True) → flights.dropna(subset=['arr_delay']).reset_index()": "one column more, which nobody reads",
    "line 4: True → False": "one column more, which nobody reads",
    "line 6: arrived.merge(before, on=['origin', 'time_hour'], how='left') → arrived.merge(before, how='left')": "these are the columns that both tables have",
    "line 4: flights.dropna(subset=['arr_delay']) → flights.dropna()": "the tables have no gaps but in flights that did not arrive",
    "line 10: when < hour → when <= hour": "with or without their ends, as the text says",
    "line 10: when >= hour - pd.Timedelta(hours=24) → when > hour - pd.Timedelta(hours=24)": "with or without their ends, as the text says",
}
IN_TESTS = ["in one loop", "numbers as places", "just before"]
