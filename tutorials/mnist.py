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
# **Question.** What does PyTorch's `DistributedDataParallel` (DDP) do, and what is left
# for you to do?
#
# **Afterwards you can**
# - turn a training loop of one process into a script that `torchrun` starts on two;
# - *prove* that a step of two ranks is the step of one process with the whole batch;
# - read the timeline of a step, and say why two ranks are not always faster than one;
# - weigh the losses where a batch does not divide evenly among the ranks;
# - say which rank waits for whom, from a timeline and from an error message.
#
# **You need** Python and the first idea of PyTorch: a model, a loss, an optimizer.
# No GPU, no network. Nothing is downloaded. **Data:** 10,000 handwritten digits, which
# come with the repository. **Computing:** 1 to 2½ minutes on two cores.
#
# **Time: 75 minutes in class.** Map and words 3, set-up 2, data 3, one rank 6,
# predict 2, what changes 22, on Dask 5, proofs 6, exercises 20, break it 4, recap 2.
# Of the exercises, number 2 is for the class and the others for home. The appendix is
# for later.
#
# ### The map: who talks to whom
#
# Run the cell below (Shift + Enter). One box is one process. On your machine, client
# and scheduler share one.

# %% tags=["lesson"]
from pathlib import Path

from IPython.display import SVG, display

import ddp_common as ddp

REPOSITORY = Path(ddp.__file__).parents[1]
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
# Your notebook is the *client*. It sends a function to the workers. Each worker starts
# one rank, and the ranks train. They send their gradients **to each other**, not
# through Dask. Their reports come back to you.
#
# ### A dozen words
#
# | word | meaning |
# |---|---|
# | rank | a process that trains; also its number, from 0 |
# | world size | the number of ranks |
# | collective | a call that all ranks make together, such as `all_reduce` |
# | barrier | a collective that only waits until all ranks have come |
# | process group | the ranks that make collective calls together |
# | rendezvous | how the ranks find each other at the start: one address, one port |
# | backend | the library that carries the data between the ranks |
# | gloo | the backend for CPUs |
# | NCCL | the backend for NVIDIA GPUs |
# | client | Dask's name for your program: it hands out work |
# | scheduler | the part of Dask that knows all workers and passes work on to them |
# | worker | Dask's process that does work; here it starts one rank |
# | profile | a YAML file that says where workers run: here, or on a cluster |
# | dashboard | a web page on which Dask's scheduler shows what it does |

# %% [markdown] tags=["instructor"]
# **Instructor · 3 minutes.** Show the map. Ask: what do two processes have to tell each
# other so that they train *one* model? Collect answers (weights? losses? gradients?
# digits?) and come back to them in section 6. Do not read the glossary aloud.
#
# | section | 1 | 2 | 3 | 4 | 5 | 6 | 7 | 8 | 9 | 10 | 11 | sum |
# |---|---|---|---|---|---|---|---|---|---|---|---|---|
# | minutes | 3 | 2 | 3 | 6 | 2 | 22 | 5 | 6 | 20 | 4 | 2 | 75 |
#
# **If you are late:** skip "One bucket" in section 6 and the third proof. Then cut
# section 10. Never cut the port of section 9: it is what students take home.
# Exercises 1, 3 and 4 are homework, or for those who are done with the port.

# %% [markdown]
# ## 2. Set-up and preflight
#
# All settings stand here, once. In a terminal, in the folder of the repository,
# `make run TUTORIAL=mnist SET="epochs=2"` trains without the lesson and changes one.
# `PRESET=full` trains on all 60,000 digits, after `make data TUTORIAL=mnist`.

# %%
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
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
from ddp_common.teaching import ports

SCRIPTS = Path(ddp.__file__).parents[1] / "tutorials" / "scripts"

# %% tags=["parameters"]
settings = ddp.settings(
    "mnist",
    data="shipped",  # or "full", or the path of a folder with IDX files
    epochs=5,
    batch_size=64,  # of all ranks together
    learning_rate=2e-3,
    channels=24,  # of the first convolution; the second has twice as many
    bottleneck=32,  # the numbers that are left of a digit
    seed=0,
    presets={"full": {"data": "full", "epochs": 15}},
)

# %% [markdown]
# `connect()` starts Dask here: a scheduler in this process, and two worker processes.
# A *profile* says where workers run; the default is `clusters/local.yaml`. The
# address of the dashboard is `client.dashboard_link`: open it in a new tab.

# %% tags=["nbval-ignore-output"]
client = ddp.connect()
dataset = ddp.fetch("mnist", settings.data)
backend = "NCCL" if torch.cuda.is_available() else "gloo"
print(
    f"torch {torch.__version__} · {backend} · {client.ranks} ranks on "
    f"{os.cpu_count()} cores · {dataset.title}: {dataset.origin} · {dataset.licence}"
)

# %% tags=["lesson", "nbval-ignore-output"]
print(f"dashboard: {client.dashboard_link}")

# %% [markdown] tags=["instructor"]
# **Instructor · 2 minutes.** Everybody runs both cells now; the first start takes some
# seconds. Who has an error calls you; the others read on. `make doctor` looks further.

# %% [markdown]
# ## 3. The data
#
# Digits that people wrote around 1990: 28 × 28 grey values, 0 for paper, 255 for ink.
# The files have the format of the originals, *IDX*: a header that states the shape,
# then the bytes. A tenth of the digits is held out: the model never sees them.


# %%
def read_part(folder, part):
    """Images (n, 28, 28) and labels (n,) of one part, uint8. Raises ddp.Error."""
    images = read_idx(Path(folder) / f"{part}-images-idx3-ubyte.gz")
    labels = read_idx(Path(folder) / f"{part}-labels-idx1-ubyte.gz")
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
def show(figure, alt):
    """Show a picture, with a sentence for those who cannot see it."""
    display(figure, metadata={"image/png": {"alt": alt}})
    plt.close(figure)


figure, axes = plt.subplots(figsize=(8, 1.3))
axes.imshow(images[:10].permute(1, 0, 2).reshape(28, 280), cmap="gray_r")
axes.set(xticks=range(14, 280, 28), xticklabels=labels[:10].tolist(), yticks=[])
axes.set_title("Ten digits and their labels")
show(figure, "Ten handwritten digits in a row, each with its label below.")

# %% [markdown] tags=["instructor"]
# **Instructor · 3 minutes.** Let somebody say what one sample is (784 bytes), and why
# the label is not needed here. Then go on: the data are not the lesson.

# %% [markdown]
# ## 4. One rank first
#
# The model is an *autoencoder*. It squeezes the 784 values of a digit into 32 numbers
# and draws the digit again from these. The loss is the mean squared error (MSE) per
# pixel, with ink as 1. The layers are small convolutions: they have few weights and
# compute a lot with them. Section 7 shows why that matters here.
#
# The data set hands out a whole batch at once (PyTorch calls `__getitems__` with a list
# of indices). Only this batch is turned into floats.


# %%
class Digits(Dataset):
    def __init__(self, images):
        self.pixels = images.flatten(1)  # (n, 784), uint8

    def __len__(self):
        return len(self.pixels)

    def __getitems__(self, indices):
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
# The plain loop, in this process, once over the digits. Nothing here is distributed.

# %% tags=["lesson"]
torch.manual_seed(settings.seed)
torch.set_num_threads(1)  # one core, as a rank has later
data = Digits(images[:9_000])
model = autoencoder()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
losses = []
for batch in torch.randperm(len(data)).split(64):
    digits = data.__getitems__(batch)
    loss = F.mse_loss(model(digits), digits)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"{len(losses)} steps; the loss falls below 0.04: {losses[-1] < 0.04}")

# %% tags=["lesson"]
figure, axes = plt.subplots(figsize=(6, 2.6))
axes.plot(losses)
axes.set(xlabel="step", ylabel="loss (MSE per pixel)", ylim=0)
axes.set_title("One process, the plain loop")
show(figure, "The loss of one process falls steeply, then slowly, over 141 steps.")

# %% [markdown] tags=["instructor"]
# **Instructor · 6 minutes.** Read the loop aloud, line by line: it comes back three
# times. Ask: which of its lines would two processes have to agree on?

# %% [markdown]
# ## 5. Predict
#
# Two processes hold the same model. A batch has 128 digits. Each process takes 64 of
# them and calls `backward()`. Then the two *average* their gradients, parameter by
# parameter, and each makes one step. Compare with one process that takes all 128. The
# weights have moved
#
# - `"half"` as far, because each process saw only half of the digits;
# - `"double"` as far, because there were two gradients;
# - `"same"`: as far, up to rounding.
#
# **Write your prediction before you go on.** Section 8 scores it.

# %% tags=["lesson"]
my_prediction = None  # "half", "double" or "same"

# %% [markdown] tags=["instructor"]
# **Instructor · 2 minutes.** A show of hands. "double" is the most frequent answer: it
# comes from those who think of a sum. Do not resolve it; section 8 does.

# %% [markdown]
# ## 6. What changes
#
# ### Two ranks by hand
#
# Two ranks run the same program. A rank sees nothing of what another computes. They
# exchange it by *collective calls*, which all ranks must make, in the same order. We
# need one of them: `all_reduce` adds up a tensor over all ranks and leaves the sum on
# each.


# %% tags=["lesson"]
def one_by_one(model):
    """Average the gradients: one collective call for each parameter."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)  # the sum over the ranks, in place
        parameter.grad /= dist.get_world_size()


# %% [markdown]
# The loop is that of section 4. Two things are new: `mine`, the digits that this rank
# takes of each batch, and `average(model)`.


# %% tags=["lesson"]
def train_by_hand(pixels, average, wrap=None):
    """Train on (n, 784) pixels in batches of 128; returns the weights of all ranks."""
    torch.manual_seed(0)  # the same initial weights on all ranks
    model = autoencoder().to(ddp.device())
    if wrap is not None:
        model = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    for batch in pixels.split(128):
        digits = batch[mine].to(ddp.device()).float() / 255
        loss = F.mse_loss(model(digits), digits)
        optimizer.zero_grad()
        loss.backward()
        average(model)
        optimizer.step()
    weights = nn.utils.parameters_to_vector(model.parameters()).detach()
    everyones = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, weights)  # each rank gets the weights of all
    return torch.stack(everyones).cpu()


# %% [markdown]
# `launch` starts a rank on each Dask worker and runs the function there. Section 7 says
# more. Thirty steps on two ranks:


# %% tags=["lesson"]
def on_two_ranks(function, **arguments):
    """What rank 0 of two returns."""
    return ddp.launch(client, function, **arguments, workers=2).result


thirty_batches = images[: 30 * 128].flatten(1)
weights = {}
weights["by hand"] = on_two_ranks(
    train_by_hand, pixels=thirty_batches, average=one_by_one
)
ranks, count = weights["by hand"].shape
same = torch.equal(*weights["by hand"])
print(f"{count:,} weights on each of {ranks} ranks, equal after 30 steps: {same}")

# %% [markdown]
# ### One bucket
#
# Every collective call takes time before any data move, because the ranks have to
# meet. So use one call for all gradients: lay them into one long tensor, a *bucket*,
# average it, and put the pieces back.


# %% tags=["lesson"]
def in_one_bucket(model):
    """Average the gradients: one collective call for all of them."""
    gradients = [parameter.grad for parameter in model.parameters()]
    bucket = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(bucket)
    bucket /= dist.get_world_size()
    sizes = [gradient.numel() for gradient in gradients]
    for gradient, piece in zip(gradients, bucket.split(sizes)):
        gradient.copy_(piece.view_as(gradient))


weights["one bucket"] = on_two_ranks(
    train_by_hand, pixels=thirty_batches, average=in_one_bucket
)
off = (weights["one bucket"] - weights["by hand"]).abs().max()
print("one bucket, the same weights to 1e-6:", bool(off < 1e-6))

# %% [markdown]
# ### DistributedDataParallel
#
# `DDP(model)` does this for you. When it is made, it copies the weights of rank 0 to
# all ranks. In every `backward()` it averages the gradients, in buckets. There is no
# call of `average` any more.


# %% tags=["lesson"]
def nothing(model):
    """DDP averages in backward()."""


weights["DDP"] = on_two_ranks(
    train_by_hand, pixels=thirty_batches, average=nothing, wrap=DDP
)
off = (weights["DDP"] - weights["by hand"]).abs().max()
print("DDP, the same weights to 1e-6:", bool(off < 1e-6))

# %% [markdown]
# ### The timeline of one step
#
# `backward()` goes from the last layer to the first. The gradients of the last layer
# are ready early, so DDP need not wait for the others. It sends the buckets in a fixed
# order, each as soon as it is full, while `backward()` goes on. To see this, we record
# one step on each rank.
#
# **The network is made slow on purpose**: each message waits 5 ms, and 3 ms more for
# each MiB. Waiting needs no processor, so computing and sending can overlap on a CPU
# too. `later` is a *communication hook*: DDP calls it with each full bucket, and gets a
# future, a promise of the averaged bucket.


# %% tags=["lesson"]
class SlowNetwork:
    """Averages tensors over the ranks, one after the other, and notes when."""

    def __init__(self):
        self.thread = ThreadPoolExecutor(1)
        self.marks = []  # (what, begin, end)

    def send(self, tensor):
        began = time.perf_counter()
        dist.all_reduce(tensor)
        tensor /= dist.get_world_size()
        time.sleep(0.005 + 0.003 * tensor.nbytes / 2**20)
        self.marks.append(("averaging", began, time.perf_counter()))
        return tensor

    def later(self, _, bucket):
        future = torch.futures.Future()
        self.thread.submit(lambda: future.set_result(self.send(bucket.buffer())))
        return future

    def note_ready(self, parameter):
        now = time.perf_counter()
        self.marks.append(("gradient ready", now, now))


# %% tags=["lesson"]
def record_step(way, late=0.0):
    """The marks of a step, of each rank; rank 1 begins it `late` seconds late."""
    network = SlowNetwork()
    model = nn.Sequential(*[nn.Linear(784, 784) for _ in range(6)])
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(network.note_ready)
    if way == "DDP":
        model = DDP(model, bucket_cap_mb=2)
        model.register_comm_hook(None, network.later)
    steps = []
    for _ in range(7):
        model.zero_grad()
        network.marks = []
        dist.barrier()
        times = [time.perf_counter()]
        if late and dist.get_rank() == 1:
            time.sleep(late)
            times.append(time.perf_counter())
        loss = model(torch.rand(256, 784)).square().mean()
        times.append(time.perf_counter())
        loss.backward()
        times.append(time.perf_counter())
        finish(way, network, parameters)
        names = ["late", "forward", "backward"][-len(times) + 1 :]
        steps.append([*zip(names, times, times[1:]), *network.marks])
    return quickest(gathered(steps[2:]))


# %% [markdown]
# The first two steps warm up: DDP lays out its buckets anew after the first. Of the
# other five we keep the quickest, which other programs have disturbed least. `finish`
# is what is left to do after `backward()` if you average by hand.


# %% tags=["lesson"]
def finish(way, network, parameters):
    """Average by hand what DDP would have averaged in backward()."""
    if way == "one by one":
        for parameter in parameters:
            network.send(parameter.grad)
    if way == "one bucket":
        network.send(torch.cat([parameter.grad.flatten() for parameter in parameters]))


def gathered(mine):
    """What each rank gives, as a list, on every rank."""
    everyones = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, mine)
    return everyones


def seconds_of(ranks):
    """From the first begin to the last end of one step, over all ranks."""
    marks = [mark for marks_of_rank in ranks for mark in marks_of_rank]
    return max(end for *_, end in marks) - min(begin for _, begin, _ in marks)


def quickest(everyones):
    """Of the steps of all ranks the one that took least time: its marks, by rank."""
    return min(zip(*everyones), key=seconds_of)


panels = {
    "gradients one by one": on_two_ranks(record_step, way="one by one"),
    "one bucket": on_two_ranks(record_step, way="one bucket"),
    "DDP, small buckets": on_two_ranks(record_step, way="DDP"),
    "DDP, rank 1 is late": on_two_ranks(record_step, way="DDP", late=0.05),
}

# %% tags=["lesson"]
COLOURS = {
    "late": "lightgrey",
    "forward": "tab:blue",
    "backward": "tab:orange",
    "averaging": "tab:green",
}


def draw_step(axes, title, ranks):
    """One lane of computing and one of averaging for each rank; returns ms."""
    start = min(begin for marks in ranks for _, begin, _ in marks)
    for rank, marks in enumerate(ranks):
        for what, begin, end in marks:
            left, width = 1_000 * (begin - start), 1_000 * (end - begin)
            lane = rank + (0.2 if what == "averaging" else -0.2)
            if what == "gradient ready":
                axes.plot(left, lane, "|", color="black", markersize=9)
            else:
                axes.barh(lane, width, 0.36, left, color=COLOURS[what], edgecolor="w")
    axes.set(yticks=[0, 1], yticklabels=["rank 0", "rank 1"], ylim=(1.5, -0.5))
    axes.set_title(title, loc="left", fontsize=10)
    return 1_000 * seconds_of(ranks)


# %% tags=["lesson", "nbval-ignore-output"]
figure, rows = plt.subplots(4, sharex=True, figsize=(8, 6), layout="constrained")
for axes, (title, ranks) in zip(rows, panels.items()):
    print(f"{title}: {draw_step(axes, title, ranks):.0f} ms")
bars = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS.values()]
ticks = plt.Line2D([], [], color="black", marker="|", linestyle="none", markersize=9)
labels_of_bars = [*COLOURS, "gradient ready"]
figure.legend([*bars, ticks], labels_of_bars, ncols=5, loc="outside upper center")
rows[-1].set_xlabel("time since the step began (ms)")
show(
    figure,
    "Four timelines of one step, a lane for each rank. By hand, averaging begins when "
    "backward has ended. With DDP it begins while backward is running. When rank 1 is "
    "late, the first averaging on rank 0 lasts until rank 1 has come.",
)

# %% [markdown]
# Read the picture from top to bottom.
#
# 1. **One by one**: twelve messages after `backward()`, and each waits anew.
# 2. **One bucket**: one message, but it can leave only when all gradients are ready.
# 3. **DDP**: the first message leaves while `backward()` is running. This is *overlap*.
#    On CPUs, `backward()` then ends when the last bucket is back. With NCCL, Python
#    goes on, and the GPU waits.
# 4. **A late rank**: rank 0 has its gradients and waits. Its first green bar is long,
#    though the network is no slower. In every step all ranks wait for the slowest.
#
# A weight and its bias are ready at the same moment, so their ticks coincide. Orange
# with DDP holds waiting, too. On a busy machine the printed totals may change places:
# look at *when* messages leave. On a real network the times are others, but the order
# of events is this one.
# (See [the notes on DDP](https://docs.pytorch.org/docs/stable/notes/ddp.html), and
# `torch/nn/parallel/distributed.py`.)

# %% [markdown]
# ### torchrun
#
# Most DDP code that you will find is a plain script, and `torchrun` starts it:
#
#     torchrun --standalone --nproc-per-node 2 my_script.py
#
# `torchrun` starts two processes of the same script (`--standalone`: on one machine, at
# a free port). It gives each of them a few environment variables: `RANK`, `LOCAL_RANK`
# (the rank's number on its own machine), `WORLD_SIZE`, and the address and port of the
# rendezvous, `MASTER_ADDR` and `MASTER_PORT`. The script does the rest.
#
# | line of the script | what it does |
# |---|---|
# | `dist.init_process_group("gloo")` | meet the other ranks; `"nccl"` for GPUs |
# | `local_rank = int(os.environ["LOCAL_RANK"])` | which GPU of the machine is mine |
# | `torch.device("cuda", local_rank)` | that GPU; without GPUs `torch.device("cpu")` |
# | `DDP(model, device_ids=[local_rank])` | for a model on that GPU |
# | `DDP(model)` | for a model on the CPU: there `device_ids` must be `None` |
# | `DistributedSampler(data)` | deals the samples: each rank gets its own share |
# | `DataLoader(…, sampler=sampler)` | the sampler shuffles; `batch_size` is per rank |
# | `sampler.set_epoch(epoch)` | before each epoch: otherwise all epochs deal the same |
# | `if dist.get_rank() == 0:` | what only one rank may do, such as saving a file |
# | `model.module.state_dict()` | of the model inside, which DDP wraps and renames |
# | `dist.destroy_process_group()` | the last line: leave the group |
#
# `../scripts/hello_ranks.py` has some of these lines and trains nothing. Here is what
# it prints. (In a terminal, `torchrun` also warns that it sets `OMP_NUM_THREADS` to 1.
# That is no fault of yours.)

# %% tags=["lesson"]
hello = ddp.run_script(SCRIPTS / "hello_ranks.py", ranks=2)
print("\n".join(sorted(hello.output.splitlines())))

# %% [markdown]
# Two epochs, two deals, and in each epoch every sample goes to one rank. If the samples
# cannot be shared out evenly, `DistributedSampler` *repeats* some; with
# `drop_last=True` it leaves some out instead. (See the docs of
# [torchrun](https://docs.pytorch.org/docs/stable/elastic/run.html), of
# [DistributedSampler](https://docs.pytorch.org/docs/stable/data.html), and of
# [torch.distributed](https://docs.pytorch.org/docs/stable/distributed.html).)

# %% [markdown] tags=["instructor"]
# **Instructor · 22 minutes.** By hand 8, DDP 2, the timeline 7, torchrun 5. Stop at the
# timeline: let the class say what is new in each panel before they read the list. Ask
# for panel 4: who is slow, who waits, and what would a log of rank 0 show? Expected
# wrong answer: "the network is slow". `device_ids` is for those with GPUs.

# %% [markdown]
# ## 7. On Dask
#
# Dask starts the ranks too, from a notebook, on this machine or on a cluster, and many
# runs use the same workers. You write a function instead of a script. `launch` starts
# one rank on each worker, calls `init_process_group` there, and calls your function.
#
# | line | instead of |
# |---|---|
# | `sampler = ddp.ElasticSampler(...)` | `DistributedSampler`: deals a *global* batch |
# | `sampler.epochs(epochs)` | `set_epoch` |
# | `* sampler.weight` | nothing: makes up for a ragged last batch, section 8 |
# | `ddp.Checkpoint(...)`, `restore`, `save` | `torch.save` on rank 0 |
# | `ddp.report(loss=loss)` | `print`: sends the loss to you; no rank waits for it |


# %%
def train(images, epochs, batch_size, learning_rate, channels, bottleneck, seed):
    """Train an autoencoder on this rank's share of each batch; returns its weights."""
    device = ddp.device()
    torch.manual_seed(seed)  # the same initial weights on all ranks
    data = Digits(images)
    sampler = ddp.ElasticSampler(len(data), batch_size, seed=seed)
    loader = DataLoader(data, batch_sampler=sampler, collate_fn=lambda batch: batch)
    model = DDP(autoencoder(channels, bottleneck).to(device))
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    checkpoint = ddp.Checkpoint(
        model=model, optimizer=optimizer, sampler=sampler, every_steps=500
    )
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


# %%
NAMES = ["epochs", "batch_size", "learning_rate", "channels", "bottleneck", "seed"]
hyperparameters = {name: getattr(settings, name) for name in NAMES}
run = ddp.launch(client, train, images=images, **hyperparameters)
print(f"{run.world_size} ranks, {settings.epochs} epochs, batch {settings.batch_size}")

# %% [markdown]
# Every report of every rank is a row of `run.metrics`. The ranks see different digits,
# so their losses differ a little. The picture shows the mean, and below it how far each
# rank is from the mean.


# %%
def plot_losses(metrics):
    """The mean loss, and how far each rank is from it, every 20 steps."""
    last = metrics["step"].max()
    width = 20 if last >= 100 else 1  # steps for a point
    whole = metrics[metrics["step"] < (last + 1) // width * width]
    points = whole["step"] // width * width
    by_rank = whole.groupby([points, "rank"])["loss"].mean().unstack()
    mean = by_rank.mean(axis=1)
    figure, (above, below) = plt.subplots(
        2, sharex=True, figsize=(7, 4.2), height_ratios=(2, 1), layout="constrained"
    )
    above.plot(mean, color="black")
    above.set(ylabel="mean loss\n(MSE per pixel)", yscale="log")
    above.set_title(f"Training on {by_rank.shape[1]} ranks")
    for rank, losses in by_rank.items():
        below.plot(losses - mean, linewidth=1, label=f"rank {rank}")
    below.set(xlabel="step", ylabel="loss - mean")
    below.legend(ncols=2, fontsize=8)
    return figure


figure = plot_losses(run.metrics)
run.save_figure(figure, "loss.png")
plt.close(figure)

# %% tags=["lesson"]
show(
    figure,
    "Above: the mean loss of the ranks falls. Below: each rank's loss minus the mean "
    "scatters around zero, a small part of the loss itself.",
)

# %% [markdown]
# ### Why is it not twice as fast?
#
# Each of two ranks has half the forward and backward to compute. The optimizer's step
# is not halved, and DDP adds something: the ranks meet, and Python has more to do. What
# DDP adds hardly depends on the batch. So the smaller the computing, the smaller the
# gain. Measure it for two models. The first is the one above. The second has plain
# layers: about as many weights, and much less to compute.


# %% tags=["lesson"]
def small_model():
    return nn.Sequential(nn.Linear(784, 112), nn.ReLU(), nn.Linear(112, 784))


def step_times(make_model, batch_size, steps=20):
    """Seconds of each step on rank 0, without the first five, which warm up."""
    model = DDP(make_model().to(ddp.device()))
    optimizer = torch.optim.Adam(model.parameters())
    digits = torch.rand(batch_size // dist.get_world_size(), 784).to(ddp.device())
    seconds = []
    for _ in range(steps):
        began = time.perf_counter()
        loss = F.mse_loss(model(digits), digits)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seconds.append(time.perf_counter() - began)
    return seconds[5:]


# %% tags=["lesson", "nbval-ignore-output"]
def compare(name, make_model, batch_size, rounds=2):
    """One row of the table: 1 and 2 ranks in turn, the median of all steps, in ms."""
    times = {1: [], 2: []}
    for ranks in [1, 2] * rounds:
        given = {"make_model": make_model, "batch_size": batch_size, "workers": ranks}
        times[ranks] += ddp.launch(client, step_times, **given).result
    one, two = (1_000 * np.median(times[ranks]) for ranks in (1, 2))
    return {"model": name, "batch": batch_size, "1 rank": one, "2 ranks": two}


rows = [compare("convolutions", autoencoder, batch) for batch in (16, 64, 128)]
rows += [compare("plain layers", small_model, batch) for batch in (64, 256, 1_024)]
table = pd.DataFrame(rows).set_index(["model", "batch"])
table["speed-up"] = table["1 rank"] / table["2 ranks"]
print("Milliseconds of a step, one core for each rank")
print(table.round(2).to_string())

# %% [markdown]
# Read the last column. Below 1, the second rank makes the step *slower*. It turns where
# the computing of a step outweighs what DDP adds. Can you not just take a large batch?
# It has a price: an epoch then has fewer steps. So first choose the batch that is best
# for *one* rank. Then ask the table whether a second rank pays at *that* batch: the
# steps are the same, only the time differs. Other programs on your machine change the
# numbers.

# %% [markdown] tags=["instructor"]
# **Instructor · 5 minutes.** The training takes a quarter of a minute: talk over the
# table of lines meanwhile. On a laptop with two busy cores the speed-up is smaller: let
# the class close the browser tabs and measure again. Expected wrong answer: "two ranks
# need half the steps". At a global batch of 64 the number of steps is the same.

# %% [markdown]
# ## 8. Proofs
#
# ### A step on two ranks is a step with the whole batch
#
# The mean of two means over 64 digits is the mean over 128, and the gradient of a mean
# is the mean of the gradients. So the averaged gradient is that of the whole batch.

# %% tags=["lesson"]
one_batch = images[:128].flatten(1)
two_ranks = on_two_ranks(train_by_hand, pixels=one_batch, average=nothing, wrap=DDP)[0]

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
else:
    print(f"you predicted {my_prediction!r}: which line divides by the world size?")

# %% [markdown]
# This holds for models whose samples do not depend on each other. In training, *batch
# normalisation* takes mean and variance over the samples of one rank, and each rank
# draws its units for dropout by itself. Such models train a little differently on
# another number of ranks.
#
# ### Replicas stay equal
#
# All ranks start with the same weights and make the same step. So the replicas stay
# equal, bit for bit. Without averaging, each goes its own way.

# %% tags=["lesson"]
weights["no averaging"] = on_two_ranks(
    train_by_hand, pixels=thirty_batches, average=nothing
)

# %% tags=["proof"]
for way, (rank_0, rank_1) in weights.items():
    assert torch.equal(rank_0, rank_1) == (way != "no averaging"), way
print("after 30 steps the replicas are equal bit for bit: by hand, one bucket, DDP")
print("without averaging they are not: two models instead of one")

# %% [markdown]
# ### A ragged batch: the mean of means is not the mean
#
# Five digits, two ranks: three here, two there. Each rank takes the mean over its own,
# and DDP averages over *ranks*. So a digit on the second rank counts one and a half
# times as much as one on the first. `sampler.weight` mends this: it multiplies the loss
# of a rank by its share of the batch, times the number of ranks.


# %% tags=["lesson"]
def gradient_of(pixels, weighted):
    """The averaged gradient of one global batch that holds all `pixels`."""
    torch.manual_seed(0)
    model = DDP(autoencoder().to(ddp.device()))
    sampler = ddp.ElasticSampler(len(pixels), batch_size=len(pixels), shuffle=False)
    for mine in sampler:
        digits = pixels[mine].to(ddp.device()).float() / 255
        loss = F.mse_loss(model(digits), digits)
        if weighted:
            loss = loss * sampler.weight
        loss.backward()
    return torch.cat([each.grad.flatten().cpu() for each in model.parameters()])


five = images[:5].flatten(1)
torch.manual_seed(0)
model = autoencoder()
F.mse_loss(model(five.float() / 255), five.float() / 255).backward()
whole = torch.cat([each.grad.flatten() for each in model.parameters()])

# %% tags=["proof"]
for weighted in (False, True):
    gradient = on_two_ranks(gradient_of, pixels=five, weighted=weighted)
    off = (gradient - whole).norm() / whole.norm()
    assert (off < 1e-4) == weighted, off
    way = "with sampler.weight" if weighted else "plain means"
    print(f"{way}: the gradient of the whole batch to 0.0001: {bool(off < 1e-4)}")

# %% [markdown] tags=["instructor"]
# **Instructor · 6 minutes.** Score the prediction first; ask who changed their mind at
# the timeline. Then one proof aloud, the others by reading. Question for the class: you
# print `loss` on rank 0. Whose loss is it? (That of rank 0's digits alone.)

# %% [markdown]
# ## 9. Exercises
#
# ### Exercise 1 · Start equal (warm-up, 5 minutes)
#
# Averaged gradients keep replicas equal only if they *start* equal. Here each rank
# draws other weights. Give all ranks the weights of rank 0, as `DDP(model)` does when
# it is made. You need one collective call that section 6 does not use.
#
# <details><summary>Hint 1</summary>
# Look at the list of collectives in the docs of <code>torch.distributed</code>: which
# one sends a tensor from one rank to all others?</details>
# <details><summary>Hint 2</summary>
# It writes into the tensor that you give it; <code>help(dist.broadcast)</code> lists
# its arguments. Which tensors of the model are meant, and which ranks have to call it?
# </details>


# %% tags=["solution"]
def my_broadcast(model):
    """Give this rank's `model` the weights of rank 0."""
    # your code
    for parameter in model.parameters():
        dist.broadcast(parameter.data, src=0)
    # end of your code


# %% tags=["exercise"]
def weights_after(broadcast, seed):
    """Rank 0's weights before, and those of all ranks after `broadcast(model)`."""
    torch.manual_seed(seed + dist.get_rank())  # another model on each rank
    model = autoencoder(channels=2, bottleneck=3).to(ddp.device())
    before = [each.detach().cpu().clone() for each in model.parameters()]
    broadcast(model)
    after = [each.detach().cpu().clone() for each in model.parameters()]
    return gathered((before, after))


# %% tags=["exercise"]
def check_broadcast(answer):
    """Whether all ranks have rank 0's weights, every element of every parameter."""
    seed = int(torch.randint(10**6, ()))
    given = {"broadcast": answer, "seed": seed, "stall_timeout": 20}
    try:
        everyones = on_two_ranks(weights_after, **given)
    except ddp.RankFailed as failure:
        print("not yet:", str(failure).splitlines()[0])
        print("  Does every rank make the same calls, each with a tensor?")
        return False
    expected = everyones[0][0]
    for rank, (_, after) in enumerate(everyones):
        wrong = sum(int((mine != other).sum()) for mine, other in zip(after, expected))
        if wrong:
            count = sum(other.numel() for other in expected)
            print("not yet")
            print(f"  yours:    on rank {rank}, {wrong} of {count} weights differ")
            print("  expected: each weight as rank 0 drew it")
            print("  Which tensors have you sent, from which rank?")
            return False
    print("right: two ranks, two seeds, one model")
    return True


ddp.judge(check_broadcast, my_broadcast)

# %% [markdown]
# ### Exercise 2 · Port a script (20 minutes)
#
# `../scripts/plain_loop.py` is the plain loop as a script. It uses PyTorch only. Make
# it a script that `torchrun` starts on two ranks.
#
# 1. Open `scripts/plain_loop.py` in JupyterLab (the folder lies beside `my-work`). Save
#    it beside your notebook: *File, Save Python File As…*, `my-work/my_port.py`.
# 2. Edit your file. The table in section 6 has the lines. Do not import `ddp_common`.
# 3. Let `my_port` below return the name of your file: `"my_port.py"`.
# 4. Run the check as often as you like: it tells you one thing at a time.
#
# Keep epochs, learning rate, loss and model. Keep the batch: 128 digits, of *all* ranks
# together. The script must work on a machine with GPUs and on one without. Only rank 0
# prints.
#
# The check starts your script with `torchrun` on two ranks, on random digits, with the
# GPUs hidden, so it cannot try your lines for GPUs. It watches what the script asks of
# torch. It wants to see:
#
# - in every epoch each digit goes to one rank, and no two epochs deal alike;
# - the replicas are equal, and each step is that of one process with both shares;
# - rank 0 writes one file, which the plain model, *without* DDP around it, can load;
# - the script ends.
#
# <details><summary>Why are my losses not those of the plain loop?</summary>
# <code>DistributedSampler</code> shuffles in another order, so the steps take other
# batches. The check trains one process on exactly the batches that your ranks took, and
# compares every step. The 2,048 digits divide evenly. If they did not, the sampler
# would repeat some, and the mean over ranks would not be the mean over digits: section
# 8.</details>
# <details><summary>Hint 1</summary>
# Begin with the process group, run the check, and let its question lead you to the next
# line. Which lines must come before <code>DDP(model)</code>?</details>
# <details><summary>Hint 2</summary>
# Six places change: the imports; the device; the loader (sampler and batch size); the
# model; the first line in the loop over epochs; the end (who saves what, and
# goodbye).</details>


# %% tags=["solution"]
def my_port():
    """The path of your script."""
    # your code
    return SCRIPTS / "solutions" / "plain_loop.py"
    # end of your code


# %% tags=["exercise"]
def check_port(answer):
    """Run the script on two ranks and say the first thing that is wrong, if any."""
    return ports.check(answer(), plain=SCRIPTS / "plain_loop.py", images=images)


ddp.judge(check_port, my_port, timeout=120)

# %% [markdown] tags=["instructor"]
# **Instructor · 20 minutes, all of section 9.** The port is for everybody. This is the
# solution, `scripts/solutions/plain_loop.py`, beside `train` of section 7:
#
# | plain loop | port for torchrun | `train` on Dask |
# |---|---|---|
# | – | `dist.init_process_group("gloo")` | `launch` has done it |
# | – | `local_rank = int(os.environ["LOCAL_RANK"])` | `launch` knows it |
# | `device = ...` | `torch.device("cuda", local_rank)` or CPU | `ddp.device()` |
# | `torch.manual_seed(0)` | the same | the same |
# | `shuffle=True` | `sampler = DistributedSampler(digits)` | `ddp.ElasticSampler(…)` |
# | `batch_size=128` | `128 // dist.get_world_size()` | `batch_size` is global |
# | `model` | `DDP(model, device_ids=…)` | `DDP(model)` |
# | – | `sampler.set_epoch(epoch)` | `sampler.epochs(epochs)` |
# | `loss` | `loss` (the batches divide evenly) | `loss * sampler.weight` |
# | `print` | `if dist.get_rank() == 0: print` | `ddp.report(loss=loss)` |
# | `model.state_dict()` | rank 0: `model.module.state_dict()` | `checkpoint.save()` |
# | – | `dist.destroy_process_group()` | `launch` does it |

# %% [markdown] tags=["instructor"]
# **Expected wrong answers, and what to say.** The check says the first of them.
#
# | answer | ask |
# |---|---|
# | no `init_process_group` | Who has told this process that there are others? |
# | `shuffle=True` beside the sampler | Who shuffles? |
# | no sampler | Print the first indices on both ranks. What do you see? |
# | `device_ids=[local_rank]` on the CPU | Which GPU is meant, on a machine without? |
# | no DDP, or the loss from the model inside | Where does the averaging happen? |
# | `batch_size=128` per rank | How many digits make one step? |
# | `set_epoch` forgotten | Compare the first batch of two epochs. |
# | learning rate times two | Has the batch grown? Then why the step? |
# | a collective under `if rank == 0` | Who answers? |
# | all ranks save | What if both are half-way through the file? |
# | `model.state_dict()` of the wrapper | Look at the names: where is `module.` from? |
# | no `destroy_process_group` | Who closes what you opened? |
#
# In exercise 1: only rank 0 calls (all wait; the check says so after 8 s: let it happen
# once); the mean of the weights (equal, but nobody's); only the first layer.

# %% [markdown]
# ### Exercise 3 · Diagnose (10 minutes)
#
# `../scripts/broken_loop.py` trains on two ranks and prints the mean loss of all ranks
# after each epoch. It does not get far, and `torchrun` prints much. Then scroll up to
# the first lines that begin with `[rank`:
#
#     [rank0]: what(): ... op.preamble.length <= op.nbytes. 12 vs 4. Received data
#              size doesn't match expected size. Is there a distributed collective
#              mismatch in your code?
#     [rank1]: File "broken_loop.py", line 31, in main
#     [rank1]:     loss.backward()
#     [rank1]: RuntimeError: ... Connection reset by peer.
#
# Read the script. Name the fault, and repair it in a copy: it must still print the mean
# over *both* ranks, once for each epoch. The faults to choose from:
#
# - `"A"` `set_epoch` was forgotten;
# - `"B"` one rank makes a collective call that the other does not make;
# - `"C"` one rank has fewer batches than the other;
# - `"D"` both ranks write the same file;
# - `"E"` a parameter gets no gradient.
#
# <details><summary>Hint 1</summary>
# Rank 1 stands in <code>loss.backward()</code>, and DDP averages there. Its message has
# 12 bytes, and rank 0 takes 4, one number. In which call does rank 0 stand?</details>
# <details><summary>Hint 2</summary>
# <code>all_reduce</code> and <code>print</code> need not stand under the same
# <code>if</code>.</details>


# %% tags=["solution"]
def my_diagnosis():
    """The letter of the fault, and the path of your repaired script."""
    # your code
    return "B", SCRIPTS / "solutions" / "broken_loop.py"
    # end of your code


# %% tags=["exercise"]
def check_diagnosis(answer):
    """Whether the fault is named, and the repaired script prints what it should."""
    given = answer() or (None, None)
    if not (isinstance(given, tuple) and len(given) == 2):
        print(f"not yet: yours: {given!r}; expected: a tuple, (letter, path)")
        return False
    fault, script = given
    if fault != "B":
        print(f"not yet: yours: {fault!r}; expected: another letter from the list")
        print("  In which call does each rank stand when they part?")
        return False
    return ports.check_mean_loss(script)


ddp.judge(check_diagnosis, my_diagnosis, timeout=120)

# %% [markdown]
# ### Exercise 4 · A large batch in small parts (stretch, 15 minutes)
#
# A global batch may be too large for the memory. Take it in parts, let the gradients
# add up, and make one step at the end. DDP would average in every `backward()`. It
# does not if the model was *called* inside `with model.no_sync():`. So forward and
# backward both belong there.
#
# `model` is wrapped in DDP. `parts` is a list of tensors of pixels, all of one size.
# Leave in `.grad` the gradient of the mean loss over all parts, with one part at a time
# in memory, and let DDP average *once*.
#
# <details><summary>Hint 1</summary>
# Which part is the one whose forward and backward stand outside?</details>
# <details><summary>Hint 2</summary>
# Gradients add up. The mean of four losses is not their sum.</details>


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
def accumulate(pixels, accumulation, parts):
    """The gradient on rank 0 (None if there is none), and how often DDP averaged."""
    torch.manual_seed(0)
    model = DDP(autoencoder().to(ddp.device()))
    averagings = []

    def count_and_average(_, bucket):
        averagings.append(bucket.index())
        mean = bucket.buffer().div_(dist.get_world_size())
        work = dist.all_reduce(mean, async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    model.register_comm_hook(None, count_and_average)
    mine = pixels[dist.get_rank() :: dist.get_world_size()].to(ddp.device())
    accumulation(model, mine.chunk(parts))
    if any(each.grad is None for each in model.parameters()):
        return None, len(averagings)
    gradient = torch.cat([each.grad.flatten().cpu() for each in model.parameters()])
    return gradient, len(averagings)


# %% tags=["exercise"]
def check_accumulation(answer):
    """Compare with one process that takes the whole batch at once."""
    parts = int(torch.randint(2, 6, ()))
    digits = images[torch.randperm(len(images))[: 32 * parts]].flatten(1).float() / 255
    torch.manual_seed(0)
    alone = autoencoder()
    F.mse_loss(alone(digits), digits).backward()
    expected = torch.cat([each.grad.flatten() for each in alone.parameters()])
    given = {"pixels": digits, "accumulation": answer, "parts": parts}
    yours, averagings = on_two_ranks(accumulate, **given, stall_timeout=20)
    length = 0.0 if yours is None else (yours.norm() / expected.norm()).item()
    off = 1.0 if yours is None else (yours - expected).norm() / expected.norm()
    if averagings != 1 or off > 1e-3:
        print(f"not yet, with {parts} parts")
        print(f"  yours:    {averagings} averagings, a gradient of length {length:.2f}")
        print("  expected: 1 averaging, length 1.00: the gradient of the whole batch")
        print(
            "  For which part do forward and backward stand outside of no_sync(), "
            "and by what is each loss divided?"
        )
        return False
    print("right: one averaging, and the gradient of the whole batch")
    return True


ddp.judge(check_accumulation, my_accumulation)

# %% [markdown] tags=["instructor"]
# Exercise 3: "C" is the most frequent wrong answer, because of the lost connection.
# Say: count the batches. A repair without `all_reduce` runs, but prints rank 0's loss.
# Exercise 4: no division by the number of parts (too long); everything inside
# `no_sync()` (0 averagings); no `no_sync()` (an averaging for each part).

# %% [markdown]
# ## 10. Break it
#
# Real tutorials contain faults. We keep a *museum* of them; more are in the appendix.
# In this one, somebody adds a layer and forgets to call it. One process does not mind.
# Two ranks do. Read these two parts of the message together. What does DDP wait for?
# Which parameters does it name?


# %% tags=["lesson"]
class WithUnusedLayer(nn.Module):
    """From the museum of faults: `classifier` gets no gradient."""

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


# %% tags=["lesson"]
eight_digits = images[:8].flatten(1).float() / 255
try:
    on_two_ranks(two_steps, pixels=eight_digits)
except ddp.RankFailed as failure:
    message = " ".join(failure.traceback.split())
    print(re.search(r"Expected to have finished[^.]*", message)[0], "...")
    named = re.search(r"(Parameter indices .*? for rank) \d+: ([ 0-9]*)", message)
    print(f"{named[1]} ...: {named[2].strip()}")

# %% [markdown]
# DDP averages a bucket when all its gradients are ready. A gradient that never comes
# blocks its bucket, and DDP notices when the model is called for the next step. Count
# the parameters from 0: weight and bias of `classifier` are 2 and 3.
#
# The first repair: take the layer out, or use it in the loss. If it is used in some
# steps only, tell DDP to look for it in every step, which costs time:

# %% tags=["lesson"]
found = on_two_ranks(two_steps, pixels=eight_digits, find_unused_parameters=True)
print(f"find_unused_parameters=True: no error; {found} of 4 parameters have a gradient")

# %% [markdown] tags=["instructor"]
# **Instructor · 4 minutes.** Let them find `classifier` from the numbers. Set
# `TORCH_DISTRIBUTED_DEBUG=DETAIL` before `connect` and the message has names. Expected
# wrong answer: always set `find_unused_parameters=True`. It hides a layer that somebody
# forgot, and it walks through the graph in every step.

# %% [markdown]
# ## 11. Recap and next
#
# - Every rank holds the whole model and takes its share of each global batch.
# - The ranks average their gradients, so that a step is that of the whole batch.
# - DDP sends buckets while `backward()` is running, and all wait for the slowest rank.
# - Two ranks are faster where the computing of a step outweighs what DDP adds.
# - A launcher gives processes, numbers, a place to meet. The rest is your script.
#
# **Common mistakes.** No `set_epoch`; a collective under `if rank == 0`; the batch per
# rank taken for the global one; all ranks save; the wrapper's names in the file.
#
# **Next:** `pets`: how Dask runs the ranks, and how to watch, stop and resume them.
# **Read:** Li et al., [PyTorch Distributed: Experiences on Accelerating Data Parallel
# Training](https://arxiv.org/abs/2006.15704), VLDB 2020, for buckets and overlap.
#
# **Where it stands**, in the versions of `constraints.txt`. Others may differ.
#
# - *DDP*: its [notes][1]; [distributed.py][2], for what is copied from rank 0, for
#   `no_sync`, `device_ids` and `_BucketCapacityConfig`; `c10d/reducer.cpp` in
#   [torch/csrc/distributed][3], for the order of buckets, and for the message about
#   parameters without a gradient.
# - *Process groups*: backends, collective calls, when a call returns, time-outs,
#   interfaces and `TORCH_DISTRIBUTED_DEBUG`, in the docs of [torch.distributed][4].
#   One GPU for each rank, and `NCCL_SOCKET_IFNAME`, in [NCCL's guide][5] (*Creating a
#   Communicator*, *Environment Variables*).
# - *Data*: [DistributedSampler][6]; `__getitems__` in [fetch.py][7]; `shuffle` beside a
#   sampler in [dataloader.py][8].
# - *State*: [Adam][9]; `load_state_dict` of an [optimizer][10]; `map_location` of
#   [torch.load][11]; a file emptied by `torch.save` in [serialization.py][12];
#   [SyncBatchNorm][13] and its [collective calls][14].
# - *Launchers*: [torchrun][15]; tasks and hosts in [srun][16], [scontrol][17].
# - *Dask*: [LocalCluster][18], whose scheduler runs in your process; a task is a thread
#   in the pool of its [worker][19]; the [dashboard][20].
#
# [1]: https://docs.pytorch.org/docs/stable/notes/ddp.html
# [2]: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/nn/parallel/distributed.py
# [3]: https://github.com/pytorch/pytorch/tree/v2.13.0/torch/csrc/distributed
# [4]: https://docs.pytorch.org/docs/stable/distributed.html
# [5]: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/
# [6]: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/utils/data/distributed.py
# [7]: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/utils/data/_utils/fetch.py
# [8]: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/utils/data/dataloader.py
# [9]: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/optim/adam.py
# [10]: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/optim/optimizer.py
# [11]: https://docs.pytorch.org/docs/stable/generated/torch.load.html
# [12]: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/serialization.py
# [13]: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/nn/modules/batchnorm.py
# [14]: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/nn/modules/_functions.py
# [15]: https://docs.pytorch.org/docs/stable/elastic/run.html
# [16]: https://slurm.schedmd.com/srun.html
# [17]: https://slurm.schedmd.com/scontrol.html
# [18]: https://github.com/dask/distributed/blob/2026.8.0/distributed/deploy/local.py
# [19]: https://github.com/dask/distributed/blob/2026.8.0/distributed/worker.py
# [20]: https://docs.dask.org/en/stable/dashboard.html

# %% [markdown] tags=["instructor"]
# **Instructor · 2 minutes.** Close the notebook. Each says one line of the port, and
# what goes wrong without it.

# %% [markdown]
# ## Appendix A. Good to know, not needed today
#
# ### Is it any good?
#
# Always report an error beside a baseline. Here are two that nobody has to train. The
# *mean digit* is the same picture for every digit: who does no better has learned
# nothing. *Principal component analysis* (PCA) is the linear map with the smallest
# error on the training digits, for as many numbers as the bottleneck has. All errors
# below are on held-out digits.


# %%
def pca(pixels, components, training):
    """Reconstruct pixels (n, 784) from the first principal directions of training."""
    _, directions = torch.linalg.eigh(torch.cov(training.T))
    kept = directions[:, -components:]  # eigh sorts by variance, the largest last
    mean = training.mean(0)
    return mean + (pixels - mean) @ kept @ kept.T


training = Digits(images).__getitems__(slice(None))
held_out = Digits(held_out_images).__getitems__(slice(None))
model = autoencoder(settings.channels, settings.bottleneck)
model.load_state_dict(run.result)
with torch.no_grad():
    reconstructed = model(held_out)
guesses = {
    "mean digit": training.mean(0).expand_as(held_out),
    "PCA": pca(held_out, settings.bottleneck, training),
    "autoencoder": reconstructed,
}
errors = {name: F.mse_loss(guess, held_out).item() for name, guess in guesses.items()}

# %% tags=["nbval-ignore-output"]
print(f"Held-out MSE per pixel, from {settings.bottleneck} numbers per digit")
for name, error in errors.items():
    print(f"{name:12} {error:.4f}")


# %%
def strip(rows, count=12):
    """A picture of the first digits of each row: a dict of name -> pixels (n, 784)."""
    lines = [pixels[:count].reshape(-1, 28, 28) for pixels in rows.values()]
    picture = torch.cat([line.permute(1, 0, 2).reshape(28, -1) for line in lines])
    figure, axes = plt.subplots(figsize=(9, 0.75 * len(rows) + 0.2))
    axes.imshow(picture, cmap="gray_r", vmin=0, vmax=1)
    axes.set(xticks=[], yticks=range(14, 28 * len(rows), 28), yticklabels=list(rows))
    return figure


figure = strip({"held out": held_out, **guesses})
run.save_figure(figure, "reconstructions.png")
plt.close(figure)

# %% tags=["lesson"]
show(
    figure,
    "Rows of digits: held out, the mean digit, PCA, autoencoder. The mean digit is a "
    "grey blur. PCA and the autoencoder draw each digit again.",
)

# %% [markdown]
# ### Real buckets
#
# In the first step DDP puts all gradients into one bucket and notes the order in which
# they become ready. Then it lays out new buckets in that order. A bucket is closed by
# the gradient that fills it: the first at 1 MiB, so that something is sent early, the
# others at 25 MiB. `bucket_cap_mb` changes both. (See `_BucketCapacityConfig` in
# `torch/nn/parallel/distributed.py`. With `find_unused_parameters=True` buckets of
# these sizes are made before the first step, from the last parameter to the first, and
# they stay.) The model here has six layers of 2.3 MiB:


# %% tags=["lesson"]
def bucket_sizes(steps=2):
    """MiB of each bucket that DDP sends, step by step."""
    model = DDP(nn.Sequential(*[nn.Linear(784, 784) for _ in range(6)]))
    sizes = [[] for _ in range(steps)]

    def note_and_average(step, bucket):
        sizes[step[0]].append(round(bucket.buffer().nbytes / 2**20, 1))
        return (
            dist.all_reduce(bucket.buffer(), async_op=True)
            .get_future()
            .then(lambda future: future.value()[0] / dist.get_world_size())
        )

    now = [0]
    model.register_comm_hook(now, note_and_average)
    for now[0] in range(steps):
        model(torch.rand(8, 784)).sum().backward()
    return sizes


for step, sizes in enumerate(on_two_ranks(bucket_sizes)):
    print(f"step {step}: buckets of {sizes} MiB")

# %% [markdown]
# ### The same function under four launchers
#
# `train` does not know who started it. Only the command differs:
#
# | launcher | command | when |
# |---|---|---|
# | Dask | `make run TUTORIAL=mnist WORKERS=2` | notebooks; many runs on one cluster |
# | `torchrun` | `make run TUTORIAL=mnist CLUSTER=torchrun` | one machine, no Dask |
# | `srun` | `make run TUTORIAL=mnist CLUSTER=srun` | inside an allocation of Slurm |
# | `sbatch` | `sbatch clusters/batch/mnist.sbatch` | a job that waits in the queue |
#
# Which digits a step takes is drawn from (seed, epoch) alone. So the loss does not
# depend on the launcher. Here is one epoch under `torchrun`, and one under Dask:


# %% tags=["lesson"]
def final_loss(records):
    """The loss of the last step, as the mean over ranks."""
    return records[records["step"] == records["step"].max()]["loss"].mean()


folder = run.directory / "torchrun"
command = [sys.executable, "-m", "ddp_common", "run", "mnist", "--set", "epochs=1"]
command += ["--cluster", "torchrun", "--workers", "2", "--checkpoint", str(folder)]
done = subprocess.run(command, capture_output=True, text=True)
assert done.returncode == 0, done.stderr
under_torchrun = final_loss(pd.read_json(folder / "metrics.jsonl", lines=True))
one_epoch = {**hyperparameters, "epochs": 1, "images": images}
under_dask = final_loss(ddp.launch(client, train, **one_epoch, workers=2).metrics)

# %% tags=["proof"]
assert abs(under_torchrun / under_dask - 1) < 1e-6, (under_torchrun, under_dask)
print("after one epoch the losses under torchrun and Dask agree to a relative 1e-6")

# %% [markdown]
# ### On a cluster
#
# Not a line of this file changes. `clusters/batch/mnist.sbatch` has comments that say
# what to adapt: account, partition, time, GPUs. What differs:
#
# | | laptop | cluster |
# |---|---|---|
# | ranks start | within seconds | when the queue lets them |
# | they meet | on this machine | on the host of rank 0 |
# | backend | gloo | NCCL, if every rank has a GPU of its own |
# | it ends early because | you closed the lid | the time limit: submit it again |
#
# **Address, port, interface.** With plain scripts on several hosts you may need all
# three. The *address* is that of the host of rank 0: `scontrol show hostnames
# "$SLURM_JOB_NODELIST" | head -n 1` names the first host of the job, and there `srun`
# starts rank 0, unless `--distribution` says otherwise. The *port* must be free there:
# two jobs with one fixed port on one host collide. The *interface* is the network card
# by which the ranks reach each other: `ip route get ADDRESS`, with the address of
# *another* host, prints it after `dev`. (To its own address a host goes by `lo`, which
# leads nowhere else.) `GLOO_SOCKET_IFNAME` and `NCCL_SOCKET_IFNAME` take it. `launch`
# and `make run` find all three themselves. (See
# [srun](https://slurm.schedmd.com/srun.html#OPT_distribution),
# [scontrol](https://slurm.schedmd.com/scontrol.html) and
# [torch.distributed](https://docs.pytorch.org/docs/stable/distributed.html).)
#
# ### Four boxes
#
# > **Global batch.** 32 digits on each of 2 ranks are one *global batch* of 64: that is
# > what the optimizer sees. Many tutorials name the batch *per rank*. Then 8 ranks make
# > steps with batches 8 times as large, and the learning rate may no longer fit. In
# > `train`, `batch_size` is global: more ranks make the same steps.
#
# > **Seeds.** Three things are drawn. The initial weights must agree: DDP copies those
# > of rank 0. The order of the samples must agree, or one sample goes to two ranks and
# > another to none. Dropout should *differ*, or all ranks drop the same units.
# > `ElasticSampler` sets the random state of each step from (seed, epoch, step, rank).
#
# > **The optimizer's state.** Adam keeps two tensors of the size of each parameter.
# > When it loads them, it moves them to the device of the *parameters*. So move the
# > model first, then make the optimizer, then load. `torch.load` without `map_location`
# > puts tensors where they were saved from, which is often the GPU of rank 0.
#
# > **SyncBatchNorm.** Batch normalisation sees the samples of one rank only. With 2 or
# > 4 large images per GPU its statistics are noisy. `nn.SyncBatchNorm` takes them, in
# > training, over all ranks: an all-gather in the forward and an all-reduce in the
# > backward of *every* such layer. On CPUs it raises an error then. (See
# > `torch/nn/modules/_functions.py` and `batchnorm.py` beside it.)

# %% [markdown]
# ### From the museum: `set_epoch` forgotten
#
# `DistributedSampler` shuffles from (seed, epoch), and it counts no epochs. Who forgets
# `sampler.set_epoch(epoch)` gets no error, only the same batches in every epoch.
# `ElasticSampler.epochs()` counts by itself.


# %% tags=["lesson"]
def deals(samples=1_000, epochs=3):
    """What rank 0 of two is dealt in each epoch, by each of three ways."""
    dealt = {"DistributedSampler": [], "with set_epoch": [], "ElasticSampler": []}
    of_two = {"num_replicas": 2, "rank": 0}
    forgetful, told = (DistributedSampler(range(samples), **of_two) for _ in range(2))
    elastic = ddp.ElasticSampler(samples, batch_size=100)
    for epoch in elastic.epochs(epochs):
        told.set_epoch(epoch)
        dealt["DistributedSampler"].append(list(forgetful))
        dealt["with set_epoch"].append(list(told))
        dealt["ElasticSampler"].append(sum(elastic, []))
    return dealt


def check_epochs_differ(epochs):
    """Raise AssertionError if two epochs deal the same samples in the same order."""
    assert len(set(map(tuple, epochs))) == len(epochs), "every epoch deals the same"


# %% tags=["proof"]
for way, epochs in deals().items():
    try:
        check_epochs_differ(epochs)
        print(f"{way}: three epochs, three orders")
    except AssertionError as caught:
        assert way == "DistributedSampler", way
        print(f"{way}: caught, {caught}")

# %% [markdown]
# ### From the museum: one rank has fewer batches
#
# Somebody cuts the digits by hand: 600 for rank 0, 500 for rank 1. Rank 1 is done one
# batch earlier. What happens to rank 0 depends on what rank 1 does then. If its
# *process ends*, gloo on rank 0 loses the connection and soon raises an error. If the
# process *lives on*, as the worker of a plain task of Dask does, rank 0 waits until the
# time-out of the process group: 30 minutes with gloo, 10 with NCCL, unless you choose
# another. (See `init_process_group` in
# [torch.distributed](https://docs.pytorch.org/docs/stable/distributed.html).)
# `launch` notices earlier, and says who has left:


# %% tags=["lesson"]
def train_on_own_part(images, **arguments):
    """From the museum of faults: shards of different length."""
    return train(images[:600] if ddp.rank() == 0 else images[600:], **arguments)


few = {**hyperparameters, "images": images[:1_100], "epochs": 1, "batch_size": 128}
try:
    ddp.launch(client, train_on_own_part, **few, workers=2)
except ddp.RankFailed as failure:
    print(str(failure).splitlines()[0].replace(failure.host, "HOST"))

# %% [markdown]
# The repair: give all ranks all digits, and let the sampler deal.

# %% tags=["lesson"]
repaired = ddp.launch(client, train, **few, workers=2)
steps = repaired.metrics.groupby("rank")["step"].max()
print("steps on each rank:", steps.tolist())

# %% [markdown]
# ### From the museum: all ranks make one folder and write one file
#
# `if not os.path.exists(folder): os.mkdir(folder)` works for years on one process. With
# two, both look, both see nothing, and one of them fails. `torch.save` begins by
# emptying the file: what rank 0 has just written is gone until rank 1 is done.
# Normally chance decides who comes when. Barriers force the bad case here, so that
# everybody sees it.


# %% tags=["lesson"]
def all_ranks_write(folder, rank_0_only):
    """What went wrong on each rank, and the bytes a reader finds meanwhile."""
    looked, trouble = os.path.exists(folder), None
    dist.barrier()  # all have looked
    if not looked and (dist.get_rank() == 0 or not rank_0_only):
        try:
            os.mkdir(folder)
        except FileExistsError as error:
            trouble = type(error).__name__
    dist.barrier()
    if dist.get_rank() == 0:
        torch.save({"weights": torch.zeros(1_000)}, f"{folder}/checkpoint.pt")
    dist.barrier()  # rank 0 is done; rank 1 begins, and empties the file
    if dist.get_rank() == 1 and not rank_0_only:
        open(f"{folder}/checkpoint.pt", "wb").close()
    troubles = gathered(trouble)
    found = os.path.getsize(f"{folder}/checkpoint.pt")
    return troubles, found


def check_written_once(troubles, found):
    """Raise AssertionError if a rank failed or a reader may find an empty file."""
    failed = [trouble for trouble in troubles if trouble]
    assert not failed and found > 0, f"{failed}, and a reader finds {found} bytes"


# %% tags=["proof"]
for rank_0_only in (False, True):
    folder = str(run.directory / f"rank_0_only={rank_0_only}")
    try:
        written = on_two_ranks(all_ranks_write, folder=folder, rank_0_only=rank_0_only)
        check_written_once(*written)
        print("rank 0 alone: one folder, one whole file")
    except AssertionError as caught:
        assert not rank_0_only
        print("all ranks: caught,", caught)

# %% [markdown]
# Three cures for the folder: rank 0 makes it and a barrier follows; or
# `os.makedirs(folder, exist_ok=True)`; or the launcher makes it before there are ranks,
# as `launch` does with the run directory. The third also works where another host sees
# a new folder late.
#
# ### From the museum: validation with the training sampler
#
# A script has a loader for training. Somebody copies the line for validation and
# forgets to change the sampler. It runs, and reports the training error as validation
# error. Were the right digits judged? Gather their indices from all ranks, and count.


# %% tags=["lesson"]
def judged(samples, training, held_out, with_training_sampler):
    """The indices of the digits that each rank evaluates: a list of lists."""
    if with_training_sampler:  # from the museum of faults
        positions, rows = ddp.ElasticSampler(len(training), 256), training
    else:
        positions, rows = ddp.EvalSampler(len(held_out), 256), held_out
    batches = [rows[batch].tolist() for batch in positions]
    loader = DataLoader(torch.arange(samples), batch_sampler=batches)
    return gathered([index for batch in loader for index in batch.tolist()])


def check_judged(everyones, held_out):
    """Raise AssertionError unless the held-out digits were judged, each once."""
    seen = np.concatenate(everyones)
    trained_on = set(seen) - set(held_out)
    assert not trained_on, f"{len(trained_on):,} judged digits are not held out"
    complete = sorted(seen) == sorted(held_out)
    assert complete, "a held-out digit is missing, or counts twice"


# %% tags=["proof"]
kept, judges = ddp.split(1_001, [0.1], seed=0)
given = {"samples": 1_001, "training": kept, "held_out": judges}
for wrong in (True, False):
    everyones = on_two_ranks(judged, **given, with_training_sampler=wrong)
    try:
        check_judged(everyones, judges)
        print(f"EvalSampler: {len(judges)} held-out digits, each judged once")
    except AssertionError as caught:
        assert wrong
        print("training sampler: caught,", caught)

# %% tags=["nbval-ignore-output"]
client.close()
