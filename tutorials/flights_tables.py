"""What `flights` uses and does not teach: its side tables, pictures, an interval.

Promises: what is in it travels to the workers with the functions of the notebook. So
workers of a distant cluster do not need this file.
"""

import sys

import cloudpickle
import distributed
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from sklearn.metrics import average_precision_score

import ddp_common as ddp

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def read_side_tables(folder):
    """Weather and aircraft. Raises `ddp.Error` where a join would repeat flights."""
    keys = {"weather": ["origin", "time_hour"], "planes": ["tailnum"]}
    tables = {name: pd.read_parquet(folder / f"{name}.parquet") for name in keys}
    for name, key in keys.items():
        if again := int(tables[name].duplicated(key).sum()):
            raise ddp.Error(
                f"{folder}/{name}.parquet has {again} row(s) whose {' and '.join(key)} "
                "are in another row already, so a join would repeat flights. Keep "
                f"one of each: drop_duplicates({key})."
            )
    return tables["weather"], tables["planes"]


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


def days_of(table):
    """All days of a Dask table, sorted. Raises `ddp.Error` if they are too few."""
    days = sorted(table["date"].unique().compute())
    if len(days) < 10:
        raise ddp.Error(
            f"The table holds flights of {len(days)} day(s), and 10 are needed: whole "
            "days are held out to judge by. Add days."
        )
    return days


def deal_picture(lengths, places, batch_size):
    """A figure: the rows of each partition at their `places`, cut into batches."""
    ordered = np.sort(np.concatenate(places))
    last = np.arange(batch_size, len(ordered), batch_size) - 1  # of all batches but one
    cuts = (ordered[last] + ordered[last + 1]) / 2
    figure, axes = plt.subplots(figsize=(8, 2.4), layout="constrained")
    for partition, x in enumerate(places):
        colours = plt.cm.tab10(np.searchsorted(cuts, x))
        axes.scatter(x, np.full(len(x), partition), c=colours, marker="s", s=26)
    axes.vlines(cuts, -0.5, len(lengths) - 0.5, color="grey", linewidth=0.8)
    axes.set(xlim=(0, 1), xlabel="place", ylabel="partition")
    axes.set_yticks(range(len(lengths)), [f"{rows} rows" for rows in lengths])
    axes.set_title(f"Batches of {batch_size} rows, a colour for each")
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


def errors_picture(judged):
    """A figure: late flights, observed and predicted, by hour and by airline."""
    figure, panels = plt.subplots(
        1, 2, figsize=(10, 3), sharey=True, layout="constrained"
    )
    labels = {"hour": "scheduled hour of departure", "carrier": "airline (code)"}
    for axes, (key, label) in zip(panels, labels.items()):
        mean = judged.groupby(key)[["late", "probability"]].mean().compute()
        mean = 100 * mean.sort_index()
        of = mean.index.astype(str)
        axes.plot(of, mean["late"], "o", label="observed")
        axes.plot(of, mean["probability"], "_", ms=12, label="predicted")
        axes.set_xlabel(label)
    panels[0].set_ylabel("late (% of flights)")
    panels[0].legend()
    return figure


def precision_over_days(table, draws=500):
    """Average precision, and the ends of its 95 % interval: days are drawn again."""
    dates, day_of = np.unique(table["date"], return_inverse=True)
    chances = np.full(len(dates), 1 / len(dates))
    drawn = np.random.default_rng(0).multinomial(len(dates), chances, size=draws)

    late, probability = table["late"], table["probability"]
    of_draws = [
        average_precision_score(late, probability, sample_weight=times[day_of])
        for times in drawn
    ]
    point = average_precision_score(late, probability)
    return point, *np.percentile(of_draws, [2.5, 97.5])
