# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # UC Merced: a batch system, and an honest evaluation
#
# **Question.** How do I train on a batch system, and how do I evaluate honestly?
#
# **Afterwards you can**
# - write the header of a job script for a site, and say why a job ended from its log;
# - say what a time limit costs, and what `RESTARTS` does about it;
# - split images into three sets, the same on every rank, and *prove* that they stay
#   apart;
# - evaluate on several ranks so that every image counts once;
# - report an accuracy with its baseline, its interval and its training seeds, and say
#   when two networks have not been told apart.
#
# **You need** the tutorials `mnist` and `pets`: *rank*, *collective*, *checkpoint*,
# *worker*, *profile*. No GPU, no network, nothing is downloaded.
#
# **Time:** 75 minutes in class, of which 1 to 2½ minutes of computing on two cores.
# **Data:** scenes from above, drawn by the repository.

# %% [markdown] tags=["instructor"]
# **Instructor.** Minutes: card 2, set-up 3, data 5, one rank 5, predict 3, what changes
# 11, on Dask 7, proofs 10, exercises 20, break it 6, recap 3. Sum: 75. The stretch
# exercise and the appendices come on top.
#
# Ask first: who knows of an accuracy that had to be taken back? What was wrong with it?
# Keep the answers on the board. Most come back in sections 6, 8 and 9.
#
# **If you are late:** leave out the pictures of the worst confusion, and part c of
# exercise 2. Never leave out part a. A class with accounts on a cluster does exercise 2
# in a terminal there, and submits its own header: plan 20 minutes more.

# %% [markdown]
# ## 2. Set-up and preflight
#
# All settings stand here. `make run TUTORIAL=ucmerced SET="epochs=20"` changes one of
# them. `PRESET=full` is for GPUs: real photographs, nearly at full size, and a
# ResNet101, the network of the experiment that this tutorial goes back to.

# %%
import json
import math
import os
import re
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from io import StringIO

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchvision
from distributed import Event
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import Dataset, DistributedSampler, Subset, default_collate
from torchvision.models.resnet import BasicBlock
from torchvision.transforms import v2

import ddp_common as ddp
from ddp_common.clusters.connect import describe
from ddp_common.teaching import batch_jobs

# %% tags=["parameters"]
settings = ddp.settings(
    "ucmerced",
    data="shipped",  # or "full" after `make data`, a folder, or s3://bucket/prefix
    anonymous=False,  # True: read a public s3:// bucket without credentials
    on_error="raise",  # at an image that cannot be decoded; "skip": leave it out
    network="small",  # or a ResNet of torchvision, such as "resnet18"
    views=True,  # train on a random one of the eight views of each scene
    size=64,  # pixels: images are scaled to size x size
    epochs=5,
    batch_size=32,  # of all ranks together
    learning_rate=1e-2,  # at its peak
    held_out=0.15,  # the share of each class for validation, and as much for the test
    split_seed=0,  # draws the three sets
    seed=0,  # draws the initial weights and the order of the images
    seeds=5,  # training seeds in the comparison of section 8
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

# %% tags=["nbval-ignore-output"]
client = ddp.connect()
dataset = ddp.fetch("ucmerced", settings.data)
backend = "nccl" if torch.cuda.is_available() else "gloo"
print(f"torch {torch.__version__} · {backend} · {client.ranks} ranks · {dataset.title}")
print(f"{dataset.origin} · licence: {dataset.licence}")

# %% [markdown]
# ## 3. The data
#
# The UC Merced set has 21 classes of land use, with 100 aerial photographs each. What
# you see by default is *not* that set. These scenes are drawn by a program, so that
# nothing has to be downloaded. Numbers reached on them say nothing about photographs.
#
# The class of an image is the name of its folder. `ImageFolder` lists the files once;
# the ranks get the list and read the images themselves.

# %%
images = ddp.ImageFolder(
    dataset.path,
    settings.size,
    cache="memory",
    anonymous=settings.anonymous,
    on_error=settings.on_error,
)
classes = len(images.classes)
print(f"{len(images):,} images of {classes} classes, scaled to {settings.size} pixels")


# %% tags=["lesson"]
def show(figure, alt):
    """Show a figure, with a sentence for those who cannot see it."""
    from IPython.display import display  # a notebook has it; a batch job may not

    display(figure, metadata={"image/png": {"alt": alt}})
    plt.close(figure)


# %% tags=["lesson"]
figure, panels = plt.subplots(3, 7, figsize=(9.5, 4.6))
for axes in panels.flat:
    axes.axis("off")
for axes, name in zip(panels.flat, images.classes):
    first = images.targets.index(images.classes.index(name))
    axes.imshow(images[first][0].permute(1, 2, 0))
    axes.set_title(name, fontsize=8)
figure.suptitle(f"One scene of each class ({dataset.origin})")
show(
    figure,
    "A grid of small aerial scenes, one for each class, with the name of its class "
    "above: fields, an aeroplane, a beach, buildings, a forest, a harbour and others.",
)

# %% [markdown]
# ### Three sets, three purposes
#
# The network learns from the *training* set. The *validation* set chooses: the epoch to
# keep, the learning rate, the recipe. Whatever chooses has been looked at, so its
# accuracy can be expected to flatter. The *test* set is judged once in a study, by one
# cell in section 8, and nothing is chosen after it. To run this notebook again is to
# look again, and others have looked before you: for a study of your own, take another
# `split_seed`.
#
# Each set gets its share of every class: it is *stratified*. The split follows from the
# labels and a seed alone. So every rank can compute it, and all get the same.


# %%
def split_rows(images, held_out, seed):
    """The rows of `images` for training, validation and test.

    Raises ddp.Error for a class that is too small to be in all three.
    """
    counts = np.bincount(images.targets)
    if counts.min() < 3:
        raise ddp.Error(
            f"The class {images.classes[counts.argmin()]!r} has {counts.min()} "
            "image(s). Training, validation and test need one each: "
            "add images, or remove its folder."
        )
    return ddp.split(len(images), [held_out, held_out], by=images.targets, seed=seed)


split = {"held_out": settings.held_out, "seed": settings.split_seed}
training, validation, test = split_rows(images, **split)
print(f"{len(training):,} images to learn from, {len(validation):,} to choose by")

# %% [markdown]
# What can so many test images tell? The standard error of an accuracy $p$ from $n$
# images is $\sqrt{p(1-p)/n}$, at most $0.5/\sqrt{n}$. It can be known before training:


# %%
def what_it_can_tell(targets, test):
    """What the test images allow to conclude, and what not: a list of sentences."""
    counts = np.bincount(np.asarray(targets)[test])
    least = counts.min()
    error = 0.5 / len(test) ** 0.5
    said = [f"{len(test):,} test images: the standard error is at most {error:.1%}"]
    said.append(f"as few as {least} of a class: one is {1 / least:.0%} of its recall")
    if least < 20:
        said.append("so do not rank single classes by their recall")
    if len(test) < 100:
        said.append("so few images tell only very different networks apart")
    if counts.max() > 2 * least:
        said.append("classes differ in size: look at the recall of the small ones, too")
    return said


print(*what_it_can_tell(images.targets, test), sep="\n")

# %% [markdown]
# ## 4. One rank first
#
# A plain loop, in this process, with the simplest model: one linear layer on the
# pixels. It is the *baseline*. A network that does no better has not shown more
# than that it knows which colours lie where. A baseline deserves the same care as the
# network: validation chooses its epoch, too, and even its learning rate.


# %%
def normalized(scenes):
    """Bytes (n, 3, size, size) as floats around zero, about as wide as photographs'."""
    return (scenes.float() / 255 - 0.45) / 0.22


def load(rows):
    """The scenes and labels at these rows, as two tensors."""
    return default_collate(images.__getitems__(rows))


torch.set_num_threads(1)  # one core, as a rank has later
scenes, labels = load(training)
validation_scenes, validation_labels = load(validation)


# %%
def train_linear(learning_rate, epochs=8):
    """A linear model on pixels: (validation accuracy, its weights, losses).

    The weights are those of the epoch with the highest validation accuracy.
    """
    torch.manual_seed(settings.seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(scenes[0].numel(), classes))
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    best, losses = (-1.0, {}), []
    for _ in range(epochs):
        for batch in torch.randperm(len(scenes)).split(32):
            loss = F.cross_entropy(model(normalized(scenes[batch])), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        with torch.no_grad():
            guesses = model(normalized(validation_scenes)).argmax(1)
        accuracy = (guesses == validation_labels).float().mean().item()
        if accuracy > best[0]:
            weights = {name: each.clone() for name, each in model.state_dict().items()}
            best = accuracy, weights
    return *best, losses


baselines = {rate: train_linear(rate) for rate in (1e-4, 3e-4, 1e-3)}
rate = max(baselines, key=lambda rate: baselines[rate][0])
baseline_accuracy, baseline_weights, losses = baselines[rate]

# %% tags=["lesson"]
figure, axes = plt.subplots(figsize=(6, 2.6))
axes.plot(losses, linewidth=0.8)
blind = np.log(classes)
axes.axhline(blind, color="grey", linestyle="--", label=f"a blind guess: ln {classes}")
axes.set(xlabel="step", ylabel="loss (nats)", title="One process, a linear model")
axes.set_ylim(0, np.quantile(losses, 0.99) * 1.1)
axes.legend()
show(
    figure,
    "The training loss of a linear model against the step, in one process. It begins "
    "near or above the dashed line of a blind guess and falls, with much noise.",
)

# %% tags=["nbval-ignore-output"]
print(f"linear on pixels: {baseline_accuracy:.1%} of the validation images")

# %% [markdown]
# ## 5. Predict
#
# **First.** Three ranks evaluate 20 test images. PyTorch's `DistributedSampler` deals
# them. How many judgements does the confusion matrix hold: 18, 20 or 21?
#
# **Second.** A run needs 90 minutes. Its jobs end after 60, and you have said
# `RESTARTS=1`. What happens near the end of the first hour?
#
# - `"error"`: the run ends. What it has learned since the last checkpoint is lost.
# - `"anew"`: it starts again from the first epoch.
# - `"on"`: ranks save before the limit, and go on in new jobs; hardly a step is lost.
#
# **Write your predictions before you go on.** Sections 8 and 10 score them.

# %% tags=["lesson"]
my_count = None  # 18, 20 or 21
my_restart = None  # "error", "anew" or "on"

# %% [markdown] tags=["instructor"]
# **Instructor.** Expected: 20 and 'error'. Ask those who say 'error' what a program
# would need to know to do better: when its job ends, and where to write.

# %% [markdown]
# ## 6. What changes
#
# ### Evaluation on several ranks
#
# Training averages *gradients*. Evaluation sums *counts*. Each rank judges its share of
# the images. It notes in a matrix how often a scene of class *i* (row) was taken for
# class *j* (column). One `all_reduce` adds up the matrices. Everything else follows
# from the sum: accuracy, precision, recall. To average the ranks' *accuracies* would be
# wrong as soon as their shares differ.
#
# | line | why |
# |---|---|
# | `ddp.EvalSampler` | every image goes to exactly one rank; a rank may get none |
# | `model.eval()` | batch normalisation uses fixed statistics |
# | `model.module`, in `train` | the DDP wrapper would talk to the other ranks |
# | `share_buffers(model)` | all ranks judge with the *same* model |
#
# **Why share buffers?** Batch normalisation keeps running averages, which are *buffers*
# of the model. DDP averages gradients. Before each training step it copies the buffers
# of rank 0 to all, but not after the last one. So between training and evaluation the
# ranks' buffers differ. Appendix A measures it.


# %%
def share_buffers(model):
    """Give all ranks the buffers of rank 0: batch normalisation's running averages."""
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)


@torch.no_grad()
def evaluate(model, images, rows, batch_size=64):
    """Judge the images at `rows`, each on one rank.

    Returns the confusion matrix of all ranks, and {row: guess} of this one.
    """
    size, guesses = len(images.classes), {}
    device = next(model.parameters()).device
    matrix = torch.zeros(size, size, dtype=torch.long, device=device)
    if dist.is_initialized():
        share_buffers(model)
    model.eval()
    for batch in ddp.EvalSampler(len(rows), batch_size):
        scenes, labels = default_collate(images.__getitems__(rows[batch]))
        guess = model(normalized(scenes.to(device))).argmax(1)
        pairs = torch.bincount(labels.to(device) * size + guess, minlength=size**2)
        matrix += pairs.reshape(size, size)
        guesses.update(zip(rows[batch].tolist(), guess.tolist()))
    if dist.is_initialized():
        dist.all_reduce(matrix)
    return matrix.cpu(), guesses


# %% [markdown]
# ### The network
#
# `small` is a ResNet that a laptop trains in seconds: three residual blocks. Others are
# torchvision's, with one output for each class, not the 1,000 of ImageNet. All start
# from random weights.


# %%
def small_resnet(classes, widths=(16, 32, 64, 128)):
    """A ResNet with one residual block for each width but the first."""
    stem = nn.Conv2d(3, widths[0], 3, stride=2, padding=1, bias=False)
    layers = [stem, nn.BatchNorm2d(widths[0]), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    for before, after in zip(widths, widths[1:]):
        shortcut = nn.Conv2d(before, after, 1, stride=2, bias=False)
        shortcut = nn.Sequential(shortcut, nn.BatchNorm2d(after))
        layers.append(BasicBlock(before, after, stride=2, downsample=shortcut))
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], classes)]
    return nn.Sequential(*layers)


def make_network(name, classes):
    """The network of this name, not trained. Raises ddp.Error for an unknown one."""
    if name == "small":
        return small_resnet(classes)
    models = torchvision.models.list_models()
    known = [each for each in models if each.startswith("resnet")]
    if name not in known:
        there = ", ".join([*known, "small"])
        raise ddp.Error(f"There is no network {name!r}. There is: {there}.")
    return torchvision.models.get_model(name, weights=None, num_classes=classes)


weights = make_network(settings.network, classes).parameters()
count = sum(weight.numel() for weight in weights)
print(f"{settings.network}: {count:,} weights, {classes} outputs")

# %% [markdown]
# ### The training function
#
# A view from above has no top. Flipped and transposed, a scene is as good as before
# (but for its shadows): eight views. `ddp.DataLoader` sets the random state from (seed,
# epoch, image) before an image is read, so its view does not depend on the number of
# ranks. Compared with the plain loop:
#
# | line | why |
# |---|---|
# | `ddp.ElasticSampler`, `DDP(…)`, `* sampler.weight` | as in `pets` |
# | `training, validation, _` | the test set is not even given a name here |
# | `memory_format=…` | the channels of a pixel side by side: convolutions are quicker |
# | `evaluate(…)` on all ranks | all get one matrix, and agree which epoch is best |
# | `best` in the checkpoint | a resumed run still knows what validation has chosen |
# | `checkpoint.save()` after each epoch | a killed job loses less than an epoch |


# %%
class Best:
    """The weights of the epoch with the highest validation accuracy so far."""

    def __init__(self):
        self.accuracy, self.epoch, self.weights = -1.0, -1, {}

    def offer(self, accuracy, epoch, model):
        if accuracy >= self.accuracy:  # of equals the later: it has learned longer
            self.accuracy, self.epoch = accuracy, epoch
            weights = model.state_dict().items()
            self.weights = {name: each.cpu().clone() for name, each in weights}

    def state_dict(self):
        return vars(self)

    def load_state_dict(self, state):
        self.__dict__.update(state)


def rise_and_fall(progress):
    """The share of the learning rate to use after `progress` (0 to 1) of all steps."""
    if progress < 0.25:
        return 0.04 + 0.96 * progress / 0.25
    return 0.5 + 0.5 * math.cos(math.pi * min((progress - 0.25) / 0.75, 1))


mirror = [v2.RandomHorizontalFlip(), v2.RandomVerticalFlip()]
eight_views = v2.Compose([*mirror, v2.RandomApply([v2.Lambda(lambda image: image.mT)])])


class Views(Dataset):
    """Scenes, each from a side drawn at random."""

    def __init__(self, scenes):
        self.scenes = scenes

    def __len__(self):
        return len(self.scenes)

    def __getitem__(self, index):
        scene, label = self.scenes[index]
        return eight_views(scene), label


# %%
def train(images, split, network, views, epochs, batch_size, learning_rate, seed):
    """Train on this rank's share of each batch; returns what validation has chosen."""
    device = ddp.device()
    torch.manual_seed(seed)  # the same initial weights on all ranks
    training, validation, _ = split_rows(images, **split)
    sampler = ddp.ElasticSampler(len(training), batch_size, seed=seed)
    data = Subset(images, training)
    if views:
        data = Views(data)
    loader = ddp.DataLoader(data, batch_sampler=sampler)
    net = make_network(network, len(images.classes))
    model = DDP(net.to(device, memory_format=torch.channels_last))
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    steps = epochs * len(sampler)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: rise_and_fall(step / steps)
    )
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
    return best.state_dict()


# %% [markdown] tags=["instructor"]
# **Instructor · 11 minutes.** Evaluation 6, network 1, training function 4. Ask at
# `share_buffers`: which rank's model is saved? (Rank 0's. So all should judge with that
# one.) Expected wrong answer at `best`: 'only rank 0 needs the matrix'. Then the ranks
# would disagree which weights are best.

# %% [markdown]
# ## 7. On Dask, and in a queue
#
# `launch` starts a rank on each worker, as in `pets`.

# %% tags=["nbval-ignore-output"]
names_of_arguments = "network views epochs batch_size learning_rate seed".split()
hyperparameters = {name: getattr(settings, name) for name in names_of_arguments}
hyperparameters["split"] = split
run = ddp.launch(client, train, images=images, **hyperparameters)
best = run.result
candidates = {"main": best["weights"]}  # what the test of section 8 will judge


# %%
def plot_training(metrics):
    """The mean loss of the ranks every 10 steps; the accuracy after each epoch."""
    steps = metrics[metrics["loss"].notna()]
    loss = steps.groupby(steps["step"] // 10 * 10)["loss"].mean()
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3))
    left.plot(loss, color="black")
    ranks = steps["rank"].nunique()
    left.set(xlabel="step", ylabel="loss (nats)", title=f"Mean of {ranks} rank(s)")
    left.set_ylim(0)
    accuracies = metrics.groupby("epoch")["validation_accuracy"].max()
    right.plot(accuracies.index + 1, accuracies, marker="o")
    kept = accuracies[::-1].idxmax() + 1
    right.axvline(kept, color="grey", linestyle="--", label="the epoch that is kept")
    right.set(xlabel="epoch", ylabel="accuracy", title="Validation", ylim=(0, 1))
    right.xaxis.get_major_locator().set_params(integer=True)
    right.legend(loc="lower right")
    figure.tight_layout()
    return figure


figure = plot_training(run.metrics)
run.save_figure(figure, "training.png")
plt.close(figure)

# %% tags=["lesson"]
show(
    figure,
    "Two panels. Left: the mean training loss of the ranks, against the step. Right: "
    "the validation accuracy after each epoch; a dashed line marks the kept epoch.",
)

# %% [markdown]
# ### The same in a queue
#
# On a batch system nobody may simply start a process. You hand in a *job*: a script
# with what it needs. The queue starts it when there is room, and kills it at its *time
# limit*. `make run TUTORIAL=ucmerced CLUSTER=slurm WORKERS=4` hands in one job for each
# worker; not a line of this file changes. `DRY=1` prints the script and submits
# nothing, also where there is no Slurm:

# %% tags=["lesson"]
script = describe("slurm", workers=4, tutorial="ucmerced")
print("\n".join(line for line in script.splitlines() if line.startswith("#SBATCH")))

# %% [markdown]
# Lines that begin with `#SBATCH` are the *header*: Slurm reads them, bash does not.
# They come from the profile `clusters/slurm.yaml`. `OPTIONS="queue=gpu account=abc"`
# changes them for once. Appendix C has PBS, and sites where nothing may run on the
# login node.
#
# **The log to watch** is `log.txt` in the run directory, on a cluster as here. In a
# terminal: `tail -f runs/ucmerced/*/log.txt`. What a *job* says, Slurm's own last words
# among it, is in `runs/clusters/…`: look there when a run ends and its log does not say
# why.

# %% tags=["lesson", "nbval-ignore-output"]
print("\n".join((run.directory / "log.txt").read_text().splitlines()[:8]))

# %% [markdown]
# ### What is taken for what
#
# Errors are analysed on *validation* images. Who looks at test images and then changes
# something has used them to choose.


# %%
def judge(images, network, weights, rows):
    """Evaluate a network with these weights.

    Returns the confusion matrix, and the {row: guess} of every rank.
    """
    model = make_network(network, len(images.classes))
    model.load_state_dict(weights)
    matrix, guesses = evaluate(model.to(ddp.device()), images, rows)
    everyones = [None] * ddp.world_size()
    dist.all_gather_object(everyones, guesses)
    return matrix, everyones


arguments = {"images": images, "network": settings.network, "weights": best["weights"]}
judged = ddp.launch(
    client, judge, **arguments, rows=validation, directory=run.directory
)
matrix, everyones_guesses = judged.result


# %%
def plot_confusions(matrix, names):
    """The confusion matrix: rows in shares of their class, mistakes as counts."""
    side = max(4.0, 0.36 * len(names))
    figure, axes = plt.subplots(figsize=(side, side))
    shares = matrix / matrix.sum(1, keepdim=True).clamp(min=1)
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    for row, column in matrix.nonzero().tolist():
        if row != column:
            count = matrix[row, column].item()
            place = {"ha": "center", "va": "center", "fontsize": 8}
            axes.text(column, row, count, color="firebrick", **place)
    axes.set_xticks(range(len(names)), names, rotation=90, fontsize=8)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    title = f"Validation: {matrix.trace()} of {matrix.sum()} are right; mistakes in red"
    axes.set(xlabel="taken for", ylabel="is", title=title)
    return figure


figure = plot_confusions(matrix, images.classes)
run.save_figure(figure, "confusion.png")
plt.close(figure)

# %% tags=["lesson"]
show(
    figure,
    "The confusion matrix of the validation images as a picture: a row for each class, "
    "a column for each class that it was taken for. The diagonal is dark where a class "
    "is recognised; red counts beside it are mistakes.",
)

# %% [markdown]
# *Precision* of a class: of all scenes taken for it, how many are. *Recall*: of all
# scenes that are, how many were found. A class that the network names too readily has
# high recall and low precision.


# %%
def per_class(matrix, names):
    """Precision, recall and number of images of each class, the lowest recall first."""
    right = matrix.diagonal().double()
    columns = {
        "precision": right / matrix.sum(0).clamp(min=1),
        "recall": right / matrix.sum(1).clamp(min=1),
        "images": matrix.sum(1),
    }
    table = pd.DataFrame(columns, index=names)
    return table.sort_values("recall", kind="stable")


quality = per_class(matrix, images.classes)
quality.to_csv(run.directory / "per_class.csv")
mistakes = matrix - torch.diag(matrix.diagonal())
worst = divmod(int(mistakes.argmax()), classes)  # the number of a class, and of another

# %% tags=["nbval-ignore-output"]
print(quality.head(4).round(2).to_string())
of, taken_for = (images.classes[number] for number in worst)
count, all_of_it = mistakes[worst].item(), matrix.sum(1)[worst[0]].item()
if count:
    print(f"most often: {of} taken for {taken_for}, {count} of {all_of_it} times")
    print(f"(the largest of {classes * (classes - 1)} counts: in part by chance)")


# %%
def plot_worst(wrong, like, titles):
    """Validation images of the worst confusion, above training images of that class."""
    figure, panels = plt.subplots(2, 6, figsize=(9, 3.4))
    for axes in panels.flat:
        axes.axis("off")
    for line, rows, title in zip(panels, (wrong, like), titles):
        for axes, row in zip(line, rows):
            axes.imshow(images[row][0].permute(1, 2, 0))
        line[0].set_title(title, loc="left", fontsize=10)
    return figure


guess_of = {row: guess for mine in everyones_guesses for row, guess in mine.items()}
targets = images.targets
pairs = {row: (targets[row], guess) for row, guess in sorted(guess_of.items())}
wrong = [row for row, pair in pairs.items() if pair == worst]
like = [row for row in training if targets[row] == worst[1]]
titles = f"is {of}, taken for {taken_for}", f"is {taken_for} (training)"
figure = plot_worst(wrong, like, titles)
run.save_figure(figure, "worst.png")
plt.close(figure)

# %% [markdown]
# Never stop at the table. Look at the images. Would you have known?

# %% tags=["lesson"]
show(
    figure,
    "Two rows of scenes. Above: validation images of the most frequent confusion. "
    "Below: training images of the class that they were taken for.",
)

# %% [markdown] tags=["instructor"]
# **Instructor · 7 minutes.** Two for the run, two for the queue, three for the
# confusions. Ask: may we now throw out a class that is hardly recognised? (On
# validation images, yes, if the report says so. After the test, no.)

# %% [markdown]
# ## 8. Proofs and evidence
#
# ### No rank mixes the sets
#
# Each rank splits for itself, and sends what it got. Unseeded, each would get another
# split. Then the test images of one are trained on by another.


# %% tags=["lesson"]
def splits_of_all(images, held_out, seeded):
    """The three sets of rows on every rank: a list of lists of arrays."""
    seed = 0 if seeded else int.from_bytes(os.urandom(4))
    everyones = [None] * ddp.world_size()
    dist.all_gather_object(everyones, split_rows(images, held_out, seed))
    return everyones


def check_disjoint(everyones, samples):
    """Raise AssertionError if a rank judges what a rank trains on, or a row is lost."""
    trained = set(np.concatenate([training for training, _, _ in everyones]))
    judged = set(np.concatenate([rows for _, *others in everyones for rows in others]))
    both = len(trained & judged)
    assert not both, f"{both} images are trained on by one rank and judged by another"
    assert len(trained) + len(judged) == samples, "an image is in no set"
    assert not {*everyones[0][1]} & {*everyones[0][2]}, "validation and test overlap"


# %% tags=["proof"]
for seeded in (True, False):
    given = {"images": images, "held_out": settings.held_out, "seeded": seeded}
    everyones = ddp.launch(client, splits_of_all, **given, workers=2).result
    try:
        check_disjoint(everyones, len(images))
        print("one seed: three sets, disjoint on all ranks, and no image is lost")
    except AssertionError:
        assert not seeded
        print("unseeded: caught, one rank trains on what another judges")

# %% [markdown]
# ### Every image counts once
#
# `DistributedSampler` gives all ranks equally many samples, which training needs. Where
# they do not divide, it *pads*: it deals some images a second time. In an evaluation
# these count twice.


# %% tags=["lesson"]
def dealt_for_the_test(samples, padded):
    """The samples that each rank would judge: a list of lists."""
    if padded:  # from the museum of faults
        mine = list(DistributedSampler(range(samples), shuffle=False))
    else:
        mine = sum(ddp.EvalSampler(samples, 64), [])
    everyones = [None] * ddp.world_size()
    dist.all_gather_object(everyones, mine)
    return everyones


def check_counted_once(everyones, rows):
    """Raise AssertionError unless the ranks together judge each of `rows` once."""
    seen = sorted(row for mine in everyones for row in mine)
    once = seen == sorted(rows)
    assert once, f"{len(seen)} judgements of {len(set(seen))} images"


# %% [markdown]
# Three ranks need a third worker. A Dask cluster grows while it runs.

# %% tags=["lesson"]
if client.cluster is not None and len(client.workers()) < 3:
    client.cluster.scale(3)
client.wait_for_workers(3, timeout=60)
dealt = {
    padded: ddp.launch(
        client, dealt_for_the_test, samples=20, padded=padded, workers=3
    ).result
    for padded in (True, False)
}

# %% tags=["proof"]
check_counted_once(dealt[False], range(20))
print("EvalSampler: 20 images on", len(dealt[False]), "ranks, each counted once")
try:
    check_counted_once(dealt[True], range(20))
except AssertionError as caught:
    print("DistributedSampler: caught,", caught)
else:
    raise RuntimeError("the fault went unnoticed")
padded = sum(map(len, dealt[True]))
if my_count is None:
    print(f"you have made no prediction; the padded ranks say {padded}")
else:
    print(f"your prediction was {my_count}; the padded ranks say {padded}")
check_counted_once(everyones_guesses, validation)
print(f"section 7: {len(validation)} validation images, each judged once")

# %% [markdown]
# ### The matrix of all ranks is that of one process
#
# The same weights, the same images, here in this process, where nothing is distributed.
# Batches differ, so the last bits of the scores may. An image whose two highest scores
# lie closer than that could be judged differently. No other may:


# %% tags=["lesson"]
def margins(weights, rows):
    """{row: (guess, lead of the highest score over the second)}, in this process."""
    model = make_network(settings.network, classes).eval()
    model.load_state_dict(weights)
    found = {}
    for part in np.array_split(rows, len(rows) // 64 + 1):
        with torch.no_grad():
            scores = model(normalized(load(part)[0]))
        (first, second), guesses = scores.topk(2).values.T, scores.argmax(1)
        leads = (first - second).tolist()
        found.update(zip(part.tolist(), zip(guesses.tolist(), leads)))
    return found


alone = margins(best["weights"], validation)
three = ddp.launch(client, judge, **arguments, rows=validation, workers=3).result

# %% tags=["proof"]
for some_matrix, guesses in (judged.result, three):
    for row, guess in ((row, mine[row]) for mine in guesses for row in mine):
        assert guess == alone[row][0] or alone[row][1] < 1e-3, row
    of_each_class = np.bincount(np.array(images.targets)[validation])
    assert np.array_equal(some_matrix.sum(1), of_each_class)
    again = torch.zeros_like(some_matrix)
    for row, guess in ((row, mine[row]) for mine in guesses for row in mine):
        again[images.targets[row], guess] += 1
    assert torch.equal(some_matrix, again)
print("one process, two ranks, three ranks: the same guess but for near-ties")

# %% [markdown]
# ### Two recipes, several seeds
#
# Do the eight views help? One run cannot tell: another seed draws other initial weights
# and another order, and ends elsewhere. So both recipes are trained with each seed.
# Take the difference seed by seed, and the *t* interval of the mean difference. A few
# seeds make it wide, and they should.
#
# Each training has *one* rank here, and several run at a time. DDP makes one training
# faster; for many small ones it is not needed.


# %% tags=["lesson"]
def short_training(recipe):
    """Train with (views, seed) on one rank; returns what validation has chosen."""
    views, seed = recipe
    chosen = {**hyperparameters, "views": views, "seed": seed}
    return ddp.launch(client, train, images=images, **chosen, workers=1).result


recipes = [(views, seed) for views in (True, False) for seed in range(settings.seeds)]
# What rank 0 prints is shown under the cell: not ten times
with ThreadPoolExecutor(run.world_size) as at_once, redirect_stdout(StringIO()):
    trained = dict(zip(recipes, at_once.map(short_training, recipes)))
candidates |= {recipe: result["weights"] for recipe, result in trained.items()}


# %% tags=["lesson"]
def table_of(accuracies):
    """{(views, seed): accuracy} as a table: a row for each recipe, its mean and SD."""
    table = pd.Series(accuracies).unstack()
    table.index = ["eight views" if views else "as it is" for views in table.index]
    table.columns = [f"seed {seed}" for seed in table.columns]
    means, spreads = table.mean(axis=1), table.std(axis=1)
    return 100 * table.assign(mean=means, SD=spreads)


T = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}


def over_seeds(differences):
    """What differences of two recipes, one for each seed, tell: a sentence."""
    count, mean = len(differences), differences.mean()
    if count < 2:
        return "one seed: nothing can be said about another one"
    reach = T[count] * differences.std(ddof=1) / count**0.5
    verdict = "a difference" if abs(mean) > reach else "no difference shown"
    ends = f"{mean - reach:+.1f} to {mean + reach:+.1f} points"
    return f"mean difference {mean:+.1f}, 95 % interval {ends}: {verdict}"


on_validation = {recipe: result["accuracy"] for recipe, result in trained.items()}

# %% tags=["lesson", "nbval-ignore-output"]
print("validation accuracy, in percent")
print(table_of(on_validation).round(1).to_string())
means = table_of(on_validation)["mean"]
ours = "eight views" if settings.views else "as it is"
both = [
    np.array([on_validation[v, seed] for v, seed in recipes if v == views])
    for views in (True, False)
]
print("eight views - as it is:", over_seeds(100 * (both[0] - both[1])))
if means.max() > means[ours]:
    print(
        f"Who must choose takes {means.idxmax()!r}; section 7 had {ours!r}. To follow,"
    )
    print("change `views` and begin again, *before* the test.")
else:
    print(f"Section 7 had {ours!r}, and validation asks for no other recipe.")

# %% [markdown]
# ### The test, once
#
# The recipes are chosen, the epochs are chosen. Now, and only in this cell, the test
# images are judged: by the network of section 7, by those of all seeds, and by the
# baseline.


# %%
def judge_all(images, network, candidates, rows):
    """{name: (confusion matrix, {row: guess} of every rank)} for all candidates."""
    return {
        name: judge(images, network, weights, rows)
        for name, weights in candidates.items()
    }


several = {"images": images, "network": settings.network, "candidates": candidates}
tested = ddp.launch(client, judge_all, **several, rows=test, directory=run.directory)
linear = nn.Sequential(nn.Flatten(), nn.Linear(scenes[0].numel(), classes))
linear.load_state_dict(baseline_weights)
verdicts = {name: guesses for name, (_, guesses) in tested.result.items()}
with torch.no_grad():
    guesses = linear(normalized(load(test)[0])).argmax(1)
verdicts["linear"] = [dict(zip(test.tolist(), guesses.tolist()))]


def right_ones(everyones):
    """Of each test image, in the order of `test`, whether it was judged rightly."""
    guess_of = {row: guess for mine in everyones for row, guess in mine.items()}
    return np.array([guess_of[row] == images.targets[row] for row in test.tolist()])


right = {name: right_ones(everyones) for name, everyones in verdicts.items()}

# %% [markdown]
# An accuracy is an estimate. Had the test set held other images of the same kind, it
# would be another. The *bootstrap* imitates that: draw as many images as there are,
# with replacement, and note the accuracy; do it 2,000 times. The middle 95 % of the
# results are the interval.


# %%
def interval(right, draws=2_000, seed=0):
    """The 95 % interval of an accuracy, by the bootstrap over images: (low, high).

    With fewer than ten images of one kind, right or wrong, it is Wilson's interval: no
    draw shows what was never seen, and few show what is rare.
    """
    random, size = np.random.default_rng(seed), len(right)
    if min(right.sum(), (~right).sum()) < 10:
        middle = (right.mean() + 1.96**2 / (2 * size)) / (1 + 1.96**2 / size)
        spread = right.mean() * (1 - right.mean()) / size + (0.98 / size) ** 2
        reach = 1.96 * spread**0.5 / (1 + 1.96**2 / size)
        return max(0.0, middle - reach), min(1.0, middle + reach)
    accuracies = [right[random.integers(size, size=size)].mean() for _ in range(draws)]
    low, high = np.quantile(accuracies, [0.025, 0.975])
    return low, high


model_file = {"weights": best["weights"], "network": settings.network}
torch.save({**model_file, "classes": images.classes}, run.directory / "model.pt")
frequent = np.bincount(images.targets).max() / len(images)
accuracy = right["main"].mean()

# %% tags=["nbval-ignore-output"]
print(f"Accuracy on {len(test)} test images ({dataset.origin}), with a 95 % interval")
print(f"  the largest class {frequent:6.1%}")
for title, name in (("linear on pixels", "linear"), (settings.network, "main")):
    low, high = interval(right[name])
    print(f"  {title:17} {right[name].mean():6.1%}   {low:.1%} to {high:.1%}")
print(f"  (validation, which chose the epoch: {best['accuracy']:.1%})")

# %% tags=["proof"]
check_counted_once(verdicts["main"], test)
print(f"{len(test)} test images, each judged once")
if settings.epochs >= 5 and settings.data == "shipped":
    assert interval(right["main"])[0] > interval(right["linear"])[1]
    print("the interval of the network lies above that of the linear model")

# %% [markdown]
# ### Over seeds
#
# The interval above holds chance in the *images*, for one trained network. What about
# another training seed? The networks of all seeds were judged by the same cell.

# %% tags=["lesson"]
on_test = {recipe: right[recipe].mean() for recipe in recipes}
views, as_it_is = (
    100 * np.array([on_test[views, seed] for seed in range(settings.seeds)])
    for views in (True, False)
)

# %% tags=["lesson", "nbval-ignore-output"]
print("test accuracy, in percent")
print(table_of(on_test).round(1).to_string())
print("eight views - as it is, over seeds:", over_seeds(views - as_it_is))
same = views if settings.views else as_it_is
print(
    f"to report: {same.mean():.1f} % over {len(same)} seeds, from {same.min():.1f} ",
    end="",
)
print(f"to {same.max():.1f}; section 7 had {accuracy:.1%}")

# %% [markdown]
# - **The interval over images** is about other images and *this* network. **The
#   interval over seeds** is about other trainings and *these* images. Neither is about
#   another split, another city, another camera.
# - Section 7 and 'seed 0' here have the same recipe and seed, and not the same weights:
#   batch normalisation sees the images of one rank, and there were other numbers of
#   ranks (appendix A).
# - Report the mean over seeds, not the best seed. To take the best is one more choice.
# - Two *overlapping* intervals prove nothing, either way. The same images judge both
#   networks, so compare them image by image: the stretch exercise does.
# - Tiles that were cut from one large photograph are not independent. If you know the
#   photographs, split by them, and draw whole photographs in the bootstrap.

# %% [markdown] tags=["instructor"]
# **Instructor · 10 minutes.** Run all; discuss two: the padded test and the table over
# seeds. Let them read the SD before the means. Expected: 'take the best seed'. Ask
# what they would report if they had trained with that seed alone.

# %% [markdown]
# ## 9. Exercises
#
# A check runs your function on fresh inputs. It prints `right`, or `not yet` with a
# question.
#
# ### Exercise 1 · Balanced accuracy, on all ranks (4 minutes)
#
# Where classes differ in size, the accuracy mostly tells about the large ones. The
# *balanced* accuracy is the mean of the recalls, over the classes that have an image.
#
# **Goal.** This rank has judged some images: `labels` and `guesses` are tensors of
# class numbers, on `ddp.device()`. Return the balanced accuracy of the images of *all*
# ranks, as a float, on every rank. A rank may have judged none; a class may be absent.
# All ranks must call the same collectives, with tensors of the same shape.
#
# <details><summary>Hint 1</summary>
#
# What of a class can be summed over the ranks? Not its recall.
# </details>
# <details><summary>Hint 2</summary>
#
# Two counts for each class: its images, and those judged rightly. Look up `minlength`
# of `torch.bincount`, and sum both with `dist.all_reduce`.
# </details>


# %% tags=["solution"]
def my_balanced_accuracy(labels, guesses, classes):
    """The mean recall over the classes that have an image on any rank."""
    # your code
    images_of = torch.bincount(labels, minlength=classes)
    right_of = torch.bincount(labels[labels == guesses], minlength=classes)
    dist.all_reduce(images_of)
    dist.all_reduce(right_of)
    there = images_of > 0
    return (right_of[there] / images_of[there]).mean().item()
    # end of your code


# %% tags=["exercise"]
def ask_all_ranks(answer, cases, classes):
    """What `answer` returns on every rank, for each case: (labels, guesses) by rank."""
    device, mine = ddp.device(), []
    for case in cases:
        labels, guesses = case[ddp.rank()]
        mine.append(answer(labels.to(device), guesses.to(device), classes))
    everyones = [None] * ddp.world_size()
    dist.all_gather_object(everyones, mine)
    return everyones


def balanced(case, classes):
    """What one process would say that has all images of the case."""
    labels, guesses = (torch.cat(parts) for parts in zip(*case))
    of_class = [guesses[labels == number] == number for number in range(classes)]
    recalls = [hits.float().mean() for hits in of_class if len(hits)]
    return torch.stack(recalls).mean().item()


# %% tags=["exercise"]
def check_balanced(answer):
    random, size = torch.Generator().manual_seed(int.from_bytes(os.urandom(4))), 6
    cases = []
    for first, second, absent in ((9, 4, 1), (12, 0, 0), (5, 30, 3)):
        case = []
        for count in (first, second):
            labels = torch.randint(absent, size, (count,), generator=random)
            guesses = torch.randint(0, size, (count,), generator=random)
            known = torch.rand(count, generator=random) < 0.6
            case.append((labels, torch.where(known, labels, guesses)))
        cases.append(case)
    given = {"answer": answer, "cases": cases, "classes": size, "stall_timeout": 20}
    everyones = ddp.launch(client, ask_all_ranks, **given, workers=2).result
    for number, case in enumerate(cases):
        expected = balanced(case, size)
        for rank, yours in enumerate(everyones):
            mine = yours[number]
            if not isinstance(mine, float) or not abs(mine - expected) < 1e-5:
                counts = [len(labels) for labels, _ in case]
                question = "What did you sum, and over which classes is the mean?"
                if not isinstance(mine, float):
                    question = (
                        f"A float is asked for; yours is a {type(mine).__name__}."
                    )
                print(f"not yet: the ranks have judged {counts} images: yours {mine}")
                print(f"  on rank {rank}, expected {expected:.4f}. {question}")
                return False
    print("right: counts are summed, and then divided")
    return True


ddp.judge(check_balanced, my_balanced_accuracy)

# %% [markdown]
# ### Exercise 2 · A job on a cluster (10 minutes)
#
# **a. Write the header.** You want to run `srun python train.py` on a Slurm cluster.
# `site` is what its user guide says: your account, and the time limit of each partition
# (Slurm's word for a queue) in minutes. `need` is what the job needs: ranks, cores for
# each rank, GiB of memory for each *core*, minutes. The ranks save when they get
# SIGTERM: let Slurm send it to them `warning` seconds before the limit. Here *one* job
# holds all ranks, and `srun` starts them; in section 7 Dask submits a job for each
# worker, and its worker warns its rank itself. For example:

# %% tags=["exercise"]
site = {"account": "project_1234", "partitions": {"long": 4320, "short": 60}}
need = {"ranks": 4, "cores": 2, "memory": 3, "minutes": 95, "warning": 120}

# %% [markdown]
# **Goal.** Return the first lines of the script, as a str. Take the partition with the
# smallest limit that is large enough, and the time that the job needs: a short job
# often starts sooner.
#
# | option | meaning |
# |---|---|
# | `--account`, `--partition` | who pays; which queue |
# | `--ntasks`, `--cpus-per-task` | ranks; cores of each |
# | `--mem-per-cpu` | memory for each core; a number alone is MiB |
# | `--time` | limit: `minutes` or `hours:minutes:seconds` |
# | `--signal` | `TERM@300`: SIGTERM, 300 seconds before the limit |
#
# (More in the manual of [sbatch](https://slurm.schedmd.com/sbatch.html).)
#
# <details><summary>Hint 1</summary>
#
# A script begins with `#!` and the path of its interpreter. What do the header lines
# above this section begin with?
# </details>
# <details><summary>Hint 2</summary>
#
# An f-string with a line for each option. For the partition: `min(…, key=…)` over those
# with `limit >= need["minutes"]`. The ranks are to get the signal, not the shell that
# runs the script: so no `B:` in `--signal`.
# </details>


# %% tags=["solution"]
def my_header(site, need):
    """The header of a job script: from #!/bin/bash to the last #SBATCH line, a str."""
    # your code
    limits = site["partitions"]
    enough = [name for name in limits if limits[name] >= need["minutes"]]
    return f"""#!/bin/bash
#SBATCH --account={site["account"]}
#SBATCH --partition={min(enough, key=limits.get)}
#SBATCH --ntasks={need["ranks"]}
#SBATCH --cpus-per-task={need["cores"]}
#SBATCH --mem-per-cpu={need["memory"]}G
#SBATCH --time={need["minutes"]}
#SBATCH --signal=TERM@{need["warning"]}
"""
    # end of your code


# %% tags=["exercise"]
def check_header(answer):
    """Whether the header fits, for sites and jobs that are drawn at random."""
    return batch_jobs.check_header(answer)


ddp.judge(check_header, my_header)

# %% [markdown]
# On a host with Slurm, ask it: `sbatch --test-only` says when your job would start, and
# submits nothing. Give `account=` if your site wants one.

# %% tags=["exercise", "nbval-ignore-output"]
if my_header(site, need):
    print(batch_jobs.try_here(my_header))

# %% [markdown]
# **b. Read the log.** A job has ended. Here is a log with lines as Slurm prints them:

# %% tags=["exercise"]
example, _ = batch_jobs.any_log(np.random.default_rng(5), "time limit")
print(example)

# %% [markdown]
# **Goal.** From the text of such a log return a tuple: the cause, one of `"finished"`,
# `"time limit"`, `"memory"`, `"cancelled"` (by a person); and how many steps were
# trained in vain, because the run will go on from the last saved step. In some logs the
# ranks got SIGTERM because the time limit was near, saved and left: that is `"time
# limit"` too.
#
# <details><summary>Hint 1</summary>
#
# `CANCELLED` stands in three kinds of logs. Which line tells them apart? And what does
# a rank that was warned write before it leaves?
# </details>
# <details><summary>Hint 2</summary>
#
# `re.search(r"step (\d+)", line)` finds the step of a line, if it has one. Keep the
# last step of all, and the last in a line with `saved`.
# </details>


# %% tags=["solution"]
def my_reading(log):
    """(cause, number of steps that were trained in vain)."""
    # your code
    cause = "cancelled"
    if "Done" in log:
        cause = "finished"
    if "TIME LIMIT" in log or "SIGTERM" in log:
        cause = "time limit"
    if "oom-kill" in log:
        cause = "memory"
    last = saved = 0
    for line in log.splitlines():
        if found := re.search(r"step (\d+)", line):
            last = int(found[1])
            saved = last if "saved" in line else saved
    return cause, last - saved
    # end of your code


# %% tags=["exercise"]
def check_reading(answer):
    """Whether the reading is right, for logs that are made up at random."""
    return batch_jobs.check_log(answer)


ddp.judge(check_reading, my_reading)

# %% [markdown]
# **c. How many restarts?** (At home, if time is short.) Training takes `training`
# minutes in all. Each job has a limit of `limit` minutes. It takes `start` minutes
# until its ranks train, and they save and leave `warning` minutes (here minutes!)
# before its limit. Nothing else is lost.
#
# **Goal.** Return the smallest `RESTARTS` with which the run gets through, an int, or
# `None` if it never does.
#
# <details><summary>Hint 1</summary>
#
# How many minutes of a job go into training? What if that is 0?
# </details>
# <details><summary>Hint 2</summary>
#
# Three jobs are two restarts. Round up, not down: `math.ceil`, or `-(-a // b)`.
# </details>


# %% tags=["solution"]
def my_restarts(training, limit, warning, start):
    """The smallest RESTARTS that is enough, or None. All arguments are minutes."""
    # your code
    useful = limit - warning - start
    if useful <= 0:
        return None
    return -(-training // useful) - 1
    # end of your code


# %% tags=["exercise"]
def check_restarts(answer):
    """Whether the number is right, for times that are drawn at random."""
    return batch_jobs.check_restarts(answer)


ddp.judge(check_restarts, my_restarts)

# %% [markdown] tags=["instructor"]
# **Instructor.** Wrong answers to expect. *Exercise 1*: the mean of the ranks' balanced
# accuracies; the own one only; the plain accuracy; `nan` for an absent class, or 0 for
# it; only rank 0 calls. *2a*: cores times ranks as `--ntasks`; memory without a unit;
# `--time=95:00:00`; the first or the largest partition; a blank before SBATCH; options
# after a command; `B:`; no `#!`. *2b*: every `CANCELLED` a time limit; `Terminated`
# taken for a person; the last step instead of the lost ones; warned ranks that lose
# steps. *2c*: one too many; warning or start forgotten; rounded down; no `None`.
# *Exercise 3*: `abs(loss)`; softmax without the logarithm; only one fault; a sampler
# that pads. *Stretch*: not paired; a normal distribution instead of draws; draws
# without replacement; one-sided; all images in the binomial, not the discordant ones.

# %% [markdown]
# ### Exercise 3 · A script that runs and is wrong (6 minutes)
#
# This script for torchrun trains a linear classifier on random points. It ends without
# an error. It has **two faults**. Run the cell below it and read what it prints.


# %% tags=["exercise"]
def broken_script():
    return """
import sys, torch, torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

images, seed = int(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(seed)
labels = torch.arange(images) % 5
scenes = torch.randn(5, 8)[labels] + torch.randn(images, 8)
order = torch.randperm(images)
train, test = order[: images // 4 * 2], order[images // 4 * 2 :]
model = DDP(torch.nn.Linear(8, 5))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

mine = train[rank::ranks]
print("rank", rank, "trains on", *sorted(mine.tolist()))
for step in range(30):
    loss = F.nll_loss(model(scenes[mine]), labels[mine])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("rank", rank, "loss", round(loss.item(), 3))

guesses = model.module(scenes[mine]).argmax(1)
correct = (guesses == labels[mine]).sum()
dist.all_reduce(correct)
print("rank", rank, "judged", *sorted(mine.tolist()))
if rank == 0:
    print("correct", correct.item())
    torch.save(model.module.state_dict(), "model.pt")
dist.destroy_process_group()
"""


# %% tags=["exercise"]
shown = ddp.run_script(broken_script(), "22", "0")
print("\n".join(sorted(line for line in shown.output.splitlines() if "rank" in line)))

# %% [markdown]
# **Goal.** Return a tuple: the set of the two faults' letters, and the repaired script
# as text. (`broken_script().replace(old, new)` is enough.) What the script
# prints must stay true: its lines `judged` list the images that are judged.
#
# | | fault |
# |---|---|
# | A | the model has 1,000 outputs for 5 classes |
# | B | the loss wants logarithms of probabilities and gets something else |
# | C | the judged images are those that were trained on |
# | D | some images count twice |
# | E | the ranks start with other weights |
# | F | the ranks' accuracies are averaged |
#
# <details><summary>Hint 1</summary>
#
# Can a cross-entropy be negative? And compare two of the printed lists.
# </details>
# <details><summary>Hint 2</summary>
#
# Read in the documentation of PyTorch what `nll_loss` and `cross_entropy` expect. The
# number of test images may be odd, so a sampler that pads would be a third fault.
# </details>


# %% tags=["solution"]
def my_repair():
    """({letters of the two faults}, the repaired script as a str)."""
    # your code
    script = broken_script().replace("F.nll_loss", "F.cross_entropy")
    share = "mine = test[rank::ranks]\nguesses = model"
    return {"B", "C"}, script.replace("guesses = model", share)
    # end of your code


# %% tags=["exercise"]
def reference(images, seed):
    """One process that does it right: the test rows, scenes, labels, and the model."""
    torch.manual_seed(seed)
    labels = torch.arange(images) % 5
    scenes = torch.randn(5, 8)[labels] + torch.randn(images, 8)
    order = torch.randperm(images)
    train, test = order[: images // 4 * 2], order[images // 4 * 2 :]
    model = nn.Linear(8, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(30):
        optimizer.zero_grad()
        F.cross_entropy(model(scenes[train]), labels[train]).backward()
        optimizer.step()
    return test, scenes, labels, model


# %% tags=["exercise"]
def fault_in_repair(done, images, seed):
    """What is wrong with what the script left: (yours, expected, question), or None."""
    test, scenes, labels, model = reference(images, seed)
    lines = re.findall(r"judged([ \d]*)", done.output)
    judged = sorted(int(row) for line in lines for row in line.split())
    if judged != sorted(test.tolist()):
        question = "Which images may be judged, and how often each?"
        return f"judged {judged}", f"{sorted(test.tolist())}", question
    if not (done.folder / "model.pt").exists():
        return "no model.pt", "one", "Have you changed something else?"
    saved = torch.load(done.folder / "model.pt", weights_only=True)
    for name, weight in model.state_dict().items():
        if name not in saved or not torch.allclose(saved[name], weight, atol=1e-3):
            expected = "the weights that cross-entropy leads to"
            return "a model with other weights", expected, "Which loss did it minimise?"
    correct = (model(scenes[test]).argmax(1) == labels[test]).sum().item()
    said = re.findall(r"correct (\d+)", done.output)
    if said != [str(correct)]:
        return f"correct {', '.join(said)}", f"{correct}", "Whose labels and guesses?"
    return None


# %% tags=["exercise"]
def check_repair(answer):
    faults, script = answer() or (set(), broken_script())
    random = np.random.default_rng()
    images, seed = 4 * int(random.integers(9, 15)) + 3, int(random.integers(1, 1_000))
    done = ddp.run_script(script, str(images), str(seed))
    if not done.ok:
        print(f"not yet: the script did not end well.\n{done.output[-600:]}")
        print("Which line of yours does the traceback name?")
    elif found := fault_in_repair(done, images, seed):
        print("not yet: yours {}, expected {}. {}".format(*found))
    elif set(faults) != {"B", "C"}:
        print(f"not yet: the script is repaired, but yours {sorted(faults)} are not")
        print("the two faults that were expected. What did each change mend?")
    else:
        print("right: the loss is a cross-entropy, and only test images are judged")
        return True
    return False


ddp.judge(check_repair, my_repair, timeout=120)

# %% [markdown]
# ### Stretch · Are two networks different? (15 minutes, at home)
#
# The same images judge both networks. Most images are easy or hard for both: they say
# nothing about the difference. A *paired* comparison uses that.
#
# - **Paired bootstrap.** Draw *images*, with replacement, and take the difference of
#   the two accuracies on the images drawn, many times.
# - **McNemar's test.** Look at the *discordant* images, where one network is right and
#   the other is not. If both are equally good, each such image is a toss of a coin.
#
# **Goal.** `first` and `second` say of each image whether a network was right (arrays
# of bool, one order). Return a tuple: an array of `draws` differences of the accuracy,
# first minus second, one for each draw; and the exact two-sided *p* of McNemar's test:
# twice the probability that `n` tosses show at most `k` heads, at most 1, where `n` is
# the number of discordant images and `k` the smaller of the two counts.
#
# <details><summary>Hint 1</summary>
#
# One draw of row numbers is for both networks. What is different if you draw twice?
# </details>
# <details><summary>Hint 2</summary>
#
# `(first & ~second).sum()` counts one kind of discordant image. The probability of
# exactly *i* heads is `math.comb(n, i) / 2**n`. Python's whole numbers have no largest
# one; NumPy's have: so make `n` and `k` an `int` before.
# </details>


# %% tags=["solution"]
def my_comparison(first, second, draws=2_000, seed=0):
    """(differences of the accuracy, an array of `draws` floats; McNemar's exact p)."""
    # your code
    random = np.random.default_rng(seed)
    difference = first.astype(float) - second
    size = len(difference)
    drawn = random.integers(size, size=(draws, size))
    only_first, only_second = (first & ~second).sum(), (second & ~first).sum()
    n, k = int(only_first + only_second), int(min(only_first, only_second))
    at_most_k = sum(math.comb(n, i) for i in range(k + 1)) / 2**n
    return difference[drawn].mean(axis=1), min(1.0, 2 * at_most_k)
    # end of your code


# %% tags=["exercise"]
def mcnemar(first, second):
    """The exact two-sided p of McNemar's test, by adding up Pascal's triangle."""
    ways, k = np.array([1.0]), min((first & ~second).sum(), (second & ~first).sum())
    for _ in range((first != second).sum()):
        ways = np.convolve(ways, [0.5, 0.5])
    return min(1.0, 2 * ways[: k + 1].sum())


def fault_in_comparison(yours, first, second, draws):
    """What is wrong with a comparison: (yours, expected, question), or None."""
    if not isinstance(yours, tuple) or len(yours) != 2:
        return f"{yours!r}", "two results: differences, p", "What do you return?"
    differences, p = np.asarray(yours[0], float), float(yours[1])
    each = first.astype(float) - second
    error = each.std() / len(each) ** 0.5
    if differences.shape != (draws,):
        return f"an array of shape {differences.shape}", f"({draws},)", "One per draw?"
    whole = differences * len(each)
    if not np.allclose(whole, whole.round(), atol=1e-6):
        return "fractions of an image", "counts over images", "What did you draw?"
    if abs(differences.mean() - each.mean()) > 0.25 * error:
        said = f"a mean of {differences.mean():+.4f}", f"about {each.mean():+.4f}"
        return *said, "Which of the two is subtracted?"
    if abs(differences.std() / error - 1) > 0.15:
        said = f"a spread of {differences.std():.4f}", f"about {error:.4f}"
        return *said, "Do both networks get the same images in a draw? Drawn how?"
    if abs(p - mcnemar(first, second)) > 1e-6:
        return f"p = {p:.6f}", f"{mcnemar(first, second):.6f}", "Which images toss?"
    return None


# %% tags=["exercise"]
def check_comparison(answer):
    random = np.random.default_rng()
    for count, changed in ((150, 0.15), (400, 0.1), (600, 0.6)):
        first = random.random(count) < 0.7
        other = random.random(count) < 0.3
        second = np.where(random.random(count) < changed, other, first)
        found = fault_in_comparison(answer(first, second, 2_000), first, second, 2_000)
        if found:
            print(f"not yet: {count} images, {(first != second).sum()} discordant:")
            print("  yours {}, expected {}. {}".format(*found))
            return False
    same = np.ones(20, bool)
    if answer(same, same)[1] != 1:
        print("not yet: two equal networks: expected p = 1. What if nothing tosses?")
        return False
    print("right: the same images for both, and only those that tell them apart")
    return True


ddp.judge(check_comparison, my_comparison)

# %% [markdown]
# With your function, two of our comparisons: the network with the linear model, and the
# two recipes with seed 0. It says whether *these two networks* differ on images like
# these. Whether the *recipes* differ, it cannot say: for that, seeds have to vary, and
# to say it of other images, images and seeds.

# %% tags=["exercise", "nbval-ignore-output"]
pairs = {
    "network - linear": ("main", "linear"),
    "eight views - as it is, seed 0": ((True, 0), (False, 0)),
}
for title, (one, other) in pairs.items():
    compared = my_comparison(right[one], right[other])
    if compared:
        low, high = 100 * np.quantile(compared[0], [0.025, 0.975])
        wins = [(right[a] & ~right[b]).sum() for a, b in ((one, other), (other, one))]
        print(f"{title}: {low:+.1f} to {high:+.1f} points, p = {compared[1]:.2g}")
        print(f"  {wins[0]} images only the first has right, {wins[1]} only the other")
        if compared[1] > 0.05:
            print("  not told apart: that is not 'equal'")
        if np.array_equal(right[one], right[other]):
            print("  no image tells the two apart, so these say nothing about others")

# %% [markdown]
# ## 10. Break it: the time limit
#
# A job is killed at its limit. `--signal` lets Slurm send SIGTERM to the ranks before;
# where Dask's workers are the jobs, each worker warns its rank itself. A rank that gets
# SIGTERM tells the others. All finish the same step, save and leave. We send the signal
# by hand, in the middle of an epoch. Read the message together:

# %% tags=["lesson", "nbval-ignore-output"]
short = {**hyperparameters, "epochs": 1}
middle = max(1, len(training) // settings.batch_size // 2)  # a step
try:
    warned = ddp.inject(train, "SIGTERM", rank=1, step=middle)
    ddp.launch(client, warned, images=images, **short, workers=2)
except ddp.RunStopped as stopped:
    print(str(stopped).splitlines()[0])

# %% [markdown]
# The repair is `restarts=1`, or `RESTARTS=1` for `make run`: after a warning or a
# failure, `launch` waits for workers and goes on from the newest checkpoint. On a batch
# system it submits new jobs for those that are lost or near their end. Beside it, the
# same with SIGKILL, which nobody can prepare for. It is what comes *at* the limit.


# %% tags=["lesson", "nbval-ignore-output"]
def steps_done_twice(fault):
    """How many steps rank 0 trained twice, with a fault on rank 1 and one restart."""
    mark = run.directory / f"struck-{fault}"
    hurt = ddp.inject(train, fault, rank=1, step=middle, mark=mark)
    again = ddp.launch(client, hurt, images=images, **short, workers=2, restarts=1)
    losses = again.metrics[again.metrics["loss"].notna()]
    return losses.query("rank == 0")["step"].duplicated().sum()


twice = {fault: steps_done_twice(fault) for fault in ("SIGTERM", "SIGKILL")}

# %% tags=["proof"]
assert twice["SIGTERM"] == 0, twice
print("warned in time: the run goes on where it was, no step is trained twice")
if my_restart is None:
    print("you have made no prediction; with a restart the ranks say 'on'")
else:
    print(f"your prediction was {my_restart!r}; with a restart the ranks say 'on'")

# %% tags=["lesson", "nbval-ignore-output"]
print(f"killed without a warning: {twice['SIGKILL']} steps are trained twice")

# %% [markdown]
# Three numbers belong together: the **limit** of a job, the **warning** before it, and
# how often a checkpoint is written **without** a warning. Nodes fail, too.

# %% [markdown] tags=["instructor"]
# **Instructor.** Expected: 'then ask for the longest limit'. Ask who starts sooner: a
# job of one hour or of three days? Short jobs and restarts are the usual answer. And
# 'a larger warning is safer': each minute of it is taken from every job (exercise 2c).

# %% [markdown]
# ## 11. Recap
#
# - Three sets, split by class and seed, the same on every rank: one to learn from, one
#   to choose by, one that is judged once. Errors are analysed on the second.
# - Evaluation sums counts: every image on exactly one rank, one `all_reduce`.
# - An accuracy has a baseline, an interval over images, and a spread over seeds.
# - A batch system changes how workers come, not how they train. Its header says what a
#   job needs; its log says why it ended; `RESTARTS` goes on in new jobs.
#
# **Common mistakes.** Choosing by the test set. Averaging accuracies. A padded test.
# The best of several seeds. Memory without a unit. A limit without a warning.
#
# **Next:** `dogs`: does more hardware give a better model? It starts from ImageNet, and
# takes the same folders of images: `SET="data=/path/to/folder"`.
#
# **Read.** Yang and Newsam, *Bag-of-visual-words and spatial extensions for land-use
# classification*, ACM GIS 2010, for the photographs. He et al., *Deep residual
# learning*, [arXiv:1512.03385][1]. Dietterich, *Approximate statistical tests for
# comparing supervised classification learning algorithms*, Neural Computation 10, 1998,
# for McNemar's test. The manual of [sbatch][2].
#
# [1]: https://arxiv.org/abs/1512.03385
# [2]: https://slurm.schedmd.com/sbatch.html

# %% [markdown]
# ## Appendix A · Batch normalisation on several ranks
#
# While it trains, batch normalisation takes mean and variance of the images *in this
# rank's share of the batch*. When it is evaluated, it takes the running averages. What
# follows can be measured, on the same 32 scenes:


# %% tags=["lesson"]
def statistics(images, rows):
    """Of all ranks: the loss in training and in evaluation mode; a running average.

    The average is that of the first layer, after a step and after it is shared.
    """
    torch.manual_seed(0)
    model = DDP(make_network("resnet18", len(images.classes)).to(ddp.device()))
    mine = default_collate(images.__getitems__(rows[ddp.rank() :: ddp.world_size()]))
    scenes, labels = (each.to(ddp.device()) for each in mine)
    model.eval()
    fixed = F.cross_entropy(model.module(normalized(scenes)), labels).item()
    model.train()
    trained = F.cross_entropy(model(normalized(scenes)), labels).item()
    before = model.module.bn1.running_mean.sum().item()
    share_buffers(model.module)
    after = model.module.bn1.running_mean.sum().item()
    everyones = [None] * ddp.world_size()
    dist.all_gather_object(everyones, (trained, fixed, before, after))
    return everyones


rows = np.random.default_rng(0).permutation(training)[:32]
given = {"images": images, "rows": rows}
alone, two = (
    np.array(ddp.launch(client, statistics, **given, workers=ranks).result)
    for ranks in (1, 2)
)

# %% tags=["lesson"]
print("32 scenes on 1 and on 2 ranks, the same loss to a relative 1e-4?")
for mode, column in (("training", 0), ("evaluation", 1)):
    same = abs(two[:, column].mean() / alone[0, column] - 1) < 1e-4
    print(f"  in {mode} mode: {bool(same)}")
print("after a step, both ranks have the same running average:", two[0, 2] == two[1, 2])
print("after share_buffers:", two[0, 3] == two[1, 3])

# %% [markdown]
# So batch normalisation is an exception to 'the same loss on 1, 2 and 3 ranks': with
# other ranks come other shares, and other statistics. `nn.SyncBatchNorm` takes them
# over all ranks. That costs an all-gather in the forward and an all-reduce in the
# backward of *every* such layer, and needs GPUs (`torch/nn/modules/_functions.py`).
#
# ## Appendix B · From the museum
#
# ### Only rank 0 evaluates
#
# 'Only one rank needs the result, so only one has to evaluate.' But there is a
# collective call behind it: rank 0 waits for ranks that will never come. Which rank is
# to blame, and where was the other?


# %% tags=["lesson"]
def judge_on_rank_0_only(**arguments):
    """From the museum of faults: a collective call behind `if rank == 0`."""
    return judge(**arguments) if ddp.rank() == 0 else None


try:
    ddp.launch(client, judge_on_rank_0_only, **arguments, rows=validation, workers=2)
except ddp.RankFailed as failure:
    broken = failure
print(str(broken).splitlines()[0].replace(broken.host, "HOST"))
print("...")
for line in str(broken).splitlines():
    if "Where rank" in line or "dist." in line:
        print(line.strip())

# %% [markdown]
# The repair: *all* ranks make the collective calls, and all get the result. Under
# `if ddp.rank() == 0:` belongs only what calls no collective: printing, reporting,
# writing a file.

# %% tags=["lesson"]
repaired = ddp.launch(client, judge, **arguments, rows=validation, workers=2)
print("all ranks evaluate:", repaired.result[0].sum().item(), "images judged")

# %% [markdown]
# ### 1,000 outputs, and `nll_loss` on raw outputs
#
# `resnet18()` has the 1,000 outputs of ImageNet. With 21 classes it trains all the
# same, and nobody complains. `nll_loss` wants logarithms of probabilities. Fed with raw
# outputs it has no lower bound. One look at the *first* loss catches both: a network
# that knows nothing is about as surprised as a blind guess.


# %% tags=["lesson"]
def first_loss(outputs, criterion, labels):
    """The loss of an untrained ResNet18 with so many outputs on random pictures."""
    torch.manual_seed(0)
    network = torchvision.models.resnet18(weights=None, num_classes=outputs)
    return criterion(network(torch.randn(len(labels), 3, 48, 48)), labels).item()


def check_first_loss(loss, classes):
    """Raise AssertionError unless `loss` is near ln `classes`."""
    expected = np.log(classes)
    assert abs(loss - expected) < 0.3 * expected, (
        f"the first loss is {loss:.1f}, a blind guess among {classes} classes has "
        f"{expected:.1f}"
    )


# %% tags=["proof"]
some_labels = torch.arange(63) % 21
check_first_loss(first_loss(21, F.cross_entropy, some_labels), 21)
print("21 outputs, cross_entropy: the first loss is that of a blind guess")
faults = {"1000 outputs": (1_000, F.cross_entropy), "nll_loss": (21, F.nll_loss)}
for fault, (outputs, criterion) in faults.items():
    try:
        check_first_loss(first_loss(outputs, criterion, some_labels), 21)
    except AssertionError:
        print(f"{fault}: caught, the first loss is not that of a blind guess")
    else:
        raise RuntimeError("the fault went unnoticed")

# %% [markdown]
# ### The accuracy on the training images
#
# It says how well the network remembers. The fault is one of indices. So the check
# looks at indices: nothing that was judged may have been trained on.


# %% tags=["lesson"]
def check_held_out(everyones, training):
    """Raise AssertionError if an image that was judged is one of `training`."""
    known = {row for mine in everyones for row in mine} & set(training)
    assert not known, f"{len(known):,} of the judged images were trained on"


some = training[::3]
remembered = ddp.launch(client, judge, **arguments, rows=some, workers=2).result

# %% tags=["lesson", "nbval-ignore-output"]
flattering = (remembered[0].trace() / remembered[0].sum()).item()
print(f"on training images {flattering:.1%}, on validation images", end=" ")
print(f"{(matrix.trace() / matrix.sum()).item():.1%}")

# %% tags=["proof"]
check_held_out(verdicts["main"], training)
check_held_out(verdicts["main"], validation)
print("the test of section 8: no image was trained on or chosen by")
try:
    check_held_out(remembered[1], training)
except AssertionError as caught:
    print("accuracy on training images: caught,", caught)
else:
    raise RuntimeError("the fault went unnoticed")

# %% [markdown]
# ### Two ranks on one worker
#
# To Dask, a rank that somebody submits as a plain task is a task like any other. It may
# put two on one worker, one behind the other in its queue. But ranks have to *meet*:
# the first waits for the second, which starts when the first is done. Here it waits in
# vain for one second; a process group of gloo would wait 30 minutes.


# %% tags=["lesson"]
def meet(number, ranks, meeting, seconds):
    """Say that this rank is here, and wait for the others; whether they came."""
    Event(f"{meeting} {number}").set()
    others = [Event(f"{meeting} {other}") for other in range(ranks)]
    return all(other.wait(timeout=seconds) for other in others)


def ranks_as_tasks(places, seconds=60):
    """Submit a task for each of `places` (addresses of workers): did it meet all?"""
    meeting = uuid.uuid4().hex
    tasks = [
        client.submit(
            meet, number, len(places), meeting, seconds, workers=[place], pure=False
        )
        for number, place in enumerate(places)
    ]
    return client.gather(tasks)


def check_all_met(met):
    """Raise AssertionError if a rank waited in vain."""
    fault = "a rank waited for one that sat behind it in the queue of the same worker"
    assert all(met), fault


# %% tags=["proof"]
first, *_ = workers = list(client.workers())
check_all_met(ranks_as_tasks(workers))
print("one rank on each worker: they met")
one_too_many = client.workers()[first]["nthreads"] + 1
try:
    check_all_met(ranks_as_tasks([first] * one_too_many, seconds=1))
except AssertionError as caught:
    print("not pinned: caught,", caught)
else:
    raise RuntimeError("the fault went unnoticed")

# %% [markdown]
# `launch` *claims* a worker for each rank before it starts any. A second launch at the
# same time gets other workers, or waits. The run directory says which they were.

# %% tags=["proof"]
places = json.loads((run.directory / "config.json").read_text())["workers"]
assert len(set(places)) == len(places) == tested.world_size, places
print(f"launch: {len(places)} ranks on {len(set(places))} workers")

# %% [markdown]
# ## Appendix C · More on clusters
#
# **PBS** differs in its words, not in the idea:

# %% tags=["lesson"]
script = describe("pbs", workers=4)
print("\n".join(line for line in script.splitlines() if line.startswith("#PBS")))

# %% [markdown]
# | you may | command |
# |---|---|
# | run a program on the login node | `make run TUTORIAL=ucmerced CLUSTER=slurm` |
# | run nothing there (Slurm) | `sbatch clusters/batch/pets.sbatch`: a job, too |
# | run nothing there (PBS) | `qsub clusters/batch/pets.pbs` |
# | not use Dask | `sbatch clusters/batch/mnist.sbatch`: `srun` starts the ranks |
#
# For this tutorial put `TUTORIAL=ucmerced` before `sbatch`, with `--job-name=ucmerced`;
# for PBS `qsub -N ucmerced -v TUTORIAL=ucmerced,WORKERS=4`. Submit the last three again
# after a time limit: they go on from the newest checkpoint, and `best` is in it.
#
# | | laptop | cluster |
# |---|---|---|
# | workers come | within seconds | when the queue lets them |
# | data | drawn here, or your folder | a folder that compute nodes see, or `s3://…` |
# | backend | gloo | NCCL, if every rank has its own GPU |
# | cost | your battery | core or GPU hours, also while a rank waits |
# | it ends early because | you closed the lid | the time limit: `RESTARTS=3` |

# %% tags=["nbval-ignore-output"]
client.close()
