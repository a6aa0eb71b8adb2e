# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Flights: train where the table already is
#
# ## 1. The question
#
# A table has been prepared on the workers of a Dask cluster. **Why train where the
# table already is**, instead of writing files and reading them elsewhere?
#
# **Afterwards you can**
# - prepare a table with Dask, and keep the held-out days out of it;
# - give it to `launch`, so that each worker trains on the rows that it already has;
# - write the deal: the rule that spreads these rows over the batches;
# - bring predictions back as a column, and survive the loss of a worker;
# - test whether a feature knows the future.
#
# **You need** the notebooks `mnist` and `pets` (*rank*, *worker*, *checkpoint*). If you
# know `dogs`, you know most of `train`. There, every worker could read every image.
# Here, a worker has some rows of a table only. No GPU and no network are needed.
#
# **Time:** 75 minutes, 26 of them for two exercises. **Data:** flights from New York in
# 2013, shipped with the repository.

# %% [markdown]
# ## 2. Set-up
#
# All settings are here. `make run TUTORIAL=flights SET="epochs=2"` changes one of them.
# `share=1` takes all flights instead of a quarter. A share above 1 draws flights with
# replacement: `PRESET=full` makes a table that is larger than one worker's memory.
# `client.dashboard_link` is the address of Dask's dashboard.

# %%
import os
import time

import dask
import dask.dataframe as dd
import distributed
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import psutil
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import ddp_common as ddp
from tutorials import flights_tables as ready  # what is not today's subject
from tutorials import kit
from tutorials.checks import flights as checks
from tutorials.checks.common import judge
from tutorials.checks.flights import arrival, change_future
from tutorials.helpers import curve, show

# %% tags=["parameters"]
settings = kit.settings(
    "flights",
    data="shipped",  # or a folder with the same four files
    share=0.25,  # of the flights of each month
    epochs=5,
    batch_size=512,  # of all ranks together
    learning_rate=3e-3,
    hidden=64,
    seed=0,
    presets={"full": {"share": 60.0, "batch_size": 8_192, "hidden": 256}},
)

# %% tags=["nbval-ignore-output"]
client = ddp.connect()
dataset = kit.fetch("flights", settings.data)
backend = "nccl" if torch.cuda.is_available() else "gloo"
versions = f"torch {torch.__version__} · {backend} · {client.ranks} ranks"
print(f"{versions} · {dataset.title}: {dataset.origin} · {dataset.licence}")

# %% [markdown]
# ## 3. The data
#
# There are three tables: flights, the weather of each hour at the airports, and
# aircraft. We ask: **will a flight arrive more than 15 minutes late?** We ask at the
# beginning of the hour in which it is scheduled to depart. A *feature* is a column that
# the model reads. It may only use what was known at that moment.
#
# A Dask *DataFrame* is a table in *partitions*. Each partition is a pandas DataFrame;
# here it is one month of flights. Dask writes down what is to be done with it, and does
# nothing yet.


# %%
def draw(month, share):
    """A share of the rows; with replacement if it is more than all of them."""
    return month.sample(frac=share, replace=share > 1, random_state=0)


weather, planes = ready.read_side_tables(dataset.path)
flights = dd.read_parquet(dataset.path / "flights.parquet", split_row_groups=True)
flights = flights.map_partitions(draw, settings.share)

# %% [markdown]
# `prepare` makes the features of one partition. `time_hour` is the hour of the
# scheduled departure, in UTC: one clock for all places. Delays are in minutes. The
# weather of an hour is measured *during* that hour. So a flight gets the weather of the
# hour *before*.

# %%
CATEGORIES = ["carrier", "origin", "dest", "manufacturer", "hour", "weekday", "month"]
WEATHER = ["temp", "dewp", "humid", "wind_speed", "precip", "pressure", "visib"]
NUMBERS = ["distance", "duration", *WEATHER, "age", "seats"]


def prepare(flights, weather, planes):
    """Flights that arrived, with their features and `late`."""
    arrived = flights.dropna(subset=["arr_delay"])
    before = weather.assign(time_hour=weather["time_hour"] + pd.Timedelta(hours=1))
    table = arrived.merge(before, on=["origin", "time_hour"], how="left")
    aircraft = planes.rename(columns={"year": "built"})
    table = table.merge(aircraft, on="tailnum", how="left")
    year = (table["time_hour"] - pd.Timedelta(hours=5)).dt.year  # in New York
    table["date"] = pd.to_datetime(table[["month", "day"]].assign(year=year))
    table["hour"] = table["sched_dep_time"] // 100
    table["weekday"] = table["date"].dt.day_of_week
    table["duration"] = ready.duration(table)
    table["age"] = year - table["built"].astype("float32")
    table["precip"] = np.log1p(100 * table["precip"])  # many hours have a little rain
    table["late"] = (table["arr_delay"] > 15).astype("float32")
    return table[["date", *CATEGORIES, *NUMBERS, "late"]]


table = flights.map_partitions(prepare, weather, planes).persist()

# %% [markdown]
# `persist` starts the computing. The results stay on the workers; `table` only points
# to them. (Cancelled flights never arrive and are left out. So the model says how
# likely a flight is to be late *if* it arrives.)
#
# **Split by day, not by row.** The flights of one day share its weather and its delays.
# They are not independent. So we hold out whole *days*: a fifth for validation, a fifth
# for the test.

# %%
days = ready.days_of(table)
parts = ddp.split(len(days), [0.2, 0.2], seed=0)
days_for = {
    name: [days[number] for number in sorted(part)]
    for name, part in zip(("training", "validation", "test"), parts)
}
training = table[table["date"].isin(days_for["training"])]

# %% [markdown]
# **Categories and scales come from training days only.** Dask counts each category and
# computes means over all partitions at once. A rare or unknown category gets code 0. A
# missing number becomes 0, which is the mean after scaling; two more columns say that
# it was missing. The last lines count what is in each part.

# %%
CODES = [f"{name} code" for name in CATEGORIES]
SCALED = [*(f"{name} scaled" for name in NUMBERS), "no weather", "no aircraft"]

mean, spread, *counts = dask.compute(
    training[NUMBERS].astype("float64").mean(),
    training[NUMBERS].astype("float64").std(),
    *(training[name].value_counts() for name in CATEGORIES),
)
codes = {}
for name, count in zip(CATEGORIES, counts):
    frequent = sorted(count[count >= 30].index)
    codes[name] = {value: 1 + place for place, value in enumerate(frequent)}
sizes = [1 + len(codes[name]) for name in CATEGORIES]


def encode(part, codes, mean, spread):
    """The partition with numbers for a network beside its columns."""
    scaled = (part[NUMBERS].astype("float64") - mean) / spread.replace(0, 1)
    new = {f"{name} scaled": scaled[name].fillna(0) for name in NUMBERS}
    new |= {"no weather": scaled["temp"].isna(), "no aircraft": scaled["seats"].isna()}
    new = {name: values.astype("float32") for name, values in new.items()}
    for name in CATEGORIES:
        new[f"{name} code"] = part[name].map(codes[name]).fillna(0).astype("int16")
    return part.assign(**new)


table = table.map_partitions(encode, codes, mean, spread)
training, validation, test = dask.persist(
    *(table[table["date"].isin(days_for[name])] for name in days_for)
)
in_each = [part["late"] for part in (training, validation, test)]
flights_in, late_in = dask.compute(
    [late.count() for late in in_each], [late.mean() for late in in_each]
)
for name, count, share in zip(days_for, flights_in, late_in):
    print(
        f"{name:10} {len(days_for[name]):3} days, {count:7,} flights, {share:.1%} late"
    )

# %% [markdown]
# ## 4. One partition and a plain loop
#
# The model turns each category into a small vector, an *embedding*, and joins the
# numbers to it. Three linear layers follow. The output is a score. The *sigmoid* maps
# it to a number between 0 and 1: the probability of being late. The loss is the binary
# cross-entropy. Its unit is the *nat*, because it uses the natural logarithm; smaller
# is better.


# %%
class LateModel(nn.Module):
    def __init__(self, sizes, hidden):
        super().__init__()
        widths = [min(12, (size + 1) // 2) for size in sizes]
        self.embeddings = nn.ModuleList(map(nn.Embedding, sizes, widths))
        self.layers = nn.Sequential(
            nn.Linear(sum(widths) + len(SCALED), hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden // 2),
            nn.ReLU(),
            nn.Linear(hidden // 2, 1),
        )

    def forward(self, codes, numbers):
        """Scores (rows,) of codes (rows, categories) and numbers (rows, columns)."""
        embedded = [each(codes[:, n]) for n, each in enumerate(self.embeddings)]
        return self.layers(torch.cat([*embedded, numbers], dim=1))[:, 0]


# %% tags=["lesson"]
torch.manual_seed(settings.seed)
january = training.partitions[0].compute()  # one partition comes to this process
codes_here = torch.tensor(january[CODES].to_numpy(), dtype=torch.long)
numbers_here = torch.tensor(january[SCALED].to_numpy())
late_here = torch.tensor(january["late"].to_numpy())
model = LateModel(sizes, hidden=32)
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
for epoch in range(6):
    losses = []
    for rows in torch.randperm(len(january)).split(128):
        scores = model(codes_here[rows], numbers_here[rows])
        loss = F.binary_cross_entropy_with_logits(scores, late_here[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
share = late_here.mean()
constant = F.binary_cross_entropy(share.expand_as(late_here), late_here).item()
print(f"the same probability for every flight: {constant:.2f} nats per flight")
print(
    "the training loss of the last epoch is below it:", bool(np.mean(losses) < constant)
)

# %% [markdown]
# This works as long as the rows fit into one process. With the settings as they are,
# ours do: `training.compute()` and this loop are enough. Today's subject is a table
# that does not fit. The usual way is then a detour: write files, leave the cluster,
# start ranks elsewhere, read the files.

# %% [markdown]
# ## 5. Predict
#
# Instead, we train on the workers. Two workers hold twelve partitions. In one run, each
# has every second month. In another run, one worker has January to June and the other
# July to December. So the two ranks see quite different flights. Compare the loss of
# each step in the two runs:
#
# - `"same"`: equal up to rounding;
# - `"noisy"`: other batches, so other losses, but no worse in the end;
# - `"biased"`: each rank has its own season, and gradients pull apart.
#
# **Write your guess before you go on**, and one sentence why. Section 6 says how the
# rows are dealt, and section 8 scores the guess.

# %% tags=["lesson"]
my_prediction = None  # "same", "noisy" or "biased"

# %% [markdown]
# ## 6. What changes
#
# | line | what it does |
# |---|---|
# | `launch(…, table=encoded)` | a Dask table is an argument like any other |
# | `table` in the rank | this rank's partitions |
# | `table.tensors(CODES, SCALED, "late")` | its rows as tensors, made once |
# | `ElasticSampler(data, …)` | the table instead of the number of samples |
# | `ddp.DataLoader(data, …)` | gives the rows that the sampler deals to this rank |
#
# **Ranks start where the partitions are.** Each worker starts one rank and hands its
# partitions over in *shared memory*, which two processes of a machine can both read. If
# one worker has many more rows than another, whole partitions move first, as few as
# possible.
#
# **The deal decides which rows make a batch.** In `mnist`, rank 0 took every second
# sample of a batch. Here a rank cannot take rows that another worker has. So a batch
# takes from *every* partition its proportional share. A rank trains on those rows of
# the batch that it has: a half, or a tenth. All ranks compute the same deal from the
# seed and the epoch, so they need not talk about it.
#
# **`sampler.weight` makes the average exact.** A rank with 300 of 512 rows must count
# 300/512. DDP divides the sum over two ranks by 2. So the weight is 2 · 300/512.


# %%
def train(table, sizes, epochs, batch_size, learning_rate, hidden, seed):
    """Train a LateModel on the rows that this rank has; returns its weights."""
    device = ddp.device()
    torch.manual_seed(seed)  # the same initial weights on all ranks
    data = table.tensors(CODES, SCALED, "late")
    sampler = ddp.ElasticSampler(data, batch_size, seed=seed)
    loader = ddp.DataLoader(data, batch_sampler=sampler)
    model = DDP(LateModel(sizes, hidden).to(device))
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    checkpoint = ddp.Checkpoint(
        model=model, optimizer=optimizer, sampler=sampler, every_steps=20
    )
    checkpoint.restore()  # nothing to restore on a first attempt
    for epoch in sampler.epochs(epochs):
        for codes, numbers, late in loader:
            scores = model(codes.to(device), numbers.to(device))
            loss = F.binary_cross_entropy_with_logits(scores, late.to(device))
            loss = loss * sampler.weight
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ddp.report(loss=loss)
    checkpoint.save()
    return model.module.state_dict()


# %% [markdown]
# ### The deal, as a picture
#
# How can a batch get the right share of each partition? Shuffle the rows of each
# partition. Then spread them evenly between 0 and 1, from a random beginning: a
# partition of 1,000 rows has one at every thousandth. Read all partitions together from
# left to right, and cut after every `batch_size` rows.


# %% tags=["lesson"]
def places(lengths, random):
    """The places between 0 and 1 of each partition's rows: a list of arrays."""
    return [(np.arange(rows) + random.random()) / max(rows, 1) for rows in lengths]


lengths = [24, 24, 6, 40]
spread_out = places(lengths, np.random.default_rng(1))
show(
    ready.deal_picture(lengths, spread_out, batch_size=16),
    "Four rows of squares, a square for each row of a partition, evenly spaced. "
    "Vertical lines cut them into batches of 16; each batch has more squares of the "
    "long partitions than of the short ones, in proportion.",
)

# %% [markdown]
# ## 7. Train and predict on Dask
#
# `encoded` has the columns that the network reads. Dask computes it on the workers that
# have `training` already.

# %%
encoded = training[[*CODES, *SCALED, "late"]].persist()
chosen = {
    name: getattr(settings, name)
    for name in ["epochs", "batch_size", "learning_rate", "hidden", "seed"]
}
run = ddp.launch(
    client, train, **kit.launch_options(), table=encoded, sizes=sizes, **chosen
)

# %% [markdown]
# **Predict where the rows are.** `submit` sends the weights once, to one worker, which
# builds the model. It returns a *future*: a name for the result, which other workers
# can fetch. `map_partitions` runs `probability` on each partition. The predictions are
# one more column of their table. Errors on *validation* days are drawn into the folder
# of the run, `errors.png`.


# %%
def make_model(weights, sizes, hidden):
    """A LateModel with these weights."""
    model = LateModel(sizes, hidden)
    model.load_state_dict({name: values.cpu() for name, values in weights.items()})
    return model


def probability(part, model):
    """The probability of being late, for each row of a partition."""
    codes = torch.tensor(part[CODES].to_numpy(), dtype=torch.long)
    numbers = torch.tensor(part[SCALED].to_numpy(), dtype=torch.float32)
    with torch.no_grad():
        return pd.Series(torch.sigmoid(model(codes, numbers)).numpy(), part.index)


def with_predictions(table, model):
    """A Dask table with one more column, `probability`."""
    column = table.map_partitions(probability, model, meta=(None, "float32"))
    return table.assign(probability=column)


model = client.submit(make_model, run.result, sizes, settings.hidden)
judged = with_predictions(validation, model)
run.save_figure(curve(run.metrics, label="loss (nats per flight)"), "loss.png")
run.save_figure(ready.errors_picture(judged), "errors.png")
plt.close("all")

# %% [markdown]
# **The test days judge once, now.** *Average precision* asks whether late flights come
# first when flights are sorted by their probability. 1 is perfect; a constant guess
# gets the share of late flights. Flights of one day share its weather. So for the 95 %
# interval we draw whole *days* with replacement.

# %% tags=["nbval-ignore-output"]
judged = with_predictions(test, model)[["date", "late", "probability"]]
enough = min(1, 200_000 / flights_in[2])  # 1, unless the table is huge
judged = judged.sample(frac=enough, random_state=0).compute()
point, low, high = ready.precision_over_days(judged)
print("test days  average precision")
print(f"network    {point:.3f} ({low:.3f} to {high:.3f})")
print(f"a constant guess has an average precision of {judged['late'].mean():.3f}")

# %% [markdown]
# ## 8. Proofs
#
# `ready.placed` puts copies of short, uneven partitions where we want them. Then we
# train. Each Dask worker keeps a log of what it has fetched from other workers, and
# `ready.fetched` adds up its bytes. (Gradients are not in this log: the ranks exchange
# them themselves.)

# %% tags=["lesson"]
short = {"epochs": 2, "batch_size": 256, "learning_rate": 3e-3, "hidden": 16, "seed": 0}
layouts = {
    "every second month": ([0, 1] * 6, 2),  # the places, and the number of ranks
    "half a year each": ([0] * 6 + [1] * 6, 2),
    "all on one worker, two ranks": ([0] * 12, 2),
    "all on one worker, one rank": ([0] * 12, 1),
}
curves, crossed = {}, {}
for name, (layout, ranks) in layouts.items():
    few = ready.placed(client, encoded, layout, lengths=[50, 350, 650] * 4)
    before = ready.fetched(client)
    run_of = ddp.launch(
        client, train, table=few, sizes=sizes, **short, workers=ranks, directory=False
    )
    crossed[name] = ready.fetched(client) - before
    curves[name] = run_of.metrics.groupby("step")["loss"].mean()
curves = pd.DataFrame(curves)
size = sum(client.gather(client.map(lambda part: part.memory_usage().sum(), few)))

# %% [markdown]
# **The loss does not depend on the layout.**

# %% tags=["proof"]
first = curves["every second month"]
assert len(curves) >= 4 and not curves.isna().any(axis=None)
assert first.iloc[-1] < first.iloc[0], "it should learn"
for name in curves:
    assert np.allclose(curves[name], first, rtol=1e-6, atol=0), curves
print(f"equal to a relative 1e-6 in each of {len(curves)} steps:", *curves, sep="\n  ")
if my_prediction is None:
    print("you have made no prediction; the ranks say 'same'")
else:
    verdict = "right" if my_prediction == "same" else "not right: the ranks say 'same'"
    print(f"your prediction was {my_prediction!r}: {verdict}")

# %% [markdown]
# **Rows do not move again and again.** Where the workers have equal shares, none is
# fetched at all. Where one worker has everything, a part moves, so that both ranks have
# work: less than one copy of the table, though each row was read in two epochs.

# %% tags=["proof"]
moved = {name: count for name, count in crossed.items() if count > 0}
assert [*moved] == ["all on one worker, two ranks"]
assert 0.25 * size < sum(moved.values()) < 0.75 * size
print("no byte was fetched:", *sorted(crossed.keys() - moved), sep="\n  ")
print("a part was fetched, 25 to 75 % of the bytes of one copy:", *moved, sep="\n  ")

# %% [markdown]
# ## 9. Exercises
#
# ### Exercise A · Write the deal (14 minutes)
#
# Deal the rows of all partitions into batches, as section 6 describes. The places are
# given. Return a list of int arrays, one for each batch, of shape (rows, 2): the number
# of the partition, and the number of the row in it.
#
# - Every row comes once. All batches but the last have `batch_size` rows.
# - Each batch has from each partition its proportional share, to within three rows.
# - The rows of a partition come in random order.
# - The same seed gives the same deal on every rank; another seed gives another deal.
#
# <details><summary>Hint</summary>
# <code>random.permutation(rows)</code> shuffles the rows of a partition. Make a list of
# all (partition, row), in the order in which <code>place</code> lists them: partition
# after partition. What does <code>np.argsort(place)</code> give you?</details>


# %% tags=["exercise", "solution"]
def my_deal(lengths, batch_size, seed):
    """A list of int arrays (rows of the batch, 2): partition, and row in it."""
    random = np.random.default_rng(seed)
    place = np.concatenate(places(lengths, random))  # of every row
    # your code
    rows = [
        (partition, row)
        for partition, length in enumerate(lengths)
        for row in random.permutation(length)
    ]
    dealt = np.array(rows)[np.argsort(place, kind="stable")]
    return [
        dealt[start : start + batch_size] for start in range(0, len(dealt), batch_size)
    ]
    # end of your code


# %% tags=["exercise"]
judge(checks.deal, my_deal)

# %% [markdown]
# ### Exercise B · Write features without a leak (12 minutes)
#
# A *leak* is a feature that uses what nobody knew when the question was asked. It makes
# a model look splendid and be useless. A test can find leaks: **change the future, and
# see which features change.** `leaks` does so for some hours. `change_future` changes
# what was not known when the hour began: the delays of all flights that arrive later,
# and the weather from that hour on. The features of the flights of that hour must stay
# as they were.


# %% tags=["lesson"]
def leaks(features, flights, weather, hours=8):
    """The columns of `features(flights, weather)` that know the future, sorted."""
    random = np.random.default_rng(0)
    known, found = features(flights, weather), set()
    hour_of = flights.dropna(subset=["arr_delay"])["time_hour"].reset_index(drop=True)
    for hour in random.choice(hour_of.unique(), hours):
        changed = features(*change_future(flights, weather, hour, random))
        now = (hour_of == hour).to_numpy()
        for name in known:
            if not known[name][now].equals(changed[name][now]):
                found.add(name)
    return sorted(found)


# %% [markdown]
# Here are three features. `delay of the carrier` is the mean arrival delay of the
# carrier's flights that were scheduled to depart in the last 24 hours. Which of the
# three leak? Guess before you run the test.


# %% tags=["lesson"]
def features_with_leaks(flights, weather):
    """Features of the flights that arrived, in their order."""
    arrived = flights.dropna(subset=["arr_delay"]).reset_index(drop=True)
    table = arrived.merge(weather, on=["origin", "time_hour"], how="left")
    delay, when = arrived["arr_delay"].astype("float64"), arrived["time_hour"]
    of_carrier = pd.Series(np.nan, arrived.index)
    for (carrier, hour), now in arrived.groupby(["carrier", "time_hour"]):
        last_day = (when < hour) & (when >= hour - pd.Timedelta(hours=24))
        of_carrier[now.index] = delay[last_day & (arrived["carrier"] == carrier)].mean()
    return pd.DataFrame(
        {
            "distance": table["distance"],
            "rain": table["precip"],
            "delay of the carrier": of_carrier,
        }
    )


# %% tags=["proof"]
def our_features(flights, weather):
    return prepare(flights, weather, planes).drop(columns="late")


some_days = flights.partitions[0].compute().reset_index(drop=True)
some_days = some_days[some_days["day"] < some_days["day"].min() + 3]
found = leaks(features_with_leaks, some_days, weather)
assert found and leaks(our_features, some_days, weather) == []
print("the features of section 3: no leak found")
print("these three features:", ", ".join(found))

# %% [markdown]
# **The test can find a leak. It can never exclude one.** It tries a few hours, of a few
# days, and changes nothing but these two tables.
#
# Write the same three columns without a leak. Copy `features_with_leaks`, and change
# what is wrong:
#
# - `rain`: of the hour before;
# - `delay of the carrier`: the mean delay of the carrier's flights whose delay *became
#   known* in the 24 hours before `time_hour`. `arrival(flights)` gives the time of each
#   arrival, in UTC.
#
# Where nothing was known, leave NaN.
#
# <details><summary>Hint 1</summary>
# Shift <code>weather</code> as <code>prepare</code> does, by one hour. Do not call
# <code>prepare</code>; it also transforms the rain.</details>
# <details><summary>Hint 2</summary>
# The loop may stay. What must <code>when</code> be, if a delay is known at the
# arrival?</details>


# %% tags=["exercise", "solution"]
def my_features(flights, weather):
    """The same three columns, with nothing that was not known at `time_hour`."""
    # your code
    arrived = flights.dropna(subset=["arr_delay"]).reset_index(drop=True)
    before = weather.assign(time_hour=weather["time_hour"] + pd.Timedelta(hours=1))
    table = arrived.merge(before, on=["origin", "time_hour"], how="left")
    delay, when = arrived["arr_delay"].astype("float64"), arrival(arrived)
    of_carrier = pd.Series(np.nan, arrived.index)
    for (carrier, hour), now in arrived.groupby(["carrier", "time_hour"]):
        last_day = (when < hour) & (when >= hour - pd.Timedelta(hours=24))
        of_carrier[now.index] = delay[last_day & (arrived["carrier"] == carrier)].mean()
    return pd.DataFrame(
        {
            "distance": table["distance"],
            "rain": table["precip"],
            "delay of the carrier": of_carrier,
        }
    )
    # end of your code


# %% tags=["exercise"]
judge(checks.features, my_features)

# %% [markdown]
# ## 10. Break it: a worker dies
#
# At step 30, the *worker* of rank 1 is killed, with its partitions. Dask has written
# down how they were made: which file, which functions. So it can make them again.
# `restarts=1` waits for that and goes on from the newest checkpoint. Read the message.
# Reports travel in the background, so the last known step can be earlier than 30.


# %% tags=["lesson", "nbval-ignore-output"]
mark = run.directory / "killed"
mark.unlink(missing_ok=True)  # if this cell has run before


def kill_the_worker_once():
    if not mark.exists():
        mark.touch()
        psutil.Process(int(os.environ["DDP_WORKER_PROCESS"])).kill()
        time.sleep(60)  # this rank ends with its worker


dies = ddp.inject(train, kill_the_worker_once, rank=1, step=30)
arguments = {"table": encoded, "sizes": sizes, **short, "batch_size": 512}
undisturbed = ddp.launch(client, train, **arguments, workers=2, directory=False)
had = client.who_has(encoded)  # {the name of a partition: its workers}
killed = ddp.launch(client, dies, **arguments, workers=2, restarts=1, directory=False)
print("", killed.failures[0], sep="\n")

# %% [markdown]
# **The lost partitions are made again, and training goes on as before.**
# In `pets`, the resumed run was equal bit for bit. Here the new worker may get other
# partitions than the old one had. Then the rows of a batch are summed in another order,
# and the last digits can differ. Training amplifies that: after some hundred steps the
# weights may differ visibly. So we compare the losses of the 40 steps after step 20,
# from which the run went on.

# %% tags=["proof"]
assert len(killed.failures) == 1
distributed.wait(encoded)
has, alive = client.who_has(encoded), set(client.workers())
lost = [name for name, workers in had.items() if not alive & set(workers)]
assert all(alive & set(has[name]) for name in had), has
print("some partitions were only on the killed worker:", bool(lost))
print("all partitions are in memory again")
# What the killed ranks had done after step 20 was done again: the last report counts.
losses = [
    each.metrics.drop_duplicates(["rank", "step"], keep="last")
    .groupby("step")["loss"]
    .mean()
    .loc[21:60]
    for each in (undisturbed, killed)
]
assert len(losses[0]) == len(losses[1]) > 10
assert np.allclose(*losses, rtol=1e-3, atol=0), losses
print("the killed run goes on with the losses of the undisturbed one, to 1e-3")

# %% [markdown]
# ## 11. Recap
#
# **Why train where the table already is?**
#
# - There is no detour by files. Rows move only to even out the shares. Predictions come
#   back as a column, and the model travels, not the table. `docs/measured.md` compares:
#   1 GB was in two ranks more than 8 times as fast as by way of Parquet files.
# - You need not care where the rows are. A batch takes its share from each partition.
#   In section 8, the loss depended neither on the layout nor on the number of ranks.
# - Lost partitions are made again, as long as Dask knows how. It does not know this of
#   rows that your own process made and sent to the workers (`client.scatter`).
#
# If the table fits into one process, you need none of this: use section 4.
#
# **Common mistakes.** Splitting by row. Scaling with the held-out days. Using the
# weather of the hour of departure, or delays of flights that are still in the air.
#
# **Next:** your own table, with `docs/dask-data.md`. **Read:** Dask's [DataFrame][1]
# and [resilience][2]; Chen and Guestrin, [*XGBoost*][3], which also trains where the
# partitions are; the original of this table, [nycflights13][4].
#
# [1]: https://docs.dask.org/en/stable/dataframe.html
# [2]: https://distributed.dask.org/en/stable/resilience.html
# [3]: https://arxiv.org/abs/1603.02754
# [4]: https://github.com/tidyverse/nycflights13

# %%
client.close()
