# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # UC Merced: a batch system and an honest evaluation
#
# **Question.** How do I train on a batch system, and how do I know that the accuracy at the end is true?
#
# **Afterwards you can**
# - split images into training, validation and test sets, the same on every rank, and *prove* that no rank mixes them;
# - evaluate on several ranks so that every test image counts once, and sum a confusion matrix over ranks that equals that of one process;
# - read a confusion matrix: precision and recall of a class, the worst confusion, the images behind it;
# - say what batch normalisation does on several ranks, and why its statistics are shared before an evaluation;
# - read the job script that a batch system gets, and follow a run in its log.
#
# **You need** Python and the first idea of PyTorch: a model, a loss, an optimizer. No GPU, no network, nothing is downloaded.
# **Time:** 75 minutes in class, under 90 seconds of computing on two cores. **Data:** scenes from above, drawn by the repository.

# %% [markdown] tags=["instructor"]
# **Instructor.** 2 minutes. Ask for an accuracy that somebody reported and later had to take back, and what was wrong with it. Keep the answers:
# most hang in the museum of section 8. If you are late: skip the part on batch normalisation in section 6, and the stretch exercise.
#
# Minutes per section: set-up 3, data 6, one rank 8, predict 3, what changes 10, on Dask 6, proofs 8, exercises 20, break it 8, scaling 6, cluster 4,
# recap 3. With questions that is 90; without exercise 2 it is 75. The training of section 7 takes the better part of a minute: read the table of
# section 6 again meanwhile. A class with accounts on a cluster does section 12 in a terminal, with its own account and queue: plan 20 minutes more.

# %% [markdown]
# ## 2. Set-up and preflight
#
# All settings stand here, once. Defaults suit a laptop; `make run TUTORIAL=ucmerced SET="epochs=20"` changes one of them. `PRESET=full` is for
# GPUs: the real photographs at nearly their full size and a ResNet101, the network of the experiment this tutorial goes back to. The other sizes of
# `full` are our choice.

# %%
import json
import os
import uuid

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
from torch.utils.data import DataLoader, DistributedSampler, Subset, default_collate
from torchvision.transforms import v2

import ddp_common as ddp
from ddp_common.clusters.connect import describe

# %% tags=["parameters"]
settings = ddp.settings(
    "ucmerced",
    data="shipped",  # or "full" after `make data TUTORIAL=ucmerced`, a folder or s3://bucket/prefix with a folder for each class
    anonymous=False,  # True: read a public s3:// bucket without credentials
    on_error="raise",  # at an image that cannot be decoded; "skip": leave such images out
    network="resnet18",  # or another ResNet of torchvision
    size=64,  # pixels: images are scaled to size x size
    epochs=4,
    batch_size=32,  # of all ranks together
    learning_rate=2e-3,  # at its peak
    held_out=0.15,  # the share of each class for validation, and as much again for the test
    seed=0,
    presets={"full": {"data": "full", "network": "resnet101", "size": 224, "epochs": 60, "batch_size": 128, "learning_rate": 1e-3}},
)

# %% [markdown]
# `connect()` starts the cluster of a *profile*: here Dask workers on this machine. While you read on, they import torch.

# %% tags=["nbval-ignore-output"]
client = ddp.connect()
dataset = ddp.fetch("ucmerced", settings.data)
print(f"torch {torch.__version__} · {client.ranks} ranks · {dataset.title}: {dataset.origin} · licence: {dataset.licence}")

# %% [markdown]
# ## 3. The data
#
# The UC Merced set has 21 classes of land use, 100 aerial photographs of each. What you see by default is *not* that set: these scenes are drawn by a
# program, so that nothing has to be downloaded. Numbers that you reach on them say nothing about photographs. They do have the set's
# classes and its trouble: houses stand dense, less dense and sparse, and where one class ends and the next begins is a matter of opinion.
#
# `ImageFolder` takes the name of a folder for the class of its images. It lists them once; the ranks get the list and read the images themselves.

# %%
if settings.size < 33:
    raise ddp.Error(f"size={settings.size}: a ResNet divides the size by 32, and batch normalisation needs more than one pixel to be left. Take 33 or more.")
images = ddp.ImageFolder(dataset.path, settings.size, cache="memory", anonymous=settings.anonymous, on_error=settings.on_error)
print(f"{len(images):,} images of {len(images.classes)} classes, scaled to {settings.size} x {settings.size}")

# %% tags=["lesson"]
figure, panels = plt.subplots(3, 7, figsize=(9.5, 4.6))
for axes, name in zip(panels.flat, images.classes):
    axes.imshow(images[images.targets.index(images.classes.index(name))][0].permute(1, 2, 0))
    axes.set_title(name, fontsize=8)
for axes in panels.flat:
    axes.axis("off")
figure.suptitle(f"One scene of each class ({dataset.origin})")
plt.show()

# %% [markdown]
# ### Three sets, three purposes
#
# The network learns from the *training* set. The *validation* set chooses: which epoch to keep, which learning rate to take. Whatever chooses has
# been looked at, so its accuracy is flattering. The *test* set is judged once, at the end, and nothing is chosen after it.
#
# Each set gets its share of every class (it is *stratified*), or luck would decide how many test images a small class has. The split follows from the
# labels and a seed alone. So every rank computes it for itself, and all get the same.

# %%
def split_rows(images, held_out, seed):
    """The rows of `images` for training, validation and test. Raises ddp.Error for a class that is too small to be in all three."""
    counts = np.bincount(images.targets)
    if counts.min() < 3:
        raise ddp.Error(f"The class {images.classes[counts.argmin()]!r} has {counts.min()} image(s). Training, validation and test need one each: "
                        "add images, or remove its folder.")
    return ddp.stratified_split(images.targets, [held_out, held_out], seed=seed)


training, validation, test = split_rows(images, settings.held_out, settings.seed)
print(f"{len(training):,} images to learn from, {len(validation):,} to choose by, {len(test):,} for the test")

# %% [markdown]
# ## 4. One rank first
#
# A plain loop, in this process, with the simplest model there is: one linear layer on the pixels. It is not only an exercise. It is the *baseline*: a
# network that does no better has learned nothing about shapes, only colours and where they lie.

# %%
def normalized(scenes):
    """Bytes (n, 3, size, size) as floats around zero, about as wide as those of photographs."""
    return (scenes.float() / 255 - 0.45) / 0.22


torch.manual_seed(settings.seed)
scenes, labels = default_collate(images.__getitems__(training))
linear = nn.Sequential(nn.Flatten(), nn.Linear(3 * settings.size**2, len(images.classes)))
optimizer = torch.optim.Adam(linear.parameters(), lr=3e-4)
losses = []
for epoch in range(8):
    for batch in torch.randperm(len(training)).split(32):
        loss = F.cross_entropy(linear(normalized(scenes[batch])), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

# %% tags=["lesson"]
figure, axes = plt.subplots(figsize=(6, 2.6))
axes.plot(losses, linewidth=0.8)
axes.axhline(np.log(len(images.classes)), color="grey", linestyle="--", label=f"a blind guess: ln {len(images.classes)}")
axes.set(xlabel="step", ylabel="loss (nats)", title="One process, a linear model on pixels", ylim=0)
axes.legend()
plt.show()

# %% [markdown]
# ## 5. Predict
#
# Three ranks evaluate 20 test images. They are dealt by PyTorch's `DistributedSampler`, which many tutorials use for training and test alike.
# **Write your prediction before you go on.** How many judgements does the confusion matrix count: 18, 20 or 21?

# %% tags=["lesson"]
my_count = 20

# %% [markdown]
# And look at the pictures of section 3 again: which class will the network mistake most often for which other? (A pair of names.)

# %% tags=["lesson"]
my_pair = ("beach", "river")

# %% [markdown]
# ## 6. What changes
#
# ### Evaluation on several ranks
#
# Training averages *gradients*. Evaluation sums *counts*: each rank judges its share of the images and notes in a matrix how often a scene of class
# *i* (row) was taken for class *j* (column). One `all_reduce` adds up the matrices. Everything else follows from the sum: accuracy, precision, recall.
# An average of the ranks' accuracies would be wrong as soon as their shares differ.
#
# Three things make it honest:
#
# | line | why |
# |---|---|
# | `ddp.EvalSampler` | every image goes to exactly one rank; a rank may get fewer, or none |
# | `model.eval()`, on `model.module` | fixed statistics; and no call of the DDP wrapper, whose ranks would wait for each other |
# | `share_buffers(model)` | all ranks judge with the *same* model: see below |

# %%
def share_buffers(model):
    """Give all ranks the buffers of rank 0: the running statistics of batch normalisation."""
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)


@torch.no_grad()
def evaluate(model, images, rows, batch_size=64):
    """Judge the images at `rows`, each on one rank. Returns the confusion matrix of all ranks, and {row: guess} of this one."""
    classes, guesses = len(images.classes), {}
    device = next(model.parameters()).device
    matrix = torch.zeros(classes, classes, dtype=torch.long, device=device)
    if dist.is_initialized():
        share_buffers(model)
    model.eval()
    for batch in ddp.EvalSampler(len(rows), batch_size):
        scenes, labels = default_collate(images.__getitems__(rows[batch]))
        guess = model(normalized(scenes.to(device))).argmax(1)
        matrix += torch.bincount(labels.to(device) * classes + guess, minlength=classes**2).reshape(classes, classes)
        guesses.update(zip(rows[batch].tolist(), guess.tolist()))
    if dist.is_initialized():
        dist.all_reduce(matrix)
    return matrix.cpu(), guesses


# %% [markdown]
# ### The network
#
# A ResNet as torchvision has it, with one output for each class, not the 1,000 of ImageNet, and with weights drawn at random.

# %%
def make_network(name, classes):
    """A ResNet of torchvision, not trained, with `classes` outputs. Raises ddp.Error for a name that torchvision does not have."""
    known = [each for each in torchvision.models.list_models() if each.startswith("resnet")]
    if name not in known:
        raise ddp.Error(f"There is no network {name!r}. There is: {', '.join(known)}.")
    return torchvision.models.get_model(name, weights=None, num_classes=classes)


millions = sum(weight.numel() for weight in make_network(settings.network, len(images.classes)).parameters()) / 1e6
print(f"{settings.network} with {len(images.classes)} outputs: {millions:.1f} million weights")

# %% [markdown]
# The test will be a launch of its own: every rank gets the weights that validation has chosen, and the rows to judge.

# %%
def judge(images, network, weights, rows):
    """Evaluate the network with these weights. Returns the confusion matrix and the {row: guess} of every rank."""
    model = make_network(network, len(images.classes))
    model.load_state_dict(weights)
    matrix, guesses = evaluate(model.to(ddp.device()), images, rows)
    everyones = [None] * ddp.world_size()
    dist.all_gather_object(everyones, guesses)
    return matrix, everyones


# %% [markdown]
# ### Batch normalisation, and what it means for several ranks
#
# A ResNet normalises after every convolution: while it trains, by mean and variance of the images *in this rank's share of the batch*; when it is
# evaluated, by running averages of them, which are *buffers* of the model. DDP averages gradients, not statistics. What follows can be measured:

# %% tags=["lesson"]
def statistics(images, rows):
    """Of all ranks: the loss of one batch in training and in evaluation mode, and one running mean before and after it is shared."""
    torch.manual_seed(0)
    model = DDP(make_network("resnet18", len(images.classes)).to(ddp.device()))
    mine = rows[ddp.rank()::ddp.world_size()]
    scenes, labels = (each.to(ddp.device()) for each in default_collate(images.__getitems__(mine)))
    model.eval()
    fixed = F.cross_entropy(model.module(normalized(scenes)), labels).item()
    model.train()
    trained = F.cross_entropy(model(normalized(scenes)), labels).item()
    before = model.module.bn1.running_mean.sum().item()
    share_buffers(model.module)
    everyones = [None] * ddp.world_size()
    dist.all_gather_object(everyones, (trained, fixed, before, model.module.bn1.running_mean.sum().item()))
    return everyones


alone, two = (np.array(ddp.launch(client, statistics, images=images, rows=training[:32], workers=ranks).result) for ranks in (1, 2))
print("the same 32 scenes on 1 and on 2 ranks, the same loss to a relative 1e-4?")
for mode, column in (("training", 0), ("evaluation", 1)):
    print(f"  in {mode} mode: {bool(abs(two[:, column].mean() / alone[0, column] - 1) < 1e-4)}")
print("the two ranks have the same running mean after a step:", two[0, 2] == two[1, 2])
print("and after share_buffers:", two[0, 3] == two[1, 3])

# %% [markdown]
# So batch normalisation is the stated exception to 'the same loss on 1, 2 and 3 ranks': with other ranks come other shares, and other statistics. We
# keep DDP's own choice: statistics of each rank, and before each *training* step the buffers of rank 0 for all. Between the last step of an
# epoch and the evaluation nobody shares them, so without `share_buffers` each rank would judge with a slightly different model, and none of them but
# rank 0's would be the one that is saved. `nn.SyncBatchNorm` takes the statistics over all ranks; it needs GPUs, and one more collective call for each layer.
#
# ### The training function
#
# A view from above has no top: flipped and transposed, a scene is as good as before. `ddp.Augmented` draws which of the eight views an image gets
# from (seed, epoch, image) alone, so they do not depend on the number of ranks. Compared with the plain loop:
#
# | line | why |
# |---|---|
# | `ddp.ElasticSampler`, `DDP(...)`, `* sampler.weight` | each rank takes its share of the global batch, and the gradient is that of the whole |
# | `training, validation, _` | the test set is not even given a name here |
# | `evaluate(model.module, …)` | on all ranks, and every rank gets the same matrix: all agree which epoch is best |
# | `best` | the weights that validation has chosen; in the checkpoint, so that a resumed run still knows them |
# | `if ddp.rank() == 0:` around `report` and `print`, nothing else | a collective call in there would wait for ever: section 10 |

# %%
class Best:
    """The weights of the epoch with the highest accuracy so far."""

    def __init__(self):
        self.accuracy, self.epoch, self.weights = -1.0, -1, {}

    def offer(self, accuracy, epoch, model):
        if accuracy >= self.accuracy:  # of equals the later: it has learned longer
            self.accuracy, self.epoch = accuracy, epoch
            self.weights = {name: weight.detach().cpu().clone() for name, weight in model.state_dict().items()}

    def state_dict(self):
        return vars(self)

    def load_state_dict(self, state):
        self.__dict__.update(state)


eight_views = v2.Compose([v2.RandomHorizontalFlip(), v2.RandomVerticalFlip(), v2.RandomApply([v2.Lambda(lambda image: image.mT)])])

# %%
def train(images, network, epochs, batch_size, learning_rate, held_out, seed):
    """Train on this rank's share of each batch. Returns what validation chose: the weights, their epoch and accuracy."""
    device = ddp.device()
    torch.manual_seed(seed)  # the same initial weights on all ranks
    training, validation, _ = split_rows(images, held_out, seed)
    sampler = ddp.ElasticSampler(len(training), batch_size, seed=seed)
    data = ddp.Augmented(Subset(images, training), eight_views, sampler, seed=seed)
    loader = DataLoader(data, batch_sampler=sampler)
    model = DDP(make_network(network, len(images.classes)).to(device), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=epochs * len(sampler), pct_start=0.25)
    best = Best()
    checkpoint = ddp.Checkpoint(model=model, optimizer=optimizer, schedule=schedule, sampler=sampler, best=best, every_seconds=20)
    checkpoint.restore()  # nothing to restore on a first attempt
    for epoch in sampler.epochs(epochs):
        model.train()
        for scenes, labels in loader:
            loss = F.cross_entropy(model(normalized(scenes.to(device))), labels.to(device)) * sampler.weight
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            ddp.report(loss=loss)
        matrix, _ = evaluate(model.module, images, validation)
        accuracy = matrix.trace().item() / matrix.sum().item()
        best.offer(accuracy, epoch, model.module)
        if ddp.rank() == 0:
            ddp.report(validation_accuracy=accuracy)
            print(f"epoch {epoch + 1} of {epochs}: validation accuracy {accuracy:.1%}, best {best.accuracy:.1%}", flush=True)
    checkpoint.save()
    return best.state_dict()


# %% [markdown]
# ## 7. On Dask
#
# `launch` starts one process, a *rank*, on each worker, hands it the function with its arguments, and returns when all are done.

# %%
hyperparameters = {name: getattr(settings, name) for name in ("network", "epochs", "batch_size", "learning_rate", "held_out", "seed")}
run = ddp.launch(client, train, images=images, **hyperparameters)
best = run.result

# %% tags=["lesson", "nbval-ignore-output"]
table = run.metrics.pivot_table(index="rank", columns="epoch", values="loss")
table.loc["validation accuracy"] = run.metrics.groupby("epoch")["validation_accuracy"].max()
table.round(3)

# %%
def plot_training(metrics):
    """The loss of every rank and of their mean, a point for every 10 steps; and the validation accuracy after each epoch."""
    steps = metrics[metrics["loss"].notna()]
    by_rank = steps.groupby([steps["step"] // 10 * 10, "rank"])["loss"].mean().unstack()
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 3.2))
    left.plot(by_rank.index, by_rank.mean(axis=1), color="lightgrey", linewidth=5, label="mean: the loss of the global batch")
    for rank, curve in by_rank.items():
        left.plot(curve.index, curve, linewidth=1, label=f"rank {rank}")
    left.set(xlabel="step", ylabel="loss (nats)", title=f"Training on {by_rank.shape[1]} ranks", ylim=0)
    left.legend()
    accuracies = metrics.groupby("epoch")["validation_accuracy"].max()
    right.plot(accuracies.index + 1, accuracies, marker="o")
    right.axvline(accuracies.idxmax() + 1, color="grey", linestyle="--", label="the epoch that is kept")
    right.set(xlabel="epoch", ylabel="accuracy", title="Validation", ylim=(0, 1))
    right.xaxis.get_major_locator().set_params(integer=True)
    right.legend(loc="lower right")
    return figure


figure = plot_training(run.metrics)
run.save_figure(figure, "training.png")

# %% [markdown]
# The curve still rises: this is what a laptop does while you wait, not what the network can do. `SET="epochs=20"` goes on.
#
# ### The test, once
#
# Validation has chosen the epoch. Now, and only now, the test images are judged, by all ranks together. An accuracy from *n* images is an estimate: its
# standard error is about $\sqrt{p(1-p)/n}$. Two networks whose accuracies lie within two of these have not been told apart.

# %%
judged = ddp.launch(client, judge, images=images, network=settings.network, weights=best["weights"], rows=test, directory=run.directory)
matrix, everyones_guesses = judged.result
accuracy = (matrix.trace() / matrix.sum()).item()
baseline_matrix, _ = evaluate(linear, images, test)
baseline = (baseline_matrix.trace() / baseline_matrix.sum()).item()
torch.save({"weights": best["weights"], "network": settings.network, "classes": images.classes}, run.directory / "model.pt")

# %% tags=["nbval-ignore-output"]
error = (accuracy * (1 - accuracy) / len(test)) ** 0.5
print(f"Accuracy on {matrix.sum()} test images ({dataset.origin}), weights of epoch {best['epoch'] + 1}:")
print(f"  a blind guess    {1 / len(images.classes):6.1%}")
print(f"  linear on pixels {baseline:6.1%}")
print(f"  {settings.network:16} {accuracy:6.1%} ± {error:.1%}   (validation, which chose the epoch: {best['accuracy']:.1%})")

# %% tags=["proof"]
if settings.epochs >= 4:
    assert accuracy > baseline + 0.2, f"the network ({accuracy:.1%}) should be far above the linear model ({baseline:.1%})"
    print("the network is more than 20 points above the linear model")

# %% [markdown]
# ### What is taken for what
#
# A row of the confusion matrix holds the scenes of one class; a column, those that were taken for it. What is off the diagonal are the mistakes.

# %%
def plot_confusions(matrix, classes):
    """The confusion matrix as a picture, each row in shares of its class, with the counts of the mistakes."""
    side = max(4.0, 0.38 * len(classes))
    figure, axes = plt.subplots(figsize=(side, side))
    axes.imshow(matrix / matrix.sum(1, keepdim=True).clamp(min=1), cmap="Blues", vmin=0, vmax=1)
    for row, column in matrix.nonzero().tolist():
        if row != column:
            axes.text(column, row, matrix[row, column].item(), ha="center", va="center", fontsize=8, color="firebrick")
    axes.set_xticks(range(len(classes)), classes, rotation=90, fontsize=8)
    axes.set_yticks(range(len(classes)), classes, fontsize=8)
    axes.set(xlabel="taken for", ylabel="is", title=f"Test: {matrix.trace()} of {matrix.sum()} are right; mistakes in red")
    return figure


figure = plot_confusions(matrix, images.classes)
run.save_figure(figure, "confusion.png")

# %% [markdown]
# The same as tables. `verdicts` has a row for each test image: what it is, what it was taken for, and which rank said so.

# %%
names = np.array(images.classes)
verdicts = pd.DataFrame([(row, names[images.targets[row]], names[guess], rank) for rank, guesses in enumerate(everyones_guesses)
                         for row, guess in guesses.items()], columns=["image", "is", "taken for", "rank"])
mistakes = verdicts[verdicts["is"] != verdicts["taken for"]]
confusions = mistakes.groupby(["is", "taken for"]).size().sort_values(ascending=False, kind="stable")
verdicts.to_csv(run.directory / "verdicts.csv", index=False)

# %% tags=["lesson", "nbval-ignore-output"]
often = confusions.index[:4].to_flat_index()
among = sorted({name for pair in often for name in pair})
pd.crosstab(verdicts["is"], verdicts["taken for"]).reindex(index=among, columns=among, fill_value=0)

# %% [markdown]
# *Precision* of a class: of all scenes that were taken for it, how many are. *Recall*: of all scenes that are, how many were found. A class that the
# network names too readily has high recall and low precision.

# %%
def per_class(matrix, classes):
    """A table: precision, recall and number of test images of each class, the lowest recall first."""
    right = matrix.diagonal().double()
    table = pd.DataFrame({"precision": right / matrix.sum(0).clamp(min=1), "recall": right / matrix.sum(1), "images": matrix.sum(1)}, index=classes)
    return table.sort_values("recall", kind="stable")


quality = per_class(matrix, images.classes)
quality.to_csv(run.directory / "per_class.csv")

# %% tags=["nbval-ignore-output"]
print(quality.round(2).to_string())
if len(confusions):
    (true, guessed), count = confusions.index[0], confusions.iloc[0]
    print(f"The worst confusion: {true} taken for {guessed}, {count} of {quality.loc[true, 'images']} times.")

# %% [markdown]
# Never stop at the table: look at the images. Would you have known?

# %%
def plot_worst(count=6):
    """Test images of the worst confusion, above training images of the class that they were taken for."""
    true, guessed = confusions.index[0]
    wrong = mistakes.query("`is` == @true and `taken for` == @guessed")["image"].tolist()
    like = [row for row in training if images.targets[row] == images.classes.index(guessed)]
    figure, panels = plt.subplots(2, count, figsize=(1.5 * count, 3.6))
    for line, rows, title in zip(panels, (wrong, like), (f"is {true}, taken for {guessed}", f"is {guessed} (training)")):
        for axes, row in zip(line, rows):
            axes.imshow(images[row][0].permute(1, 2, 0))
        line[0].set_title(title, loc="left", fontsize=10)
    for axes in panels.flat:
        axes.axis("off")
    return figure


if len(confusions):
    figure = plot_worst()
    run.save_figure(figure, "worst.png")

# %% tags=["lesson", "nbval-ignore-output"]
place = list(confusions.index).index(my_pair) + 1 if my_pair in confusions.index else None
print(f"your pair {my_pair} is", f"number {place} of {len(confusions)} confusions" if place else "not among the confusions",
      "— right" if place == 1 else f"— most often {true} is taken for {guessed}")

# %% [markdown]
# ## 8. Proofs
#
# ### No rank mixes the sets
#
# Each rank splits for itself, and sends what it got. Unseeded, each would get another split: the test images of one are trained on by another.

# %% tags=["lesson"]
def splits_of_all(images, held_out, seeded):
    """The three sets of rows on every rank: a list of lists of arrays."""
    seed = settings.seed if seeded else int.from_bytes(os.urandom(4))
    everyones = [None] * ddp.world_size()
    dist.all_gather_object(everyones, split_rows(images, held_out, seed))
    return everyones


def check_disjoint(everyones, samples):
    """Raise AssertionError if an image that any rank trains on is in any rank's validation or test set, or an image is in no set."""
    trained = set(np.concatenate([training for training, _, _ in everyones]))
    judged = set(np.concatenate([rows for _, *others in everyones for rows in others]))
    assert not trained & judged, f"{len(trained & judged)} images are trained on by one rank and judged by another"
    assert len(trained) + len(judged) == samples, "an image is in no set"
    assert not {*everyones[0][1]} & {*everyones[0][2]}, "validation and test overlap"


# %% tags=["proof"]
for seeded in (True, False):
    everyones = ddp.launch(client, splits_of_all, images=images, held_out=settings.held_out, seeded=seeded, workers=2).result
    try:
        check_disjoint(everyones, len(images))
        print("one seed: training, validation and test are disjoint on all ranks, and hold every image")
    except AssertionError:
        assert not seeded
        print("unseeded: caught, images are trained on by one rank and judged by another")

# %% [markdown]
# ### Every test image is counted once
#
# `DistributedSampler` gives all ranks equally many samples, which training with DDP needs. Where they do not divide, it *pads*: it deals some images a
# second time. In training that hardly matters. In a test the padded images count twice, and which they are depends on the number of ranks.

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
    assert seen == sorted(rows), f"{len(seen)} judgements of {len(set(seen))} images"


# %% [markdown]
# Three ranks need a third worker. A Dask cluster grows while it runs.

# %% tags=["lesson"]
if client.cluster is not None and len(client.workers()) < 3:
    client.cluster.scale(3)
client.wait_for_workers(3, timeout=60)
padded, whole = (ddp.launch(client, dealt_for_the_test, samples=20, padded=padded, workers=3).result for padded in (True, False))

# %% tags=["proof"]
check_counted_once(whole, range(20))
print("EvalSampler: 20 images on", len(whole), "ranks, each counted once")
try:
    check_counted_once(padded, range(20))
    raise RuntimeError("the fault went unnoticed")
except AssertionError as caught:
    print("DistributedSampler: caught,", caught)
print("your prediction was", my_count, "— right" if my_count == sum(map(len, padded)) else f"— the padded ranks say {sum(map(len, padded))}")

# %% tags=["proof"]
check_counted_once(everyones_guesses, test)
print(f"the test of section 7: {len(test)} images, each judged once, by one of {len(everyones_guesses)} ranks")

# %% [markdown]
# ### The matrix of all ranks is the matrix of one process
#
# The same weights, the same images, here in this process, where nothing is distributed. Not nearly equal: entry for entry.

# %% tags=["proof"]
model = make_network(settings.network, len(images.classes))
model.load_state_dict(best["weights"])
alone, _ = evaluate(model, images, test)
on_three, _ = ddp.launch(client, judge, images=images, network=settings.network, weights=best["weights"], rows=test, workers=3).result
assert torch.equal(matrix, alone) and torch.equal(on_three, alone), (matrix - alone).nonzero()
assert matrix.sum() == len(test) and np.array_equal(matrix.sum(1), np.bincount(np.array(images.targets)[test]))
print(f"{matrix.numel()} entries, equal on one process, on {judged.world_size} ranks and on 3; rows sum to the images of their class")

# %% [markdown]
# ### From the museum: 1000 outputs for 21 classes, `nll_loss` on logits
#
# `resnet18()` has the 1,000 outputs of ImageNet. With 21 classes it trains, only worse, and nobody complains. `nll_loss` wants logarithms of
# probabilities; fed with raw outputs, it sinks below zero and on, without an error. One look at the *first* loss catches both: a network that
# knows nothing is about as surprised as a blind guess, ln 21.

# %% tags=["lesson"]
def first_loss(outputs, criterion, labels):
    """The loss of an untrained ResNet18 with so many outputs on random pictures."""
    torch.manual_seed(0)
    network = torchvision.models.resnet18(weights=None, num_classes=outputs)
    return criterion(network(torch.randn(len(labels), 3, 48, 48)), labels).item()


def check_first_loss(loss, classes):
    """Raise AssertionError unless `loss` is near ln `classes`."""
    expected = np.log(classes)
    assert abs(loss - expected) < 0.3 * expected, f"the first loss is {loss:.1f}, a blind guess among {classes} classes has {expected:.1f}"


# %% tags=["proof"]
some_labels = torch.arange(63) % 21
check_first_loss(first_loss(21, F.cross_entropy, some_labels), 21)
print("21 outputs, cross_entropy: the first loss is that of a blind guess")
for fault, outputs, criterion in (("1000 outputs", 1_000, F.cross_entropy), ("nll_loss on logits", 21, F.nll_loss)):
    try:
        check_first_loss(first_loss(outputs, criterion, some_labels), 21)
        raise RuntimeError("the fault went unnoticed")
    except AssertionError as caught:
        print(f"{fault}: caught, {caught if outputs == 1_000 else 'the first loss is near zero'}")

# %% [markdown]
# ### From the museum: the accuracy on the training images
#
# It looks splendid, and says how well the network remembers. The fault is one of indices again, so the check looks at indices: nothing that was judged
# may have been trained on.

# %% tags=["lesson"]
def check_held_out(everyones, training):
    """Raise AssertionError if an image that was judged is one of `training`."""
    known = {row for mine in everyones for row in mine} & set(training)
    assert not known, f"{len(known):,} of the judged images were trained on"


arguments = {"images": images, "network": settings.network, "weights": best["weights"]}
flattering, remembered = ddp.launch(client, judge, **arguments, rows=training[::3], workers=2).result

# %% tags=["lesson", "nbval-ignore-output"]
print(f"on training images {flattering.trace() / flattering.sum():.1%}, on test images {accuracy:.1%}")

# %% tags=["proof"]
check_held_out(everyones_guesses, training)
print("the test of section 7: no image was trained on")
try:
    check_held_out(remembered, training)
    raise RuntimeError("the fault went unnoticed")
except AssertionError as caught:
    print("accuracy on training images: caught,", caught)

# %% [markdown]
# ### From the museum: two ranks on one worker
#
# To Dask, a rank that somebody submits as a plain task is a task like any other. It may put two on one worker, one behind the other in its queue, while
# another worker has none. But ranks have to *meet*: the first waits for the second, which starts when the first is done. Here the bad case is staged,
# with a time-out of one second where a process group has half an hour.

# %% tags=["lesson"]
def meet(number, ranks, meeting):
    """What a rank does first: it says that it is here, and waits for all others. Returns whether they came."""
    Event(f"{meeting} {number}").set()
    return all(Event(f"{meeting} {other}").wait(timeout=1) for other in range(ranks))


def ranks_as_tasks(places):
    """Submit one task for each of `places` (addresses of workers). Returns, for each, whether it met the others."""
    meeting = uuid.uuid4().hex
    return client.gather([client.submit(meet, number, len(places), meeting, workers=[place], pure=False) for number, place in enumerate(places)])


def check_all_met(met):
    """Raise AssertionError if a rank waited in vain."""
    assert all(met), "a rank waited for one that sat behind it in the queue of the same worker"


# %% tags=["proof"]
first, *_ = workers = list(client.workers())
check_all_met(ranks_as_tasks(workers))
print("one rank on each worker: they met")
try:
    check_all_met(ranks_as_tasks([first] * (client.workers()[first]["nthreads"] + 1)))  # one more than it can run at once
    raise RuntimeError("the fault went unnoticed")
except AssertionError as caught:
    print("not pinned: caught,", caught)

# %% [markdown]
# `launch` *claims* a worker for each rank, on the scheduler, before it starts any; a second launch at the same time gets other workers or waits. The run
# directory says which they were.

# %% tags=["proof"]
places = json.loads((run.directory / "config.json").read_text())["workers"]
assert len(set(places)) == len(places) == run.world_size, places
print(f"launch: {len(places)} ranks on {len(set(places))} workers")

# %% [markdown]
# ## 9. Exercises
#
# ### Exercise 1 · The accuracy of all ranks (8 minutes)
#
# **Goal.** This rank has judged `judged` images, `correct` of them rightly. Return the accuracy over the images of *all* ranks, on every rank.
# **Hint.** Sum what can be summed, then divide. `dist.all_reduce(tensor)` sums in place; the tensor must be on `ddp.device()`. A rank may have judged none.

# %% tags=["solution"]
def my_accuracy(correct, judged):
    """The share of images that all ranks together judged rightly."""
    # your code
    sums = torch.tensor([correct, judged], device=ddp.device())
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()
    # end of your code


# %% tags=["exercise"]
def ask_all_ranks(answer, cases):
    """What `answer` returns on every rank, for each of `cases`: lists with (correct, judged) for each rank."""
    mine, everyones = [answer(*case[ddp.rank()]) for case in cases], [None] * ddp.world_size()
    dist.all_gather_object(everyones, mine)
    return everyones


def check_accuracy(answer):
    cases = [[(3, 4), (0, 1)], [(5, 5), (2, 5)], [(1, 2), (0, 0)]]
    try:
        everyones = ddp.launch(client, ask_all_ranks, answer=answer, cases=cases, workers=2, stall_timeout=4).result
    except ddp.RankFailed as failure:
        print("not yet:", str(failure).splitlines()[0])
        return False
    for number, case in enumerate(cases):
        expected = sum(correct for correct, _ in case) / sum(judged for _, judged in case)
        for rank, yours in enumerate(everyones):
            if yours[number] is None or abs(yours[number] - expected) > 1e-6:
                print(f"not yet: the ranks have (correct, judged) {case}: yours is {yours[number]} on rank {rank}, expected {expected:.3f}")
                return False
    print("right: counts are summed, and then divided")
    return True


ddp.judge(check_accuracy, my_accuracy)

# %% [markdown]
# ### Exercise 2 · Precision and recall (12 minutes)
#
# **Goal.** From a confusion matrix (rows: what it is, columns: what it was taken for) compute precision and recall of every class. Where there is
# nothing to divide by, because a class was never named or has no image, the value is 0.
# **Hint.** Both have the diagonal above the line. `matrix.sum(0)` adds up each column, `matrix.sum(1)` each row; `.clamp(min=1)` avoids 0 / 0.

# %% tags=["solution"]
def my_quality(matrix):
    """Precision and recall of every class: two tensors of floats."""
    # your code
    right = matrix.diagonal()
    return right / matrix.sum(0).clamp(min=1), right / matrix.sum(1).clamp(min=1)
    # end of your code


# %% tags=["exercise"]
def check_quality(answer):
    for rows, precision, recall in (([[8, 2], [0, 10]], [1, 10 / 12], [0.8, 1]), ([[3, 1, 0], [1, 1, 2], [0, 0, 4]], [0.75, 0.5, 4 / 6], [0.75, 0.25, 1]),
                                    ([[5, 0], [5, 0]], [0.5, 0], [1, 0]), ([[4, 1], [0, 0]], [1, 0], [0.8, 0])):
        yours = answer(torch.tensor(rows))
        for name, mine, expected in zip(("precision", "recall"), yours or (None, None), (precision, recall)):
            if mine is None or not torch.allclose(torch.as_tensor(mine).double(), torch.tensor(expected).double()):
                print(f"not yet: {rows}: your {name} is {mine}, expected {[round(value, 2) for value in expected]}")
                return False
    print("right: the diagonal over the columns, the diagonal over the rows")
    return True


ddp.judge(check_quality, my_quality)

# %% [markdown]
# ### Stretch · How sure is the number? (15 minutes)
#
# Had the test set held other images of the same kind, the accuracy would be another. The *bootstrap* imitates that: draw as many images as there are,
# with replacement, from the ones you have, and note the accuracy; do it 2,000 times; the middle 95 % of the results are the interval.
# **Goal.** `right` says of each test image whether it was judged rightly (array of bool). Return the lower and the upper end.
# **Hint.** `rng.choice(right, size=(draws, len(right)))` draws all at once; `np.quantile(values, [0.025, 0.975])`.

# %% tags=["solution"]
def my_interval(right, draws=2_000, seed=0):
    """The 95 % interval of the accuracy by the bootstrap: (low, high)."""
    # your code
    rng = np.random.default_rng(seed)
    low, high = np.quantile(rng.choice(right, size=(draws, len(right))).mean(1), [0.025, 0.975])
    return low, high
    # end of your code


# %% tags=["exercise"]
def check_interval(answer):
    for hits, count in ((240, 300), (30, 100), (500, 1_000)):
        yours = answer(np.arange(count) < hits)
        share = hits / count
        reach = 1.96 * (share * (1 - share) / count) ** 0.5
        expected = [share - reach, share + reach]
        if yours is None or not np.allclose(yours, expected, atol=0.2 * reach):
            print(f"not yet: {hits} of {count} are right: yours {yours}, expected about ({expected[0]:.3f}, {expected[1]:.3f})")
            return False
    print("right: this is what to write beside an accuracy")
    return True


ddp.judge(check_interval, my_interval)

# %% [markdown] tags=["instructor"]
# **Instructor.** Expected wrong answers. Exercise 1: the mean of the ranks' accuracies (0.375 instead of 0.6; divides by zero where a rank judged
# none); the own accuracy only (forgot the call). Exercise 2: rows and columns exchanged; `nan` for a class that was never named. Stretch: draws
# without replacement (no spread at all), or too few of them. Prediction: most say 20; the pair of classes is anybody's guess, and a good moment to ask who looked at
# the pictures.

# %% [markdown]
# ## 10. Break it
#
# "Only one rank needs the result, so only one has to evaluate." It is the most natural line of all, and there is a collective call behind it: rank 0
# waits in `share_buffers` or `all_reduce` for ranks that will never come. Read the message together: which rank is to blame, and where was the other?

# %% tags=["lesson"]
def judge_on_rank_0_only(**arguments):
    """From the museum of faults: a collective call behind `if rank == 0`."""
    return judge(**arguments) if ddp.rank() == 0 else None


try:
    ddp.launch(client, judge_on_rank_0_only, **arguments, rows=test, workers=2)
except ddp.RankFailed as failure:
    broken = failure
print(str(broken).splitlines()[0].replace(broken.host, "HOST"))
print("...")
print("\n".join(line.strip() for line in str(broken).splitlines() if "Where rank" in line or "dist." in line))

# %% [markdown]
# The repair: *all* ranks call what talks, and all get the result. Behind `if ddp.rank() == 0:` belongs only what is silent: printing, reporting, writing
# a file.

# %% tags=["lesson"]
repaired = ddp.launch(client, judge, **arguments, rows=test, workers=2)
print("all ranks evaluate:", repaired.result[0].sum().item(), "images judged,", torch.equal(repaired.result[0], matrix) and "the same matrix again")

# %% [markdown]
# ## 11. Does it scale?
#
# Compare at equal *samples seen*, never at equal steps. Here the global batch is the same, so equal steps are equal samples. The loss is *nearly* the same:
# batch normalisation sees other shares. Believe the measurement.

# %% tags=["lesson"]
def fifteen_steps(images, rows, network, batch_size):
    """The training loop without validation and checkpoints, for so many steps at a constant learning rate."""
    torch.manual_seed(0)
    sampler = ddp.ElasticSampler(15 * batch_size, batch_size)
    model = DDP(make_network(network, len(images.classes)).to(ddp.device()), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    for scenes, labels in DataLoader(Subset(images, rows[:15 * batch_size]), batch_sampler=sampler):
        loss = F.cross_entropy(model(normalized(scenes.to(ddp.device()))), labels.to(ddp.device())) * sampler.weight
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ddp.report(loss=loss)


# %% tags=["lesson", "nbval-ignore-output"]
measured, shuffled = [], np.random.default_rng(0).permutation(training)
for ranks in (1, 2):
    trial = ddp.launch(client, fifteen_steps, images=images, rows=shuffled, network=settings.network, batch_size=32, workers=ranks)
    steps = trial.metrics.query("rank == 0").sort_values("step")
    speed = 32 / steps["time"].diff().median()
    measured.append({"ranks": ranks, "images/s": speed, "images seen": steps["samples"].max(), "loss": trial.metrics["loss"].tail(5 * ranks).mean()})
scaling = pd.DataFrame(measured).set_index("ranks")
scaling["efficiency"] = scaling["images/s"] / scaling["images/s"].loc[1] / scaling.index
print(scaling.round({"images/s": 0, "loss": 3, "efficiency": 2}).to_string())
print(f"2 ranks are {scaling['images/s'].loc[2] / scaling['images/s'].loc[1]:.2f} times as fast as 1 on {os.cpu_count()} cores")

# %% [markdown]
# The gradients of all those millions of weights travel in each step, and each rank moves all weights by itself. Both cost the same for a batch of 32
# as for one of 512. Larger batches and larger images give the ranks more to compute between two meetings.
#
# `make scaling TUTORIAL=ucmerced WORKERS="1 2 4"` does this with whole runs, and draws both curves: the loss against samples, and against seconds.

# %% [markdown]
# ## 12. The same on a cluster
#
# Not a line of this file changes. On a batch system nobody may simply start a process: you hand in a *job*, a script with what it needs, and the queue
# starts it when there is room. `make run TUTORIAL=ucmerced CLUSTER=slurm WORKERS=4` hands in one job for each worker. Look at the script before you
# do: `DRY=1` prints it and submits nothing, also where there is no Slurm. Here is the part that you may have to adapt:

# %% tags=["lesson"]
script = describe("slurm", workers=4, tutorial="ucmerced")
print("\n".join(line for line in script.splitlines() if line.startswith(("# ", "#!", "#SBATCH"))))

# %% [markdown]
# `#SBATCH` lines come from the profile `clusters/slurm.yaml`. What your site wants otherwise, such as an account, a partition, a longer time, GPUs, goes into a
# copy of it, or for once into `OPTIONS`: `make run TUTORIAL=ucmerced CLUSTER=slurm OPTIONS="queue=gpu account=abc walltime=02:00:00"`. PBS differs
# in its words, not in the idea:

# %% tags=["lesson"]
print("\n".join(line for line in describe("pbs", workers=4).splitlines() if line.startswith(("# ", "#!", "#PBS"))))

# %% [markdown]
# | you may | command |
# |---|---|
# | run a program on the login node | `make run TUTORIAL=ucmerced CLUSTER=slurm WORKERS=4` (or `CLUSTER=pbs`, `slurm-gpu`, `pbs-gpu`) |
# | run nothing there (Slurm) | `TUTORIAL=ucmerced WORKERS=4 sbatch --job-name=ucmerced clusters/batch/pets.sbatch`: the program is a job, too, and hands in the others |
# | run nothing there (PBS) | `qsub -N ucmerced -v TUTORIAL=ucmerced,WORKERS=4 clusters/batch/pets.pbs` |
# | not use Dask | `TUTORIAL=ucmerced sbatch --job-name=ucmerced --ntasks=4 clusters/batch/mnist.sbatch`: `srun` starts the ranks |
#
# Submit the last three again after a time limit: they go on from the newest checkpoint, and `best` is in it.
#
# ### The log to watch
#
# What a rank prints or reports goes to its worker, from there to the program that launched it, and that writes it into the run directory: no shared
# file system is needed. While it trains, in another terminal: `tail -f runs/ucmerced/*/log.txt`. These are the first lines of the run above:

# %% tags=["lesson", "nbval-ignore-output"]
print("\n".join((run.directory / "log.txt").read_text().splitlines()[:8]))

# %% [markdown]
# `metrics.jsonl` beside it has the numbers, a line for each report, for a program to read. In a job, the standard output says the same as the terminal
# would: it is where you look when there is no run directory yet. What differs from the laptop:
#
# | | laptop | cluster |
# |---|---|---|
# | workers come | within seconds | when the queue lets them |
# | data | drawn here, or your folder | a folder that the compute nodes see, or `SET="data=s3://bucket/prefix"` |
# | backend | gloo | NCCL, if every rank has its own GPU |
# | cost | your battery | core or GPU hours, also while a rank waits for its peers |
# | the run ends early because | you closed the lid | the time limit: `RESTARTS=3`, or submit again |

# %% [markdown]
# ## 13. Recap
#
# - Three sets, split by class and seed, the same on every rank: one to learn from, one to choose by, one that is judged once.
# - Evaluation sums counts: every image on exactly one rank, one `all_reduce`, and the matrix is that of one process, entry for entry.
# - Batch normalisation takes its statistics per rank: the loss depends a little on the number of ranks, and buffers are shared before an evaluation.
# - All ranks call what talks; only printing and writing stand behind `if rank == 0`.
# - A batch system changes how workers come, not how they train: read the job script first, then the log.
#
# **Common mistakes.** Choosing the epoch by the test set; averaging accuracies; a padded test set; an accuracy without its baseline and its error; evaluating
# in training mode; 1,000 outputs.
#
# **Next:** `make run TUTORIAL=ucmerced SET="data=/path/to/folder"` with images of your own, a folder for each class. With a hundred photographs a network
# that starts from nothing does not get far: then `dogs`, which starts from ImageNet, takes the same folder.
# **Read:** Yang and Newsam, *Bag-of-visual-words and spatial extensions for land-use classification*, ACM GIS 2010, for the photographs; He et al., *Deep
# residual learning for image recognition*, CVPR 2016; Ioffe and Szegedy, *Batch normalization*, ICML 2015; the manual of your cluster, on queues and accounts.

# %% tags=["nbval-ignore-output"]
client.close()
