# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Pets: Dask runs the ranks, and you watch, stop and resume them
#
# **Question.** How does Dask run data-parallel training, and how do I watch it, stop it
# and go on?
#
# **Afterwards you can**
# - launch a training function on the workers of a Dask cluster;
# - watch a run in the dashboard, on its progress line and in its log;
# - kill a rank, resume, and *prove* what becomes of the final weights;
# - find two faults in a script that runs without an error.
#
# Appendix A, at home: compare a network with a tuned baseline, and say when they tie.
#
# **You need** the tutorial `mnist`, which explains *rank*, *world size*, *collective*
# and *DDP*. No GPU, no network, nothing is downloaded.
#
# **Time:** 75 minutes in class, of which 1 to 2½ minutes of computing on two cores.
# **Data:** names of pets in Seattle, shipped with the repository.

# %% [markdown] tags=["instructor"]
# **Instructor.** Minutes: card 2, set-up 3, data 5, one rank 7, predict 3, what changes
# 12, on Dask 6, proofs 8, exercises 20, break it 6, recap 3. Sum: 75. The stretch
# exercise and the appendices come on top.
#
# Ask first: who has lost a training run, and to what? Keep the answers on the board.
# Most come back in sections 8 and 10.
#
# **If you are late:** run section 4's loop without discussing it. Leave out 'Why not
# twice as fast?' in section 7 and the second fault of exercise 3. Never leave out
# exercise 2: it is what this notebook is for. Check beforehand that every student has a
# terminal open in the folder of the repository.

# %% [markdown]
# ## 2. Set-up and preflight
#
# All settings stand here. `make run TUTORIAL=pets SET="epochs=2"` changes one of them.
# `PRESET=full` takes the sizes of the experiment that this tutorial goes back to.

# %%
import json
import math
import os
import re
import string
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset

import ddp_common as ddp
from ddp_common.teaching.live_plot import live_plot

# %% tags=["parameters"]
settings = ddp.settings(
    "pets",
    data="shipped",  # or "full" after `make data TUTORIAL=pets`, or your own names.csv
    repeat=False,  # True: a name counts as often as it was registered
    epochs=6,
    batch_size=1_024,  # of all ranks together
    learning_rate=3e-2,
    layers=1,
    hidden=128,
    seed=0,
    presets={
        "full": {
            "repeat": True,
            "epochs": 25,
            "batch_size": 3 * 16_384,
            "layers": 4,
            "learning_rate": 1e-2,
        }
    },
    limits={"layers": (1, 100)},
)

# %% [markdown]
# Dask runs Python functions in other processes, on this machine or on many. Your
# program is the *client*. It hands functions to a *scheduler*, which passes them on to
# *workers*. Here `connect()` starts the scheduler in this process, and each worker in a
# process of its own: two, or up to four where there are more cores. (Where the text
# says two, read your number.) A *profile* is a YAML file that says where workers run;
# the profile `local` says: here.

# %% tags=["nbval-ignore-output"]
client = ddp.connect()
dataset = ddp.fetch("pets", settings.data)
backend = "nccl" if torch.cuda.is_available() else "gloo"
versions = f"torch {torch.__version__} · {backend} · {client.ranks} ranks"
print(f"{versions} · {dataset.title}: {dataset.origin}")

# %% tags=["lesson", "nbval-ignore-output"]
address = getattr(client, "dashboard_link", "there is none without Dask")
print("Dask's dashboard:", address)

# %% [markdown]
# ## 3. The data
#
# The table holds names, and how often each was registered. It is open data of the City
# of Seattle, set jguv-t9rb, under the terms of the city's portal. No owner, no address.
#
# A tenth of the *distinct* names is held out. The model never sees them. We look at
# them once, at the end.

# %%
# '*' pads the beginning, '+' ends a name
ALPHABET = "*+" + string.ascii_lowercase + "-. "
WIDTH = 8  # characters that the model sees


def read_names(path):
    """The table of names: columns name (str) and count (int).

    Raises ddp.Error for an empty table or a foreign character.
    """
    table = pd.read_csv(path, keep_default_na=False)  # a cat may be called Nan
    if table.empty or list(table.columns) != ["name", "count"]:
        needs = "It needs the columns name and count, and at least one row."
        raise ddp.Error(f"{path} holds no names. {needs}")
    for name in table["name"]:
        if foreign := set(name) - set(ALPHABET[2:]):
            what = f"The name {name!r} has {foreign.pop()!r}, "
            why = f"which is not in the alphabet {ALPHABET[2:]!r}. Tidy the list first."
            raise ddp.Error(what + why)
    return table


# %%
table = read_names(dataset.path)
training_rows, held_out_rows = ddp.split(len(table), [0.1], seed=settings.seed)
held_out_names = table["name"].iloc[held_out_rows].tolist()


def names_to_learn(rows):
    """The names in these rows of the table: each once, or as often as registered."""
    chosen = table.iloc[rows]
    return chosen["name"].repeat(chosen["count"] if settings.repeat else 1).tolist()


training_names = names_to_learn(training_rows)
numbers = f"{len(training_names):,} to learn from, {len(held_out_names):,} held out"
print(f"{len(table):,} distinct names; {numbers}")

# %% tags=["lesson"]
table.nlargest(5, "count").reset_index(drop=True)

# %% [markdown]
# The task: the model sees eight characters and predicts the next one. A name of *n*
# letters gives *n* + 1 windows. The last one predicts the end, `+`.


# %%
def windows(names):
    """Contexts (n, WIDTH) and next characters (n,), as indices into ALPHABET."""
    index_of = np.zeros(256, np.uint8)
    index_of[np.frombuffer(ALPHABET.encode(), np.uint8)] = np.arange(len(ALPHABET))
    text = "".join("*" * WIDTH + name + "+" for name in names)
    codes = index_of[np.frombuffer(text.encode(), np.uint8)]
    rows = np.lib.stride_tricks.sliding_window_view(codes, WIDTH + 1)
    rows = torch.from_numpy(rows[rows[:, -1] != ALPHABET.index("*")])
    return rows[:, :-1].contiguous(), rows[:, -1].contiguous()


contexts, targets = windows(training_names)
held_out_contexts, held_out_targets = windows(held_out_names)
print(f"{len(contexts):,} windows to learn from, {len(held_out_contexts):,} held out")


# %% tags=["lesson"]
def show(figure, alt):
    """Show a figure, with a sentence for those who cannot see it."""
    from IPython.display import display  # a notebook has it; a batch job may not

    display(figure, metadata={"image/png": {"alt": alt}})
    plt.close(figure)


# %% tags=["lesson"]
eight, following = windows(["bella", "mr. fox", "luna"])
rows = torch.cat([eight, following.reshape(-1, 1)], dim=1)
greys = [[0.93] * 3, [0.1] * 3]  # the padding, and the end of a name
colours = plt.cm.viridis(np.linspace(0.35, 1, len(ALPHABET) - 2))[:, :3]
colours = np.concatenate([greys, colours])
figure, axes = plt.subplots(figsize=(4.5, 5.2))
axes.imshow(colours[rows.numpy()], aspect="auto")
for (row, column), code in np.ndenumerate(rows.numpy()):
    colour = "white" if ALPHABET[code] == "+" else "black"
    axes.text(column, row, ALPHABET[code], ha="center", va="center", color=colour)
axes.axvline(WIDTH - 0.5, color="black", linewidth=2)
axes.set(
    xticks=[WIDTH / 2 - 0.5, WIDTH],
    xticklabels=["the eight characters", "next"],
    yticks=[],
    ylabel="one row: one window",
    title="Three names as windows",
)
show(
    figure,
    "A grid of letters, one row for each window of bella, mr. fox and luna. "
    "Eight characters, a thick line, the next one. Grey stars pad the beginning.",
)

# %% [markdown]
# ## 4. One rank first
#
# The model turns each character into a vector (an *embedding*). An LSTM reads the eight
# vectors. A linear layer then gives every possible next character a score.
#
# The data set hands out a whole batch by one index operation (`__getitems__`). Item by
# item, PyTorch would call Python for every window, and then stack them.


# %%
class Windows(Dataset):
    def __init__(self, contexts, targets):
        self.contexts, self.targets = contexts, targets

    def __len__(self):
        return len(self.contexts)

    def __getitems__(self, indices):
        return self.contexts[indices].long(), self.targets[indices].long()


class NameModel(nn.Module):
    def __init__(self, layers, hidden):
        super().__init__()
        self.embedding = nn.Embedding(len(ALPHABET), 16)
        self.lstm = nn.LSTM(16, hidden, layers, batch_first=True)
        self.head = nn.Linear(hidden, len(ALPHABET))

    def forward(self, contexts):
        outputs, _ = self.lstm(self.embedding(contexts))
        return self.head(outputs[:, -1])  # scores (batch, characters)


# %% [markdown]
# This is the plain loop, in this process, on a small part of the data. Nothing here is
# distributed.

# %% tags=["lesson"]
torch.manual_seed(settings.seed)
small = Windows(contexts[:8_000], targets[:8_000])
model = NameModel(layers=1, hidden=64)
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
losses = []
for batch in torch.randperm(len(small)).split(256):
    context, target = small.__getitems__(batch)
    loss = F.cross_entropy(model(context), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
blind = math.log(len(ALPHABET))
print(f"first batch {losses[0]:.2f} nats per character, last {losses[-1]:.1f}")
print(f"a blind guess: ln {len(ALPHABET)} = {blind:.2f}")

# %% tags=["lesson"]
figure, axes = plt.subplots(figsize=(6, 2.6))
axes.plot(losses)
axes.axhline(blind, color="grey", linestyle=":", label="a blind guess")
axes.set(xlabel="step", ylabel="loss (nats per character)", title="One process")
axes.legend()
show(
    figure,
    "The loss of one process against the step. It begins at the dotted line of a "
    "blind guess and falls.",
)

# %% [markdown]
# The loss is the *cross-entropy* in nats per character: how much the next character
# surprises the model, on average. Lower is better.

# %% [markdown]
# ## 5. Predict
#
# In section 8 two ranks train for 200 steps. Checkpoints are written after every 50
# steps. **Rank 1 is killed after step 170.** Then both ranks start again from the
# newest checkpoint and train to the end. Compare their final weights with those of a
# run that nobody disturbed. They are
#
# - `"same"`: equal to the last bit;
# - `"close"`: equal up to rounding, since sums are done in another order;
# - `"different"`: the 20 lost steps are trained again, with other batches.
#
# **Write your prediction before you go on**, and one sentence why.

# %% tags=["lesson"]
my_prediction = None  # "same", "close" or "different"

# %% [markdown] tags=["instructor"]
# **Instructor.** Most of a class says 'close' or 'different', and both have good
# reasons: the order of the data must be drawn again, Adam has a memory, the learning
# rate depends on the step. Collect what a checkpoint must hold so that 'same' can be
# true: weights, the optimizer's state, the schedule, epoch and position in the epoch,
# the random state. Do not tell them yet.

# %% [markdown]
# ## 6. What changes
#
# `mnist` made DDP by hand. Here the same lines stand around another model. Compared
# with the plain loop of section 4, these are new:
#
# | line | why |
# |---|---|
# | `sampler = ddp.ElasticSampler(...)` | deals each global batch to the ranks |
# | `sampler.epochs(...)` | not `range`: it tells the sampler the epoch |
# | `model = DDP(...)` | averages the gradients over the ranks |
# | `* sampler.weight` | a rank with fewer windows in the last batch counts less |
# | `ddp.Checkpoint(...)`, `restore()`, `save()` | a run can stop and go on |
# | `ddp.report(loss=loss)` | tells the client; no rank waits for it |
# | `return model.module.state_dict()` | the weights without the wrapper's names |
#
# Two lines of a script for torchrun are *not* there. `init_process_group`: `launch` has
# called it before `train` begins. And `sampler.set_epoch(epoch)`, which PyTorch's own
# `DistributedSampler` needs at the start of each epoch: `sampler.epochs` does it.
#
# **The checkpoint.** Weights are not enough for an exact resume. Adam keeps two running
# means for each weight, the schedule counts steps, the sampler counts batches. So
# `ddp.Checkpoint` gets all four. Rank 0 writes the file: the weights are the same on
# all ranks. All ranks read it. No line of the loop saves after step 50: the sampler
# counts the steps, and has the checkpoint saved before it deals the next batch.
#
# **The sampler.** It draws the order of an epoch from (seed, epoch) alone. So after a
# restart the same windows come in the same order.
#
# **Reports.** What ranks print ends up in `log.txt`, mixed. So ranks *report*, and the
# client prints.


# %%
def warm_up_and_decay(progress):
    """The share of the learning rate to use after `progress` (0 to 1) of all steps."""
    if progress < 0.3:
        return 0.04 + 0.96 * progress / 0.3
    return (1 + math.cos(math.pi * min((progress - 0.3) / 0.7, 1))) / 2


def train(contexts, targets, epochs, batch_size, learning_rate, layers, hidden, seed):
    """Train a NameModel on this rank's share of the windows; returns its weights."""
    device = ddp.device()
    torch.manual_seed(seed)  # the same initial weights on all ranks
    data = Windows(contexts, targets)
    sampler = ddp.ElasticSampler(len(data), batch_size, seed=seed)
    loader = DataLoader(data, batch_sampler=sampler, collate_fn=lambda batch: batch)
    model = DDP(NameModel(layers, hidden).to(device))
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    steps = epochs * len(sampler)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: warm_up_and_decay(step / steps)
    )
    checkpoint = ddp.Checkpoint(
        model=model,
        optimizer=optimizer,
        schedule=schedule,
        sampler=sampler,
        every_steps=50,
    )
    checkpoint.restore()  # nothing to restore on a first attempt
    for epoch in sampler.epochs(epochs):
        for context, target in loader:
            scores = model(context.to(device))
            loss = F.cross_entropy(scores, target.to(device)) * sampler.weight
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            ddp.report(loss=loss)
        checkpoint.save()
    return model.module.state_dict()


# %% [markdown]
# ## 7. On Dask
#
# `launch` sends `train` with its arguments to the workers. Each worker starts one new
# process: a *rank*. Dask's own part ends there: the ranks find each other, and
# gradients go from rank to rank. Reports come back to the client. A rank is a process
# of its own because a process can be killed. A plain Dask task that has begun cannot:
# it is a thread of its worker.
#
# **Watch it (3 minutes).** The next cell trains for less than a minute. *Before you run
# it*, open the dashboard's address from section 2 in another tab, and go to *Info*.
# Then run the cell and look at three things:
#
# 1. **The dashboard.** *Processing* is 1 for each worker: its task keeps one rank. Do
#    not trust its other figures here. *Memory* and CPU are those of Dask's own process,
#    not of the rank below it. *Occupancy* is Dask's guess of the seconds of work ahead,
#    and it has never seen this task before.
# 2. **Under the cell**: the progress line (epoch, loss, samples per second, over all
#    ranks), and the loss of rank 0, drawn anew every second.
# 3. **The log**, `log.txt` in the run directory: which process was which rank, and how
#    each one ended.

# %%
names_of_arguments = "epochs batch_size learning_rate layers hidden seed".split()
hyperparameters = {name: getattr(settings, name) for name in names_of_arguments}
with live_plot("loss") as watch:  # in JupyterLab; nothing where nobody watches
    run = ddp.launch(
        client,
        train,
        contexts=contexts,
        targets=targets,
        on_report=watch,
        **hyperparameters,
    )

# %% tags=["lesson", "nbval-ignore-output"]
print((run.directory / "log.txt").read_text())
print("in the run directory:", *sorted(path.name for path in run.directory.iterdir()))


# %% tags=["lesson", "nbval-ignore-output"]
def show_dashboard(file, alt):
    """Show a picture that lies in docs/pictures."""
    from IPython.display import Image, display

    folder = Path(ddp.__file__).parents[1] / "docs" / "pictures"
    display(Image(filename=str(folder / file), width=760, alt=alt))


show_dashboard(
    "dashboard-workers.png",
    "Dask's dashboard, page Info, during a run: a table with two workers. Each has "
    "one core and one task in the column Processing.",
)

# %% [markdown]
# Every report of every rank is a row of `run.metrics` and a line of `metrics.jsonl`.


# %%
def plot_losses(metrics):
    """The mean loss of the ranks, and how far each is from it; a point for 20 steps."""
    last = metrics["step"].max()
    width = 20 if last >= 100 else 1  # steps for a point
    whole = metrics[metrics["step"] < (last + 1) // width * width]
    points = [whole["step"] // width * width, "rank"]
    by_rank = whole.groupby(points)["loss"].mean().unstack()
    mean = by_rank.mean(axis=1)
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3))
    left.plot(mean, color="black")
    left.set(title=f"Training on {by_rank.shape[1]} ranks: the mean of all ranks")
    for rank, curve in by_rank.items():
        right.plot(curve - mean, linewidth=1, label=f"rank {rank}")
    right.set(title="Each rank minus the mean")
    right.legend()
    for axes in (left, right):
        axes.set(xlabel="step", ylabel="loss (nats per character)")
    figure.tight_layout()
    return figure


figure = plot_losses(run.metrics)
run.save_figure(figure, "loss.png")
plt.close(figure)

# %% tags=["lesson"]
show(
    figure,
    "Two panels against the step. Left: the mean loss of the ranks falls. Right: the "
    "difference of each rank from that mean scatters around zero.",
)

# %% [markdown]
# Each rank sees other windows, so its loss differs from the mean. (With two ranks the
# curves on the right mirror each other: the mean lies in the middle.) The *models* do
# not differ: section 8 shows it.
#
# ### Why is it not twice as fast?
#
# A step has two parts. Forward and backward take the longer, the more windows are in
# the batch: each of two ranks has half of them. Meeting to average the gradients takes
# its time, whatever the batch: two ranks *add* it. So a small batch may gain nothing
# where a large one does. Measure it:


# %% tags=["lesson", "nbval-ignore-output"]
def milliseconds(batch_size, ranks, steps=12):
    """The time of a step: the lower quartile, since other programs only add to it."""
    chosen = torch.arange(batch_size * steps) % len(contexts)
    trial = {**hyperparameters, "batch_size": batch_size, "epochs": 1}
    few = ddp.launch(
        client,
        train,
        contexts=contexts[chosen],
        targets=targets[chosen],
        **trial,
        workers=ranks,
    )
    times = few.metrics.query("rank == 0").sort_values("step")["time"]
    return 1_000 * times.diff().iloc[3:].quantile(0.25)


speed = pd.DataFrame(index=pd.Index([128, 256, 512, 1_024, 2_048], name="batch"))
for ranks in (1, 2):
    step = np.array([milliseconds(batch, ranks) for batch in speed.index])
    speed[f"windows/s, {ranks} rank(s)"] = 1_000 * speed.index / step
one, two = speed.T.to_numpy()
speed["2 ranks / 1 rank"] = two / one
speed["2 ranks / best of 1 rank"] = two / one.max()
print(speed.round(dict.fromkeys(speed.columns[:2], -2)).round(2).to_string())

# %% [markdown]
# `2 ranks / 1 rank` compares equal batches. The last column is the honest one: it
# compares with the *fastest* batch of one rank. And a larger batch is not free: it
# makes fewer steps per epoch. The tutorial `dogs` studies both. These are few steps, on
# a machine that may be busy: run the cell twice before you believe a digit.

# %% [markdown] tags=["instructor"]
# **Instructor.** 'Two cores, two ranks, why not twice?' Let them name what is added:
# the wait for the slower rank, `all_reduce`, DDP's bookkeeping, the reports. Expect
# surprise if one rank is fastest at a *small* batch: perhaps its numbers fit into the
# cache.

# %% [markdown]
# ## 8. Proofs
#
# ### The ranks share out the data
#
# Each rank notes which samples it is dealt in one epoch. Together they must hold every
# sample once. The counterexample is a data set that shuffles *itself* on every rank,
# without a seed: index 7 is then another sample on each rank.


# %% tags=["lesson"]
def deal_an_epoch(samples, data_set_shuffles_itself):
    """Which samples each rank sees in one epoch: a list of lists."""
    if data_set_shuffles_itself:  # a fault that real programs contain
        own_order = np.random.default_rng().permutation(samples)
        sampler = torch.utils.data.DistributedSampler(range(samples))
        seen = [int(own_order[index]) for index in sampler]
    else:
        seen = [index for batch in ddp.ElasticSampler(samples, 256) for index in batch]
    everyones = [None] * ddp.world_size()
    dist.all_gather_object(everyones, seen)  # every rank gets the lists of all
    return everyones


def check_partition(everyones, samples):
    """Raise AssertionError unless every sample is in exactly one rank's list, once."""
    counts = np.bincount(np.concatenate(everyones), minlength=samples)
    missing, twice = (counts == 0).sum(), (counts > 1).sum()
    assert (counts == 1).all(), f"{missing} samples never seen, {twice} more than once"


# %% [markdown]
# Three ranks need a third worker. A Dask cluster grows while it runs. `launch` takes
# all workers, so from here on we say how many: `workers=`.

# %% tags=["lesson"]
if client.cluster is not None and len(client.workers()) < 3:
    client.cluster.scale(3)
client.wait_for_workers(3, timeout=60)
dealt = {
    title: ddp.launch(
        client, deal_an_epoch, samples=990, data_set_shuffles_itself=shuffles, workers=3
    ).result
    for title, shuffles in (("ElasticSampler", False), ("it shuffles itself", True))
}
right, wrong = dealt.values()

# %% tags=["lesson"]
figure, panels = plt.subplots(1, 2, figsize=(9, 3.2))
for axes, (title, everyones) in zip(panels, dealt.items()):
    picture = np.ones((22, 45, 3))  # a sample that nobody saw stays white
    for colour, seen in zip(("tab:blue", "tab:orange", "tab:green"), everyones):
        picture.reshape(-1, 3)[seen] = plt.matplotlib.colors.to_rgb(colour)
    covered = len(np.unique(np.concatenate(everyones))) / 990
    axes.imshow(picture)
    axes.set(
        xticks=[],
        yticks=[],
        title=f"{title}: {covered:.0%} of 990 seen",
        xlabel="each square: one sample, in its rank's colour",
    )
show(
    figure,
    "Two fields of 990 squares, coloured by the rank that saw the sample. Left, with "
    "ElasticSampler, no square is white. Right, where the data set shuffles itself, "
    "many are white: nobody saw them.",
)

# %% tags=["proof"]
check_partition(right, 990)
print("ElasticSampler: every sample once, on exactly one of", len(right), "ranks")
try:
    check_partition(wrong, 990)
except AssertionError:
    print("a data set that shuffles itself: caught, samples are missing or seen twice")
else:
    raise RuntimeError("the fault went unnoticed")

# %% [markdown]
# ### The same loss on 1, 2 and 3 ranks
#
# 1,003 windows in global batches of 256: the last batch has 235, and 3 ranks cannot
# share them equally. Each rank multiplies its mean loss by `sampler.weight`. So every
# step uses the same windows with the same weights, and the loss is the same up to the
# order of sums.

# %% tags=["lesson"]
few = {
    "contexts": contexts[:1_003],
    "targets": targets[:1_003],
    "epochs": 2,
    "batch_size": 256,
    "learning_rate": 5e-3,
    "layers": 1,
    "hidden": 32,
    "seed": 0,
}
loss_of_step = {}
for ranks in (1, 2, 3):
    metrics = ddp.launch(client, train, **few, workers=ranks).metrics
    loss_of_step[f"{ranks} ranks"] = metrics.groupby("step")["loss"].mean()
losses = pd.DataFrame(loss_of_step)

# %% tags=["proof"]
assert losses.shape == (8, 3)
for ranks in losses:
    assert np.allclose(losses[ranks], losses["1 ranks"], rtol=1e-6, atol=0), losses
print("the loss of the global batch, step by step:")
print(losses.round(3).to_string())
print("equal on 1, 2 and 3 ranks to a relative 1e-6, in each of the 8 steps")

# %% [markdown]
# ### Kill a rank, go on, same weights
#
# Rank 1 is killed after step 170, in the second epoch. `restarts=1` lets `launch` start
# both ranks once more, from the newest checkpoint. `ddp.inject` puts the fault into the
# training function. It leaves a file when it strikes, so it strikes only once.

# %% tags=["lesson", "nbval-ignore-output"]
longer = {
    **few,
    "contexts": contexts[:10_000],
    "targets": targets[:10_000],
    "batch_size": 100,  # 100 steps per epoch
}
undisturbed = ddp.launch(client, train, **longer, workers=2)
mark = run.directory / "struck"
mark.unlink(missing_ok=True)  # if this cell has run before
dies_once = ddp.inject(train, "SIGKILL", rank=1, step=170, mark=mark)
killed = ddp.launch(client, dies_once, **longer, workers=2, restarts=1)

# %% tags=["lesson", "nbval-ignore-output"]
restart = killed.metrics.query("event == 'restart'").iloc[0]
host = killed.failures[0].host
print("why:", restart["reason"].replace(host, "HOST"))
print(f"the newest checkpoint: step {restart['step']:.0f}")
steps = killed.metrics.query("rank == 0 and event.isna()")["step"]
print(f"steps that rank 0 trained twice: {steps.duplicated().sum()}")

# %% tags=["proof"]
assert set(undisturbed.result) == set(killed.result)
for name, weights in undisturbed.result.items():
    assert torch.equal(weights, killed.result[name]), f"{name} differs"
print("the killed run ends with the weights of the undisturbed one, bit for bit")
if my_prediction is None:
    print("you have made no prediction; the ranks say 'same'")
else:
    verdict = "right" if my_prediction == "same" else "not right: the ranks say 'same'"
    print(f"your prediction was {my_prediction!r}: {verdict}")

# %% [markdown]
# The last steps are done again with the same batches, the same state of Adam and the
# same learning rate. On the same number of ranks the sums come in the same order, too,
# as long as CPUs of one kind compute them. Some kernels of GPUs add in another order
# each time. There, and on another number of ranks, you may expect `"close"`.
#
# The message says 'often because memory ran out'. That is a guess: the system tells
# with which signal a process was killed, and not by whom.

# %% [markdown]
# ### Invented names
#
# Start with eight stars. Draw a character from the model's probabilities and append it.
# Repeat until `+`. Names that exist are dropped. Whether the model is any *good* is
# another question: appendix A asks it, with a tuned baseline beside it.


# %%
def invent(model, count, temperature=0.8, seed=0, longest=20):
    """Draw `count` names from the model; returns the new ones, once each."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.full((count, WIDTH), ALPHABET.index("*"))
    with torch.no_grad():
        for _ in range(longest):
            scores = model(text[:, -WIDTH:]) / temperature
            scores[:, ALPHABET.index("*")] = -torch.inf  # padding is not a letter
            drawn = torch.multinomial(scores.softmax(1), 1, generator=generator)
            text = torch.cat([text, drawn], dim=1)
    drawn = ["".join(ALPHABET[code] for code in row[WIDTH:]) for row in text]
    names = [name.split("+")[0].strip() for name in drawn if "+" in name]
    existing = set(table["name"])
    return [
        name for name in dict.fromkeys(names) if len(name) > 2 and name not in existing
    ]


# %% tags=["nbval-ignore-output"]
model = NameModel(settings.layers, settings.hidden)
model.load_state_dict(run.result)
names = invent(model, 40)
print("Invented:", ", ".join(names[:20]))
_ = (run.directory / "names.txt").write_text("\n".join(names) + "\n")

# %% [markdown] tags=["instructor"]
# **Instructor.** 8 minutes for the three proofs. Let them read the names aloud. Then
# ask what 'bit for bit' needs, and write it on the board beside their predictions.

# %% [markdown]
# ## 9. Exercises
#
# A check runs your function. It prints `right`, or `not yet` with a question.
#
# ### Exercise 1 · Read a log (4 minutes)
#
# **Goal.** A rank was killed. Its number and its process number are in the log. Write a
# function that finds both. `log` is the text of a `log.txt`. Print the one above to see
# its form: `print((killed.directory / "log.txt").read_text())`. What ranks print stands
# there too, tracebacks among it.
#
# <details><summary>Hint 1</summary>
#
# One line says which rank was killed. After a restart a rank has a new process number,
# and a run that was resumed has older ones, too. Which of them was killed?
# </details>
# <details><summary>Hint 2</summary>
#
# Go through `log.splitlines()` from top to bottom. Keep a dictionary from rank to
# process number, and overwrite its entries as ranks start. Stop at the line of the
# kill.
# </details>


# %% tags=["solution"]
def who_was_killed(log):
    """(rank, process number) of the rank that was killed, two ints."""
    # your code
    process = {}
    for line in log.splitlines():
        words = line.split()
        if words[1] == "rank" and words[3] == "started:":
            process[int(words[2])] = int(words[5])
        if "was killed by SIGKILL" in line:
            return int(words[2]), process[int(words[2])]
    # end of your code


# %% tags=["exercise"]
def invented_log(random, ranks, earlier, later):
    """The log of a run in which a rank was killed, and (rank, process number)."""
    lines, process = [], {}

    def start():
        for rank in random.permutation(ranks).tolist():
            process[rank] = int(random.integers(1_000, 99_999))
            lines.append(f"rank {rank} started: process {process[rank]} on host-{rank}")

    if earlier:
        start()
        lines.append("interrupted from the keyboard")
    start()
    victim = int(random.integers(ranks))
    answer = victim, process[victim]
    peer = (victim + 1) % ranks
    ends = [
        f"rank {victim} was killed by SIGKILL",
        f"rank {peer} failed: RuntimeError: Connection reset by peer",
    ]
    lines += ends[:: random.choice([-1, 1])]  # the consequence may be logged first
    if later:
        lines.append(f"Restart 1 on {ranks} rank(s) from step 50. Why: Rank {victim} …")
        start()
    return "\n".join(f"10:{n:02}:00 {line}" for n, line in enumerate(lines)), answer


# %% tags=["exercise"]
def check_log(answer):
    random = np.random.default_rng()
    cases = [(2, False, True), (3, True, True), (4, True, False)]
    for ranks, earlier, later in cases * 2:
        log, expected = invented_log(random, ranks, earlier, later)
        yours = answer(log)
        if yours == expected and all(type(number) is int for number in yours):
            continue
        print(f"not yet: yours {yours!r}, expected {expected}, for this log:\n{log}")
        print(
            "Which start of that rank was the last before the kill? "
            "Return a tuple of two ints."
        )
        return False
    print("right: you know which process to look for in the system's own log")
    return True


ddp.judge(check_log, who_was_killed)

# %% [markdown]
# ### Exercise 2 · Stop it, hurt it, resume it (8 minutes)
#
# **Goal.** Do with your own hands what section 8 did by itself. You need two terminals,
# both in the folder of the repository.
#
# 1. In the first terminal, start a small model in a run that may restart once:
#
#        make run TUTORIAL=pets WORKERS=2 RESTARTS=1 \
#            SET="epochs=100 hidden=16 batch_size=2048"
#
# 2. After the first epoch, in the *second* terminal, find the newest folder of
#    `runs/pets/` and read its log. **Kill the process of rank 1.** What does the first
#    terminal say, and which step does it go on from?
#
#        ls -t runs/pets | head -1
#        cat runs/pets/…/log.txt
#        kill -9 NUMBER
#
# 3. The run goes on. Press **Ctrl-C** in the first terminal. Read what it prints.
# 4. **Resume** with the command that it printed. Let it finish.
#
# Then return the name of the run directory. The check reads it, and trains the same
# model once more, undisturbed: about a minute. No terminal? Then let `subprocess.Popen`
# start the command and `os.kill` send the signals.
#
# <details><summary>Hint 1</summary>
#
# `make run … RESUME=runs/pets/…` takes the settings of the run. You need no `SET`.
# </details>
# <details><summary>Hint 2</summary>
#
# `kill` without `-9` *asks* a process to end: both ranks save and leave. What is asked
# for here is the rude way, `-9`: no rank can prepare for it.
# </details>


# %% tags=["solution"]
def my_run():
    """The run directory that you have stopped, hurt and resumed, as a str."""
    # your code
    import signal
    import subprocess
    import sys
    import tempfile
    import time

    folder = Path(tempfile.mkdtemp()) / "by-hand"
    choices = {"CLUSTER": "local", "WORKERS": "2", "MPLBACKEND": "agg"}

    def start(**more):
        kept = {key: value for key, value in os.environ.items() if key != "PRESET"}
        return subprocess.Popen(
            [sys.executable, "-m", "ddp_common", "run", "pets"],
            cwd=Path(ddp.__file__).parents[1],
            env={**kept, **choices, **more},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a group of its own, as a shell gives a command
        )

    def wait_for(pattern):
        while not (found := re.findall(pattern, log()) if folder.exists() else []):
            assert command.poll() is None, "the run has ended early: see its log.txt"
            time.sleep(0.05)
        return found

    def log():
        path = folder / "log.txt"
        return path.read_text() if path.exists() else ""

    sizes = "epochs=12 hidden=16 batch_size=2048"
    command = start(CHECKPOINT=str(folder), SET=sizes, RESTARTS="1")
    (rank_1,) = wait_for(r"rank 1 started: process (\d+)")
    while not list(folder.glob("checkpoints/*.pt")):
        time.sleep(0.05)
    os.kill(int(rank_1), signal.SIGKILL)
    wait_for("Resumed from step")
    os.killpg(command.pid, signal.SIGINT)  # Ctrl-C goes to all processes of the command
    command.wait()
    start(RESUME=str(folder), SET="").wait()
    return str(folder)
    # end of your code


# %% tags=["exercise"]
def events_of(log):
    """What a log tells: each event, and the question to ask where it is missing."""
    killed = log.find("was killed by SIGKILL")
    restarted = log.find("Restart 1", max(killed, 0))
    stopped = log.find("interrupted from the keyboard")
    resumed = log.find("Resumed from step", max(stopped, 0))
    finished = log.find("finished:", max(resumed, 0))
    return [
        (
            "a rank was killed",
            killed >= 0,
            "Which process did you kill, and with which signal? `kill` without -9 only "
            "asks a rank to leave.",
        ),
        (
            "the run restarted by itself",
            killed >= 0 and restarted >= 0,
            "Was RESTARTS=1 among the words of the first command?",
        ),
        ("interrupted by Ctrl-C", stopped >= 0, "Did the run finish before you came?"),
        (
            "resumed from a checkpoint",
            stopped >= 0 and resumed >= 0,
            "Which command did the terminal print after Ctrl-C?",
        ),
        ("finished", resumed >= 0 and finished >= 0, "Is it still training?"),
    ]


def final_weights(folder):
    """The weights in the newest checkpoint of a run directory, as a dict."""
    newest = max((folder / "checkpoints").glob("step-*.pt"))
    return torch.load(newest, map_location="cpu", weights_only=True)["model"]


# %% tags=["exercise"]
def check_my_run(answer):
    yours = answer()
    folder = Path(ddp.__file__).parents[1] / str(yours)  # an absolute path stays itself
    if not (folder / "config.json").exists() or not (folder / "log.txt").exists():
        print(f"not yet: yours {yours!r}, expected a run directory with a log.txt.")
        print("After 'Run directory:', what did `make run` print?")
        return False
    for event, happened, question in events_of((folder / "log.txt").read_text()):
        if not happened:
            print(f"not yet: {event}: yours no, expected yes. {question}")
            return False
        print(f"{event}: yes")
    config = json.loads((folder / "config.json").read_text())
    return same_weights(folder, config["settings"], len(config["workers"]))


# %% tags=["exercise"]
def same_weights(folder, chosen, ranks):
    """Whether the run in `folder` ends as one that nobody disturbs."""
    words = "epochs batch_size learning_rate layers hidden seed"
    arguments = {name: chosen[name] for name in words.split()}
    if chosen["data"] != settings.data or ranks > len(client.workers()):
        print(
            "not yet: take the names and the number of ranks of this notebook. "
            "Which words of the command say so?"
        )
        return False
    reference = ddp.launch(
        client, train, contexts=contexts, targets=targets, **arguments, workers=ranks
    )
    yours = final_weights(folder)
    expected = reference.result
    if all(torch.equal(yours[name], expected[name]) for name in expected):
        print("right: the weights of an undisturbed run, bit for bit")
        return True
    print(
        "not yet: the final weights are not those of an undisturbed run, which were "
        "expected. Did you change a setting when you resumed?"
    )
    return False


ddp.judge(check_my_run, my_run, timeout=480)

# %% [markdown] tags=["instructor"]
# **Instructor.** Wrong answers to expect. *Exercise 1*: the first start of the rank in
# the log (wrong after a resume); the last one (wrong after a restart); the rank that
# says `failed` (it is the consequence, not the cause); text instead of numbers.
# *Exercise 2*: plain `kill` (a polite stop: every rank saves and leaves); the worker's
# process killed instead of the rank's; Ctrl-C only; never resumed; the run was over
# before Ctrl-C (more epochs). *Exercise 3*: `torch.manual_seed(epoch)` (the sampler has
# a generator of its own); `set_epoch` once before the loop, or at the end of its body;
# `set_epoch(epoch + rank)` (shards overlap); `shuffle=False`; saving a new model.
# *Stretch*: the training loss; a made-up loss; the model before training.
#
# Who is done with exercise 2 early: let them kill rank 0 instead, or both.

# %% [markdown]
# ### Exercise 3 · A script that runs and is wrong (8 minutes)
#
# This script ends without an error. It has **two faults**. The cell below it starts it
# as `mnist` does, `torchrun --standalone --nproc-per-node=2 script.py`: twice, as rank
# 0 and rank 1. Run that cell and read what the ranks saw, and what somebody else got
# who loaded `model.pt`.


# %% tags=["exercise"]
def broken_script():
    return """
import sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

samples, seed = int(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo")
torch.manual_seed(seed)
data = TensorDataset(torch.arange(samples))
sampler = DistributedSampler(data, seed=seed)
loader = DataLoader(data, batch_size=4, sampler=sampler)
model = DDP(torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(3):
    seen = []
    for (batch,) in loader:
        seen += batch.tolist()
        optimizer.zero_grad()
        model(batch[:, None] / samples).square().mean().backward()
        optimizer.step()
    print("epoch", epoch, "rank", dist.get_rank(), "saw", *seen)
if dist.get_rank() == 0:
    torch.save(model.state_dict(), "model.pt")
dist.destroy_process_group()
"""


# %% tags=["exercise"]
def seen_in(output):
    """{(epoch, rank): samples seen}, from what the script printed."""
    found = re.findall(r"epoch (\d+) rank (\d+) saw([ \d]*)", output)
    return {
        (int(epoch), int(rank)): [int(word) for word in seen.split()]
        for epoch, rank, seen in found
    }


def load_into_plain_model(folder):
    """Load model.pt into a model without a wrapper; raises what PyTorch raises."""
    model = nn.Linear(1, 1)
    model.load_state_dict(torch.load(folder / "model.pt", weights_only=True))
    return model


# %% tags=["exercise"]
shown = ddp.run_script(broken_script(), "12", "0")
for (epoch, rank), seen in sorted(seen_in(shown.output).items()):
    print(f"epoch {epoch}  rank {rank} saw", *seen)
try:
    load_into_plain_model(shown.folder)
except Exception as error:
    print(*str(error).splitlines(), sep="\n")

# %% [markdown]
# **Goal.** Return a tuple: the set of the two faults' letters, and the repaired script
# as text. (`broken_script().replace(old, new)` is enough, or paste the whole script.)
#
# | | fault |
# |---|---|
# | A | each rank starts with other weights |
# | B | every epoch has the same order |
# | C | both ranks write the same file |
# | D | the ranks see the same samples |
# | E | the file holds the wrapper's names |
# | F | the gradients are not averaged |
#
# <details><summary>Hint 1</summary>
#
# Compare the lines of epoch 0 and epoch 1. Then compare the names that PyTorch misses
# with those that it did not expect.
# </details>
# <details><summary>Hint 2</summary>
#
# What does `help(torch.utils.data.DistributedSampler.set_epoch)` say? And where does a
# DDP model keep the model that you gave it?
# </details>


# %% tags=["solution"]
def my_repair():
    """({letters of the two faults}, the repaired script as a str)."""
    # your code
    loop, save = "for epoch in range(3):\n", "model.state_dict()"
    repaired = broken_script().replace(loop, loop + "    sampler.set_epoch(epoch)\n")
    return {"B", "E"}, repaired.replace(save, "model.module.state_dict()")
    # end of your code


# %% tags=["exercise"]
def fault_in_order(seen, samples):
    """What is wrong with the samples that two ranks saw in three epochs, or None."""
    if set(seen) != {(epoch, rank) for epoch in range(3) for rank in range(2)}:
        return "a line is missing: yours printed", "one line per epoch and rank", "Why?"
    for epoch in range(3):
        dealt = sorted(seen[epoch, 0] + seen[epoch, 1])
        if dealt != list(range(samples)):
            question = "Do both ranks cut their shares out of the same order?"
            return f"samples {dealt} in epoch {epoch}", "each of them once", question
    orders = {(tuple(seen[epoch, 0]), tuple(seen[epoch, 1])) for epoch in range(3)}
    if len(orders) < 3:
        question = "What must the sampler be told, and when, before each epoch?"
        return f"{len(orders)} different order(s) in 3 epochs", "3", question
    if seen[0, 0] == sorted(seen[0, 0]):
        return "the samples in rising order", "a shuffled order", "What shuffles them?"
    return None


# %% tags=["exercise"]
def check_repair(answer):
    given = answer()
    if not (isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], str)):
        print(
            f"not yet: yours {given!r:.200}, expected a tuple: the letters, and the "
            "script as text. What stands in the second place?"
        )
        return False
    faults, script = given
    samples = 2 * int(np.random.default_rng().integers(8, 14))
    seed = int(np.random.default_rng().integers(1, 1_000))
    done = ddp.run_script(script, str(samples), str(seed))
    if not done.ok:
        print(f"not yet: the script did not end well.\n{done.output[-600:]}")
        print("Which line of yours does the traceback name?")
    elif found := fault_in_order(seen_in(done.output), samples):
        print("not yet: yours {}, expected {}. {}".format(*found))
    elif found := fault_in_file(done.folder, seed):
        print("not yet: yours {}, expected {}. {}".format(*found))
    elif set(faults) != {"B", "E"}:
        print(
            f"not yet: the script is repaired, but yours {sorted(faults)} are not "
            "the two faults, as expected. What did each of your changes mend?"
        )
    else:
        print("right: each epoch has its own order, and anybody can load the file")
        return True
    return False


# %% tags=["exercise"]
def fault_in_file(folder, seed):
    """What is wrong with model.pt, or None."""
    names = "the names weight and bias"
    if not (folder / "model.pt").exists():
        return "no file model.pt", "one", "Who saves, and when?"
    try:
        model = load_into_plain_model(folder)
    except Exception as error:
        said = str(error).splitlines()[-1].strip()
        return f"a file that says {said!r}", names, "Whose state do you save?"
    torch.manual_seed(seed)
    if torch.equal(model.weight, nn.Linear(1, 1).weight):
        question = "Is the model that you save the one that you trained?"
        return "the weights before training", "those after it", question
    return None


ddp.judge(check_repair, my_repair)

# %% [markdown]
# ### Stretch · Many models at once (15 minutes, at home)
#
# DDP trains *one* model on many workers. To *choose* among models, train many, spread
# over the workers, with plain `client.map`. No process group is needed.
#
# **Goal.** Train one small model with the given learning rate on `fit`. Return its mean
# loss on `validation`, and its weights. Both arguments are tuples (contexts, targets).
#
# <details><summary>Hint 1</summary>
#
# It is the loop of section 4. There `Windows` made numbers out of bytes; here `.long()`
# does. Why must the loss that chooses not be the one of `fit`?
# </details>
# <details><summary>Hint 2</summary>
#
# After the loop: `with torch.no_grad():`, one call of the model on all of `validation`,
# `F.cross_entropy(...).item()`. The weights are `model.state_dict()`.
# </details>


# %% tags=["solution"]
def train_one(learning_rate, fit, validation):
    """Train NameModel(layers=1, hidden=32) with Adam, in batches of 100, once over fit.

    Returns (its loss on `validation`, a float; its weights, a state_dict).
    """
    # your code
    torch.manual_seed(0)
    model = NameModel(layers=1, hidden=32)
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    for context, target in zip(*(part.long().split(100) for part in fit)):
        optimizer.zero_grad()
        F.cross_entropy(model(context), target).backward()
        optimizer.step()
    with torch.no_grad():
        loss = F.cross_entropy(model(validation[0].long()), validation[1].long())
    return loss.item(), model.state_dict()
    # end of your code


# %% tags=["exercise"]
def loss_of(weights, windows):
    """The loss of a small model with these weights on (contexts, targets), a float."""
    model = NameModel(layers=1, hidden=32)
    model.load_state_dict(weights)
    with torch.no_grad():
        return F.cross_entropy(model(windows[0].long()), windows[1].long()).item()


# %% tags=["exercise"]
def check_search(answer):
    order = torch.from_numpy(np.random.default_rng().permutation(len(contexts)))
    fit, validation = (
        (contexts[part], targets[part]) for part in order.split(4_000)[:2]
    )
    rates = [1e-6, 1e-4, 1e-2]
    futures = client.map(answer, rates, fit=fit, validation=validation, pure=False)
    losses = []
    for rate, (yours, weights) in zip(rates, client.gather(futures)):
        loss = loss_of(weights, validation)
        if not math.isclose(yours, loss, rel_tol=1e-5):
            print(
                f"not yet: rate {rate}: yours {yours:.4f}, expected {loss:.4f}, the "
                "loss of your weights on `validation`. Whose loss did you return?"
            )
            return False
        losses.append(yours)
    if losses.index(min(losses)) != 2 or min(losses) > 3:
        mine = ", ".join(f"{loss:.3f}" for loss in losses)
        print(
            f"not yet: yours {mine}, expected less than 3 for the rate {rates[2]}. "
            "Are these the weights after training with Adam?"
        )
        return False
    print(f"right: three models on the workers, the best learning rate is {rates[2]}")
    return True


ddp.judge(check_search, train_one)

# %% [markdown]
# ## 10. Break it
#
# **A rank fails.** Rank 1 receives a damaged character: an index beyond the alphabet.
# All is well on rank 0, so it goes on into `backward()` and waits there for its peer.
# Read the message together: which rank, on which host, in which line?


# %% tags=["lesson"]
def damaged_character():
    """The embedding is asked for a character that does not exist."""
    nn.Embedding(len(ALPHABET), 16)(torch.tensor([99]))


try:
    faulty = ddp.inject(train, damaged_character, rank=1, step=10)
    ddp.launch(client, faulty, **longer, workers=2)
except ddp.RankFailed as failure:
    broken = failure
print(str(broken).splitlines()[0].replace(broken.host, "HOST"))
print("...")
for line in broken.traceback.splitlines():
    if "Embedding(len" in line or "Error" in line:
        print(line)

# %% [markdown]
# The repair belongs where data enter, not into the loop. `read_names` refuses a foreign
# character, and says in which name it stands.

# %% tags=["lesson"]
_ = (run.directory / "broken.csv").write_text("name,count\nbella,3\nr2d2,1\n")
try:
    read_names(run.directory / "broken.csv")
except ddp.Error as error:
    print(error)
after = ddp.launch(client, train, **{**longer, "epochs": 1}, workers=2)
print("the same workers train again:", len(after.records), "reports")

# %% [markdown]
# **A rank falls silent.** How long would its peer wait? There are two cases.
#
# - The process is *dead*. Its machine closes its connections, so with gloo the peer's
#   `all_reduce` soon raises an error (`Connection closed by peer`, or `reset`).
# - The process *lives* and does nothing. The peer waits until the collective times out.
#   By default that takes 30 minutes with gloo and 10 with NCCL (`init_process_group` in
#   `torch/distributed/distributed_c10d.py`).
#
# The log of the killed run tells of rank 1. The error of rank 0 stands there too,
# unless `launch` ended rank 0 before it could say so:

# %% tags=["lesson", "nbval-ignore-output"]
for line in (killed.directory / "log.txt").read_text().splitlines():
    if "was killed" in line or " failed: Runtime" in line:
        print(line[:150])

# %% [markdown]
# `launch` waits for neither. It ends the peers of a dead rank. And where no rank makes
# progress for `stall_timeout` seconds, it asks each one where it is, and which
# collective it has begun:

# %% tags=["lesson"]
try:
    faulty = ddp.inject(train, "deadlock", rank=1, step=10)
    ddp.launch(client, faulty, **longer, workers=2, stall_timeout=5)
except ddp.RankStalled as failure:
    stalled = failure
print(str(stalled).splitlines()[0].replace(stalled.host, "HOST"))
for rank, stack in stalled.stacks.items():
    print(f"rank {rank} is in {stack.splitlines()[0].split()[-1]}")

# %% [markdown]
# One rank is inside `backward()`, in the averaging. The other never came: it is the one
# to look at. `docs/faults.md` lists what other faults look like; `make fault-lab` shows
# them.

# %% [markdown] tags=["instructor"]
# **Instructor.** Expected: 'rank 0 is to blame, it hangs'. The rank that *waits* is
# healthy. Ask what an empty log means: perhaps nothing is wrong, perhaps everybody
# waits.

# %% [markdown]
# ## 11. Recap
#
# - Dask starts one rank on each worker and carries functions, arguments and reports.
#   Gradients go from rank to rank.
# - A run is watched in three places: dashboard, progress line, `log.txt`.
# - A checkpoint that holds model, optimizer, schedule and sampler gives an exact
#   resume.
# - A dead rank is noticed at once. A silent one is noticed only by somebody who looks.
#
# **Common mistakes.** Forgetting `set_epoch`. Saving the wrapper's weights. Shuffling
# in the data set. Taking the rank that waits for the one that failed.
#
# **Next:** the tutorial `ucmerced`: batch systems, and honest evaluation.
#
# **Read.** Li et al., *PyTorch Distributed*, VLDB 2020, [arXiv:2006.15704][1].
# [DistributedSampler][2] and `set_epoch`. Dask's [dashboard][3].
#
# **Where it stands**, in the versions of `constraints.txt`. Others may differ. `mnist`
# has such a list for DDP.
#
# - *Data*: `__getitems__` in [fetch.py][4]; the [sampler][5] has a generator of its
#   own, from seed and epoch.
# - *State*: [Adam][6], with two running means; [LambdaLR][7] counts steps; DDP adds
#   `module.` to [names][8]. Equal bits: the notes on [reproducibility][9], and the
#   remark in [LSTM][10].
# - *Time-outs*: `init_process_group` in the docs of [torch.distributed][11].
# - *Dask*: [LocalCluster][12], whose scheduler runs in your process, and its method
#   `scale`; [Client][13], with `map`, and with `cancel`, which stops only what has not
#   begun; issue [4694][14], why a running task goes on; CPU figures in
#   [system_monitor.py][15], column *Processing* in [worker-table.html][16].
# - *Batch systems*: [dask-jobqueue][17], and `job_script()` there.
#
# [1]: https://arxiv.org/abs/2006.15704
# [2]: https://docs.pytorch.org/docs/stable/data.html
# [3]: https://docs.dask.org/en/stable/dashboard.html
# [4]: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/utils/data/_utils/fetch.py
# [5]: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/utils/data/distributed.py
# [6]: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/optim/adam.py
# [7]: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/optim/lr_scheduler.py
# [8]: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/nn/parallel/distributed.py
# [9]: https://docs.pytorch.org/docs/stable/notes/randomness.html
# [10]: https://docs.pytorch.org/docs/stable/generated/torch.nn.LSTM.html
# [11]: https://docs.pytorch.org/docs/stable/distributed.html
# [12]: https://github.com/dask/distributed/blob/2026.8.0/distributed/deploy/local.py
# [13]: https://github.com/dask/distributed/blob/2026.8.0/distributed/client.py
# [14]: https://github.com/dask/distributed/issues/4694
# [15]: https://github.com/dask/distributed/blob/2026.8.0/distributed/system_monitor.py
# [16]: https://github.com/dask/distributed/tree/2026.8.0/distributed/http/templates
# [17]: https://jobqueue.dask.org/en/latest/

# %% [markdown]
# ## Appendix A · Is it any good? Ask a tuned baseline
#
# *n-grams* count which character followed the last *n* - 1 characters. Where they have
# seen little, they mix in the shorter n-gram, as if it were *s* extra observations.
# Order *n* and smoothing *s* are chosen like settings of the network: on a tenth of the
# *training* names, never on the held-out ones. The learning rate of section 2 was
# chosen that way, too.


# %%
def count(keys, queries):
    """How often each of `queries` is among `keys`."""
    known, counts = np.unique(keys, return_counts=True)
    place = np.searchsorted(known, queries).clip(max=len(known) - 1)
    return np.where(known[place] == queries, counts[place], 0)


def ngram_probabilities(training, asked, longest, smoothing):
    """The probability of each next character, for n = 1 … longest: a list of arrays.

    `training` and `asked` are rows of WIDTH characters and the next one, as indices.
    """
    probability = np.full(len(asked), 1 / (len(ALPHABET) - 1))
    of_order = []
    for n in range(1, longest + 1):
        base = len(ALPHABET) ** np.arange(n - 1, -1, -1)  # an n-gram as one number
        seen, wanted = training[:, -n:] @ base, asked[:, -n:] @ base
        followed = count(seen, wanted)
        in_context = count(seen - training[:, -1], wanted - asked[:, -1])
        probability = (followed + smoothing * probability) / (in_context + smoothing)
        of_order.append(probability)
    return of_order


# %%
def as_rows(contexts, targets):
    return torch.cat([contexts, targets[:, None]], dim=1).numpy().astype(np.int64)


fit, choose = ddp.split(len(training_rows), [0.1], seed=settings.seed)
fit_rows, choosing_rows = (
    as_rows(*windows(names_to_learn(training_rows[part]))) for part in (fit, choose)
)
surprise = {}  # (order, smoothing) -> nats on the names for choosing
for smoothing in (5, 10, 25, 50):
    of_order = ngram_probabilities(fit_rows, choosing_rows, 7, smoothing)
    for order, probability in enumerate(of_order, 1):
        surprise[order, smoothing] = -np.log(probability).sum()
order, smoothing = min(surprise, key=surprise.get)

# %% [markdown]
# Now, once, the held-out names. The third candidate is the plain average of both
# probabilities: it has nothing to tune.

# %%
rows = as_rows(contexts, targets)
held_out = as_rows(held_out_contexts, held_out_targets)
ngram = ngram_probabilities(rows, held_out, order, smoothing)[-1]
with torch.no_grad():
    probabilities = model(held_out_contexts.long()).softmax(1).double().numpy()
lstm = probabilities[np.arange(len(held_out)), held_out[:, -1]]
candidates = {"n-gram": ngram, "LSTM": lstm, "average of both": (ngram + lstm) / 2}
nats = {name: -np.log(values) for name, values in candidates.items()}

# %% tags=["nbval-ignore-output"]
print(f"chosen on training names: {order}-gram, smoothing {smoothing}")
for name, values in nats.items():
    print(f"{name:16} {values.mean():.3f} nats per held-out character")

# %% [markdown]
# Are these differences larger than chance? The same names judge all three, so the
# comparison is *paired*: draw as many names with replacement, 2,000 times, and take the
# difference each time. Characters of one name belong together, so *names* are drawn.


# %% tags=["lesson"]
def interval(first, second, draws=2_000):
    """95 % interval of the difference first - second, in nats per character."""
    starts = np.flatnonzero(held_out[:, WIDTH - 1] == ALPHABET.index("*"))
    per_name = np.add.reduceat(nats[first] - nats[second], starts)
    lengths = np.diff([*starts, len(held_out)])
    drawn = np.random.default_rng(0).integers(len(starts), size=(draws, len(starts)))
    differences = per_name[drawn].sum(axis=1) / lengths[drawn].sum(axis=1)
    return np.percentile(differences, [2.5, 97.5])


pairs = [("LSTM", "n-gram"), ("average of both", "n-gram"), ("average of both", "LSTM")]
intervals = {pair: interval(*pair) for pair in pairs}

# %% tags=["lesson", "nbval-ignore-output"]
for (first, second), (low, high) in intervals.items():
    verdict = "no difference shown" if low < 0 < high else "a difference"
    print(f"{first} - {second}: {low:+.4f} to {high:+.4f} nats, {verdict}")

# %% tags=["proof"]
if settings.epochs >= 6 and settings.data == "shipped":
    assert all(intervals[pair][1] < 0 for pair in pairs[1:]), intervals
    print("the average of both beats each of them: both intervals are below 0")
else:
    print("trained for other data or fewer epochs: no claim")

# %% [markdown]
# Read the intervals before the means. One that contains 0 says: these names do not tell
# the two apart, so *call it a tie*. One below 0 says: the first of the two is better on
# names like these. Where the average of both wins, the two are wrong about different
# characters. The intervals hold chance in the *names* alone: another seed gives another
# LSTM. And a baseline that nobody has tuned flatters the model:

# %% tags=["lesson", "nbval-ignore-output"]
untuned = -np.log(ngram_probabilities(rows, held_out, 4, 5)[-1]).mean()
print(f"4-gram with smoothing 5, a first guess: {untuned:.3f} nats per character")
print(f"LSTM - this guess:    {nats['LSTM'].mean() - untuned:+.3f}")
print(f"LSTM - tuned n-gram:  {(nats['LSTM'] - nats['n-gram']).mean():+.3f}")

# %% [markdown] tags=["instructor"]
# **Instructor.** 15 minutes, if you teach it. Expected: 'the network must win, it is
# deep learning'. Ask what it would need: more names, a longer time, several seeds. Ask
# why the n-gram's order must not be chosen on the held-out names (then it has seen
# them).

# %% [markdown]
# ## Appendix B · Timid and wild names
#
# *Temperature* divides the scores before they become probabilities. A low one makes the
# model timid: it takes the likeliest character. A high one makes it wild.

# %% tags=["lesson", "nbval-ignore-output"]
for temperature in (0.3, 0.7, 1.0, 1.5):
    print(f"{temperature:.1f}  {', '.join(invent(model, 40, temperature)[:7])}")

# %% [markdown]
# ## Appendix C · The same on a cluster
#
# Not a line of this file changes. A profile in `clusters/` says where workers run. On a
# Slurm cluster (PBS: `CLUSTER=pbs`; others: `clusters/README.md`):
#
#     make run TUTORIAL=pets CLUSTER=slurm DRY=1       # print the job script only
#     make doctor CLUSTER=slurm OPTIONS="account=abc"  # what usually goes wrong
#     make run TUTORIAL=pets CLUSTER=slurm OPTIONS="account=abc" WORKERS=4 RESTARTS=3
#
# | | laptop | cluster |
# |---|---|---|
# | workers come | within seconds | when the queue lets them |
# | backend | gloo | NCCL, if every rank has its own GPU |
# | cost | your battery | core or GPU hours, also while a rank waits |
# | it ends early because | you closed the lid | the time limit; ranks save before it |
# | to go on | `RESUME=runs/pets/…` | the same, or `RESTARTS` in new jobs |

# %% tags=["nbval-ignore-output"]
client.close()
