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
# **You need** the tutorial `mnist`. From it we take *rank*, *collective*, *DDP* and
# *global batch*. No GPU, no network. **Data:** names of pets in Seattle, shipped with
# the repository.
#
# **Time:** 75 to 100 minutes in class, 25 or more for two exercises.

# %% [markdown]
# ## 2. Set-up

# %%
import io
import math
import string
import time
from contextlib import redirect_stdout, suppress
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
from tutorials import helpers, kit
from tutorials.checks import pets as checks
from tutorials.checks.common import judge, prediction

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
# *workers*. `connect()` starts two to four workers, each a process of its own. The last
# line shows the address of Dask's *dashboard*, a web page about the cluster.

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
# of Seattle (set jguv-t9rb), without owners. A tenth of the *distinct* names is held
# out: the model never trains on them.

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
# lets only few names pass, made of familiar parts. No rule finds all bad words.

# %%
is_tame = helpers.name_filter(table["name"])


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
# is killed after step 90.** Both ranks start again from the newest checkpoint and train
# to the end. Compared with an undisturbed run, their final weights are
#
# - `"same"`: equal to the last bit;
# - `"close"`: equal up to rounding, since sums are done in another order;
# - `"different"`: the lost steps are trained again with other batches.
#
# **Write your prediction before you go on**, and one sentence why.

# %% tags=["lesson"]
my_prediction = None  # "same", "close" or "different"

# %% [markdown]
# ## 6. What changes, line by line
#
# | line | why |
# |---|---|
# | `ddp.device()` | the GPU of this rank, by `set_device`; else the CPU |
# | `ddp.ElasticSampler(...)` | deals each global batch out to the ranks |
# | `sampler.epochs(...)`, `.batches()` | this rank's windows, epoch by epoch |
# | `DDP(...)` | averages the gradients over the ranks |
# | `* sampler.weight` | a rank with fewer windows in a batch counts less |
# | `schedule` | changes the learning rate: up, then down |
# | `ddp.Checkpoint(...)` | a run can stop and go on |
# | `ddp.report(...)`, `ddp.save_file(...)` | a number, a file for the client |
#
# Some lines of a torchrun script are not needed here. `launch` calls
# `init_process_group` and `destroy_process_group`. `sampler.epochs` replaces
# `set_epoch`.
#
# **The checkpoint.** Weights are not enough to resume exactly. Adam has its means. The
# schedule counts the steps, the sampler the batches. So `ddp.Checkpoint` gets all four.
# Rank 0 alone writes, all ranks read.
#
# `checkpoint.step()` says that a batch is done. Before the next batch, `every_steps=25`
# saves after every 25 such calls. Training waits while rank 0 copies
# the state; then a thread writes the file. A killed run loses the steps after the
# newest complete file: up to 25, and those made while the next file was written.
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
            checkpoint.step()  # what this batch was for is done
            schedule.step()
            ddp.report(loss=loss)
        if ddp.rank() == 0:
            ddp.save_file("names.txt", "\n".join(invent(model.module)) + "\n")
        checkpoint.save()
    return model.module.state_dict()


words = "epochs batch_size learning_rate layers hidden seed"
hyperparameters = {name: getattr(settings, name) for name in words.split()}
watch = None  # what to call with each report

# %% [markdown]
# **A small question.** Which lines does even a single rank need, to survive a kill?
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
# through Dask. Gradients go from rank to rank. Why a process of its own? A process can
# be killed, a running Dask task cannot.
#
# With each report, `launch` calls a function of yours, `on_report`. Here it draws the
# loss of rank 0.

# %% tags=["lesson"]
watch = helpers.LiveLoss("loss (nats per character)")

# %% [markdown]
# *First* open the dashboard's address in another tab, and its page *Info*. Open a
# terminal (*File*, *New*, *Terminal*), and go to the folder of the repository:
#
#     cd "$JUPYTER_SERVER_ROOT/.."
#
# Then run the cell. For more time, begin it with `hyperparameters["epochs"] = 20`.
#
# 1. **The plot above** grows.
# 2. **The progress line** shows epoch, loss, and windows per second of all ranks.
# 3. **The run directory** is the newest folder in `runs/pets`. Which process is which
#    rank? Which names did the last epoch invent?
#
#        cat runs/pets/$(ls runs/pets | tail -1)/*.txt
#
# 4. **The dashboard.** Each worker is *processing* a task: to look after its rank.

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
figure = helpers.curve(run.metrics, label="loss (nats per character)")
run.save_figure(figure, "loss.png")  # of all ranks together, into the run directory
plt.close(figure)

# %% [markdown]
# ### Is it any good?
#
# A fair opponent is a good simple rule. An *n-gram* counts which character follows the
# last n − 1 characters. If these were rare, it uses fewer. All are judged by the names
# that were held out.

# %% tags=["lesson"]
for n in (3, 5):
    counted = helpers.n_gram(training_names, held_out, n, prior=10)
    print(f"{n}-gram {counted:.3f} nats per held-out character")

# %% [markdown]
# `run.result` is what rank 0 returned: weights that load into the plain model.

# %% tags=["nbval-ignore-output"]
model = NameModel(settings.layers, settings.hidden)
model.load_state_dict(run.result)
invented = invent(model, count=1_500)[:10]
print(f"{len(invented)} invented names:", ", ".join(invented) or "none is familiar yet")
with torch.no_grad():
    loss = surprise(model, encode(held_out)[None])
blind = f"a blind guess: {math.log(len(ALPHABET)):.2f}"
print(f"LSTM {loss:.3f} nats per held-out character ({blind})")

# %% [markdown]
# **The LSTM is better than the 3-gram, and about as good as the 5-gram**, which only
# counts. So by this score the network is not worth its trouble. Here it is a training
# to run, watch, stop and resume. (We chose learning rate and `prior` on these held-out
# names, so both look slightly too good.)

# %% [markdown]
# ## 8. What is in a checkpoint?
#
# A file that `torch.save` has written. `weights_only=True` loads tensors and plain
# values, and refuses to execute code. That protection has had holes, such as
# [CVE-2025-32434][cve]. Keep PyTorch up to date, and load no files of strangers.
# `written_by` describes the other parts, so that another model's checkpoint is refused.
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
# The next cell loads it without Dask and DDP: `ddp.Checkpoint` saves `model.module`,
# not the wrapper.

# %% tags=["proof"]
alone = NameModel(settings.layers, settings.hidden)
alone.load_state_dict(saved["model"])
loaded = nn.utils.parameters_to_vector(alone.state_dict().values())
returned = nn.utils.parameters_to_vector(run.result.values())
differ = int((loaded != returned).sum())
print(f"{len(loaded):,} weights loaded; {differ} differ from those of the ranks")
assert differ == 0

# %% [markdown]
# **A small question.** Which parts do you need, if you only want to *use* the model?
#
# <details><summary>Answer</summary>
#
# Only `model`.
# </details>

# %% [markdown]
# ## 9. Kill it, and resume
#
# First an undisturbed run. Then the same again, and after step 90 rank 1 gets
# *SIGKILL*, the signal that ends a process at once. `ddp.inject` puts this fault into
# `train`. The run fails: rank 0 loses the connection to it. A second launch *in the
# same directory* finds the newest checkpoint and goes on.
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
start = helpers.resumed_from(hurt)  # the step of the checkpoint, as the log says
figure = helpers.loss_twice(undisturbed.metrics, resumed.metrics, start, first=60)
helpers.show(figure, "The loss. Killed and resumed run lie on the undisturbed one.")

# %% tags=["proof"]
assert list(undisturbed.result) == list(resumed.result)
expected = nn.utils.parameters_to_vector(undisturbed.result.values())
reached = nn.utils.parameters_to_vector(resumed.result.values())
differ = int((expected != reached).sum())
print(f"of {len(expected):,} final weights, {differ} differ from the undisturbed run's")
assert differ == 0
print(prediction(my_prediction))

# %% [markdown]
# The lost steps are done again with the same batches, the same state of Adam and the
# same learning rate. The sums come in the same order, too, as long as the number of
# ranks and the kind of processor stay the same. Otherwise expect `"close"`; on GPUs
# too, because some GPU functions add in a different order each time.
#
# The last reports can die with the rank, so the *last known step* may be below 90.
# 'Often because memory ran out' is a guess: the system does not say who sent a signal.
#
# ### Resume on another number of ranks
#
# Begin on two ranks, kill one, and resume on three. We compare with one undisturbed
# rank. A global batch has 256 windows, but an epoch's last one has 235. Three ranks get
# unequal shares. So each multiplies its mean loss by `sampler.weight`, and each window
# counts equally. A Dask cluster grows while it runs:

# %% tags=["proof"]
if client.cluster is not None and len(client.workers()) < 3:
    client.cluster.scale(3)
client.wait_for_workers(3, timeout=60)
ragged = {**small, "windows": windows[:1_003], "batch_size": 256}
one = ddp.launch(client, train, **ragged, workers=1, directory=False)

changed = hurt.with_name(f"{hurt.name}-ranks")
dies = ddp.inject(train, "kill", rank=1, step=6)
with suppress(ddp.RankFailed):
    ddp.launch(client, dies, **ragged, workers=2, directory=changed)
with redirect_stdout(io.StringIO()):  # the log says the same
    three = ddp.launch(client, train, **ragged, workers=3, directory=changed)
start = helpers.resumed_from(changed)
print("three ranks: resumed from step", start)
# The steps after it were done twice. The reports of the killed ranks come first.
reports = {
    "1 rank": one.metrics,
    "2 ranks, then 3": three.metrics.drop_duplicates(["rank", "step"], keep="last"),
}
losses = pd.DataFrame(
    {name: of.groupby("step")["loss"].mean() for name, of in reports.items()}
)
last = losses.loc[start + 1 :]  # the steps of the three ranks
print(last.round(3).to_string())
difference = (last["2 ranks, then 3"] / last["1 rank"] - 1).abs().max()
print(f"largest relative difference of a loss: {difference:.5f}")
assert len(last) >= 4 and difference < 1e-6

# %% [markdown]
# ## 10. Exercises
#
# ### Exercise A · Stop it, hurt it, resume it by hand (16 minutes)
#
# `make run` trains as section 7 did. Open two terminals. In both, type
# `cd "$JUPYTER_SERVER_ROOT/.."`.
#
# 1. In the first terminal, start a small model:
#
#        make run TUTORIAL=pets WORKERS=2 SET="epochs=200 hidden=16 batch_size=128"
#
#    If it ends before you act, begin again with more epochs.
# 2. After the first epoch press **Ctrl-C**.
# 3. **Resume** with the command that it prints.
# 4. In the *second* terminal, read the log. **Kill the process of rank 1.** What does
#    the first terminal say?
#
#        cat runs/pets/$(ls runs/pets | tail -1)/log.txt
#        kill -9 NUMBER
#
# 5. **Resume** again. Let the run finish.
#
# Then return the run directory as `make run` printed it, `"runs/pets/…"`. The check
# reads its log, trains the same model undisturbed, and compares the weights.
#
# <details><summary>Hint</summary>
#
# After a resume each rank has a new process number. Take the newest in the log.
# `kill` without `-9` only *asks* a process to end: both ranks would save and leave.
# </details>


# %% tags=["exercise", "solution"]
def my_run():
    """The directory of the run that you stopped, hurt and resumed, as a str."""
    # your code
    # Here a program does in the notebook what you do by hand with `make run`.
    import tempfile
    from pathlib import Path

    folder = Path(tempfile.mkdtemp()) / "by-hand"
    sizes = {**hyperparameters, "epochs": 3, "hidden": 16, "batch_size": 128}
    options = {"windows": windows, "workers": 2, "directory": folder, **sizes}
    options["run_config"] = {"settings": {**vars(settings), **sizes}}

    def press_ctrl_c(record):
        if record["step"] == 55:
            raise KeyboardInterrupt

    waits = ddp.inject(train, "hang", rank=1, step=60)  # for Ctrl-C
    dies = ddp.inject(train, "kill", rank=1, step=120)
    for function, act in ((waits, press_ctrl_c), (dies, None), (train, None)):
        stops = KeyboardInterrupt, ddp.RankFailed
        with redirect_stdout(io.StringIO()), suppress(*stops):
            ddp.launch(client, function, on_report=act, **options)
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
# ### Exercise B · A training that runs and is wrong (9 minutes)
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
# Rank 1 never came there. (`wait` is where our fault sleeps.) `docs/faults.md` shows
# what other faults look like.

# %% [markdown]
# ## 12. Recap
#
# - *Run*: `launch` starts a rank on each worker. Dask carries everything except the
#   gradients.
# - *Watch*: progress line, `on_report`, run directory with `log.txt`.
# - *Stop*: Ctrl-C ends the ranks at once. `kill` without `-9` lets them save first.
# - *Resume*: launch in the same directory, or `RESUME=`. `restarts=1` resumes once,
#   automatically. Here the weights were the same, bit for bit. On another number of
#   ranks, the losses were the same up to rounding.
#
# **Next:** `ucmerced`, a job in a queue.
#
# **Read.** PyTorch on [saving][1] and [reproducibility][2]; Dask's [dashboard][3].
#
# [1]: https://docs.pytorch.org/tutorials/beginner/saving_loading_models.html
# [2]: https://docs.pytorch.org/docs/stable/notes/randomness.html
# [3]: https://docs.dask.org/en/stable/dashboard.html

# %%
client.close()
