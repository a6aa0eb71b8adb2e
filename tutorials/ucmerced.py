# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # UC Merced: a batch job, and an honest accuracy
#
# ## 1. The question
#
# **How do I get a job through the queue, and report its accuracy honestly?**
#
# **Afterwards you can**
# - write the header of a Slurm job, and read that of a PBS job;
# - say from a log why a job ended, and what that cost;
# - prepare a run for its time limit;
# - evaluate on several ranks;
# - report an accuracy with a baseline, an interval and several seeds.
#
# **You need** the tutorials `mnist` and `pets`. From `pets` this one takes `launch`,
# the sampler and the checkpoint. No GPU, no network, no cluster.
#
# **Time:** 75 minutes, 21 of them for two exercises. The computer needs about one
# minute on two cores.

# %% [markdown]
# ## 2. Photographs, and three sets
#
# All settings are in one cell. In a terminal, `make run TUTORIAL=ucmerced
# SET="epochs=20"` trains without the lesson and changes one of them.

# %%
import os
import re
import signal
import socket
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from copy import deepcopy
from io import StringIO

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchvision
from scipy.stats import binomtest
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import Dataset, DistributedSampler, Subset
from torchvision.models.resnet import BasicBlock
from torchvision.transforms import v2

import ddp_common as ddp
from ddp_common.clusters.connect import describe
from tutorials import kit
from tutorials.checks import ucmerced as checks
from tutorials.checks.common import judge
from tutorials.helpers import curve, interval, pictures, show

# %% tags=["parameters"]
settings = kit.settings(
    "ucmerced",
    data="shipped",  # or "full" after `make data`, a folder, or s3://bucket/prefix
    anonymous=False,  # True: read a public s3:// bucket without credentials
    network="small",  # or a ResNet of torchvision, such as "resnet18"
    views=True,  # train on a random view of each scene; False: your photos have a top
    size=64,  # pixels: images are scaled to size x size
    epochs=5,
    batch_size=32,  # of all ranks together
    learning_rate=1e-2,  # at its peak
    held_out=0.15,  # the share of each class for validation, and as much for the test
    split_seed=0,  # draws the three sets
    seed=0,  # draws the initial weights and the order of the images
    seeds=4,  # training seeds in the comparison of section 12
    presets={
        "full": {
            "data": "full",
            "network": "resnet101",
            "size": 224,
            "epochs": 60,
            "batch_size": 128,
            "learning_rate": 1e-3,
        }
    },
    limits={"size": (33, None), "seeds": (1, 10)},  # a ResNet divides the size by 32
)

# %% [markdown]
# The UC Merced set has 21 classes of land use, with 100 aerial photographs each. By
# default you see *drawings* of such scenes: an accuracy on them says nothing about
# photographs. A folder of your own, with a subfolder for each class, also works:
# `SET="data=/path/to/folder"`.

# %%
client = ddp.connect()
dataset = kit.fetch("ucmerced", settings.data)
to_read = {name: getattr(settings, name) for name in ("size", "anonymous")}
images = ddp.ImageFolder(dataset.path, cache="memory", **to_read)
classes = len(images.classes)
title = dataset.title if settings.data in ("shipped", "full") else "your own images"
print(f"{client.ranks} ranks · {title}")
print(f"{dataset.origin} · licence: {dataset.licence}")
print(f"{len(images):,} images of {classes} classes, scaled to {settings.size} pixels")

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
# ### Three sets, three purposes
#
# - The network learns from the **training** set.
# - We choose with the **validation** set: the epoch to keep, the baseline's rate. So
#   validation accuracy is usually too high.
# - The **test** set is looked at once, in section 12. If you stop training by test
#   accuracy, you have used the test set to choose.
#
# The split is *stratified*: each set gets its share of every class. It follows from the
# labels and a seed, so all ranks compute the same split.
#
# Other test images would give another accuracy. The *standard error* is the typical
# size of the difference from one test set to another: for an accuracy $p$ from $n$
# images $\sqrt{p(1-p)/n}$, at most $0.5/\sqrt{n}$. We know it before we train.

# %%
split = {"fractions": [settings.held_out] * 2, "seed": settings.split_seed}
targets = images.targets  # the number of each image's class
training, validation, test = ddp.split(len(images), by=images.labels, **split)
error = 0.5 / len(test) ** 0.5
print(f"{len(training):,} images to learn from, {len(validation):,} to choose by")
print(f"{len(test):,} test images: the standard error is at most {error:.1%}")

# %% [markdown]
# ## 3. One process first
#
# A plain loop trains the simplest model, one linear layer on the pixels: the
# *baseline*. A network that is no better may have learned only colours and their
# positions. Validation chooses the baseline's epoch *and* its learning rate. If the
# best rate is at an edge of those tried, one beyond it may be better.


# %%
def load(images, rows):
    """Images as bytes (n, 3, size, size), and the numbers of their classes (n,)."""
    scenes, labels = zip(*images.__getitems__(list(rows)))
    return torch.stack(scenes), torch.tensor(labels)


def normalized(scenes):
    """Bytes as floats around zero, about as wide as photographs'."""
    return (scenes.float() / 255 - 0.45) / 0.22


def train_linear(learning_rate, epochs=8):
    """Train a linear model: its best validation accuracy, and what it was then."""
    torch.manual_seed(settings.seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(scenes[0].numel(), classes))
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    best = -1.0, model
    for _ in range(epochs):
        for batch in torch.randperm(len(scenes)).split(32):
            loss = F.cross_entropy(model(normalized(scenes[batch])), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            guesses = model(normalized(validation_scenes)).argmax(1)
        accuracy = (guesses == validation_labels).float().mean().item()
        if accuracy > best[0]:
            best = accuracy, deepcopy(model)
    return best


torch.set_num_threads(1)  # one core, as a rank has later
scenes, labels = load(images, training)
validation_scenes, validation_labels = load(images, validation)
tried = [train_linear(rate) for rate in (3e-5, 1e-4, 3e-4, 1e-3)]
linear_accuracy, linear = max(tried, key=lambda best: best[0])
at_an_edge = linear_accuracy in (tried[0][0], tried[-1][0])
print("the best rate is", "at an edge: try more" if at_an_edge else "not at an edge")

# %% [markdown]
# ## 4. Predict
#
# **First.** Three ranks evaluate 20 images. PyTorch's `DistributedSampler` deals them.
# How many guesses do the ranks make together: 18, 20 or 21?
#
# **Second.** A run needs 90 minutes. Its jobs end after 60, and are warned a minute
# before. You have said `RESTARTS=1`. What happens near the end of the first hour?
#
# - `"error"`: the run ends, and what it has learned since the last checkpoint is lost.
# - `"back"`: new jobs go on from the last checkpoint, and some steps are done twice.
# - `"on"`: the ranks save before the limit, and go on in new jobs where they were.
#
# Write down your predictions before you go on. Sections 9 and 11 have the answers.

# %% tags=["lesson"]
my_prediction = None  # 18, 20 or 21
my_second_prediction = None  # "error", "back" or "on"

# %% [markdown]
# ## 5. What changes
#
# ### Evaluation sums counts
#
# Training averages *gradients*. Evaluation sums *counts*. The *confusion matrix* counts
# how often an image of class *i* (row) was taken for class *j* (column).
# `ddp.EvalSampler` deals each image to one rank, in batches. Each rank counts its own,
# and one `all_reduce` adds the matrices. The mean of the ranks' accuracies would be
# wrong if one rank had more images than another.
#
# *Batch normalisation* brings each channel to mean 0 and variance 1. In training it
# computes these from *this rank's share* of the batch. So, unlike in `mnist` and
# `pets`, losses depend on the number of ranks. For `model.eval()` it keeps running
# averages, which are *buffers* of the model. DDP copies rank 0's buffers to all ranks
# before each step, but not after the last one. So we do it before we evaluate.


# %%
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
# ### The network
#
# A *ResNet* is made of *residual blocks*: each adds what it computes to its input, so
# gradients have a short way back. `small` has three of torchvision's blocks, random
# weights at first, and one output for each class, not the 1,000 of ImageNet.


# %%
def make_network(name, classes):
    """The network of this name, `small` or one of torchvision's, not trained."""
    if name != "small":
        return torchvision.models.get_model(name, weights=None, num_classes=classes)
    widths = (16, 32, 64, 128)
    stem = nn.Conv2d(3, widths[0], 3, stride=2, padding=1, bias=False)
    layers = [stem, nn.BatchNorm2d(widths[0]), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    for before, after in zip(widths, widths[1:]):
        shortcut = nn.Conv2d(before, after, 1, stride=2, bias=False)
        shortcut = nn.Sequential(shortcut, nn.BatchNorm2d(after))
        layers.append(BasicBlock(before, after, stride=2, downsample=shortcut))
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], classes)]
    return nn.Sequential(*layers)


weights = make_network(settings.network, classes).parameters()
count = sum(weight.numel() for weight in weights)
print(f"{settings.network}: {count:,} weights, {classes} outputs")

# %% [markdown]
# ### The training function
#
# A scene from above has no top. Flipped or transposed it is as good as before: there
# are eight views. (For photographs with a top: `SET="views=False"`.)


# %%
mirror = [v2.RandomHorizontalFlip(), v2.RandomVerticalFlip()]
eight_views = v2.Compose([*mirror, v2.RandomApply([v2.Lambda(lambda image: image.mT)])])


class Views(Dataset):
    """Scenes; if `turn`, each is seen from a side that is drawn at random."""

    def __init__(self, scenes, turn):
        self.scenes, self.turn = scenes, turn

    def __len__(self):
        return len(self.scenes)

    def __getitem__(self, index):
        scene, label = self.scenes[index]
        return eight_views(scene) if self.turn else scene, label


class Best(dict):
    """Accuracy, number and weights of the best epoch; a checkpoint can save it."""

    state_dict = dict.copy
    load_state_dict = dict.update

    def offer(self, accuracy, epoch, model):
        if accuracy >= self.get("accuracy", -1.0):  # if equal, the later epoch
            state = model.state_dict().items()
            weights = {name: each.cpu().clone() for name, each in state}
            self.update(accuracy=accuracy, epoch=epoch, weights=weights)


# %% [markdown]
# | line | why |
# |---|---|
# | `training, validation, _` | the test set does not even have a name here |
# | `ddp.DataLoader` | as torch's; a scene gets one view, whatever the number of ranks |
# | `channels_last` | stores the channels of a pixel together: faster convolutions |
# | `evaluate(…)` on all ranks | all get one matrix, and agree which epoch is best |
# | `best=best` in the checkpoint | a run that goes on still knows what was chosen |
# | `checkpoint.save()` after each epoch | a killed run loses less than an epoch |


# %%
def train(images, split, network, views, epochs, batch_size, learning_rate, seed):
    """Train on this rank's share of each batch; returns what validation has chosen."""
    torch.manual_seed(seed)  # the same initial weights on all ranks
    device = ddp.device()
    training, validation, _ = ddp.split(len(images), by=images.labels, **split)
    data = Views(Subset(images, training), turn=views)
    sampler = ddp.ElasticSampler(len(training), batch_size, seed=seed)
    loader = ddp.DataLoader(data, batch_sampler=sampler)
    net = make_network(network, len(images.classes))
    model = DDP(net.to(device, memory_format=torch.channels_last))
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    steps = epochs * len(sampler)  # the rate rises to `learning_rate`, then falls
    schedule = OneCycleLR(optimizer, learning_rate, steps, cycle_momentum=False)
    best = Best()
    checkpoint = ddp.Checkpoint(
        model=model, optimizer=optimizer, schedule=schedule, sampler=sampler, best=best
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
        best.offer(accuracy, epoch, model.module)
        checkpoint.save()
        if ddp.rank() == 0:
            ddp.report(validation_accuracy=accuracy)
            print(f"epoch {epoch + 1}: validation accuracy {accuracy:.1%}", flush=True)
    return dict(best)


# %% [markdown]
# ## 6. Run it
#
# `launch` starts a rank on each worker. We look at mistakes on *validation* images.


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


# %% tags=["nbval-ignore-output"]
arguments = "network views epochs batch_size learning_rate seed".split()
recipe = {name: getattr(settings, name) for name in arguments} | {"split": split}
run = ddp.launch(client, train, **kit.launch_options(), images=images, **recipe)
best = run.result
candidates = {"main": best["weights"]}

given = {"images": images, "network": settings.network, "directory": run.directory}
judged = ddp.launch(
    client, evaluate_all, candidates=candidates, rows=validation, **given
)
matrix, everyones_guesses = judged.result["main"]
mistakes = matrix - torch.diag(matrix.diagonal())
worst = divmod(int(mistakes.argmax()), classes)  # the number of a class, and of another
of, taken_for = (images.classes[number] for number in worst)
if count := mistakes[worst].item():
    all_of_it = matrix.sum(1)[worst[0]].item()
    print(f"most often: {of} taken for {taken_for}, {count} of {all_of_it} times")
    print(f"(the largest of {classes * (classes - 1)} counts: in part by chance)")

figure = curve(run.metrics, label="training loss, mean of the ranks")
run.save_figure(figure, "training.png")
plt.close(figure)

# %% tags=["lesson"]
show(figure, "The mean training loss of the ranks, against the step.")
guess_of = {row: guess for mine in everyones_guesses for row, guess in mine.items()}
wrong = [row for row, guess in guess_of.items() if (targets[row], guess) == worst][:6]
columns = max(1, len(wrong))
like = [row for row in training if targets[row] == worst[1]][:columns]
show(
    pictures(
        [images[row][0].permute(1, 2, 0) for row in wrong + like],
        [images.classes[targets[row]] for row in wrong + like],
        columns=columns,
    ),
    "Two rows of scenes. Above: validation images of the most frequent confusion. "
    "Below: training images of the class that they were taken for.",
)

# %% [markdown]
# Look at the images, not only at the count. Would you have known?
#
# ## 7. Who reads the images?
#
# A training step waits until its images are read, decoded and turned. With
# `ddp.DataLoader(…, num_workers=2)` two *loaders*, processes beside the rank, do this
# ahead while the rank computes. For a GPU, `pin_memory=True` also lets copies go on
# beside the computing. A loader needs a core, too: ask for it in the header of a job.
#
# ## 8. Through the queue
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
# With `DRY=1` it prints the script and hands in nothing, so it also works here. Below
# is its *header*, the lines that Slurm or PBS reads. It asks for one task, because each
# rank has its own job. In exercise A *one* job holds all ranks. (`-J`, `-N`, `-o` and
# `-e` name the job and the files of its output.)

# %% tags=["lesson"]
for system, mark in (("slurm", "#SBATCH"), ("pbs", "#PBS")):
    script = describe(system, workers=4, tutorial="ucmerced")
    header = [line for line in script.splitlines() if line.startswith(mark)]
    print(f"make run … WORKERS=4 CLUSTER={system} DRY=1", *header, sep="\n")

# %% [markdown]
# The lines come from *profiles*, files with options for one kind of cluster:
# `clusters/slurm.yaml` and `clusters/pbs.yaml`.
#
# **The log to watch** is `log.txt` in the run directory. What the batch system says of
# a job is in `runs/clusters/…`: look there if the log does not say why a run ended.
#
# ## 9. Proofs
#
# ### No rank mixes the sets
#
# Each of two ranks splits for itself and sends what it got to all.


# %% tags=["proof"]
def splits_of_all(labels, fractions, seeded):
    """The three sets of each rank."""
    seed = 0 if seeded else ddp.rank()
    mine = ddp.split(len(labels), fractions, by=labels, seed=seed)
    everyones = [None] * ddp.world_size()
    dist.all_gather_object(everyones, mine)
    return everyones


def mixed(seeded):
    """How many images one rank trains on, and another or the same one judges."""
    given = {"labels": images.labels, "fractions": split["fractions"], "seeded": seeded}
    done = ddp.launch(client, splits_of_all, **given, workers=2, directory=False)
    trained = np.concatenate([training for training, _, _ in done.result])
    judged = np.concatenate([rows for _, *others in done.result for rows in others])
    return len(set(trained) & set(judged))


assert mixed(seeded=True) == 0
assert len({*training, *validation, *test}) == len(images)
assert not {*validation} & {*test}
print("this seed on both ranks: no image is trained on and judged, and none is lost")
assert mixed(seeded=False) > 0
print("a seed for each rank: caught, one trains on what the other judges")

# %% [markdown]
# ### Each image counts once
#
# In training all ranks make equally many steps. So `DistributedSampler` gives them
# equally many samples. If these do not divide, it *pads*: it deals some of them twice.
# In an evaluation they would count twice.


# %% tags=["proof"]
padded = [
    list(DistributedSampler(range(20), num_replicas=3, rank=rank, shuffle=False))
    for rank in range(3)
]
guesses = sum(map(len, padded))
assert len(set(sum(padded, []))) == 20 < guesses
print(f"DistributedSampler: {guesses} guesses for 20 images (you: {my_prediction})")

judged_rows = sorted(row for mine in everyones_guesses for row in mine)
assert judged_rows == sorted(validation)
assert matrix.trace() == sum(targets[row] == guess for row, guess in guess_of.items())
print(f"EvalSampler: {len(validation)} validation images, each judged once")

# %% [markdown]
# ## 10. Exercises
#
# A check runs your function on random inputs. It prints `right`, or `not yet` with a
# question.
#
# ### Exercise A · The header of a job (12 minutes)
#
# On a Slurm cluster you want to run `srun python train.py`: *one* job, in which `srun`
# starts all ranks. `site` has your account, and the time limit of each *partition*
# (Slurm's word for a queue) in minutes. `need` is what the job needs: ranks, CPUs for
# each rank, GiB of memory for each CPU, minutes. Slurm is to send the ranks SIGTERM,
# the signal that asks a process to end, `warning` seconds before the limit. An example:
#
# ```python
# site = {"account": "project_1234", "partitions": {"long": 4320, "short": 60}}
# need = {"ranks": 4, "cpus": 2, "memory": 3, "minutes": 95, "warning": 120}
# ```
#
# **Goal.** Return the first lines of the script, as a str: `#!/bin/bash`, then lines
# that begin with `#SBATCH`. Take the partition with the smallest limit that is large
# enough, and the time that the job needs: short jobs often start sooner. The check
# accepts up to twice the time and the memory, and no other options.
#
# | option | meaning |
# |---|---|
# | `--account`, `--partition` | who pays; which queue |
# | `--ntasks`, `--cpus-per-task` | ranks; CPUs for each |
# | `--mem-per-cpu` | memory for each CPU; a number alone is in MiB |
# | `--time` | the limit: `minutes` or `hours:minutes:seconds` |
# | `--signal` | `TERM@300`: SIGTERM, 300 seconds before the limit |
#
# <details><summary>Hint</summary>
#
# For the partition, `min(…, key=…)` of those that are large enough. `B:` in `--signal`
# warns only the shell.
# </details>


# %% tags=["exercise", "solution"]
def my_header(site, need):
    """The header of a job script: from #!/bin/bash to the last #SBATCH line, a str."""
    # your code
    limits = site["partitions"]
    enough = [name for name in limits if limits[name] >= need["minutes"]]
    return f"""#!/bin/bash
#SBATCH --account={site["account"]}
#SBATCH --partition={min(enough, key=limits.get)}
#SBATCH --ntasks={need["ranks"]}
#SBATCH --cpus-per-task={need["cpus"]}
#SBATCH --mem-per-cpu={need["memory"]}G
#SBATCH --time={need["minutes"]}
#SBATCH --signal=TERM@{need["warning"]}
"""
    # end of your code


# %% tags=["exercise"]
judge(checks.header, my_header)

# %% [markdown]
# ### Exercise B · The log of a job that has ended (9 minutes)
#
# This job ended at its time limit. The last two lines are Slurm's:
#
# ```
# job 70223: 2 ranks on node14
# Resumed from step-00000240.pt
# step 300: epoch 5 done, saved
# memory in use: 3.1 of 6.0 GiB
# step 360: epoch 6 done, saved
# step 402: loss 0.718
# slurmstepd: error: *** STEP 70223.0 ON node14 CANCELLED AT … DUE TO TIME LIMIT ***
# srun: error: node14: task 0: Terminated
# ```
#
# `STEP 70223.0` is what `srun` has started, no training step. If a person cancels a
# job, `DUE TO TIME LIMIT` is missing. If a job is killed for its memory, a line with
# `OOM Killed` is before the `CANCELLED` line. If it is done, the last line is
# `Done: the weights are saved`. Ranks that are warned of the limit say
# `SIGTERM: all ranks left after step 402, saved`. Such a log has no `TIME LIMIT`; in
# these logs nothing else sends SIGTERM.
#
# **Goal.** From the text of such a log return the cause (`"finished"`, `"time limit"`,
# `"memory"` or `"cancelled"`), and how many steps were trained in vain: the next job
# goes on from the last step that was saved, by this job or by the one it `Resumed`.
# Here it is `("time limit", 42)`.
#
# <details><summary>Hint</summary>
#
# `re.search(r"step[ -](\d+)", line)` finds the step of a line that has one. Keep the
# last step of all, and the last one in a line with `saved` or `Resumed`.
# </details>


# %% tags=["exercise", "solution"]
def my_reading(log):
    """(cause, number of steps that were trained in vain)."""
    # your code
    cause = "cancelled"
    if "Done" in log:
        cause = "finished"
    if "TIME LIMIT" in log or "SIGTERM" in log:
        cause = "time limit"
    if "OOM Killed" in log:
        cause = "memory"
    last = saved = 0
    for line in log.splitlines():
        if found := re.search(r"step[ -](\d+)", line):
            last = int(found[1])
            saved = last if "saved" in line or "Resumed" in line else saved
    return cause, last - saved
    # end of your code


# %% tags=["exercise"]
judge(checks.log, my_reading)

# %% [markdown]
# ## 11. Break it: the time limit
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
    short = recipe | {"epochs": 1, "images": images}
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
print(f"so two ranks that are warned go on: 'on' (you: {my_second_prediction!r})")

# %% [markdown]
# A killed run loses the steps since its last checkpoint. So save now and then
# **without** a warning, too: nodes fail.
#
# ## 12. The test, once
#
# Do the eight views help? Another seed draws other initial weights and another order.
# So we train with and without them, with several seeds each, and on one rank: DDP is
# for one large training, not for many small ones.


# %% tags=["lesson"]
def train_alone(name):
    """Train a recipe, (views, seed), on one rank: the weights of its best epoch."""
    views, seed = name
    chosen = recipe | {"views": views, "seed": seed}
    done = ddp.launch(
        client, train, images=images, **chosen, workers=1, directory=False
    )
    return done.result["weights"]


recipes = [(views, seed) for views in (True, False) for seed in range(settings.seeds)]
with ThreadPoolExecutor(run.world_size) as at_once, redirect_stdout(StringIO()):
    candidates |= dict(zip(recipes, at_once.map(train_alone, recipes)))

# %% [markdown]
# All choices are made. Now the test images are judged, in this cell and no other, and
# nothing is chosen after it. To run the notebook again is to look again.
#
# The *interval* says how different the accuracy may be on other images of the same
# kind. Wilson's is a little too wide for a stratified test set, which is the safe side.


# %% tags=["nbval-ignore-output"]
def wilson(right):
    """The 95 % interval of an accuracy; `right` says of each image if it was right."""
    return binomtest(int(right.sum()), len(right)).proportion_ci(method="wilson")


tested = ddp.launch(
    client, evaluate_all, candidates=candidates, rows=test, **given
).result
right = {}  # of each candidate: for each image of `test`, whether it was judged rightly
for name, (_, everyones) in tested.items():
    guesses = {row: guess for mine in everyones for row, guess in mine.items()}
    right[name] = np.array([guesses[row] == targets[row] for row in test.tolist()])

test_scenes, test_labels = load(images, test)
right["linear"] = (linear(normalized(test_scenes)).argmax(1) == test_labels).numpy()
model_file = {"weights": best["weights"], "network": settings.network}
torch.save({**model_file, "classes": images.classes}, run.directory / "model.pt")

print(f"Accuracy on {len(test)} test images ({dataset.origin}), with a 95 % interval")
print(f"  the largest class {np.bincount(targets).max() / len(images):6.1%}")
for title, name in (("linear on pixels", "linear"), (settings.network, "main")):
    low, high = wilson(right[name])
    print(f"  {title:17} {right[name].mean():6.1%}   {low:.1%} to {high:.1%}")
print(f"  (validation, which chose the epoch: {best['accuracy']:.1%})")

# %% tags=["proof"]
assert sorted(row for mine in tested["main"][1] for row in mine) == sorted(test)
print(f"{len(test)} test images, each judged once")
as_written = {"data": "shipped", "network": "small", "size": 64, "learning_rate": 1e-2}
if settings.epochs >= 5 and as_written.items() <= vars(settings).items():
    assert wilson(right["main"]).low > wilson(right["linear"]).high
    print("the interval of the network is above that of the linear model")

# %% [markdown]
# ### A table over seeds
#
# The accuracy above is about one file, `model.pt`, from all ranks. For the *recipe*
# (these settings, any seed) report the mean over seeds: to take the best seed is one
# more choice. The table's networks had one rank each, so batch normalisation saw other
# shares.
#
# The interval above is about chance in the *images*, for one network. The intervals
# here are about chance in the *training*, on these images, by Student's *t*. They hold
# for the *mean* of many trainings: a single one may lie outside.


# %% tags=["lesson", "nbval-ignore-output"]
table = pd.DataFrame(
    {
        title: [100 * right[views, seed].mean() for seed in range(settings.seeds)]
        for title, views in (("eight views", True), ("as it is", False))
    },
    index=[f"seed {seed}" for seed in range(settings.seeds)],
)
table["difference"] = table["eight views"] - table["as it is"]
print(f"one file, model.pt, from {run.world_size} ranks: {right['main'].mean():.1%}")
print("the recipe, from 1 rank: test accuracy in percent, over training seeds")
print(table.round(1).to_string())
if settings.seeds > 1:
    for title in table:
        mean, low, high = interval(table[title])
        print(f"{title:12} mean {mean:5.1f}, 95 % interval {low:.1f} to {high:.1f}")
    print("told apart:", not low <= 0 <= high)  # of the difference, the last of them

# %% [markdown]
# Do the views help? If the interval of the difference contains 0, the recipes are *not
# told apart*: the interval says how much the views may cost or bring. No interval here
# is about another split, city or camera. Tiles of one large photograph are not
# independent: split by photograph.
#
# ## 13. Recap
#
# **How do I get a job through the queue?** Ask in its header for what it needs, and no
# more. Have it warned before its limit, let it save, and go on in the next job.
#
# **How do I report its accuracy honestly?** Choose with validation images, and look at
# the test set once. Count each image once. Give the baseline, an interval, and the mean
# over several seeds.
#
# **Next:** `dogs`: does more hardware make a better model, or only a faster one?
#
# **Read.** The manuals of [sbatch](https://slurm.schedmd.com/sbatch.html) and
# [KillWait](https://slurm.schedmd.com/slurm.conf.html#OPT_KillWait). He et al., [Deep
# residual learning](https://arxiv.org/abs/1512.03385).

# %%
client.close()
