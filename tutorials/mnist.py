# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # MNIST: what DDP does
#
# **Question.** What does `DistributedDataParallel` do, and what is left of it when somebody else starts the ranks?
#
# **Afterwards you can**
# - turn a training loop of one process into one of two, first by hand with `all_reduce`, then with `DistributedDataParallel`;
# - *prove* that a step of two ranks is the step of one process with the whole batch, and that the replicas stay equal;
# - weigh the loss of a ragged batch so that this holds for every batch;
# - start one training function with Dask, `torchrun`, `srun` or `sbatch`, and say what each of them has to provide;
# - judge a reconstruction error against references that need no training.
#
# **You need** Python and the first idea of PyTorch: a model, a loss, an optimizer. No GPU, no network, nothing is downloaded.
# **Time:** 75 minutes in class, under 90 seconds of computing on two cores. **Data:** 10,000 handwritten digits, shipped with the repository.

# %% [markdown] tags=["instructor"]
# **Instructor.** 2 minutes. Ask what two processes have to tell each other so that they train *one* model. Collect the answers (weights? losses?
# gradients? digits?) and come back to them in section 6. If you are late: skip the figure of section 6 on what is ready when, the museum in section
# 8, and the stretch exercise.
#
# Minutes per section: set-up 3, data 6, one rank 8, predict 3, what changes 10, on Dask 6, proofs 8, exercises 20, break it 8, scaling 6, cluster 4,
# recap 3. With questions that is 90; without exercise 2 it is 75. The training of section 7 takes a quarter of a minute. A class that works on a
# batch cluster and never uses Dask needs the table of section 7 first: let them run the line with `srun` while you explain sections 4 to 6.

# %% [markdown]
# ## 2. Set-up and preflight
#
# All settings stand here, once. Defaults suit a laptop; `make run TUTORIAL=mnist SET="epochs=2"` changes one of them, and
# `PRESET=full` trains on all 60,000 digits, after `make data TUTORIAL=mnist`.

# %%
import os
import subprocess
import sys
import time
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import ddp_common as ddp
from ddp_common.data.datasets import read_idx

# %% tags=["parameters"]
settings = ddp.settings(
    "mnist",
    data="shipped",  # or "full" after `make data TUTORIAL=mnist`, or the path of a folder with IDX files
    epochs=20,
    batch_size=128,  # of all ranks together
    learning_rate=1e-3,
    width=128,  # of the first and the third hidden layer
    bottleneck=128,  # of the second: the numbers that are left of a digit
    seed=0,
    presets={"full": {"data": "full", "epochs": 25}},
)

# %% [markdown]
# `connect()` starts the cluster of a *profile*: here Dask workers on this machine. While you read on, they import torch.

# %% tags=["nbval-ignore-output"]
client = ddp.connect()
dataset = ddp.fetch("mnist", settings.data)
print(f"torch {torch.__version__} · {client.ranks} ranks on {os.cpu_count()} cores · {dataset.title}: {dataset.origin} · {dataset.licence}")

# %% [markdown]
# ## 3. The data
#
# Digits that people wrote around 1990: 28 x 28 grey values, 0 for paper, 255 for ink. The files have the format of the originals, *IDX*: a header
# that states the shape, then the bytes. The full set has digits for testing. Of the shipped ones a tenth is held out: the model never sees them, and
# they will judge it.

# %%
def read_digits(folder):
    """Training images, training labels, held-out images, held-out labels: uint8, images (n, 28, 28). Raises ddp.Error for damaged files."""
    full = (Path(folder) / "train-images-idx3-ubyte.gz").exists()
    parts = [[read_idx(Path(folder) / f"{part}-{kind}-ubyte.gz") for kind in ("images-idx3", "labels-idx1")]
             for part in (("train", "t10k") if full else ("digits",))]
    for images, labels in parts:
        if images.shape[1:] != (28, 28) or len(images) != len(labels):
            raise ddp.Error(f"{folder} holds images {tuple(images.shape)} and {len(labels)} labels: these are not digits of 28 x 28 with one "
                            "label each. Restore both files (git checkout for shipped data, `make data TUTORIAL=mnist` for the full set).")
    if full:
        return [*parts[0], *parts[1]]
    (images, labels), = parts
    return [tensor[rows] for rows in ddp.split(len(images), [0.1], seed=0) for tensor in (images, labels)]


images, labels, held_out_images, held_out_labels = read_digits(dataset.path)
print(f"{len(images):,} digits of {images.shape[1]} x {images.shape[2]} to learn from, {len(held_out_images):,} held out")

# %% tags=["lesson"]
figure, axes = plt.subplots(figsize=(8, 1.3))
axes.imshow(images[:10].permute(1, 0, 2).reshape(28, 280), cmap="gray_r")
axes.set(xticks=range(14, 280, 28), xticklabels=labels[:10].tolist(), yticks=[], title="Ten digits and their labels")
plt.show()

# %% [markdown]
# ## 4. One rank first
#
# The model is an *autoencoder*: it squeezes the 784 values of a digit through narrow layers and has to draw the digit again. No label is needed.
# The measure is the mean squared error (MSE) per pixel, with ink as 1.
#
# All digits stay one tensor of bytes. The data set hands out a whole batch by one index operation (`__getitems__`) and turns only that batch
# into floats: item by item, Python would spend more time than the model.

# %%
class Digits(Dataset):
    def __init__(self, images):
        self.pixels = images.flatten(1)  # (n, 784), uint8

    def __len__(self):
        return len(self.pixels)

    def __getitems__(self, indices):
        return self.pixels[indices].float() / 255


class Autoencoder(nn.Module):
    def __init__(self, width=128, bottleneck=128):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(784, width), nn.ReLU(), nn.Linear(width, bottleneck))
        self.decoder = nn.Sequential(nn.Linear(bottleneck, width), nn.ReLU(), nn.Linear(width, 784))

    def forward(self, pixels):
        return self.decoder(self.encoder(pixels))


# %% [markdown]
# The plain loop, in this process, once over the digits. Nothing here is distributed.

# %% tags=["lesson"]
torch.manual_seed(settings.seed)
data = Digits(images[:9_000])
model = Autoencoder()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
losses = []
for batch in torch.randperm(len(data)).split(128):
    digits = data.__getitems__(batch)
    loss = F.mse_loss(model(digits), digits)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"{len(losses)} steps: the error falls from {losses[0]:.2f} to {losses[-1]:.2f} per pixel")

# %% tags=["lesson"]
figure, axes = plt.subplots(figsize=(6, 2.6))
axes.plot(losses)
axes.set(xlabel="step", ylabel="loss (MSE per pixel)", title="One process, the plain loop", ylim=0)
plt.show()

# %% [markdown]
# ## 5. Predict
#
# Two processes hold the same model. A batch has 128 digits: each process takes 64 of them, runs `backward()`, and then the two *average* their
# gradients, parameter by parameter. Each makes one step with what came out. **Write your prediction before you go on.** Compared with one process
# that takes all 128, the weights are
#
# - `"half"`: moved half as far, for each saw only half of the digits;
# - `"double"`: moved twice as far, for there were two gradients;
# - `"same"`: the same, up to rounding.

# %% tags=["lesson"]
my_prediction = "double"

# %% [markdown]
# ## 6. What changes
#
# ### Two ranks by hand
#
# A *rank* is a process that trains; the *world size* is their number. The ranks run the same program. What one of them computes, the others learn
# only through a *collective call*, which all must make, in the same order. `all_reduce` is the one needed here: it adds up a tensor over all ranks
# and leaves the sum on each.

# %% tags=["lesson"]
def one_by_one(model):
    """Average the gradients over the ranks: one collective call for each parameter."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)  # the sum over the ranks, in place
        parameter.grad /= ddp.world_size()


# %% [markdown]
# That is all of it. The loop around it is the one of section 4; new are `mine`, the digits that this rank takes of each batch, and `average(model)`.

# %% tags=["lesson"]
def train_by_hand(pixels, average, wrap=None):
    """Train on (n, 784) pixels in batches of 128. Returns the weights of every rank and the seconds of each step."""
    torch.manual_seed(0)  # the same initial weights on all ranks
    model = Autoencoder().to(ddp.device())
    model = wrap(model) if wrap else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    mine, seconds = slice(ddp.rank(), None, ddp.world_size()), []
    for batch in pixels.split(128):
        began = time.perf_counter()
        digits = batch[mine].to(ddp.device()).float() / 255
        optimizer.zero_grad()
        F.mse_loss(model(digits), digits).backward()
        average(model)
        optimizer.step()
        seconds.append(time.perf_counter() - began)
    weights = nn.utils.parameters_to_vector(model.parameters()).detach()
    everyones = [torch.empty_like(weights) for _ in range(ddp.world_size())]
    dist.all_gather(everyones, weights)
    return torch.stack(everyones).cpu(), seconds


# %% [markdown]
# `launch` starts a rank on each Dask worker and runs the function there; section 7 looks at it more closely. Sixty steps with two ranks:

# %% tags=["lesson"]
def on_two_ranks(function, **arguments):
    """What rank 0 of two returns."""
    return ddp.launch(client, function, **arguments, workers=2).result


sixty_batches = images[:60 * 128].flatten(1)
weights, seconds = {}, {}
weights["one by one"], seconds["one by one"] = on_two_ranks(train_by_hand, pixels=sixty_batches, average=one_by_one)
print(f"{weights['one by one'].shape[1]:,} weights on each of {len(weights['one by one'])} ranks, equal after {len(seconds['one by one'])} steps:",
      torch.equal(*weights["one by one"]))

# %% [markdown]
# ### Buckets
#
# Each collective call costs time before the first byte moves: the ranks have to meet. Few calls with much to carry are cheaper than many with little. So
# lay all gradients into one long tensor, a *bucket*, add that up, and put the pieces back.

# %% tags=["lesson"]
def in_one_bucket(model):
    """Average the gradients over the ranks: one collective call for all of them."""
    gradients = [parameter.grad for parameter in model.parameters()]
    bucket = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(bucket)
    bucket /= ddp.world_size()
    for gradient, part in zip(gradients, bucket.split([gradient.numel() for gradient in gradients])):
        gradient.copy_(part.view_as(gradient))


weights["one bucket"], seconds["one bucket"] = on_two_ranks(train_by_hand, pixels=sixty_batches, average=in_one_bucket)
difference = (weights["one bucket"] - weights["one by one"]).abs().max()
print(f"one bucket: the weights differ from those above by less than 1e-6: {bool(difference < 1e-6)}")

# %% [markdown]
# ### Why DDP does not wait for the end of `backward()`
#
# `backward()` goes from the last layer to the first. The gradients of the last layer are ready well before those of the first, and nothing will
# change them any more. A hook on each parameter shows when.

# %% tags=["lesson"]
def readiness(model, digits, repeats=30):
    """When each parameter's gradient is ready, as a share of the time of `backward()` (median); a dict in the order of readiness."""
    moments = {name: [] for name, _ in reversed(list(model.named_parameters()))}
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: moments[name].append(time.perf_counter()))
    for _ in range(repeats):
        model.zero_grad()
        loss = F.mse_loss(model(digits), digits)
        began = time.perf_counter()
        loss.backward()
        took = time.perf_counter() - began
        for each in moments.values():
            each[-1] = (each[-1] - began) / took
    return {name: np.median(each) for name, each in moments.items()}


ready = readiness(Autoencoder(), data.__getitems__(range(128)))

# %% tags=["lesson"]
figure, axes = plt.subplots(figsize=(7, 2.8))
axes.barh(list(ready), [100 - 100 * share for share in ready.values()], left=[100 * share for share in ready.values()], color="tab:green", alpha=0.6)
axes.invert_yaxis()
axes.set(xlim=(0, 100), xlabel="time in backward() (%)", title="Green: the gradient is ready and could be on its way")
plt.show()

# %% [markdown]
# `DistributedDataParallel` uses that time. It fills buckets from the last parameter to the first and starts to add up each as soon as it is full,
# while `backward()` still works on the layers before: communication hides behind computation. It also copies rank 0's weights to the others when the
# model is wrapped. There is no call to `average` any more.

# %% tags=["lesson"]
weights["DDP"], seconds["DDP"] = on_two_ranks(train_by_hand, pixels=sixty_batches, average=lambda model: None, wrap=DDP)
difference = (weights["DDP"] - weights["one by one"]).abs().max()
mebibytes = weights["DDP"].shape[1] * 4 / 2**20
print(f"DDP: the weights differ from those made by hand by less than 1e-6: {bool(difference < 1e-6)}")
print(f"{mebibytes:.1f} MiB of gradients; DDP's first bucket takes {dist._DEFAULT_FIRST_BUCKET_BYTES / 2**20:.0f} MiB")

# %% [markdown]
# The time of each of the three, per step on this machine. All gradients of this small model fit into DDP's first bucket, so hardly anything is left
# to overlap, and DDP's own bookkeeping counts. The larger the model and the slower the network, the more the order of the rows depends on it: measure
# yours.

# %% tags=["lesson", "nbval-ignore-output"]
steps = pd.DataFrame({way: 1_000 * np.array(each[10:]) for way, each in seconds.items()})  # without the first ten, which warm up
quartiles = steps.quantile([0.5, 0.25, 0.75]).T.set_axis(["median, ms", "a quarter below", "a quarter above"], axis=1)
print(quartiles.round(2).to_string())

# %% [markdown]
# > **Box · Batch per rank and global batch.** 64 digits on each of 2 ranks are one *global batch* of 128, and that is what the optimizer sees. Many
# > tutorials state the batch *per rank*: then 8 ranks make steps with batches 8 times as large, 8 times fewer of them per epoch, and the learning
# > rate no longer fits. Here `batch_size` is global, always: the number of ranks changes the speed and not the training.
#
# > **Box · Why the seeds are the same on all ranks.** Three things are drawn: the initial weights, the order of the digits, and noise such as
# > dropout. The first must agree (DDP sees to that itself, the loop by hand does not). The second must agree, or a digit goes to two ranks and
# > another to none. The third should *differ*, or all ranks drop the same units. `ElasticSampler` draws the order from (seed, epoch), and sets the
# > random state of each step from (seed, epoch, step, rank).

# %% [markdown]
# ### The training function
#
# Compared with the plain loop of section 4, these lines differ:
#
# | line | why |
# |---|---|
# | `sampler = ddp.ElasticSampler(...)` | deals each global batch to the ranks |
# | `model = DDP(...)` | averages gradients |
# | `* sampler.weight` | a rank with fewer digits of a ragged last batch counts less: section 8 |
# | `ddp.Checkpoint(...)`, `.restore()`, `.save()` | a run can stop and go on; rank 0 writes, all read |
# | `ddp.report(loss=loss)` | tells the client; no rank waits for it |

# %%
def train(images, epochs, batch_size, learning_rate, width, bottleneck, seed):
    """Train an Autoencoder on this rank's share of each batch; returns its weights."""
    device = ddp.device()
    torch.manual_seed(seed)  # the same initial weights on all ranks
    data = Digits(images)
    sampler = ddp.ElasticSampler(len(data), batch_size, seed=seed)
    loader = DataLoader(data, batch_sampler=sampler, collate_fn=lambda batch: batch)
    model = DDP(Autoencoder(width, bottleneck).to(device))
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    checkpoint = ddp.Checkpoint(model=model, optimizer=optimizer, sampler=sampler, every_steps=500)
    checkpoint.restore()  # nothing to restore on a first attempt
    for epoch in sampler.epochs(epochs):
        for digits in loader:
            digits = digits.to(device)
            loss = F.mse_loss(model(digits), digits) * sampler.weight
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ddp.report(loss=loss)
    checkpoint.save()
    return model.module.state_dict()


# %% [markdown]
# > **Box · Who may save.** All ranks hold the same weights, so one file is enough and one rank writes it: rank 0. All ranks *read* it.
# > `ddp.Checkpoint` keeps to that, and it saves `model.module`, the model inside the wrapper.
#
# > **Box · The optimizer's state on the right device.** Adam keeps two tensors for each parameter. `optimizer.load_state_dict` moves them to where
# > the *parameters* are. So: model to its device first, then the optimizer, then load. And load with `map_location`: without it every rank puts the
# > tensors on the device they were saved from, which is rank 0's GPU.
#
# > **Box · SyncBatchNorm.** Batch normalisation takes mean and variance of the digits that *this rank* sees. With 64 per rank that does no harm; with
# > 2 or 4 large images per GPU the figures are noise, and they differ between ranks. `nn.SyncBatchNorm.convert_sync_batchnorm(model)` takes them over
# > all ranks, for one more collective call per layer and step. It needs GPUs. This model normalises nothing.

# %% [markdown]
# ## 7. On Dask
#
# `launch` starts one process, a *rank*, on each worker, hands it the function with its arguments, and returns when all are done.

# %%
hyperparameters = {name: getattr(settings, name) for name in ("epochs", "batch_size", "learning_rate", "width", "bottleneck", "seed")}
run = ddp.launch(client, train, images=images, **hyperparameters)
print(f"{run.world_size} ranks, {settings.epochs} epochs in global batches of {settings.batch_size}")

# %% [markdown]
# Every report of every rank is a row of `run.metrics` and a line of `metrics.jsonl` in the run directory.

# %% tags=["lesson", "nbval-ignore-output"]
run.metrics.pivot_table(index="rank", columns="epoch", values="loss").iloc[:, ::max(1, settings.epochs // 5)].round(4)

# %%
def plot_losses(metrics):
    """The loss of every rank and of their mean, a point for every 20 steps."""
    whole = metrics[metrics["step"] < metrics["step"].max() // 20 * 20]  # without the last, incomplete point
    by_rank = whole.groupby([whole["step"] // 20 * 20, "rank"])["loss"].mean().unstack()
    figure, axes = plt.subplots(figsize=(7, 3.2))
    axes.plot(by_rank.index, by_rank.mean(axis=1), color="lightgrey", linewidth=5, label="mean: the loss of the global batch")
    for rank, curve in by_rank.items():
        axes.plot(curve.index, curve, linewidth=1, label=f"rank {rank}")
    axes.set(xlabel="step", ylabel="loss (MSE per pixel)", title=f"Training on {by_rank.shape[1]} ranks", ylim=0)
    axes.legend()
    return figure


figure = plot_losses(run.metrics)
figure.savefig(run.directory / "loss.png", dpi=120, bbox_inches="tight")

# %% [markdown]
# ### Is it any good?
#
# The held-out digits judge. An error alone says nothing, so it stands beside two references that nobody has to train. The *mean digit* is the same
# picture for every digit: whoever does no better has learned nothing. *Principal component analysis* (PCA) is the best that a *linear* map can do
# with as many numbers as the bottleneck has.

# %%
def principal_directions(pixels):
    """The mean (784,) of float pixels (n, 784) and the directions (784, 784) of their variance, the largest first."""
    _, directions = torch.linalg.eigh(torch.cov(pixels.T))
    return pixels.mean(0), directions.flip(1)


def pca(pixels, components):
    """Reconstruct pixels from their coordinates along the first `components` directions of the training digits."""
    kept = directions[:, :components]
    return mean + (pixels - mean) @ kept @ kept.T


mean, directions = principal_directions(Digits(images).__getitems__(slice(None)))
held_out = Digits(held_out_images).__getitems__(slice(None))
model = Autoencoder(settings.width, settings.bottleneck)
model.load_state_dict(run.result)
with torch.no_grad():
    reconstructed = model(held_out)
guesses = {"mean digit": mean.expand_as(held_out), "PCA": pca(held_out, settings.bottleneck), "autoencoder": reconstructed}
errors = pd.Series({name: F.mse_loss(guess, held_out).item() for name, guess in guesses.items()})

# %% tags=["nbval-ignore-output"]
print(f"Held-out MSE per pixel, from {settings.bottleneck} numbers per digit")
print(errors.round(4).to_string())
print(f"Of the mean digit's error, PCA leaves {errors['PCA'] / errors['mean digit']:.0%}, the autoencoder {errors['autoencoder'] / errors['mean digit']:.0%}.")

# %%
def strip(rows, count=12):
    """A picture of the first digits of each row: a dict of name -> pixels (n, 784)."""
    picture = torch.cat([pixels[:count].reshape(count, 28, 28).permute(1, 0, 2).reshape(28, count * 28) for pixels in rows.values()])
    figure, axes = plt.subplots(figsize=(9, 0.75 * len(rows) + 0.2))
    axes.imshow(picture, cmap="gray_r", vmin=0, vmax=1)
    axes.set(xticks=[], yticks=range(14, 28 * len(rows), 28), yticklabels=list(rows))
    return figure


figure = strip({"held out": held_out, **guesses})
figure.savefig(run.directory / "reconstructions.png", dpi=120, bbox_inches="tight")

# %% [markdown]
# ### The bottleneck is a knob
#
# The fewer numbers are left of a digit, the larger the error. How much larger depends on the map: a short training for each of four sizes, beside PCA
# with as many components.

# %% tags=["lesson"]
def held_out_error(bottleneck, epochs):
    """MSE on the held-out digits after a short training on two ranks."""
    short = {**hyperparameters, "epochs": epochs, "bottleneck": bottleneck}
    model = Autoencoder(settings.width, bottleneck)
    model.load_state_dict(on_two_ranks(train, images=images[:9_000], **short))
    with torch.no_grad():
        return F.mse_loss(model(held_out), held_out).item()


sizes = [2, 8, 32, 128]
trade_off = pd.DataFrame({"autoencoder": [held_out_error(size, epochs=5) for size in sizes],
                          "PCA": [F.mse_loss(pca(held_out, size), held_out).item() for size in sizes]}, index=sizes)

# %% tags=["lesson"]
figure, axes = plt.subplots(figsize=(6, 3))
axes.plot(trade_off, marker="o", label=list(trade_off))
axes.axhline(errors["mean digit"], color="grey", linestyle="--", label="mean digit")
axes.set(xscale="log", xticks=sizes, xticklabels=sizes, xlabel="numbers left of a digit", ylabel="held-out MSE", ylim=0, title="The bottleneck's trade-off")
axes.minorticks_off()
axes.legend()
plt.show()

# %% tags=["lesson", "nbval-ignore-output"]
for size, row in trade_off.iterrows():
    better = "the autoencoder" if row["autoencoder"] < row["PCA"] else "PCA"
    print(f"{size:4} numbers: autoencoder {row['autoencoder']:.4f}, PCA {row['PCA']:.4f}: {better} is better")

# %% tags=["proof"]
assert trade_off["autoencoder"].is_monotonic_decreasing, trade_off
assert trade_off["autoencoder"][8] < trade_off["PCA"][8], "with 8 numbers, curved should beat straight"
assert trade_off["PCA"][128] < trade_off["autoencoder"][128], "with 128 numbers, a short training should not reach PCA"
print("with 8 numbers the autoencoder beats PCA; with 128, after a short training, it does not")

# %% [markdown]
# That is what references are for. The curve alone says that a wide bottleneck is good. Beside PCA it says that a network earns its training where the
# bottleneck is *narrow*: there a curved map keeps more than a straight one. Where it is wide, a straight map has little left to lose, and the network,
# whose layers are no wider than the bottleneck, has to learn to pass nearly everything on. Look again at the errors of the long training above before
# you praise it. What does `SET="width=512"` change?

# %% [markdown]
# ### The same function under four launchers
#
# `train` does not know who started it. A launcher owes it three things: a process for each rank, the numbers (which rank, how many), and a place
# where the ranks meet. Dask, `torchrun` and Slurm's `srun` all provide them, and the only difference is the command:
#
# | launcher | command | when |
# |---|---|---|
# | Dask | `make run TUTORIAL=mnist WORKERS=2` | in a notebook; on any cluster that Dask can start workers on; many runs on the same workers |
# | `torchrun` | `make run TUTORIAL=mnist CLUSTER=torchrun WORKERS=2` | one machine, no Dask; what most other code you find is started with |
# | `srun` | `make run TUTORIAL=mnist CLUSTER=srun WORKERS=2` | inside an allocation of Slurm, such as an interactive session |
# | `sbatch` | `sbatch clusters/batch/mnist.sbatch` | a job that waits in the queue and runs while you sleep |
#
# `make run` is short for `python -m ddp_common run mnist`. The losses do not depend on the launcher either: which digits a step takes is drawn from
# (seed, epoch) alone, whoever started the ranks. Here is `torchrun`, as a program of its own, against Dask, for one epoch:

# %% tags=["lesson"]
def final_loss(records):
    """The loss of the last step, as the mean over ranks."""
    return records[records["step"] == records["step"].max()]["loss"].mean()


folder = run.directory / "torchrun"
command = [sys.executable, "-m", "ddp_common", "run", "mnist", "--cluster", "torchrun", "--workers", "2", "--checkpoint", str(folder), "--set", "epochs=1"]
done = subprocess.run(command, capture_output=True, text=True)
assert done.returncode == 0, done.stderr
under_torchrun = final_loss(pd.read_json(folder / "metrics.jsonl", lines=True))
under_dask = final_loss(ddp.launch(client, train, images=images, **{**hyperparameters, "epochs": 1}, workers=2).metrics)

# %% tags=["proof"]
assert abs(under_torchrun / under_dask - 1) < 1e-6, f"torchrun {under_torchrun}, Dask {under_dask}"
print("after one epoch the loss under torchrun and under Dask is the same, to a relative 1e-6")

# %% [markdown]
# > **Box · The address, the port, the interface.** By hand you would need all three. The *address* is that of the host of rank 0: `scontrol show
# > hostnames "$SLURM_JOB_NODELIST" | head -n 1` names it. The *port* must be free there: two jobs with the same fixed port on one node get in each
# > other's way. The *interface* is the network card that the ranks reach each other by; `ip route get ADDRESS` prints it after `dev`, and
# > `GLOO_SOCKET_IFNAME` and `NCCL_SOCKET_IFNAME` take it. This project asks you for none of them. Under Dask rank 0 opens a port that the system
# > picks, on the address by which Dask already reaches its worker, and Dask tells the others; under `torchrun` and `srun` address and port follow
# > from the variables that the launcher sets. The interface is the one that holds the address.

# %% [markdown]
# ## 8. Proofs
#
# ### A step on two ranks is a step with the whole batch
#
# The mean of two means over 64 digits is the mean over 128, and a gradient is linear in the loss. So the averaged gradient is that of the whole batch.

# %% tags=["lesson"]
one_batch = images[:128].flatten(1)
two_ranks = on_two_ranks(train_by_hand, pixels=one_batch, average=lambda model: None, wrap=DDP)[0][0]

torch.manual_seed(0)  # and now one process with all 128
model = Autoencoder()
before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
digits = one_batch.float() / 255
F.mse_loss(model(digits), digits).backward()
torch.optim.SGD(model.parameters(), lr=0.5).step()
one_process = nn.utils.parameters_to_vector(model.parameters()).detach()

# %% tags=["proof"]
assert (one_process - before).abs().max() > 1e-4, "the step should move the weights"
assert (two_ranks - one_process).abs().max() < 1e-6, (two_ranks - one_process).abs().max()
print("one DDP step on two ranks is the step of one process with the whole batch, to 1e-6")
print("your prediction was", repr(my_prediction), "— right" if my_prediction == "same" else "— and the weights say: 'same'")

# %% [markdown]
# ### Replicas stay equal
#
# Not nearly equal: both ranks divide the same sum and make the same step. Without the averaging each goes its own way.

# %% tags=["lesson"]
weights["no averaging"], _ = on_two_ranks(train_by_hand, pixels=sixty_batches, average=lambda model: None)

# %% tags=["proof"]
for way, (rank_0, rank_1) in weights.items():
    assert torch.equal(rank_0, rank_1) == (way != "no averaging"), way
print("after 60 steps the replicas are equal bit for bit: one by one, in one bucket, with DDP")
print("without averaging they are not: two models instead of one")

# %% [markdown]
# ### A ragged batch: the average of averages is not the average
#
# Five digits, two ranks: three here, two there. Each rank takes the mean over its own, and DDP averages over *ranks*, so a digit on the second rank
# counts one and a half times as much. `sampler.weight` is the cure: the loss of a rank times its share of the batch, times the number of ranks.

# %% tags=["lesson"]
def gradient_and_loss(pixels, weighted):
    """The averaged gradient of one global batch that holds all `pixels`, and the average of the ranks' losses."""
    torch.manual_seed(0)
    model = DDP(Autoencoder().to(ddp.device()))
    sampler = ddp.ElasticSampler(len(pixels), batch_size=len(pixels), shuffle=False)
    for mine in sampler:
        digits = pixels[mine].to(ddp.device()).float() / 255
        loss = F.mse_loss(model(digits), digits) * (sampler.weight if weighted else 1)
        loss.backward()
    loss = loss.detach()
    dist.all_reduce(loss)
    return model.module.encoder[0].weight.grad.cpu(), loss.item() / ddp.world_size()


five = images[:5].flatten(1)
torch.manual_seed(0)
model = Autoencoder()
whole_loss = F.mse_loss(model(five.float() / 255), five.float() / 255)
whole_loss.backward()
whole_gradient, whole_loss = model.encoder[0].weight.grad, whole_loss.item()

# %% tags=["proof"]
for weighted in (False, True):
    gradient, loss = on_two_ranks(gradient_and_loss, pixels=five, weighted=weighted)
    off = (gradient - whole_gradient).norm() / whole_gradient.norm()
    assert (abs(loss / whole_loss - 1) < 1e-5) == (off < 1e-5) == weighted, (loss, whole_loss, off)
    what = "times sampler.weight: the loss and the gradient" if weighted else "plain means: neither the loss nor the gradient"
    print(f"{what} of the whole batch, to 1e-5")

# %% [markdown]
# ### Without `set_epoch`, every epoch deals the same batches
#
# PyTorch's `DistributedSampler` shuffles, but from (seed, epoch), and it counts no epochs: it has to be told, by `sampler.set_epoch(epoch)`. Whoever
# forgets gets no error, only the same batches again and again. `ElasticSampler.epochs()` counts for itself.

# %% tags=["lesson"]
def deals(samples=1_000, epochs=3):
    """What rank 0 of two is dealt in each epoch, by each of three ways: a dict of lists."""
    dealt = {"DistributedSampler": [], "with set_epoch": [], "ElasticSampler": []}
    forgetful, told = (DistributedSampler(range(samples), num_replicas=2, rank=0) for _ in range(2))
    elastic = ddp.ElasticSampler(samples, batch_size=100)
    for epoch in elastic.epochs(epochs):
        told.set_epoch(epoch)
        dealt["DistributedSampler"].append(list(forgetful))
        dealt["with set_epoch"].append(list(told))
        dealt["ElasticSampler"].append(sum(elastic, []))
    return dealt


# %% tags=["lesson"]
def check_epochs_differ(epochs):
    """Raise AssertionError if two epochs deal the same samples in the same order."""
    assert len(set(map(tuple, epochs))) == len(epochs), "every epoch deals the same batches"


# %% tags=["proof"]
for way, epochs in deals().items():
    try:
        check_epochs_differ(epochs)
        print(f"{way}: three epochs, three orders")
    except AssertionError as caught:
        assert way == "DistributedSampler", way
        print(f"{way}: caught, {caught}")

# %% [markdown]
# ### From the museum: all ranks make one folder, all ranks write one file
#
# `if not os.path.exists(folder): os.mkdir(folder)` works for years on one process. With several, all of them look, all see nothing, all make it, and
# all but one fail. `open(path, "wb")`, with which `torch.save` begins, empties the file: what rank 0 has just written is gone until the last rank is
# done. Which rank comes when is luck; here barriers stage the bad case, so that everybody sees it.

# %% tags=["lesson"]
def all_ranks_write(folder, rank_0_only):
    """Make `folder`, write a checkpoint there. Returns what went wrong on each rank, and the bytes a reader finds while the ranks write."""
    looked, trouble = os.path.exists(folder), None
    dist.barrier()  # all have looked
    if not looked and (ddp.rank() == 0 or not rank_0_only):
        try:
            os.mkdir(folder)
        except FileExistsError as error:
            trouble = type(error).__name__
    dist.barrier()
    if ddp.rank() == 0:
        torch.save({"weights": torch.zeros(1_000)}, f"{folder}/checkpoint.pt")
    dist.barrier()  # rank 0 is done; rank 1 begins
    file = open(f"{folder}/checkpoint.pt", "wb") if ddp.rank() == 1 and not rank_0_only else None
    dist.barrier()
    troubles = [None] * ddp.world_size()
    dist.all_gather_object(troubles, trouble)
    found = os.path.getsize(f"{folder}/checkpoint.pt")
    dist.barrier()  # the reader has read
    _ = file and file.close()
    return troubles, found


# %% tags=["lesson"]
def check_written_once(troubles, found):
    """Raise AssertionError if a rank failed or a reader may find an empty file."""
    assert not any(troubles) and found > 0, f"{[each for each in troubles if each]}, and a reader finds {found} bytes"


# %% tags=["proof"]
for rank_0_only in (False, True):
    folder = str(run.directory / f"rank_0_only={rank_0_only}")
    try:
        check_written_once(*on_two_ranks(all_ranks_write, folder=folder, rank_0_only=rank_0_only))
        print("rank 0 alone: one folder, one whole file")
    except AssertionError as caught:
        assert not rank_0_only
        print("all ranks: caught,", caught)

# %% [markdown]
# > **Box · `mkdir` races.** Three cures: only rank 0 makes the folder, and a barrier comes before anybody else uses it; `os.makedirs(folder,
# > exist_ok=True)`, which does not mind; or let the launcher make it before there are ranks, as `launch` does with the run directory. On a shared
# > file system another host may see a new folder late: prefer the third.

# %% [markdown]
# ### From the museum: validation with the training sampler
#
# A script has a loader for training, copies the line for validation, and forgets to change the sampler. It runs, and the validation error is
# splendid: it is the training error. Whether the right digits were judged is a question about indices: gather them from all ranks and count.

# %% tags=["lesson"]
def judged(samples, training, held_out, with_training_sampler):
    """The indices, among all `samples`, of the digits that the ranks evaluate: a list of lists."""
    if with_training_sampler:  # from the museum of faults
        positions, rows = ddp.ElasticSampler(len(training), 256), training
    else:
        positions, rows = ddp.EvalSampler(len(held_out), 256), held_out
    loader = DataLoader(torch.arange(samples), batch_sampler=[rows[batch].tolist() for batch in positions])
    everyones = [None] * ddp.world_size()
    dist.all_gather_object(everyones, [index for batch in loader for index in batch.tolist()])
    return everyones


# %% tags=["lesson"]
def check_judged(everyones, held_out):
    """Raise AssertionError unless exactly the held-out digits were evaluated, each once."""
    seen, trained_on = np.concatenate(everyones), set(np.concatenate(everyones)) - set(held_out)
    assert len(trained_on) == 0, f"{len(trained_on):,} digits were judged that are not held out"
    assert sorted(seen) == sorted(held_out), "a held-out digit is missing, or counts twice"


# %% tags=["proof"]
training, judges = ddp.split(1_001, [0.1], seed=0)
for with_training_sampler in (True, False):
    everyones = on_two_ranks(judged, samples=1_001, training=training, held_out=judges, with_training_sampler=with_training_sampler)
    try:
        check_judged(everyones, judges)
        print(f"EvalSampler: {len(judges)} held-out digits, each judged once, by {len(everyones)} ranks")
    except AssertionError as caught:
        assert with_training_sampler
        print("training sampler: caught,", caught)

# %% [markdown]
# ## 9. Exercises
#
# ### Exercise 1 · Fill the buckets (12 minutes)
#
# **Goal.** Write the rule by which DDP fills its buckets. `sizes` are the numbers of elements of the parameters, in the order of the model. Return
# the buckets as lists of parameter numbers: the *last* parameter first, because its gradient is ready first, and a new bucket whenever the one at
# hand holds `capacity` elements or more.
# **Hint.** `sizes=[5, 5, 5]` and `capacity=8` give `[[2, 1], [0]]`. Count what the bucket at hand holds; `reversed(range(len(sizes)))` goes backwards.

# %% tags=["solution"]
def my_buckets(sizes, capacity):
    """Which parameters share a bucket, in the order in which the buckets are sent."""
    # your code
    buckets, held = [[]], 0
    for number in reversed(range(len(sizes))):
        if held >= capacity:
            buckets.append([])
            held = 0
        buckets[-1].append(number)
        held += sizes[number]
    return buckets
    # end of your code


# %% tags=["exercise"]
def check_buckets(answer):
    for sizes, capacity, expected in (([5, 5, 5], 8, [[2, 1], [0]]), ([5, 5, 5], 100, [[2, 1, 0]]), ([5, 5, 5], 1, [[2], [1], [0]]),
                                      ([2, 9, 3, 1], 4, [[3, 2], [1], [0]]), ([7], 3, [[0]])):
        yours = answer(sizes, capacity)
        if yours != expected:
            print(f"not yet: sizes {sizes}, capacity {capacity}: yours {yours}, expected {expected}")
            return False
    print("right: the last gradients leave first, and no bucket waits for more than it needs")
    return True


ddp.judge(check_buckets, my_buckets)

# %% [markdown]
# ### Exercise 2 · Start equal (8 minutes)
#
# **Goal.** Averaged gradients keep replicas equal only if they *start* equal. Here each rank has another seed. Make the weights of all ranks those of
# rank 0, as `DDP(model)` does.
# **Hint.** `dist.broadcast(tensor, src=0)` overwrites a tensor with rank 0's, in place. Every rank has to call it. A parameter's own tensor is
# `parameter.data`.

# %% tags=["solution"]
def my_broadcast(model):
    """Give this rank's `model` the weights of rank 0."""
    # your code
    for parameter in model.parameters():
        dist.broadcast(parameter.data, src=0)
    # end of your code


# %% tags=["exercise"]
def first_weights(broadcast):
    """The first weight of each layer's matrix, of rank 0 before and of all ranks after `broadcast(model)`."""
    torch.manual_seed(ddp.rank())  # another model on each rank
    model = Autoencoder().to(ddp.device())
    firsts = [[parameter.flatten()[0].item() for parameter in model.parameters()]]
    broadcast(model)
    everyones = [None] * ddp.world_size()
    dist.all_gather_object(everyones, [parameter.flatten()[0].item() for parameter in model.parameters()])
    return firsts + everyones


# %% tags=["exercise"]
def check_broadcast(answer):
    try:
        expected, *yours = ddp.launch(client, first_weights, broadcast=answer, workers=2, stall_timeout=8).result
    except ddp.RankFailed as failure:
        print("not yet:", str(failure).splitlines()[0], "Does every rank make the same calls?")
        return False
    for rank, weights in enumerate(yours):
        if weights != expected:
            print(f"not yet: on rank {rank} yours begins with {weights[0]:.4f}, expected {expected[0]:.4f} (or a later parameter differs)")
            return False
    print("right: two ranks, two seeds, one model")
    return True


ddp.judge(check_broadcast, my_broadcast)

# %% [markdown]
# ### Stretch · A large batch in small parts (15 minutes)
#
# A global batch may be too large for the memory. Take it in parts, let the gradients add up, and make one step at the end. DDP would average after
# every `backward()`; inside `with model.no_sync():` it does not.
# **Goal.** `model` is wrapped in DDP; `parts` is a list of equally large tensors of pixels. Leave in `.grad` the gradient of the mean loss over all
# parts, with *one* averaging over the ranks.
# **Hint.** All parts but the last go inside `no_sync()`. Divide each loss by the number of parts.

# %% tags=["solution"]
def my_accumulation(model, parts):
    """Run backward on each part; the ranks talk to each other once, at the last."""
    # your code
    with model.no_sync():
        for part in parts[:-1]:
            (F.mse_loss(model(part), part) / len(parts)).backward()
    (F.mse_loss(model(parts[-1]), parts[-1]) / len(parts)).backward()
    # end of your code


# %% tags=["exercise"]
def accumulate(pixels, accumulation):
    """The gradient of the first layer (None if there is none) and how often the ranks averaged."""
    torch.manual_seed(0)
    model, averagings = DDP(Autoencoder().to(ddp.device())), []

    def count_and_average(_, bucket):
        averagings.append(bucket.index())
        return dist.all_reduce(bucket.buffer().div_(ddp.world_size()), async_op=True).get_future().then(lambda future: future.value()[0])

    model.register_comm_hook(None, count_and_average)
    accumulation(model, (pixels[ddp.rank()::ddp.world_size()].to(ddp.device()).float() / 255).split(16))
    gradient = model.module.encoder[0].weight.grad
    return None if gradient is None else gradient.cpu(), len(averagings)


# %% tags=["exercise"]
def check_accumulation(answer):
    digits = images[:128].flatten(1).float() / 255
    torch.manual_seed(0)
    alone = Autoencoder()
    F.mse_loss(alone(digits), digits).backward()
    expected = alone.encoder[0].weight.grad
    yours, averagings = on_two_ranks(accumulate, pixels=images[:128].flatten(1), accumulation=answer, stall_timeout=8)
    if yours is None or averagings != 1 or not torch.allclose(yours, expected, atol=1e-6 * expected.abs().max().item(), rtol=1e-3):
        size = 0.0 if yours is None else (yours.norm() / expected.norm()).item()
        print(f"not yet: yours averages {averagings} times, expected 1; your gradient is {size:.2f} times as long, expected 1.00 (and the same direction)")
        return False
    print("right: four parts on each rank, one averaging, the gradient of all 128 digits")
    return True


ddp.judge(check_accumulation, my_accumulation)

# %% [markdown] tags=["instructor"]
# **Instructor.** Expected wrong answers. Exercise 1: buckets in the order of the model (sent last, what was ready first); a bucket closed *before* it
# would overflow (DDP closes it after; `[5, 5, 5]` with 8 shows it). Exercise 2: only rank 0 calls `broadcast` (all ranks wait; the check says so
# after 8 s: let it happen once, it is the most frequent error of all); averaging the weights instead (equal, but nobody's). Stretch: no division by
# the number of parts (four times too long); everything inside `no_sync()` (no averaging: 0 times). Prediction: "double" is the most frequent answer,
# from those who forget the division.

# %% [markdown]
# ## 10. Break it
#
# Somebody cuts the digits by hand, 600 for rank 0, the 500 that are left for rank 1, and gives each rank its part. Each trains in batches of its own
# part, and rank 1 is through one batch earlier. On its own rank 0 would now wait for half an hour, the time-out of a collective call. Read the
# message together: which rank, at which step, and what was the other one doing?

# %% tags=["lesson"]
def train_on_own_part(images, **arguments):
    """From the museum of faults: shards of different length."""
    return train(images[:600] if ddp.rank() == 0 else images[600:], **arguments)


few = {**hyperparameters, "images": images[:1_100], "epochs": 1, "batch_size": 128}
try:
    ddp.launch(client, train_on_own_part, **few, workers=2)
except ddp.RankFailed as failure:
    broken = failure
print(str(broken).splitlines()[0].replace(broken.host, "HOST"))
print("...")
print("\n".join(line.strip() for line in str(broken).splitlines() if "Where rank" in line or "loss.backward()" in line))

# %% [markdown]
# The peer was ended at once, and the workers are free. The repair: no rank decides for itself how many steps there are. Give all ranks all digits and
# let the sampler deal; then the number of steps follows from the *global* batch, and a ragged one is shared out.

# %% tags=["lesson"]
repaired = ddp.launch(client, train, **few, workers=2)
print("steps on each rank:", repaired.metrics.groupby("rank")["step"].max().tolist())

# %% [markdown]
# ## 11. Does it scale?
#
# Compare at equal *samples seen*, never at equal steps. Here the global batch is the same, so equal steps are equal samples, and the only question is
# the speed. This model is small: a step takes a few milliseconds, and the ranks spend a good part of them on each other. Believe the measurement.

# %% tags=["lesson", "nbval-ignore-output"]
measured = []
for ranks, batch_size in ((1, 128), (2, 128), (1, 1_024), (2, 1_024)):
    trial = ddp.launch(client, train, images=images[:9_000], **{**hyperparameters, "epochs": 3, "batch_size": batch_size}, workers=ranks)
    times = trial.metrics.query("rank == 0 and epoch > 0").sort_values("step")
    speed = times["samples"].diff().sum() / (times["time"].iloc[-1] - times["time"].iloc[0])
    last = trial.metrics.query("step == step.max()")["loss"].mean()
    measured.append({"batch": batch_size, "ranks": ranks, "samples/s": speed, "last loss": last})
scaling = pd.DataFrame(measured).set_index(["batch", "ranks"])
print(scaling.round({"samples/s": -2, "last loss": 4}).to_string())
for batch_size, speeds in scaling["samples/s"].groupby("batch"):
    print(f"batch {batch_size}: 2 ranks are {speeds.iloc[1] / speeds.iloc[0]:.2f} times as fast as 1 on {os.cpu_count()} cores")

# %% [markdown]
# A larger batch gives the ranks more to do between two meetings, so it should speed up better. It is no gift: the number of steps is an eighth, and after
# the same number of samples the loss is another. Compare the last column before you call it faster.

# %% [markdown]
# ## 12. The same on a cluster
#
# Not a line of this file changes; the command does, as in the table of section 7. `clusters/batch/mnist.sbatch` has comments that say what to adapt:
# account, partition, time, GPUs. What differs:
#
# | | laptop | cluster |
# |---|---|---|
# | ranks start | within seconds | when the queue lets them |
# | they meet | on this machine | on the host of rank 0, by an address and a port that nobody has to type |
# | backend | gloo | NCCL, if every rank has a GPU of its own |
# | cost | your battery | core or GPU hours, also while a rank waits for its peers |
# | the run ends early because | you closed the lid | the time limit: submit again and go on from the checkpoint |

# %% [markdown]
# ## 13. Recap
#
# - Every rank holds the whole model, takes its share of each global batch, and averages its gradients with the others: the step is that of the whole batch.
# - Equal weights at the start and the same averaged gradient in each step keep the replicas equal, bit for bit.
# - DDP averages in buckets, while `backward()` still runs. It averages over *ranks*, not samples: `sampler.weight` makes up for ragged batches.
# - A launcher provides processes, numbers and a place to meet. The training function does not know which one it was.
# - An error is worth what its references are worth.
#
# **Common mistakes.** Forgetting `set_epoch`; ranks that disagree on the number of steps; a collective call inside `if rank == 0`; saving from all
# ranks; validating with the training sampler; a batch size per rank that nobody multiplied.
#
# **Next:** `make run TUTORIAL=mnist SET="bottleneck=8"`, then `pets`: how Dask runs the ranks, and how to watch, kill and resume them.
# **Read:** Li et al., *PyTorch Distributed: Experiences on Accelerating Data Parallel Training*, VLDB 2020; the docs of
# `torch.nn.parallel.DistributedDataParallel` and of `torchrun`; Hinton and Salakhutdinov, *Reducing the Dimensionality of Data with Neural Networks*,
# Science 2006, for autoencoders beside PCA.

# %% tags=["nbval-ignore-output"]
client.close()
