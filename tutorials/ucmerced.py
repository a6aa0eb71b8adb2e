# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # UC Merced: a model that a job has trained
#
# ## 1. The question
#
# **How far can I trust the accuracy of a model that a job has trained?**
#
# **Part 1 is the job:** its header, its log, its time limit. **Part 2 is the
# accuracy:** which images it is about, and how much of it is chance.
#
# **Afterwards you can**
# - write the header of a Slurm job, and read that of a PBS job;
# - say from a log why a job ended, and what that cost;
# - prepare a run for its time limit;
# - compute an accuracy from several ranks;
# - report it with a baseline, an interval and several seeds.
#
# **You need** the tutorials `mnist` and `pets`. From `pets` this one takes `launch`,
# the sampler and the checkpoint. No GPU, no network, no cluster.
#
# **Time:** 80 minutes, 25 of them for three exercises. The computer needs about one
# minute on two cores.
#
# # Part 1: the job
#
# ## 2. The data, and three sets
#
# All settings are in one cell. In a terminal, `make run TUTORIAL=ucmerced
# SET="epochs=20"` trains without the lesson and changes one of them.

# %%
import os
import re
import signal
import socket
import tempfile
from contextlib import redirect_stdout
from io import StringIO

import numpy as np
import pandas as pd
import torch
import torch.distributed as dist
import torch.nn.functional as F
from scipy.stats import binomtest
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DistributedSampler, Subset

import ddp_common as ddp
from ddp_common.clusters.connect import describe
from tutorials.checks import ucmerced as checks
from tutorials.checks.common import judge
from tutorials.helpers import Views, curves, interval, make_network, pictures, show
from tutorials.helpers import matrix as draw_matrix

# %% tags=["parameters"]
settings = ddp.settings(
    "ucmerced",
    data="shipped",  # or "full" after `make data`, a folder, or s3://bucket/prefix
    anonymous=False,  # True: read a public s3:// bucket without credentials
    on_error="raise",  # at an image that cannot be decoded; "skip": leave it out
    cache="",  # a folder for decoded images; "": a temporary one; or "memory"
    network="small",  # or a ResNet of torchvision, such as "resnet18"
    views=True,  # train on a random view of each scene; False: your photos have a top
    size=32,  # pixels: images are scaled to size x size
    epochs=12,
    batch_size=128,  # of all ranks together
    learning_rate=2e-2,  # at its peak
    held_out=0.2,  # the share of each class for validation, and as much for the test
    split_seed=0,  # draws the three sets
    seed=0,  # draws the initial weights and the order of the images
    seeds=3,  # training seeds in section 10
    presets={
        "full": {
            "data": "full",
            "cache": "memory",
            "network": "resnet101",
            "size": 224,
            "epochs": 60,
            "learning_rate": 1e-3,
        }
    },
    limits={"size": (32, None), "seeds": (1, 10)},  # a ResNet divides the size by 32
)

# %% [markdown]
# The UC Merced set has 21 classes of land use, with 100 aerial photographs each. By
# default you see *drawings* of such scenes: an accuracy on them says nothing about
# photographs. A folder of your own, with a subfolder for each class, also works:
# `SET="data=/path/to/folder"`.
#
# - The network learns from the **training** set.
# - We choose with the **validation** set. A model that was chosen because it is good on
#   these images is usually a little worse on others.
# - The **test** set is looked at once, in section 11. If you stop training by test
#   accuracy, you have used the test set.
#
# The split is *stratified*: each set gets its share of every class. It follows from the
# labels and a seed, so all ranks compute the same split.

# %%
client = ddp.connect()
dataset = ddp.fetch("ucmerced", settings.data)
temporary = tempfile.TemporaryDirectory(prefix="decoded-")
images = ddp.ImageFolder(
    dataset.path,
    size=settings.size,
    cache=settings.cache or temporary.name,
    anonymous=settings.anonymous,
    on_error=settings.on_error,
)
classes = len(images.classes)
targets = np.array(images.targets)  # the number of each image's class
split = {"fractions": [settings.held_out] * 2, "seed": settings.split_seed}
training, validation, test = ddp.split(len(images), by=images.labels, **split)
print(f"{client.ranks} ranks · {dataset.origin} · licence: {dataset.licence}")
print(f"{len(images):,} images of {classes} classes, scaled to {settings.size} pixels")
print(
    f"{len(training):,} to learn from, {len(validation):,} to choose, {len(test)} test"
)

# %% tags=["lesson"]
first = [images.targets.index(number) for number in range(classes)][:21]
show(
    pictures(
        [images[row][0].permute(1, 2, 0) for row in first],
        [images.classes[images.targets[row]] for row in first],
        columns=7,
    ),
    "A grid of small scenes from above, one for each class, with its name.",
)

# %% [markdown]
# ### Predict
#
# **First.** A run needs 90 minutes. Its jobs end after 60, and are warned a minute
# before. You have said `RESTARTS=1`. What happens near the end of the first hour?
#
# - `"error"`: the run ends, and what it has learned since the last checkpoint is lost.
# - `"back"`: new jobs go on from the last checkpoint, and some steps are done twice.
# - `"on"`: the ranks save before the limit, and go on in new jobs where they were.
#
# **Second.** From some test images you compute an accuracy and its 95 % interval. A
# colleague judges the same model with equally many *other* images. In how many of 100
# such cases is the colleague's accuracy inside your interval?
#
# Sections 6 and 11 have the answers.

# %% tags=["lesson"]
my_prediction = None  # "error", "back" or "on"
my_second_prediction = None  # a number from 0 to 100

# %% [markdown]
# ## 3. What the job computes
#
# `small` is a *ResNet* with three blocks. (`make_network` and `Views` are in
# `tutorials/helpers.py`.) A scene from above has no top: flipped or transposed it is as
# good as before. So there are eight *views* of it, and `Views` draws one each time.
#
# `evaluate` judges images on all ranks. It returns a *confusion matrix*: how often an
# image of class *i* (row) was taken for class *j* (column). Section 7 is about its
# lines.


# %%
def load(images, rows):
    """Images as bytes (n, 3, size, size), and the numbers of their classes (n,)."""
    scenes, labels = zip(*images.__getitems__(list(rows)))
    return torch.stack(scenes), torch.tensor(labels)


def normalized(scenes):
    """Bytes as floats around zero, about as wide as photographs'."""
    return (scenes.float() / 255 - 0.45) / 0.22


@torch.no_grad()
def evaluate(model, images, rows, batch_size=64):
    """Judge the images at `rows`, each on one rank.

    Returns the confusion matrix of all ranks, and {row: guess} of this one.
    """
    size, guesses = len(images.classes), {}
    device = next(model.parameters()).device
    matrix = torch.zeros(size, size, dtype=torch.long, device=device)
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)
    model.eval()
    for batch in ddp.EvalSampler(len(rows), batch_size):
        scenes, labels = load(images, rows[batch])
        guess = model(normalized(scenes.to(device))).argmax(1)
        pair = labels.to(device) * size + guess  # the place in a matrix of one row
        pairs = torch.bincount(pair, minlength=size**2)
        matrix += pairs.reshape(size, size)
        guesses.update(zip(rows[batch].tolist(), guess.tolist()))
    dist.all_reduce(matrix)
    return matrix.cpu(), guesses


# %% [markdown]
# | line | why |
# |---|---|
# | `training, validation, _` | the test set does not even have a name here |
# | `ddp.DataLoader` | as torch's; a scene gets one view, whatever the number of ranks |
# | `channels_last` | stores the channels of a pixel together: faster convolutions |
# | `OneCycleLR` | the rate rises to `learning_rate`, then falls to almost 0 |
# | `evaluate(…)` on all ranks | it sums over ranks: all must call it |
# | `checkpoint.save()` after each epoch | a killed run loses less than an epoch |
#
# The model is that of the **last** epoch. To keep the epoch that is best on validation
# images is also common. It is one more choice.


# %%
def train(images, split, network, views, epochs, batch_size, learning_rate, seed):
    """Train on this rank's share of each batch: weights, and validation accuracy."""
    torch.manual_seed(seed)  # the same initial weights on all ranks
    device = ddp.device()
    training, validation, _ = ddp.split(len(images), by=images.labels, **split)
    data = Views(Subset(images, training), turn=views)
    sampler = ddp.ElasticSampler(len(training), batch_size, seed=seed)
    loader = ddp.DataLoader(data, batch_sampler=sampler)
    net = make_network(network, len(images.classes))
    model = DDP(net.to(device, memory_format=torch.channels_last))
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    steps = epochs * len(sampler)
    schedule = OneCycleLR(optimizer, learning_rate, steps, cycle_momentum=False)
    checkpoint = ddp.Checkpoint(
        model=model, optimizer=optimizer, schedule=schedule, sampler=sampler
    )
    checkpoint.restore()  # nothing to restore on a first attempt
    for epoch in sampler.epochs(epochs):
        model.train()
        for scenes, labels in loader:
            scores = model(normalized(scenes.to(device)))
            loss = F.cross_entropy(scores, labels.to(device)) * sampler.weight
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            ddp.report(loss=loss)
        matrix, _ = evaluate(model.module, images, validation)
        accuracy = matrix.trace().item() / matrix.sum().item()
        checkpoint.save()
        if ddp.rank() == 0:
            ddp.report(validation_accuracy=accuracy)
            print(f"epoch {epoch + 1}: validation accuracy {accuracy:.1%}", flush=True)
    matrix, _ = evaluate(model.module, images, validation)
    weights = {name: each.cpu() for name, each in model.module.state_dict().items()}
    return {"weights": weights, "accuracy": matrix.trace().item() / len(validation)}


# %% [markdown]
# <details><summary>A small question: why may the ranks draw the split for themselves,
# and what would happen if each drew it with a seed of its own?</summary>
#
# The same labels and the same seed give the same split everywhere. With seeds of their
# own, one rank would train on images that another one uses for validation.
# </details>
#
# ## 4. The header
#
# On a cluster you hand in a *job*: a script that says what it needs. It waits in a
# *queue* for room. At its *time limit* (walltime) it is ended.
#
# | | Slurm | PBS |
# |---|---|---|
# | hand it in | `sbatch job.sh` | `qsub job.sh` |
# | see your jobs | `squeue --me` | `qstat -u $USER` |
# | cancel one | `scancel 1234` | `qdel 1234` |
# | an hour | `--time=01:00:00` or `-t` | `-l walltime=01:00:00` |
# | a *task*, a program to run | `--ntasks=1` or `-n` | `-l select=1`, a *chunk* |
# | memory | `--mem` (of a node), `--mem-per-cpu` | `mem=` in `select` |
# | a queue | `--partition=short` or `-p` | `-q short` |
#
# `make run TUTORIAL=ucmerced CLUSTER=slurm WORKERS=4` hands in a job for each rank.
# With `DRY=1` it prints the script and hands in nothing, so it also works here: try it
# in a terminal. Below is its *header*, the lines that Slurm or PBS reads. Its values
# come from *profiles*, the files `clusters/slurm.yaml` and `clusters/pbs.yaml`.

# %% tags=["lesson"]
for system, mark in (("slurm", "#SBATCH"), ("pbs", "#PBS")):
    script = describe(system, workers=4, tutorial="ucmerced")
    header = [line for line in script.splitlines() if line.startswith(mark)]
    print(f"make run … WORKERS=4 CLUSTER={system} DRY=1", *header, sep="\n")

# %% [markdown]
# **Where is your program meanwhile?** The *client*, this notebook or `make run`, hands
# in the jobs, receives their reports and restarts them. If it ends, the jobs end. So it
# must live as long as the training. If the login node allows programs that long, start
# it there in `tmux`: it goes on when you log out. If not, hand it in as a small job of
# its own: see `clusters/batch/pets.sbatch`.
#
# Or there is no client: *one* job with all ranks, which `srun` starts.
#
# ### Exercise A · The header of a job with all ranks (7 minutes)
#
# You want to run `srun python train.py` in one job. `site` has your account, and the
# time limit of each *partition* (Slurm's word for a queue) in minutes. `need` is what
# the job needs: ranks, CPUs for each rank, GiB of memory for each CPU, minutes. Slurm
# is to send the ranks SIGTERM, the signal that asks a process to end, `warning` seconds
# before the limit. An example:
#
# ```python
# site = {"account": "project_1234", "partitions": {"long": 4320, "short": 60}}
# need = {"ranks": 4, "cpus": 2, "memory": 3, "minutes": 95, "warning": 120}
# ```
#
# **Goal.** Append the six options that are missing. Take the partition with the
# smallest limit that is large enough, and the time that the job needs: short jobs often
# start sooner. The check accepts up to twice the time and the memory, and no other
# options.
#
# | option | meaning |
# |---|---|
# | `--partition` | which queue |
# | `--ntasks`, `--cpus-per-task` | ranks; CPUs for each |
# | `--mem-per-cpu` | memory for each CPU; a number alone is in MiB |
# | `--time` | the limit: `minutes` or `hours:minutes:seconds` |
# | `--signal` | `TERM@300`: SIGTERM, 300 seconds before the limit |
#
# <details><summary>Hint</summary>
#
# For the partition, `min(names, key=…)` of those that are large enough. `B:` in
# `--signal` warns only the shell.
# </details>


# %% tags=["exercise", "solution"]
def my_header(site, need):
    """The header of a job script: from #!/bin/bash to the last #SBATCH line."""
    lines = ["#!/bin/bash", f"#SBATCH --account={site['account']}"]
    # your code
    limits = site["partitions"]
    enough = [name for name in limits if limits[name] >= need["minutes"]]
    lines += [
        f"#SBATCH --partition={min(enough, key=limits.get)}",
        f"#SBATCH --ntasks={need['ranks']}",
        f"#SBATCH --cpus-per-task={need['cpus']}",
        f"#SBATCH --mem-per-cpu={need['memory']}G",
        f"#SBATCH --time={need['minutes']}",
        f"#SBATCH --signal=TERM@{need['warning']}",
    ]
    # end of your code
    return "\n".join(lines)


# %% tags=["exercise"]
judge(checks.header, my_header)

# %% [markdown]
# ## 5. The log
#
# Now we train. The run has a folder of its own. The file to watch there is `log.txt`:
# in a terminal, `tail -f runs/ucmerced/*/log.txt`. On a cluster, what the batch system
# says of a job is in `runs/clusters/…`: look there if the log does not say why a run
# ended.

# %% tags=["nbval-ignore-output"]
arguments = "network epochs batch_size learning_rate".split()
recipe = {name: getattr(settings, name) for name in arguments} | {"split": split}
main = {"views": settings.views, "seed": settings.seed}
run = ddp.launch(client, train, images=images, **recipe, **main)
trained = {(settings.views, settings.seed): run}  # section 10 adds more
chosen_views = settings.views  # section 10 may choose otherwise

lines = (run.directory / "log.txt").read_text().splitlines()
print(
    f"\nlog.txt has {len(lines)} lines. The first and the last:", *lines[:2], sep="\n"
)
print("…", *lines[-2:], sep="\n")

# %% [markdown]
# ### Four logs to read (6 minutes)
#
# These four jobs have ended before they were done. Lines with `slurmstepd` or `srun`
# are Slurm's, the others the program's. `STEP 70231.0` is what `srun` has started, no
# training step.

# %% tags=["exercise"]
print(*(f"--- log {number}\n{text}" for number, text in checks.LOGS.items()), sep="\n")

# %% [markdown]
# **Goal.** Say of each log why the job ended, by a letter, and how many steps were
# trained in vain: the next job goes on from the last step that was saved, by this job
# or by the one before it.
#
# | letter | the job was ended |
# |---|---|
# | T | at its time limit, without a warning |
# | W | before its time limit, after a warning |
# | M | because it needed more memory than it had asked for |
# | P | by a person, with `scancel` |


# %% tags=["exercise", "solution"]
def my_reading():
    """{number of a log: (letter, steps in vain)}"""
    # your code
    return {1: ("T", 20), 2: ("M", 17), 3: ("W", 0), 4: ("P", 42)}
    # end of your code


# %% tags=["exercise"]
judge(checks.reading, my_reading)

# %% [markdown]
# <details><summary>A small question: which of the four jobs will end in the same way if
# you just hand it in again?</summary>
#
# The one that was killed for its memory: ask for more memory, or for a smaller batch.
# The others go on.
# </details>
#
# ## 6. Break it: the time limit
#
# At the time limit Slurm sends SIGTERM, and after *KillWait*, by default 30 seconds,
# SIGKILL, which no program can catch. Half a minute may be too short to save. With
# `--signal=TERM@300` SIGTERM comes 300 seconds before the limit, or up to a minute
# earlier. `warning: 60` in a profile does the same for Dask's jobs.
#
# A rank that gets SIGTERM tells the others. All finish the same step, save and leave.
# With `restarts=1` (`make run … RESTARTS=1`) `launch` goes on from the newest
# checkpoint, on a batch system in new jobs. Here we send SIGTERM by hand to one of two
# local ranks, in the middle of the first epoch; in a second run, SIGKILL.


# %% tags=["proof"]
def break_and_go_on(fault):
    """Break rank 1 in the first epoch: what it said, and all steps of rank 0."""
    middle = max(1, len(training) // settings.batch_size // 2)
    short = recipe | main | {"epochs": 1, "images": images}
    with tempfile.TemporaryDirectory(dir=run.directory) as folder:
        mark = f"{folder}/it-has-struck"  # the fault strikes once, not after a restart
        broken = ddp.inject(train, fault, step=middle, mark=mark)
        two = {"workers": 2, "restarts": 1, "directory": False}
        with redirect_stdout(StringIO()):
            whole = ddp.launch(client, broken, **short, **two)
    steps = whole.metrics.dropna(subset="loss").query("rank == 0")["step"]
    return whole.failures[0], steps


def get_sigterm():
    os.kill(os.getpid(), signal.SIGTERM)


warned, steps = break_and_go_on(get_sigterm)
said = str(warned).replace(socket.gethostname(), "HOST").splitlines()[0]
print(re.sub(r"step \d+", "step …", said))  # which one: it depends on who was ahead
assert steps.is_unique
print("warned: the run goes on where it was, and no step is trained twice")
killed, steps = break_and_go_on("kill")
assert (steps == steps.min()).sum() == 2
print("killed before its first checkpoint: the run begins anew with the first step")
print(f"so two ranks that are warned go on: 'on' (you: {my_prediction!r})")

# %% [markdown]
# A killed run loses the steps since its last checkpoint. So save now and then
# **without** a warning, too: nodes fail.
#
# # Part 2: the accuracy
#
# ## 7. Sums over ranks
#
# Training averages *gradients*. Evaluation sums *counts*. Look at `evaluate` again.
#
# **Each image counts once.** In training all ranks make equally many steps. So
# PyTorch's `DistributedSampler` gives them equally many samples, and deals some twice
# if these do not divide: it *pads*. In an evaluation they would count twice.
# `ddp.EvalSampler` deals each image to one rank. So ranks may have unequal shares.
#
# **Counts, then one division.** Each rank counts its own images, and `all_reduce` adds
# the matrices. The accuracy is the sum of the diagonal, divided by the sum of all.
#
# **One model.** *Batch normalisation* scales each channel by its mean and variance. In
# training it takes these from *this rank's share* of the batch, so losses depend on
# the number of ranks. In `model.eval()` it takes running averages, which are *buffers*
# of the model. DDP copies rank 0's buffers to all ranks before each step, but not after
# the last one. So `evaluate` does it with `broadcast`.


# %%
def evaluate_all(images, network, candidates, rows):
    """Evaluate networks, given as {name: weights}, on the images at `rows`.

    Returns {name: (confusion matrix, [{row: guess} of each rank])}.
    """
    verdicts = {}
    for name, weights in candidates.items():
        model = make_network(network, len(images.classes))
        model.load_state_dict(weights)
        matrix, guesses = evaluate(model.to(ddp.device()), images, rows)
        everyones = [None] * ddp.world_size()
        dist.all_gather_object(everyones, guesses)
        verdicts[name] = matrix, everyones
    return verdicts


def guesses_of(everyones, rows):
    """The guessed class of each image at `rows`, whichever rank has judged it."""
    guess_of = {row: guess for mine in everyones for row, guess in mine.items()}
    return np.array([guess_of[row] for row in rows.tolist()])


# %% tags=["proof"]
padded = [
    list(DistributedSampler(range(20), num_replicas=3, rank=rank, shuffle=False))
    for rank in range(3)
]
guesses = sum(map(len, padded))
assert len(set(sum(padded, []))) == 20 < guesses
print(f"DistributedSampler, 3 ranks: {guesses} guesses for 20 images")

given = {"images": images, "network": settings.network, "directory": run.directory}
candidates = {"main": run.result["weights"]}
judged = ddp.launch(
    client, evaluate_all, candidates=candidates, rows=validation, **given
)
matrix, everyones = judged.result["main"]
assert sorted(row for mine in everyones for row in mine) == sorted(validation)
guessed = guesses_of(everyones, validation)
assert matrix.trace() == (guessed == targets[validation]).sum()
print(f"EvalSampler: {len(validation)} validation images, each judged once")

# %% [markdown]
# <details><summary>A small question: rank 0 has 9 of 10 images right, rank 1 has 54 of
# 90. What is the accuracy?</summary>
#
# 63 of 100, 63 %. The mean of the ranks' accuracies, 75 %, is that of no set of images:
# an image of rank 0 would count nine times as much as one of rank 1.
# </details>
#
# ## 8. Where it is wrong
#
# One number hides which classes are taken for which. A row of the matrix is a true
# class, and its diagonal is what was right.

# %% tags=["lesson"]
mistakes = matrix - torch.diag(matrix.diagonal())
of, taken_for = divmod(int(mistakes.argmax()), classes)  # the numbers of two classes
show(
    draw_matrix(matrix, images.classes),
    "A square of counts: a row for each true class, a column for each guessed class. "
    "Most counts lie on the diagonal.",
)
wrong = (targets[validation] == of) & (guessed == taken_for)
like = training[targets[training] == taken_for][:6]
both = [*validation[wrong][:6], *like][:12]
show(
    pictures(
        [images[row][0].permute(1, 2, 0) for row in both],
        [images.classes[targets[row]] for row in both],
        columns=6,
    ),
    "Validation images of one class that were taken for another, then training images "
    "of that other class.",
)

# %% [markdown]
# The pictures are the most frequent mistake: first the images that were taken for
# another class, then some of that class. Would you have known? (The largest of 420
# counts is in part large by chance.)
#
# ## 9. A simple rule beside it
#
# An accuracy means little without an opponent, a *baseline*. Ours sees no shapes. It
# knows how bright an image is in each colour, and how much neighbouring pixels differ.
# That is the same for all eight views. A *logistic regression* (a linear layer and a
# softmax) learns from these numbers. `C` says how large its weights may get, and
# validation chooses it.


# %%
def colours(scenes):
    """Shares of dark to bright pixels, and differences of neighbours: (n, 30)."""
    bright = [(scenes // 32 == step).float().mean((2, 3)) for step in range(8)]
    rough = [scenes.float().diff(dim=dim).abs().mean((2, 3)) for dim in (2, 3)]
    return torch.cat(bright + rough, 1).numpy()


tables = {}
for name, rows in (("learn", training), ("choose", validation), ("test", test)):
    tables[name] = colours(load(images, rows)[0])
scores = {}
for C in (0.1, 1.0, 10.0, 100.0, 1000.0):
    rule = make_pipeline(StandardScaler(), LogisticRegression(C=C, max_iter=5000))
    rule.fit(tables["learn"], targets[training])
    scores[C] = rule.score(tables["choose"], targets[validation]), rule
best = max(scores, key=lambda C: scores[C][0])
simple_rule = scores[best][1]
is_at_an_edge = best in (min(scores), max(scores))
print("the best C is", "at an edge: try more" if is_at_an_edge else "not at an edge")

# %% [markdown]
# <details><summary>A small question: why does validation choose `C`, and not the test
# set?</summary>
#
# The test set would then have chosen the opponent, and its accuracy would be too high.
# Both sides of a comparison get the same care.
# </details>
#
# ## 10. Other seeds, and a choice
#
# Another seed draws other initial weights and another order. How much does that change?
# And do the eight views help? We train with and without them, with several seeds each,
# on as many ranks as before. **Validation images decide.** The test set waits.

# %% tags=["lesson", "nbval-ignore-output"]
seeds = range(settings.seed, settings.seed + settings.seeds)
for views in (True, False):
    for seed in seeds:
        if (views, seed) in trained:
            continue
        other = recipe | {"views": views, "seed": seed}
        with redirect_stdout(StringIO()):
            trained[views, seed] = ddp.launch(
                client, train, images=images, **other, directory=False
            )

table = pd.DataFrame(
    {
        title: [100 * trained[views, seed].result["accuracy"] for seed in seeds]
        for title, views in (("eight views", True), ("as it is", False))
    },
    index=[f"seed {seed}" for seed in seeds],
)
table["difference"] = table["eight views"] - table["as it is"]
print(f"validation accuracy in percent, after {settings.epochs} epochs")
print(table.round(1).to_string())
chosen_views = bool(table["difference"].mean() >= 0)
print("chosen:", "eight views" if chosen_views else "as it is")
if settings.seeds > 1:
    mean, low, high = interval(table["difference"])
    print(f"mean difference {mean:.1f} points, 95 % interval {low:.1f} to {high:.1f}")
    print("told apart:", not low <= 0 <= high)

# %% tags=["lesson"]
by_epoch = {
    ("eight views" if views else "as it is", seed): done.metrics["validation_accuracy"]
    for (views, seed), done in trained.items()
}
show(
    curves(by_epoch, "epoch", "validation accuracy"),
    "Validation accuracy against the epoch, a line for each training, in one colour "
    "with views and in another without. All lines rise and become flat at the end.",
)

# %% [markdown]
# We look at **differences within a seed**. Their interval is by Student's *t*. It is
# about chance in the *training*. If it contains 0, the recipes are *not told apart*.
# That does not mean that they are equal: the interval says how much the views may cost
# or bring.
#
# The curves are flat at the end because the learning rate falls to almost 0. So the
# verdict is one about **this budget of epochs**. Another one may decide otherwise: try
# `SET="epochs=4"`.
#
# ## 11. The test, once
#
# All choices are made. Now the test images are judged, in this cell and no other, and
# nothing is chosen after it. To run the notebook again is to look again.
#
# The *standard error* is the typical distance of the accuracy $p$ on $n$ test images
# from the *true* accuracy, the one on infinitely many such images:
# $\sqrt{p(1-p)/n}$. About twice that to each side is a 95 % interval. Wilson's is a
# better one for small $n$.


# %% tags=["nbval-ignore-output"]
def wilson(right):
    """The 95 % interval of an accuracy; `right` says of each image if it was right."""
    return binomtest(int(right.sum()), len(right)).proportion_ci(method="wilson")


candidates = {
    seed: done.result["weights"]
    for (views, seed), done in trained.items()
    if views == chosen_views
}
tested = ddp.launch(client, evaluate_all, candidates=candidates, rows=test, **given)
right = {"simple": simple_rule.predict(tables["test"]) == targets[test]}
for seed, (_, everyones) in tested.result.items():
    right[seed] = guesses_of(everyones, test) == targets[test]

model_file = {"weights": candidates[settings.seed], "network": settings.network}
torch.save({**model_file, "classes": images.classes}, run.directory / "model.pt")
print(f"Accuracy on {len(test)} test images ({dataset.origin}), with a 95 % interval")
print(f"  largest class    {np.bincount(targets[test]).max() / len(test):6.1%}")
for title, name in (("colours alone", "simple"), ("model.pt", settings.seed)):
    low, high = wilson(right[name])
    print(f"  {title:16} {right[name].mean():6.1%}   {low:.1%} to {high:.1%}")
mean, low, high = interval(1.0 * right[settings.seed] - right["simple"])
print(f"  difference       {mean:6.1%}   {low:.1%} to {high:.1%}")
if len(candidates) > 1:
    of_seeds = [right[seed].mean() for seed in candidates]
    mean, low, high = interval(of_seeds)
    print("model.pt and its recipe with other seeds:", *(f"{p:.1%}" for p in of_seeds))
    print(f"  mean of seeds    {mean:6.1%}   {low:.1%} to {high:.1%}")

# %% tags=["proof"]
as_written = {"data": "shipped", "network": "small", "size": 32, "epochs": 12}
if as_written.items() <= vars(settings).items():
    for seed in candidates:
        assert wilson(right[seed]).low > wilson(right["simple"]).high
    print("with each seed, the interval is above that of the simple rule")

random = np.random.default_rng(0)
true, n = 0.75, 420
mine, colleagues = random.binomial(n, true, (2, 20_000)) / n
half = 1.96 * np.sqrt(mine * (1 - mine) / n)
holds_true, holds_other = (np.mean(abs(mine - p) <= half) for p in (true, colleagues))
assert holds_true > 0.93 and holds_other < 0.87
print(f"the interval holds the true accuracy in {holds_true:.0%} of all cases,")
print(f"and a colleague's in {holds_other:.0%} (you: {my_second_prediction})")

# %% [markdown]
# **What these intervals say.** That of `model.pt` is about chance in the *images*, for
# one network. It holds the true accuracy in about 95 of 100 cases. It holds the
# accuracy of *another* test set less often: there, chance plays twice.
#
# That of the difference is *paired*: both models have judged the same images, so we
# subtract image by image. Hard images are hard for both, and this cancels. Two single
# intervals may overlap, and the models are still told apart.
#
# The mean of the seeds is about the *recipe*: its interval is about chance in the
# *training*. To take the best seed is one more choice.
#
# **What none of them says:** how accurate the model is on another city or camera. And
# tiles of one large photograph are not independent: split by photograph.
#
# <details><summary>A small question: you have looked at the test set, and now you have
# an idea for a better network. What about its test accuracy?</summary>
#
# You would have an idea because of these test images. Choose by validation, and judge
# the new network with test images that nobody has looked at.
# </details>
#
# ## 12. Exercise B · An accuracy, its interval, a verdict (12 minutes)
#
# Two models, A and B, have judged the same test images. `ranks` is a list with a pair
# for each rank: two arrays of bool, which say of each image of this rank whether A was
# right, and whether B was. Ranks have unequally many images, and one may have none.
#
# ```python
# ranks = [
#     (np.array([True, True, False]), np.array([True, False, False])),
#     (np.array([True]), np.array([False])),
# ]
# ```
#
# **Goal.** Return four things: the accuracy of A, a share from 0 to 1; the two ends of
# its 95 % interval; a verdict, `"A"`, `"B"` or `"not told apart"`. The verdict follows
# from the 95 % interval of the difference. (Here A has 3 of 4 right.)
#
# <details><summary>Hint</summary>
#
# `np.concatenate` joins the arrays of all ranks. `wilson` and `interval` are there.
# Section 11 has computed such a difference.
# </details>


# %% tags=["exercise", "solution"]
def my_report(ranks):
    """(accuracy of A, low, high, verdict)"""
    # your code
    a = np.concatenate([first for first, _ in ranks])
    b = np.concatenate([second for _, second in ranks])
    low, high = wilson(a)
    _, least, most = interval(1.0 * a - b)
    verdict = "not told apart"
    if least > 0:
        verdict = "A"
    if most < 0:
        verdict = "B"
    return a.mean(), low, high, verdict
    # end of your code


# %% tags=["exercise"]
judge(checks.report, my_report)

# %% [markdown]
# ## 13. Recap
#
# **How far can I trust the accuracy of a model that a job has trained?** As far as the
# job can be read: a log that says why it ended, and a run that lost no step. As far as
# the images are new: chosen with validation, judged once with the test set, each image
# counted once. And as far as its interval: with a baseline, paired, and over seeds.
#
# **Next:** `dogs`: does more hardware make a better model, or only a faster one?
#
# **Read.** The manuals of [sbatch](https://slurm.schedmd.com/sbatch.html) and
# [KillWait](https://slurm.schedmd.com/slurm.conf.html#OPT_KillWait). He et al., [Deep
# residual learning](https://arxiv.org/abs/1512.03385).

# %%
client.close()
temporary.cleanup()
