# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # MNIST: what DDP adds to a training loop
#
# ## 1. The question
#
# **What does DDP add to my loop?**
#
# DDP is PyTorch's `DistributedDataParallel`. It trains one model in several processes
# at once. Each of them is called a *rank*, and has a GPU of its own, or a core.
#
# **Afterwards you can**
# - turn a training loop of one process into a script for `torchrun`;
# - say, and *prove*, what one step of two ranks does to the weights;
# - read the timeline of a step: who computes, who sends, who waits for whom;
# - accumulate gradients over parts of a batch.
#
# **You need** Python, and from PyTorch a model, a loss, an optimizer. No GPU, no
# network, no other notebook: this is the first.
# **Data:** 10,000 handwritten digits, which come with the repository.
#
# **Time:** 75 minutes in class, 23 of them for two exercises. The computer needs about
# one minute on two cores.

# %% [markdown]
# ## 2. Set-up
#
# All settings are here. In a terminal, in the folder of the repository,
# `make run TUTORIAL=mnist SET="epochs=2"` trains without the lesson and changes one of
# them. `PRESET=full` trains on all 60,000 digits, after `make data TUTORIAL=mnist`.

# %%
import os
import re
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
import torch.nn.functional as F
from IPython.display import SVG, Image, display
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset

import ddp_common as ddp
from tutorials import kit
from tutorials.checks import mnist as checks
from tutorials.checks.common import judge
from tutorials.helpers import curve, pictures, show

REPOSITORY = Path(ddp.__file__).parents[1]

# %% tags=["parameters"]
settings = kit.settings(
    "mnist",
    data="shipped",  # or "full", or the path of a folder with IDX files
    epochs=5,
    batch_size=64,  # the global batch: digits in a step, over all ranks
    learning_rate=2e-3,
    channels=24,  # of the first convolution; the second has twice as many
    bottleneck=32,  # the numbers that are left of a digit
    seed=0,
    presets={"full": {"data": "full", "epochs": 15}},
)

# %% [markdown]
# `connect()` starts two to four processes that wait for work; each short run here uses
# two. The library *Dask* manages them: the next notebook, `pets`, is about it. The
# *backend* moves data between the ranks: gloo for CPUs, NCCL for NVIDIA's GPUs.

# %% tags=["nbval-ignore-output"]
client = ddp.connect()
dataset = kit.fetch("mnist", settings.data)
backend = "NCCL" if torch.cuda.is_available() else "gloo"
print(
    f"torch {torch.__version__} · {backend} · {client.ranks} ranks on "
    f"{os.cpu_count()} cores · {dataset.title}: {dataset.origin} · {dataset.licence}"
)

# %% [markdown]
# ## 3. The data
#
# Digits of 28 × 28 grey values, from about 1990: 0 is paper, 255 is ink.
# A tenth of the digits is held out: the model never trains on them.


# %%
def read_part(folder, part):
    """Images (n, 28, 28) and labels (n,) of one part, uint8. Raises ddp.Error."""
    images = kit.read_idx(Path(folder) / f"{part}-images-idx3-ubyte.gz")
    labels = kit.read_idx(Path(folder) / f"{part}-labels-idx1-ubyte.gz")
    if images.shape[1:] != (28, 28) or len(images) != len(labels):
        raise ddp.Error(
            f"{folder} holds images {tuple(images.shape)} and {len(labels)} labels: "
            "these are not digits of 28 x 28 with one label each. Restore both files: "
            "git checkout for shipped data, `make data TUTORIAL=mnist` for full ones."
        )
    return images, labels


def read_digits(folder):
    """Training images and labels, then those held out."""
    if (Path(folder) / "train-images-idx3-ubyte.gz").exists():
        return [*read_part(folder, "train"), *read_part(folder, "t10k")]
    digits = read_part(folder, "digits")
    kept, held_out = ddp.split(len(digits[0]), [0.1], seed=0)
    return [tensor[rows] for rows in (kept, held_out) for tensor in digits]


images, labels, held_out_images, held_out_labels = read_digits(dataset.path)
print(f"{len(images):,} digits to learn from, {len(held_out_images):,} held out")

# %% tags=["lesson"]
show(
    pictures(images[:20], titles=labels[:20].tolist()),
    "Twenty handwritten digits in two rows, each with its label above.",
)

# %% [markdown]
# ## 4. One process first
#
# The model is an *autoencoder*. It squeezes the 784 values of a digit into 32 numbers
# and draws the digit again from these. So a digit is its own target, and no label is
# needed. The loss is the mean squared error (MSE) per pixel, with ink as 1. The
# same grey picture for every digit would have a loss of about 0.07.


# %%
class Digits(Dataset):
    def __init__(self, images):
        self.pixels = images.flatten(1)  # (n, 784), uint8

    def __len__(self):
        return len(self.pixels)

    def __getitems__(self, indices):  # a whole batch, where it is there: faster
        return self.pixels[indices].float() / 255


def autoencoder(channels=24, bottleneck=32):
    """From pixels (n, 784) to pixels (n, 784), through `bottleneck` numbers."""
    c = channels
    down = [nn.Unflatten(1, (1, 28, 28)), nn.Conv2d(1, c, 3, 2, 1), nn.ReLU()]
    down += [nn.Conv2d(c, 2 * c, 3, 2, 1), nn.ReLU(), nn.Flatten()]
    narrow = [nn.Linear(98 * c, bottleneck), nn.Linear(bottleneck, 98 * c), nn.ReLU()]
    up = [nn.Unflatten(1, (2 * c, 7, 7)), nn.ConvTranspose2d(2 * c, c, 4, 2, 1)]
    up += [nn.ReLU(), nn.ConvTranspose2d(c, 1, 4, 2, 1), nn.Flatten()]
    return nn.Sequential(*down, *narrow, *up)


# %% [markdown]
# Here is the plain loop, once over the digits. Nothing in it is distributed. Read it
# line by line: it comes back twice.

# %% tags=["lesson"]
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.set_num_threads(1)  # one core, as a rank has later
torch.manual_seed(0)
model = autoencoder().to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
# collate_fn makes a batch of samples; here the data set has made it already
loader = DataLoader(Digits(images), 64, shuffle=True, collate_fn=lambda batch: batch)
for digits in loader:
    digits = digits.to(device)
    loss = F.mse_loss(model(digits), digits)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"{len(loader)} steps; the loss of the last is below 0.04: {loss.item() < 0.04}")

# %% [markdown]
# ## 5. Predict
#
# The digits of one step, of all ranks together, are the *global batch*. Section 4 had
# 64. The short experiments from here on have 128: 64 for each of two ranks.
#
# Two ranks hold the same model. Each calls `backward()` on its 64 digits. Then they
# *average* their gradients, parameter by parameter, and each makes one step. Compare
# with one process that takes all 128. The weights have moved
#
# - `"half"` as far, because each rank saw only half of the digits;
# - `"double"` as far, because there were two gradients;
# - `"same"`: as far, up to rounding.
#
# **Write your prediction before you go on.** Section 8 scores it.

# %% tags=["lesson"]
my_prediction = None  # "half", "double" or "same"

# %% [markdown]
# ## 6. Two ranks, by hand
#
# Ranks have numbers. The first is rank 0. The number of ranks is the *world size*. All
# ranks run the same program. None of them sees the memory of another.

# %% tags=["lesson"]
display(
    SVG(filename=REPOSITORY / "docs" / "pictures" / "who-talks-to-whom.svg"),
    metadata={
        "image/svg+xml": {
            "alt": "A client sends a function through a scheduler to two workers. Each "
            "worker starts a rank. The ranks exchange gradients. Reports come back."
        }
    },
)

# %% [markdown]
# Your notebook is the *client*. It sends a function to Dask's two *workers*, and each
# starts one rank. The ranks send their gradients **to each other**, not through Dask.
#
# To exchange something, the ranks make a *collective call*: all of them make it, in the
# same order. `all_reduce` adds up a tensor over all ranks and leaves the sum on each.


# %% tags=["lesson"]
def average_gradients(model):
    """After this, each rank holds the mean of all ranks' gradients."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)  # the sum over the ranks, in place
        parameter.grad /= dist.get_world_size()


def train_by_hand(pixels, way):
    """Train on (n, 784) pixels in batches of 128; returns the weights of all ranks."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # the same initial weights on all ranks
    model = autoencoder().to(ddp.device())
    if way == "DDP":
        model = DDP(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for batch in pixels.split(128):
        digits = batch[rank::world_size].to(ddp.device()).float() / 255
        loss = F.mse_loss(model(digits), digits)
        optimizer.zero_grad()
        loss.backward()
        if way == "by hand":
            average_gradients(model)
        optimizer.step()
    weights = nn.utils.parameters_to_vector(model.parameters()).detach()
    everyones = [torch.empty_like(weights) for _ in range(world_size)]
    dist.all_gather(everyones, weights)  # each rank gets the weights of all
    return torch.stack(everyones).cpu()


# %% [markdown]
# Compare it with the plain loop. Between the batch and `step()`, two things are new:
# `batch[rank::world_size]` is this rank's share of the batch, and
# `average_gradients(model)` follows `backward()`. (The optimizer is SGD, because its
# step grows with the gradient. Adam's hardly does, and would hide a wrong average.)
#
# `launch` starts the ranks, runs the function on each and returns what it returned on
# rank 0. Thirty steps on two ranks:

# %% tags=["lesson"]
thirty_batches = images[: 30 * 128].flatten(1)
run = ddp.launch(
    client,
    train_by_hand,
    pixels=thirty_batches,  # arguments of the function
    way="by hand",
    workers=2,
    directory=False,  # no folder is kept of a short run
)
weights = {"by hand": run.result}
ranks, count = weights["by hand"].shape
print(f"{count:,} weights on each of {ranks} ranks, after 30 steps")

# %% [markdown]
# ## 7. DistributedDataParallel
#
# `model = DDP(model)` does the same for you, and `average_gradients` goes. When it is
# made, DDP copies the weights of rank 0 to all ranks. Then, in every `backward()`, it
# averages the gradients.

# %% tags=["lesson"]
on_two = {"workers": 2, "directory": False}
thirty = {"pixels": thirty_batches}
weights["DDP"] = ddp.launch(client, train_by_hand, **thirty, way="DDP", **on_two).result
off = (weights["DDP"] - weights["by hand"]).abs().max()
print("DDP and by hand, the same weights to 1e-6:", bool(off < 1e-6))

# %% [markdown]
# ### The timeline of a step
#
# Why not do it by hand, then? The picture shows one step of two ranks. We recorded it
# once, with a larger model of six layers, and a network that is **slow on purpose**:
# each message waits 2 ms, and 3 ms more for each MiB.

# %% tags=["lesson"]
display(
    Image(
        filename=REPOSITORY / "docs" / "pictures" / "a-step.png",
        alt="Four timelines of a step, a lane for each rank. By hand, averaging begins "
        "when backward has ended. With DDP it begins while backward is running. When "
        "rank 1 is late, the first averaging on rank 0 lasts until rank 1 has come.",
    )
)

# %% [markdown]
# `backward()` goes from the last layer to the first, so the gradients of the last layer
# are ready first. Read the four rows from top to bottom.
#
# 1. **One by one.** `average_gradients` does this: a message for each parameter, all of
#    them after `backward()`.
# 2. **One bucket.** All gradients are copied into one long tensor, a *bucket*. There
#    is one message. It leaves when all gradients are ready.
# 3. **DDP.** It fills several buckets and sends each as soon as it is full, while
#    `backward()` goes on. This is *overlap*: a part of the sending hides behind the
#    computing. (On a CPU, `backward()` returns when the last bucket is back.) Our own
#    model fits into one bucket, so it has no overlap.
# 4. **A late rank.** Rank 0 has its gradients and waits for rank 1. Its first green bar
#    is long, though the network is no slower. In every step, all ranks wait for the
#    slowest.
#
# Even without averaging, two ranks are less than twice as fast: each does the
# optimizer's whole step. The notebook `dogs` measures the gain.
#
# ### The training itself
#
# This is the function that `make run` trains with, in global batches of 64. It is the
# plain loop, with DDP and five helpers of this repository, which `pets` explains.


# %%
def train(images, epochs, batch_size, learning_rate, channels, bottleneck, seed):
    """Train an autoencoder on this rank's share of each batch; returns its weights."""
    device = ddp.device()
    torch.manual_seed(seed)  # the same initial weights on all ranks
    data = Digits(images)
    # deals each global batch out to the ranks
    sampler = ddp.ElasticSampler(len(data), batch_size, seed=seed)
    loader = ddp.DataLoader(data, batch_sampler=sampler, collate_fn=lambda batch: batch)
    model = DDP(autoencoder(channels, bottleneck).to(device))
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    checkpoint = ddp.Checkpoint(  # with it, a stopped run can go on
        model=model, optimizer=optimizer, sampler=sampler, every_steps=500
    )
    checkpoint.restore()  # nothing to restore on a first attempt
    for epoch in sampler.epochs(epochs):  # range(epochs), each in a new order
        for digits in loader:
            digits = digits.to(device)
            # the weight is 1, unless the ranks' shares of a batch differ in size
            loss = F.mse_loss(model(digits), digits) * sampler.weight
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ddp.report(loss=loss)  # to your notebook; no rank waits for it
    checkpoint.save()
    return model.module.state_dict()


# %%
NAMES = ["epochs", "batch_size", "learning_rate", "channels", "bottleneck", "seed"]
hyperparameters = {name: getattr(settings, name) for name in NAMES}
run = ddp.launch(
    client, train, **kit.launch_options(), images=images, **hyperparameters
)
print(f"{run.world_size} ranks, {settings.epochs} epochs, batch {settings.batch_size}")

figure = curve(run.metrics, label="loss (MSE per pixel)")
run.save_figure(figure, "loss.png")
plt.close(figure)

# %% tags=["lesson"]
show(figure, "The mean loss of the ranks falls steeply, then slowly, step by step.")

# %% [markdown]
# ### Is it any good?
#
# Here are digits that the model has never seen. The *mean digit* is for comparison: one
# picture for all.

# %% tags=["nbval-ignore-output"]
held_out = Digits(held_out_images).__getitems__(slice(None))
model = autoencoder(settings.channels, settings.bottleneck)
model.load_state_dict(run.result)
with torch.no_grad():
    reconstructed = model(held_out)
mean_digit = (images.float().mean(0).flatten() / 255).expand_as(held_out)
rows = {"held out": held_out, "mean digit": mean_digit, "autoencoder": reconstructed}

print(f"Held-out MSE per pixel, from {settings.bottleneck} numbers per digit")
for name in ["mean digit", "autoencoder"]:
    print(f"{name:12} {F.mse_loss(rows[name], held_out):.4f}")

lines = [pixels[:12].reshape(-1, 28, 28) for pixels in rows.values()]
picture = torch.cat([line.permute(1, 0, 2).reshape(28, -1) for line in lines])
figure, axes = plt.subplots(figsize=(9, 2.4))
axes.imshow(picture, cmap="gray_r", vmin=0, vmax=1)
axes.set(xticks=[], yticks=range(14, 28 * len(rows), 28), yticklabels=list(rows))
run.save_figure(figure, "reconstructions.png")
plt.close(figure)

# %% tags=["lesson"]
show(
    figure,
    "Rows of digits: held out, the mean digit, autoencoder. The mean digit is a grey "
    "blur. The autoencoder draws each digit again.",
)

# %% [markdown]
# ## 8. Proofs
#
# ### What a step of two ranks is
#
# We take one batch of 128 digits. Two ranks make one step with it, then one process.

# %% tags=["lesson"]
one_batch = images[:128].flatten(1)
two_ranks = ddp.launch(
    client, train_by_hand, pixels=one_batch, way="DDP", **on_two
).result[0]

torch.manual_seed(0)  # and now one process with all 128
model = autoencoder()
before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
digits = one_batch.float() / 255
F.mse_loss(model(digits), digits).backward()
torch.optim.SGD(model.parameters(), lr=0.5).step()
one_process = nn.utils.parameters_to_vector(model.parameters()).detach()

# %% tags=["proof"]
assert (one_process - before).abs().max() > 1e-4, "the step should move the weights"
assert (two_ranks - one_process).abs().max() < 1e-6
print("one DDP step on two ranks is the step of one process with the batch, to 1e-6")
if my_prediction is None:
    print("you have made no prediction: section 5")
elif my_prediction == "same":
    print("your prediction was right")
elif my_prediction == "double":
    print("you predicted 'double': which line divides by the world size?")
else:
    print("you predicted 'half': is the mean over 64 digits half of that over 128?")

# %% [markdown]
# The mean of two means over 64 digits is the mean over 128, and the gradient of a mean
# is the mean of the gradients. So the averaged gradient is that of the whole batch.
#
# This needs shares of one size, samples that do not influence each other, and equal
# randomness. *Batch normalisation* scales by the statistics of a batch, here of a
# rank's share. *Dropout* draws random zeros, others on each rank.
#
# ### Replicas stay equal
#
# Each rank holds a copy of the model, a *replica*. All start with the same weights and
# make the same steps. Do they stay equal, bit for bit? And without averaging?

# %% tags=["proof"]
weights["no averaging"] = ddp.launch(
    client, train_by_hand, **thirty, way="no averaging", **on_two
).result
for way, (rank_0, rank_1) in weights.items():
    equal = torch.equal(rank_0, rank_1)
    assert equal == (way != "no averaging"), way
    print(f"{way}: two replicas, equal bit for bit after 30 steps: {equal}")

# %% [markdown]
# ## 9. With torchrun, and on GPUs
#
# Most DDP code that you will find is a plain script, and `torchrun` starts it:
#
#     torchrun --standalone --nproc-per-node 2 my_script.py
#
# It starts two processes of the same script on one machine. Each finds its numbers in
# environment variables: `RANK`, `WORLD_SIZE`, and `LOCAL_RANK`, the rank's number *on
# its own machine*. The script does the rest:
#
# | line of the script | why |
# |---|---|
# | `local_rank = int(os.environ["LOCAL_RANK"])` | which GPU of this machine is mine |
# | `torch.cuda.set_device(local_rank)` | `"cuda"` now means that GPU, not GPU 0 |
# | `device = torch.device("cuda", local_rank)` | without GPUs: `torch.device("cpu")` |
# | `dist.init_process_group("nccl")` | meet the other ranks; without GPUs: `"gloo"` |
# | `model = model.to(device)` | first move the model, then wrap it |
# | `model = DDP(model, device_ids=[local_rank])` | without GPUs: `device_ids=None` |
# | `sampler = DistributedSampler(data)` | shuffles, and gives each rank its own share |
# | `DataLoader(data, 64, sampler=sampler)` | 64 *per rank*: global batch 128 on two |
# | `sampler.set_epoch(epoch)` | before each epoch: a new order |
# | `if dist.get_rank() == 0:` | what one rank does for all: print, save |
# | `model.module.state_dict()` | the model inside: DDP adds `module.` to all names |
# | `dist.destroy_process_group()` | the last line: leave the group |
#
# Without `set_device`, some tensors of *all* ranks go to GPU 0. If the samples cannot
# be shared out evenly, `DistributedSampler` repeats some.
#
# ### Three things for large models
#
# **Accumulation.** If a batch does not fit into memory, take it in parts: call
# `backward()` for each part and let the gradients add up. DDP would average in every
# `backward()`. It does not inside `with model.no_sync():`. Exercise B is about that.
#
# **Mixed precision.** Under `torch.autocast("cuda", dtype=torch.bfloat16)`, the forward
# pass computes most activations in *bf16*, numbers of 16 bits. Weights and gradients
# keep 32, so DDP does not change.
#
# **FSDP.** DDP keeps the whole model on every GPU. *Fully sharded data parallel*
# (`fully_shard`) spreads weights, gradients and optimizer state over the ranks. Take it
# if the model does not fit on one GPU.

# %% [markdown]
# ## 10. Exercises
#
# ### Exercise A · Port a script (17 minutes)
#
# `../scripts/plain_loop.py` is a plain loop as a script. Make it a script that
# `torchrun` starts on two ranks.
#
# 1. In JupyterLab, open `scripts/plain_loop.py`. Save it beside this notebook: *File,
#    Save Python File As…*, `my-work/my_port.py`.
# 2. Change your copy. The table in section 9 has the lines. Do not use `ddp_common`.
# 3. Let `my_port` below return the name of your file: `"my_port.py"`.
# 4. Run the check as often as you like. It names one fault at a time.
#
# What your script must do:
#
# - Model, loss, learning rate and epochs stay. The global batch still has 128 digits.
# - DDP averages the gradients.
# - In each epoch, each digit goes to one rank, in a new order.
# - Rank 0 alone prints. Rank 0 alone saves, once, at the end: `model.pt`, with the
#   names of the plain model.
# - It runs with and without GPUs. Choose by `torch.cuda.is_available()`.
#
# The check starts your script on two ranks with 1,024 random digits. It compares your
# weights with those of one process that takes the same batches. It hides all GPUs, so
# it only *reads* your lines for GPUs, and cannot try them.
#
# <details><summary>Hint 1</summary>
# Begin with the process group. Run the check: its question leads to the next
# line.</details>
# <details><summary>Hint 2</summary>
# Seven places change: the imports; the device; the loader and its batch size; the
# model; the first line of each epoch; the <code>print</code>; the end.</details>


# %% tags=["exercise", "solution"]
def my_port():
    """The path of your script."""
    # your code
    return REPOSITORY / "tutorials" / "scripts" / "solutions" / "plain_loop.py"
    # end of your code


# %% tags=["exercise"]
judge(checks.port, my_port, timeout=150)

# %% [markdown]
# ### Exercise B · A large batch in small parts (6 minutes)
#
# `model` is wrapped in DDP. `parts` is a list of tensors of pixels, all of one size.
# Leave in `.grad`, which is empty at first, the gradient of the mean loss over *all*
# parts. Call `backward()` on a part before the next forward, so that only one part's
# activations are in memory. DDP averages exactly *once*.
#
# <details><summary>Hint 1</summary>
# DDP decides when the model is <em>called</em> whether the next <code>backward()</code>
# averages. So the forward must be inside <code>no_sync()</code>; it is simplest to put
# both there. Which part is outside?</details>
# <details><summary>Hint 2</summary>
# Gradients add up. The mean of four losses is not their sum.</details>


# %% tags=["exercise", "solution"]
def my_accumulation(model, parts):
    """Run forward and backward for each part; DDP averages once."""
    # your code
    with model.no_sync():
        for part in parts[:-1]:
            (F.mse_loss(model(part), part) / len(parts)).backward()
    (F.mse_loss(model(parts[-1]), parts[-1]) / len(parts)).backward()
    # end of your code


# %% tags=["exercise"]
judge(lambda answer: checks.accumulation(client, answer), my_accumulation)

# %% [markdown]
# ## 11. Break it
#
# Somebody adds a layer and forgets to call it. One process does not mind. Two ranks do.
# What does DDP wait for? Which parameters does it name?


# %% tags=["lesson"]
class WithUnusedLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.reconstruct = nn.Linear(784, 784)
        self.classifier = nn.Linear(784, 10)

    def forward(self, pixels):
        return self.reconstruct(pixels)


def two_steps(pixels, **options):
    """Two steps of DDP; returns the number of parameters that have a gradient."""
    model = DDP(WithUnusedLayer().to(ddp.device()), **options)
    for _ in range(2):
        digits = pixels.to(ddp.device())
        F.mse_loss(model(digits), digits).backward()
    return sum(each.grad is not None for each in model.parameters())


eight = {"pixels": images[:8].flatten(1).float() / 255}
try:
    ddp.launch(client, two_steps, **eight, **on_two)
except ddp.RankFailed as failure:
    message = " ".join(failure.traceback.split())
    print(re.search(r"Expected to have finished[^.]*", message)[0], "...")
    named = re.search(r"(Parameter indices .*? for rank) \d+: ([ 0-9]*)", message)
    print(f"{named[1]} ...: {named[2].strip()}")

# %% [markdown]
# A gradient that never comes blocks its bucket. DDP notices when the model is called
# for the next step. The parameters are counted from 0: `classifier` has 2 and 3.
#
# Take the layer out, or use it in the loss. If only some steps use it, tell DDP to look
# for unused parameters in every step, which costs time:

# %% tags=["lesson"]
found = ddp.launch(
    client, two_steps, **eight, find_unused_parameters=True, **on_two
).result
print(f"find_unused_parameters=True: no error; {found} of 4 parameters have a gradient")

# %% [markdown]
# ## 12. The batch job, and recap
#
# `train` does not know who has started it. `make run TUTORIAL=mnist WORKERS=2` uses
# Dask, and `CLUSTER=torchrun` after it uses torchrun. `pets` and `ucmerced` run on
# clusters.
#
# **What does DDP add to my loop?** `DDP(model)` averages the gradients in `backward()`.
# Of a large model, it sends the first while the next are computed. You add the rest:
# the ranks meet, each has its own GPU and its own share of each batch, and one of them
# prints and saves. Then a step of all ranks is the step of one process with the whole
# batch.
#
# **Next:** `pets`, where Dask runs the ranks, and you watch, stop and resume them.
#
# **Read more:** PyTorch's pages on [DDP][1], [torch.distributed][2], [torchrun][3],
# [autocast][4] and [fully_shard][5]; Li et al., [PyTorch Distributed][6] (VLDB 2020).
#
# [1]: https://docs.pytorch.org/docs/stable/notes/ddp.html
# [2]: https://docs.pytorch.org/docs/stable/distributed.html
# [3]: https://docs.pytorch.org/docs/stable/elastic/run.html
# [4]: https://docs.pytorch.org/docs/stable/amp.html
# [5]: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
# [6]: https://arxiv.org/abs/2006.15704

# %% tags=["nbval-ignore-output"]
client.close()
