# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Pets: two ranks learn to invent names
#
# **Question.** How does Dask run data-parallel training, and how do I watch it, stop it and go on?
#
# **Afterwards you can**
# - explain which samples each rank trains on, and *prove* that together they see every sample once per epoch;
# - launch one training function on the workers of a Dask cluster and read what every rank reports;
# - kill a rank in the middle of an epoch, resume, and show that the final weights are the same to the last bit;
# - say what changes, and what must not, when the number of ranks changes.
#
# **You need** Python and the first idea of PyTorch: a model, a loss, an optimizer. No GPU, no network, nothing is downloaded.
# **Time:** 75 minutes in class, under 90 seconds of computing on two cores. **Data:** names of pets in Seattle, shipped with the repository.

# %% [markdown] tags=["instructor"]
# **Instructor.** 2 minutes. Ask who has trained with more than one process before, and what went wrong. Keep the answers on the board:
# most come back in section 10. If you are late: skip section 4's loop (run it, do not discuss it) and the stretch exercise.
#
# Minutes per section: set-up 3, data 6, one rank 8, predict 3, what changes 10, on Dask 6, proofs 8, exercises 20, break it 8, scaling 6, cluster 4, recap 3.
# With questions that is 90; without exercise 2 it is 75. The training of section 7 takes half a minute: let the class write down predictions meanwhile.

# %% [markdown]
# ## 2. Set-up and preflight
#
# All settings stand here, once. Defaults suit a laptop; `make run TUTORIAL=pets SET="epochs=2"` changes one of them, and
# `PRESET=full` selects the sizes of the experiment this tutorial goes back to: 4 layers of 128 cells, 16,384 windows on each of 3 ranks, 25 epochs.

# %%
import math
import os
import string

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

# %% tags=["parameters"]
settings = ddp.settings(
    "pets",
    data="shipped",  # or "full" after `make data TUTORIAL=pets`, or the path of your own names.csv
    repeat=False,  # True: a name counts as often as it was registered
    epochs=6,
    batch_size=256,  # of all ranks together
    learning_rate=5e-3,
    layers=1,
    hidden=128,
    seed=0,
    presets={"full": {"repeat": True, "epochs": 25, "batch_size": 3 * 16_384, "layers": 4, "learning_rate": 1e-2}},
    limits={"layers": (1, 100)},
)

# %% [markdown]
# `connect()` starts the cluster of a *profile*: here Dask workers on this machine. While you read on, they import torch.

# %% tags=["nbval-ignore-output"]
client = ddp.connect()
dataset = ddp.fetch("pets", settings.data)
print(f"torch {torch.__version__} · {client.ranks} ranks · {dataset.title}: {dataset.origin}")

# %% [markdown]
# ## 3. The data
#
# A table of names and how often each was registered: City of Seattle open data, set jguv-t9rb. No owner, no licence number, no address.
# A tenth of the *distinct* names is held out: the model never sees them, and they will judge it.

# %%
ALPHABET = "*+" + string.ascii_lowercase + "-. "  # '*' pads the beginning, '+' ends a name
WIDTH = 8  # characters that the model sees


def read_names(path):
    """The table of names: columns name (str) and count (int). Raises ddp.Error for an empty table or a foreign character."""
    table = pd.read_csv(path, keep_default_na=False)  # a cat named Nan is not a missing value
    if table.empty or list(table.columns) != ["name", "count"]:
        raise ddp.Error(f"{path} holds no names. It needs the columns name and count, and at least one row.")
    for name in table["name"]:
        if foreign := set(name) - set(ALPHABET[2:]):
            raise ddp.Error(f"The name {name!r} has {foreign.pop()!r}, which is not in the alphabet {ALPHABET[2:]!r}. Tidy the list first.")
    return table


# %%
table = read_names(dataset.path)
training_rows, held_out_rows = ddp.split(len(table), [0.1], seed=settings.seed)
held_out_names = table["name"].iloc[held_out_rows].tolist()
training_table = table.iloc[training_rows]
repeats = training_table["count"] if settings.repeat else 1
training_names = training_table["name"].repeat(repeats).tolist()
print(f"{len(table):,} distinct names; {len(training_names):,} to learn from, {len(held_out_names):,} held out")

# %% tags=["lesson"]
table.nlargest(5, "count").reset_index(drop=True)

# %% [markdown]
# The task: given eight characters, predict the next. A name of *n* letters becomes *n* + 1 windows; the last one predicts the end, `+`.
# All windows are views into one long array, made without a loop over names.

# %%
def windows(names):
    """Contexts (n, WIDTH) and next characters (n,), both uint8 indices into ALPHABET, for a list of names."""
    index_of = np.zeros(256, np.uint8)
    index_of[np.frombuffer(ALPHABET.encode(), np.uint8)] = np.arange(len(ALPHABET))
    text = "".join("*" * WIDTH + name + "+" for name in names)
    codes = index_of[np.frombuffer(text.encode(), np.uint8)]
    rows = np.lib.stride_tricks.sliding_window_view(codes, WIDTH + 1)
    rows = torch.from_numpy(rows[rows[:, -1] != ALPHABET.index("*")])
    return rows[:, :-1].contiguous(), rows[:, -1].contiguous()


contexts, targets = windows(training_names)
held_out_contexts, held_out_targets = windows(held_out_names)
print(f"{len(contexts):,} training windows, {len(held_out_contexts):,} held-out windows of {WIDTH} characters")

# %% tags=["lesson"]
example_contexts, example_targets = windows(["bella", "mr. fox", "luna"])
rows = torch.cat([example_contexts, example_targets[:, None]], dim=1)
figure, axes = plt.subplots(figsize=(4.5, 5.2))
axes.imshow(rows, cmap="tab20", alpha=0.45, aspect="auto")
for (row, column), code in np.ndenumerate(rows.numpy()):
    axes.text(column, row, ALPHABET[code], ha="center", va="center", family="monospace")
axes.axvline(WIDTH - 0.5, color="black", linewidth=2)
axes.set(xticks=[WIDTH / 2 - 0.5, WIDTH], xticklabels=["eight characters", "next"], yticks=[], title="Three names as windows")
plt.show()

# %% [markdown]
# ## 4. One rank first
#
# The model reads a window through an embedding and an LSTM and scores every character that may come next. The data set hands out a whole
# batch by one index operation (`__getitems__`): item by item, Python would spend more time than the model.

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
        return self.head(self.lstm(self.embedding(contexts))[0][:, -1])  # scores (batch, characters)


# %% [markdown]
# The plain loop, in this process, on a small part of the data. Nothing here is distributed.

# %% tags=["lesson"]
torch.manual_seed(settings.seed)
small = Windows(contexts[:8_000], targets[:8_000])
model = NameModel(layers=1, hidden=64)
optimizer = torch.optim.Adam(model.parameters(), lr=settings.learning_rate)
losses = []
for batch in torch.randperm(len(small)).split(256):
    context, target = small.__getitems__(batch)
    loss = F.cross_entropy(model(context), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"first batch {losses[0]:.2f} nats per character (a blind guess: ln {len(ALPHABET)} = {np.log(len(ALPHABET)):.2f}), last {losses[-1]:.1f}")

# %% tags=["lesson"]
figure, axes = plt.subplots(figsize=(6, 2.6))
axes.plot(losses)
axes.set(xlabel="step", ylabel="loss (nats per character)", title="One process, the plain loop")
plt.show()

# %% [markdown]
# ## 5. Predict
#
# You will train the same model with 1, 2 and 3 ranks. The *global* batch stays 256 windows: with 2 ranks each takes 128 of them.
# **Write your prediction before you go on.** After the same number of steps, the loss on 3 ranks compared with 1 rank is
#
# - `"lower"`: three models learn more than one;
# - `"same"`: the same to at least six digits;
# - `"higher"`: each rank has seen only a third of the windows.

# %% tags=["lesson"]
my_prediction = "lower"

# %% [markdown]
# ## 6. What changes
#
# Every rank holds the whole model and takes its share of each batch. After `backward()` the ranks *average their gradients*; then each
# makes the same step, so the models stay equal. The averaging is one collective call per parameter, made by hand here:

# %% tags=["lesson"]
def step_by_hand(contexts, targets):
    """One training step whose gradients the ranks average themselves. Returns the first weight of every rank's model afterwards."""
    torch.manual_seed(0)  # the same initial weights on all ranks
    model = NameModel(layers=1, hidden=64)
    mine = slice(ddp.rank(), None, ddp.world_size())  # every world_size-th window
    F.cross_entropy(model(contexts[mine].long()), targets[mine].long()).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)  # sum over the ranks, in place
        parameter.grad /= ddp.world_size()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    weights = [None] * ddp.world_size()
    dist.all_gather_object(weights, model.head.weight[0, 0].item())
    return weights


run = ddp.launch(client, step_by_hand, contexts=contexts[:256], targets=targets[:256], workers=2)
print("one weight on rank 0 and on rank 1 after the step are equal:", run.result[0] == run.result[1])

# %% [markdown]
# `DistributedDataParallel` does the same while `backward()` is still running. Compared with the plain loop, these lines differ:
#
# | line | why |
# |---|---|
# | `sampler = ddp.ElasticSampler(...)` | deals each global batch to the ranks |
# | `model = DDP(...)` | averages gradients |
# | `* sampler.weight` | a rank with fewer windows of a ragged last batch counts less |
# | `checkpoint.restore()`, `every_steps=50`, `.save()` | a run can stop and go on; training does not wait for the disk |
# | `ddp.report(loss=loss)` | tells the client; no rank waits for it |

# %%
def warm_up_and_decay(progress):
    """The share of the learning rate to use after `progress` (0 to 1) of all steps: up for three tenths, then down along a cosine."""
    return 0.04 + 0.96 * progress / 0.3 if progress < 0.3 else (1 + math.cos(math.pi * min((progress - 0.3) / 0.7, 1))) / 2


def train(contexts, targets, epochs, batch_size, learning_rate, layers, hidden, seed):
    """Train a NameModel on this rank's share of the windows; returns its weights."""
    device = ddp.device()
    torch.manual_seed(seed)  # the same initial weights on all ranks
    data = Windows(contexts, targets)
    sampler = ddp.ElasticSampler(len(data), batch_size, seed=seed)
    loader = DataLoader(data, batch_sampler=sampler, collate_fn=lambda batch: batch)
    model = DDP(NameModel(layers, hidden).to(device))
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warm_up_and_decay(step / (epochs * len(sampler))))
    checkpoint = ddp.Checkpoint(model=model, optimizer=optimizer, schedule=schedule, sampler=sampler, every_steps=50)
    checkpoint.restore()  # nothing to restore on a first attempt
    for epoch in sampler.epochs(epochs):
        for context, target in loader:
            loss = F.cross_entropy(model(context.to(device)), target.to(device)) * sampler.weight
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
# `launch` starts one process, a *rank*, on each worker, hands it the function with its arguments, and returns when all are done.

# %%
hyperparameters = {name: getattr(settings, name) for name in ("epochs", "batch_size", "learning_rate", "layers", "hidden", "seed")}
run = ddp.launch(client, train, contexts=contexts, targets=targets, **hyperparameters)

# %% [markdown]
# Every report of every rank is a row of `run.metrics` and a line of `metrics.jsonl` in the run directory.

# %% tags=["lesson", "nbval-ignore-output"]
run.metrics.pivot_table(index="rank", columns="epoch", values="loss").round(4)

# %%
def plot_losses(metrics):
    """The loss of every rank and of their mean, a point for every 20 steps."""
    whole = metrics[metrics["step"] < metrics["step"].max() // 20 * 20]  # without the last, incomplete point
    by_rank = whole.groupby([whole["step"] // 20 * 20, "rank"])["loss"].mean().unstack()
    figure, axes = plt.subplots(figsize=(7, 3.2))
    axes.plot(by_rank.index, by_rank.mean(axis=1), color="lightgrey", linewidth=5, label="mean: the loss of the global batch")
    for rank, curve in by_rank.items():
        axes.plot(curve.index, curve, linewidth=1, label=f"rank {rank}")
    axes.set(xlabel="step", ylabel="loss (nats per character)", title=f"Training on {by_rank.shape[1]} ranks")
    axes.legend()
    return figure


figure = plot_losses(run.metrics)
figure.savefig(run.directory / "loss.png", dpi=120, bbox_inches="tight")

# %% [markdown]
# ### Is it any good?
#
# The held-out names judge. The measure is the cross-entropy in nats per character: how surprised the model is, on average, by the next letter.
# The baselines are *n*-grams: they count which character followed the last *n* - 1, and lean on the shorter context with the weight of
# 5 observations where they have seen little.

# %%
def ngram_cross_entropy(order, training, held_out, smoothing=5.0):
    """Cross-entropy (nats per character) on `held_out` of n-grams counted in `training`: arrays (n, WIDTH + 1) of indices."""
    probability = np.full(len(held_out), 1 / (len(ALPHABET) - 1))  # order 0: every character but the padding
    for length in range(1, order + 1):
        base = len(ALPHABET) ** np.arange(length)
        seen, asked = training[:, -length:] @ base, held_out[:, -length:] @ base  # an n-gram as one number
        counts = np.bincount(seen, minlength=len(ALPHABET) ** length)
        context_counts = np.bincount(seen - training[:, -1] * base[-1], minlength=len(counts))
        in_context = context_counts[asked - held_out[:, -1] * base[-1]]
        probability = (counts[asked] + smoothing * probability) / (in_context + smoothing)
    return -np.log(probability).mean()


def as_rows(contexts, targets):
    return torch.cat([contexts, targets[:, None]], dim=1).numpy().astype(np.int64)


model = NameModel(settings.layers, settings.hidden)
model.load_state_dict(run.result)
with torch.no_grad():
    quality = F.cross_entropy(model(held_out_contexts.long()), held_out_targets.long()).item()
rows = as_rows(contexts, targets), as_rows(held_out_contexts, held_out_targets)
baselines = pd.Series({f"{order}-gram": ngram_cross_entropy(order, *rows) for order in (1, 2, 3, 4)})

# %% tags=["nbval-ignore-output"]
print(pd.concat([baselines, pd.Series({"this LSTM": quality})]).round(3).to_string())
difference = baselines.min() - quality
print(f"The best n-gram needs {baselines.min():.3f} nats per character, this model {quality:.3f}: {abs(difference):.3f} {'less' if difference > 0 else 'more'} surprise.")

# %% tags=["proof"]
if settings.epochs >= 6:
    assert quality < baselines.min(), f"the model ({quality:.3f}) should beat every n-gram ({baselines.min():.3f})"
    print("the LSTM beats the n-grams of order 1 to 4 on names it has never seen")

# %% [markdown]
# ### Invented names
#
# Start with eight stars, draw a character from the model's probabilities, append it, repeat until `+`. *Temperature* divides the scores before
# they become probabilities: low is timid, high is wild. Names that exist are dropped.

# %%
def invent(model, count, temperature=0.8, seed=0, longest=20):
    """Draw `count` names from the model; returns those that are new, without repeats."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.full((count, WIDTH), ALPHABET.index("*"))
    with torch.no_grad():
        for _ in range(longest):
            scores = model(text[:, -WIDTH:]) / temperature
            scores[:, ALPHABET.index("*")] = -torch.inf  # padding is not a letter
            text = torch.cat([text, torch.multinomial(scores.softmax(1), 1, generator=generator)], dim=1)
    drawn = ["".join(ALPHABET[code] for code in row[WIDTH:]) for row in text]
    names = [name.split("+")[0].strip() for name in drawn if "+" in name]
    return [name for name in dict.fromkeys(names) if len(name) > 2 and name not in existing]


existing = set(table["name"])

# %% tags=["nbval-ignore-output"]
names = invent(model, 40)
print("Invented:", ", ".join(names[:20]))
_ = (run.directory / "names.txt").write_text("\n".join(names) + "\n")

# %% tags=["lesson", "nbval-ignore-output"]
for temperature in (0.3, 0.7, 1.0, 1.5):
    print(f"{temperature:.1f}  {', '.join(invent(model, 40, temperature)[:8])}")

# %% [markdown]
# ## 8. Proofs
#
# ### The shards partition the data
#
# Each rank notes which samples it is dealt in one epoch. Together they must hold every sample once. `DistributedSampler` promises that
# too, but not for a data set that shuffles *itself*, without a seed, on every rank: index 7 then means another sample on each of them.

# %% tags=["lesson"]
def deal_an_epoch(samples, data_set_shuffles_itself):
    """Which samples each rank sees in one epoch: a list of lists."""
    if data_set_shuffles_itself:  # from the museum of faults
        own_order = np.random.default_rng().permutation(samples)
        sampler = torch.utils.data.DistributedSampler(range(samples))
        seen = [int(own_order[index]) for index in sampler]
    else:
        seen = [index for batch in ddp.ElasticSampler(samples, 256) for index in batch]
    everyones = [None] * ddp.world_size()
    dist.all_gather_object(everyones, seen)
    return everyones


def check_partition(everyones, samples):
    """Raise AssertionError unless every sample is in exactly one rank's list, once."""
    counts = np.bincount(np.concatenate(everyones), minlength=samples)
    assert (counts == 1).all(), f"{(counts == 0).sum()} samples never seen, {(counts > 1).sum()} seen more than once"


# %% [markdown]
# Three ranks need a third worker. A Dask cluster grows while it runs.

# %% tags=["lesson"]
if client.cluster is not None and len(client.workers()) < 3:
    client.cluster.scale(3)
client.wait_for_workers(3, timeout=60)
right = ddp.launch(client, deal_an_epoch, samples=1_000, data_set_shuffles_itself=False, workers=3).result
wrong = ddp.launch(client, deal_an_epoch, samples=1_000, data_set_shuffles_itself=True, workers=3).result

# %% tags=["lesson"]
figure, panels = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True)
colours = ["tab:blue", "tab:orange", "tab:green"]
for axes, everyones, title in zip(panels, (right, wrong), ("ElasticSampler", "a data set that shuffles itself")):
    picture = np.ones((25, 40, 3))  # a sample nobody saw stays white
    for colour, seen in zip(colours, everyones):
        picture.reshape(-1, 3)[seen] = plt.matplotlib.colors.to_rgb(colour)
    covered = len(np.unique(np.concatenate(everyones))) / 1_000
    axes.imshow(picture)
    axes.set(xticks=[], yticks=[], title=f"{title}\n{covered:.0%} of 1,000 samples seen")
plt.show()

# %% tags=["proof"]
check_partition(right, 1_000)
print("ElasticSampler: every sample once, on exactly one of", len(right), "ranks")
try:
    check_partition(wrong, 1_000)
    raise RuntimeError("the fault went unnoticed")
except AssertionError:
    print("the data set that shuffles itself: caught, samples are missing and others are seen twice")

# %% [markdown]
# ### The same loss on 1, 2 and 3 ranks
#
# 1,003 windows in global batches of 256: the last batch is ragged. Same windows per step, exact weights, so the same loss, up to the order of sums.

# %% tags=["lesson"]
few = {"contexts": contexts[:1_003], "targets": targets[:1_003], "epochs": 2, "batch_size": 256, "learning_rate": 5e-3,
       "layers": 1, "hidden": 32, "seed": 0}
final_loss = {}
for ranks in (1, 2, 3):
    metrics = ddp.launch(client, train, **few, workers=ranks).metrics
    final_loss[ranks] = metrics[metrics["step"] == metrics["step"].max()]["loss"].mean()

# %% tags=["proof"]
for ranks, value in final_loss.items():
    assert abs(value / final_loss[1] - 1) < 1e-6, f"{ranks} ranks: {value}, 1 rank: {final_loss[1]}"
print(f"after 8 steps the loss on 1, 2 and 3 ranks is {final_loss[1]:.3f}, equal to a relative 1e-6")
print("your prediction was", repr(my_prediction), "— right" if my_prediction == "same" else "— and the ranks say: 'same'")

# %% [markdown]
# ### Kill a rank, go on, same weights
#
# Rank 1 is killed in the middle of the second epoch, after step 170: no exception, no goodbye. The other rank does not wait for half an hour, as it
# would on its own: `launch` ends it, and `restarts=1` has it start both again from the newest checkpoint. `ddp.inject` wraps a training function
# with a fault, here one that strikes once: its mark is a file.

# %% tags=["lesson"]
longer = {**few, "contexts": contexts[:10_000], "targets": targets[:10_000], "batch_size": 100}  # 100 steps an epoch
undisturbed = ddp.launch(client, train, **longer, workers=2)
dies_once = ddp.inject(train, "SIGKILL", rank=1, step=170, mark=run.directory / "struck")
killed = ddp.launch(client, dies_once, **longer, workers=2, restarts=1)

# %% tags=["lesson", "nbval-ignore-output"]
killed.metrics.query("event == 'restart'")[["rank", "reason", "step", "ranks"]]

# %% tags=["proof"]
print(f"rank {killed.failures[0].rank} was ended by {killed.failures[0].signal}")
for name, weights in undisturbed.result.items():
    assert torch.equal(weights, killed.result[name]), f"{name} differs"
print("the run that was killed ends with the weights of the undisturbed one, bit for bit")

# %% [markdown]
# ### From the museum: a checkpoint of the wrapper
#
# `DDP(model).state_dict()` puts `module.` before every name. Such a checkpoint loads into no plain model: not for inventing names, not on one rank.

# %% tags=["lesson"]
def check_loads_into_plain_model(state):
    """Raise RuntimeError unless `state` is that of an unwrapped NameModel."""
    NameModel(layers=1, hidden=32).load_state_dict(state)


of_the_wrapper = {f"module.{name}": weights for name, weights in undisturbed.result.items()}

# %% tags=["proof"]
check_loads_into_plain_model(undisturbed.result)
try:
    check_loads_into_plain_model(of_the_wrapper)
    raise AssertionError("the fault went unnoticed")
except RuntimeError:
    print("weights of model.module load into the plain model; those of the wrapper are refused")

# %% [markdown]
# ## 9. Exercises
#
# ### Exercise 1 · Who gets what? (8 minutes)
#
# **Goal.** Write the rule by which a global batch is dealt. `batch` is an array of sample indices; return those of `rank`.
# **Hint.** Two ranks and the batch `[7, 3, 5, 1]`: rank 0 gets `[7, 5]`, rank 1 gets `[3, 1]`. One slice does it.

# %% tags=["solution"]
def my_share(batch, rank, world_size):
    """The part of `batch` that `rank` trains on."""
    # your code
    return batch[rank::world_size]
    # end of your code


# %% tags=["exercise"]
def check_share(answer):
    batch = np.array([7, 3, 5, 1, 9])
    for size in (1, 2, 3, 6):
        for rank in range(size):
            yours, expected = answer(batch, rank, size), batch[rank::size]
            if not np.array_equal(yours, expected):
                print(f"not yet: rank {rank} of {size}: yours {yours}, expected {expected.tolist()}")
                return False
    print("right: every sample goes to one rank, and the sizes differ by one at most")
    return True


ddp.judge(check_share, my_share)

# %% [markdown]
# ### Exercise 2 · The loss of a ragged batch (12 minutes)
#
# **Goal.** The last global batch has 5 samples: rank 0 gets 3, rank 1 gets 2. Each rank computes the *mean* loss of its samples, and DDP averages over
# ranks. Return the factor with which a rank must multiply its mean, so that the average over ranks is the mean over all samples.
# **Hint.** Write both means as sums. With equal shares the factor is 1.

# %% tags=["solution"]
def my_weight(samples_of_this_rank, samples_of_all_ranks, world_size):
    """The factor for a rank's mean loss."""
    # your code
    return world_size * samples_of_this_rank / samples_of_all_ranks
    # end of your code


# %% tags=["exercise"]
def check_weight(answer):
    for shares in ([[1.0, 2.0, 6.0], [4.0, 8.0]], [[1.0], [3.0], []], [[2.0, 2.0], [4.0, 4.0]]):
        everything, size = sum(shares, []), len(shares)
        factors = [answer(len(share), len(everything), size) for share in shares]
        if None in factors:
            print("not yet: yours returns None")
            return False
        yours = sum(factor * np.mean(share or [0]) for factor, share in zip(factors, shares)) / size
        if not np.isclose(yours, np.mean(everything)):
            print(f"not yet: shares {shares}: yours gives {yours:.3f}, expected {np.mean(everything):.3f}")
            return False
    print("right: this is `sampler.weight`")
    return True


ddp.judge(check_weight, my_weight)

# %% [markdown]
# ### Stretch · Many models at once (15 minutes)
#
# DDP trains one model on many workers. To *choose* a model, train many, one on each worker, with plain `client.map`: no process group at all.
# **Goal.** Write a function that trains one small model with the given learning rate for 30 steps and returns (learning rate, last loss).
# **Hint.** It is the loop of section 4. Dask sends the function and brings the tuples back.

# %% tags=["solution"]
def train_one(learning_rate, contexts, targets):
    """Train a small model alone for 30 steps of 100 windows. Returns (learning_rate, mean loss of the last ten steps)."""
    # your code
    torch.manual_seed(0)
    model, losses = NameModel(layers=1, hidden=32), []
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    for context, target in zip(contexts.long().split(100), targets.long().split(100)):
        loss = F.cross_entropy(model(context), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return learning_rate, sum(losses[-10:]) / 10
    # end of your code


# %% tags=["exercise"]
def check_search(answer):
    rates = [1e-5, 1e-3, 1e-2]
    results = client.gather(client.map(answer, rates, contexts=contexts[:3_000], targets=targets[:3_000], pure=False))
    if [result and result[0] for result in results] != rates:
        print(f"not yet: yours {results}, expected one (learning rate, loss) for each of {rates}")
        return False
    best = min(results, key=lambda result: result[1])[0]
    print(f"right: three models, three workers, and the best learning rate is {best}" if best == 1e-2 else f"not yet: your best is {best}")
    return best == 1e-2


ddp.judge(check_search, train_one)

# %% [markdown] tags=["instructor"]
# **Instructor.** Expected wrong answers. Exercise 1: `batch[rank * n:(rank + 1) * n]` (contiguous blocks: drops the remainder). Exercise 2: `len(local) / len(global)`
# (forgets that DDP divides by the number of ranks again: the loss comes out too small by that factor). Prediction: about half of a class says "higher".

# %% [markdown]
# ## 10. Break it
#
# Rank 1 receives a damaged character, an index beyond the alphabet. On rank 0 all is well, so it goes on into `backward()` and waits there for a
# gradient that will never come. Read the message together: which rank, on which host, in which line?

# %% tags=["lesson"]
def damaged_character():
    """The embedding is asked for a character that does not exist."""
    nn.Embedding(len(ALPHABET), 16)(torch.tensor([99]))


try:
    ddp.launch(client, ddp.inject(train, damaged_character, rank=1, step=10), **longer, workers=2)
except ddp.RankFailed as failure:
    broken = failure
print(str(broken).splitlines()[0].replace(broken.host, "HOST"))
print("...")
print("\n".join(line for line in broken.traceback.splitlines() if "Embedding(len" in line or "Error" in line))

# %% [markdown]
# The peer was ended at once, nobody waited for a time-out, and the workers are free. The repair belongs where data enters, not into the loop: `read_names`
# refuses a character outside the alphabet, with the name it stands in.

# %% tags=["lesson"]
_ = (run.directory / "broken.csv").write_text("name,count\nbella,3\nr2d2,1\n")
try:
    read_names(run.directory / "broken.csv")
except ddp.Error as error:
    print(error)
after = ddp.launch(client, train, **{**longer, "epochs": 1}, workers=2)
print("the same workers train again:", len(after.records), "reports of", after.world_size, "ranks")

# %% [markdown]
# A rank that is alive but does nothing is harder to see: no error, no message, only silence. `stall_timeout` is how long it may last. Then every
# rank is asked where it is. Read who waits for whom: one rank is inside `backward()`, in the averaging; where is the other?

# %% tags=["lesson"]
try:
    ddp.launch(client, ddp.inject(train, "deadlock", rank=1, step=10), **longer, workers=2, stall_timeout=2)
except ddp.RankStalled as failure:
    stalled = failure
print(str(stalled).splitlines()[0].replace(stalled.host, "HOST"))
for rank, stack in stalled.stacks.items():
    print(f"rank {rank} is in {stack.splitlines()[0].split()[-1]}")

# %% [markdown]
# `make fault-lab` does this with every fault we know, and prints how long each took to be noticed; `docs/faults.md` says what each looks like.

# %% [markdown]
# ## 11. Does it scale?
#
# Compare at equal *samples seen*, never at equal steps. Here the global batch is the same, so equal steps are equal samples, and the only question is
# the speed. A laptop has few cores and small batches: the ranks share what there is, and the averaging is not free. Believe the measurement.

# %% tags=["lesson", "nbval-ignore-output"]
measured = []
for ranks in (1, 2):
    trial = ddp.launch(client, train, contexts=contexts[:20_000], targets=targets[:20_000], **{**hyperparameters, "epochs": 1}, workers=ranks)
    times = trial.metrics.query("rank == 0").sort_values("step")
    seconds = times["time"].iloc[-1] - times["time"].iloc[0]
    measured.append({"ranks": ranks, "samples/s": (20_000 - settings.batch_size) / seconds, "loss": trial.metrics["loss"].tail(20 * ranks).mean()})
scaling = pd.DataFrame(measured).set_index("ranks")
scaling["efficiency"] = scaling["samples/s"] / scaling["samples/s"].loc[1] / scaling.index
print(scaling.round({"samples/s": -2, "loss": 4, "efficiency": 2}).to_string())
print(f"2 ranks are {scaling['samples/s'].loc[2] / scaling['samples/s'].loc[1]:.2f} times as fast as 1 on {os.cpu_count()} cores")

# %% [markdown]
# ## 12. The same on a cluster
#
# Not a line of this file changes. A *profile* says where the workers come from, a file in `clusters/`: `local.yaml` is the one you have just used.
# On a Slurm cluster (a PBS one: `CLUSTER=pbs`; elsewhere: `clusters/README.md`), first look, then check, then train:
#
#     make run TUTORIAL=pets CLUSTER=slurm DRY=1                   # print the job script, submit nothing
#     make doctor CLUSTER=slurm OPTIONS="account=abc"              # what usually goes wrong, and what to do
#     make run TUTORIAL=pets CLUSTER=slurm OPTIONS="account=abc" WORKERS=4 RESTARTS=3
#
# What differs:
#
# | | laptop | cluster |
# |---|---|---|
# | workers come | within seconds | when the queue lets them |
# | backend | gloo | NCCL, if every rank has its own GPU |
# | cost | your battery | core or GPU hours, also while a rank waits for its peers |
# | the run ends early because | you closed the lid | the time limit: ranks save before it; `RESTARTS` goes on in new jobs, or you with `RESUME=runs/pets/…` |

# %% [markdown]
# ## 13. Recap
#
# - Every rank holds the whole model and takes its share of each global batch; averaged gradients keep the models equal.
# - A deal that depends on (seed, epoch) alone gives every sample once per epoch, the same loss on any number of ranks, and an exact resume.
# - Ranks are processes: one that dies is noticed at once and takes nobody with it into a time-out; `restarts` goes on from the newest checkpoint.
# - Ranks report; the client prints. No rank waits for that.
#
# **Common mistakes.** Shuffling inside the data set; saving the wrapper's weights; comparing numbers of ranks at equal steps; forgetting that DDP averages over ranks, not samples.
#
# **Next:** run `make run TUTORIAL=pets`, stop it with Ctrl-C, and go on with the command it prints.
# **Read:** Li et al., *PyTorch Distributed: Experiences on Accelerating Data Parallel Training*, VLDB 2020; the docs of `torch.nn.parallel.DistributedDataParallel`; the docs of `dask.distributed`.

# %% tags=["nbval-ignore-output"]
client.close()
