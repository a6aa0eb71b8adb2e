# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Dogs: a better model or only a faster one?
#
# ## 1. The question
#
# Does more hardware make a better model, or only a faster one?
#
# **Afterwards you can**
# - train a new last layer on a pretrained network, then all of it;
# - choose a learning rate for a larger batch, and say for which budget it holds;
# - compare runs fairly: equal samples, several seeds, intervals;
# - let one loss decide, on every rank, when the rate falls;
# - find three faults of a published study.
#
# **You need** *rank* and *global batch* from `mnist`, checkpoints from `pets`, sums
# over ranks from `ucmerced`. No GPU, no network. **Time:** 75 to 100 minutes in class,
# 22 or more for three exercises.

# %% [markdown]
# ## 2. Set-up
#
# `make run TUTORIAL=dogs SET="epochs=4"` changes a setting. `PRESET=full` trains a
# ResNet50 on the photographs of Stanford Dogs. It needs GPUs and `make data
# TUTORIAL=dogs`. Nothing is downloaded unasked.

# %%
import math
import os

import pandas as pd
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import LinearLR, ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset

import ddp_common as ddp
from tutorials import dogs_study as ready  # what is not today's subject
from tutorials import kit
from tutorials.checks import dogs as checks
from tutorials.checks.common import judge
from tutorials.helpers import show

# %% tags=["parameters"]
settings = kit.settings(
    "dogs",
    data="shipped",  # "full" after `make data`, a folder, s3://…: class = folder
    anonymous=False,  # True: read a public bucket without credentials
    images_per_breed=40,  # 0: all there are
    cache="memory",  # of decoded images; "": none are kept
    size=64,  # pixels
    backbone="efficientnet-lite0",  # or "resnet50", if its weights are here
    download=False,  # True: fetch the weights of resnet50, 98 MB, if they are not
    pretrained=True,  # False: random weights, no head phase
    head_epochs=5,  # only the new last layer is trained
    epochs=1,  # all layers are trained
    batch_size=32,  # of all ranks together
    grow_batch=False,  # True: batch_size of each rank; the rate grows with their number
    learning_rate=0.003,  # of the head; that of the backbone: ready.optimizer_of
    warm_up=800,  # samples in which a grown rate is reached, step by step
    trials=6,  # seeds of the study
    seed=0,  # another one: other seeds in the study too
    presets={"full": ready.FULL},
    limits=ready.LIMITS,
)

# %% tags=["lesson"]
os.environ["WORKERS"] = "4"  # we compare 1, 2 and 4 ranks; two cores are enough

# %%
client = ddp.connect()
dataset = kit.fetch("dogs", settings.data)
backend = "NCCL" if torch.cuda.is_available() else "gloo"
title = dataset.title if settings.data == "full" else "dogs"
print(f"{client.ranks} ranks · {backend} · {title}: {dataset.origin}")

# %% [markdown]
# ## 3. The data
#
# Stanford Dogs cannot be shipped. Our dogs are **drawn, not photographed**: no figure
# here says anything about real dogs.
#
# There are three sets, as in `ucmerced`: images to **learn** from, to **choose** by (a
# rate, an epoch), and to **judge** by, at the end. The study in section 6 has all
# three. The job in section 7 has none to judge by: those *held out* choose the epoch.

# %%
reading = ready.reading_of(dataset, settings)
images = ddp.ImageFolder(**reading)
training, held_out = ready.divide(
    images.targets, settings.images_per_breed, settings.seed
)
print(f"{len(images.classes)} breeds, {len(images):,} images")
print(f"`train`: {len(training):,} to learn from, {len(held_out):,} held out")

# %% tags=["lesson"]
photos, labels = ready.photos_of(images, most=1_500)  # uint8
show(*ready.draw_breeds(photos, labels, images.classes))

# %% [markdown]
# ## 4. One process first
#
# A *backbone* is a network without its last layer. It turns an image into numbers, its
# *features*. Ours has learned from the 1.3 million photographs of ImageNet. A *head*,
# one linear layer, turns features into a score for each breed. This is *transfer
# learning*: only the head is new.


# %%
class Classifier(nn.Module):
    """From images (n, 3, size, size), uint8, to scores (n, classes), float32.

    The backbone gets `weights`; without them it begins with random ones.
    """

    def __init__(self, backbone, classes, weights=None):
        super().__init__()
        self.pixels, self.backbone, self.width = ready.layers_of(backbone)
        if weights is not None:
            self.backbone.load_state_dict(weights)
        self.head = ready.new_head(self.width, classes)  # all zeros: it knows nothing
        self.to(memory_format=torch.channels_last)  # convolutions are faster so

    def features(self, images):
        features = self.backbone(self.pixels(images))
        return F.layer_norm(features, (self.width,))  # to a common scale

    def forward(self, images):
        return self.head(self.features(images))


weights = ready.imagenet_weights(settings.backbone, settings.download)
origin = "weights from ImageNet" if settings.pretrained else "random weights"
print(f"backbone {settings.backbone}, {origin}")

# %% [markdown]
# While only the head learns, the backbone is *frozen*: its weights stay. So we compute
# the features of an image once. Then the plain loop. *Momentum*: a step also goes on in
# the direction of the steps before it.


# %% tags=["lesson"]
def train_head(features, labels, rows, batch, rate, seed=0, epochs=5, watched=None):
    """Train a head on `rows`; `watched`: rows to evaluate it on after each epoch."""
    torch.manual_seed(seed)
    head = ready.new_head(features.shape[1], int(labels.max()) + 1)
    optimizer = torch.optim.SGD(head.parameters(), lr=rate, momentum=0.9)
    losses, accuracies = [], []
    for _ in range(epochs):
        for chosen in rows[torch.randperm(len(rows))].split(batch):
            if len(chosen) < min(batch, len(rows)):
                continue  # a smaller last batch would count as much as a whole one
            loss = F.cross_entropy(head(features[chosen]), labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        if watched is not None:
            _, accuracy = ready.evaluate_head(head, features, labels, watched)
            accuracies.append(accuracy)
    return head, losses, accuracies


net = Classifier(settings.backbone, len(images.classes), weights)
features = ready.features_in_one_process(net, photos)
learn, choose, judged = ready.parts_of(labels, seed=0)
head, losses, _ = train_head(features, labels, learn, batch=32, rate=0.008)
_, right = ready.evaluate_head(head, features, labels, choose)
show(*ready.draw_losses(losses, right))

# %% [markdown]
# **A small question.** Stanford Dogs was taken from ImageNet. With `PRESET=full`, does
# the accuracy on held-out photographs say how good the model is on new ones?
#
# <details><summary>Answer</summary>
# No. The backbone has probably seen images that are held out from the head. The drawn
# dogs are new to it.</details>

# %% [markdown]
# ## 5. Predict
#
# One rank trains well with a batch of 8 images. Now you get 16 ranks. Each keeps its 8
# images: the *global* batch is 128. The learning rate stays. Compare both models after
# equally many *samples* (images seen). After 5 epochs the model of 16 ranks is
#
# - `"better"`: a gradient over 128 images is less noisy than one over 8;
# - `"same"`: both have seen the same images;
# - `"worse"`: it made a sixteenth of the steps.
#
# And after 20 epochs: is the difference `"larger"` or `"smaller"` than after 5?

# %% tags=["lesson"]
after_5 = None  # "better", "same" or "worse"
after_20 = None  # "larger" or "smaller"

# %% [markdown]
# ## 6. Batch and learning rate
#
# Often the global batch grows with the ranks. Then an epoch has fewer steps, and the
# old rate may no longer fit. Three rules for a batch *k* times as large: the rate is
# **kept**, or multiplied by √k (**square root**), or by k (**linear**).
#
# One process with batch 128 makes the same steps as 16 ranks with 8 images each, if no
# sample influences another. (Section 8 compares real ranks.) So we can afford **many
# trials**. The seed of a *trial* deals out images to learn from and images to judge by.
# A trial trains a head with each batch and each of five rates, for 5 epochs. Dask runs
# the trials as tasks, without ranks.
#
# Of each batch we take the rate with the lowest mean loss on the images to choose by.


# %% tags=["lesson"]
BATCHES = (8, 32, 128)  # of 1, 4 and 16 ranks with 8 images each
RATES = [0.0005 * 4**power for power in range(5)]


def trial(seed, features, labels):
    """A row for each batch and rate: a loss to choose by, and the judged accuracy."""
    torch.set_num_threads(1)
    learn, choose, judged = ready.parts_of(labels, seed)
    found = []
    for batch in BATCHES:
        for rate in RATES:
            head, _, _ = train_head(features, labels, learn, batch, rate, seed)
            loss, _ = ready.evaluate_head(head, features, labels, choose)
            _, accuracy = ready.evaluate_head(head, features, labels, judged)
            found.append((seed, batch, rate, loss, accuracy))
    return found


trials, seeds = ready.in_tasks(client, trial, settings, features, labels)
study = ready.table_of(trials)
sizes = f"{len(learn)} images to learn from, {len(choose)} to choose by"
print(f"{len(seeds)} seeds; {sizes}, {len(judged)} to judge by")
show(*ready.draw_study(study))

# %% [markdown]
# The bars are the standard deviation over seeds. Whether they overlap says nothing: in
# one seed, all batches learn from the same images. So look at **differences within a
# seed**, in *points*: from 70 % to 72 % is 2 points.
#
# The table has their mean and an interval. Trials share most of their images, so
# `ready.compare` widens it (Nadeau and Bengio, 2003). We widen it again: *all rows
# together* are then right with about 95 %. The rules are applied to batch 128 alone.
# Where one gives its best rate, one row shows both.


# %% tags=["lesson", "nbval-ignore-output"]
claims = ready.compare(study, overlap=len(judged) / len(learn))
print("Judged accuracy minus that of batch 8 with its chosen rate, in points")
print(claims.infer_objects().round({"rate": 4, "points": 1, "low": 1, "high": 1}))
print(f"chosen rates at an edge of the grid: {ready.at_edge(study) or 'none'}")

# %% [markdown]
# The rows 'its own best' compare batches that were tuned alike. The others are rules
# without new tuning. *Not told apart* does not mean 'equal': the interval says how
# large a difference may still be, with the chosen rates and 5 epochs.
#
# **Is 5 epochs enough?** Now 20, with the kept rate: two batches, three seeds.


# %% tags=["proof"]
def longer(seed, features, labels):
    """Judged accuracy after each epoch, for batch 8 and batch 128 with one rate."""
    torch.set_num_threads(1)
    learn, _, judged = ready.parts_of(labels, seed)
    data = (features, labels, learn)
    return {
        batch: train_head(*data, batch, kept_rate, seed, 20, watched=judged)[2]
        for batch in (8, 128)
    }


kept_rate = ready.best_rates(study)[8]
budgets, _ = ready.in_tasks(client, longer, settings, features, labels, most=3)
show(*ready.draw_budgets(budgets))
gap = {epochs: abs(ready.gap(budgets, epochs)) for epochs in (5, 20)}  # mean, in points
kept = ready.verdict_of(claims, 128, "kept")
tuned = ready.verdict_of(claims, 128, "its own best")
if ready.as_written(settings):
    found = (kept, tuned, gap[20] < gap[5] / 2)
    assert found == ("lower", "not told apart", True), (claims, gap)
print(f"kept rate, after 5 epochs: {ready.SAID[kept]}. You said: {after_5}")
then = "smaller" if gap[20] < gap[5] else "larger"
print(f"after 20, the mean difference is {then}. You said: {after_20}")
print(f"batch 128 with its own best rate, after 5 epochs: {tuned}")

# %% [markdown]
# **A small question.** Somebody shows: 'With 16 ranks and the old rate the model is
# worse.' What do you ask?
#
# <details><summary>Answer</summary>
# After how many epochs? A kept rate makes fewer steps: it needs more time. And what
# does batch 128 reach with a rate of its own?</details>
#
# ## 7. On Dask
#
# Now the whole network, on ranks: first the head, on frozen features; then all layers.
# `evaluate` sums over all ranks, then divides once.


# %%
def evaluate(model, samples):
    """Mean loss and accuracy on all `samples`, the same numbers on every rank."""
    model.eval()
    totals = torch.zeros(3, dtype=torch.float64, device=ddp.device())
    sampler = ddp.EvalSampler(len(samples), 100)  # each sample on one rank
    with torch.no_grad():
        for inputs, targets in DataLoader(samples, batch_sampler=sampler):
            scores = model(inputs.to(ddp.device()))
            targets = targets.to(ddp.device())
            totals[0] += F.cross_entropy(scores, targets, reduction="sum")
            totals[1] += (scores.argmax(1) == targets).sum()
            totals[2] += len(targets)
    dist.all_reduce(totals)
    loss, right, count = totals.tolist()
    return loss / count, right / count


# %% [markdown]
# Beside the plain loop, these lines of `train` matter most:
#
# | line | why |
# |---|---|
# | `ready.phase(...)` | the head and computed features; then the network and images |
# | `DDP(part)` | averages the gradients of what is trained in this phase |
# | `ranks`, `ramp` | with `grow_batch`: the linear rule, step by step (*warm-up*) |
# | `plateau.step(...)` | lowers the rate when the loss of all ranks stops falling |
# | `best`, in the checkpoint | the best weights so far outlive a restart |
#
# On a *plateau* the loss does not fall. `patience=1`: lower the rate after two such
# epochs. Six epochs may be too few; section 11 shows a rate that falls.


# %%
def train(settings, reading, weights):
    """Train a Classifier, the head first if there are `weights`. Returns the best."""
    torch.set_flush_denormal(True)  # CPUs are slow with numbers that are nearly 0
    images = ddp.ImageFolder(**reading)
    rows = ready.divide(images.targets, settings.images_per_breed, settings.seed)
    torch.manual_seed(settings.seed)  # the same first weights on all ranks
    net = Classifier(settings.backbone, len(images.classes), weights).to(ddp.device())
    ranks = ddp.world_size() if settings.grow_batch else 1
    batch_size = settings.batch_size * ranks
    optimizer = ready.optimizer_of(net, settings.learning_rate * ranks, weights)
    ramp = LinearLR(optimizer, 1 / ranks, 1, max(1, settings.warm_up // batch_size))
    plateau = ReduceLROnPlateau(optimizer, factor=0.3, patience=1)
    sampler = ddp.ElasticSampler(len(rows[0]), batch_size, seed=settings.seed)
    model, best = None, ready.Best()
    parts = {"model": net, "optimizer": optimizer, "ramp": ramp, "plateau": plateau}
    checkpoint = ddp.Checkpoint(**parts, best=best, sampler=sampler, every_steps=50)
    checkpoint.restore()  # nothing to restore on a first attempt
    for epoch in sampler.epochs(settings.head_epochs + settings.epochs):
        frozen = epoch < settings.head_epochs
        if model is None or epoch == settings.head_epochs:  # a phase begins, or goes on
            part, to_learn, to_choose = ready.phase(frozen, net, images, *rows)
            model = DDP(part)
        net.train(weights is None)  # BatchNorm from ImageNet stays in eval mode
        for inputs, targets in ddp.DataLoader(to_learn, batch_sampler=sampler):
            scores, targets = model(inputs.to(ddp.device())), targets.to(ddp.device())
            loss = F.cross_entropy(scores, targets) * sampler.weight
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            checkpoint.step()
            ramp.step()
            ddp.report(**{"head_loss" if frozen else "loss": loss})  # of every rank
        loss, accuracy = evaluate(part, to_choose)
        plateau.step(loss)
        best.keep(loss, net)
        if ddp.rank() == 0:
            values = {"validation_loss": loss, "validation_accuracy": accuracy}
            ddp.report(**values, learning_rate=optimizer.param_groups[0]["lr"])
        checkpoint.save()
    return best.weights


# %%
ready.refuse_nothing_to_train(settings)
first_weights = weights if settings.pretrained else None
settings.head_epochs *= settings.pretrained  # random layers are not to be frozen
given = {"settings": settings, "reading": reading, "weights": first_weights}
run = ddp.launch(client, train, **kit.launch_options(), **given)
torch.save(run.result, run.directory / "best.pt")
print(f"{run.world_size} ranks, {settings.head_epochs} + {settings.epochs} epochs")

# %% tags=["nbval-ignore-output"]
table = ready.evaluations(run.metrics)
print(table.astype({"samples": int}).round(4).to_string())
print(ready.best_in_words(table, len(held_out)), "best.pt has its weights.")
figure, alt = ready.draw_run(run.metrics, len(images.classes))
run.save_figure(figure, "curves.png")

# %% tags=["lesson"]
show(figure, alt)

# %% [markdown]
# Each rank reports the loss of its own images. The dots are one number for all ranks.
#
# **The linear rule on 1, 2 and 4 ranks**, with 8 images on each, four epochs of the
# head. And what do ImageNet's weights bring? The last two runs train all layers with
# one rate, from ImageNet's weights and from random ones.
#
# These short runs learn from 160 images of 32 × 32 pixels: enough to see how a rate
# acts, not for a good model. So we look at the training loss only.


# %% tags=["proof"]
def short_run(ranks, weights=weights, **changes):
    """A short training on so many ranks, which leaves no folder."""
    given = ready.shortly(settings, reading, weights, changes)
    return ddp.launch(client, train, **given, workers=ranks, directory=False)


runs = {f"{n} × 8, linear": short_run(n, grow_batch=True) for n in (1, 2, 4)}
runs["4 × 8, kept"] = short_run(4, batch_size=32)
all_layers = {"head_epochs": 0, "epochs": 4, "learning_rate": 0.002}
runs["all layers"] = short_run(1, **all_layers)
runs["all layers, random weights"] = short_run(1, weights=None, **all_layers)
rates, losses = ready.rates_and_losses(runs)
assert rates[:4] == [0.002, 0.004, 0.008, 0.002], rates
assert losses[2] < losses[3] and losses[4] < losses[5], losses
show(*ready.draw_runs(runs))

# %% [markdown]
# There is one run of each: neighbours may change places. And one rate for both says
# little about random weights at their own best.
#
# ## 8. Only faster?
#
# Now the batch does *not* grow. One rank has a batch of 32, or two or four share it.
# How much do their losses differ?

# %% tags=["proof"]
fixed = {"images_per_breed": 10, "batch_size": 32, "epochs": 1}
alone, *shared = (ready.losses_of(short_run(ranks, **fixed)) for ranks in (1, 2, 4))
for phase_name, steps in (("head_loss", None), ("loss", 2)):
    one = alone[phase_name][:steps]
    each = torch.stack([several[phase_name][:steps] for several in shared])
    largest = ((each - one).abs() / one).max()
    assert len(one) > 1 and largest < 1e-3, (one, each)
    print(f"{phase_name}: {len(one)} steps, largest difference {largest:.1%}")

# %% [markdown]
# Later steps may differ more: ranks add in another order, and rounding errors grow.
#
# **Frozen weights are not yet a frozen layer.** *BatchNorm* layers scale by stored
# means and variances in eval mode. In training mode each batch moves these, also after
# `requires_grad_(False)`. So `train` keeps eval mode. The fault, beside it:


# %% tags=["proof"]
def changed(state):
    """Names of the backbone's tensors that are not what they were."""
    return [name for name in weights if not torch.equal(state[name], weights[name])]


after = runs["4 × 8, linear"].result
moved = changed({name: after[f"backbone.{name}"] for name in weights})
share = (after["head.weight"] != 0).float().mean()  # it began with zeros
assert share > 0 and not moved
print(f"changed: {share:.0%} of the head, {len(moved)} tensors of the backbone")

net.backbone.requires_grad_(False)
net.train()  # the fault
with torch.no_grad():
    net.features(photos[:20])
moved = changed(net.backbone.state_dict())
assert moved and not any(name.endswith(("weight", "bias")) for name in moved), moved
print(f"BatchNorm in training mode: {len(moved)} of {len(weights)} tensors")

# %% [markdown]
# **How much faster?** One measurement is not enough: we time one rank and two ranks in
# turns, three times. A step has 32 small images.

# %% tags=["lesson", "nbval-ignore-output"]
given = ready.for_step_times(Classifier, settings, photos, labels, weights)
times = {1: [], 2: []}  # mean ms of a step, of each round
for _ in range(3):
    for ranks, rounds in times.items():
        short = dict(workers=ranks, directory=False)
        rounds.append(ddp.launch(client, ready.step_times, **given, **short).result)
table = pd.DataFrame(times).set_axis(["1 rank", "2 ranks"], axis="columns")
table["quotient"] = table["1 rank"] / table["2 ranks"]
print(f"ms of a step, in {len(table)} rounds. Below: the smallest and the largest")
print(table.round(2).to_string())
print(table.agg(["min", "max"]).round(2).to_string(header=False))

# %% [markdown]
# More rounds may differ more. `make scaling TUTORIAL=dogs WORKERS="1 2 4"` compares
# whole runs.
#
# **A small question.** Each of two ranks has half of the images. Why may a step take
# more than half of the time?
#
# <details><summary>Answer</summary>
# Each rank does the whole update. Gradients must be averaged; a rank may wait for the
# other. Cores share memory. Which matters? See docs/recipes.md, 'See where the time
# goes'.</details>
#
# ## 9. The study from which this lesson comes
#
# Saturn Cloud's [workshop](https://github.com/saturncloud/workshop-dask-pytorch)
# trained a ResNet50 on Stanford Dogs on 1, 4, 7 and 10 workers. A step has 100 images
# of each worker. Its
# [blog](https://www.saturncloud.io/s/combining-dask-and-pytorch-for-better-faster-transfer-learning/)
# describes it: the rate grew with the workers. Its logs (`tools/stats_cache2.tar.gz`
# there) have 165 steps in an epoch, **whatever the number of workers**:
#
# | workers | images in a step | steps in an epoch | images seen in an epoch |
# |---|---|---|---|
# | 1 | 100 | 165 | 16,464 |
# | 4 | 400 | 165 | 65,856 |
# | 10 | 1,000 | 165 | 164,640 |
#
# 16,464 images, 80 % of all, are there to learn from. Every worker used all of them
# (`SubsetRandomSampler`, in `tools/setup2.py`). The logs have one run for each number
# of workers:

# %% tags=["lesson"]
show(*ready.draw_original())

# %% [markdown]
# After equally many steps, ten workers look best. After equally many samples the order
# is reversed. The workshop's pictures have steps on the axis.
#
# ## 10. Exercises
#
# ### Exercise A · Choose a rate (6 minutes)
#
# You have tuned a rate, `base`, on one rank. Now you get `ranks` ranks. Each keeps its
# batch. Return the learning rate after `seen` samples. `rule` is `"kept"`, `"square
# root"` or `"linear"`. Training starts with `base`. The rate grows evenly with the
# samples. After `warm_up` samples it is the rule's rate: at once, if `warm_up` is 0.


# %% tags=["exercise", "solution"]
def my_rate(seen, base, ranks, rule, warm_up):
    """The learning rate after `seen` samples."""
    # your code
    end = base * {"kept": 1, "square root": math.sqrt(ranks), "linear": ranks}[rule]
    done = min(seen / warm_up, 1) if warm_up else 1
    return base + done * (end - base)
    # end of your code


judge(checks.rate, my_rate)

# %% [markdown]
# ### Exercise B · Compare fairly (6 minutes)
#
# `log[workers]` is a list: right answers after the first step, the second, and so on. A
# step has `images` images of *each* worker. After `samples` samples, at least one step
# is finished. Return a dict with the keys of `log`: the right answers after the last
# finished step.


# %% tags=["exercise", "solution"]
def my_comparison(log, images, samples):
    """Of each number of workers, right answers after equally many samples."""
    # your code
    steps = {workers: samples // (workers * images) for workers in log}
    return {workers: log[workers][steps[workers] - 1] for workers in log}
    # end of your code


judge(checks.comparison, my_comparison)

# %% [markdown]
# ### Exercise C · Repair the study (10 minutes)
#
# Section 9 has the first fault: every worker learns from all images. **Two more** are
# here. Every rank calls this function after each epoch, to validate and to lower the
# rate on a plateau. No error is raised.


# %% tags=["lesson"]
def original_end_of_epoch(model, inputs, labels, training, held_out, plateau):
    """Validate, lower the rate on a plateau; returns mean loss and accuracy."""
    loss, right, count = 0.0, 0, 0
    for batch in ddp.EvalSampler(len(training), 100):
        rows = training[batch]
        with torch.no_grad():
            scores = model(inputs[rows])
        loss += F.cross_entropy(scores, labels[rows], reduction="sum").item()
        right += (scores.argmax(1) == labels[rows]).sum().item()
        count += len(rows)
    plateau.step(loss / count)
    return loss / count, right / count


# %% [markdown]
# `training` and `held_out` are rows of `inputs` and `labels`. Repair the loop yourself,
# without `evaluate`. Each held-out image is judged once, by one rank. Every rank calls
# `plateau.step` once, with the loss of all held-out images. The function returns this
# loss and accuracy.
#
# <details><summary>Hint 1</summary>
# Which images does the loop see?</details>
# <details><summary>Hint 2</summary>
# What is <code>loss / count</code> on each rank? How does <code>evaluate</code>
# end?</details>


# %% tags=["exercise", "solution"]
def my_end_of_epoch(model, inputs, labels, training, held_out, plateau):
    """Validate, lower the rate on a plateau; returns mean loss and accuracy."""
    # your code
    totals = torch.zeros(3, device=inputs.device)
    for batch in ddp.EvalSampler(len(held_out), 100):
        rows = held_out[batch]
        with torch.no_grad():
            scores = model(inputs[rows])
        totals[0] += F.cross_entropy(scores, labels[rows], reduction="sum")
        totals[1] += (scores.argmax(1) == labels[rows]).sum()
        totals[2] += len(rows)
    dist.all_reduce(totals)
    loss, right, count = totals.tolist()
    plateau.step(loss / count)
    return loss / count, right / count
    # end of your code


judge(checks.end_of_epoch(client), my_end_of_epoch, timeout=180)

# %% [markdown]
# <details><summary>Where the workshop's code has them</summary>
# <code>tools/setup2.py</code> gives both loaders the training sampler: the logs have
# 165 steps of evaluation; held-out images would make 42.
# <code>scheduler.step(loss)</code> gets each worker's last training loss.</details>
#
# ## 11. Break it
#
# Suppose only one fault is repaired: the loop sees the held-out images. (We pass them
# as `training`, too.) `ready.train_on_ranks` trains a head on two ranks; then again,
# with the loss of `evaluate`. What has decided the rates in the picture?


# %% tags=["proof"]
def repaired(model, inputs, labels, training, held_out, plateau):
    loss, _ = evaluate(model, TensorDataset(inputs[held_out], labels[held_out]))
    plateau.step(loss)


given = {"features": features, "labels": labels, "training": learn, "held_out": choose}
given |= {"workers": 2, "directory": False}
outcome = {}
for name, end in (("own losses", original_end_of_epoch), ("one loss", repaired)):
    run = ready.launched(client, **given, end_of_epoch=end)
    (rates, head), (others_rates, others_head) = outcome[name] = run.result
    same = (rates == others_rates, torch.equal(head, others_head))
    print(f"{name}: the same rates {same[0]}, the same weights {same[1]}")
assert same == (True, True)  # with one loss; without, other images may decide alike
show(*ready.draw_rates([rates for rates, _ in outcome["own losses"]]))

# %% [markdown]
# <details><summary>What has happened</summary>
# Each rank sees the loss of <i>its own</i> images and lowers its own rate. DDP averages
# gradients, not rates. From the first difference on, equal gradients make unequal
# steps: the copies become two models. <code>run.problems</code> says so.</details>
#
# **The rule:** whatever a rank decides by must be the same on all ranks.
#
# ## 12. Recap
#
# **Does more hardware make a better model, or only a faster one?** With the settings as
# they are, we found no better one. *Faster* was measured for one case: a step of 32
# small images, on one machine. Read the quotient in section 8: it need not be near 2.
#
# - With a fixed global batch, several ranks made the steps of one, up to rounding, in
#   all steps that we compared.
# - A batch that grows with the ranks is *another* training, with fewer steps. With the
#   kept rate it was worse after 5 epochs, and less so after 20: name the budget.
# - Larger batches, tuned alike, were not told apart from the smallest after 5 epochs.
#   The intervals say which difference is still possible.
# - A comparison needs equal samples, several seeds, and intervals.
# - Split, validation loss, moment to stop: base each decision on what all ranks share.
#
# **Next:** your own photographs:
# `make run TUTORIAL=dogs SET="data=/path/to/photos images_per_breed=0 size=128"`. Then
# `flights`: why train where the table is?
#
# **Read:** Goyal et al., [Accurate, Large Minibatch
# SGD](https://arxiv.org/abs/1706.02677). Shallue et
# al., [Measuring the Effects of Data
# Parallelism](https://jmlr.org/papers/v20/18-789.html), for rates tuned for every
# batch. Nadeau and Bengio, [Inference for the Generalization
# Error](https://doi.org/10.1023/A:1024068626366).

# %%
client.close()
