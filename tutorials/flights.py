# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Flights: train where the table lies
#
# ## 1. The question
#
# A Dask cluster has prepared a table. **Why train where the table lies?** The usual way
# is a detour: write files, start ranks elsewhere, read the files.
#
# **Afterwards you can**
# - prepare a table with Dask, and keep the held-out days out of it;
# - give the table to `launch`, so that each rank trains on the rows of its worker;
# - make batches from rows that lie on several workers;
# - say from about how many rows on this pays.
#
# **You need** `mnist`, `pets` (*rank*, *worker*, *checkpoint*) and, for *intervals*,
# `ucmerced`. There, every rank could read every sample. Here, a worker has some rows
# only.
#
# **Time:** 75 to 90 minutes in class, 30 of them for two exercises. **Data:** flights
# from New York in 2013, shipped with the repository.

# %% [markdown]
# ## 2. Set-up
#
# All settings are here. `make run TUTORIAL=flights SET="share=1"` takes all flights
# instead of a quarter.

# %% tags=["context"]
import tempfile

import dask
import dask.dataframe as dd
import distributed
import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from sklearn.ensemble import HistGradientBoostingClassifier
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import ddp_common as ddp
from tutorials import flights_tables as ready  # what is not today's subject
from tutorials import kit
from tutorials.checks import flights as checks
from tutorials.checks.common import judge
from tutorials.helpers import show

# %% tags=["parameters", "context-my_batches"]
settings = kit.settings(
    "flights",
    data="shipped",  # or a folder with the same files
    share=0.25,  # of the flights of each month; above 1: drawn with replacement
    epochs=4,
    batch_size=2_048,  # of all ranks together
    learning_rate=1e-2,
    hidden=64,
    seed=0,
    presets={"full": {"share": 60.0, "batch_size": 8_192, "hidden": 256}},
)

# %% tags=["nbval-ignore-output", "context-my_batches"]
client = ddp.connect()
dataset = kit.fetch("flights", settings.data)
print(f"{client.ranks} ranks · {dataset.title}: {dataset.origin} · {dataset.licence}")

# %% [markdown]
# ## 3. The data
#
# **Will a flight arrive more than 15 minutes late?** We ask at the beginning of the
# hour in which it is scheduled to depart. A *feature* is a column that the model reads.
# A feature may only use what was known at that moment.
#
# A Dask *DataFrame* is a table in *partitions*. Each partition is a pandas DataFrame,
# here one month of flights. Dask notes what is to be done with the partitions, and does
# nothing yet. `persist` starts the computing. The results stay on the workers, and
# `table` only points to them.
#
# `time_hour` is the hour of the scheduled departure, in UTC. Delays are in minutes. The
# weather of an hour is measured *during* that hour. So a flight gets the weather of the
# hour *before*.

# %%
CATEGORIES = ["carrier", "origin", "dest", "hour", "weekday", "month"]
NUMBERS = ["distance", "temp", "humid", "wind_speed", "precip", "pressure", "visib"]


def prepare(flights, weather):
    """Flights that arrived, with their features and `late`."""
    arrived = flights.dropna(subset=["arr_delay"])
    before = weather.assign(time_hour=weather["time_hour"] + pd.Timedelta(hours=1))
    keys = ["origin", "time_hour"]
    table = arrived.merge(before, on=keys, how="left", validate="many_to_one")
    local = table["time_hour"].dt.tz_convert("America/New_York").dt.tz_localize(None)
    table["date"], table["hour"] = local.dt.normalize(), local.dt.hour
    table["weekday"] = local.dt.day_of_week
    table["late"] = (table["arr_delay"] > 15).astype("float32")
    return table[["date", *CATEGORIES, *NUMBERS, "late"]]


weather = pd.read_parquet(dataset.path / "weather.parquet")
months = dd.read_parquet(dataset.path / "flights.parquet", split_row_groups=True)
flights = months.map_partitions(
    pd.DataFrame.sample, frac=settings.share, replace=settings.share > 1, random_state=0
)
table = flights.map_partitions(prepare, weather).persist()

# %% [markdown]
# `split_row_groups` makes a partition of each month. `map_partitions` calls a function
# on each partition, when its result is asked for. `persist` asks, and leaves the result
# on the workers; `compute` brings it here.
#
# **We split by day, not by row.** The flights of one day share its weather and its
# delays. A fifth of the *days* is for the test, the rest for training. The days are
# drawn at random. So the result is about other days of the same year. To ask about
# later days, hold out the *last* weeks.

# %%
days = sorted(table["date"].unique().compute())
parts = ddp.split(len(days), [0.2], seed=0)
training, test = (table[table["date"].isin([days[n] for n in part])] for part in parts)
rows = len(training)
print(f"training: {rows:,} flights, test: {len(test):,} flights")

# %% [markdown]
# **Means and categories come from training days only.** A network needs numbers: a
# category gets a *code*, and an unknown one the code 0. A missing number becomes 0, the
# mean after scaling.

# %%
CODES = [f"{name} code" for name in CATEGORIES]
SCALED = [f"{name} scaled" for name in NUMBERS]


def encode(part, known, mean, spread):
    """A partition with its features as numbers for a network."""
    encoded = part[["date", "late"]].copy()
    for code, name in zip(CODES, CATEGORIES):
        codes = {value: 1 + n for n, value in enumerate(sorted(known[name]))}
        encoded[code] = part[name].map(codes).fillna(0).astype("int16")
    scaled = (part[NUMBERS].astype("float64") - mean) / spread
    encoded[SCALED] = scaled.fillna(0).astype("float32").to_numpy()
    return encoded


numbers = training[NUMBERS].astype("float64")
known = {name: training[name].unique() for name in CATEGORIES}
known, mean, spread = dask.compute(known, numbers.mean(), numbers.std())
sizes = [1 + len(known[name]) for name in CATEGORIES]
training, test = (
    part.map_partitions(encode, known, mean, spread).persist()
    for part in (training, test)
)

# %% [markdown]
# <details>
# <summary><b>A small question:</b> someone splits by row. A storm makes the flights of
# one evening late. Why can the test result become too good?</summary>
# Some flights of that evening are training rows, others test rows. Month, hour and
# weather tell which evening it is. On a new day they cannot.</details>
#
# ## 4. A model
#
# The model turns each category into a small vector, an *embedding*, and joins the
# numbers to it. The output is a score. The *sigmoid* maps the score to a probability.
# The loss is the binary cross-entropy, in *nats* (natural logarithm). Smaller is
# better.


# %%
class LateModel(nn.Module):
    def __init__(self, sizes, hidden):
        super().__init__()
        widths = [min(12, (size + 1) // 2) for size in sizes]
        self.embeddings = nn.ModuleList(map(nn.Embedding, sizes, widths))
        width = sum(widths) + len(SCALED)
        layers = nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, 1)
        self.layers = nn.Sequential(*layers)

    def forward(self, codes, numbers):
        embedded = [each(codes[:, n]) for n, each in enumerate(self.embeddings)]
        return self.layers(torch.cat([*embedded, numbers], dim=1))[:, 0]


# %% [markdown]
# ## 5. Batches from rows that lie apart
#
# **Ranks start where the partitions are.** Each worker starts one rank. The worker
# copies its partitions once, into *shared memory*, which two processes of a machine can
# both read. If the workers have about equally many rows, no row goes over the network.
# If one has many more than another, some partitions move first.
#
# **The sampler decides which rows make a batch.** In `mnist`, rank 0 took every second
# sample of a batch. Here a rank cannot take rows that another worker has. So a batch
# takes from *every* partition its proportional share (*stratified sampling*). A rank
# trains on its own rows of the batch. All ranks compute the same batches from the seed
# and the epoch.
#
# How does a batch get the right share? Shuffle the rows of each partition. Spread them
# evenly between 0 and 1, from a random start: 1,000 rows lie one thousandth apart. Read
# all partitions together from left to right, and cut after every `batch_size` rows.


# %% tags=["lesson", "context-my_batches"]
def places(lengths, random):
    """The places between 0 and 1 of each partition's rows: a list of arrays."""
    return [(np.arange(rows) + random.random()) / max(rows, 1) for rows in lengths]


lengths = [24, 24, 6, 40]
spread_out = places(lengths, np.random.default_rng(1))
show(
    ready.batches_picture(lengths, spread_out, batch_size=16),
    "Four rows of squares, a square for each row of a partition, evenly spaced. "
    "Lines cut them into batches of 16, each with its share of each partition.",
)

# %% [markdown]
# ### Exercise A · Write the batches (14 minutes)
#
# Return a list of int arrays, one for each batch, of shape (rows, 2): the number of the
# partition, and the number of the row in it. The places are given.
#
# - Every row comes once. All batches except the last have `batch_size` rows.
# - Each batch has from each partition its proportional share, give or take three rows.
# - The rows of a partition come in random order. Each partition has its own order.
# - One seed gives the same batches on every rank; another seed gives others.
#
# <details>
# <summary>Hint</summary>
# <code>random.permutation(rows)</code> shuffles the rows of a partition. Make a list of
# all (partition, row) in the order of <code>place</code>: partition after partition.
# What does <code>np.argsort(place)</code> give you?</details>


# %% tags=["exercise", "solution", "minutes-14"]
def my_batches(lengths, batch_size, seed):
    """A list of int arrays (rows of the batch, 2): partition, and row in it."""
    random = np.random.default_rng(seed)
    place = np.concatenate(places(lengths, random))  # of every row
    # your code
    rows = [
        (partition, row)
        for partition, length in enumerate(lengths)
        for row in random.permutation(length)
    ]
    ordered = np.array(rows)[np.argsort(place, kind="stable")]
    starts = range(0, len(ordered), batch_size)
    return [ordered[start : start + batch_size] for start in starts]
    # end of your code


judge(lambda answer: checks.batches(answer, client=client), my_batches)

# %% [markdown]
# ## 6. The loop, and your prediction
#
# | line | what it does |
# |---|---|
# | `table` | the partitions of this rank; they do not pass through your notebook |
# | `table.tensors(…)` | their rows as tensors, made once |
# | `ElasticSampler(data, …)` | the batches of section 5 |
# | `ddp.DataLoader(data, …)` | the rows of the batch that this rank has |
#
# **The ranks' parts of a batch differ in size.** The loss of a rank is the mean over
# its own rows. With 300 of 512 rows, this mean should count 300/512. DDP divides the
# sum over two ranks by 2. So `sampler.weight` is 2 · 300/512.


# %%
def to_tensors(part):
    """Codes, numbers and labels of a partition, a row for each flight."""
    codes = torch.tensor(part[CODES].to_numpy(), dtype=torch.long)
    numbers = torch.tensor(part[SCALED].to_numpy())
    return codes, numbers, torch.tensor(part["late"].to_numpy())


def train(table, epochs, batch_size, weighted=True):
    """Train a LateModel on the rows that this rank has; returns its weights."""
    device = ddp.device()
    torch.manual_seed(settings.seed)  # the same initial weights on all ranks
    data = table.tensors(to_tensors)
    sampler = ddp.ElasticSampler(data, batch_size, seed=settings.seed)
    loader = ddp.DataLoader(data, batch_sampler=sampler)
    model = DDP(LateModel(sizes, settings.hidden).to(device))
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.learning_rate)
    parts = {"model": model, "optimizer": optimizer, "sampler": sampler}
    checkpoint = ddp.Checkpoint(**parts, every_steps=5)
    checkpoint.restore()  # nothing to restore on a first attempt
    for epoch in sampler.epochs(epochs):
        for codes, numbers, late in loader:
            scores = model(codes.to(device), numbers.to(device))
            loss = F.binary_cross_entropy_with_logits(scores, late.to(device))
            weight = sampler.weight
            loss = loss * (weight if weighted else 1)  # section 8: without
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            checkpoint.step()
            ddp.report(loss=loss)
    checkpoint.save()
    return model.module.cpu().state_dict()


# %% [markdown]
# **Predict.** Somebody has sorted the table. The flights on time, 76 %, lie on one
# worker, and the late ones, 24 %, on the other. And somebody leaves out
# `sampler.weight`. Which mean probability of being late does the trained model give to
# the test flights?
#
# - `"right"`: about 24 %, since DDP averages the gradients of both ranks;
# - `"too high"`: far more;
# - `"too low"`: far less, since rank 0 has three times as many rows.
#
# **Write your guess before you go on**, and one sentence why.

# %% tags=["lesson", "minutes-1"]
my_prediction = None  # "right", "too high" or "too low"

# %% [markdown]
# ## 7. Train and predict on Dask
#
# `train` travels to the ranks, with what it uses of this notebook, such as `settings`.

# %%
encoded = training[[*CODES, *SCALED, "late"]].persist()
given = {"table": encoded, "epochs": settings.epochs, "batch_size": settings.batch_size}
run = ddp.launch(client, train, **kit.launch_options(), **given)

# %% [markdown]
# **The opponent** is *gradient boosting*: many small decision trees, each of which
# corrects those before it. It reads the same columns. It needs all rows in one process:
# `client.compute` brings them to one worker. `submit` lets a worker call a function.

# %%
trees = HistGradientBoostingClassifier(
    max_iter=50, categorical_features=CODES, random_state=settings.seed
)


def fit(table):
    return trees.fit(table[[*CODES, *SCALED]], table["late"])


whole = client.compute(encoded.sample(frac=min(1, 1e6 / rows), random_state=0))
trees = client.submit(fit, whole).result()

# %% [markdown]
# **Run the model where the rows are.** The weights travel, the rows do not:
# `map_partitions` runs `guess` on each partition, `compute` brings what it returns
# here.
#
# **The test days are for this comparison.** (Section 8 looks at the mean guess on them,
# and chooses nothing by it.) Sort the flights by the guess, highest first.
# *Average precision* says whether the late ones come first: 1 is perfect, and a
# constant guess gets the share of late flights. The flights of one day belong together.
# So for a 95 % interval (`ucmerced`) we draw whole *days* with replacement.
#
# <details>
# <summary><b>Guess first:</b> which is better here, the network or the trees, and do
# their intervals overlap?</summary>
# The row <code>network - trees</code> has the interval of the difference: if 0 is not
# in it, the data tell them apart.</details>


# %% tags=["nbval-ignore-output"]
def guess(part, weights):
    """A partition with the network's probability that each flight is late."""
    model = LateModel(sizes, settings.hidden)
    model.load_state_dict(weights)
    codes, numbers, _ = to_tensors(part)
    with torch.no_grad():
        return part.assign(network=torch.sigmoid(model(codes, numbers)).numpy())


tested = test.map_partitions(guess, run.result).compute()
tested["trees"] = trees.predict_proba(tested[[*CODES, *SCALED]])[:, 1]
print(ready.precision_over_days(tested, ["network", "trees"]).round(3))
print(f"a constant guess: {tested['late'].mean():.3f}")

# %% [markdown]
# On tables, trees are often better than networks ([Grinsztajn and others][5]). Ours
# fits into one process. For such a table, choose trees.
#
# ## 8. Does it matter where the rows lie?
#
# `ready.placed` puts copies of short, uneven partitions where we want them. Each worker
# has a log of what it has fetched from other workers. (Gradients are not in it: the
# ranks exchange them.)

# %% tags=["proof"]
layouts = {  # the worker of each partition
    "every second month": [0, 1] * 6,
    "half a year each": [0] * 6 + [1] * 6,
    "all on one worker": [0] * 12,
}
losses = {}
for name, layout in layouts.items():
    few = ready.placed(client, encoded, layout, lengths=[50, 350, 650] * 4)
    before = ready.fetched(client)
    short = {"table": few, "epochs": 2, "batch_size": 512, "directory": False}
    done = ddp.launch(client, train, **short, workers=2)
    moved = ready.fetched(client) > before
    losses[name] = done.metrics.groupby("step")["loss"].mean()
    off = (losses[name] / losses["every second month"] - 1).abs().max()
    print(f"{name:18}  losses off by {off:.4f} at most; rows moved: {moved}")
    assert off < 1e-4 and moved == (name == "all on one worker")

# %% [markdown]
# **In these runs, the losses did not depend on the layout.** Rows moved only where one
# worker had everything.
#
# Now the sorted table, with `sampler.weight` and without:

# %% tags=["proof"]
apart = [encoded[encoded["late"] == is_late] for is_late in (0, 1)]
apart = dd.concat([each.repartition(npartitions=1) for each in apart]).persist()
means = []
for weighted in (True, False):
    other = given | {"table": apart, "epochs": 2, "weighted": weighted}
    done = ddp.launch(client, train, **other, workers=2, directory=False)
    means.append(test.map_partitions(guess, done.result)["network"].mean().compute())
late, right, wrong = tested["late"].mean(), *means
print(f"late {late:.0%}; mean guess {right:.0%}, without the weight {wrong:.0%}")
assert abs(right - late) < 0.07 and wrong > right + 0.12
print(checks.without_weight(my_prediction))

# %% [markdown]
# No error was raised. Without the weight, the layout decides what the model learns.
#
# ## 9. What the detour costs
#
# Three ways into the ranks. `direct`: each rank gets what its worker has. `files`: the
# table is written as Parquet, and each rank reads its share of the files. `client`: the
# rows come to this notebook, which sends each worker its half. Each ends when both
# ranks have tensors of all their rows. The second row has the table five times.
#
# <details>
# <summary><b>Predict:</b> how many times does a row change its process by each way,
# until it is in a rank?</summary>
# `direct` 1, from the worker; `files` 2, by way of the disk; `client` 3: to the
# notebook, to a worker, to its rank.</details>

# %% tags=["lesson", "nbval-ignore-output"]
larger = dd.concat([encoded] * 5).persist()
seconds = [ready.three_ways(client, each, to_tensors) for each in (encoded, larger)]
print(pd.DataFrame(seconds, [rows, 5 * rows]).round(2))

# %% [markdown]
# Each time holds the start of the ranks. **Our table does not need the direct way**: it
# saves tenths of a second at each start, and more with five times the rows. With 1 GB
# we measured 0.48 s, 4.1 s through files, and 18.4 s as arguments from the client
# ([more](../docs/measured.md)). The direct way also pays where you start often, or
# where the table does not fit into the memory of one process. On several machines,
# files need a shared disk, and a network would make both detours longer.
#
# ## 10. Features that know the future
#
# ### Exercise B · Features that leak (16 minutes)
#
# A *leak* is a feature that uses what nobody knew when the question was asked.
# `ready.leaks` picks some hours, alters all that was still unknown when each began
# (delays of later arrivals, the weather from that hour on), and computes the features
# again. A feature of that hour's flights that changes is a leak.
#
# `delay of the carrier` is the mean arrival delay of the carrier's flights that were
# scheduled to depart in the 24 hours before. Which of the three leak? Guess first.


# %% tags=["lesson", "context"]
def features_with_leaks(flights, weather):
    """Features of the flights that arrived, in their order."""
    arrived = flights.dropna(subset=["arr_delay"]).reset_index(drop=True)
    table = arrived.merge(weather, on=["origin", "time_hour"], how="left")
    delay, when = arrived["arr_delay"].astype("float64"), arrived["time_hour"]
    of_carrier = pd.Series(np.nan, arrived.index)
    for (carrier, hour), now in arrived.groupby(["carrier", "time_hour"]):
        last_day = (when < hour) & (when >= hour - pd.Timedelta(hours=24))
        of_carrier[now.index] = delay[last_day & (arrived["carrier"] == carrier)].mean()
    table["rain"], table["delay of the carrier"] = table["precip"], of_carrier
    return table[["distance", "rain", "delay of the carrier"]]


# %% tags=["proof"]
some = flights.partitions[0].compute().sort_values("time_hour").head(300)
found = ready.leaks(features_with_leaks, some, weather)
print("of these three leak:", ", ".join(found))
assert found

# %% [markdown]
# The test can find a leak. It cannot exclude one.
#
# Copy the body of `features_with_leaks`, and mend it:
#
# - `rain`: of the hour before, as `weather` has it;
# - `delay of the carrier`: of the carrier's flights that *arrived* in the 24 hours
#   before `time_hour`, with or without their ends. `ready.arrival(t)` gives the times,
#   in UTC, at which the flights of the table `t` arrived, with the index of `t`.
#
# Where nothing was known, leave NaN.
#
# <details>
# <summary>Hint</summary>
# Shift <code>weather</code> as <code>prepare</code> does. The loop may stay, with
# <code>when = ready.arrival(arrived)</code>.</details>


# %% tags=["exercise", "solution", "minutes-16"]
def my_features(flights, weather):
    """The same three columns, with nothing that was not known at `time_hour`."""
    # your code
    arrived = flights.dropna(subset=["arr_delay"]).reset_index(drop=True)
    before = weather.assign(time_hour=weather["time_hour"] + pd.Timedelta(hours=1))
    table = arrived.merge(before, on=["origin", "time_hour"], how="left")
    delay, when = arrived["arr_delay"].astype("float64"), ready.arrival(arrived)
    of_carrier = pd.Series(np.nan, arrived.index)
    for (carrier, hour), now in arrived.groupby(["carrier", "time_hour"]):
        last_day = (when < hour) & (when >= hour - pd.Timedelta(hours=24))
        of_carrier[now.index] = delay[last_day & (arrived["carrier"] == carrier)].mean()
    table["rain"], table["delay of the carrier"] = table["precip"], of_carrier
    return table[["distance", "rain", "delay of the carrier"]]
    # end of your code


judge(checks.features, my_features)

# %% [markdown]
# ## 11. If you have time: a worker dies
#
# We train the first epoch again. After 8 steps, the *worker* of rank 1 is killed, and
# its partitions are lost. Dask has noted how they were made: which file, which
# functions. So it makes them again. `restarts=1` waits for that, and goes on from the
# newest checkpoint.

# %% tags=["lesson", "nbval-ignore-output"]
with tempfile.TemporaryDirectory() as folder:  # a mark in it: so that it happens once
    dies = ddp.inject(
        train, ready.kill_the_worker, rank=1, step=8, mark=f"{folder}/mark"
    )
    had = client.who_has(encoded)  # {the name of a partition: its workers}
    once_more = given | {"epochs": 1, "workers": 2, "directory": False}
    killed = ddp.launch(client, dies, **once_more, restarts=1)
print("", *str(killed.failures[0]).splitlines()[:2], sep="\n")

# %% tags=["proof"]
distributed.wait(encoded)
has, alive = client.who_has(encoded), set(client.workers())
lost = [name for name, workers in had.items() if not alive & set(workers)]
there = [name for name in had if alive & set(has[name])]
print(f"{len(there)} of {len(had)} partitions are in memory, the lost ones among them")
assert len(killed.failures) == 1 and lost and len(there) == len(had)
expected, again = (
    each.metrics.dropna(subset="loss").groupby("step")["loss"].mean()
    for each in (run, killed)
)
again = again.loc[6:]  # the steps after the checkpoint
off = (again / expected.loc[again.index] - 1).abs().max()
print(f"losses of {len(again)} steps: off by {off:.4f} of those in section 7, at most")
assert len(again) > 3 and off < 1e-3

# %% [markdown]
# The new worker may get other partitions than the old one had. Then the rows of a batch
# are summed in another order, and the last digits can differ.
#
# <details>
# <summary><b>A small question:</b> your notebook makes a table with pandas, and sends
# it to the workers (<code>client.scatter</code>). One worker dies. What is
# lost?</summary>
# The rows that only this worker had: Dask does not know how to make them.</details>
#
# ## 12. Recap
#
# - **No detour.** The rows of a worker are copied once, into the memory of its rank.
#   Some partitions move, only to make shares equal. This pays for millions of rows.
# - **`sampler.weight` is not optional.** With it, the losses did not depend on the
#   layout, up to rounding.
# - **A worker may die.** Dask made its partitions again, and the ranks went on.
#
# If the table fits into one process, you need none of this, and trees may be better.
#
# **Next:** your own table, with `docs/dask-data.md` (its *deal* is the sampling of
# section 5). **Read:** Dask's [DataFrame][1] and [resilience][2]; Chen and Guestrin,
# [*XGBoost*][3]; the original of this table, [nycflights13][4].
#
# [1]: https://docs.dask.org/en/stable/dataframe.html
# [2]: https://distributed.dask.org/en/stable/resilience.html
# [3]: https://arxiv.org/abs/1603.02754
# [4]: https://github.com/tidyverse/nycflights13
# [5]: https://arxiv.org/abs/2207.08815

# %%
client.close()
