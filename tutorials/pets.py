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
# - write a resume by hand, and say how often to save;
# - launch a training on the workers of a Dask cluster, and watch it;
# - stop a run, kill one of its ranks, and resume it;
# - find two faults in a training that ends without an error.
#
# **You need** the tutorial `mnist`. From it we take *rank*, *collective*, *DDP* and
# *global batch*. No GPU, no network. **Data:** names of pets in Seattle, shipped with
# the repository. **Time:** 80 to 90 minutes, of which 33 are for three exercises.

# %% [markdown]
# ## 2. Set-up

# %% tags=["context"]
import io
import math
import time
from contextlib import redirect_stdout, suppress
from functools import partial

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

import ddp_common as ddp
from tutorials import helpers, kit
from tutorials.checks import pets as checks
from tutorials.checks.common import judge

# %% tags=["parameters", "context"]
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
    presets={  # layers and epochs of its article: PRESET=original is all of it
        "full": dict(
            repeat=True, epochs=25, batch_size=3072, layers=4, learning_rate=1e-2
        )
    },
    limits={"layers": (1, 100)},
)

# %% [markdown]
# Dask runs Python functions in other processes, on this machine or on many. Your
# notebook is the *client*. It sends functions to a *scheduler*, which passes them on to
# *workers*. `connect()` starts two to four workers. The last line shows the address of
# Dask's *dashboard*, a web page about the cluster.

# %% tags=["nbval-ignore-output", "context"]
torch.set_num_threads(1)  # one core, as each rank has
client = ddp.connect()
dataset = kit.fetch("pets", settings.data)
print(f"{client.ranks} ranks · {dataset.title}: {dataset.origin}")
getattr(client, "dashboard_link", "there is no dashboard without Dask")

# %% [markdown]
# ## 3. The data
#
# The table holds names, and how often each was registered. It is open data of the City
# of Seattle (set jguv-t9rb), without owners. A tenth of the *distinct* names is held
# out: the model never trains on them.
#
# The task: predict the next character. All training names stand in one row, in random
# order, with `+` between them. We cut the row into *windows*, and predict 16 characters
# in each from those before them: `ufu+darling+doni` from `fufu+darling+don`.

# %% tags=["context"]
table = helpers.read_names(dataset.path)
training_rows, held_out_rows = ddp.split(len(table), [0.1], seed=settings.seed)
learned, held_out = table.iloc[training_rows], table.iloc[held_out_rows]["name"]
training_names = learned["name"].repeat(learned["count"] if settings.repeat else 1)
shuffled = training_names.sample(frac=1, random_state=settings.seed)
row = helpers.encode(shuffled)  # a number from 0 to 29 for each character
windows = row.unfold(0, 17, 16)  # the last of each is the first of the next
print(f"{len(learned):,} names in {len(windows):,} windows, {len(held_out):,} held out")

# %% [markdown]
# ## 4. One process first
#
# An *embedding* turns each character into a vector of 16 learned numbers. An *LSTM* is
# a network with a memory: it reads these vectors one after the other. After each one, a
# linear layer gives each possible next character a score.
#
# The loss is the *cross-entropy*: how much the next character surprises the model, on
# average. Its unit is the *nat*, the unit of the natural logarithm.


# %% tags=["context"]
class NameModel(nn.Module):
    def __init__(self, layers, hidden):
        super().__init__()
        self.embedding = nn.Embedding(30, 16)
        self.lstm = nn.LSTM(16, hidden, layers, batch_first=True)
        self.head = nn.Linear(hidden, 30)

    def forward(self, texts):
        outputs, _ = self.lstm(self.embedding(texts))
        return self.head(outputs)  # scores (batch, length, characters)


def surprise(model, rows):
    """Nats per character: each is predicted from those before it in its row."""
    scores = model(rows[:, :-1].long())
    return F.cross_entropy(scores.flatten(0, 1), rows[:, 1:].long().flatten())


# %% [markdown]
# <details><summary><b>A small question:</b> an untrained model gives each of 30
# characters the same probability. What is its loss?</summary>
#
# Its surprise is −ln(1/30) = ln 30, about 3.4 *nats* (natural logarithm).</details>
#
# ### Exercise A · Resume by hand (8 minutes)
#
# Here is the plain loop. The optimizer *Adam* keeps two running means for each weight:
# of its gradient, and of the gradient's square. The loop may be called twice, with any
# two numbers, the second not smaller. After `my_training(25, file)` and a crash,
# `my_training(40, file)` must train the steps 25 to 39 only, and reach the weights of
# one call, bit for bit. `file` is a `Path`.
#
# - Gap 1: if the file is there, load it, and go on where it was saved.
# - Gap 2: save all that gap 1 needs in `file`. `torch.save({…}, file)` writes a
#   dictionary, `torch.load(file)` reads it. Models and optimizers have `state_dict()`
#   and `load_state_dict(…)`.
#
# <details><summary>Hint</summary>
# Three things go on: the weights, the state of Adam, and the number of
# steps.</details>


# %% tags=["exercise", "solution", "minutes-8"]
def my_training(until, file):
    """Train up to step `until`. Goes on from `file`; returns the model."""
    torch.manual_seed(0)
    model = NameModel(layers=1, hidden=32)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    begin = 0
    # your code
    if file.exists():
        state = torch.load(file)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        begin = state["steps"]
    # end of your code
    for step in range(begin, until):
        loss = surprise(model, windows[16 * step : 16 * (step + 1)])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    # your code
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save({**states, "steps": until}, file)
    # end of your code
    return model


# %% tags=["exercise"]
of_lesson = {"network": NameModel, "surprise": surprise, "windows": windows}
judge(partial(checks.resumed, **of_lesson), my_training)

# %% [markdown]
# ## If you have time: how names are drawn
#
# **Run this cell in any case:** the training calls `invent`. To read it can wait.
#
# The model gives each next character a probability. So draw one, append it, and ask the
# model again, until it draws the `+` that ends a name. Divide the scores by a
# *temperature* below 1, and likely characters become likelier: section 7 compares
# three. A filter drops known names, and lets only familiar parts pass, as rude words
# are possible.

# %% tags=["context"]
alphabet = helpers.ALPHABET  # '+' is character 0
is_tame = helpers.name_filter(table["name"])  # new, and of familiar parts


def invent(model, count=50, temperature=0.8):
    """Draw names that are new: one character after the other."""
    generator = torch.Generator().manual_seed(0)
    texts = torch.zeros(1_500, 1, dtype=torch.long)  # 1,500 that begin with '+'
    for _ in range(14):
        with torch.no_grad():
            scores = model(texts.to(ddp.device()))[:, -1].cpu()
        likely = (scores / temperature).softmax(1)
        drawn = likely.multinomial(1, generator=generator)
        texts = torch.cat([texts, drawn], dim=1)
    rows = ["".join(alphabet[code] for code in text) for text in texts[:, 1:].tolist()]
    names = dict.fromkeys(row.split("+")[0] for row in rows if "+" in row)
    return [name for name in names if is_tame(name)][:count]


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
# **Write your prediction before you go on**, and why, as a comment.

# %% tags=["lesson", "minutes-2"]
my_prediction = None  # "same", "close" or "different"

# %% [markdown]
# ## 6. What changes, line by line
#
# | line | why |
# |---|---|
# | `ddp.device()` | the CPU, or this rank's GPU, by `set_device` as in your port |
# | `ddp.ElasticSampler(...)` | cuts each global batch into the ranks' shares |
# | `sampler.epochs(...)`, `.batches()` | this rank's windows, epoch by epoch |
# | `DDP(...)` | averages the gradients over the ranks |
# | `* sampler.weight` | each window of a batch counts equally: see below |
# | `schedule` | changes the learning rate: up, then down |
# | `ddp.Checkpoint(...)` | your two gaps: `restore()` loads, `save()` saves |
# | `ddp.report(...)`, `ddp.save_file(...)` | sends a number, a file to the client |
#
# `launch` calls `init_process_group` and `destroy_process_group`. `sampler.epochs`
# replaces `set_epoch`.
#
# **The weight.** Suppose that rank 0 has 300 of a batch's 512 windows: its mean loss
# should count 300/512. But DDP divides the sum over two ranks by 2. So
# `sampler.weight` is 2 · 300/512 on rank 0.
#
# <details><summary><b>A small question:</b> what is it on rank 1? And if each rank has
# 256?</summary>
#
# 2 · 212/512, about 0.83. With 256 each it is 1: nothing changes.</details>
#
# **The checkpoint** holds four states: of the weights, of Adam, of the schedule, which
# counts the steps, and of the sampler. The sampler draws the order of an epoch from
# (seed, epoch) alone, so after a restart the same windows come in the same order. Rank
# 0 alone writes, all ranks read. A file appears under its name only when it is whole.
#
# `checkpoint.step()` says that a batch is done. With `every_steps=25`, after every 25th
# call the next batch waits while rank 0 copies the state; a thread then writes the
# file. (`save()` counts anew.) A killed run loses the steps after the newest complete
# file: up to 25, and those made while the next file was written.


# %% tags=["context"]
def warm_up_and_decay(step, steps):
    """The share of the learning rate to use after `step` of all `steps`."""
    progress = step / steps
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
    share = partial(warm_up_and_decay, steps=epochs * len(sampler))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, share)
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
    checkpoint = ddp.Checkpoint(**parts, sampler=sampler, every_steps=25)
    checkpoint.restore()  # nothing to restore on a first attempt
    for epoch in sampler.epochs(epochs):
        for rows in sampler.batches():  # numbers of this rank's windows in the batch
            loss = surprise(model, windows[rows].to(device)) * sampler.weight
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            checkpoint.step()  # this batch is trained
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
# ## 7. Launch it, and watch
#
# `launch` sends `train` and its arguments to the workers, through Dask. Each worker
# starts a new process, a *rank*, and looks after it. Reports and files come back
# through Dask. Gradients go from rank to rank. Why a process of its own? A process can
# be killed, a running Dask task cannot.
#
# With each report, `launch` calls `on_report`. Here it draws the loss of rank 0.

# %% tags=["lesson", "minutes-2"]
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
# 2. **The progress line** shows windows per second of all ranks.
# 3. **The run directory** is the newest folder in `runs/pets`. Which process is which
#    rank? Which names has the last epoch invented?
#
#        cat runs/pets/$(ls runs/pets | tail -1)/*.txt
#
# 4. **The dashboard.** Each worker is *processing* a task: to look after its rank.

# %%
arguments = {"windows": windows, **hyperparameters}
run = ddp.launch(client, train, **arguments, **kit.launch_options(), on_report=watch)
if watch:
    watch.draw()
figure = helpers.curve(run.metrics, label="loss (nats per character)")
figure.savefig(run.directory / "loss.png", bbox_inches="tight")
plt.close(figure)

# %% [markdown]
# ### Is it any good?
#
# A fair opponent is a good simple rule. An *n-gram* counts which character follows the
# last n − 1 characters. Counts of shorter contexts help. All are judged by the names
# that were held out. `run.result` is what rank 0 returned: weights that load into the
# plain model.
#
# <details><summary><b>Predict:</b> 1,500 names are drawn at temperature 0.3, at 0.8 and
# at 1.5, by which the scores are divided. How many are new, and of familiar parts? The
# last lines below count them.</summary>
#
# A low temperature repeats likely names, and many of these are known. A high one draws
# unlikely characters: many names have unfamiliar parts. Try other temperatures in the
# cell.</details>

# %% tags=["nbval-ignore-output"]
model = NameModel(settings.layers, settings.hidden)
model.load_state_dict(run.result)
with torch.no_grad():
    loss = surprise(model, helpers.encode(held_out)[None])
print(f"LSTM   {loss:.3f} nats per held-out character; blind guess {math.log(30):.3f}")
for n in (3, 5):
    counted = helpers.n_gram(training_names, held_out, n, prior=10)
    print(f"{n}-gram {counted:.3f}")
for temperature in (0.3, 0.8, 1.5):
    names = invent(model, 1_500, temperature)
    print(f"names at {temperature}: {len(names)} pass, such as {', '.join(names[:3])}")

# %% [markdown]
# **The LSTM is better than the 3-gram, and about as good as the 5-gram**, which only
# counts. So by this score the network is not worth its trouble. Here it is a training
# to run, watch, stop and resume. (Rate and `prior` were chosen by these names.)

# %% [markdown]
# ## 8. What is in a checkpoint?
#
# Your file of exercise A, and more: `written_by` describes the parts, so that another
# model's checkpoint is refused. `weights_only=True`, the default, loads tensors and
# plain values, and refuses to execute code. That protection has had holes, such as
# [CVE-2025-32434][cve]. Load no files of strangers.
#
# The cell loads the weights without Dask and DDP: `ddp.Checkpoint` saves
# `model.module`, not the wrapper.
#
# [cve]: https://nvd.nist.gov/vuln/detail/CVE-2025-32434

# %% tags=["proof"]
newest = max((run.directory / "checkpoints").glob("step-*.pt"))
saved = torch.load(newest, map_location="cpu", weights_only=True)
print("the file of", newest.name.split(".")[0], "holds", ", ".join(saved))
print("for each weight, the optimizer has", ", ".join(saved["optimizer"]["state"][0]))

alone = NameModel(settings.layers, settings.hidden)
alone.load_state_dict(saved["model"])
loaded = nn.utils.parameters_to_vector(alone.state_dict().values())
returned = nn.utils.parameters_to_vector(run.result.values())
differ = int((loaded != returned).sum())
print(f"{len(loaded):,} weights loaded; {differ} differ from the ranks' own")
assert differ == 0

# %% [markdown]
# **How often to save?** A save costs time; so do lost steps. If saves hold up training
# for `cost` seconds each, and failures come every `between` seconds, about
# √(2 · cost · between) seconds between two saves are best ([Young, 1974][young]).
#
# [young]: https://doi.org/10.1145/361147.361115

# %% tags=["lesson", "nbval-ignore-output"]
began = time.perf_counter()
torch.save(saved, io.BytesIO())
cost = time.perf_counter() - began
best = math.sqrt(2 * cost * 86_400)
print(f"{1000 * cost:.0f} ms at least; with a failure a day, save every {best:.0f} s")

# %% [markdown]
# ## 9. Kill it, and resume
#
# First an undisturbed run. Then the same again, and after step 90 rank 1 gets
# *SIGKILL*, the signal that ends a process at once. `ddp.inject` puts this fault into
# `train`; before it rank 1 sleeps, so that all reports arrive. The run fails: rank 0
# loses the connection, or Dask ends it. A second launch *in the same directory* finds
# the newest checkpoint and goes on.
#
# Read the log. Which process was killed? From which step did the ranks go on? The
# picture marks the steps that are done twice: those after this one, up to 90.

# %% tags=["lesson", "nbval-ignore-output"]
model_of = {"learning_rate": 1e-2, "layers": 1, "hidden": 32, "seed": settings.seed}
small = {"windows": windows[:800], "epochs": 2, "batch_size": 16, **model_of}
undisturbed = ddp.launch(client, train, **small, workers=2, directory=False)

hurt = run.directory / f"killed-{time.time():.0f}"
dies = ddp.inject(train, "kill", rank=1, step=90)
sleeps = ddp.inject(dies, partial(time.sleep, 2), rank=1, step=90)  # then it dies
try:
    ddp.launch(client, sleeps, **small, workers=2, directory=hurt)
except ddp.RankFailed as failure:
    print(failure)
resumed = ddp.launch(client, train, **small, workers=2, directory=hurt)
for line in (hurt / "log.txt").read_text().splitlines():
    if line[2:3] == ":":  # the time of day: a traceback has none
        print(line[9:97])
helpers.show_twice(undisturbed.metrics, resumed.metrics, hurt, killed_at=90)

# %% tags=["proof"]
expected = nn.utils.parameters_to_vector(undisturbed.result.values())
reached = nn.utils.parameters_to_vector(resumed.result.values())
differ = int((expected != reached).sum())
print(f"of {len(expected):,} final weights, {differ} differ from the undisturbed run's")
assert differ == 0
print(checks.prediction(my_prediction))

# %% [markdown]
# The lost steps are done again with the same batches, the same state of Adam and the
# same learning rate. The sums come in the same order, too, as long as these stay: the
# number of ranks and of threads, the kind of processor, the versions of torch and its
# libraries. Otherwise expect `"close"`; on GPUs too, because some GPU functions add in
# a different order each time.
#
# <details><summary><b>A small question:</b> the log says 'often because memory ran
# out'. Had it?</summary>
#
# No. The system does not say who sent a signal, so the log guesses.</details>

# %% [markdown]
# ## 10. Exercises
#
# ### Exercise B · Stop it, hurt it, resume it (16 minutes)
#
# `make run` trains as section 7 did. Open two terminals. In both, type
# `cd "$JUPYTER_SERVER_ROOT/.."`.
#
# 1. In the first terminal, start a small model:
#
#        make run TUTORIAL=pets WORKERS=2 SET="epochs=60 hidden=16 batch_size=128"
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
# `kill` without `-9` sends *SIGTERM*, which only asks a process to end: both ranks
# would save and leave.
# </details>


# %% tags=["exercise", "solution", "minutes-16"]
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
given = {"client": client, "train": train, "windows": windows, "notebook": settings}
judge(partial(checks.resumed_by_hand, **given), my_run, timeout=480)

# %% [markdown]
# ### Exercise C · A training that runs and is wrong (9 minutes)
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
# Choose two, and repair only these. `repaired` returns the rank's weights.
#
# - each rank starts with other weights
# - every epoch has the same order
# - the ranks see the same samples
# - the weights have the wrapper's names
# - the gradients are not averaged
#
# <details><summary>Hint</summary>
#
# What does `help(torch.utils.data.DistributedSampler.set_epoch)` say? And where does a
# DDP model keep the model that you gave it?
# </details>


# %% tags=["exercise", "solution", "minutes-9"]
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
# other rank waits in `all_reduce`, until PyTorch's time-out: 30 minutes with gloo. With
# NCCL it is 10 minutes, then the process is aborted. `launch` waits for `stall_timeout`
# seconds without progress, then asks each rank where it is:

# %% tags=["lesson"]
silent = ddp.inject(train, "hang", rank=1, step=10)
try:
    ddp.launch(client, silent, **small, workers=2, directory=False, stall_timeout=5)
except ddp.RankStalled as failure:
    stalled = failure
said = str(stalled).splitlines()[0].replace(stalled.host, "HOST")
print(said.replace(". ", ".\n"))  # a line for each sentence
for rank, stack in stalled.stacks.items():
    print(f"rank {rank} is in {stack.splitlines()[0].split()[-1]}")

# %% [markdown]
# Which rank is to blame? Not rank 0: inside `backward()` it waits for the averaging.
# Rank 1 never came there. (`wait` is where our fault sleeps.) `docs/faults.md` shows
# what other faults look like.

# %% [markdown]
# ## 12. If you have time: resume on another number of ranks
#
# Begin on two ranks, kill one, and resume on three. We compare with one undisturbed
# rank. A global batch has 256 windows, but an epoch's last one has 235. Three ranks get
# unequal shares, so `sampler.weight` differs among them. A Dask cluster grows while it
# runs:

# %% tags=["proof", "nbval-ignore-output"]
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
reports = {"1 rank": one.metrics, "2 ranks, then 3": three.metrics}
losses = {name: of.groupby("step")["loss"].mean() for name, of in reports.items()}
last = {name: loss.loc[start + 1 :] for name, loss in losses.items()}  # of three ranks
for name, loss in last.items():
    print(f"{name:16}", *(f"{value:.3f}" for value in loss))
difference = (last["2 ranks, then 3"] / last["1 rank"] - 1).abs().max()
print(f"largest relative difference of a loss: {difference:.0e}")
assert len(last["1 rank"]) >= 4 and difference < 1e-6

# %% [markdown]
# ## 13. Recap
#
# - *Run*: `launch` starts a rank on each worker. Dask carries everything except the
#   gradients.
# - *Watch*: progress line, `on_report`, run directory with `log.txt`.
# - *Stop*: Ctrl-C ends the ranks at once. SIGTERM (`kill` without `-9`) lets them save.
# - *Resume*: launch in the same directory, or `RESUME=`. `restarts=1` resumes once,
#   automatically. The weights were the same, bit for bit; on another number of ranks
#   they are, up to rounding.
#
# **Next:** `gpt`: where a step's time and memory go.
#
# **Read.** PyTorch on [saving][1] and [reproducibility][2]; Dask's [dashboard][3].
#
# [1]: https://docs.pytorch.org/tutorials/beginner/saving_loading_models.html
# [2]: https://docs.pytorch.org/docs/stable/notes/randomness.html
# [3]: https://docs.dask.org/en/stable/dashboard.html

# %%
client.close()
