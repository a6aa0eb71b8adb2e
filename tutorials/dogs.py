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
# - train a new last layer on a network that has learned from ImageNet, then all of it;
# - choose a learning rate for a larger batch, and compare runs with intervals;
# - let a loss that is the same on every rank decide when the rate falls;
# - read a profile of a step, and find two faults of a published study.
#
# **You need** *rank* and *global batch* from `mnist`, checkpoints from `pets`, three
# sets and the evaluation by sums over ranks from `ucmerced`, the notebook before. No
# GPU, no network. **Data:** drawn dogs of ten breeds. **Computing:** about a minute on
# two cores.
#
# **Time:** 75 minutes in class, 18 of them for two exercises.

# %% [markdown]
# ## 2. Set-up
#
# `make run TUTORIAL=dogs SET="epochs=4"` changes a setting. `PRESET=full` trains a
# ResNet50 on the 20,580 photographs of Stanford Dogs, after `make data TUTORIAL=dogs`.
# It needs GPUs. Nothing is downloaded unless you ask for it.

# %%
import math
import os
import time
from types import SimpleNamespace

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
import torch.distributed as dist
import torch.nn.functional as F
from scipy.stats import binomtest
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import LinearLR, ReduceLROnPlateau
from torch.profiler import profile, record_function
from torch.utils.data import DataLoader, TensorDataset

import ddp_common as ddp
from tutorials import dogs_study as ready  # what is not today's subject
from tutorials import kit
from tutorials.checks import dogs as checks
from tutorials.checks.common import judge
from tutorials.helpers import curve, pictures, show

# %% tags=["parameters"]
full = {"data": "full", "backbone": "resnet50", "download": True, "size": 224}
full |= {"batch_size": 100, "grow_batch": True, "warm_up": 16_000, "epochs": 6}
full |= {"images_per_breed": 0, "head_epochs": 2}

settings = kit.settings(
    "dogs",
    data="shipped",  # "full" after `make data`, a folder, s3://…: class = folder
    anonymous=False,  # True: read a public bucket without credentials
    images_per_breed=100,  # 0: all there are
    cache="memory",  # of decoded images; "": none are kept
    size=64,  # pixels
    backbone="efficientnet-lite0",  # or "resnet50", if its weights are here
    download=False,  # True: fetch the weights of resnet50, 98 MB, if they are not
    pretrained=True,  # False: random weights, no head phase
    head_epochs=2,  # only the new last layer is trained
    epochs=2,  # all layers are trained
    batch_size=32,  # of all ranks together
    grow_batch=False,  # True: batch_size of each rank; the rate grows with their number
    learning_rate=0.003,  # of the head; that of the backbone: ready.optimizer_of
    warm_up=800,  # samples in which a grown rate is reached, step by step
    trials=10,  # seeds of the study
    seed=0,  # another one: other seeds in the study too
    presets={"full": full},
    limits={
        **dict.fromkeys(("images_per_breed", "head_epochs", "epochs"), (0, None)),
        "warm_up": (0, None),
        "trials": (4, 1_000),
    },
)

# %% [markdown]
# `connect()` starts a scheduler and two to four workers.

# %%
client = ddp.connect()
dataset = kit.fetch("dogs", settings.data)
backend = "NCCL" if torch.cuda.is_available() else "gloo"
title = dataset.title if settings.data == "full" else "dogs"
print(f"{client.ranks} ranks · {backend} · {title}: {dataset.origin}")

# %% [markdown]
# ## 3. The data
#
# Each breed is a folder of pictures. Stanford Dogs cannot be shipped. Ours are **drawn,
# not photographed**: no figure here says anything about real dogs.
#
# Three sets, as in `ucmerced`: images to **learn** from, images that **choose** (a
# rate, an epoch), images that **judge**. The study in section 6 has all three. `train`,
# in section 7, has the first two. The images held out choose its best epoch: so its
# accuracy on them is usually too high for new images.
#
# `images_per_breed=100` leaves 50 of each breed out of `train`, to save time.


# %%
reading = {
    "url": str(dataset.path),
    "size": settings.size,
    "cache": settings.cache or None,
    "anonymous": settings.anonymous,
}
images = ddp.ImageFolder(**reading)
training, held_out = ready.divide(
    images.targets, settings.images_per_breed, settings.seed
)
print(
    f"{len(images.classes)} breeds, {len(images):,} images of {images.size} x "
    f"{images.size} pixels. `train` takes {len(training):,} to learn from, and "
    f"{len(held_out):,} held out to choose by"
)

# %% tags=["lesson"]
most = 1_500 // len(images.classes)  # of each breed: here all
rows = ready.of_each_breed(images.targets, most).tolist()
photos = torch.stack([image for image, _ in images.__getitems__(rows)])  # uint8
labels = torch.tensor(images.targets)[rows]
few = torch.cat([torch.nonzero(labels == breed)[:3, 0] for breed in range(10)])
names = [images.classes[label].replace("_", "\n") for label in labels[few]]
show(
    pictures(photos[few].permute(0, 2, 3, 1), names),
    "Three pictures of each breed, with the name of the breed above each.",
)

# %% [markdown]
# ## 4. One process first
#
# A *backbone* is a network without its last layer. It turns an image into numbers, its
# *features*. Ours has learned from the 1.3 million photographs of ImageNet. A *head*,
# one linear layer, turns features into a score for each breed. This is *transfer
# learning*: only the head is new.
#
# **Which images are new to such a network?** The drawn dogs are. But *Stanford Dogs was
# taken from ImageNet*: with `PRESET=full` the backbone has probably seen images that
# are held out from the head. The accuracy on them is no estimate for new photographs.


# %%
class Classifier(nn.Module):
    """From images (n, 3, size, size), uint8, to scores (n, classes), float32.

    The backbone gets `weights`; without them it begins with random ones.
    """

    def __init__(self, backbone, classes, weights=None):
        super().__init__()
        self.backbone, self.width, mean, deviation = ready.layers_of(backbone)
        if weights is not None:
            self.backbone.load_state_dict(weights)
        for name, values in (("mean", mean), ("deviation", deviation)):
            values = torch.tensor(values).view(3, 1, 1)
            self.register_buffer(name, values, persistent=False)
        self.head = new_head(self.width, classes)

    def features(self, images):
        scaled = (images - self.mean) / self.deviation  # pixels as the weights expect
        return self.backbone(scaled.contiguous(memory_format=torch.channels_last))

    def forward(self, images):
        return self.head(self.features(images))


def new_head(width, classes):
    """Features to a common scale (LayerNorm), then a layer that knows nothing yet."""
    linear = nn.Linear(width, classes)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return nn.Sequential(nn.LayerNorm(width, elementwise_affine=False), linear)


weights = ready.imagenet_weights(settings.backbone, settings.download)
origin = "random weights"
if settings.pretrained:
    origin = f"weights from ImageNet, {ready.WEIGHTS[settings.backbone][0].name}"
print(f"backbone {settings.backbone}, {origin}")

# %% [markdown]
# While only the head learns, the backbone is *frozen*: its weights stay as they are. So
# we compute the features of an image once. Then the plain loop. *Momentum*: a step also
# goes on in the direction of the steps before.


# %% tags=["lesson"]
def train_head(features, labels, rows, batch_size, rate, seed=0, epochs=5):
    """Train a head on these rows, in one process. Returns it, and the losses."""
    torch.manual_seed(seed)
    head = new_head(features.shape[1], int(labels.max()) + 1)
    optimizer = torch.optim.SGD(head.parameters(), lr=rate, momentum=0.9)
    losses = []
    for _ in range(epochs):
        for batch in rows[torch.randperm(len(rows))].split(batch_size):
            if len(batch) < min(batch_size, len(rows)):
                continue  # the last one, if it is smaller
            loss = F.cross_entropy(head(features[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return head, losses


def evaluate_head(head, features, labels, rows):
    """Mean loss and accuracy on these rows."""
    with torch.no_grad():
        scores = head(features[rows])
    right = (scores.argmax(1) == labels[rows]).float()
    return F.cross_entropy(scores, labels[rows]).item(), right.mean().item()


net = Classifier(settings.backbone, len(images.classes), weights).eval()
with torch.no_grad():
    features = torch.cat([net.features(batch) for batch in photos.split(100)])
learn, choose, judged = ready.parts_of(labels, seed=0)
head, losses = train_head(features, labels, learn, batch_size=32, rate=0.005)
print(f"{len(features):,} images, {features.shape[1]:,} features of each")
figure = curve(pd.DataFrame({"step": range(len(losses)), "loss": losses}))
_, right = evaluate_head(head, features, labels, choose)
figure.axes[0].set_title(f"head: {right:.0%} of the images that choose are right")
show(
    figure, "The training loss of a head against the step. The title has the accuracy."
)

# %% [markdown]
# ## 5. Predict
#
# One rank trains well with a batch of 8 images. Now you get 16 ranks. Each keeps its 8
# images: the *global* batch is 128. The learning rate stays. Compared with one rank,
# after equally many *samples*, the model of 16 ranks is
#
# - `"better"`: a gradient over 128 images is less noisy than one over 8;
# - `"same"`: both have seen the same images;
# - `"worse"`: there were a sixteenth of the steps.
#
# **Write your prediction.** Section 6 has the answer.

# %% tags=["lesson"]
my_prediction = None  # "better", "same" or "worse"

# %% [markdown]
# ## 6. Batch and learning rate
#
# Often the global batch grows with the ranks. Then an epoch has fewer steps, and the
# old rate may no longer fit. Three rules for a batch *k* times as large:
#
# | rule | learning rate |
# |---|---|
# | kept | × 1 |
# | square root | × √k |
# | linear | × k |
#
# *Warm-up* begins with the old rate and reaches the new one step by step.
#
# We can study 16 ranks without having them: with 8 images each they make the step of
# one process with 128, if no sample of a batch influences another. *BatchNorm* layers
# in training mode would do that: they scale by the mean and variance of the batch (in
# eval mode, by stored ones). A head has none, and no dropout. It is quick to train: we
# can afford **many trials**.
#
# A *trial* has a seed, which splits the images into those to learn from and those that
# judge. It trains a head with each batch and each of seven rates, on equally many
# samples, here 896 an epoch. (A smaller last batch is left out: a step on 4 images
# would count as much as one on 128.) Trials need no process group: Dask runs them as
# tasks.
#
# For each batch we take the rate with the lowest mean loss on the images that choose.
# The picture shows the images that judge: there, another rate may be higher.


# %% tags=["lesson"]
BATCHES = (8, 32, 128)  # of 1, 4 and 16 ranks with 8 images each
RATES = [0.001 * 2**power for power in range(7)]


def trial(seed, features, labels):
    """A row for each batch and rate: a loss to choose by, and the judged accuracy."""
    torch.set_num_threads(1)
    learn, choose, judged = ready.parts_of(labels, seed)
    found = []
    for batch in BATCHES:
        for rate in RATES:
            head, _ = train_head(features, labels, learn, batch, rate, seed)
            loss, _ = evaluate_head(head, features, labels, choose)
            _, accuracy = evaluate_head(head, features, labels, judged)
            found.append((seed, batch, rate, loss, accuracy))
    return found


seeds = [100 * settings.seed + number for number in range(settings.trials)]
there = client.scatter([features, labels], broadcast=True)
tasks = [client.submit(trial, seed, *there, pure=False) for seed in seeds]
columns = ["seed", "batch", "rate", "chosen_by", "judged"]
study = pd.DataFrame(sum(client.gather(tasks), []), columns=columns)
for batch in BATCHES:
    steps = max(1, len(learn) // batch)
    print(f"batch {batch:3}: {steps:3} steps an epoch")
print(f"{len(seeds)} seeds; images to learn from: {len(learn)}, ", end="")
print(f"to choose by: {len(choose)}, to judge by: {len(judged)}")
show(
    ready.draw_study(study),
    "Judged accuracy against the learning rate, a line with bars for each batch size. "
    "A dotted line marks the chosen rate of the smallest batch.",
)

# %% [markdown]
# The bars are the standard deviation over seeds. Whether they overlap says nothing: a
# seed has the same images for all batches, so look at **differences within a seed**.
# They are in *points*: from 70 % to 72 % it is 2 points.
#
# The table has their mean and an interval. Any two trials learn from mostly the same
# images, so `n` trials tell you less than `n` independent ones. One line of
# `ready.compare` widens the usual interval (Nadeau and Bengio, 2003):
#
#     reach = (high - mean) * math.sqrt(1 + overlap * n)
#
# `overlap` is the number of images that judge over that of images to learn from. With
# 95 %, *all* rows are right at once. So each interval is wider than that of a single
# comparison.


# %% tags=["lesson", "nbval-ignore-output"]
overlap = len(judged) / len(learn)
claims = ready.compare(study, overlap)
print("Judged accuracy minus that of batch 8 with its chosen rate, in points")
print(claims.infer_objects().round({"rate": 4, "points": 1, "low": 1, "high": 1}))
base = ready.best_rates(study)[8]
tried = study.loc[study["batch"] == 8, "rate"]
print("\nThe row '128, kept' again, if both batches had one of these rates:")
for other in sorted({base / 2, base, base * 2} & set(tried)):
    kept = ready.compare(study, overlap, other).loc["128, kept - 8"]
    between = f"{kept['low']:5.1f} to {kept['high']:5.1f}"
    print(f"{other:.4f}: {kept['points']:5.1f} ({between}), {kept['verdict']}")

# %% [markdown]
# *Not told apart* does not mean 'equal': the interval says how large a difference may
# still be. **We drop a claim with this verdict.** The rows 'its own best' compare
# batches that were tuned alike; the others, rules without new tuning.
#
# **What the intervals leave out.** They hold for the rates that were chosen. All seeds
# choose by the same images; others might choose another rate. Is the curve of batch 8
# flat around its rate? Then chance may decide between neighbours. The last lines show
# 'kept' with each of them: how far does the difference move?

# %% tags=["proof"]
verdict = claims.loc["128, kept - 8", "verdict"]
tuned = claims.loc[["32, its own best - 8", "128, its own best - 8"], "verdict"]
as_written = {"data": "shipped", "size": 64, "seed": 0, "trials": 10}
if as_written.items() <= vars(settings).items():
    assert verdict == "lower" and (tuned == "not told apart").all(), claims
answer = {"lower": "worse", "higher": "better"}.get(verdict, verdict)
print(f"batch 128 with the chosen rate of batch 8, at equal samples: {answer}")
print(f"your prediction: {my_prediction}")
for batch, verdict in zip(BATCHES[1:], tuned):
    print(f"batch {batch}, tuned as batch 8 was: {verdict}")

# %% [markdown]
# ## 7. On Dask
#
# Now the whole network, on ranks, in two phases: first the head alone, on frozen
# features; then all layers. `evaluate` sums over all ranks, then divides once.


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
# Compared with the plain loop, these lines of `train` matter most:
#
# | line | why |
# |---|---|
# | `ready.phase(...)` | the head and computed features; then the network and images |
# | `DDP(part)` | averages the gradients of what is trained in this phase |
# | `ranks`, `ramp` | only with `grow_batch`: the linear rule, and its warm-up |
# | `sampler.weight` | with unequal parts of a batch, each image counts the same |
# | `plateau.step(...)` | lowers the rate when the loss of all ranks stops falling |
# | `best`, in the checkpoint | the best weights so far outlive a restart |
#
# On a *plateau* the loss does not fall. `patience=1`: wait one such epoch, lower the
# rate after the second. BatchNorm keeps ImageNet's mean and variance.


# %%
def train(settings, reading, weights):
    """Train a Classifier, the head first if there are `weights`. Returns the best."""
    torch.set_flush_denormal(True)  # CPUs are slow with numbers that are nearly 0
    images = ddp.ImageFolder(**reading)
    rows = ready.divide(images.targets, settings.images_per_breed, settings.seed)
    torch.manual_seed(settings.seed)  # the same first weights on all ranks
    net = Classifier(settings.backbone, len(images.classes), weights)
    net = net.to(ddp.device(), memory_format=torch.channels_last)
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


# %% [markdown]
# The weights travel with the arguments: no rank downloads anything.

# %%
if settings.head_epochs * settings.pretrained + settings.epochs < 1:
    raise ddp.Error(
        "Nothing to train: head_epochs (of a pretrained backbone) and epochs sum to 0. "
        "Set one of them to 1 or more."
    )
first_weights = weights if settings.pretrained else None
settings.head_epochs *= settings.pretrained  # random layers are not to be frozen
given = {"settings": settings, "reading": reading, "weights": first_weights}
run = ddp.launch(client, train, **kit.launch_options(), **given)
torch.save(run.result, run.directory / "best.pt")
print(f"{run.world_size} ranks, {settings.head_epochs} epochs of the head, ", end="")
print(f"{settings.epochs} of all layers")

# %% tags=["nbval-ignore-output"]
evaluations = run.metrics.dropna(subset="validation_loss").set_index("epoch")
table = evaluations[["samples", "validation_loss", "validation_accuracy"]]
print(table.astype({"samples": int}).round(3).to_string())
best = evaluations.sort_values("validation_loss").iloc[0]["validation_accuracy"]
cases = binomtest(round(best * len(held_out)), len(held_out))
low, high = cases.proportion_ci(method="wilson")
print(f"best model: {best:.1%} of {len(held_out)} held-out images are right ", end="")
print(f"({low:.1%} to {high:.1%}; they have chosen the epoch). best.pt has its weights")

# %%
figure = ready.draw_run(run.metrics, len(images.classes))
run.save_figure(figure, "curves.png")
plt.close(figure)

# %% tags=["lesson"]
show(
    figure,
    "Left: training loss of each rank, and held-out loss, against samples seen. "
    "Right: held-out accuracy; a dotted line is a blind guess.",
)

# %% [markdown]
# Each rank reports the loss of its own images. The dots are one number for all ranks.
#
# ## 8. Only faster?
#
# Now the batch does *not* grow. Two ranks share a batch of 32, one rank has all of it.


# %% tags=["proof"]
def short_run(ranks, **changes):
    """A short training on so many ranks, which leaves no folder."""
    few = {"images_per_breed": 25, "head_epochs": 1, "epochs": 1, "grow_batch": False}
    chosen = SimpleNamespace(**{**vars(settings), **few, "batch_size": 32, **changes})
    given = {"settings": chosen, "reading": {**reading, "size": 32}, "weights": weights}
    return ddp.launch(client, train, **given, workers=ranks, directory=False)


losses = ["head_loss", "loss"]  # of the two phases, the mean over ranks
alone, shared = (
    short_run(ranks).metrics.groupby("step")[losses].mean() for ranks in (1, 2)
)
for phase_name, steps in (("head_loss", None), ("loss", 2)):
    one, two = (run[phase_name].dropna()[:steps] for run in (alone, shared))
    assert len(one) == len(two) > 1 and np.allclose(one, two, rtol=1e-3), (one, two)
print("one batch of 32, on 1 rank or on 2: the same loss in each step of the head")
print("phase, and in two steps of all layers, to one part in a thousand")

# %% [markdown]
# In these steps two ranks do the same training as one. Later ones may differ more: two
# ranks add in another order, and rounding differences grow.
#
# **Frozen weights are not yet a frozen layer.** `requires_grad_(False)` freezes
# *weights*, not the mean and variance that BatchNorm stores: in training mode each
# batch moves them.

# %% tags=["proof"]
after = short_run(2, epochs=0).result
for name, value in weights.items():
    assert torch.equal(after[f"backbone.{name}"], value), name
assert after["head.1.weight"].abs().sum() > 0
print("the head has learned, and the backbone is what it was, to the last bit")

careless = Classifier(settings.backbone, len(images.classes), weights)
careless.backbone.requires_grad_(False)
careless.train()  # the fault
with torch.no_grad():
    careless.features(photos[:20])
state = careless.backbone.state_dict()
moved = [name for name in weights if not torch.equal(state[name], weights[name])]
assert moved and not any(name.endswith(("weight", "bias")) for name in moved), moved
print("BatchNorm in training mode: caught, the frozen backbone has moved")

# %% [markdown]
# ### How much faster, and where the time goes
#
# `torch.profiler` records each operation, and the parts that we name: eight steps, on
# one rank and on two.


# %% tags=["lesson"]
def measured(settings, photos, labels, weights, steps=8):
    """Mean ms of a step: of its parts, and by the clock. A rank has its share of it."""
    mine = slice(ddp.rank(), None, ddp.world_size())
    inputs, targets = photos[mine].to(ddp.device()), labels[mine].to(ddp.device())
    net = Classifier(settings.backbone, int(labels.max()) + 1, weights).eval()
    model = DDP(net.to(ddp.device(), memory_format=torch.channels_last))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)

    def step():
        with record_function("forward"):
            loss = F.cross_entropy(model(inputs), targets)
        with record_function("backward"):
            loss.backward()
        with record_function("update"):
            optimizer.step()
            optimizer.zero_grad()
        return loss.item()  # waits for a GPU

    step(), step()  # the first ones are slower
    os.environ["KINETO_LOG_LEVEL"] = "9"  # the profiler prints nothing of its own
    with profile() as seen:
        began = time.perf_counter()
        for _ in range(steps):
            step()
        clock = 1000 * (time.perf_counter() - began) / steps
    of = {each.key: each.cpu_time_total / 1000 / steps for each in seen.key_averages()}
    parts = {name: of[name] for name in ("forward", "backward", "update")}
    parts.update(sum=sum(parts.values()), clock=clock)
    return {**parts, "all_reduce": of.get(f"{dist.get_backend()}:all_reduce", 0.0)}


# %% tags=["lesson", "nbval-ignore-output"]
small = F.interpolate(photos[:64].float(), 32, mode="area").byte()  # quick to compute
given = dict(settings=settings, photos=small, labels=labels[:64], weights=weights)
one, two = (
    ddp.launch(client, measured, **given, workers=ranks, directory=False).result
    for ranks in (1, 2)
)
times = pd.DataFrame({"1 rank": one, "2 ranks": two})
times["above half"] = times["2 ranks"] - times["1 rank"] / 2
print(f"ms of a step with a batch of {len(small)}, rank 0:")
print(times.round(1))
print(f"two ranks are {one['clock'] / two['clock']:.2f} times as fast as one")

# %% [markdown]
# *Why not twice as fast?* Compare `sum` with `clock`: do the parts explain the step?
# Which part is most milliseconds above half of what one rank needs?
#
# Half of the images do not take half of the time where work is not shared: each rank
# does the whole update. Two ranks also average gradients, `all_reduce`, with the wait
# for the other rank in it. It runs beside `backward`, so `sum` leaves it out. On a CPU,
# `backward` ends when the last gradients are averaged. And two cores of one machine may
# share memory and power. More: `docs/recipes.md`, 'See where the time goes'.
#
# ### The study from which this lesson comes
#
# Saturn Cloud's [workshop](https://github.com/saturncloud/workshop-dask-pytorch)
# trained a ResNet50 on Stanford Dogs with Dask, on 1, 4, 7 and
# 10 workers, with the linear rule. An epoch was 80 % of 20,580 images.
#
# | workers | rate | images in a step | steps in an epoch |
# |---|---|---|---|
# | 1 | 0.01 | 100 | 165 |
# | 4 | 0.04 | 400 | 42 |
# | 10 | 0.10 | 1,000 | 17 |
#
# Its pictures show accuracy against **steps**. Which number of workers looks best in
# such a picture, even if a model learns equally much from each image?
#
# <details><summary>Answer</summary>
# 10 workers: after 100 steps they have seen ten times as many images as one worker. Put
# samples on the axis.</details>
#
# ## 9. Exercises
#
# ### Exercise A · Choose a rate (6 minutes)
#
# You have tuned a rate, `base`, on one rank. Now you get `ranks` ranks, and each keeps
# its batch. Return the learning rate after `seen` samples. `rule` is `"kept"`,
# `"square root"` or `"linear"`. Training starts with `base`. The rate grows evenly
# with the samples. From `warm_up` samples on it is that of the rule. If `warm_up` is 0,
# it is so at once.
#
# <details><summary>Hint</summary>
# First the rate in the end. Then the share of the way, at most 1.</details>


# %% tags=["exercise", "solution"]
def my_rate(seen, base, ranks, rule, warm_up):
    """The learning rate after `seen` samples."""
    # your code
    end = base * {"kept": 1, "square root": math.sqrt(ranks), "linear": ranks}[rule]
    done = min(seen / warm_up, 1) if warm_up else 1
    return base + done * (end - base)
    # end of your code


# %% tags=["exercise"]
judge(checks.rate, my_rate)

# %% [markdown]
# ### Exercise B · Repair the study (12 minutes)
#
# Every rank calls this function after each epoch, to validate and to lower the rate on
# a plateau. It has **two faults**, as the workshop's code had. No error is raised.


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
# without `evaluate`. On every rank
#
# - the loss and the accuracy are those of the held-out images;
# - each of these images is judged once, by one of the ranks;
# - `plateau.step` is called once, with the same loss;
# - the same pair is returned.
#
# <details><summary>Hint 1</summary>
# Which images does the loop see? Compare with what the text promises.</details>
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


# %% tags=["exercise"]
judge(checks.end_of_epoch(client), my_end_of_epoch, timeout=180)

# %% [markdown]
# ## 10. Break it
#
# Suppose only the first fault is repaired. `ready.train_on_ranks` trains a head on two
# ranks, and passes the held-out rows as `training`, too. So the loop sees the right
# images. Nothing is raised. Look at the picture. What has decided the learning rate?


# %% tags=["lesson"]
given = {"features": features, "labels": labels, "workers": 2, "directory": False}
given.update(training=learn, held_out=choose)
given.update(head=new_head(features.shape[1], len(images.classes)))
drifted = ddp.launch(
    client, ready.train_on_ranks, **given, end_of_epoch=original_end_of_epoch
).result
rates = pd.DataFrame({f"rank {rank}": each for rank, (each, _) in enumerate(drifted)})
figure, axes = plt.subplots(figsize=(6, 2.5), layout="constrained")
rates.plot(ax=axes, drawstyle="steps-post", logy=True)
axes.set(xlabel="epoch", ylabel="learning rate")
show(
    figure,
    "The learning rate of two ranks against the epoch. They fall in steps, at "
    "different epochs.",
)

# %% [markdown]
# <details><summary>What has happened</summary>
# Each rank sees the loss of <i>its own</i> images and lowers its own rate. DDP averages
# gradients, not learning rates. From the first difference on, equal gradients make
# unequal steps: the replicas become two models. The next cell compares them.</details>
#
# **The rule:** whatever a rank decides by must be the same on all ranks.


# %% tags=["proof"]
def repaired(model, inputs, labels, training, held_out, plateau):
    loss, _ = evaluate(model, TensorDataset(inputs[held_out], labels[held_out]))
    plateau.step(loss)


agreed = ddp.launch(client, ready.train_on_ranks, **given, end_of_epoch=repaired).result
for name, everyones in (("a loss of each rank", drifted), ("one loss", agreed)):
    (rates, head), (others_rates, others_head) = everyones
    same = (rates == others_rates, torch.equal(head, others_head))
    print(f"{name}: the same rates {same[0]}, the same weights {same[1]}")
assert same == (True, True)  # with one loss; without, other images may decide alike

# %% [markdown]
# ## 11. Recap
#
# **Does more hardware make a better model, or only a faster one?** With the settings as
# they are, we found no better one.
#
# - With a fixed global batch, two ranks made the steps of one, up to rounding, in all
#   steps that we compared (BatchNorm in eval mode, no dropout). How much faster a step
#   is, you measured for one model and one batch size.
# - A batch that grows with the ranks is *another* training, with fewer steps. Choose
#   its rate again. A rule is a first guess.
# - Larger batches, tuned alike, were not told apart from the smallest. They may still
#   be better or worse: the intervals in section 6 say by how much, for a head, on these
#   images, with the chosen rates.
# - A comparison needs equal samples, several seeds, and intervals.
# - Split, validation loss, moment to stop: decide by what is the same on all ranks.
#
# **Next:** your own photographs, with all images of each class:
# `make run TUTORIAL=dogs SET="data=/path/to/photos images_per_breed=0 size=128"`. Then
# `flights`, the last notebook: why train where the table is?
#
# **Read:** Goyal et al., [Accurate, Large Minibatch
# SGD](https://arxiv.org/abs/1706.02677). Shallue et
# al., [Measuring the Effects of Data
# Parallelism](https://jmlr.org/papers/v20/18-789.html), for rates tuned for every
# batch. Nadeau and Bengio, [Inference for the Generalization
# Error](https://doi.org/10.1023/A:1024068626366).

# %%
client.close()
