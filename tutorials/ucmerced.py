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
# **How does training become a job, and can I believe its accuracy?**
#
# **Afterwards you can**
# - write the header of a Slurm job, and read the header of a PBS job;
# - say from log and `sacct` why a job ended, and how many steps were lost;
# - prepare a run for its time limit;
# - count an accuracy over ranks with unequal shares, and give its interval.
#
# **You need** `mnist` and `pets`. No GPU, no network, no cluster.
#
# **Time:** 75 to 90 minutes in class, 28 of them for three exercises.
#
# ## 2. The data, and three sets
#
# In a terminal, not on a login node, `make run TUTORIAL=ucmerced SET="epochs=20
# test=False"` trains without the lesson. `test=False` keeps the test set unused.

# %% tags=["context"]
import contextlib
import io
import re

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from scipy.stats import binomtest
from sklearn.ensemble import RandomForestClassifier
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DistributedSampler, Subset

import ddp_common as ddp
from dask_ranks.clusters.connect import describe
from tutorials import helpers, kit
from tutorials.checks import ucmerced as checks
from tutorials.checks.common import judge
from tutorials.helpers import show
from tutorials.land import Views, make_network

# %% tags=["parameters", "context"]
full = {"data": "full", "network": "resnet101", "size": 224, "cache": "memory"}
full |= {"epochs": 60, "learning_rate": 1e-3}
settings = kit.settings(
    "ucmerced",
    data="shipped",  # "full" after `make data`, a folder, s3://…: class = folder
    anonymous=False,  # True: read a public s3:// bucket without credentials
    cache="memory",  # of decoded images; "": none are kept
    network="small",  # or a ResNet of torchvision, such as "resnet18"
    views=True,  # train on a random view of each scene; False: your photos have a top
    size=32,  # pixels: images are scaled to size x size
    epochs=12,
    batch_size=128,  # of all ranks together
    learning_rate=2e-2,  # at its peak
    held_out=0.2,  # the share of each class for validation, and as much for the test
    split_seed=0,  # draws the three sets
    seed=0,  # draws the initial weights and the order of the images
    test=True,  # False, while you choose: the test images are not judged
    presets={"full": full},
    limits={"size": (32, None)},  # a ResNet divides the size by 32
)

# %% [markdown]
# The UC Merced set has 100 aerial photographs of each of 21 classes. By default you see
# *drawings* of such scenes: an accuracy on them says nothing about photographs.
#
# - The network learns from the **training** set.
# - We choose with the **validation** set. A model picked for its score here will, on
#   average, score lower on new images.
# - The **test** set is looked at once, in section 9. Each choice by test accuracy uses
#   it up.
#
# Each set gets its share of every class. All ranks compute the same split from labels
# and a seed.

# %% tags=["context-my_accuracy"]
client = ddp.connect()
dataset = kit.fetch("ucmerced", settings.data)
reading = {name: getattr(settings, name) for name in ("size", "anonymous")}
images = ddp.ImageFolder(dataset.path, cache=settings.cache or None, **reading)
targets = np.array(images.targets)  # the number of each image's class
split = {"fractions": [settings.held_out] * 2, "seed": settings.split_seed}
training, validation, test = ddp.split(len(images), by=images.labels, **split)
print(f"{client.ranks} ranks · {dataset.origin} · licence: {dataset.licence}")
print(f"{len(images):,} images of {len(images.classes)} classes: {len(training):,} to")
print(f"learn from, {len(validation):,} to choose by, {len(test):,} for the test")

# %% tags=["lesson"]
_, first = np.unique(targets, return_index=True)
scenes = [images[row][0].permute(1, 2, 0) for row in first[:21]]
names = [re.sub("(residential|diamond|home)", r"\n\1", name) for name in images.classes]
show(
    helpers.pictures(scenes, names, columns=7),
    "A grid of small scenes from above, one for each class, with its name.",
)

# %% [markdown]
# ### Predict
#
# **First.** A run needs 90 minutes. Its jobs start at once, and end after 60; a minute
# before, they are warned. `RESTARTS=1` allows new jobs, once. Near the end of the hour
#
# - `"error"`: the run ends, and the steps since its last checkpoint are lost;
# - `"back"`: new jobs go on from that checkpoint, and some steps are done twice;
# - `"on"`: the ranks save before the limit, and go on in new jobs.
#
# **Second.** From test images you compute an accuracy and its 95 % interval. Colleagues
# judge the same model with equally many *other* images each. Imagine 100 such
# colleagues. For how many does their own accuracy lie inside your interval?

# %% tags=["lesson", "minutes-1"]
my_prediction = None  # "error", "back" or "on"
my_second_prediction = None  # a number from 0 to 100

# %% [markdown]
# ## 3. What the job computes
#
# The network is a small *ResNet*. A scene from above has no top: flipped or transposed
# it is as good. `Views` draws one of these eight *views* each time.
#
# `evaluate` counts in a *confusion matrix* how often an image of class *i* (row) was
# taken for class *j* (column). Section 7 explains its lines.


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

    All ranks return the confusion matrix of all, and the guess for each image.
    """
    device, n = next(model.parameters()).device, len(images.classes)
    matrix = torch.zeros(n, n, dtype=torch.long, device=device)
    guesses = torch.zeros(len(rows), dtype=torch.long, device=device)
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)
    model.eval()
    for batch in ddp.EvalSampler(len(rows), batch_size):
        scenes, labels = load(images, rows[batch])
        guess = model(normalized(scenes.to(device))).argmax(1)
        pair = labels.to(device) * n + guess  # its place, row after row
        matrix += torch.bincount(pair, minlength=n * n).view(n, n)
        guesses[batch] = guess
    dist.all_reduce(matrix)
    dist.all_reduce(guesses)  # the other ranks have zeros there
    return matrix.cpu(), guesses.cpu()


# %% [markdown]
# We keep the **last** epoch: keeping the best one would be one more choice.


# %%
def train(images, split, network, views, epochs, batch_size, learning_rate, seed):
    """Train on this rank's share of each batch; returns the weights."""
    torch.manual_seed(seed)  # the same initial weights on all ranks
    device = ddp.device()
    # the test set does not even have a name here
    training, validation, _ = ddp.split(len(images), by=images.labels, **split)
    data = Views(Subset(images, training), turn=views)
    sampler = ddp.ElasticSampler(len(training), batch_size, seed=seed)
    loader = ddp.DataLoader(data, batch_sampler=sampler)  # same views on any ranks
    net = make_network(network, len(images.classes))
    model = DDP(net.to(device, memory_format=torch.channels_last))  # faster so
    # AdamW: Adam, which also makes all weights a little smaller in each step
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    steps = epochs * len(sampler)  # the rate rises to its peak, then falls to almost 0
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
            checkpoint.step()
            schedule.step()
            ddp.report(loss=loss)
        matrix, _ = evaluate(model.module, images, validation)  # all ranks call it
        accuracy = matrix.trace().item() / matrix.sum().item()
        if ddp.rank() == 0:
            ddp.report(validation_accuracy=accuracy)
            print(f"epoch {epoch + 1}: validation accuracy {accuracy:.1%}", flush=True)
        checkpoint.save()  # a killed run loses less than an epoch
    return {name: each.cpu() for name, each in model.module.state_dict().items()}


# %% [markdown]
# <details>
# <summary>A small question: what would happen if each rank drew the split with
# a seed of its own?</summary>
#
# One rank would train on images that another one validates on.
# </details>
#
# ## 4. The header
#
# On a cluster you submit a *job*: a script that says what it needs. It waits in a
# *queue*. At its *time limit* (walltime) it is ended.
#
# | | Slurm | PBS Pro |
# |---|---|---|
# | submit it | `sbatch job.sh` | `qsub job.sh` |
# | see your jobs | `squeue --me` | `qstat -u $USER` |
# | cancel one | `scancel 1234` | `qdel 1234` |
# | an hour | `--time=01:00:00`, `-t` | `-l walltime=01:00:00` |
# | two programs | `-n 2`: two *tasks* | `-l select=2`: two *chunks* |
# | each with 4 CPUs, 8 GiB | `-c 4 --mem-per-cpu=2G` | `-l select=2:ncpus=4:mem=8gb` |
# | and a GPU | `--gpus-per-task=1 --gpu-bind=none` | there, append `:ngpus=1` |
# | a queue | `--partition=short` | `-q short` |
# | environment | `. .venv/bin/activate` | first `cd $PBS_O_WORKDIR` |
# | ranks | `srun -c 4 -K python train.py` | `mpiexec …` |
# | how it ended | `sacct -j 1234` | `qstat -xf 1234` |
#
# (`srun` does not take over `-c`; with `-K` it ends all ranks if one fails.)
#
# `make run TUTORIAL=ucmerced CLUSTER=slurm WORKERS=4` submits a job for each rank. With
# `DRY=1` it only prints the script. Its *header* comes from `clusters/slurm.yaml` or
# `clusters/pbs.yaml`. `interface: ib0` there names the network between nodes.

# %% tags=["lesson"]
for system, mark in (("slurm", "#SBATCH"), ("pbs", "#PBS")):
    script = describe(system, workers=4)
    header = [line for line in script.splitlines() if line.startswith(mark)]
    print(f"make run … WORKERS=4 CLUSTER={system} DRY=1", *header, sep="\n")

# %% [markdown]
# **Where does the client run meanwhile?** The *client*, this notebook or `make run`,
# submits the jobs. If it ends, they end. So it must outlive queue and training: in a
# small job (`clusters/batch/pets.sbatch`, `pets.pbs`), or in `tmux` on the login node.
# Sites may forbid either: ask. Without a client, *one* job has all ranks.
#
# **A warning.** With `--signal=TERM@300` Slurm sends SIGTERM, the signal that asks a
# process to end, 300 seconds before the limit, up to 60 seconds earlier. It reaches
# only what `srun` has started: the ranks. `B:TERM@300` reaches only the job's shell, or
# the program that has replaced it by `exec`.
#
# ### Exercise A · The header of one job with all ranks (12 minutes)
#
# `site` has your account, and the time limit of each *partition* (Slurm's queue) in
# minutes. `need` is what the job needs: ranks, CPUs for each rank, GiB of memory for
# each CPU, minutes (with the time to save after a warning). The ranks are to be warned
# `warning` seconds before the limit.
#
# ```python
# site = {"account": "project_1234", "partitions": {"long": 4320, "short": 60}}
# need = {"ranks": 4, "cpus": 2, "memory": 3, "minutes": 95, "warning": 120}
# ```
#
# **Goal.** Add `--partition`, `--ntasks` (ranks), `--cpus-per-task`, `--mem-per-cpu` (a
# number alone is in MiB), `--time` (in minutes, or as in the table) and `--signal`.
# Choose the partition with the smallest limit that is large enough (`min(names,
# key=…)`). Ask for the time that the job needs. Return one str. The check accepts up to
# twice the time (within the partition's limit) and the memory; of other options only
# nodes, names and logs.


# %% tags=["exercise", "solution", "minutes-12"]
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
    return "\n".join(lines)
    # end of your code


judge(checks.header, my_header)

# %% [markdown]
# **Send it.** On Linux, with root, `make slurm-lab` opens a shell on a Slurm with four
# nodes. Run the line of `need`. Save as `job.sh` what `print(my_header({"account":
# "lab", "partitions": {"main": 600}}, need))` prints, and `srun hostname`. Then `sbatch
# job.sh`, `squeue`, `sacct`; [more](../clusters/README.md#a-slurm-to-practise-on): a
# node fails.
#
# ## 5. The log
#
# Now we train. `tail -f runs/ucmerced/*/log.txt` watches a long run. A job's own log is
# in `runs/clusters/…`.

# %% tags=["nbval-ignore-output"]
arguments = "network views epochs batch_size learning_rate seed".split()
recipe = {name: getattr(settings, name) for name in arguments}
recipe |= {"split": split, "images": images}
run = ddp.launch(client, train, **kit.launch_options(), **recipe)
log = (run.directory / "log.txt").read_text().splitlines()
print("\nlog.txt begins and ends so:", *log[:2], "…", *log[-2:], sep="\n")

# %% [markdown]
# **`sacct` says how a job ended**, when nothing runs any more: `sacct -j 70231 -o
# JobID,State,ExitCode,MaxRSS`. `CANCELLED` in a log may mean: the limit, a lack of
# memory, a failed rank, preemption, a person, our client. The state in `sacct` says
# which, unless it is FAILED. `MaxRSS` is the sampled peak of one task.
#
# ### Exercise B · Four logs to read (6 minutes)
#
# These jobs ended before they were done. `slurmstepd` and `srun` are Slurm. Its `STEP`
# is what `srun` started. *OOM*: out of memory. *ExitCode*: code:signal; SIGTERM is 15,
# and 143 is 128 + 15.

# %% tags=["exercise"]
print(*(f"--- log {number}\n{text}" for number, text in checks.LOGS.items()), sep="\n")

# %% [markdown]
# **Goal.** Say of each log why the job ended: **T**, at its time limit, not warned;
# **W**, warned of it; **M**, it needed more memory; **P**, a person used `scancel`. And
# how many training steps were lost, up to the last one named? The next job goes on from
# the last step that was saved, by this job or by the one before it.


# %% tags=["exercise", "solution", "minutes-6"]
def my_reading():
    """{number of a log: (letter, steps lost)}"""
    # your code
    return {1: ("T", 20), 2: ("M", 17), 3: ("W", 0), 4: ("P", 42)}
    # end of your code


judge(checks.reading, my_reading)

# %% [markdown]
# <details>
# <summary>A small question: which two jobs end in the same way if you just
# submit them again?</summary>
#
# The job of log 2 needs more memory, or a smaller batch. The job of log 1 ends before
# its next checkpoint: it needs more time, a warning, or earlier saves.
# </details>
#
# ## 6. Break it: the time limit
#
# At the time limit Slurm sends SIGTERM, and by default 30 seconds later SIGKILL, which
# no program can catch. Our jobs warn their ranks themselves, 60 seconds before:
# `warning: 60` in `clusters/slurm.yaml`.
#
# A rank that gets SIGTERM tells the others. All finish the same step, save and leave.
# With `RESTARTS=1` the run goes on in new jobs, if they begin within `timeout`. Here
# one of two local ranks gets SIGTERM in the middle of an epoch; in a second run,
# SIGKILL.

# %% tags=["proof"]
middle = max(1, len(training) // settings.batch_size // 2)
short = recipe | {"epochs": 1}
said, steps = helpers.broken(client, train, "SIGTERM", middle, run.directory, **short)
print(said)
twice = steps.duplicated().sum()
assert twice == 0
print(f"warned: {len(steps)} steps, {twice} of them twice")
print(checks.warned(my_prediction))
_, steps = helpers.broken(client, train, "SIGKILL", middle, run.directory, **short)
times = (steps == steps.min()).sum()
assert times == 2
print(f"killed before its first checkpoint: step {steps.min()} is done {times} times")

# %% [markdown]
# Nodes fail **without** a warning: save now and then, too.
#
# ## Part 2: the accuracy
#
# ## 7. Sums over ranks
#
# Training averages *gradients*. Evaluation sums *counts*. Look at `evaluate` again.
#
# **Each image counts once.** `ddp.EvalSampler` deals each image to one rank, so ranks
# may have unequal shares. PyTorch's `DistributedSampler` *pads*: it deals some samples
# twice if they do not divide.
#
# **Sum, then divide.** `all_reduce` adds the matrices of the ranks. The accuracy is the
# diagonal's share of the sum.
#
# **One model.** *Batch normalisation* (BatchNorm) scales each channel by mean and
# variance. In training it takes them from *this rank's share* of the batch, so losses
# depend on the number of ranks, and a share of one or two images is too small.
# `nn.SyncBatchNorm` takes them from the whole batch: one more exchange in each layer,
# on GPUs only. With `model.eval()` BatchNorm uses running averages. These are
# *buffers*: saved with the model, but not trained. DDP averages gradients, not buffers.
# It copies rank 0's buffers to all ranks before each forward pass in training, and
# before the first one after it. After the last step the ranks' buffers differ, so
# `evaluate`, which gets `model.module`, copies them.
#
# <details>
# <summary>A small question: a common bug. After each epoch only rank 0 judges the
# validation images, with the DDP model, in <code>eval()</code> and under
# <code>no_grad</code>. What happens?</summary>
#
# Before the first batch DDP copies the buffers all the same. The other ranks do not
# take part: they wait at a barrier, or have ended. So the run hangs or fails. (If they
# train on instead, their own next copy answers by chance, until the last epoch.) Take
# `model.module`, which sends nothing, or let all ranks evaluate, as here. A network
# without buffers has nothing to copy: the bug waits until one has BatchNorm.
# </details>


# %%
def evaluate_weights(images, network, weights, rows):
    """Matrix and guesses of a network with these weights, on all ranks."""
    model = make_network(network, len(images.classes))
    model.load_state_dict(weights)
    return evaluate(model.to(ddp.device()), images, rows)


given = {"images": images, "network": settings.network, "weights": run.result}
given |= {"directory": run.directory}

# %% tags=["proof"]
padded = [
    list(DistributedSampler(range(20), num_replicas=3, rank=rank, shuffle=False))
    for rank in range(3)
]
count = sum(map(len, padded))
assert len(set(sum(padded, []))) == 20 < count
print(f"DistributedSampler, 3 ranks: {count} guesses for 20 images")

judged = ddp.launch(client, evaluate_weights, rows=validation, **given)
matrix, guesses = judged.result
assert matrix.sum() == len(validation)
assert matrix.trace() == (guesses.numpy() == targets[validation]).sum()
print(f"EvalSampler: {matrix.sum()} guesses for {len(validation)} images")

# %% [markdown]
# <details>
# <summary>A small question: rank 0 has 9 of 10 images right, rank 1 has 54 of
# 90. What is the accuracy?</summary>
#
# 63 of 100. In the mean of both accuracies, 75 %, an image of rank 0 counts nine times
# as much as one of rank 1.
# </details>
#
# ### Exercise C · An accuracy over ranks (10 minutes)
#
# Every rank calls `my_accuracy` with an array of bool: for each image of *this rank*,
# whether the guess was right. Ranks may have unequal shares, or none. Return
# `(accuracy, low, high)`, the same on every rank: the share of right images on all
# ranks, and the ends of its 95 % interval.
#
# The *true* accuracy is the one on infinitely many such images. An accuracy $p$ on $n$
# images is typically one *standard error* away from it: $\sqrt{p(1-p)/n}$. About twice
# that to each side is a 95 % interval. A better one for small $n$, Wilson's, is
# `binomtest(right, n).proportion_ci(method="wilson")`, with `.low` and `.high`. The
# check accepts both.


# %% tags=["exercise", "solution", "minutes-10"]
def my_accuracy(is_right):
    """(accuracy, low, high) over all ranks, from this rank's array of bool."""
    # your code
    counts = torch.tensor([is_right.sum(), len(is_right)])
    dist.all_reduce(counts)
    right, n = counts.tolist()
    interval = binomtest(right, n).proportion_ci(method="wilson")
    return right / n, interval.low, interval.high
    # end of your code


judge(checks.accuracy(client), my_accuracy)

# %% [markdown]
# ## 8. Where it is wrong
#
# A row is a true class, and the diagonal is what was right. Which classes would *you*
# confuse? Look at them in section 2.

# %% tags=["lesson"]
show(
    helpers.matrix(matrix, images.classes),
    "A square of counts: a row for each true class, a column for each guessed class. "
    "Most counts lie on the diagonal. Frames mark the three largest of the others.",
)

# %% tags=["lesson", "nbval-ignore-output"]
confused = matrix.clone().fill_diagonal_(0)
for place in confused.flatten().argsort(descending=True, stable=True)[:3].tolist():
    true, guess = divmod(place, len(images.classes))
    pair = f"{images.classes[true]} taken for {images.classes[guess]}"
    print(f"{pair}: {matrix[true, guess]} of {matrix[true].sum()}")

# %% [markdown]
# **The mistakes are not spread evenly.** A few pairs of classes have many of them:
# three are framed. Off the diagonal are 420 numbers, so the largest is in part chance.
#
# ## 9. The test, once
#
# All choices are made. The test images are judged here (and once more in section 11, by
# an opponent). Nothing is chosen by them.


# %% tags=["nbval-ignore-output"]
def wilson(right, n):
    """The 95 % interval of an accuracy."""
    return binomtest(int(right), int(n)).proportion_ci(method="wilson")


model_file = {"weights": run.result, "network": settings.network}
torch.save({**model_file, "classes": images.classes}, run.directory / "model.pt")
if settings.test:
    tested = ddp.launch(client, evaluate_weights, rows=test, **given)
    is_right = tested.result[1].numpy() == targets[test]
    low, high = wilson(is_right.sum(), len(test))
    print(f"Accuracy on {len(test)} test images ({dataset.origin}), 95 % interval")
    print(f"  largest class  {np.bincount(targets[test]).max() / len(test):6.1%}")
    print(f"  model.pt       {is_right.mean():6.1%}   {low:.1%} to {high:.1%}")
    print("Whoever chooses by this number has used the test set up.")

# %% [markdown]
# **What the interval says.** It is about chance in the *images*, for one network. It
# holds the true accuracy in about 95 of 100 cases. And a colleague's accuracy?

# %% tags=["proof"]
random = np.random.default_rng(0)
true, n = 0.75, 420
mine, colleagues = random.binomial(n, true, (2, 20_000)) / n
half = 1.96 * np.sqrt(mine * (1 - mine) / n)
holds_true, holds_other = (np.mean(abs(mine - p) <= half) for p in (true, colleagues))
assert holds_true > 0.93 and holds_other < 0.87
print(f"of {len(mine):,} simulated intervals {holds_true:.0%} hold the true accuracy,")
print(f"{holds_other:.0%} a colleague's")
print(checks.colleagues(my_second_prediction))

# %% [markdown]
# Both sets are drawn by chance, so two accuracies differ by more than one differs from
# the true one.
#
# **What the interval does not say:** how accurate the model is on another city or
# camera. And tiles of one photograph are not independent: split by photograph. Another
# seed of the training gives another network: section 11 looks.
#
# <details>
# <summary>A small question: after the test you have an idea for a better
# network. What about *its* test accuracy?</summary>
#
# These test images gave you the idea. Choose by validation, then judge with images that
# nobody has looked at.
# </details>
#
# <details>
# <summary>Find three faults. A job trains a ResNet101 with 1,000 outputs on all 2,100
# photographs. It hands the numbers 0 and 1, of 2 ranks, to its ranks; it starts 60. In
# the end one process judges all photographs, and counts how many are right.</summary>
#
# 1. Nothing is held out: this is an accuracy on training images.
# 2. The number of ranks stands in two places, and they differ: ask for it where it is
#    needed.
# 3. There are 21 classes: 979 outputs belong to none.
#
# The pages from which this lesson comes have all three (`docs/originals.md`). `make run
# TUTORIAL=ucmerced PRESET=original` mends the last two.
# </details>
#
# ## 10. Recap
#
# **How does training become a job?** By a header, a client that lives as long, a
# warning and checkpoints; log and `sacct` say how it ended.
#
# **Can I believe its accuracy?** As far as its interval goes, on three conditions:
# training ended as planned, only validation images have chosen, and each test image was
# counted once, by one model with the same buffers.
#
# **Next:** `dogs`: does more hardware make a better model?
#
# **Read.** The manuals of [sbatch](https://slurm.schedmd.com/sbatch.html),
# [sacct](https://slurm.schedmd.com/sacct.html) and
# [KillWait](https://slurm.schedmd.com/slurm.conf.html#OPT_KillWait).
#
# ## 11. If you have time: an opponent, and other seeds
#
# **An opponent.** A *random forest*, 100 decision trees that vote, sees no shapes: how
# bright an image is in each colour, and how much neighbouring pixels differ. Both
# models judge the *same* test images. So we subtract image by image (*paired*), and
# take the interval of the mean difference, by Student's *t*.


# %% tags=["lesson", "nbval-ignore-output"]
def colours(scenes):
    """Shares of dark to bright pixels, and differences of neighbours: (n, 30)."""
    bright = [(scenes // 32 == step).float().mean((2, 3)) for step in range(8)]
    down, right = (scenes.float().diff(dim=dim).abs().mean((2, 3)) for dim in (2, 3))
    return torch.cat([*bright, down + right, (down - right).abs()], 1).numpy()


forest = RandomForestClassifier(random_state=settings.seed)
forest.fit(colours(load(images, training)[0]), targets[training])
if settings.test:
    simple = forest.predict(colours(load(images, test)[0])) == targets[test]
    mean, low, high = helpers.interval(1.0 * is_right - simple)
    print(f"forest {simple.mean():.1%}; model.pt minus forest: {mean:.1%}", end=" ")
    print(f"({low:.1%} to {high:.1%})")

# %% [markdown]
# **Other seeds.** Another seed draws other initial weights and another order. Do the
# eight views help? We train a third as long, and look at differences *within a seed*,
# on the validation images. Three seeds are few: Student's *t* then takes 4.3 standard
# errors in place of 2, and hardly anything is told apart. So short a training may even
# be worse with views, as there is more to learn. (With all 12 epochs we saw 3.4 points,
# -0.5 to 7.4.)

# %% tags=["lesson", "nbval-ignore-output"]
accuracy, third = {}, max(1, settings.epochs // 3)
for views in (True, False):
    for seed in range(settings.seed, settings.seed + 3):
        other = recipe | {"views": views, "seed": seed, "epochs": third}
        with contextlib.redirect_stdout(io.StringIO()):
            done = ddp.launch(client, train, **other, directory=False)
        at_end = done.metrics["validation_accuracy"].dropna().iloc[-1]
        accuracy.setdefault(views, []).append(at_end)
difference = 100 * (np.array(accuracy[True]) - accuracy[False])
mean, low, high = helpers.interval(difference)
print("with views minus without:", *difference.round(1), "points")
print(f"mean {mean:.1f}, 95 % interval {low:.1f} to {high:.1f}")

# %%
client.close()
