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
# table already is?** The usual way is a detour: write files, start ranks elsewhere,
# read the files.
#
# **Afterwards you can**
# - prepare a table with Dask, and keep the held-out days out of it;
# - give it to `launch`, so that each rank trains on the rows of its worker;
# - write the deal: the rule that says which rows make a batch;
# - bring predictions back as a column, and compare them with a simple rule;
# - survive the loss of a worker and its rows.
#
# **You need** `mnist` and `pets` (*rank*, *worker*, *checkpoint*). There, every rank
# could read every sample. Here, a worker has some rows only.
#
# **Time:** 75 to 100 minutes in class, 21 or more for two exercises. **Data:** flights
# from New York in 2013, shipped with the repository.

# %% [markdown]
# ## 2. Set-up
#
# All settings are here. `make run TUTORIAL=flights SET="share=1"` takes all flights
# instead of a quarter. `PRESET=full` draws with replacement, 20 million rows.

# %%
import dask
import dask.dataframe as dd
import distributed
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import ddp_common as ddp
from tutorials import flights_tables as ready  # what is not today's subject
from tutorials import kit
from tutorials.checks import flights as checks
from tutorials.checks.common import judge, prediction
from tutorials.flights_tables import arrival, duration
from tutorials.helpers import curve, show

# %% tags=["parameters"]
settings = kit.settings(
    "flights",
    data="shipped",  # or a folder with the same four files
    share=0.25,  # of the flights of each month
    epochs=4,
    batch_size=2_048,  # of all ranks together
    learning_rate=1e-2,
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
# We ask: **will a flight arrive more than 15 minutes late?** We ask at the beginning of
# the hour in which it is scheduled to depart. A *feature* is a column that the model
# reads. It may only use what was known at that moment.
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
# scheduled departure, in UTC. Delays are in minutes. The weather of an hour is measured
# *during* that hour. So a flight gets the weather of the hour *before*.

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
    table["duration"] = duration(table)
    table["age"] = year - table["built"].astype("float32")
    table["precip"] = np.log1p(100 * table["precip"])  # many hours have a little rain
    table["late"] = (table["arr_delay"] > 15).astype("float32")
    return table[["date", *CATEGORIES, *NUMBERS, "late"]]


table = flights.map_partitions(prepare, weather, planes).persist()

# %% [markdown]
# `persist` starts the computing. The results stay on the workers; `table` only points
# to them.
#
# **Split by day, not by row.** The flights of one day share its weather and its delays.
# So we hold out whole *days*: a fifth for validation, a fifth for the test. The days
# are drawn at random: some training days follow test days. So the result is about other
# days of the same year. To ask about next year, hold out the *last* weeks.

# %%
days = ready.days_of(table)
parts = ddp.split(len(days), [0.2, 0.2], seed=0)
days_for = {
    name: [days[number] for number in sorted(part)]
    for name, part in zip(("training", "validation", "test"), parts)
}
training = table[table["date"].isin(days_for["training"])]

# %% [markdown]
# **Means and categories come from training days only.** A missing number becomes 0,
# which is the mean after scaling. Each column with missing numbers gets a second
# column, its *flag*, which says where.

# %%
mean, spread, missing = dask.compute(
    training[NUMBERS].astype("float64").mean(),
    training[NUMBERS].astype("float64").std(),
    training[NUMBERS].isna().mean(),
)
FLAGGED = [name for name in NUMBERS if missing[name] > 0]
SCALED = [f"{name} scaled" for name in NUMBERS] + [f"no {name}" for name in FLAGGED]
print("missing, of the training flights:")
print(*(f"{name} {missing[name]:.1%}" for name in FLAGGED), sep=", ")

# %% [markdown]
# A network needs numbers for categories. Each worker counts the categories of its
# partitions, and we add the counts. A rare or unknown category gets code 0.

# %%
CODES = [f"{name} code" for name in CATEGORIES]


def count(part):
    """How often each category is in a partition: {column: Series}."""
    return {name: part[name].value_counts() for name in CATEGORIES}


def encode(part, codes, mean, spread):
    """The partition with numbers for a network beside its columns."""
    scaled = (part[NUMBERS].astype("float64") - mean) / spread.replace(0, 1)
    new = {f"{name} scaled": scaled[name].fillna(0) for name in NUMBERS}
    new |= {f"no {name}": part[name].isna() for name in FLAGGED}
    new = {name: values.astype("float32") for name, values in new.items()}
    for name in CATEGORIES:
        new[f"{name} code"] = part[name].map(codes[name]).fillna(0).astype("int16")
    return part.assign(**new)


counted = dask.compute(*map(dask.delayed(count), training.to_delayed()))
codes = {name: ready.codes_of(counted, name) for name in CATEGORIES}
sizes = [1 + len(codes[name]) for name in CATEGORIES]
table = table.map_partitions(encode, codes, mean, spread).persist()
training, validation, test = (
    table[table["date"].isin(days_for[name])] for name in days_for
)
flights_in = dask.compute(
    *(part["late"].count() for part in (training, validation, test))
)
for name, number in zip(days_for, flights_in):
    print(f"{name:10} {len(days_for[name]):3} days, {number:7,} flights")

# %% [markdown]
# ## 4. A rule to beat, and a model
#
# **The rule:** its guess for a flight is the share of late training flights in the same
# month and hour. A network is worth its trouble only if it is better.

# %%
rule, late_share = dask.compute(
    training.groupby(["month", "hour"])["late"].mean().rename("rule"),
    training["late"].mean(),
)
for hour in (7, 13, 19):
    print(f"July, hour {hour:2}: {rule.get((7, hour), late_share):.0%} were late")

# %% [markdown]
# **The model** turns each category into a small vector, an *embedding*, and joins the
# numbers to it. Three linear layers follow. The output is a score. The *sigmoid* maps
# it to a probability of being late. The loss is the binary cross-entropy, in *nats*: it
# uses the natural logarithm. Smaller is better.


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


# %% [markdown]
# Our flights would fit into one process: `training.compute()` brings them. We treat
# them as a table that does not fit.
#
# <details><summary><b>A small question:</b> someone splits by row. A storm makes the
# flights of one evening late. Why can the test result become too good?</summary>
# Some flights of that evening are training rows, others test rows. Month, hour and
# weather tell which evening it is. On a new day they cannot.</details>

# %% [markdown]
# ## 5. The deal
#
# **Ranks start where the partitions are.** Each worker starts one rank and hands its
# partitions over in *shared memory*, which two processes of a machine can both read. If
# one worker has many more rows than another, some partitions move first.
#
# **The deal decides which rows make a batch.** In `mnist`, rank 0 took every second
# sample of a batch. Here a rank cannot take rows that another worker has. So a batch
# takes from *every* partition its proportional share. A rank trains on its own rows of
# the batch. All ranks compute the same deal from the seed and the epoch.
#
# How does a batch get the right share? Shuffle the rows of each partition. Place them
# evenly between 0 and 1, from a random start: 1,000 rows lie one thousandth apart. Read
# all partitions together from left to right, and cut after every `batch_size` rows.


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
# ## 6. The loop, and your prediction
#
# | line | what it does |
# |---|---|
# | `table` | this rank's partitions; they do not pass through your notebook |
# | `table.tensors(…)` | their rows as tensors, made once |
# | `ElasticSampler(data, …)` | the deal; it gets the table instead of a number |
# | `ddp.DataLoader(data, …)` | the rows that are dealt to this rank |
#
# **The ranks' parts of a batch differ in size.** A rank's loss is the mean over its own
# rows. With 300 of 512 rows, it should count 300/512. DDP divides the sum over two
# ranks by 2. So `sampler.weight` is 2 · 300/512.


# %%
def to_tensors(part):
    """Codes, numbers and labels of a partition, a row for each flight."""
    codes = torch.tensor(part[CODES].to_numpy(), dtype=torch.long)
    numbers = torch.tensor(part[SCALED].to_numpy(), dtype=torch.float32)
    return codes, numbers, torch.tensor(part["late"].to_numpy())


def train(table, sizes, epochs, batch_size, learning_rate, hidden, seed):
    """Train a LateModel on the rows that this rank has; returns its weights."""
    device = ddp.device()
    torch.manual_seed(seed)  # the same initial weights on all ranks
    data = table.tensors(to_tensors)
    sampler = ddp.ElasticSampler(data, batch_size, seed=seed)
    loader = ddp.DataLoader(data, batch_sampler=sampler)
    model = DDP(LateModel(sizes, hidden).to(device))
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    parts = {"model": model, "optimizer": optimizer, "sampler": sampler}
    checkpoint = ddp.Checkpoint(**parts, every_steps=5)
    checkpoint.restore()  # nothing to restore on a first attempt
    for epoch in sampler.epochs(epochs):
        for codes, numbers, late in loader:
            scores = model(codes.to(device), numbers.to(device))
            loss = F.binary_cross_entropy_with_logits(scores, late.to(device))
            loss = loss * sampler.weight
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            checkpoint.step()
            ddp.report(loss=loss)
    checkpoint.save()
    return model.module.state_dict()


# %% [markdown]
# **Predict.** Two workers hold twelve partitions. In one run, the months alternate
# between them. In another run, one worker has January to June and the other July to
# December. All else is equal. Compare the loss of each step, averaged over the ranks:
#
# - `"same"`: equal up to rounding;
# - `"noisy"`: other batches, other losses, but no worse in the end;
# - `"biased"`: each rank has its own season, and the result is worse.
#
# **Write your guess before you go on**, and one sentence why. Section 8 scores it.

# %% tags=["lesson"]
my_prediction = None  # "same", "noisy" or "biased"

# %% [markdown]
# <details><summary><b>A small question:</b> someone leaves out
# <code>sampler.weight</code>. Rank 0 has 300 rows of a batch, rank 1 has 212. Which
# rows count too much?</summary>
# Those of rank 1. Each rank counts one half. A row of rank 1 gets 1/212 of its half, a
# row of rank 0 only 1/300.</details>

# %% [markdown]
# ## 7. Train and predict on Dask
#
# `encoded` has only the columns that the network reads.

# %%
encoded = training[[*CODES, *SCALED, "late"]].persist()
arguments = {"table": encoded, "sizes": sizes}
for name in ("epochs", "batch_size", "learning_rate", "hidden", "seed"):
    arguments[name] = getattr(settings, name)
run = ddp.launch(client, train, **kit.launch_options(), **arguments)

# %% [markdown]
# **Predict where the rows are.** `submit` sends the weights to one worker, which builds
# the model. It returns a *future*: a name for the result, which other workers can
# fetch. `map_partitions` runs `guesses` on each partition: two more columns of the
# table.


# %%
def make_model(weights, sizes, hidden):
    """A LateModel with these weights."""
    model = LateModel(sizes, hidden)
    model.load_state_dict({name: values.cpu() for name, values in weights.items()})
    return model


def guesses(part, model, rule, otherwise):
    """A partition's days, with the two guesses for each flight."""
    codes, numbers, _ = to_tensors(part)
    with torch.no_grad():
        network = torch.sigmoid(model(codes, numbers)).numpy()
    by_rule = part[["month", "hour"]].join(rule, on=["month", "hour"])["rule"]
    by_rule = by_rule.fillna(otherwise)  # an hour that no training day has
    return part[["date", "late"]].assign(network=network, rule=by_rule)


model = client.submit(make_model, run.result, sizes, settings.hidden)
types = {"date": "M8[us]", "late": "f4", "network": "f4", "rule": "f8"}
judged = {
    name: part.map_partitions(guesses, model, rule, late_share, meta=types)
    for name, part in (("validation", validation), ("test", test))
}
run.save_figure(curve(run.metrics, label="loss (nats per flight)"), "loss.png")
year = ready.year_picture(judged["validation"].compute(), ["network", "rule"])
run.save_figure(year, "year.png")
plt.close("all")

# %% tags=["lesson"]
show(
    year,
    "The share of late flights on each validation day of 2013: dots for what was "
    "observed, a line for the network's mean guess and a broken line for the rule's. "
    "The network's line goes up and down with the dots more than the rule's.",
)

# %% [markdown]
# On which days is the rule far off, and the network not? What did it know?
#
# **The test days are used once, here.** Sort the flights by the guess, highest first.
# *Average precision* says whether the late ones come first: 1 is perfect, and a
# constant guess gets the share of late flights. The flights of one day belong together.
# So for a 95 % interval we draw whole *days* with replacement. The last row, the
# difference, uses the same draws. (Another training would differ, too. The interval
# does not say by how much.)

# %% tags=["nbval-ignore-output"]
enough = min(1, 200_000 / flights_in[2])  # 1, unless the table is huge
on_test_days = judged["test"].sample(frac=enough, random_state=0).compute()
precision = ready.precision_over_days(on_test_days, ["network", "rule"])
print(precision.round(3))
print(f"a constant guess: {on_test_days['late'].mean():.3f}")

# %% [markdown]
# ## 8. Proofs
#
# `ready.placed` puts copies of short, uneven partitions where we want them. Then we
# train. Each Dask worker has a log of what it has fetched from other workers, and
# `ready.fetched` adds up its bytes. (Gradients are not in it: the ranks exchange them.)

# %% tags=["lesson"]
short = {"epochs": 2, "batch_size": 512, "learning_rate": 5e-3, "hidden": 16}
short["seed"] = settings.seed
layouts = {
    "every second month": ([0, 1] * 6, 2),  # the places, and the number of ranks
    "half a year each": ([0] * 6 + [1] * 6, 2),
    "all on one worker, two ranks": ([0] * 12, 2),
    "all on one worker, one rank": ([0] * 12, 1),
}
curves, fetched = {}, {}
for name, (layout, ranks) in layouts.items():
    few = ready.placed(client, encoded, layout, lengths=[50, 350, 650] * 4)
    before = ready.fetched(client)
    run_of = ddp.launch(
        client, train, table=few, sizes=sizes, **short, workers=ranks, directory=False
    )
    fetched[name] = ready.fetched(client) - before
    curves[name] = run_of.metrics.groupby("step")["loss"].mean()
curves, size = pd.DataFrame(curves), ready.size(client, few)
fetched = {name: count / size for name, count in fetched.items()}
show(
    ready.layouts_picture(layouts, curves, fetched),
    "Left: four rows of twelve squares, coloured by the worker that has the partition, "
    "and the share of the table's bytes that was fetched: 0 %, 0 %, about a half, 0 %. "
    "Right: the losses of the four runs; the four lines lie on each other.",
)

# %% [markdown]
# **In these runs, the loss did not depend on the layout.** Where the workers have equal
# shares, no row is fetched. Where one worker has everything, a part moves, so that both
# ranks have work: once, although two epochs use it.

# %% tags=["proof"]
first = curves["every second month"]
assert len(curves) >= 4 and not curves.isna().any(axis=None)
assert first.iloc[-1] < first.iloc[0], "it should learn"
print(f"In {len(curves)} steps, compared with the first layout:")
for name in curves:
    off = (curves[name] / first - 1).abs().max()
    print(f"{name:28}  losses off by {off:.5f}; rows fetched: {fetched[name] > 0}")
    assert off < 1e-6
print(prediction(my_prediction))

moved = [name for name, share in fetched.items() if share > 0]
assert moved == ["all on one worker, two ranks"] and 0.25 < fetched[moved[0]] < 0.75

# %% [markdown]
# <details><summary><b>A small question:</b> with files, how often does each byte of the
# table move before the first step?</summary>
# At least twice: a worker writes it, a rank reads it.</details>

# %% [markdown]
# ## 9. Exercises
#
# ### Exercise A · Write the deal (9 minutes)
#
# Deal the rows of all partitions into batches, as in section 5. The places are given.
# Return a list of int arrays, one for each batch, of shape (rows, 2): the number of the
# partition, and the number of the row in it.
#
# - Every row comes once. All batches except the last have `batch_size` rows.
# - Each batch has from each partition its proportional share, to within three rows.
# - The rows of a partition come in random order, and each partition has an order of its
#   own.
# - One seed gives one deal on every rank; another seed gives another deal.
#
# <details><summary>Hint</summary>
# <code>random.permutation(rows)</code> shuffles the rows of a partition. Make a list of
# all (partition, row) in the order of <code>place</code>: partition after partition.
# What does <code>np.argsort(place)</code> give you?</details>


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
# ### Exercise B · Features that leak (12 minutes)
#
# If you train on a table from somebody else, you rely on how they made it. A *leak* is
# a feature that uses what nobody knew when the question was asked. `ready.leaks`
# changes what nobody knew when an hour began: delays of later arrivals, and the weather
# from that hour on. Features of that hour's flights that change then are leaks.
#
# `delay of the carrier` is the mean arrival delay of the carrier's flights that were
# scheduled to depart in the 24 hours before. Which of the three leak? Guess first.


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


some = flights.partitions[0].compute()
some = some[some["day"] < some["day"].min() + 2].head(150)  # of two days
ours = ready.leaks(our_features, some, weather)
found = ready.leaks(features_with_leaks, some, weather)
print("of the features of section 3 leak:", ", ".join(ours) or "none that was found")
print("of these three leak:", ", ".join(found))
assert found and not ours

# %% [markdown]
# The test can find a leak. It cannot exclude one.
#
# Copy the body of `features_with_leaks`, and mend it:
#
# - `rain`: of the hour before, in the unit of `weather`;
# - `delay of the carrier`: of the carrier's flights that *arrived* in the 24 hours
#   before `time_hour`. `arrival(t)` gives the times, in UTC, at which the flights of
#   the table `t` arrived, with the index of `t`.
#
# Where nothing was known, leave NaN.
#
# <details><summary>Hint</summary>
# Shift <code>weather</code> as <code>prepare</code> does. The loop may stay, with
# <code>when = arrival(arrived)</code>.</details>


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
# We train the first epoch again. After 8 steps, the *worker* of rank 1 is killed, with
# its partitions. Dask has written down how they were made: which file, which functions.
# So it makes them again. `restarts=1` waits for that and goes on from the newest
# checkpoint. (Reports travel in the background. The last known step can be below 8.)

# %% tags=["lesson", "nbval-ignore-output"]
mark = run.directory / "killed"  # so that it happens once
mark.unlink(missing_ok=True)  # if this cell has run before
dies = ddp.inject(train, ready.kill_the_worker, rank=1, step=8, mark=mark)
had = client.who_has(encoded)  # {the name of a partition: its workers}
arguments |= {"epochs": 1, "workers": 2, "restarts": 1, "directory": False}
killed = ddp.launch(client, dies, **arguments)
print("", killed.failures[0], sep="\n")

# %% [markdown]
# **The lost partitions are made again, and training goes on.** The new worker may get
# other partitions than the old one had. Then the rows of a batch are summed in another
# order, and the last digits can differ. Training amplifies that. So we compare the
# losses of this epoch only.

# %% tags=["proof"]
assert len(killed.failures) == 1
distributed.wait(encoded)
has, alive = client.who_has(encoded), set(client.workers())
lost = [name for name, workers in had.items() if not alive & set(workers)]
there = [name for name in had if alive & set(has[name])]
print(f"{len(there)} of {len(had)} partitions are in memory, the lost ones among them")
assert lost and len(there) == len(had)
expected, losses = (
    each.metrics.drop_duplicates(["rank", "step"], keep="last")  # of steps done twice
    .groupby("step")["loss"]
    .mean()
    for each in (run, killed)
)
losses = losses.loc[6:]
off = (losses / expected.loc[losses.index] - 1).abs().max()
print(f"losses of {len(losses)} steps: off by {off:.2f} of those in section 7, at most")
assert len(losses) > 3 and off < 1e-3

# %% [markdown]
# <details><summary><b>A small question:</b> your notebook makes a table with pandas,
# and sends it to the workers (<code>client.scatter</code>). One dies. What is
# lost?</summary>
# The rows that only it had: Dask does not know how to make them.</details>

# %% [markdown]
# ## 11. Recap
#
# - **No detour.** Rows move once, and only to make shares equal. The model travels, and
#   predictions come back as a column. `docs/measured.md` compares the time with the way
#   through files.
# - **Nothing to arrange.** In section 8, the losses depended neither on the layout nor
#   on the number of ranks, up to rounding.
# - **A worker may die.** Dask made its partitions again, and the ranks went on.
#
# If the table fits into one process, you need none of this. On tables, trees are often
# better than networks ([Grinsztajn and others][5]): compare.
#
# **Next:** your own table, with `docs/dask-data.md`. **Read:** Dask's [DataFrame][1]
# and [resilience][2]; Chen and Guestrin, [*XGBoost*][3]; the original of this table,
# [nycflights13][4].
#
# [1]: https://docs.dask.org/en/stable/dataframe.html
# [2]: https://distributed.dask.org/en/stable/resilience.html
# [3]: https://arxiv.org/abs/1603.02754
# [4]: https://github.com/tidyverse/nycflights13
# [5]: https://arxiv.org/abs/2207.08815

# %%
client.close()
