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
# at once. Each process is called a *rank*, and has a GPU of its own, or a core.
#
# **Afterwards you can**
# - average gradients over ranks, and *prove* what a step of two ranks does to the
#   weights;
# - say what a step costs, and read its timeline;
# - port a training script to `torchrun`, and to a batch job.
#
# **You need** Python, and from PyTorch a model, a loss, an optimizer. No GPU, no
# network. **Data:** 10,000 handwritten digits. **Time:** 80 to 90 minutes, of which 34
# are for two exercises.

# %% [markdown]
# ## 2. Set-up
#
# All settings are here. `make run TUTORIAL=mnist SET="epochs=2"` trains without the
# lesson.

# %% tags=["context"]
import os
import time
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

import ddp_common as ddp
from tutorials import helpers, kit
from tutorials.checks import mnist as checks
from tutorials.checks.common import judge

REPOSITORY = Path(ddp.__file__).parents[1]

# %% tags=["parameters", "context"]
settings = kit.settings(
    "mnist",
    data="shipped",  # or "full", or the path of a folder with IDX files
    epochs=8,
    batch_size=128,  # the global batch: digits in a step, over all ranks
    learning_rate=15.0,
    hidden=128,  # the width of the layers between
    bottleneck=8,  # the numbers that are left of a digit
    seed=0,
    presets={"full": {"data": "full", "epochs": 15}},  # first: make data TUTORIAL=mnist
)

# %% [markdown]
# `connect()` starts processes that wait for work. The library *Dask* manages them. The
# *backend* moves data between ranks: gloo for CPUs, NCCL for NVIDIA's GPUs.

# %% tags=["nbval-ignore-output", "context-my_average"]
client = ddp.connect()
dataset = kit.fetch("mnist", settings.data)
backend = "NCCL" if torch.cuda.is_available() else "gloo"
ranks = f"{client.ranks} ranks on {os.cpu_count()} cores"
print(f"torch {torch.__version__} · {backend} · {ranks}")
print(f"{dataset.title}: {dataset.origin}\nlicence: {dataset.licence}")

# %% [markdown]
# ## 3. The data
#
# Digits of 28 × 28 grey values. A tenth of them is *held out*: the model never trains
# on these.

# %%
images, labels, held_out_images, _ = helpers.read_digits(dataset.path)
print(f"{len(images):,} digits to learn from, {len(held_out_images):,} held out")

# %% tags=["lesson"]
helpers.show(
    helpers.pictures(images[:20], titles=labels[:20].tolist()),
    "Twenty handwritten digits in two rows, each with its label above.",
)

# %% [markdown]
# ## 4. One process first
#
# The model is an *autoencoder*. It squeezes the 784 pixels of a digit into 8 numbers,
# and draws the digit again from these. A digit is its own target: no label is needed.
# The loss is the mean squared error (MSE) per pixel.


# %% tags=["context"]
def as_pixels(images):
    """Bytes (n, 28, 28) to numbers (n, 784): 0 is paper, 1 is ink."""
    return images.flatten(1).float() / 255


def autoencoder(hidden=128, bottleneck=8):
    """From pixels (n, 784) to pixels (n, 784), through `bottleneck` numbers."""
    squeeze = [nn.Linear(784, hidden), nn.ReLU(), nn.Linear(hidden, bottleneck)]
    draw = [nn.Linear(bottleneck, hidden), nn.ReLU(), nn.Linear(hidden, 784)]
    return nn.Sequential(*squeeze, *draw)


# %% [markdown]
# Here is the plain loop, for one *epoch*: once over all digits. SGD subtracts the
# learning rate times the gradient from each weight. The gradient of a mean over 784
# pixels is small, so the rate is large.

# %% tags=["lesson"]
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.set_num_threads(1)  # one core, as a rank has later
torch.manual_seed(0)
loader = DataLoader(TensorDataset(as_pixels(images)), batch_size=128, shuffle=True)
model = autoencoder().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=15)
losses = []
for (digits,) in loader:
    digits = digits.to(device)
    loss = F.mse_loss(model(digits), digits)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"{len(losses)} steps; loss {losses[0]:.3f} at first, {losses[-1]:.3f} at last")

# %% [markdown]
# <details><summary><b>A small question:</b> two processes share this work. Which lines
# can stay?</summary>
#
# Model, loss and optimizer. The loader must change: each process needs other digits.
# And something must happen between <code>backward()</code> and <code>step()</code>, or
# two different models grow.</details>
#
# ## 5. Predict
#
# The digits of one step, of all ranks together, are the *global batch*: here 128. Two
# ranks hold the same model. Each calls `backward()` on 64 digits. DDP combines their
# gradients, and each rank makes one step of SGD. Beside it, one process makes a step
# with all 128, at the same learning rate. How far do the weights of a rank move,
# compared with those of that process?
#
# - `"half"` as far, because each rank saw half of the digits;
# - `"double"` as far, because there were two gradients;
# - the `"same"` way.
#
# **Write your prediction before you go on.** Section 7 scores it.

# %% tags=["lesson", "minutes-2"]
my_prediction = None  # "half", "double" or "same"

# %% [markdown]
# ## 6. Two ranks, by hand
#
# The first rank is rank 0. The number of ranks is the *world size*. All run the same
# program. No rank sees another's memory.

# %% tags=["lesson"]
helpers.show_file(
    "who-talks-to-whom.svg",
    "A client sends a function through a scheduler to two workers. Each worker starts "
    "a rank. The ranks exchange gradients. Reports come back.",
)

# %% [markdown]
# Your notebook is the *client*. It sends a function to Dask's *workers*, and each
# starts a rank. The ranks send gradients **to each other**, not through Dask.
#
# To exchange something, all ranks make the same *collective call*.
# `dist.all_reduce(tensor)` adds up a tensor over all ranks, and leaves the sum in place
# of the tensor on each.
#
# ### Exercise A · Average the gradients (6 minutes)
#
# After `backward()`, `parameter.grad` holds the gradient of this rank's digits. Your
# function comes next, on each rank. After it, each `parameter.grad` must hold the mean
# of all ranks' gradients. `dist.get_world_size()` is the number of ranks. Three lines
# are enough.
#
# <details><summary>Hint</summary>
# Go over <code>model.parameters()</code>. A mean is a sum, divided by its
# number.</details>


# %% tags=["exercise", "solution", "minutes-6"]
def my_average(model):
    """After this, each rank holds the mean of all ranks' gradients."""
    # your code
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)  # the sum over the ranks, in place
        parameter.grad /= dist.get_world_size()
    # end of your code


# %% tags=["exercise"]
judge(lambda answer: checks.averaging(client, answer), my_average)
average_gradients = checks.yours_or_ours(my_average)

# %% [markdown]
# ## 7. One step of two ranks
#
# Here is the loop of section 4 for ranks. New are `batch[rank::world_size]`, this
# rank's share of a batch, and `average_gradients(model)` after `backward()`.


# %% tags=["lesson"]
def train_by_hand(pixels, way):
    """Train on (n, 784) pixels; returns all ranks' weights, and the ms of a step."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # the same initial weights on all ranks
    model = autoencoder().to(ddp.device())
    if way == "DDP":
        model = DDP(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=15)
    times = [time.perf_counter()]
    for batch in pixels.split(128):
        digits = batch[rank::world_size].to(ddp.device())
        loss = F.mse_loss(model(digits), digits)
        optimizer.zero_grad()
        loss.backward()
        if way == "by hand":
            average_gradients(model)
        optimizer.step()
        times.append(time.perf_counter())
    weights = nn.utils.parameters_to_vector(model.parameters()).detach()
    everyones = [torch.empty_like(weights) for _ in range(world_size)]
    dist.all_gather(everyones, weights)  # each rank gets the weights of all
    return torch.stack(everyones).cpu(), 1000 * float(np.median(np.diff(times)))


# %% [markdown]
# `launch` starts the ranks, runs the function on each, and returns what rank 0
# returned. One step, by two ranks and by one:

# %% tags=["proof", "nbval-ignore-output"]
on_two = {"workers": 2, "directory": False}  # no folder is kept of a short run
on_one = {"workers": 1, "directory": False}
one_batch = {"pixels": as_pixels(images[:128]), "way": "by hand"}
two_ranks, _ = ddp.launch(client, train_by_hand, **one_batch, **on_two).result
one_process, _ = ddp.launch(client, train_by_hand, **one_batch, **on_one).result

torch.manual_seed(0)
before = nn.utils.parameters_to_vector(autoencoder().parameters()).detach()
moved, alone = two_ranks[0] - before, one_process[0] - before
far = moved.norm() / alone.norm()
print(f"two ranks moved {len(before):,} weights {far:.3f} times as far as one process")
most, off = alone.abs().max(), (moved - alone).abs().max()
print(f"a weight moves by up to {most:.3f}; two ranks are off by {off:.1g}")
assert most > 1e-4 and off < 1e-6
print(checks.prediction(my_prediction))

# %% [markdown]
# The mean of two means over 64 digits is the mean over 128. The gradient of a mean is
# the mean of the gradients. So the averaged gradient is the gradient of the whole
# batch. The rest, some 1e-8, is rounding: the sums are done in another order.
#
# Three things break this: shares of different sizes; *batch normalisation*, where the
# digits of a share influence each other; *dropout*, where each rank draws random
# numbers of its own.
#
# <details><summary><b>A small question:</b> why SGD here, and not Adam?</summary>
#
# Adam divides the gradient by its own recent size
# (<a href="https://arxiv.org/abs/1412.6980">Kingma and Ba</a>, section 2.1). A wrong
# factor would hardly show.</details>
#
# ## 8. DistributedDataParallel
#
# `model = DDP(model)` does the same for you. At first, DDP copies the weights of rank 0
# to all ranks. Then, in every `backward()`, it averages the gradients.
#
# Each rank holds a copy of the model, a *replica*. Are these equal after thirty steps?

# %% tags=["proof"]
thirty = as_pixels(images[: 30 * 128])
run = ddp.launch(client, train_by_hand, pixels=thirty, way="no averaging", **on_one)
weights, times = {}, {"one rank": run.result[1]}
for way in ["by hand", "DDP", "no averaging"]:
    run = ddp.launch(client, train_by_hand, pixels=thirty, way=way, **on_two)
    weights[way], times[f"two, {way}"] = run.result
    equal = torch.equal(*weights[way])
    assert equal == (way != "no averaging"), way
    print(f"{way:12}: two replicas, equal bit for bit after 30 steps: {equal}")

# %% [markdown]
# By hand and by DDP, do the weights differ? And **is it faster?** All have the same
# global batch. A rank has one core, and no other program should be busy.
#
# <details><summary><b>Predict:</b> one rank, two by hand, two by DDP, two without
# averaging. Which is the quickest?</summary>
#
# Two without averaging: each computes half of the batch, and sends nothing. The
# time that the other two need beyond it is the price of averaging.</details>

# %% tags=["proof", "nbval-ignore-output"]
off = (weights["DDP"] - weights["by hand"]).abs().max()
print(f"by hand and DDP: weights differ by {off:.1g} at most")
assert off < 1e-6
for way, milliseconds in times.items():
    print(f"{way:17} {milliseconds:5.1f} ms a step")

# %% [markdown]
# Averaging has a price. This model computes for a few milliseconds: two ranks gain
# little, or lose. **A step that computes for longer gains:** in `docs/measured.md`, 8
# steps of ResNet18, with a global batch of 64 images, take 3.21 s on one rank and 2.17
# s on two, 1.49 times as fast. `gpt` finds where the time goes.
#
# ### The timeline of a step
#
# Here are steps of two ranks, each the quickest of 40. The model is larger, and the
# network **slow on purpose**: a message waits 2 ms, and 3 ms more for each MiB.

# %% tags=["lesson"]
helpers.show_file(
    "a-step.png",
    "Four timelines of a step, a lane for each rank. One by one, and with one bucket, "
    "averaging begins when backward has ended. With DDP it begins while backward is "
    "running. When rank 1 is late, the first averaging on rank 0 lasts until it comes.",
)

# %% [markdown]
# `backward()` begins at the last layer: its gradients are ready first.
#
# 1. **One by one.** `average_gradients` sends a message for each parameter.
# 2. **One bucket.** All gradients go in one long tensor, a *bucket*, as one message.
# 3. **DDP.** A bucket is sent when it holds 25 MiB or more, the first at 1 MiB; here
#    `bucket_cap_mb=2` makes six. `backward()` goes on meanwhile: sending *overlaps*
#    computing. After the last gradient, `backward()` waits for the last bucket.
# 4. **A late rank.** Rank 0's first averaging is long: it waits. In every step, all
#    ranks wait for the slowest.
#
# <details><summary><b>A small question:</b> our autoencoder has 815,200 bytes of
# gradients. Which row does its DDP look like?</summary>
#
# They fit into one bucket, so its timeline looks like row 2. The bucket is complete
# only with the last gradient: nothing overlaps.</details>
#
# ## 9. With torchrun, and on GPUs
#
# Most DDP code is a script that `torchrun` starts in a terminal:
#
#     torchrun --standalone --nproc-per-node 2 my_script.py
#
# The script runs twice on one machine. Each process finds three numbers in variables:
# `RANK`, `WORLD_SIZE` and `LOCAL_RANK`, which counts *on its own machine*. The script
# does the rest. (Tried with one GPU, not with several.)
#
# | line of the script | why |
# |---|---|
# | `local_rank = int(os.environ["LOCAL_RANK"])` | which GPU of this machine is mine |
# | `torch.cuda.set_device(local_rank)` | `"cuda"` now means that GPU, not GPU 0 |
# | `device = torch.device("cuda", local_rank)` | without GPUs: `torch.device("cpu")` |
# | `dist.init_process_group("nccl")` | meet the others; without GPUs: `"gloo"` |
# | `model = model.to(device)` | first move, then wrap |
# | `model = DDP(model, device_ids=[local_rank])` | without GPUs: `device_ids=None` |
# | `sampler = DistributedSampler(data)` | `torch.utils.data` has it: own shares |
# | `DataLoader(data, 128 // size, sampler=sampler)` | `size = dist.get_world_size()` |
# | `sampler.set_epoch(epoch)` | before each epoch: a new order |
# | `if dist.get_rank() == 0:` | what one rank does for all: print, save |
# | `model.module.state_dict()` | DDP adds `module.` to all names |
# | `dist.destroy_process_group()` | the last line: leave the group |
#
# If samples do not divide evenly, `DistributedSampler` repeats some. If all ranks make
# a folder, `os.makedirs(folder, exist_ok=True)` fails on none.
#
# <details><summary><b>A small question:</b> two machines have four GPUs each. What are
# rank and local rank of the last process?</summary>
#
# 7 and 3. No machine has a GPU 7, so <code>LOCAL_RANK</code> chooses the GPU. But two
# processes have <code>LOCAL_RANK</code> 0, so <code>RANK</code> chooses who
# saves.</details>
#
# <details><summary><b>A small question:</b> what is <i>DataParallel</i>?</summary>
#
# An older wrapper: one process for all GPUs of a machine. PyTorch
# [recommends DDP][3].</details>
#
# [3]: https://docs.pytorch.org/docs/stable/generated/torch.nn.DataParallel.html

# %% [markdown]
# ### Exercise B · Port a script (28 minutes)
#
# `plain_loop.py` is the loop of section 4 as a script. In the end it computes the loss
# of held-out digits. Port it to two ranks.
#
# 1. Open a terminal (*File, New, Terminal*) and type:
#
#        cd "$JUPYTER_SERVER_ROOT/my-work"
#        cp ../scripts/plain_loop.py my_port.py
#        DIGITS=../../data/mnist/digits-images-idx3-ubyte.gz
#        torchrun --standalone --nproc-per-node 2 my_port.py $DIGITS
#
#    Each line comes twice: two processes train on all digits. (A warning about
#    `OMP_NUM_THREADS` is harmless.)
# 2. Change `my_port.py` in JupyterLab: section 9 has the lines. Do not use
#    `ddp_common`. Save it, start it again.
# 3. Let `my_port` below return `"my_port.py"`.
#
# What your script must do:
#
# - DDP wraps the model. Loss, learning rate, epochs and global batch (128) stay.
# - In each epoch, each digit goes to one rank, in a new order.
# - Rank 0 alone prints, and saves once: `model.pt` in the current folder, with the
#   plain model's names.
# - All ranks compute the held-out loss, then leave the group. (A rank that leaves right
#   after a `backward()` can abort: `terminate called without an active exception`.)
# - It uses GPUs if there are any (`torch.cuda.is_available()`).
#
# The check runs it as on **two machines** with one rank each. One process trains with
# the same batches: the weights must agree. Then it simulates GPUs, two on each of two
# machines, and runs your lines for them.
#
# <details><summary>Hint</summary>
# Seven places change: the imports; the device; the loader and its batch size; the
# model; the first line of each epoch; each <code>print</code>; the end.</details>


# %% tags=["exercise", "solution", "minutes-28"]
def my_port():
    """The path of your script, a str or a Path."""
    # your code
    import shutil
    import tempfile

    solution = REPOSITORY / "tutorials" / "scripts" / "solutions" / "plain_loop.py"
    return shutil.copy(solution, tempfile.mkdtemp())
    # end of your code


# %% tags=["exercise"]
judge(checks.port, my_port, timeout=150)

# %% [markdown]
# ## 10. The training itself, on Dask
#
# `make run` trains with this function. It is the plain loop with DDP, and with helpers
# that `pets` explains. `sampler.weight` is 1 if a batch's shares have one size, and
# corrects the average if not (section 7).


# %%
def train(images, epochs, batch_size, learning_rate, hidden, bottleneck, seed):
    """Train an autoencoder on this rank's share of each batch; returns its weights."""
    device = ddp.device()
    torch.manual_seed(seed)  # the same initial weights on all ranks
    data = TensorDataset(as_pixels(images))
    # cuts each global batch into the ranks' shares
    sampler = ddp.ElasticSampler(len(data), batch_size, seed=seed)
    loader = ddp.DataLoader(data, batch_sampler=sampler)
    model = DDP(autoencoder(hidden, bottleneck).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    checkpoint = ddp.Checkpoint(  # with it, a stopped run can go on
        model=model, optimizer=optimizer, sampler=sampler, every_steps=500
    )
    checkpoint.restore()  # nothing to restore on a first attempt
    for epoch in sampler.epochs(epochs):  # range(epochs), each in a new order
        for (digits,) in loader:
            digits = digits.to(device)
            loss = F.mse_loss(model(digits), digits) * sampler.weight
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            checkpoint.step()  # this batch is trained: a checkpoint may be saved
            ddp.report(loss=loss)  # to your notebook; no rank waits for it
    checkpoint.save()
    return model.module.state_dict()


# %%
names = "epochs batch_size learning_rate hidden bottleneck seed"
hyperparameters = {name: getattr(settings, name) for name in names.split()}
run = ddp.launch(
    client, train, **kit.launch_options(), images=images, **hyperparameters
)
print(f"{run.world_size} ranks, {settings.epochs} epochs, batch {settings.batch_size}")

figure = helpers.curve(run.metrics, label="loss (MSE per pixel)")
figure.savefig(run.directory / "loss.png", bbox_inches="tight")
plt.close(figure)

# %% tags=["lesson"]
helpers.show(figure, "The ranks' mean loss falls steeply, then slowly, step by step.")

# %% [markdown]
# Is it any good? It should beat two rivals. The *mean digit* is one picture for all.
# *PCA* (principal component analysis) is the linear method with 8 numbers that has the
# smallest error on the training digits.

# %% tags=["nbval-ignore-output"]
pixels, held_out = as_pixels(images), as_pixels(held_out_images)
model = autoencoder(settings.hidden, settings.bottleneck)
model.load_state_dict(run.result)
with torch.no_grad():
    reconstructed = model(held_out)
rows = {
    "held out": held_out,
    "mean digit": pixels.mean(0).expand_as(held_out),
    "PCA": helpers.pca(pixels, held_out, settings.bottleneck),
    "autoencoder": reconstructed,
}
for name, drawn in list(rows.items())[1:]:
    print(f"{name:12} {F.mse_loss(drawn, held_out):.4f} MSE per held-out pixel")

figure = helpers.lines_of_digits(rows)
figure.savefig(run.directory / "reconstructions.png", bbox_inches="tight")
plt.close(figure)

# %% tags=["lesson"]
helpers.show(
    figure,
    "Four rows of digits: held out, the mean digit, PCA, autoencoder. The mean is "
    "the same grey blur for all. The last two rows draw each digit again.",
)

# %% [markdown]
# <details><summary><b>A small question:</b> rank 0 prints <code>loss.item()</code>.
# Whose loss is that?</summary>
#
# The loss of the 64 digits that rank 0 has. DDP averages gradients, not losses. The
# curve shows the mean of both ranks' reports.</details>

# %% [markdown]
# ## 11. Break it
#
# Somebody adds a layer and forgets to call it. A plain model trains. DDP raises an
# error. Which parameters does it name?


# %% tags=["lesson"]
class WithUnusedLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.reconstruct = nn.Linear(784, 784)
        self.classifier = nn.Linear(784, 10)

    def forward(self, pixels):
        return self.reconstruct(pixels)


def two_steps(pixels):
    model = DDP(WithUnusedLayer().to(ddp.device()))
    for _ in range(2):
        digits = pixels.to(ddp.device())
        F.mse_loss(model(digits), digits).backward()


try:
    ddp.launch(client, two_steps, pixels=as_pixels(images[:8]), **on_two)
except ddp.RankFailed as failure:
    print(helpers.unused_parameters(failure))

# %% [markdown]
# A bucket waits for a gradient that never comes. DDP notices in the next step. It
# counts parameters from 0: `classifier` has 2 and 3. Take the layer out, or use it. If
# only some steps need it, `DDP(model, find_unused_parameters=True)` trains, and each
# step costs more.
#
# ## 12. The batch job
#
# On a cluster, a *batch job* waits in a queue, then runs without you. *Slurm* keeps the
# queue, and reads `#SBATCH` lines; most sites want `--account`, too. This job runs your
# port on two machines, *nodes*, with four GPUs each. Save it as
# `my-work/my_port.sbatch`:
#
#     #!/bin/bash
#     #SBATCH --nodes=2
#     #SBATCH --ntasks-per-node=1
#     #SBATCH --gres=gpu:4
#     #SBATCH --cpus-per-task=16
#     #SBATCH --time=00:15:00
#     source ../../.venv/bin/activate
#     export OMP_NUM_THREADS=4 NCCL_DEBUG=INFO
#     DIGITS=../../data/mnist/digits-images-idx3-ubyte.gz
#     first_host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
#     port=$((20000 + SLURM_JOB_ID % 10000))
#     srun --cpus-per-task=16 --kill-on-bad-exit=1 \
#         torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d \
#         --rdzv-endpoint "$first_host:$port" --rdzv-id $SLURM_JOB_ID \
#         my_port.py $DIGITS
#
# `srun` starts torchrun once on each node, and torchrun starts four ranks there.
# [`scontrol`][6] prints the nodes of the job, and the ranks meet on the first.
# With `NCCL_DEBUG`, NCCL prints its network. `sbatch my_port.sbatch` in
# `my-work` submits it. (Tried on four hosts without GPUs: gloo needed
# `GLOO_SOCKET_IFNAME`.)
#
# **To test it, take an interactive job:** two nodes for 15 minutes. Type there the
# lines from `source` on, with `--nproc-per-node 1`. `exit` ends the job.
#
#     salloc --nodes=2 --ntasks-per-node=1 --gres=gpu:1 --cpus-per-task=16 --time=15
#
# <details><summary><b>A small question:</b> how many ranks has the batch job, and how
# many digits has each in a step? What changes for one node?</summary>
#
# 8 ranks, 16 digits each: the global batch stays 128. `--nodes=1` and `--nnodes 1`.
# (`srun` repeats `--cpus-per-task`: [since Slurm 22.05][7] it does not take over the
# job's.)</details>
#
# <details><summary><b>A small question:</b> can <code>srun</code> start ranks without
# torchrun?</summary>
#
# Yes. `clusters/batch/mnist.sbatch` does so, with section 10's training:
#
# | in the job | for the ranks |
# |---|---|
# | `--ntasks=2` | the world size |
# | `--cpus-per-task=1`, `OMP_NUM_THREADS` | the cores of each rank |
# | `--time`, `--signal` | 60 to 120 s before the end, a signal asks the ranks to save |
# | `CHECKPOINT` | the run's folder: submit the job again, and the ranks go on |
# | `srun` | starts the program once for each rank, as torchrun does |
# | `--kill-on-bad-exit=1` | if one rank fails, the others end too |
#
# The signal is *SIGTERM*, which asks a process to end and leaves it time to save.
# `srun` calls the numbers `SLURM_PROCID` (the rank), `SLURM_LOCALID` and
# `SLURM_STEP_NUM_TASKS`; `ddp.connect` reads them. `ucmerced` has more of
# jobs.</details>
#
# [6]: https://slurm.schedmd.com/scontrol.html
# [7]: https://slurm.schedmd.com/sbatch.html
#
# ## 13. Recap
#
# `DDP(model)` averages the gradients in `backward()`. You add the rest: the ranks meet,
# each has its own GPU and its own share of each batch, and one prints and saves. Then,
# up to rounding, all ranks together make the step of one process with the whole batch,
# except for the three things of section 7.
#
# **Next:** `pets`, where Dask runs the ranks.
# **Read more:** PyTorch on [DDP][1] and [torchrun][2]; Li et al.,
# [PyTorch Distributed][4].
#
# [1]: https://docs.pytorch.org/docs/stable/notes/ddp.html
# [2]: https://docs.pytorch.org/docs/stable/elastic/run.html
# [4]: https://arxiv.org/abs/2006.15704

# %% tags=["nbval-ignore-output"]
client.close()
