"""What `flights` uses and does not teach: a picture, layouts, intervals, leaks.

Promises: what is in it travels to the workers with the functions of the notebook. So
workers of a distant cluster do not need this file. The functions that travel are
imported by name: with a name of this module would travel all of it.
"""

import glob
import os
import sys
import tempfile
import time

import cloudpickle
import distributed
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import psutil

import ddp_common as ddp

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def minutes(clock):
    """Minutes since midnight of a time that is written as HHMM."""
    return (clock // 100 * 60 + clock % 100).astype("int32")


def duration(flights):
    """Scheduled minutes from departure to arrival, to about an hour.

    Clocks differ by the time zones, in whole hours. We add as many as the distance
    (miles) asks for, at 8 miles a minute and with an hour on the ground.
    """
    by_clocks = minutes(flights["sched_arr_time"]) - minutes(flights["sched_dep_time"])
    by_clocks %= 1_440
    by_distance = flights["distance"] / 8 + 60
    return by_clocks + 60 * ((by_distance - by_clocks) / 60).round()


def batches_picture(lengths, places, batch_size):
    """A figure: the rows of each partition at their `places`, cut into batches."""
    from tutorials.helpers import LINES  # ranks do without it

    ordered = np.sort(np.concatenate(places))
    last = np.arange(batch_size, len(ordered), batch_size) - 1  # of all batches but one
    cuts = (ordered[last] + ordered[last + 1]) / 2
    in_turns = np.array([line["color"] for line in LINES[:2]])
    figure, axes = plt.subplots(figsize=(8, 2.4), layout="constrained")
    for partition, x in enumerate(places):
        colours = in_turns[np.searchsorted(cuts, x) % 2]
        axes.scatter(x, np.full(len(x), partition), c=colours, marker="s", s=26)
    axes.vlines(cuts, -0.5, len(lengths) - 0.5, color="grey", linewidth=0.8)
    axes.set(xlim=(0, 1), xlabel="place", ylabel="partition")
    axes.set_yticks(range(len(lengths)), [f"{rows} rows" for rows in lengths])
    axes.set_title(f"Batches of {batch_size} rows, each between two lines")
    return figure


def placed(client, table, layout, lengths):
    """Copies of a Dask table's partitions, on chosen workers: a future for each.

    Of each partition so many rows as `lengths` says, on the worker with the number that
    `layout` says.
    """
    addresses = sorted(client.workers())
    partitions = client.compute(table.to_delayed())
    futures = [
        client.submit(
            pd.DataFrame.head, part, rows, workers=[addresses[place]], pure=False
        )
        for part, rows, place in zip(partitions, lengths, layout)
    ]
    distributed.wait(futures)
    return futures


def fetched(client):
    """Bytes that all workers have fetched from other workers, by their own logs."""

    def of_one(dask_worker):
        return sum(each["total"] for each in dask_worker.transfer_incoming_log)

    return sum(client.run(of_one).values())


def kill_the_worker():
    """On a rank: kill the Dask worker that has started it, with its partitions.

    A second later: by then the client knows of all steps that are done.
    """
    time.sleep(1)
    psutil.Process(int(os.environ["DDP_WORKER_PROCESS"])).kill()
    time.sleep(60)  # this rank ends with its worker


# Three ways into the ranks


def direct(table, to_tensors):
    return [to_tensors(part)[0].shape for part in table.parts]


def from_files(folder, to_tensors):
    paths = sorted(glob.glob(f"{folder}/*.parquet"))[ddp.rank() :: ddp.world_size()]
    return to_tensors(pd.read_parquet(paths))[0].shape


def three_ways(client, table, to_tensors):
    """Seconds until two ranks have tensors of all rows of a table, by each way."""
    options = {"workers": 2, "directory": False, "to_tensors": to_tensors}
    moments = [time.monotonic()]
    ddp.launch(client, direct, table=table, **options)
    moments.append(time.monotonic())
    with tempfile.TemporaryDirectory() as folder:  # all workers are on this machine
        table.to_parquet(folder)
        ddp.launch(client, from_files, folder=folder, **options)
    moments.append(time.monotonic())
    whole = table.compute()
    halves = client.scatter([whole.iloc[half::2] for half in range(2)])
    ddp.launch(client, direct, table=halves, **options)
    moments.append(time.monotonic())
    return dict(zip(("direct", "files", "client"), np.diff(moments)))


# Numbers of the held-out days


def average_precision(late, guess, weights=None):
    """Average precision of each row of `weights`, of shape (draws, flights): an array.

    The mean precision over the late flights, from the highest guess to the lowest;
    flights with one guess count together. Without `weights`, one draw of all flights.
    """
    order = np.argsort(-np.asarray(guess), kind="stable")
    guess, late = np.asarray(guess)[order], np.asarray(late, "float64")[order]
    weights = np.ones((1, len(late))) if weights is None else weights[:, order]
    last = np.flatnonzero(np.append(np.diff(guess) != 0, True))  # of those with a guess
    flights = weights.cumsum(axis=1)[:, last]
    late_so_far = (weights * late).cumsum(axis=1)[:, last]
    precision = late_so_far / np.maximum(flights, 1e-12)
    return (precision * np.diff(late_so_far, prepend=0)).sum(axis=1) / late_so_far[
        :, -1
    ]


def precision_over_days(judged, guesses, draws=300):
    """Average precision of the columns `guesses`, with 95 % intervals: days drawn anew.

    A DataFrame with a row for each of `guesses`, and one for the first minus the
    second; both are judged by the same draws. Of a huge table, 200,000 rows are drawn.
    """
    judged = judged.sample(min(len(judged), 200_000), random_state=0)
    dates, day_of = np.unique(judged["date"], return_inverse=True)
    chances = np.full(len(dates), 1 / len(dates))
    random = np.random.default_rng(0)
    drawn = random.multinomial(len(dates), chances, size=draws).astype("float32")
    of_all, of_draws = {}, {name: [] for name in guesses}
    for name in guesses:
        of_all[name] = average_precision(judged["late"], judged[name])[0]
        for times in np.array_split(drawn, 5):  # not all draws at once in memory
            weights = times[:, day_of]
            of_draws[name].extend(
                average_precision(judged["late"], judged[name], weights)
            )
    first, second = guesses
    difference = f"{first} - {second}"
    of_all[difference] = of_all[first] - of_all[second]
    of_draws[difference] = np.subtract(of_draws[first], of_draws[second])
    ends = {name: np.percentile(of_draws[name], [2.5, 97.5]) for name in of_all}
    return pd.DataFrame(
        {name: [point, *ends[name]] for name, point in of_all.items()},
        ["average precision", "from", "to"],
    ).T


# Leaks


def arrival(flights):
    """When each of these flights arrived, in UTC; NaT if it did not."""
    return _after_departure(flights, duration(flights) + flights["arr_delay"])


def _after_departure(flights, minutes):
    """So many minutes after the scheduled departure, in UTC."""
    minutes = (flights["sched_dep_time"] % 100 + minutes).astype("float64")
    return flights["time_hour"] + pd.to_timedelta(minutes, unit="min")


def change_future(flights, weather, hour, random):
    """Copies in which all is different that was not known when `hour` began."""
    flights, weather = flights.copy(), weather.copy()
    left, landed = _after_departure(flights, flights["dep_delay"]), arrival(flights)
    change = random.integers(20, 60, size=len(flights)).astype("int16")
    flights["dep_delay"] += change * (left >= hour)
    flights["arr_delay"] += change * (landed >= hour)
    measured = weather.columns.difference(["origin", "time_hour"])
    weather.loc[weather["time_hour"] >= hour, measured] += 30
    return flights, weather


def leaks(features, flights, weather, hours=3):
    """The columns of `features(flights, weather)` that know the future, sorted.

    Some hours are tried. For each, all is changed that was not known when it began. The
    features of the flights of that hour must stay as they were.
    """
    random = np.random.default_rng(0)
    known, found = features(flights, weather), set()
    hour_of = flights.dropna(subset=["arr_delay"])["time_hour"].reset_index(drop=True)
    tried = np.sort(hour_of.unique())
    tried = tried[len(tried) // 2 :]  # the first ones have nothing before them
    for hour in random.choice(tried, hours, replace=False):
        changed = features(*change_future(flights, weather, hour, random))
        now = (hour_of == hour).to_numpy()
        for name in known:
            if not known[name][now].equals(changed[name][now]):
                found.add(name)
    return sorted(found)
