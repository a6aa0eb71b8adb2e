# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Flights: a table that Dask prepared is trained where it lies
#
# **Question.** Why Dask? Prepare a table, train a network on it and predict with it, on
# one cluster, with the data staying where they are.
#
# **Afterwards you can**
# - prepare a table with Dask, so that nothing of the held-out days is in it;
# - give it to `launch`, and train on the partitions that lie on each worker;
# - *prove* that the loss does not depend on where they lie, and that no data moved;
# - write the deal of rows into batches that makes this so;
# - find features that know the future, with a test instead of by luck.
#
# Appendix A, at home: judge the network beside baselines that were tuned as well.
#
# **You need** the tutorials `mnist` and `pets` (*rank*, *worker*, *checkpoint*). No
# GPU, no network, nothing is downloaded.
#
# **Time:** 75 minutes in class, of which 1 to 2½ minutes of computing on two cores.
# **Data:** flights from New York in 2013, shipped with the repository.

# %% [markdown] tags=["instructor"]
# **Instructor.** Minutes: card 2, set-up 3, data 5, one rank 7, predict 3, what changes
# 12, on Dask 6, proofs 8, exercises 20, break it 6, recap 3. Sum: 75. The appendices
# come on top.
#
# Ask first: where do your tables lie before you train on them, and how do they get into
# the training program? Keep the answers on the board. Most are a detour by files.
#
# **If you are late:** leave out the picture of the deal in section 6 and the second
# fault of section 10. Never leave out exercise 2: whoever has found one leak by a test
# will write such a test at home.

# %% [markdown]
# ## 2. Set-up and preflight
#
# All settings stand here. `make run TUTORIAL=flights SET="epochs=2"` changes one of
# them. `share=1` takes all flights instead of a quarter. With more than 1, flights of
# each month are drawn with replacement: `PRESET=full` makes a table that is meant to be
# larger than the memory of one worker (appendix B).

# %%
import dask
import dask.dataframe as dd
import distributed
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import OneHotEncoder
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

import ddp_common as ddp

# %% tags=["parameters"]
settings = ddp.settings(
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
dataset = ddp.fetch("flights", settings.data)
backend = "nccl" if torch.cuda.is_available() else "gloo"
versions = f"torch {torch.__version__} · {backend} · {client.ranks} ranks"
print(f"{versions} · {dataset.title}: {dataset.origin} · {dataset.licence}")

# %% tags=["lesson", "nbval-ignore-output"]
print("Dask's dashboard:", getattr(client, "dashboard_link", "there is none"))

# %% [markdown]
# ## 3. The data
#
# Three tables: flights, the weather of each hour at the airports, and aircraft. The
# question: **will a flight arrive more than 15 minutes late?** It is asked at the
# scheduled departure, so a feature may only hold what was known *then*.
#
# A Dask *DataFrame* is a table in *partitions*. Each is a pandas DataFrame, here one
# month of flights. Dask notes what is to be done with it, and does nothing yet.


# %%
def read_side_tables(folder):
    """Weather and aircraft. Raises ddp.Error where a join would repeat flights."""
    weather = pd.read_parquet(folder / "weather.parquet")
    planes = pd.read_parquet(folder / "planes.parquet")
    for name, table, key in (
        ("weather", weather, ["origin", "time_hour"]),
        ("planes", planes, ["tailnum"]),
    ):
        if again := int(table.duplicated(key).sum()):
            raise ddp.Error(
                f"{folder}/{name}.parquet has {again} row(s) whose {' and '.join(key)} "
                "stand in another row already, so a join would repeat flights. Keep "
                f"one of each: drop_duplicates({key})."
            )
    return weather, planes


def draw(month, share):
    """A share of the rows; with replacement if it is more than all of them."""
    return month.sample(frac=share, replace=share > 1, random_state=0)


weather, planes = read_side_tables(dataset.path)
flights = dd.read_parquet(dataset.path / "flights.parquet", split_row_groups=True)
flights = flights.map_partitions(draw, settings.share)

# %% tags=["lesson"]
print(flights.npartitions, "partitions; the first rows of the first one:")
columns = "time_hour carrier tailnum origin dest sched_dep_time arr_delay".split()
print(flights[columns].head(3).to_string(index=False))

# %% [markdown]
# `prepare` works on one partition. Look at the weather: an hour's record holds what was
# measured *during* that hour, after some of its flights should have left. So a flight
# gets the weather of the hour *before*.

# %%
CATEGORIES = ["carrier", "origin", "dest", "manufacturer", "hour", "weekday", "month"]
WEATHER = ["temp", "dewp", "humid", "wind_speed", "precip", "pressure", "visib"]
NUMBERS = ["distance", "scheduled", *WEATHER, "age", "seats"]


def minutes(clock):
    """Minutes since midnight of a time that is written as HHMM."""
    return (clock // 100 * 60 + clock % 100).astype("int32")


def prepare(flights, weather, planes):
    """Flights that arrived, with what was known of weather and aircraft, and `late`."""
    flights = flights.dropna(subset=["arr_delay"])
    an_hour = pd.Timedelta(hours=1)
    before = weather.assign(time_hour=weather["time_hour"] + an_hour)
    table = flights.merge(before, on=["origin", "time_hour"], how="left")
    table = table.merge(planes, on="tailnum", how="left")
    local = table["time_hour"] - 5 * an_hour  # close enough for the number of the year
    year, month, day = local.dt.year, table["month"], table["day"]
    table["date"] = pd.to_datetime({"year": year, "month": month, "day": day})
    table["hour"] = table["sched_dep_time"] // 100
    table["weekday"] = table["date"].dt.day_of_week
    departs, arrives = (
        minutes(table["sched_dep_time"]),
        minutes(table["sched_arr_time"]),
    )
    table["scheduled"] = (
        arrives - departs
    ) % 1_440  # minutes by the clocks on the wall
    table["age"] = year - table["year"].astype("float32")
    table["precip"] = np.log1p(100 * table["precip"])  # many hours have a little rain
    table["late"] = (table["arr_delay"] > 15).astype("float32")
    return table[["date", *CATEGORIES, *NUMBERS, "late"]]


table = flights.map_partitions(prepare, weather, planes).persist()

# %% [markdown]
# `persist` starts the computing. The partitions stay in the memory of the workers;
# here, `table` only points to them.
#
# **Split by day, not by row.** On a day with a storm, most flights are late. If a model
# has seen half of the flights of that day, it knows the other half. So whole *days* are
# held out: a fifth to choose by (validation), a fifth for the test.

# %%
days = sorted(table["date"].unique().compute())
if len(days) < 10:
    raise ddp.Error(
        f"{dataset.path} holds flights of {len(days)} day(s), and 10 are needed: whole "
        "days are held out to judge by. Add days."
    )
parts = ddp.split(len(days), [0.2, 0.2], seed=0)
days_of = {
    name: [days[number] for number in sorted(part)]
    for name, part in zip(("training", "validation", "test"), parts)
}
training = table[table["date"].isin(days_of["training"])]

# %% [markdown]
# **Categories and scales come from training days only.** Dask counts each category and
# computes means over all partitions at once. A category that is rare or unknown gets
# code 0. A missing number becomes 0, the mean; two columns say that it was missing.

# %%
CODES = [f"{name} code" for name in CATEGORIES]
SCALED = [*(f"{name} scaled" for name in NUMBERS), "no weather", "no aircraft"]

mean, spread, *counts = dask.compute(
    training[NUMBERS].astype("float64").mean(),
    training[NUMBERS].astype("float64").std(),
    *(training[name].value_counts() for name in CATEGORIES),
)
codes = {
    name: {
        value: 1 + place for place, value in enumerate(sorted(seen[seen >= 30].index))
    }
    for name, seen in zip(CATEGORIES, counts)
}
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
    *(table[table["date"].isin(days_of[name])] for name in days_of)
)

# %%
in_each = [part["late"] for part in (training, validation, test)]
flights_in, late_in = dask.compute(
    [late.count() for late in in_each], [late.mean() for late in in_each]
)
for name, count, share in zip(days_of, flights_in, late_in):
    print(
        f"{name:10} {len(days_of[name]):3} days, {count:7,} flights, {share:.1%} late"
    )


# %% tags=["lesson"]
def show(figure, alt):
    """Show a figure, with a sentence for those who cannot see it."""
    from IPython.display import display  # a notebook has it; a batch job may not

    display(figure, metadata={"image/png": {"alt": alt}})
    plt.close(figure)


per_day = training.groupby("date")["late"].mean().compute().sort_index()
figure, axes = plt.subplots(figsize=(8, 2.4))
axes.plot(per_day.index, 100 * per_day, ".", markersize=4)
axes.axhline(100 * late_in[0], color="grey", linestyle=":", label="all of them")
axes.set(
    ylabel="late (% of flights)", title="Each training day is a dot", ylim=(0, 100)
)
axes.legend()
show(
    figure,
    "The share of late flights of each training day of 2013. Most days lie below "
    "a third, and single days reach far above a half.",
)

# %% [markdown] tags=["instructor"]
# **Instructor.** Ask why a split by row would flatter every model (the storm), and why
# days of the *same* months still flatter it a little (the season). Ask for a feature
# that looks harmless and knows the future, and write the proposals down: exercise 2.

# %% [markdown]
# ## 4. One rank first
#
# The model turns each category into a small vector (an *embedding*), sets the numbers
# beside them, and has two hidden layers. Its output is a score; its sigmoid is the
# probability of being late. The loss is the binary cross-entropy in nats per flight.


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
losses = []
for epoch in range(6):
    for rows in torch.randperm(len(january)).split(128):
        scores = model(codes_here[rows], numbers_here[rows])
        loss = F.binary_cross_entropy_with_logits(scores, late_here[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
share = late_here.mean()
blind = F.binary_cross_entropy(share.expand_as(late_here), late_here).item()
print(f"the same guess for every flight: {blind:.2f} nats per flight")
last = np.mean(losses[-len(losses) // 6 :])
print(f"the mean of the last epoch is below it: {bool(last < blind)}")

# %% tags=["lesson"]
figure, axes = plt.subplots(figsize=(6, 2.4))
axes.plot(losses)
axes.axhline(
    blind, color="grey", linestyle=":", label="the same guess for every flight"
)
axes.set(xlabel="step", ylabel="loss (nats per flight)", title="One process, January")
axes.legend()
show(
    figure,
    "The loss of one process against the step. It falls to about the dotted line "
    "of a constant guess, then below it.",
)

# %% [markdown]
# This worked because one month fits into this process. The usual way on from here is a
# detour: write the table to files, leave the cluster, start the ranks elsewhere, read
# the files again.

# %% [markdown]
# ## 5. Predict
#
# Two workers hold twelve partitions. In one run, each holds every second month. In
# another, one worker has January to June and the other July to December. So the two
# ranks see quite different flights. Compare the loss of each step in the two runs:
#
# - `"same"`: equal up to rounding;
# - `"noisy"`: other batches, so other losses, but no worse in the end;
# - `"biased"`: with one season on each rank the averaged gradients pull apart.
#
# **Write your prediction before you go on**, and one sentence why. Section 8 scores it.

# %% tags=["lesson"]
my_prediction = None  # "same", "noisy" or "biased"

# %% [markdown] tags=["instructor"]
# **Instructor.** "biased" is what happens in many programs that give each worker a file
# of its own; "noisy" is right for those that shuffle within a rank. Collect what would
# have to be true for "same". Do not resolve it.

# %% [markdown]
# ## 6. What changes
#
# | line | what it does |
# |---|---|
# | `launch(…, table=numbers)` | a Dask table is an argument like any other |
# | `table` in the rank | this rank's partitions; `len(table)` counts all ranks' rows |
# | `table.tensors(CODES, SCALED, "late")` | its rows as tensors, made once |
# | `ElasticSampler(data, …)` | the table stands where the number of samples stood |
# | `DataLoader(data, …)` | gives the rows that the sampler deals to this rank |
#
# The loop below has no other new line. Three things happen behind them.
#
# **Ranks start where the partitions lie.** Each worker starts one rank, and hands its
# partitions over through shared memory. Nothing goes over the network. If one worker
# holds far more rows than another, whole partitions move first, as few as possible.
#
# **A batch does not ask where a row lies.** In `mnist`, rank 0 took every second sample
# of a batch. Here a rank cannot take what lies elsewhere. So a batch is drawn from
# *all* partitions, from each its proportional share. A rank trains on those rows of the
# batch that it holds, be they a half or a tenth. Every rank computes the same deal from
# (seed, epoch), and no rank sends it to another.
#
# **`sampler.weight` makes the average exact.** With 300 of 512 rows, a rank's mean loss
# must count 300/512. DDP averages over two ranks, so the weight is 2 · 300/512.


# %%
def train(table, sizes, epochs, batch_size, learning_rate, hidden, seed):
    """Train a LateModel on the rows that this rank holds; returns its weights."""
    device = ddp.device()
    torch.manual_seed(seed)  # the same initial weights on all ranks
    data = table.tensors(CODES, SCALED, "late")
    sampler = ddp.ElasticSampler(data, batch_size, seed=seed)
    loader = DataLoader(data, batch_sampler=sampler)
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
# How can a batch hold the right share of each partition? Shuffle the rows of each
# partition, and lay them out evenly between 0 and 1, from a random beginning. A
# partition of 1,000 rows has a row at every thousandth. Then read all partitions
# together from left to right, and cut after every `batch_size` rows. In exercise 1 you
# write it.


# %% tags=["lesson"]
def places(lengths, seed):
    """Where the rows of each partition lie between 0 and 1: a list of arrays."""
    random = np.random.default_rng(seed)
    return [(np.arange(rows) + random.random()) / max(rows, 1) for rows in lengths]


lengths = [24, 24, 6, 40]
lying = places(lengths, seed=1)
ends = np.sort(np.concatenate(lying))[15::16]
figure, axes = plt.subplots(figsize=(8, 2.4))
for partition, x in enumerate(lying):
    batch = np.searchsorted(ends, x)
    colours = plt.cm.tab10(batch % 10)
    axes.scatter(x, np.full(len(x), partition), c=colours, marker="s", s=26)
for end in ends[:-1]:
    axes.axvline(end, color="grey", linewidth=0.8)
axes.set(
    yticks=range(4),
    yticklabels=[f"{rows} rows" for rows in lengths],
    xlim=(0, 1),
    ylabel="partition",
    xlabel="place",
    title="Batches of 16 rows, a colour for each",
)
show(
    figure,
    "Four rows of squares, a square for each row of a partition, evenly spaced. "
    "Vertical lines cut them into batches of 16; each batch has more squares of the "
    "long partitions than of the short ones, in proportion.",
)

# %% [markdown] tags=["instructor"]
# **Instructor.** Let them count the squares of one batch: 16, in about the proportions
# 24 : 24 : 6 : 40. Ask what a rank has to know to compute this (the lengths of all
# partitions, seed and epoch), and what it need not know (the rows of the others).

# %% [markdown]
# ## 7. On Dask
#
# `numbers` holds the columns that the network reads. It is computed on the workers that
# hold `training` already.

# %%
numbers = training[[*CODES, *SCALED, "late"]].persist()
chosen = {
    name: getattr(settings, name)
    for name in ["epochs", "batch_size", "learning_rate", "hidden", "seed"]
}
run = ddp.launch(client, train, table=numbers, sizes=sizes, **chosen)


# %%
def plot_losses(metrics, width=20):
    """The loss of the global batch: the mean of the ranks, and of `width` steps."""
    by_step = metrics.groupby("step")["loss"].mean()
    if len(by_step) < 5 * width:
        width = 1
    by_step = by_step.iloc[: len(by_step) // width * width]  # whole means only
    figure, axes = plt.subplots(figsize=(6, 2.6))
    axes.plot(by_step.groupby(by_step.index // width * width).mean())
    axes.set(xlabel="step", ylabel="loss (nats per flight)")
    axes.set_title(f"Training on {metrics['rank'].nunique():.0f} ranks")
    return figure


figure = plot_losses(run.metrics)
run.save_figure(figure, "loss.png")
plt.close(figure)

# %% tags=["lesson"]
show(
    figure,
    "The loss of the global batch against the step, averaged over 20 steps. It "
    "falls steeply at first and then slowly.",
)

# %% [markdown]
# **Predict on the cluster.** `submit` sends the weights *once*, to one worker, which
# makes the model. It returns a *future*, a name for the result; other workers fetch it
# there. `map_partitions` runs `probability` where each partition lies. The result is
# one more column of the table it came from, with names and dates to look at errors by.


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


model = client.submit(make_model, run.result, sizes, settings.hidden)
column = validation.map_partitions(probability, model, meta=(None, "float32"))
judged = validation.assign(probability=column)
groups = judged.groupby(["carrier", "hour"])[["late", "probability"]]
mean_of, count_of = dask.compute(groups.mean(), groups.size())

# %% [markdown]
# Errors are looked at on *validation* days. The test days are for the end.


# %%
def plot_errors(mean_of, count_of, names, least=25):
    """Late flights by carrier and hour, and how far the prediction is from them."""
    enough = mean_of[count_of >= least]
    enough = enough.sort_index()
    observed = 100 * enough["late"].unstack().sort_index(axis=1)
    error = 100 * (enough["probability"] - enough["late"]).unstack().sort_index(axis=1)
    figure, panels = plt.subplots(1, 2, figsize=(10, 4), sharey=True)
    for axes, values, limits, colours, title in (
        (panels[0], observed, (0, 60), "viridis", "Late (% of flights)"),
        (panels[1], error, (-20, 20), "coolwarm", "Predicted minus late (points)"),
    ):
        image = axes.pcolormesh(
            values.columns,
            range(len(values)),
            values,
            cmap=colours,
            vmin=limits[0],
            vmax=limits[1],
        )
        axes.set(title=title, xlabel="scheduled hour of departure")
        figure.colorbar(image)
    labels = [names.get(carrier, carrier) for carrier in observed.index]
    panels[0].set(yticks=range(len(labels)), yticklabels=labels)
    figure.tight_layout()
    return figure


names = pd.read_parquet(dataset.path / "airlines.parquet").set_index("carrier")["name"]
figure = plot_errors(mean_of, count_of, names.to_dict())
run.save_figure(figure, "errors.png")
plt.close(figure)

# %% tags=["lesson"]
show(
    figure,
    "Two tables of coloured squares, a row for each airline, a column for each "
    "hour of departure. Left: more flights are late in the evening. Right: how far the "
    "predicted share is from the observed one, red where it is too high.",
)

# %% [markdown] tags=["instructor"]
# **Instructor.** Ask what a whole *column* of one colour on the right would mean (the
# model misses something about the hour), and what single squares mean (chance: a square
# has few flights). Who proposes a new feature from this picture must judge it on other
# days: these have been looked at.

# %% [markdown]
# ## 8. Proofs
#
# A small table with uneven partitions is enough. `at(layout)` puts copies of its
# partitions where we want them: `layout` says for each partition the number of a
# worker. A *list of futures* is a table for `launch`, too.


# %% tags=["lesson"]
def uneven(part):
    """The first 50, 350 or 650 rows, as the length of the partition has it."""
    return part.head(50 + 300 * (len(part) % 3))


few = numbers.map_partitions(uneven).persist()
short = {
    "sizes": sizes,
    "epochs": 2,
    "batch_size": 256,
    "learning_rate": 3e-3,
    "hidden": 16,
    "seed": 0,
}


def copy_of(part):
    return part.copy()


def at(table, layout):
    """A future for each partition of `table`, on the worker with that number."""
    addresses = sorted(client.workers())
    originals = client.compute(table.to_delayed())
    copies = [
        client.submit(copy_of, part, workers=[addresses[number]], pure=False)
        for part, number in zip(originals, layout)
    ]
    distributed.wait(copies)
    return copies


def loss_of_steps(table, **more):
    """The loss of each global batch: the mean over the ranks."""
    metrics = ddp.launch(client, train, table=table, **{**short, **more}).metrics
    return metrics.groupby("step")["loss"].mean()


# %% [markdown]
# ### The loss does not depend on where partitions lie, nor on how many ranks there are

# %% tags=["lesson"]
if client.cluster is not None and len(client.workers()) < 3:
    client.cluster.scale(3)
client.wait_for_workers(3, timeout=60)
layouts = {
    "every second month": [0, 1] * 6,
    "half a year each": [0] * 6 + [1] * 6,
    "all on one worker": [0] * 12,
}
curves = {
    name: loss_of_steps(at(few, layout), workers=2) for name, layout in layouts.items()
}
for ranks in (1, 3):
    curves[f"{ranks} rank(s)"] = loss_of_steps(few, workers=ranks)
curves = pd.DataFrame(curves)

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
# ### No data cross between workers
#
# Each Dask worker keeps a log of what it has fetched from others. We add up its bytes
# before and after a launch. The partitions have equal lengths here, so that half of
# them are half of the rows.


# %% tags=["lesson"]
def fetched(dask_worker):
    """Bytes that a worker has fetched from other workers, by its own log."""
    return sum(transfer["total"] for transfer in dask_worker.transfer_incoming_log)


def bytes_fetched():
    return sum(client.run(fetched).values())


def of_one_length(part):
    return part.head(300)


alike = numbers.map_partitions(of_one_length).persist()
moved = {}
for name in ("half a year each", "all on one worker"):
    lying = at(alike, layouts[name])
    before = bytes_fetched()
    loss_of_steps(lying, workers=2)
    moved[name] = bytes_fetched() - before
size = alike.memory_usage(index=False, deep=True).sum().compute()
del lying  # lets go of these copies

# %% tags=["proof"]
assert moved["half a year each"] == 0, moved
assert moved["all on one worker"] > size / 4, moved
print("half a year each: 0 bytes crossed between workers")
share = moved["all on one worker"] / size
print(f"all on one worker: {share:.1f} of the table moved, so that both have work")

# %% [markdown]
# ### A worker dies, and its data come back
#
# In the middle of a run, the *worker* of rank 1 is killed, with its partitions. Dask
# knows how they were made, and makes them again. `restarts=1` waits for that, and goes
# on from the newest checkpoint.

# %% tags=["lesson", "nbval-ignore-output"]
longer = {**short, "epochs": 4}
undisturbed = ddp.launch(client, train, table=few, **longer, workers=2)
mark = run.directory / "struck"
mark.unlink(missing_ok=True)  # if this cell has run before
dies_once = ddp.inject(train, "worker killed", rank=1, step=30, mark=mark)
killed = ddp.launch(client, dies_once, table=few, **longer, workers=2, restarts=1)

# %% tags=["lesson", "nbval-ignore-output"]
restart = killed.metrics.query("event == 'restart'").iloc[0]
print("why:", restart["reason"][:70], "...")
print(f"the newest checkpoint: step {restart['step']:.0f}")

# %% tags=["proof"]
assert mark.exists() and len(killed.failures) == 1
for name, weights in undisturbed.result.items():
    assert torch.allclose(weights, killed.result[name], rtol=0, atol=1e-6), name
print("the killed run ends with the weights of the undisturbed one, to 1e-6")

# %% [markdown] tags=["instructor"]
# **Instructor.** Score the prediction first. Then ask what Dask needs to make a lost
# partition again (the graph: which file, which functions), and what it could not make
# again (rows that somebody typed into this notebook and scattered).

# %% [markdown]
# ## 9. Exercises
#
# A check runs your function. It prints `right`, or `not yet` with a question.
#
# ### Exercise 1 · Write the deal (9 minutes)
#
# **Goal.** Deal the rows of all partitions in batches, as section 6 describes. Return a
# list of arrays, one for each batch: a line for each row, (partition, row in it). Every
# row comes once. All batches have `batch_size` rows, but for the last. Each batch takes
# from each partition its proportional share, to within three rows. Rows of a partition
# come in random order. The same seed gives the same deal, on every rank.
#
# <details><summary>Hint 1</summary>
# Give each row a number between 0 and 1, its place. What does sorting by it give you?
# Which places make a partition of 10 rows and one of 1,000 end together?</details>
# <details><summary>Hint 2</summary>
# <code>places</code> in section 6 has the places. Three more things are needed: a
# permutation for each partition, <code>np.argsort</code> over all places at once, and a
# cut after every <code>batch_size</code> rows.</details>


# %% tags=["solution"]
def my_deal(lengths, batch_size, seed):
    """A list of int arrays (rows of the batch, 2): partition, and row in it."""
    # your code
    random = np.random.default_rng(seed)
    place, pairs = [], []
    for partition, rows in enumerate(lengths):
        place.append((np.arange(rows) + random.random()) / max(rows, 1))
        order = random.permutation(rows)
        pairs.append(np.stack([np.full(rows, partition), order], axis=1))
    pairs = np.concatenate(pairs)[np.argsort(np.concatenate(place), kind="stable")]
    return [
        pairs[start : start + batch_size] for start in range(0, len(pairs), batch_size)
    ]
    # end of your code


# %% tags=["exercise"]
def fault_in_deal(deal, lengths, batch_size):
    """What is wrong with a deal: (yours, expected, question), or None."""
    total = sum(lengths)
    pairs = np.concatenate(deal)
    if pairs.ndim != 2 or pairs.shape[1] != 2:
        return f"shape {pairs.shape}", "(rows, 2)", "Which two numbers name a row?"
    every = {(n, row) for n, rows in enumerate(lengths) for row in range(rows)}
    seen = set(map(tuple, pairs.tolist()))
    if seen != every or len(pairs) != total:
        yours = f"{len(pairs)} rows, {len(every - seen)} of the table missing"
        return (
            yours,
            f"each of {total} rows once",
            "Which rows does the last batch get?",
        )
    sizes = [len(batch) for batch in deal]
    if set(sizes[:-1]) != {batch_size} or not 0 < sizes[-1] <= batch_size:
        return f"batches of {sizes[:4]} ...", f"of {batch_size}", "Where do you cut?"
    for partition, rows in enumerate(lengths):
        mine = np.array([(batch[:, 0] == partition).sum() for batch in deal])
        fair = np.array(sizes) * rows / total
        if (off := abs(mine - fair)).max() > 3:
            batch = off.argmax()
            yours = f"{mine[batch]} rows of partition {partition} in batch {batch}"
            question = (
                "Where between 0 and 1 does the middle row of each partition lie?"
            )
            return yours, f"{fair[batch]:.1f}, its share", question
        if rows > 50:
            order = pairs[pairs[:, 0] == partition, 1]
            if (np.diff(order) == 1).mean() > 0.2:
                yours = f"rows {order[:5].tolist()} ... of partition {partition}"
                return yours, "a random order", "What shuffles within a partition?"
    return None


# %% tags=["exercise"]
def fault_in_seeds(answer, lengths, batch_size, seed):
    """What is wrong with the use of the seed: (yours, expected, question), or None."""
    first, again, other = (
        np.concatenate(
            [np.asarray(batch) for batch in answer(lengths, batch_size, number)]
        )
        for number in (seed, seed, seed + 1)
    )
    if not np.array_equal(first, again):
        return "two deals from one seed", "one", "Two ranks call it. Do they agree?"
    if np.array_equal(first, other):
        return "one deal from two seeds", "two", "What is `seed` used for?"
    return None


def check_deal(answer):
    random = np.random.default_rng()
    for _ in range(3):
        lengths = [0, 7, *random.integers(60, 400, size=4).tolist(), 900]
        random.shuffle(lengths)
        batch_size, seed = (int(n) for n in random.integers([40, 1], [90, 1_000]))
        deal = [np.asarray(batch) for batch in answer(list(lengths), batch_size, seed)]
        fault = fault_in_deal(deal, lengths, batch_size)
        fault = fault or fault_in_seeds(answer, list(lengths), batch_size, seed)
        if fault:
            print("not yet: yours {}, expected {}. {}".format(*fault))
            return False
    print("right: the deal knows lengths, batch size and seed, and not where rows lie")
    return True


ddp.judge(check_deal, my_deal)

# %% [markdown]
# ### Exercise 2 · Find the leak (7 minutes)
#
# A *leak* is a feature that knows what nobody knew when the question was asked. It
# makes a model look splendid and be useless. Guessing does not find leaks. A test does:
# **change the future, and see which features change.** The next cell has that test. For
# some hours, it gives all flights from that hour on other delays, and the airports
# another weather from that hour on. What is known of the flights of that hour at their
# scheduled departure must stay as it was.


# %%
def change_future(flights, weather, hour, random):
    """Copies in which all is different that was measured from `hour` on."""
    flights, weather = flights.copy(), weather.copy()
    for table, columns in ((flights, ["dep_delay", "arr_delay"]), (weather, WEATHER)):
        later = table["time_hour"] >= hour
        for name in columns:
            change = random.uniform(20, 60, size=len(table))
            changed = table[name].astype("float64") + change
            table[name] = table[name].astype("float64").mask(later, changed)
    return flights, weather


def leaks(features, flights, weather, tries=4, seed=0):
    """The columns of `features(flights, weather)` that know the future, sorted."""
    random = np.random.default_rng(seed)
    arrived = flights.dropna(subset=["arr_delay"])
    known = features(flights, weather)
    found = set()
    for hour in random.choice(arrived["time_hour"].unique(), tries, replace=False):
        now = (arrived["time_hour"] == hour).to_numpy()
        changed = features(*change_future(flights, weather, hour, random))
        for name in known.columns.drop("late", errors="ignore"):
            before, after = known[name][now], changed[name][now]
            same = (before == after) | (before.isna() & after.isna())
            if not same.all():
                found.add(name)
    return sorted(found)


# %% [markdown]
# Here are five features. Two or more of them leak. `flights` are the flights of a few
# days of one month, in the order of their scheduled departure.


# %%
def features_with_leaks(flights, weather):
    """Features of the flights that arrived, in their order."""
    arrived = flights.dropna(subset=["arr_delay"])
    table = arrived.merge(weather, on=["origin", "time_hour"], how="left")
    by_day = arrived.groupby(["month", "day", "carrier"])["arr_delay"].mean()
    today = pd.MultiIndex.from_frame(table[["month", "day", "carrier"]])
    return pd.DataFrame(
        {
            "distance": table["distance"],
            "evening": table["sched_dep_time"] >= 1_700,
            "rain": table["precip"],
            "wind": table["wind_speed"],
            "delay of the carrier": by_day.reindex(today).to_numpy(dtype="float64"),
        }
    )


# %% [markdown]
# **Goal.** Repair them: the same five columns. Of weather and carrier's delay take the
# newest that a flight *could* know: the weather of the hour before, the carrier's mean
# delay on the day before. Where there is none, leave NaN.
#
# <details><summary>Hint 1</summary>
# Run <code>leaks</code> on the function above, on the flights of some days. Then ask of
# each column it names: when was this measured?</details>
# <details><summary>Hint 2</summary>
# <code>prepare</code> in section 3 moves the weather by an hour before the join. For
# the delay, ask for the key of another day.</details>


# %% tags=["solution"]
def my_features(flights, weather):
    """The same five columns, with nothing that was not known at the departure."""
    # your code
    arrived = flights.dropna(subset=["arr_delay"])
    an_hour_later = weather["time_hour"] + pd.Timedelta(hours=1)
    before = weather.assign(time_hour=an_hour_later)
    table = arrived.merge(before, on=["origin", "time_hour"], how="left")
    by_day = arrived.groupby(["month", "day", "carrier"])["arr_delay"].mean()
    yesterday = [table["month"], table["day"] - 1, table["carrier"]]
    delay = by_day.reindex(pd.MultiIndex.from_arrays(yesterday))
    return pd.DataFrame(
        {
            "distance": table["distance"],
            "evening": table["sched_dep_time"] >= 1_700,
            "rain": table["precip"],
            "wind": table["wind_speed"],
            "delay of the carrier": delay.to_numpy(dtype="float64"),
        }
    )
    # end of your code


# %% tags=["exercise"]
def some_days(number, count=4):
    """All flights of some days of a month, with the weather of that month."""
    path = dataset.path / "flights.parquet"
    months = dd.read_parquet(path, split_row_groups=True)
    month = months.partitions[number % months.npartitions].compute()
    start = month["day"].min() + 3
    month = month[month["day"].between(start, start + count - 1)].reset_index(drop=True)
    day = pd.Timedelta(days=1)
    first, last = month["time_hour"].min() - day, month["time_hour"].max() + day
    return month, weather[weather["time_hour"].between(first, last)]


# %% tags=["exercise"]
def expected_features(flights, weather, flight):
    """What a flight could know: (rain, wind, delay of the carrier), or NaN."""
    hour = flight["time_hour"] - pd.Timedelta(hours=1)
    there = weather[
        (weather["origin"] == flight["origin"]) & (weather["time_hour"] == hour)
    ]
    rain, wind = (
        there[name].iloc[0] if len(there) else np.nan
        for name in ("precip", "wind_speed")
    )
    theirs = (flights["day"] == flight["day"] - 1) & (
        flights["carrier"] == flight["carrier"]
    )
    delays = flights["arr_delay"][theirs].dropna().to_numpy(dtype="float64")
    return rain, wind, delays.mean() if len(delays) else np.nan


# %% tags=["exercise"]
def fault_in_features(answer, flights, weather, random):
    """What is wrong with them: (yours, expected, question), or None."""
    arrived = flights.dropna(subset=["arr_delay"]).reset_index(drop=True)
    columns = list(features_with_leaks(flights, weather))
    yours = answer(flights.copy(), weather.copy())
    if not isinstance(yours, pd.DataFrame) or sorted(yours) != sorted(columns):
        got = list(yours) if isinstance(yours, pd.DataFrame) else type(yours).__name__
        return got, f"a DataFrame with {columns}", "Which have you left out?"
    if len(yours) != len(arrived):
        question = "Does a join repeat or drop some of those that arrived?"
        return f"{len(yours):,} rows", f"{len(arrived):,}", question
    if found := leaks(answer, flights, weather, tries=5, seed=random.integers(1_000)):
        question = "When was each measured, and when should the flight have left?"
        return f"{found}, which change with the future", "no such column", question
    names = ["rain", "wind", "delay of the carrier"]
    later = np.flatnonzero(arrived["day"] > arrived["day"].min())
    for number in random.choice(later, 40):
        expected = expected_features(flights, weather, arrived.loc[number])
        mine = yours.iloc[number][names].to_numpy(dtype="float64")
        for name, value, right in zip(names, mine, expected):
            if not np.isclose(value, right, equal_nan=True):
                flight = f"a flight of {arrived['carrier'][number]}"
                question = "Nothing leaks. Is there nothing newer that it could know?"
                return f"{name} {value:.2f} for {flight}", f"{right:.2f}", question
    return None


# %% tags=["exercise"]
def check_features(answer):
    random = np.random.default_rng()
    flights, weather = some_days(int(random.integers(12)))
    if fault := fault_in_features(answer, flights, weather, random):
        print("not yet: yours {}, expected {}. {}".format(*fault))
        return False
    print("right: nothing knows the future, and nothing is given away")
    return True


ddp.judge(check_features, my_features)

# %% [markdown]
# ### Exercise 3 · Which table is slow? (4 minutes)
#
# All ranks wait for the one with the most rows. `launch` moves partitions, but only
# whole ones. **Goal.** Predict which tables are slow: order them by the time of a step,
# the fastest first. A table is a list, the rows of each of its partitions. Assume that
# a step takes as long as the rows of the fullest rank, and that partitions are given
# out like this: the longest first, each to the rank that has the fewest rows so far.
#
# <details><summary>Hint 1</summary>
# Three partitions of equal length, two ranks: which share has the fuller one?</details>
# <details><summary>Hint 2</summary>
# Keep a list with the rows of each rank. Go through the partitions, the longest first,
# and add each to the smallest entry. What does the largest entry say in the end?
# </details>


# %% tags=["solution"]
def my_order(tables, ranks):
    """The names of the tables (a dict: name -> rows of each partition), sorted."""

    # your code
    def fullest(name):
        held = [0] * ranks
        for rows in sorted(tables[name], reverse=True):
            held[held.index(min(held))] += rows
        return max(held)

    return sorted(tables, key=fullest)
    # end of your code


# %% tags=["exercise"]
def some_tables(ranks, random):
    """{name: rows of each partition} of four tables of about 12,000 rows."""
    total = 12_000
    few, even = ranks + 1, ranks * int(random.integers(3, 9))
    lengths = [[total // few] * few, [total // even] * even]
    for share in (0.1, 0.7):  # of what is over one rank's fair share, in one partition
        large = int(total * (1 / ranks + share * (1 - 1 / ranks)))
        count = int(random.integers(10, 40))
        lengths.append(random.permutation([large, *[(total - large) // count] * count]))
    names = random.permutation(list("abcd")).tolist()
    return {name: [int(rows) for rows in each] for name, each in zip(names, lengths)}


def rows_of_fullest(lengths, ranks):
    """Rows of the fullest rank, if the longest go first, each to the emptiest rank."""
    held = np.zeros(ranks)
    for rows in sorted(lengths, reverse=True):
        held[held.argmin()] += rows
    return held.max()


# %% tags=["exercise"]
def check_order(answer):
    random = np.random.default_rng()
    for ranks in (2, 3, 5, 4):
        tables = some_tables(ranks, random)
        yours = answer({name: list(rows) for name, rows in tables.items()}, ranks)
        expected = sorted(tables, key=lambda name: rows_of_fullest(tables[name], ranks))
        if list(yours or []) != expected:
            print(f"not yet: yours {yours}, expected {expected}, on {ranks} ranks:")
            for name, rows in tables.items():
                lengths = f"of {min(rows)} to {max(rows)} rows"
                print(f"  {name}: {len(rows)} partitions, {lengths}")
            print("Which rank do the others wait for, and how many rows has it?")
            return False
    print("right: a step takes as long as the largest share of its batch")
    return True


ddp.judge(check_order, my_order)

# %% [markdown]
# Now measure it: the same rows three times, in large batches, so that computing
# outweighs what the ranks tell each other. Is the second really as fast as the first?


# %% tags=["lesson", "nbval-ignore-output"]
def joined(*parts):
    return pd.concat(parts)


def milliseconds(table):
    """The time of a step: the lower quartile, since other programs only add to it."""
    large = {**short, "epochs": 3, "batch_size": 8_192, "hidden": 256}
    metrics = ddp.launch(client, train, table=table, **large, workers=2).metrics
    times = metrics[metrics["rank"] == 0].sort_values("step")["time"]
    return 1_000 * times.diff().quantile(0.25)


even = at(numbers, layouts["every second month"])
one_large = [client.submit(joined, *even[:10], pure=False), *even[10:]]
for name, table_of_futures in (
    ("every second month on each worker", even),
    ("all on one worker, and moved", at(numbers, layouts["all on one worker"])),
    ("ten of the months in one partition", one_large),
):
    print(f"{name}: {milliseconds(table_of_futures):.0f} ms for a step")

# %% [markdown] tags=["instructor"]
# **Instructor.** Wrong answers to expect. *Exercise 1*: one permutation of all rows
# (the shares vary by chance); partition after partition; in turn, one row from each
# (short ones are used up early); no shuffle inside; the last rows dropped; no seed.
# *Exercise 2*: the weather alone repaired; the suspicious columns dropped or set to 0
# (that is safe, and gives knowledge away: ask what a flight could know); the day
# *after*; the mean over all days (it holds the future, too). *Exercise 3*: by the
# largest partition alone, by the number of partitions, by the mean.

# %% [markdown]
# ## 10. Break it
#
# **From the museum: the departure delay.** It stands in the table beside the answer,
# and many a notebook uses it. Nobody knows it at the scheduled departure. Rank flights
# by this one column, with no training at all, and compare with the network:


# %%
def average_precision(late, score, weight=None):
    """The mean precision at each late flight, best scores first; ties count as one."""
    late, score = np.asarray(late, dtype="float64"), np.asarray(score, dtype="float64")
    weight = np.ones(len(late)) if weight is None else weight
    order = np.argsort(-score, kind="stable")
    last_of_tie = np.flatnonzero(np.append(np.diff(score[order]) != 0, True))
    found = np.cumsum((late * weight)[order])[last_of_tie]
    named = np.cumsum(weight[order])[last_of_tie]
    precision = found / np.maximum(named, 1e-12)
    return (np.diff(found, prepend=0) * precision).sum() / found[-1]


def with_departure_delay(flights, weather):
    """From the museum of faults: a feature that is measured after the question."""
    delay = flights.dropna(subset=["arr_delay"])["dep_delay"].to_numpy("float64")
    return prepare(flights, weather, planes).assign(dep_delay=delay)


def check_known_at_departure(features, flights, weather):
    """Raise AssertionError if a feature knows what was measured after the question."""
    found = leaks(features, flights, weather)
    assert not found, f"{', '.join(found)}: changes with the future"


# %% tags=["lesson", "nbval-ignore-output"]
network = make_model(run.result, sizes, settings.hidden)
january = flights.partitions[0].compute()
leaky = encode(with_departure_delay(january, weather), codes, mean, spread)
leaky = leaky[leaky["date"].isin(days_of["validation"])]
print("average precision on the validation days of January:")
for name, score in (
    ("the network", probability(leaky, network)),
    ("the departure delay alone", leaky["dep_delay"]),
):
    print(f"  {name}: {average_precision(leaky['late'], score):.2f}")

# %% tags=["proof"]
for features in (lambda *tables: prepare(*tables, planes), with_departure_delay):
    try:
        check_known_at_departure(features, *some_days(6))
        print("the features of section 3: none changes with the future")
    except AssertionError as caught:
        assert features is with_departure_delay
        print("with the departure delay: caught,", caught)

# %% [markdown]
# **A number is missing.** Somebody gives the network the columns before they are scaled
# and filled. Read the message together: how many are missing, and where?


# %% tags=["lesson"]
def train_on_raw_columns(table):
    return len(table.tensors(NUMBERS, "late"))


try:
    raw = training[[*NUMBERS, "late"]]
    ddp.launch(client, train_on_raw_columns, table=raw, workers=2)
except ddp.RankFailed as failure:
    said = failure.traceback.strip().splitlines()[-1]
    print(said[: said.index(" on this rank")], "... and then the columns:")
    print([name for name in NUMBERS if f"{name} (" in said])

# %% [markdown]
# One NaN in a batch makes the loss NaN, and from then on all weights. So `tensors`
# refuses it, before the first step. The repair belongs where features are made:
# `encode`.

# %% [markdown] tags=["instructor"]
# **Instructor.** Expected: 'the network with the delay is the better model'. Ask when
# it would be used. Wrong repair of the NaN: `fillna(0)` *before* scaling. Then a
# missing pressure of 0 millibars is the worst storm ever.

# %% [markdown]
# ## 11. Recap
#
# - Dask prepares a table in partitions, on many workers, and `launch` trains on them
#   where they lie. Prediction goes back the same way, with the model sent once.
# - A batch takes from each partition its share. So the loss depends neither on the
#   number of workers nor on what lies where.
# - Partitions that were lost are computed again, as long as Dask knows how.
# - A step takes as long as the largest share of its batch: make partitions of equal
#   size.
# - A feature is honest if it stays as it is when the future is changed.
#
# **Common mistakes.** Splitting by row. Scaling with the held-out days. The weather of
# the hour of departure. One huge partition. `scatter` for what should come back by
# itself.
#
# **Next:** your own table. **Read:** Chen and Guestrin, *XGBoost*, KDD 2016,
# [arXiv:1603.02754][1]; on Dask, it also trains where the partitions lie.
#
# **Where it stands**, in the versions of `constraints.txt`. Others may differ. `mnist`
# has such a list for DDP, `pets` one for Dask.
#
# - *Data*: the tables and their columns in [nycflights13][2]. What an hour of weather
#   holds: its [script][3] keeps the largest rain until minute 51.
# - *Dask*: [DataFrame][4], with `map_partitions`, and `persist` there; `submit` and
#   `scatter` in [Client][5]; what a worker has fetched, `transfer_incoming_log` in [its
#   state][6]; how lost results are computed again, in [resilience][7].
# - *Measures*: [average precision][8] and [calibration][9] in scikit-learn's guide.
#
# [1]: https://arxiv.org/abs/1603.02754
# [2]: https://github.com/tidyverse/nycflights13
# [3]: https://github.com/tidyverse/nycflights13/blob/main/data-raw/weather.R
# [4]: https://docs.dask.org/en/stable/dataframe.html
# [5]: https://distributed.dask.org/en/stable/api.html
# [6]: https://github.com/dask/distributed/blob/2026.8.0/distributed/worker.py
# [7]: https://distributed.dask.org/en/stable/resilience.html
# [8]: https://scikit-learn.org/stable/modules/model_evaluation.html
# [9]: https://scikit-learn.org/stable/modules/calibration.html

# %% [markdown]
# ## Appendix A · Is it any good? Ask tuned baselines
#
# Four models, and each gets the same care: three settings, fitted on training days, one
# chosen by its loss on validation days. Where the best is the smallest or largest that
# was tried, a better one may lie beyond it. The test days judge once.
#
# scikit-learn wants all rows in one process. So each of its tables is cut at 200,000
# rows.


# %%
def here(part, most=200_000):
    """The partitions as one table in this process, or a sample of so many rows."""
    rows = len(part)
    if rows > most:
        part = part.sample(frac=most / rows, random_state=0)
    return part.compute().reset_index(drop=True)


class Frequency:
    """How often each carrier was late at each hour, pulled towards the mean of all."""

    def __init__(self, smoothing):
        self.smoothing = smoothing

    def fit(self, table):
        self.base = table["late"].mean()
        seen = table.groupby(["carrier", "hour"])["late"].agg(["sum", "count"])
        late, flights = seen["sum"], seen["count"]
        self.rate = (late + self.smoothing * self.base) / (flights + self.smoothing)
        return self

    def predict(self, table):
        keys = pd.MultiIndex.from_frame(table[["carrier", "hour"]])
        return self.rate.reindex(keys).fillna(self.base).to_numpy("float64")


# %%
class OfScikitLearn:
    """A classifier on the columns that the network has; codes one-hot if `one_hot`."""

    def __init__(self, classifier, one_hot):
        self.classifier, self.one_hot = classifier, one_hot
        self.encoder = OneHotEncoder(handle_unknown="ignore", sparse_output=False)

    def columns(self, table):
        numbers = table[SCALED].to_numpy("float32")
        if not self.one_hot:
            return np.hstack([table[CODES].to_numpy("float32"), numbers])
        one_hot = self.encoder.transform(table[CODES]).astype("float32")
        return np.hstack([one_hot, numbers])

    def fit(self, table):
        if self.one_hot:
            self.encoder.fit(table[CODES])
        self.classifier.fit(self.columns(table), table["late"])
        return self

    def predict(self, table):
        return self.classifier.predict_proba(self.columns(table))[:, 1]


def trees(rounds, leaves):
    """Gradient-boosted trees that know which columns are categories."""
    return OfScikitLearn(
        HistGradientBoostingClassifier(
            max_iter=rounds,
            max_leaf_nodes=leaves,
            early_stopping=False,
            random_state=0,
            categorical_features=list(range(len(CODES))),
        ),
        one_hot=False,
    )


def logistic(strength):
    return OfScikitLearn(LogisticRegression(C=strength, max_iter=300), one_hot=True)


# %%
class Network:
    """The network above, trained on the cluster with another learning rate."""

    def __init__(self, learning_rate):
        self.learning_rate = learning_rate

    def fit(self, _):
        weights = run.result
        if self.learning_rate != settings.learning_rate:
            given = {**chosen, "learning_rate": self.learning_rate}
            weights = ddp.launch(
                client, train, table=numbers, sizes=sizes, **given
            ).result
        self.model = make_model(weights, sizes, settings.hidden)
        return self

    def predict(self, table):
        return probability(table, self.model).to_numpy("float64")


def log_loss(late, probability):
    """The mean cross-entropy in nats per flight."""
    kept = np.clip(probability, 1e-6, 1 - 1e-6)
    return -np.mean(np.where(late > 0, np.log(kept), np.log(1 - kept)))


def best_of(candidates, fit_on, choose_on):
    """The candidate with the smallest loss on the days to choose by: (name, model)."""
    fitted = {name: each.fit(fit_on) for name, each in candidates.items()}
    late = choose_on["late"].to_numpy()
    of = {
        name: log_loss(late, each.predict(choose_on)) for name, each in fitted.items()
    }
    best = min(of, key=of.get)
    return best, fitted[best]


# %% tags=["nbval-ignore-output"]
fit_on, choose_on, judge_on = map(here, (training, validation, test))
rate = settings.learning_rate
best = {}
for kind, candidates in {
    "frequency": {f"smoothing {s}": Frequency(s) for s in (10, 50, 200)},
    "logistic": {f"C = {c}": logistic(c) for c in (0.003, 0.03, 0.3)},
    "trees": {f"{rounds} rounds": trees(rounds, 31) for rounds in (30, 60, 120)},
    "network": {
        f"learning rate {r:.0e}": Network(r) for r in (rate / 3, rate, 3 * rate)
    },
}.items():
    name, best[kind] = best_of(candidates, fit_on, choose_on)
    at_the_edge = name != list(candidates)[1]
    hint = " (the smallest or largest that was tried)" if at_the_edge else ""
    print(f"{kind:10} {name}{hint}")

# %% [markdown]
# Three numbers for each, with intervals. **Average precision** asks for the order: are
# late flights named first? Its floor is the share of late flights. **Calibration** asks
# for the numbers: is the mean prediction the share of late flights? We print the
# difference, in points; the picture below asks the same of ten groups of flights, from
# the smallest predictions to the largest. The **loss** asks for both.
#
# Flights of one day share its weather. So the intervals draw *days* with replacement.


# %%
def draws_of_days(dates, draws, seed=0):
    """Weights of flights, when days are drawn with replacement: (draws, flights)."""
    days, day_of = np.unique(dates, return_inverse=True)
    random = np.random.default_rng(seed)
    counts = random.multinomial(
        len(days), np.full(len(days), 1 / len(days)), size=draws
    )
    return counts[:, day_of].astype("float64")


def measures(late, probability, weight):
    """Average precision, predicted minus late (points), loss (nats per flight)."""
    kept = np.clip(probability, 1e-6, 1 - 1e-6)
    nats = -np.where(late > 0, np.log(kept), np.log(1 - kept))
    return np.array(
        [
            average_precision(late, probability, weight),
            100 * np.average(probability - late, weights=weight),
            np.average(nats, weights=weight),
        ]
    )


# %%
late_of = judge_on["late"].to_numpy("float64")
weights = draws_of_days(judge_on["date"].to_numpy(), draws=200)
guess = {kind: model.predict(judge_on) for kind, model in best.items()}
point = {kind: measures(late_of, p, np.ones(len(p))) for kind, p in guess.items()}
drawn = {
    kind: np.array([measures(late_of, p, weight) for weight in weights])
    for kind, p in guess.items()
}

# %% tags=["nbval-ignore-output"]
print(
    f"{'test days':10} {'average precision':>24} {'predicted - late':>24} {'loss':>24}"
)
for kind in guess:
    low, high = np.percentile(drawn[kind], [2.5, 97.5], axis=0)
    (ap, off, nats), text = point[kind], f"{kind:10}"
    text += f"   {ap:.3f} ({low[0]:.3f} to {high[0]:.3f})"
    text += f"   {off:+5.1f} ({low[1]:+5.1f} to {high[1]:+5.1f})"
    print(text + f"   {nats:.3f} ({low[2]:.3f} to {high[2]:.3f})")
print(f"a constant guess has an average precision of {late_of.mean():.3f}")

# %% [markdown]
# A stormy day lifts or lowers all models together, so intervals may overlap where one
# model is better on nearly every draw. A *paired* comparison takes the difference on
# the same days:


# %%
def verdict(low, high):
    """What an interval of the network's average precision minus another's says."""
    if low > 0:
        return "the network orders flights better"
    return "the network orders them worse" if high < 0 else "no difference shown"


# %% tags=["lesson", "nbval-ignore-output"]
for kind in ("frequency", "logistic", "trees"):
    difference = drawn["network"][:, 0] - drawn[kind][:, 0]
    low, high = np.percentile(difference, [2.5, 97.5])
    print(f"network - {kind:10} {low:+.3f} to {high:+.3f}: {verdict(low, high)}")

# %% [markdown]
# Trees are hard to beat on tables. Read the last line before you tell anybody that a
# network was needed here. What speaks for it is what this notebook is about: it trains
# where the partitions lie, however many there are. The intervals hold chance in the
# *days* alone; another seed gives another network, and another year other delays.


# %% tags=["lesson"]
def reliability(late, probability, weights, groups=10):
    """Of each group: mean prediction, observed share, its 95 % interval over days."""
    ranks = np.argsort(np.argsort(probability, kind="stable"), kind="stable")
    rows = []
    for group in range(groups):
        there = ranks * groups // len(ranks) == group
        total = weights[:, there].sum(axis=1)
        share = (weights[:, there] * late[there]).sum(axis=1) / np.maximum(total, 1)
        low, high = np.percentile(share, [2.5, 97.5])
        rows.append((probability[there].mean(), late[there].mean(), low, high))
    return 100 * np.array(rows).T


figure, panels = plt.subplots(1, 2, figsize=(8, 3.6), sharex=True, sharey=True)
for axes, kind in zip(panels, ("network", "trees")):
    x, y, low, high = reliability(late_of, guess[kind], weights)
    axes.plot([0, 100], [0, 100], color="grey", linestyle=":")
    axes.vlines(x, low, high, color="tab:blue")
    axes.plot(x, y, "o", markersize=4)
    axes.set(title=kind, xlabel="predicted (%)", xlim=(0, 80), ylim=(0, 80))
panels[0].set_ylabel("late (% of flights)")
figure.tight_layout()
show(
    figure,
    "Two panels, network and trees: the share of late flights against the "
    "predicted share, for ten groups of flights, with intervals over days, beside the "
    "dotted line on which both are equal.",
)

# %% [markdown] tags=["instructor"]
# **Instructor.** 15 minutes, if you teach it. Expected: 'the network must win, it is
# deep learning'. Ask who would be served by a tenth of a point of average precision,
# and whom a calibrated probability serves (an airline that books hotel rooms).

# %% [markdown]
# ## Appendix B · A table that is larger than one worker
#
# `PRESET=full` draws sixty times as many flights as there are: each month again and
# again, with replacement. Nothing new can be learned from that. It shows that the rows
# need not fit into one process. Give the workers a limit, and watch the dashboard:
#
#     make run TUTORIAL=flights PRESET=full WORKERS=4 OPTIONS="memory_limit=8GB"
#
# At no time are all rows in one place. `numbers` stays on the workers, each rank gets
# what lies on its own, and predictions come back as a column. Only small things travel:
# counts, means, the model, gradients, and the samples that appendix A asks for. This is
# the size of the table here, and what each worker holds of it:


# %% tags=["nbval-ignore-output"]
def megabytes(dask_worker, keys):
    """What a worker holds of these partitions, in MB."""
    held = [dask_worker.state.tasks.get(key) for key in keys]
    return sum(task.nbytes or 0 for task in held if task is not None) / 1e6


if client.cluster is not None:
    keys = [future.key for future in distributed.futures_of(numbers)]
    held = client.run(megabytes, keys=keys).values()
    print(f"{sum(held):.1f} MB:", *(f"{each:.1f}" for each in sorted(held)))

# %% [markdown]
# ## Appendix C · The same on a cluster
#
# Not a line of this file changes: `CLUSTER=slurm`, and the others that `pets` has in
# its appendix. All workers must be able to read the four files.
#
# `torchrun` and `srun` start ranks where there is no Dask worker, and so no partition.
# There `launch` refuses a Dask table, and says what to do: write Parquet once, and let
# each rank read its files.

# %% tags=["nbval-ignore-output"]
client.close()
