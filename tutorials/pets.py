# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Pets: run, watch, stop and resume on Dask
#
# ## 1. The question
#
# **How do I run a training on Dask, watch it, stop it and resume it?**
#
# **Afterwards you can**
# - launch a training function on the workers of a Dask cluster;
# - watch a run while it trains: loss, log, files;
# - open a checkpoint, and load it without Dask and without DDP;
# - stop a run, kill one of its ranks, and resume it by hand;
# - find two faults in a script that ends without an error.
#
# **You need** the tutorial `mnist`. From it we take *rank*, *collective* and *DDP*. No
# GPU, no network. **Data:** names of pets in Seattle, shipped with the repository.
#
# **Time:** 75 minutes in class, 24 of them for two exercises. The computer needs about
# two minutes on two cores.

# %% [markdown]
# ## 2. Set-up
#
# All settings are in one cell. In a terminal, in the folder of the repository,
# `make run TUTORIAL=pets` trains with them, without the lesson. `SET="epochs=2"` after
# it changes one.

# %%
import io
import math
import re
import string
import time
from collections import Counter
from contextlib import redirect_stdout

import matplotlib.pyplot as plt
import pandas as pd
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import ddp_common as ddp
from tutorials import kit
from tutorials.checks import pets as checks
from tutorials.checks.common import judge, run_script
from tutorials.helpers import LiveLoss, curve, show

# %% tags=["parameters"]
settings = kit.settings(
    "pets",
    data="shipped",  # or "full" after `make data TUTORIAL=pets`, or your own names.csv
    repeat=False,  # True: a name counts as often as it was registered
    epochs=4,
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
# notebook is the *client*. It sends functions to a *scheduler*, which passes them on to
# *workers*. Here `connect()` starts two to four workers, each in a process of its own.
# The last line shows the address of Dask's *dashboard*, a web page about the cluster.

# %% tags=["nbval-ignore-output"]
client = ddp.connect()
dataset = kit.fetch("pets", settings.data)
backend = "nccl" if torch.cuda.is_available() else "gloo"
versions = f"torch {torch.__version__} · {backend} · {client.ranks} ranks"
print(f"{versions} · {dataset.title}: {dataset.origin}")
getattr(client, "dashboard_link", "there is no dashboard without Dask")

# %% [markdown]
# ## 3. The data
#
# The table holds names, and how often each was registered. It is open data of the City
# of Seattle (set jguv-t9rb). It says nothing about owners.
#
# A tenth of the *distinct* names is held out: the model never sees them in training.
# We use them once, in section 7.

# %%
ALPHABET = "*+" + string.ascii_lowercase + "-. "  # '*' pads, '+' ends a name
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


table = read_names(dataset.path)
training_rows, held_out_rows = ddp.split(len(table), [0.1], seed=settings.seed)
learned, held_out = table.iloc[training_rows], table.iloc[held_out_rows]
training_names = learned["name"].repeat(learned["count"] if settings.repeat else 1)
numbers = f"{len(training_names):,} to learn from, {len(held_out):,} held out"
print(f"{len(table):,} distinct names; {numbers}")

# %% tags=["lesson"]
common = table.nlargest(12, "count")
figure, axes = plt.subplots(figsize=(6, 2.8), layout="constrained")
axes.bar(common["name"], common["count"])
axes.set(ylabel="pets with this name", title="The most common names")
axes.tick_params(axis="x", rotation=45)
show(figure, "Bars: how many pets have each of the twelve most common names.")

# %% [markdown]
# The task: the model sees eight characters and predicts the next one. Stars pad the
# beginning, and `+` ends a name. Each row below is one such *window*.


# %%
def windows(names):
    """Contexts (n, WIDTH) and next characters (n,), as indices into ALPHABET."""
    index = {character: number for number, character in enumerate(ALPHABET)}
    contexts, targets = [], []
    for name in names:
        codes = [index[character] for character in "*" * WIDTH + name + "+"]
        for end in range(WIDTH, len(codes)):
            contexts.append(codes[end - WIDTH : end])
            targets.append(codes[end])
    dtype = torch.uint8  # one byte for each character
    return torch.tensor(contexts, dtype=dtype), torch.tensor(targets, dtype=dtype)


contexts, targets = windows(training_names)
held_out_contexts, held_out_targets = windows(held_out["name"])
print(f"{len(contexts):,} windows to learn from, {len(held_out_contexts):,} held out")

# %% tags=["lesson"]
for context, target in zip(*windows(["mr. fox"])):
    eight = "".join(ALPHABET[code] for code in context)
    print(f"{eight} -> {ALPHABET[target]}")

# %% [markdown]
# ## 4. One process first
#
# An *embedding* turns each character into a vector of 16 numbers, which are learned. An
# *LSTM* is a network with a memory: it reads the eight vectors one after the other. A
# linear layer then gives each possible next character a score.


# %%
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
# distributed. The loss is the *cross-entropy*: how much the next character surprises
# the model, on average. Its unit is the *nat*, the unit of the natural logarithm. The
# optimizer is *Adam*. It keeps two running means for each weight, of the gradient and
# of its square.

# %% tags=["lesson"]
torch.manual_seed(settings.seed)
model = NameModel(layers=1, hidden=64)
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
losses = []
for rows in torch.randperm(8_000).split(256):
    loss = F.cross_entropy(model(contexts[rows].long()), targets[rows].long())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"first batch {losses[0]:.2f} nats per character, last {losses[-1]:.1f}")
print(f"a blind guess: ln {len(ALPHABET)} = {math.log(len(ALPHABET)):.2f}")

# %% [markdown]
# ### Invented names
#
# To invent a name, start with eight stars. Draw a character from the model's
# probabilities, append it, and repeat until `+`. A *temperature* below 1 makes likely
# characters likelier.
#
# Such a model can also write words that hurt people. So we keep a name only if it is
# *familiar*: one word, at least three groups of vowels, and every four letters in a row
# occur in two or more registered names. No rule finds all rude words.


# %%
def fours(name):
    """All groups of four letters in a row."""
    return {name[start : start + 4] for start in range(len(name) - 3)}


names_with = Counter(group for name in table["name"] for group in fours(name))
familiar = {group for group, count in names_with.items() if count >= 2}
registered = set(table["name"])


def is_familiar(name):
    """Whether a name is one word, has three groups of vowels, and familiar parts."""
    vowels = re.findall("[aeiouy]+", name)
    return name.isalpha() and len(vowels) >= 3 and fours(name) <= familiar


def invent(model, count=600, temperature=0.8, longest=14):
    """Draw `count` names; returns those that are familiar and new, once each."""
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(0)
    text = torch.full((count, WIDTH), ALPHABET.index("*"))
    with torch.no_grad():
        for _ in range(longest):
            scores = model(text[:, -WIDTH:].to(device)).cpu() / temperature
            scores[:, ALPHABET.index("*")] = -torch.inf  # padding is not a letter
            drawn = torch.multinomial(scores.softmax(1), 1, generator=generator)
            text = torch.cat([text, drawn], dim=1)
    drawn = ["".join(ALPHABET[code] for code in row[WIDTH:]) for row in text]
    names = dict.fromkeys(name.split("+")[0] for name in drawn if "+" in name)
    return [name for name in names if is_familiar(name) and name not in registered]


# %% [markdown]
# ## 5. Predict
#
# In section 9 two ranks train for 200 steps. A checkpoint is written after every 50
# steps. **Rank 1 is killed after step 170.** Then both ranks start again from the
# newest checkpoint and train to the end. Compare their final weights with those of a
# run that nobody disturbed. They are
#
# - `"same"`: equal to the last bit;
# - `"close"`: equal up to rounding, since the sums are done in another order;
# - `"different"`: the lost steps are trained again with other batches.
#
# **Write your prediction before you go on**, and one sentence why.

# %% tags=["lesson"]
my_prediction = None  # "same", "close" or "different"

# %% [markdown]
# ## 6. What changes, line by line
#
# Compared with the loop of section 4, these lines are new. (A *global batch* is what
# all ranks together take in one step.)
#
# | line | why |
# |---|---|
# | `device = ddp.device()` | the GPU of this rank, else the CPU |
# | `sampler = ddp.ElasticSampler(...)` | deals each global batch out to the ranks |
# | `sampler.epochs(...)` | not `range`: it tells the sampler the epoch |
# | `sampler.batches()` | this rank's windows, batch by batch |
# | `model = DDP(...)` | averages the gradients over the ranks |
# | `* sampler.weight` | a rank with fewer windows in the last batch counts less |
# | `schedule = ...`, `schedule.step()` | changes the learning rate: up, then down |
# | `ddp.Checkpoint(...)`, `restore()`, `save()` | a run can stop and go on |
# | `ddp.report(...)`, `ddp.save_file(...)` | a number, a file for the client |
# | `return model.module.state_dict()` | the weights without DDP's wrapper |
#
# Two lines that a script for torchrun needs are missing here. `launch` has called
# `init_process_group` before `train` begins. And `sampler.epochs` does what
# `sampler.set_epoch(epoch)` does for PyTorch's own `DistributedSampler`.
#
# **The checkpoint.** Weights are not enough to resume exactly. Adam has its means. The
# *schedule* counts the steps. The sampler counts the batches. So `ddp.Checkpoint` gets
# all four. Rank 0 writes the file, since the weights are the same on all ranks. All
# ranks read it. `checkpoint.save()` saves after each epoch. With `every_steps=50` the
# sampler also saves in between, between two steps.
#
# **The sampler** draws the order of an epoch from (seed, epoch) alone. After a restart
# the same windows come in the same order.
#
# **Reports.** No rank waits for the client: a report is sent in the background. After
# each epoch rank 0 also invents names and sends them as a file.


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
    sampler = ddp.ElasticSampler(len(contexts), batch_size, seed=seed)
    model = DDP(NameModel(layers, hidden).to(device))
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    steps = epochs * len(sampler)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: warm_up_and_decay(step / steps)
    )
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
    checkpoint = ddp.Checkpoint(**parts, sampler=sampler, every_steps=50)
    checkpoint.restore()  # nothing to restore on a first attempt
    for epoch in sampler.epochs(epochs):
        for rows in sampler.batches():  # numbers of this rank's windows in the batch
            context = contexts[rows].long().to(device)
            target = targets[rows].long().to(device)
            loss = F.cross_entropy(model(context), target) * sampler.weight
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            ddp.report(loss=loss)
        checkpoint.save()
        if ddp.rank() == 0:
            ddp.save_file("names.txt", "\n".join(invent(model.module)) + "\n")
    return model.module.state_dict()


# %% [markdown]
# ## 7. Launch it, and watch
#
# `launch` sends `train` with its arguments to the workers. Each worker starts one new
# process: a *rank*. There Dask's part ends. The ranks find each other, and the
# gradients go from rank to rank. Reports and files come back to the client. Why a
# process of its own? A process can be killed. A Dask task that has begun cannot.
#
# `launch` can call a function of yours with each report, a dict: `on_report`. A live
# plot needs no more. `LiveLoss`, in `tutorials/helpers.py`, draws the loss of rank 0.

# %%
words = "epochs batch_size learning_rate layers hidden seed"
hyperparameters = {name: getattr(settings, name) for name in words.split()}
watch = None  # what to call with each report

# %% tags=["lesson"]
watch = LiveLoss("loss (nats per character)")

# %% [markdown]
# *Before you run the next cell*, open the dashboard's address in another tab, and there
# the page *Info*. Then run it, and look at four things. If the run ends before you have
# seen all, run the cell again.
#
# 1. **The plot above** grows.
# 2. **The progress line** below shows epoch, loss, and windows per second of all ranks.
# 3. **The run directory** keeps what the run leaves: log, reports, checkpoints, files.
#    It is the newest folder in `runs/pets`. Read two of its files in a terminal, in the
#    folder of the repository. The log says which process is which rank. The names are
#    new after each epoch:
#
#        cat runs/pets/$(ls runs/pets | tail -1)/log.txt
#        cat runs/pets/$(ls runs/pets | tail -1)/names.txt
#
# 4. **The dashboard.** Each worker shows one task that is *processing*: it looks after
#    its rank.

# %%
run = ddp.launch(
    client,
    train,
    **kit.launch_options(),
    contexts=contexts,
    targets=targets,
    on_report=watch,
    **hyperparameters,
)
if watch:
    watch.draw()

# %% [markdown]
# Each report of each rank is a row of `run.metrics` and a line of `metrics.jsonl`. The
# curve of all ranks together goes into the run directory as a picture.

# %%
figure = curve(run.metrics, label="loss (nats per character)")
run.save_figure(figure, "loss.png")
plt.close(figure)

# %% tags=["lesson"]
print(f"{len(run.metrics):,} reports with the columns", *run.metrics.columns)
print("run directory:", *sorted(path.name for path in run.directory.iterdir()))

# %% [markdown]
# `run.result` is what rank 0 has returned: the final weights. They load into the plain
# model. Now, once, the held-out names: compare the loss with that of a blind guess. A
# smaller one says that the model has learned *something* about names.

# %% tags=["nbval-ignore-output"]
model = NameModel(settings.layers, settings.hidden)
model.load_state_dict(run.result)
print("Invented:", ", ".join(invent(model)[:20]) or "none that is familiar yet")
with torch.no_grad():
    scores = model(held_out_contexts.long())
loss = F.cross_entropy(scores, held_out_targets.long())
blind = f"a blind guess: {math.log(len(ALPHABET)):.2f}"
print(f"LSTM {loss:.3f} nats per held-out character ({blind})")

# %% [markdown]
# ## 8. What is in a checkpoint?
#
# It is one file that `torch.save` has written. `weights_only=True` loads tensors and
# plain values, and executes no code: a checkpoint may come from a stranger. Its last
# part, `written_by`, describes the others: what another model wrote is not loaded.

# %% tags=["lesson"]
newest = max((run.directory / "checkpoints").glob("step-*.pt"))
saved = torch.load(newest, map_location="cpu", weights_only=True)
print("the file of", newest.name.split(".")[0], "holds", ", ".join(saved))
for name, weights in saved["model"].items():
    print(f"  model      {name:18} {tuple(weights.shape)}")
print("  optimizer  for each weight", ", ".join(saved["optimizer"]["state"][0]))
print("  schedule   steps", saved["schedule"]["last_epoch"])
position = [f"{name} {saved['sampler'][name]}" for name in ("seed", "epoch", "step")]
print("  sampler   ", ", ".join(position))

# %% [markdown]
# The next cell loads it in one process, without Dask and without DDP. The names of the
# weights are those of `NameModel`: `ddp.Checkpoint` saves `model.module`, not the
# wrapper. (Exercise B shows what happens otherwise.)

# %% tags=["proof"]
alone = NameModel(settings.layers, settings.hidden)
alone.load_state_dict(saved["model"])
for name, weights in alone.state_dict().items():
    assert torch.equal(weights, run.result[name]), f"{name} differs"
print(
    "the checkpoint of", client.ranks, "ranks loads into a plain model in one process"
)

# %% [markdown]
# ## 9. Kill it, and resume
#
# First an undisturbed run. Then the same run again, and after step 170 rank 1 gets
# *SIGKILL*, the signal that ends a process at once. `ddp.inject` puts this fault into
# the training function. The run fails, and `launch` ends rank 0, which would only wait.
# A second launch *in the same directory* finds the newest checkpoint and goes on. (The
# *last known step* may be smaller than 170: reports travel in the background, and the
# last ones can die with the rank.)
#
# Read the log from top to bottom: which process was killed? From which step did the
# ranks go on?

# %% tags=["lesson", "nbval-ignore-output"]
small = {
    "contexts": contexts[:10_000],
    "targets": targets[:10_000],
    "epochs": 2,
    "batch_size": 100,  # 100 steps in an epoch
    "learning_rate": 5e-3,
    "layers": 1,
    "hidden": 32,
    "seed": 0,
}
undisturbed = ddp.launch(client, train, **small, workers=2, directory=False)

hurt = run.directory / f"killed-{time.time():.0f}"
dies = ddp.inject(train, "kill", rank=1, step=170)
try:
    ddp.launch(client, dies, **small, workers=2, directory=hurt)
except ddp.RankFailed as failure:
    print(failure)
resumed = ddp.launch(client, train, **small, workers=2, directory=hurt)
print()
print((hurt / "log.txt").read_text())

# %% tags=["proof"]
assert set(undisturbed.result) == set(resumed.result)
for name, weights in undisturbed.result.items():
    assert torch.equal(weights, resumed.result[name]), f"{name} differs"
print("the killed run ends with the weights of the undisturbed one, bit for bit")
if my_prediction is None:
    print("you have made no prediction; the ranks say 'same'")
else:
    verdict = "right" if my_prediction == "same" else "not right: the ranks say 'same'"
    print(f"your prediction was {my_prediction!r}: {verdict}")

# %% [markdown]
# The lost steps are done again with the same batches, the same state of Adam and the
# same learning rate. The sums come in the same order, too, as long as the number of
# ranks and the kind of processor stay the same. Otherwise expect `"close"`. On GPUs,
# too, expect `"close"`: some functions add in another order each time.
#
# "Often because memory ran out" is a guess: the system tells the signal, not the
# sender. `launch(..., restarts=1)` and `make run … RESTARTS=1` resume once by
# themselves.
#
# ### Resume on another number of ranks
#
# Begin on two ranks, kill one, and resume on three. Is it still the same training? We
# compare with one rank that trains undisturbed. 1,003 windows in global batches of 256:
# the last batch of an epoch, in steps 4 and 8, has 235. Neither two nor three ranks can
# share them equally. Each rank multiplies its mean loss by `sampler.weight`, so each
# window counts equally. The checkpoint is that of step 4, the end of the first epoch.
#
# Three ranks need a third worker. A Dask cluster grows while it runs:

# %% tags=["lesson"]
if client.cluster is not None and len(client.workers()) < 3:
    client.cluster.scale(3)
client.wait_for_workers(3, timeout=60)
ragged = {**small, "batch_size": 256}
ragged.update(contexts=contexts[:1_003], targets=targets[:1_003])
one = ddp.launch(client, train, **ragged, workers=1, directory=False)

changed = hurt.with_name(f"{hurt.name}-ranks")
dies = ddp.inject(train, "kill", rank=1, step=6)
try:
    ddp.launch(client, dies, **ragged, workers=2, directory=changed)
except ddp.RankFailed:
    print("two ranks: killed after step 6")
with redirect_stdout(io.StringIO()):  # the log says the same
    three = ddp.launch(client, train, **ragged, workers=3, directory=changed)

# %% tags=["proof"]
log = (changed / "log.txt").read_text()
resumed_from = re.findall(r"Resumed from step-0*(\d+)", log)
assert resumed_from == ["4"]
print("three ranks: resumed from step", *resumed_from)
# Steps 5 and 6 were done twice. The reports of the killed ranks come first.
reports = {
    "1 rank": one.metrics,
    "2 ranks, then 3": three.metrics.drop_duplicates(["rank", "step"], keep="last"),
}
losses = pd.DataFrame(
    {name: of.groupby("step")["loss"].mean() for name, of in reports.items()}
)
last = losses.loc[5:]  # the steps of the three ranks
print(last.round(3).to_string())
assert last.shape == (4, 2)
difference = (last["2 ranks, then 3"] / last["1 rank"] - 1).abs().max()
assert difference < 1e-6, difference
print("after the resume equal to one part in a million, in each step")

# %% [markdown]
# ## 10. Exercises
#
# A check runs your function. It prints `right`, or `not yet` with a question.
#
# ### Exercise A · Stop it, hurt it, resume it by hand (16 minutes)
#
# You need two terminals, both in the folder of the repository. `make run` trains there
# as section 7 did, and keeps a run directory.
#
# 1. In the first terminal, start a small model:
#
#        make run TUTORIAL=pets WORKERS=2 SET="epochs=100 hidden=16 batch_size=2048"
#
#    It trains for about a minute. If it has finished before you act, begin again with
#    more epochs.
# 2. After the first epoch press **Ctrl-C**. Read what it prints.
# 3. **Resume** with the command that it printed.
# 4. In the *second* terminal, read the log. **Kill the process of rank 1.** What does
#    the first terminal say?
#
#        cat runs/pets/$(ls runs/pets | tail -1)/log.txt
#        kill -9 NUMBER
#
# 5. **Resume** again. Let the run finish.
#
# Then return the run directory as `make run` printed it, `"runs/pets/…"`. The check
# reads its log. Then it trains the same model once more, undisturbed: about a minute.
# Do your weights agree?
#
# <details><summary>Hint</summary>
#
# After a resume each rank has a new process number. Take the newest one in the log.
# And `kill` without `-9` only *asks* a process to end: both ranks would save and leave.
# </details>


# %% tags=["exercise", "solution"]
def my_run():
    """The directory of the run that you stopped, hurt and resumed, as a str."""
    # your code
    import os
    import signal
    import subprocess
    import sys
    import tempfile
    from pathlib import Path

    folder = Path(tempfile.mkdtemp()) / "by-hand"

    def start(*choices):
        command = [sys.executable, "-m", "ddp_common", "run", "pets", "--workers", "2"]
        return subprocess.Popen(
            [*command, *choices],
            env={**os.environ, "MPLBACKEND": "agg", "SET": ""},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def wait_for(pattern):
        found = []
        while not found:
            time.sleep(0.05)
            if (folder / "log.txt").exists():
                found = re.findall(pattern, (folder / "log.txt").read_text())
        return found[-1]

    # --restarts 1: after the kill the ranks resume by themselves, which saves a start
    sizes = "epochs=4 hidden=16 batch_size=4096"
    first = start("--checkpoint", str(folder), "--restarts", "1", "--set", sizes)
    while not list(folder.glob("checkpoints/*.pt")):
        time.sleep(0.05)
    os.kill(int(wait_for(r"rank 1 started: process (\d+)")), signal.SIGKILL)
    wait_for("Resumed from step")
    os.killpg(first.pid, signal.SIGINT)  # Ctrl-C
    first.wait()
    start("--resume", str(folder)).wait()
    return str(folder)
    # end of your code


# %% tags=["exercise"]
judge(checks.resumed_by_hand, my_run, timeout=480)

# %% [markdown]
# ### Exercise B · A script that runs and is wrong (8 minutes)
#
# This script is for torchrun. It ends without an error, and has **two faults**. The
# cell below it runs it on two ranks. Read what the ranks saw in each epoch, and what
# somebody gets who loads `model.pt`.


# %% tags=["exercise"]
def broken_script():
    return """
import sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

samples, seed = int(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(seed)
data = TensorDataset(torch.arange(samples))
sampler = DistributedSampler(data, seed=seed)
loader = DataLoader(data, batch_size=4, sampler=sampler)
model = DDP(torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    seen = []
    for (batch,) in loader:
        seen += batch.tolist()
        optimizer.zero_grad()
        model(batch[:, None] / samples).square().mean().backward()
        optimizer.step()
    print("epoch", epoch, "rank", rank, "saw", *seen)
print("rank", rank, "ends with", *(weight.item() for weight in model.parameters()))
if rank == 0:
    torch.save(model.state_dict(), "model.pt")
dist.destroy_process_group()
"""


# %% tags=["exercise"]
shown = run_script(broken_script(), "12", "0")
for line in sorted(shown.output.splitlines()):
    print(re.sub(r"(\.\d{3})\d+", r"\1", line))  # three decimals are enough
try:
    weights = torch.load(shown.folder / "model.pt", weights_only=True)
    nn.Linear(1, 1).load_state_dict(weights)
except RuntimeError as error:
    print(error)

# %% [markdown]
# Return two things: the letters of the two faults, and the repaired script as text.
# (`broken_script().replace(old, new)` is enough, or paste the whole script.) Keep the
# lines that print: the check reads them.
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
# <details><summary>Hint</summary>
#
# What does `help(torch.utils.data.DistributedSampler.set_epoch)` say? And where does a
# DDP model keep the model that you gave it?
# </details>


# %% tags=["exercise", "solution"]
def my_repair():
    """(the letters of the two faults, the repaired script as a str)."""
    # your code
    loop, save = "for epoch in range(3):\n", "model.state_dict()"
    repaired = broken_script().replace(loop, loop + "    sampler.set_epoch(epoch)\n")
    return {"B", "E"}, repaired.replace(save, "model.module.state_dict()")
    # end of your code


# %% tags=["exercise"]
judge(checks.script_repaired, my_repair)

# %% [markdown]
# ## 11. Break it: a rank falls silent
#
# A process that dies is easy to notice: the system says that it has ended. What if a
# rank lives and does nothing? The other rank waits in `all_reduce`, until PyTorch's
# time-out. `launch` waits for `stall_timeout` seconds without progress. Then it asks
# each rank where it is:

# %% tags=["lesson"]
print("PyTorch's time-out with gloo:", dist.constants.default_pg_timeout)
silent = ddp.inject(train, "hang", rank=1, step=10)
try:
    ddp.launch(client, silent, **small, workers=2, directory=False, stall_timeout=5)
except ddp.RankStalled as failure:
    stalled = failure
print(str(stalled).splitlines()[0].replace(stalled.host, "HOST"))
for rank, stack in stalled.stacks.items():
    print(f"rank {rank} is in {stack.splitlines()[0].split()[-1]}")

# %% [markdown]
# Read the message. Which rank is to blame? Not rank 0: inside `backward()` it waits for
# the averaging. Rank 1 never came there. (`wait` is the function in which our fault
# sleeps.) The page `docs/faults.md` shows what other faults look like.

# %% [markdown]
# ## 12. Recap
#
# **How do I run, watch, stop and resume a training on Dask?**
#
# - *Run*: `launch` starts one rank on each worker. Dask carries the function, its
#   arguments and the reports. Gradients go from rank to rank.
# - *Watch*: the progress line, `on_report`, and the run directory with its `log.txt`.
# - *Stop*: Ctrl-C. If a rank fails, the message says which.
# - *Resume*: launch again in the same directory, or `RESUME=`. A checkpoint that holds
#   model, optimizer, schedule and sampler gives the same weights, bit for bit, on the
#   same number of ranks. On another number the loss is equal up to rounding.
#
# **Next:** `ucmerced`: through the queue of a batch system, and an honest accuracy.
#
# **Read.** [Saving and loading][1] in PyTorch, and its notes on [reproducibility][2].
# [DistributedSampler][3] and `set_epoch`. Dask's [dashboard][4].
#
# [1]: https://docs.pytorch.org/tutorials/beginner/saving_loading_models.html
# [2]: https://docs.pytorch.org/docs/stable/notes/randomness.html
# [3]: https://docs.pytorch.org/docs/stable/data.html
# [4]: https://docs.dask.org/en/stable/dashboard.html

# %%
client.close()
