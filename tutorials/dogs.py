# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Dogs: a better model, or does it only train faster?
#
# ## 1. The question
#
# **Does more hardware make a better model, or does it only train faster?**
#
# **Afterwards you can**
# - train a new last layer on a pretrained network;
# - choose a learning rate for a larger batch, and say for which budget it holds;
# - compare runs fairly: equal samples, several seeds, intervals;
# - let one loss decide, on every rank, when the rate falls;
# - find faults of a published study.
#
# **You need** *rank* and *global batch* from `mnist`, checkpoints from `pets`, sums
# over ranks from `ucmerced`. No GPU, no network.
#
# **Time:** 75 to 90 minutes in class, 30 of them for three exercises.

# %% [markdown]
# ## 2. Set-up
#
# `make run TUTORIAL=dogs SET="epochs=40"` changes a setting. `PRESET=full` takes a
# ResNet50 and the photographs of Stanford Dogs. It needs `make data TUTORIAL=dogs`, and
# a GPU saves hours. Nothing is downloaded unasked.

# %% tags=["context"]
import contextlib
import io
import math
import time

import pandas as pd
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import ReduceLROnPlateau

import ddp_common as ddp
from tutorials import dogs_study as ready  # what is not today's subject
from tutorials import kit
from tutorials.checks import dogs as checks
from tutorials.checks.common import judge
from tutorials.helpers import show

# %% tags=["parameters", "context"]
full = {"data": "full", "backbone": "resnet50", "download": True, "size": 224}
settings = kit.settings(
    "dogs",
    data="shipped",  # "full" after `make data`, a folder, s3://…: class = folder
    anonymous=False,  # True: read a public bucket without credentials
    images_per_breed=0,  # at most so many; 0: all there are
    size=64,  # pixels
    backbone="efficientnet-lite0",  # or "resnet50", if its weights are here
    download=False,  # True: fetch the weights of resnet50, 98 MB, if they are not
    epochs=20,
    batch_size=32,  # of all ranks together
    learning_rate=0.008,
    trials=6,  # seeds of the study
    seed=0,  # another one: other seeds in the study too
    presets={"full": full | {"batch_size": 256}},
    limits={"images_per_breed": (0, None), "trials": (3, 1_000)},
)

# %% tags=["context-my_end_of_epoch"]
client = ddp.connect()
dataset = kit.fetch("dogs", settings.data)
print(f"dogs: {dataset.origin}")

# %% [markdown]
# ## 3. The data
#
# Stanford Dogs cannot be shipped. Our dogs are **drawn, not photographed**: no figure
# here says anything about real dogs.
#
# **All our figures come from the same images**, in three sets, as in `ucmerced`: images
# to **learn** from, images to **choose** by (a rate, a moment), and images to **judge**
# by. In section 7 each seed draws the sets anew.

# %%
images = ddp.ImageFolder(dataset.path, size=settings.size, anonymous=settings.anonymous)
labels, few = torch.tensor(images.targets), settings.images_per_breed
learn, choose, judged = ready.parts_of(labels, few, settings.seed)
print(f"{len(images.classes)} breeds: {len(learn)} images to learn from,", end=" ")
print(f"{len(choose)} to choose by, {len(judged)} to judge by")

# %% tags=["lesson"]
show(*ready.draw_breeds(images))

# %% [markdown]
# ## 4. Features, and one process first
#
# A *backbone* is a network without its last layer. It turns an image into numbers, its
# *features*. Ours has learned from the 1.3 million photographs of ImageNet. A *head*,
# one linear layer, turns features into a score for each breed. This is *transfer
# learning*: only the head is new, and the backbone is *frozen*.
#
# A frozen backbone gives the same features in each epoch. So we compute them once. The
# ranks share the images, and no rank needs another one until the end.


# %%
def features_of(images, rows, backbone):
    """Features (images, numbers) of the images in `rows`, zeros for the others."""
    backbone = backbone.to(ddp.device()).eval()
    found = []
    with torch.no_grad():
        for mine in ddp.EvalSampler(len(rows), 100):  # each image on one rank
            batch = [image for image, _ in images.__getitems__(rows[mine].tolist())]
            found.append((rows[mine], backbone(torch.stack(batch).to(ddp.device()))))
    features = torch.zeros(len(images), backbone.width, device=ddp.device())
    for places, numbers in found:
        features[places] = numbers
    dist.all_reduce(features)  # the other ranks have zeros there
    return features.cpu()


backbone = ready.backbone(settings.backbone, settings.download)
used = torch.cat([learn, choose, judged])
given = {"images": images, "rows": used, "backbone": backbone, "directory": False}
features = ddp.launch(client, features_of, **given).result

# %% [markdown]
# <details>
# <summary>A small question: why may each rank leave zeros for the images of the others,
# and what does <code>all_reduce</code> send?</summary>
#
# It adds the ranks' tensors, and a number plus zeros is that number. It sends all
# features once, at the end. DDP sends gradients in each step.
# </details>
#
# Now the plain loop. *Momentum*: a step also goes on in the direction of the steps
# before it.


# %%
def score(head, features, labels, rows):
    """Mean loss and accuracy on these rows."""
    with torch.no_grad():
        scores = head(features[rows])
    right = (scores.argmax(1) == labels[rows]).float()
    return F.cross_entropy(scores, labels[rows]).item(), right.mean().item()


def train_head(features, labels, learn, batch, rate, seed, epochs):
    """Train a head on the rows `learn`; yields it after each epoch."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    head = nn.Linear(features.shape[1], len(labels.unique()))
    optimizer = torch.optim.SGD(head.parameters(), lr=rate, momentum=0.9)
    whole = len(learn) - len(learn) % batch or len(learn)  # no smaller last batch
    for _ in range(epochs):
        for rows in learn[torch.randperm(len(learn))[:whole]].split(batch):
            loss = F.cross_entropy(head(features[rows]), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        yield head


*_, head = train_head(features, labels, learn, 32, 0.008, settings.seed, epochs=5)
_, right = score(head, features, labels, choose)
print(f"after 5 epochs {right:.0%} of the images to choose by are right")

# %% [markdown]
# **A small question.** Stanford Dogs was taken from ImageNet. With `PRESET=full`, does
# the accuracy say how good the model is on new photographs?
#
# <details>
# <summary>Answer</summary>
# No. The backbone has probably seen images that are held out from the head. The drawn
# dogs are new to it.</details>

# %% [markdown]
# ## 5. Three rules for a larger batch
#
# Often the global batch grows with the ranks. Then an epoch has fewer steps, and the
# old learning rate may no longer fit. Three rules for *k* ranks, so for a batch *k*
# times as large: the rate is **kept**, or multiplied by √k (**square root**), or by k
# (**linear**). The linear rule is for SGD (Goyal et al., linked in section 13), which
# we use: it says nothing of Adam. A large rate at once can make training diverge. So
# the rate grows over the first samples: the *warm-up*.
#
# ### Exercise A · Choose a rate (8 minutes)
#
# You have tuned a rate, `base`, on one rank. Now you get `ranks` ranks. Each keeps its
# batch. Return the learning rate after `seen` samples. `rule` is `"kept"`, `"square
# root"` or `"linear"`. Training starts with `base`. The rate grows evenly with the
# samples. After `warm_up` samples it is the rule's rate. If `warm_up` is 0, training
# starts with that one.


# %% tags=["exercise", "solution", "minutes-8"]
def my_rate(seen, base, ranks, rule, warm_up):
    """The learning rate after `seen` samples."""
    # your code
    end = base * {"kept": 1, "square root": math.sqrt(ranks), "linear": ranks}[rule]
    done = min(seen / warm_up, 1) if warm_up else 1
    return base + done * (end - base)
    # end of your code


judge(checks.rate, my_rate)

# %% [markdown]
# ## 6. Predict
#
# One rank trains well with a batch of 8 images. Now you get 16 ranks. Each keeps its 8
# images: the *global* batch is 128. The learning rate stays. Compare both models after
# equally many *samples* (images seen). After 5 epochs the model of 16 ranks is
#
# - `"better"`: a gradient over 128 images is less noisy than one over 8;
# - `"same"`: both have seen the same images;
# - `"worse"`: it made a sixteenth of the steps.
#
# And after 80 epochs? The difference is `"larger"`, `"smaller"`, or `"equal"` to the
# one after 5.

# %% tags=["lesson"]
after_5 = None  # "better", "same" or "worse"
after_80 = None  # "larger", "smaller" or "equal"

# %% [markdown]
# ## 7. Batch and learning rate
#
# One process with batch 128 makes the same steps as 16 ranks with 8 images each, if no
# sample influences another. (Section 8 compares real ranks.) So we can afford many
# *trials*. The seed decides which images a trial trains on, and which judge. A trial
# trains a head with each batch size and each of five rates, for 5 epochs. Dask runs the
# trials as tasks, without ranks.
#
# For each batch size we choose the rate with the lowest mean loss on the images to
# choose by. *Best* means this loss.


# %% tags=["lesson"]
BATCHES = (8, 32, 128)  # of 1, 4 and 16 ranks with 8 images each
RATES = [0.0005 * 4**power for power in range(5)]


def trial(seed, features, labels):
    """A row for each batch and rate: a loss to choose by, and the judged accuracy."""
    learn, choose, judged = ready.parts_of(labels, few, seed)
    found = []
    for batch in BATCHES:
        for rate in RATES:
            *_, head = train_head(features, labels, learn, batch, rate, seed, epochs=5)
            loss, _ = score(head, features, labels, choose)
            _, accuracy = score(head, features, labels, judged)
            found.append((seed, batch, rate, loss, accuracy))
    return found


seeds = range(100 * settings.seed, 100 * settings.seed + settings.trials)
there = client.scatter([features, labels], broadcast=True)  # to every worker, once
tasks = [client.submit(trial, seed, *there, pure=False) for seed in seeds]
columns = ["seed", "batch", "rate", "chosen_by", "judged"]
study = pd.DataFrame(sum(client.gather(tasks), []), columns=columns)
show(*ready.draw_study(study))

# %% [markdown]
# The bars are the standard deviation over seeds. Whether the bars overlap says nothing:
# in one seed, all batch sizes learn from the same images. So look at **differences
# within a seed**, in *points*: from 70 % to 72 % is 2 points.
#
# The table has their mean and an interval. Trials share most of their images, so
# `ready.compare` makes the interval wider (Nadeau and Bengio, 2003), and wider once
# more: all intervals of the table hold at once with about 95 % probability. Where a
# rule gives the best rate, one row shows both.


# %% tags=["lesson", "nbval-ignore-output"]
claims = ready.compare(study, overlap=len(judged) / len(learn))
print("Judged accuracy minus the one of batch 8 with its best rate, in points")
print(claims.infer_objects().round({"rate": 4, "points": 1, "low": 1, "high": 1}))

# %% [markdown]
# The rows 'its own best' compare batch sizes that were tuned alike. The others are
# rules without new tuning. *Not told apart* does not mean 'equal': the interval says
# how large a difference may still be.
#
# **Are 5 epochs enough?** Now 80, with the kept rate: two batches, and three of the six
# seeds, so the difference after 5 epochs is not quite the one in the table.


# %% tags=["proof"]
def longer(seed, batch, features, labels):
    """Judged accuracy, in percent, after each of 80 epochs with the kept rate."""
    learn, _, judged = ready.parts_of(labels, few, seed)
    heads = train_head(features, labels, learn, batch, kept_rate, seed, epochs=80)
    return [100 * score(head, features, labels, judged)[1] for head in heads]


kept_rate = claims.attrs["best"][8]
tasks = {
    batch: [client.submit(longer, seed, batch, *there) for seed in seeds[:3]]
    for batch in (8, 128)
}
lines = {f"batch {batch}": client.gather(each) for batch, each in tasks.items()}
show(*ready.draw_epochs(lines, label="judged accuracy (%)"))
gaps = pd.DataFrame(lines["batch 128"]) - pd.DataFrame(lines["batch 8"])
gap = gaps.mean()  # over the seeds
half = 4.3 * (1 / 3 + len(judged) / len(learn)) ** 0.5 * gaps[79].std()
print(f"batch 128 minus batch 8: {gap[4]:+.1f} points after 5 epochs, ", end="")
print(f"{gap[19]:+.1f} after 20, {gap[79]:+.1f} after 80,")
print(f"there with an interval from {gap[79] - half:+.1f} to {gap[79] + half:+.1f}")
if settings.data == "shipped" and settings.size == 64:
    assert gap[4] < -3 and abs(gap[79]) < abs(gap[4]) / 3
print(checks.predicted(after_5, after_80))

# %% [markdown]
# **The larger batch needs more epochs**: after 80 less than a third of the difference
# is left. How much exactly, three seeds cannot say: see how wide the 95 % interval is.
# (It takes 4.3 standard errors in place of 2, and is wider because the trials share
# images, as in the table.) With a rate of its own, batch 128 is far closer already
# after 5 epochs.
#
# The loss of a linear head is *convex*: it has only one valley. So with enough steps
# both batches come near the same loss. For a whole network this argument does not hold.
#
# **A small question.** Somebody shows: 'With 16 ranks and the old rate the model is
# worse.' What do you ask?
#
# <details>
# <summary>Answer</summary>
# After how many epochs? A larger batch makes fewer steps in each. And what does batch
# 128 reach with a rate of its own?</details>
#
# ## 8. On Dask
#
# Now real ranks: the same images, the same sets, the same features. `evaluate` sums
# over all ranks, then divides once. On a *plateau* the loss does not fall: after two
# such epochs (`patience=1`) the rate is lowered. The loss of *all* ranks decides.


# %%
def evaluate(head, features, labels, rows, all_ranks=True):
    """Mean loss and accuracy on all `rows`, the same numbers on every rank."""
    totals = torch.zeros(3, dtype=torch.float64, device=features.device)
    for batch in ddp.EvalSampler(len(rows), 100):  # each image on one rank
        with torch.no_grad():
            scores, targets = head(features[rows[batch]]), labels[rows[batch]]
        totals[0] += F.cross_entropy(scores, targets, reduction="sum")
        totals[1] += (scores.argmax(1) == targets).sum()
        totals[2] += len(targets)
    if all_ranks:  # False: for section 11
        dist.all_reduce(totals)
    loss, right, count = totals.tolist()
    return loss / count, right / count


# %%
def train(features, labels, learn, choose, epochs, seed, all_ranks=True):
    """Train a head; returns the head of the last epoch."""
    features, labels = features.to(ddp.device()), labels.to(ddp.device())
    torch.manual_seed(seed)  # the same first weights on all ranks
    head = nn.Linear(features.shape[1], len(labels.unique())).to(ddp.device())
    model = DDP(head)
    optimizer = torch.optim.SGD(head.parameters(), settings.learning_rate, momentum=0.9)
    plateau = ReduceLROnPlateau(optimizer, factor=0.3, patience=1)
    sampler = ddp.ElasticSampler(len(learn), settings.batch_size, seed=seed)
    parts = {"model": model, "optimizer": optimizer, "plateau": plateau}
    checkpoint = ddp.Checkpoint(**parts, sampler=sampler, every_steps=50)
    checkpoint.restore()  # nothing to restore on a first attempt
    for _ in sampler.epochs(epochs):
        for batch in sampler.batches():
            rows = learn[batch]
            loss = F.cross_entropy(model(features[rows]), labels[rows]) * sampler.weight
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            checkpoint.step()
            ddp.report(loss=loss)
        loss, accuracy = evaluate(head, features, labels, choose, all_ranks)
        plateau.step(loss)
        rate = optimizer.param_groups[0]["lr"]
        ddp.report(validation_loss=loss, validation_accuracy=accuracy, rate=rate)
        checkpoint.save()
    return head.cpu()


# %% tags=["nbval-ignore-output"]
given = {"features": features, "labels": labels, "learn": learn, "choose": choose}
given |= {"epochs": settings.epochs, "seed": settings.seed}
run = ddp.launch(client, train, **kit.launch_options(), **given)
torch.save(run.result.state_dict(), run.directory / "head.pt")
by_epoch = run.metrics.dropna(subset="rate").query("rank == 0").set_index("epoch")
with torch.no_grad():
    right = (run.result(features[judged]).argmax(1) == labels[judged]).sum()
print(f"last epoch: {right} of {len(judged)} images to judge by are right")
figure, alt = ready.draw_epochs({"all ranks": [by_epoch["rate"].tolist()]})
figure.savefig(run.directory / "rate.png", bbox_inches="tight")

# %% tags=["lesson"]
show(figure, alt)

# %% [markdown]
# The model is judged after its last epoch. To keep the best epoch is one more choice.
#
# **Only faster?** The global batch stays: one rank trains, or two share each batch. How
# much do their losses differ? Whose steps are shorter? And who computes the features of
# 400 images sooner? Guess three times.

# %% tags=["proof", "nbval-ignore-output"]
alone, shared = (
    ddp.launch(client, train, **given | {"epochs": 2}, workers=n, directory=False)
    .metrics.groupby("step")
    .agg({"loss": "mean", "time": "max"})
    for n in (1, 2)
)
largest = (shared["loss"] / alone["loss"] - 1).abs().max()
print(f"{len(alone)} steps on 1 and on 2 ranks: losses off by {largest:.0e} at most")
assert len(alone) > 10 and largest < 1e-3
one, two = (1_000 * each["time"].diff().median() for each in (alone, shared))
print(f"a step takes {one:.1f} ms on one rank, {two:.1f} ms on two")
some = {"images": images, "rows": used[:400], "backbone": backbone, "directory": False}
for n in (1, 2):
    began = time.monotonic()
    ddp.launch(client, features_of, **some, workers=n)
    print(f"features on {n} rank(s): {time.monotonic() - began:.1f} s")

# %% [markdown]
# With a fixed global batch, more hardware gives *the same* model, up to rounding: no
# better one. At best it is there sooner. A step of the head computes very little, and
# sends a message. The features are much work, and one message. Compare both pairs of
# times. (Those of the features hold the start of the ranks, too.) In `gpt` two ranks
# trained faster, and section 12 times *all* layers of this network on one rank and on
# two.
#
# ## 9. The study from which this lesson comes
#
# Saturn Cloud's [workshop](https://github.com/saturncloud/workshop-dask-pytorch)
# trained a ResNet50 on Stanford Dogs on 1, 4, 7 and 10 workers. A step has 100 images
# of each worker. Its
# [blog](https://www.saturncloud.io/s/combining-dask-and-pytorch-for-better-faster-transfer-learning/)
# describes it: the rate grew with the workers. Its logs (`tools/stats_cache2.tar.gz`
# there) have 165 steps in an epoch, **whatever the number of workers**: 16,464 images
# seen in an epoch of one worker, 164,640 in an epoch of ten. But 16,464 images, 80 % of
# all, are there to learn from. Every worker used all of them (`SubsetRandomSampler`, in
# `tools/setup2.py`). The logs have one run for each number of workers:

# %% tags=["lesson"]
show(*ready.draw_original())

# %% [markdown]
# After equally many steps, ten workers look best. After equally many samples the order
# is reversed. The workshop's pictures have steps on the axis.
#
# `make run TUTORIAL=dogs PRESET=original` trains what the article meant. `make study
# TUTORIAL=dogs` repeats its comparison on your ranks, and makes a fair one beside it.
#
# ## 10. The study, compared and repaired
#
# ### Exercise B · Compare fairly (8 minutes)
#
# `log[workers]` is a list: right answers after the first step, the second, and so on. A
# step has `images` images of *each* worker. After `samples` samples, at least one step
# is finished. Return a dict with the keys of `log`: the right answers after the last
# finished step.


# %% tags=["exercise", "solution", "minutes-8"]
def my_comparison(log, images, samples):
    """For each number of workers, right answers after equally many samples."""
    # your code
    steps = {workers: samples // (workers * images) for workers in log}
    return {workers: log[workers][steps[workers] - 1] for workers in log}
    # end of your code


judge(checks.comparison, my_comparison)

# %% [markdown]
# ### Exercise C · Repair the study (14 minutes)
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
# <details>
# <summary>Hint 1</summary>
# Which images does the loop see?</details>
# <details>
# <summary>Hint 2</summary>
# What is <code>loss / count</code> on each rank? How does <code>evaluate</code>
# end?</details>


# %% tags=["exercise", "solution", "minutes-14"]
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
# <details>
# <summary>Where the workshop's code has them</summary>
# <code>tools/setup2.py</code> gives both loaders the training sampler: the logs have
# 165 steps of evaluation; held-out images would make 42.
# <code>scheduler.step(loss)</code> gets each worker's own training loss.</details>
#
# ## 11. Break it
#
# Suppose only one fault is repaired: `evaluate` sees the held-out images, but each rank
# keeps its own sums. Which line of `train` goes wrong, and when would you notice?


# %% tags=["proof"]
try:
    with contextlib.redirect_stderr(io.StringIO()):  # the same words
        ddp.launch(client, train, **given, all_ranks=False, workers=2, directory=False)
except ddp.RankFailed as failure:
    said = str(failure).splitlines()[0].partition("failed: ")[2]
print(said)

# %% [markdown]
# <details>
# <summary>What has happened</summary>
# Each rank sees the loss of <i>its own</i> images, and would lower its own rate. DDP
# averages gradients, not rates. From then on, equal gradients make unequal steps: the
# copies become two models. Here <code>checkpoint.save()</code> compares what the ranks
# have, and refuses. A program without it notices nothing.</details>
#
# **The rule:** whatever a rank decides by must be the same on all ranks.
#
# ## 12. If you have time: the whole network
#
# The article trained *all* layers, not only a new one: *fine-tuning*. How many times as
# many images do two ranks train on as one, in equally many seconds? And which is better
# after these, all layers or a new head? Both get the images to learn from. The head has
# to compute its features, too. Rank 0 says for all when the time is over.


# %% tags=["lesson"]
def train_for(seconds, network, inputs, rate):
    """Train all of `network` for so long; returns it, and the number of steps."""
    end, device = time.monotonic() + seconds, ddp.device()
    torch.manual_seed(0)
    model = DDP(network.train().to(device))
    optimizer = torch.optim.SGD(model.parameters(), rate, momentum=0.9)
    sampler = ddp.ElasticSampler(len(learn), 32)
    for _ in sampler.epochs(1_000_000):
        for batch in sampler.batches():
            rows = learn[batch]
            scores = model(inputs(rows).to(device))
            loss = F.cross_entropy(scores, labels[rows].to(device)) * sampler.weight
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            is_over = torch.tensor(float(time.monotonic() > end), device=device)
            dist.broadcast(is_over, src=0)
            if is_over:
                return network.eval().cpu(), sampler.steps_done


def photos(rows):
    return torch.stack([image for image, _ in images.__getitems__(rows.tolist())])


# %% tags=["lesson", "nbval-ignore-output"]
seconds = 8  # try 60
on_two = {"workers": 2, "directory": False}
layers = backbone.pixels, backbone.layers
new_head = nn.Linear(backbone.width, len(images.classes))
began = time.monotonic()
given = {"images": images, "rows": used, "backbone": backbone}
features = ddp.launch(client, features_of, **given, **on_two).result
left = max(1, seconds - (time.monotonic() - began))
all_layers = (seconds, nn.Sequential(*layers, new_head), photos, 0.01)
only_head = (left, new_head, lambda rows: features[rows], settings.learning_rate)
ways = {
    "all layers, one rank": (1, *all_layers),
    "all layers, two ranks": (2, *all_layers),
    "a new head, two ranks": (2, *only_head),
}
for name, (ranks, time_left, network, inputs, rate) in ways.items():
    how = {"seconds": time_left, "inputs": inputs, "rate": rate, "network": network}
    how |= {"workers": ranks, "directory": False}
    trained, steps = ddp.launch(client, train_for, **how).result
    with torch.no_grad():
        right = (trained(inputs(judged)).argmax(1) == labels[judged]).float().mean()
    print(f"{name}: {32 * steps:,} images in {time_left:.1f} s,", end=" ")
    print(f"{steps / time_left:.1f} steps per second, {right:.0%} right")

# %% [markdown]
# A step of all layers computes far more than one of the head, and sends the gradients
# of the whole network. Whether two ranks pay, your steps per second say.
#
# With 60 seconds, two ranks reached 90 % by a new head and 88 % by all layers. All
# layers had seen each image nine times, the head each image's features 800 times. Here
# ImageNet's features fit already: to train all layers gains nothing in a minute.
#
# ## 13. Recap
#
# **Does more hardware make a better model, or does it only train faster?** Here it made
# no better one. What came sooner, section 8 has measured.
#
# - With a fixed global batch, two ranks made the steps of one, up to rounding. Whether
#   they are faster depends on the work between two messages: measure it.
# - A batch that grows with the ranks is *another* training, with fewer steps. With the
#   kept rate it was worse after 5 epochs. After 80, less than a third of this
#   difference was left. So name the budget.
# - Tuned alike, batch 128 was a little worse than batch 8 after 5 epochs, and batch 32
#   was not told apart.
# - A comparison needs the same images, equal samples, several seeds, and intervals.
# - Split, validation loss, moment to stop: base each decision on what all ranks share.
#
# **Next:** your own photographs: `make run TUTORIAL=dogs SET="data=/path/to/photos
# size=128"`. Then `flights`: why train where the table lies?
#
# **Read:** Goyal et al., [Accurate, Large Minibatch
# SGD](https://arxiv.org/abs/1706.02677). Shallue et
# al., [Measuring the Effects of Data
# Parallelism](https://jmlr.org/papers/v20/18-789.html), for rates tuned for every
# batch. Nadeau and Bengio, [Inference for the Generalization
# Error](https://doi.org/10.1023/A:1024068626366).

# %%
client.close()
