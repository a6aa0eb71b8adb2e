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
# - launch a training on the workers of a Dask cluster, and watch it;
# - load a checkpoint without Dask and without DDP;
# - stop a run, kill one of its ranks, and resume it;
# - find two faults in a training that ends without an error.
#
# **You need** the tutorial `mnist`. From it we take *rank*, *collective* and *DDP*. No
# GPU, no network. **Data:** names of pets in Seattle, shipped with the repository.
#
# **Time:** 80 minutes in class, 26 of them for two exercises.

# %% [markdown]
# ## 2. Set-up

# %%
import io
import math
import re
import string
import time
from contextlib import redirect_stdout
from functools import partial

import matplotlib.pyplot as plt
import pandas as pd
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

import ddp_common as ddp
from tutorials import kit
from tutorials.checks import pets as checks
from tutorials.checks.common import judge
from tutorials.helpers import LiveLoss, curve, loss_twice, n_gram, name_filter, show

# %% tags=["parameters"]
settings = kit.settings(
    "pets",
    data="shipped",  # or "full" after `make data TUTORIAL=pets`, or your own names.csv
    repeat=False,  # True: a name counts as often as it was registered
    epochs=4,
    batch_size=64,  # of all ranks together
    learning_rate=4e-2,
    layers=1,
    hidden=112,
    seed=0,
    presets={
        "full": {  # the original's sizes; it had dropout, and a tenth of the rate
            "repeat": True,
            "epochs": 25,
            "batch_size": 3 * 1_024,
            "layers": 4,
            "learning_rate": 1e-2,
        }
    },
    limits={"layers": (1, 100)},
)

# %% [markdown]
# Dask runs Python functions in other processes, on this machine or on many. Your
# notebook is the *client*. It sends functions to a *scheduler*, which passes them on to
# *workers*. `connect()` starts two to four workers, each a process of its own. It
# shows the address of Dask's *dashboard*, a web page about the cluster.

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
# of Seattle (set jguv-t9rb). It says nothing about owners. A tenth of the *distinct*
# names is held out: the model never trains on them.

# %%
ALPHABET = "+" + string.ascii_lowercase + "-. "  # '+' stands between two names
WIDTH = 16  # characters in a window


def read_names(path):
    """The table of names: columns name (str) and count (int).

    Raises ddp.Error for an empty table or a foreign character.
    """
    table = pd.read_csv(path, keep_default_na=False)  # a cat may be called Nan
    if table.empty or list(table.columns) != ["name", "count"]:
        needs = "It needs the columns name and count, and at least one row."
        raise ddp.Error(f"{path} holds no names. {needs}")
    for name in table["name"]:
        if foreign := set(name) - set(ALPHABET[1:]):
            what = f"The name {name!r} has {foreign.pop()!r}, "
            why = f"which is not in the alphabet {ALPHABET[1:]!r}. Tidy the list first."
            raise ddp.Error(what + why)
    return table


table = read_names(dataset.path)
training_rows, held_out_rows = ddp.split(len(table), [0.1], seed=settings.seed)
learned, held_out = table.iloc[training_rows], table.iloc[held_out_rows]["name"]
training_names = learned["name"].repeat(learned["count"] if settings.repeat else 1)
numbers = f"{len(training_names):,} to learn from, {len(held_out):,} held out"
print(f"{len(table):,} distinct names; {numbers}")

# %% [markdown]
# The task: predict the next character. We write all training names in one row, in
# random order, with `+` between them, and cut the row into *windows* of 16 characters.
# In each window, each character is predicted from those before it.


# %%
def encode(names):
    """All names in one row, '+' around each: indices into ALPHABET."""
    text = "+" + "".join(name + "+" for name in names)
    codes = [ALPHABET.index(character) for character in text]
    return torch.tensor(codes, dtype=torch.uint8)  # one byte for each character


def cut(codes):
    """Windows (n, WIDTH + 1) of a row. The last of each is the first of the next."""
    return codes.unfold(0, WIDTH + 1, WIDTH)


shuffled = training_names.sample(frac=1, random_state=settings.seed)
windows = cut(encode(shuffled))
print(f"{len(windows):,} windows of {WIDTH} characters to predict")

# %% tags=["lesson"]
for window in windows[:3]:
    text = "".join(ALPHABET[code] for code in window)
    print(f"the model sees {text[:-1]!r} and predicts {text[1:]!r}")

# %% [markdown]
# ## 4. One process first
#
# An *embedding* turns each character into a vector of 16 learned numbers. An *LSTM* is
# a network with a memory: it reads these vectors one after the other. After each one, a
# linear layer gives each possible next character a score.
#
# The loss is the *cross-entropy*: how much the next character surprises the model, on
# average. Its unit is the *nat*, the unit of the natural logarithm.


# %%
class NameModel(nn.Module):
    def __init__(self, layers, hidden):
        super().__init__()
        self.embedding = nn.Embedding(len(ALPHABET), 16)
        self.lstm = nn.LSTM(16, hidden, layers, batch_first=True)
        self.head = nn.Linear(hidden, len(ALPHABET))

    def forward(self, texts):
        outputs, _ = self.lstm(self.embedding(texts))
        return self.head(outputs)  # scores (batch, length, characters)


def surprise(model, rows):
    """Nats per character: each is predicted from those before it in its row."""
    scores = model(rows[:, :-1].long())
    return F.cross_entropy(scores.flatten(0, 1), rows[:, 1:].long().flatten())


# %% [markdown]
# The plain loop, in this process, on a part of the data. The optimizer *Adam* keeps two
# running means for each weight: of its gradient, and of the gradient's square.

# %% tags=["lesson"]
torch.manual_seed(settings.seed)
model = NameModel(layers=1, hidden=64)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
losses = []
for rows in torch.randperm(1_000).split(32):
    loss = surprise(model, windows[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"first batch {losses[0]:.1f} nats per character, last {losses[-1]:.1f}")
print(f"a blind guess: ln {len(ALPHABET)} = {math.log(len(ALPHABET)):.1f}")

# %% [markdown]
# ### Invented names
#
# To invent a name, start with `+`. Draw a character from the model's probabilities,
# append it, and repeat until the next `+`. A *temperature* below 1 makes likely
# characters likelier. A model can also write words that hurt people. So `name_filter`
# lets only names of familiar parts pass. No rule finds all bad words.

# %%
is_tame = name_filter(table["name"])


def invent(model, count=600, temperature=0.8, longest=14):
    """Draw `count` names; returns those that are tame and new, once each."""
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(0)
    texts = torch.full((count, 1), ALPHABET.index("+"))
    with torch.no_grad():
        for _ in range(longest):
            scores = model(texts.to(device))[:, -1].cpu() / temperature
            drawn = torch.multinomial(scores.softmax(1), 1, generator=generator)
            texts = torch.cat([texts, drawn], dim=1)
    texts = ["".join(ALPHABET[code] for code in row[1:]) for row in texts]
    names = dict.fromkeys(text.split("+")[0] for text in texts if "+" in text)
    return [name for name in names if is_tame(name)]


# %% [markdown]
# **A small question.** The loss of the first batch is about ln 30. Why?
#
# <details><summary>Answer</summary>
#
# An untrained model gives each of the 30 characters a probability of about 1/30. Its
# surprise is −ln(1/30) = ln 30.
# </details>

# %% [markdown]
# ## 5. Predict
#
# In section 9 two ranks train for 100 steps, with a checkpoint after every 25. **Rank 1
# is killed after step 90.** Then both ranks start again from the newest checkpoint and
# train to the end. Compared with a run that nobody disturbed, their final weights are
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
# These are new. (A *global batch* is what all ranks together take in one step.)
#
# | line | why |
# |---|---|
# | `ddp.device()` | the GPU of this rank, else the CPU |
# | `ddp.ElasticSampler(...)` | deals each global batch out to the ranks |
# | `sampler.epochs(...)`, `.batches()` | this rank's windows, epoch by epoch |
# | `DDP(...)` | averages the gradients over the ranks |
# | `* sampler.weight` | a rank with fewer windows in a batch counts less |
# | `schedule` | changes the learning rate: up, then down |
# | `ddp.Checkpoint(...)` | a run can stop and go on |
# | `ddp.report(...)`, `ddp.save_file(...)` | a number, a file for the client |
# | `model.module` | the model without DDP's wrapper |
#
# Lines of a torchrun script are missing. `launch` calls `init_process_group` and
# `destroy_process_group`, and `ddp.device` calls `set_device`. `sampler.epochs`
# replaces `set_epoch`, and `checkpoint.save` needs no `if rank == 0`.
#
# **The checkpoint.** Weights are not enough to resume exactly. Adam has its means. The
# schedule counts the steps, the sampler the batches. So `ddp.Checkpoint` gets all four.
# Rank 0 writes, all ranks read. With `every_steps=25` a checkpoint is also saved
# between two steps.
#
# **The sampler** draws the order of an epoch from (seed, epoch) alone: after a restart
# the same windows come in the same order.


# %%
def warm_up_and_decay(progress):
    """The share of the learning rate to use after `progress` (0 to 1) of all steps."""
    if progress < 0.3:
        return 0.04 + 0.96 * progress / 0.3
    return (1 + math.cos(math.pi * min((progress - 0.3) / 0.7, 1))) / 2


def train(windows, epochs, batch_size, learning_rate, layers, hidden, seed):
    """Train a NameModel on this rank's share of the windows; returns its weights."""
    device = ddp.device()
    torch.manual_seed(seed)  # the same initial weights on all ranks
    sampler = ddp.ElasticSampler(len(windows), batch_size, seed=seed)
    model = DDP(NameModel(layers, hidden).to(device))
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    steps = epochs * len(sampler)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: warm_up_and_decay(step / steps)
    )
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
    checkpoint = ddp.Checkpoint(**parts, sampler=sampler, every_steps=25)
    checkpoint.restore()  # nothing to restore on a first attempt
    for epoch in sampler.epochs(epochs):
        for rows in sampler.batches():  # numbers of this rank's windows in the batch
            loss = surprise(model, windows[rows].to(device)) * sampler.weight
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            ddp.report(loss=loss)
        checkpoint.save()
        if ddp.rank() == 0:
            ddp.save_file("names.txt", "\n".join(invent(model.module)) + "\n")
    return model.module.state_dict()


words = "epochs batch_size learning_rate layers hidden seed"
hyperparameters = {name: getattr(settings, name) for name in words.split()}
watch = None  # what to call with each report

# %% [markdown]
# **A small question.** Which lines would you need even with a single rank, if the run
# is to survive a kill?
#
# <details><summary>Answer</summary>
#
# Those with `Checkpoint`, `restore` and `save`, and a sampler that knows its position.
# </details>

# %% [markdown]
# ## 7. Launch it, and watch
#
# `launch` sends `train` and its arguments to the workers, through Dask. Each worker
# starts a new process, a *rank*, and looks after it. Reports and files come back
# through Dask. Gradients do not: they go from rank to rank. Why a process of its own?
# A process can be killed. A Dask task that has begun cannot.
#
# With each report, `launch` can call a function of yours, `on_report`. Here `LiveLoss`
# draws the loss of rank 0.

# %% tags=["lesson"]
watch = LiveLoss("loss (nats per character)")

# %% [markdown]
# *First* open the dashboard's address in another tab of your browser, and its page
# *Info*. Open a terminal (in JupyterLab: *File*, *New*, *Terminal*), and go to the
# folder of the repository:
#
#     cd "$(git rev-parse --show-toplevel)"
#
# Then run the cell. For more time, begin it with `hyperparameters["epochs"] = 20`.
#
# 1. **The plot above** grows.
# 2. **The progress line** shows epoch, loss, and windows per second of all ranks.
# 3. **The run directory** is the newest folder in `runs/pets`. Which process is which
#    rank? And which names are invented after each epoch?
#
#        cat runs/pets/$(ls runs/pets | tail -1)/{log,names}.txt
#
# 4. **The dashboard.** Each worker is *processing* a task: it looks after its rank.

# %%
run = ddp.launch(
    client,
    train,
    **kit.launch_options(),
    windows=windows,
    on_report=watch,
    **hyperparameters,
)
if watch:
    watch.draw()
figure = curve(run.metrics, label="loss (nats per character)")
run.save_figure(figure, "loss.png")  # of all ranks together, into the run directory
plt.close(figure)

# %% [markdown]
# ### Is it any good?
#
# A fair opponent is a good simple rule. A *trigram* counts which character follows each
# pair of characters. An *n-gram* counts what follows the last n − 1 characters. If it
# saw these rarely, it uses fewer. All are judged by the names that were held out.

# %% tags=["lesson"]
for n in (3, 5):
    counted = n_gram(training_names, held_out, n, prior=10)
    print(f"{n}-gram {counted:.3f} nats per held-out character")

# %% [markdown]
# `run.result` is what rank 0 returned: weights that load into the plain model.

# %% tags=["nbval-ignore-output"]
model = NameModel(settings.layers, settings.hidden)
model.load_state_dict(run.result)
print("Invented:", ", ".join(invent(model)[:20]) or "none that is familiar yet")
with torch.no_grad():
    loss = surprise(model, encode(held_out)[None])
blind = f"a blind guess: {math.log(len(ALPHABET)):.2f}"
print(f"LSTM {loss:.3f} nats per held-out character ({blind})")

# %% [markdown]
# Compare it with the 3-gram, then with the 5-gram. (Learning rate and `prior` were
# chosen by tries on these held-out names, which flatters both a little.)

# %% [markdown]
# ## 8. What is in a checkpoint?
#
# A file that `torch.save` has written. `weights_only=True` loads tensors and plain
# values, and refuses to execute code. That protection has had holes, such as
# [CVE-2025-32434][cve]. Keep PyTorch up to date, and load no files of strangers. The
# part `written_by` describes the others: a checkpoint of another model is refused.
#
# [cve]: https://nvd.nist.gov/vuln/detail/CVE-2025-32434

# %% tags=["lesson"]
print("run directory:", *sorted(path.name for path in run.directory.iterdir()))
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
# The next cell loads it without Dask and without DDP. The names of the weights are
# those of `NameModel`: `ddp.Checkpoint` saves `model.module`, not the wrapper.

# %% tags=["proof"]
alone = NameModel(settings.layers, settings.hidden)
alone.load_state_dict(saved["model"])
for name, weights in alone.state_dict().items():
    assert torch.equal(weights, run.result[name]), f"{name} differs"
ranks = run.world_size
print(f"the checkpoint of {ranks} ranks loads into a plain model in one process")

# %% [markdown]
# **A small question.** Which parts do you need, if you only want to *use* the model?
#
# <details><summary>Answer</summary>
#
# Only `model`. The others are for going on with the training.
# </details>

# %% [markdown]
# ## 9. Kill it, and resume
#
# First an undisturbed run. Then the same again, and after step 90 rank 1 gets
# *SIGKILL*, the signal that ends a process at once. `ddp.inject` puts this fault into
# the training function. The run fails, and `launch` ends rank 0, which would only wait.
# A second launch *in the same directory* finds the newest checkpoint and goes on.
#
# Read the log. Which process was killed? From which step did the ranks go on? In the
# picture, the steps between the vertical lines were done twice.

# %% tags=["lesson", "nbval-ignore-output"]
small = {
    "windows": windows[:800],
    "epochs": 2,
    "batch_size": 16,  # 50 steps in an epoch
    "learning_rate": 1e-2,
    "layers": 1,
    "hidden": 32,
    "seed": settings.seed,
}
undisturbed = ddp.launch(client, train, **small, workers=2, directory=False)

hurt = run.directory / f"killed-{time.time():.0f}"
dies = ddp.inject(train, "kill", rank=1, step=90)
try:
    ddp.launch(client, dies, **small, workers=2, directory=hurt)
except ddp.RankFailed as failure:
    print(failure)
resumed = ddp.launch(client, train, **small, workers=2, directory=hurt)
print((hurt / "log.txt").read_text())
figure = loss_twice(undisturbed.metrics, resumed.metrics, saved=75, first=60)
show(figure, "The loss. Killed and resumed run lie on the undisturbed one.")

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
# ranks and the kind of processor stay the same. Otherwise expect `"close"`. Expect it
# on GPUs too, because some GPU functions add in a different order each time.
#
# The last reports can die with the rank, so the *last known step* may be below 90.
# 'Often because memory ran out' is a guess: the system tells the signal, not who sent
# it.
#
# ### Resume on another number of ranks
#
# Begin on two ranks, kill one, and resume on three. We compare with one undisturbed
# rank. A global batch has 256 windows, the last one of an epoch 235. Neither number is
# divisible by 3. So each rank multiplies its mean loss by `sampler.weight`, and
# each window counts equally. A Dask cluster grows while it runs:

# %% tags=["proof"]
if client.cluster is not None and len(client.workers()) < 3:
    client.cluster.scale(3)
client.wait_for_workers(3, timeout=60)
ragged = {**small, "windows": windows[:1_003], "batch_size": 256}
one = ddp.launch(client, train, **ragged, workers=1, directory=False)

changed = hurt.with_name(f"{hurt.name}-ranks")
dies = ddp.inject(train, "kill", rank=1, step=6)
try:
    ddp.launch(client, dies, **ragged, workers=2, directory=changed)
except ddp.RankFailed:
    print("two ranks: killed after step 6")
with redirect_stdout(io.StringIO()):  # the log says the same
    three = ddp.launch(client, train, **ragged, workers=3, directory=changed)
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
# `make run` trains as section 7 did. Open two terminals, and go to the folder of the
# repository, as in section 7.
#
# 1. In the first terminal, start a small model:
#
#        make run TUTORIAL=pets WORKERS=2 SET="epochs=200 hidden=16 batch_size=128"
#
#    If it ends before you act, begin again with more epochs.
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
# reads its log, and trains the same model once more, undisturbed. Do the weights agree?
#
# <details><summary>Hint</summary>
#
# After a resume each rank has a new process number. Take the newest one in the log.
# `kill` without `-9` only *asks* a process to end: both ranks would save and leave.
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

    from ddp_common.clusters.protection import write_credentials

    folder = Path(tempfile.mkdtemp()) / "by-hand"

    # On the notebook's workers, which saves starting others. They speak TLS.
    write_credentials(client.cluster.security, folder.parent)
    cert, key = (str(folder.parent / name) for name in ("cert.pem", "key.pem"))
    tls = {"CA_FILE": cert, "CLIENT__CERT": cert, "CLIENT__KEY": key}
    choices = {
        f"DASK_DISTRIBUTED__COMM__TLS__{name}": path for name, path in tls.items()
    }
    choices |= {
        "CLUSTER": client.scheduler.address,
        "WORKERS": "2",
        "MPLBACKEND": "agg",
    }

    def start(*words):
        return subprocess.Popen(
            [sys.executable, "-m", "tutorials", "run", "pets", *words],
            env={**os.environ, **choices, "SET": ""},
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
    sizes = "epochs=4 hidden=16 batch_size=128"
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
def train_again(chosen, ranks):
    """The weights of an undisturbed run. `chosen` is the arguments of `train`."""
    with redirect_stdout(io.StringIO()):
        return ddp.launch(
            client, train, windows=windows, **chosen, workers=ranks, directory=False
        ).result


check = partial(checks.resumed_by_hand, train_again=train_again, notebook=settings)
judge(check, my_run, timeout=480)

# %% [markdown]
# ### Exercise B · A training that runs and is wrong (10 minutes)
#
# This function uses PyTorch's own sampler. It ends without an error, and has **two
# faults**. Read which samples each rank saw, and what becomes of its weights.


# %% tags=["exercise"]
def broken(data, seed):
    torch.manual_seed(seed)
    sampler = DistributedSampler(data, seed=seed)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    model = DDP(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        for x, y in loader:
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model.state_dict()


for rank, seen in enumerate(checks.watched(client, broken, samples=12, seed=0)):
    for epoch, order in enumerate(seen.orders):
        print("epoch", epoch, "rank", rank, "saw", *order)
try:
    nn.Linear(1, 1).load_state_dict(seen.returned)
except RuntimeError as error:
    print(error)

# %% [markdown]
# Choose two, and repair only these. Each rank returns its weights.
#
# - each rank starts with other weights
# - every epoch has the same order
# - the ranks see the same samples
# - the names of the weights are those of the wrapper
# - the gradients are not averaged
#
# <details><summary>Hint</summary>
#
# What does `help(torch.utils.data.DistributedSampler.set_epoch)` say? And where does a
# DDP model keep the model that you gave it?
# </details>


# %% tags=["exercise", "solution"]
def repaired(data, seed):
    """`broken`, without its two faults."""
    # your code
    torch.manual_seed(seed)
    sampler = DistributedSampler(data, seed=seed)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    model = DDP(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model.module.state_dict()
    # end of your code


# %% tags=["exercise"]
judge(partial(checks.training_repaired, client=client), repaired)

# %% [markdown]
# ## 11. Break it: a rank falls silent
#
# If a process dies, the system says so. What if a rank lives and does nothing? The
# other rank waits in `all_reduce`, until PyTorch's time-out. `launch` waits for
# `stall_timeout` seconds without progress, then asks each rank where it is:

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
# Which rank is to blame? Not rank 0: inside `backward()` it waits for the averaging.
# Rank 1 never came there. (`wait` is the function in which our fault sleeps.) The page
# `docs/faults.md` shows what other faults look like.

# %% [markdown]
# ## 12. Recap
#
# **How do I run, watch, stop and resume a training on Dask?**
#
# - *Run*: `launch` starts one rank on each worker. Dask carries function, arguments,
#   reports and files. Gradients go from rank to rank.
# - *Watch*: progress line, `on_report`, run directory with `log.txt`.
# - *Stop*: Ctrl-C. If a rank fails, the message says which.
# - *Resume*: launch in the same directory, or `RESUME=`. `restarts=1` does so once by
#   itself. A checkpoint of model, optimizer, schedule and sampler gives the same
#   weights, bit for bit, on the same number of ranks and the same kind of processor. On
#   another number, the loss is at first the same up to rounding.
#
# **Next:** `ucmerced`: a job in a queue, and how far to trust its accuracy.
#
# **Read.** PyTorch on [saving][1] and [reproducibility][2]; Dask's [dashboard][3].
#
# [1]: https://docs.pytorch.org/tutorials/beginner/saving_loading_models.html
# [2]: https://docs.pytorch.org/docs/stable/notes/randomness.html
# [3]: https://docs.dask.org/en/stable/dashboard.html

# %%
client.close()
