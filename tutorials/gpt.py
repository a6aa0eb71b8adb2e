# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # GPT: where a step's time and memory go
#
# ## 1. The question
#
# **Where do a step's time and memory go, and what when it no longer fits?**
#
# **Afterwards you can**
# - measure how much faster two ranks are, and say why it is not twice;
# - read a trace of a step, and find what slows training;
# - count the memory of a rank, and save some of it;
# - shard a model that does not fit, with FSDP2.
#
# **You need** the tutorials `mnist` and `pets`: *rank*, *bucket*, *overlap*,
# *checkpoint*. No GPU, no network. (Two ranks cannot share one GPU: hide it, with
# `CUDA_VISIBLE_DEVICES=`, before you start Jupyter.)
#
# **Time:** 80 to 90 minutes in class, 27 of them for three exercises.

# %% tags=["context"]
import time
from contextlib import nullcontext
from functools import partial

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.profiler import record_function
from torch.utils.checkpoint import checkpoint as recomputed

import ddp_common as ddp
from tutorials import gpt_steps as steps
from tutorials import helpers, kit
from tutorials.checks import gpt as checks
from tutorials.checks.common import judge

# %% tags=["parameters", "context"]
settings = kit.settings(
    "gpt",
    data="shipped",  # or "full" after `make data TUTORIAL=pets`, or your own names.csv
    windows=1_024,  # at most so many to learn from
    epochs=1,
    batch_size=32,  # windows of all ranks together
    learning_rate=3e-3,
    layers=4,
    seed=0,
    presets={"full": {"windows": 10**6, "epochs": 3, "learning_rate": 2e-3}},
)

# %% tags=["nbval-ignore-output", "context"]
client = ddp.connect()
dataset = kit.fetch("pets", settings.data)
print(f"torch {torch.__version__} · {client.ranks} ranks · {dataset.title}")

# %% [markdown]
# ## 2. A step
#
# As in `pets`, all names stand in one row, with `+` between them. We cut it into
# *windows* of 48 characters. A character is a *token*. The model predicts each
# token from those before it in its window.

# %% tags=["context"]
WIDTH = 48  # tokens in a window
TOKENS = 30  # a to z, "-", ".", the space and "+"
names = steps.Names(dataset.path, WIDTH, settings.seed)
windows, held_out = names.windows[: settings.windows], names.held_out
print(f"{len(windows):,} windows to learn from, {len(held_out):,} held out")

# %% [markdown]
# A *GPT* is a stack of *transformer blocks*. In a block, *attention* lets each position
# read itself and those before it, and then come two linear layers. The model returns
# its loss, the mean cross-entropy. Section 7 explains `recompute`.


# %% tags=["context"]
class GPT(nn.Module):
    def __init__(self, layers=4, recompute=False):
        super().__init__()
        features = 256
        self.embedding = nn.Embedding(TOKENS, features)
        self.position = nn.Embedding(WIDTH, features)
        options = {"batch_first": True, "norm_first": True, "activation": "gelu"}
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(features, 4, 4 * features, 0.0, **options)
            for _ in range(layers)
        )
        self.head = nn.Linear(features, TOKENS)
        self.recompute = recompute

    def forward(self, rows):
        tokens, targets = rows[:, :-1].long(), rows[:, 1:].long()
        x = self.embedding(tokens) + self.position.weight
        mask = nn.Transformer.generate_square_subsequent_mask(WIDTH, device=x.device)
        for block in self.blocks:
            block = partial(block, src_mask=mask, is_causal=True)
            x = (
                recomputed(block, x, use_reentrant=False)
                if self.recompute
                else block(x)
            )
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


# %% [markdown]
# <details><summary><b>A small question:</b> attention has four matrices of 256 × 256
# numbers. Do most of a block's numbers belong to it?</summary>
#
# No. The two linear layers have 256 × 1,024 numbers each, together twice as many. With
# biases and norms a block has 789,760.</details>
#
# The training loop is almost that of `pets`. *AdamW* is Adam with weight decay.


# %%
def train(windows, epochs, batch_size, learning_rate, layers, seed):
    """Train a GPT on this rank's share of the windows; returns its weights."""
    device = ddp.device()
    torch.manual_seed(seed)  # the same initial weights on all ranks
    sampler = ddp.ElasticSampler(len(windows), batch_size, seed=seed)
    model = DDP(GPT(layers).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    total = epochs * len(sampler)  # OneCycleLR also changes Adam's first beta
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total + 1)
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
    checkpoint = ddp.Checkpoint(**parts, sampler=sampler, every_steps=100)
    checkpoint.restore()
    for epoch in sampler.epochs(epochs):
        for rows in sampler.batches():  # numbers of this rank's windows in the batch
            loss = model(windows[rows].to(device)) * sampler.weight
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            checkpoint.step()  # this batch is trained
            schedule.step()
            ddp.report(loss=loss)
        checkpoint.save()
    return model.module.state_dict()


# %%
given = {**vars(settings), "windows": windows}
del given["data"]
run = ddp.launch(client, train, **kit.launch_options(), **given)
steps.save_curve(run)

# %% tags=["nbval-ignore-output"]
model = GPT(settings.layers)
model.load_state_dict(run.result)
with torch.no_grad():
    loss = model(held_out)
five = names.loss_of_5_gram()
print(f"GPT {loss:.2f}, 5-gram {five:.2f}, a blind guess {np.log(TOKENS):.2f}")

# %% [markdown]
# The LSTM of `pets` reaches 2.26 in four passes over the names, as good as the 5-gram.
# **Both are better than this GPT**, which reads half of the names once. (`PRESET=full`
# reaches 2.42.)
#
# ## 3. Predict: two ranks
#
# *Throughput* is tokens per second, of all ranks together. One rank takes 16 windows in
# a step. How many times its throughput do two ranks reach?
#
# - *Strong scaling*: the global batch stays 16, so a rank has 8.
# - *Weak scaling*: a rank has 16, so the global batch is 32.
#
# **Write two numbers before you go on.**

# %% tags=["lesson", "minutes-1"]
my_strong_scaling = None  # times the throughput of one rank
my_weak_scaling = None

# %% [markdown]
# `measure` makes six steps. `trace.steps` keeps the time of the quickest, and has
# *`torch.profiler`* record the last one, which slows it. `record_function` names a
# block of code in that record, the *trace*.


# %% tags=["lesson"]
def measure(windows, batch_size, wrap=DDP, parts=1, network=None, pause=0, **options):
    """Six steps; returns for each rank what its `steps.Trace` has measured."""
    torch.manual_seed(0)
    model = wrap(GPT().to(ddp.device()), **options)
    if network is not None:
        model.register_comm_hook(None, network.average)  # in place of DDP's averaging
    optimizer = torch.optim.AdamW(model.parameters())
    rows = windows[:batch_size][ddp.rank() :: ddp.world_size()].to(ddp.device())
    trace = steps.Trace(network)
    for _ in trace.steps(6):
        optimizer.zero_grad()
        for number, part in enumerate(rows.tensor_split(parts), 1):
            with model.no_sync() if number < parts else nullcontext():
                with record_function("forward"):
                    loss = model(part) / parts
                time.sleep(pause * ddp.rank())  # rank 1 may be slower
                with record_function("backward"):
                    loss.backward()
        with record_function("optimizer"):
            optimizer.step()
    return trace.of_all_ranks(model, optimizer, loss=loss.item())


# %% tags=["lesson", "nbval-ignore-output"]
on_one = {"workers": 1, "directory": False}
on_two = {"workers": 2, "directory": False}
traces = {}
for ranks, options in ((1, on_one), (2, on_two)):
    ms = []
    for rows in (2, 4, 8, 16):  # of each rank
        given = {"windows": windows, "batch_size": rows * ranks, **options}
        traces[ranks, rows * ranks] = trace = ddp.launch(
            client, measure, **given
        ).result
        ms.append(1_000 * trace[0].seconds)
    b, a = np.polyfit((2, 4, 8, 16), ms, deg=1)
    print(f"{ranks} rank(s): {a:.1f} + {b:.1f} · rows ms; measured", *np.round(ms))
speed = {key: key[1] * WIDTH / trace[0].seconds for key, trace in traces.items()}
strong, weak = speed[2, 16] / speed[1, 16], speed[2, 32] / speed[1, 16]
print(f"efficiency: strong scaling {strong / 2:.0%}, weak scaling {weak / 2:.0%}")
print(checks.prediction("strong scaling", my_strong_scaling, strong))
print(checks.prediction("weak scaling", my_weak_scaling, weak))

# %% [markdown]
# *Efficiency* is the speed-up divided by the number of ranks. Each line, *a* + *b* ·
# rows, is fitted to the four points beside it; *rows* are the windows of one rank. (Are
# two ranks slower than one? Run the cell again: another program may run.) More ranks
# leave fewer rows to each. They shrink *b* · rows, but not *a*. If *a* stays what it is
# on two ranks, then at a batch *B* no number of ranks is more than (*a*₁ + *b*₁ *B*) /
# *a*₂ times as fast as one.
#
# <details><summary><b>A small question:</b> how many times is that here, for a batch of
# 16? And for 64?</summary>
#
# Put your printed numbers in. With 12 + 10 · rows on one rank and 24 + 10 · rows on
# two, it is (12 + 160) / 24, 7 times; for 64 windows 27 times. A larger batch makes *a*
# matter less. But it may learn less from each window: `dogs` measures that.</details>
#
# ## 4. A step as a picture
#
# Here is one step of both ranks. A green bar is a *bucket*: gradients that DDP averages
# in one message. It begins when this rank is ready, so it includes the time until the
# other one is. *Waiting* is the end of `backward()`: the gradients are computed, but
# not yet averaged. (On GPUs, record `ProfilerActivity.CUDA` too.)

# %% tags=["lesson"]
title = "The first bucket, of 1 MiB, is sent during backward; the other one after it"
helpers.show(steps.picture({title: traces[2, 16]}), f"A step of two ranks. {title}.")

# %% [markdown]
# ### Exercise A · How many buckets? (6 minutes)
#
# DDP takes the parameters in the order in which their gradients were ready in the first
# step. This is nearly the reverse order, as `backward()` begins at the last layer. Use
# the exact reverse. DDP puts one after the other into a bucket **until the bucket holds
# `bucket_cap_mb` MiB or more**, and then begins the next bucket. It divides no
# parameter. (The first step here has one bucket. Without
# `bucket_cap_mb` it is 25, and the first bucket is full at 1 MiB.)
#
# `sizes` are the bytes of the parameters, in the order of `model.parameters()`.
#
# <details><summary>Hint</summary>
#
# One loop over `reversed(sizes)`, with two variables: full buckets, and the bytes in
# the bucket that is being filled. What is left at the end?
# </details>


# %% tags=["exercise", "solution", "minutes-6"]
def my_buckets(sizes, bucket_cap_mb):
    """The number of buckets that DDP makes. A MiB is 2**20 bytes."""
    # your code
    buckets, filled = 0, 0
    for size in reversed(sizes):
        filled += size
        if filled >= bucket_cap_mb * 2**20:
            buckets, filled = buckets + 1, 0
    return buckets + (filled > 0)
    # end of your code


# %% tags=["exercise"]
judge(partial(checks.buckets, client=client, model=GPT, rows=windows[:2]), my_buckets)

# %% [markdown]
# ## 5. A slower network
#
# Between machines, sending takes longer. DDP calls a *communication hook* with each
# full bucket, and leaves the averaging to it. Our hook `SlowNetwork` averages a bucket,
# then waits 2 ms, and 3 ms more for each MiB.
#
# *Accumulation* runs forward and backward for several parts of a batch, and averages
# once: inside `model.no_sync()`, DDP only adds gradients up. In `measure`, all parts
# but the last are inside.

# %% tags=["lesson", "nbval-ignore-output"]
options = {"windows": windows, **on_two}
slow_steps = {
    "16: buckets of 1 MiB": {"batch_size": 16},
    "16: one bucket": {"batch_size": 16, "bucket_cap_mb": 25},
    "32, in two parts, averaged once": {"batch_size": 32, "parts": 2},
}
for title, changes in slow_steps.items():
    network = steps.SlowNetwork(latency=0.002, per_mib=0.003)
    given = {"bucket_cap_mb": 1, "network": network, **options, **changes}
    slow_steps[title] = ddp.launch(client, measure, **given).result
    waits = " and ".join(f"{rank.waiting:.0%}" for rank in slow_steps[title])
    tokens = changes["batch_size"] * WIDTH / slow_steps[title][0].seconds
    print(f"{title}: {tokens:,.0f} tokens/s; of the recorded step, {waits} waiting")
alt = "Small buckets are sent during backward, one after it. Two parts send once."
helpers.show(steps.picture(slow_steps), alt)

# %% [markdown]
# **One bucket**: nothing overlaps, as it is full only at the end. **Buckets of 1 MiB**:
# much of the sending overlaps, but each message pays 2 ms or more. **Two parts**: the
# first `backward()` sends nothing, so the same messages serve twice as many tokens. A
# rank holds the activations of 8 windows at a time, not of 16. The optimizer sees a
# batch of 32, as it would without parts.
#
# <details><summary><b>A small question:</b> why does <code>measure</code> divide the
# loss by <code>parts</code>?</summary>
#
# The gradients of the parts add up. Of equal parts, we want their mean.</details>
#
# ## 6. Exercise B · Four runs are slow (12 minutes)
#
# Four clusters, A to D, run the same program, with a small model. Each run is slow for
# one reason, and each reason occurs once: the storage; the network; one slow rank; a
# model that is too small for such small batches. Each has 16 steps; 200 ms are drawn.

# %% tags=["exercise"]
alt = "Traces of four runs. Each rank has a lane for computing, and one for sending."
helpers.show(steps.picture(checks.traced_runs(client, windows), most=200), alt)

# %% [markdown]
# | setting | value | meaning |
# |---|---|---|
# | `batch_size` | 4 | windows of a rank for one forward and backward |
# | `num_workers` | 0 | processes of a rank's `DataLoader`, which load ahead |
# | `average_every` | 1 | backward passes for each averaging |
# | `log_rows` | True | rank 1 writes each window to a log |
#
# **For each run, change one setting, so that it takes at most two thirds of the time**
# for the same windows. The check runs each before and after, in turns. More than one
# setting may do.
#
# <details><summary>Hint</summary>
#
# Which bar is the longest? Who waits for whom? What could be done while a batch is
# computed, what less often, and what not at all?
# </details>


# %% tags=["exercise", "solution", "minutes-12"]
def my_changes():
    """For each run the setting to change: {"A": {"name": value}, "B": …}."""
    # your code
    return {
        "A": {"num_workers": 4},
        "B": {"average_every": 8},
        "C": {"log_rows": False},
        "D": {"batch_size": 64},
    }
    # end of your code


# %% tags=["exercise", "nbval-ignore-output", "timed"]
judge(partial(checks.four_runs, client=client, windows=windows), my_changes, timeout=99)

# %% [markdown]
# <details><summary><b>A small question:</b> which two of the four changes are another
# training?</summary>
#
# B and D. With `average_every=8` an update has 8 times as many windows, with
# `batch_size=64` it has 16 times as many. So there are fewer updates, and the old
# learning rate may no longer fit (`dogs`). A and C change no number.</details>
#
# ## 7. Memory
#
# A rank holds the *parameters*, their *gradients*, *Adam's* two means and DDP's
# *buckets*. During a step it also holds the *activations*: what the forward pass saves
# for the backward pass. **Predict** which of the five is the largest, for 16 windows.

# %% tags=["lesson", "minutes-1"]
my_largest = None  # "parameters", "gradients", "Adam", "buckets" or "activations"

# %% [markdown]
# `saved_tensors_hooks` calls our function `note` with each tensor that is saved. Two
# ways save bytes. **bf16**: with `autocast`, matrix products use numbers of two bytes.
# Without `recompute`, bf16 copies of their weights are saved. **Activation
# checkpointing** (`recompute`): only the input of each block is saved, and the backward
# pass runs the block's forward again.


# %% tags=["lesson"]
def forward(model, rows, bf16=False):
    """The loss, and the tensors that are saved for the backward pass."""
    saved = []

    def note(tensor):
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        with torch.autocast(rows.device.type, torch.bfloat16, enabled=bf16):
            return model(rows), saved


# %% tags=["lesson", "nbval-ignore-output"]
times = []
for recompute in (False, True):
    for bf16 in (False, True):
        given = {"make_model": partial(GPT, recompute=recompute), "forward": forward}
        given |= {"rows": windows[:16], "bf16": bf16, **on_one}
        held, seconds = ddp.launch(client, steps.memory_of_a_step, **given).result
        times.append(seconds)
        print(f"{bf16=}, {recompute=}: time {seconds / times[0]:.1f}; MB:", *held)
print(checks.prediction("memory", my_largest))

# %% [markdown]
# All grow with the model, activations also with the batch. With `recompute`, the
# activations of one block at a time come back during the backward pass, outside our
# sum.
#
# <details><summary><b>A line to change:</b> what does bf16 save with one window,
# <code>rows: windows[:1]</code>?</summary>
#
# Nothing: the copies of the weights are larger than what it saves of one window's
# activations.</details>
#
# bf16 may also be slower: a CPU with AVX2 alone needed four times as long. On one H200
# (torch 2.11):
#
# | model, batch × tokens | | float32 | TF32 | bf16 | bf16 + checkpointing |
# |---|---|---|---|---|---|
# | 3.3 million, 128 × 64 | ms | 7.9 | 7.5 | 14.5 | 22.7 |
# | | peak, MB | 602 | 627 | 436 | 283 |
# | 203 million, 32 × 512 | ms | 473 | 149 | 69 | 89 |
# | | peak, GB | 16.7 | 18.3 | 12.5 | 6.5 |
#
# *TF32* rounds the inputs of float32 products to fewer bits. (We have not looked into
# why its peaks are higher.) There the small model is slower with bf16, probably because
# `autocast` adds small tasks.
#
# ## 8. When it no longer fits
#
# With DDP, each rank holds everything. *FSDP2* (`fully_shard`) cuts each parameter, its
# gradient and Adam's means into *shards*, one for each rank. A *mesh* names the ranks.
# The parameters of a block are gathered before the block needs them, and freed
# afterwards.


# %% tags=["lesson"]
def sharded(model):
    mesh = torch.distributed.init_device_mesh(ddp.device().type, (ddp.world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)  # what is left: embeddings and head


# %% tags=["proof", "nbval-ignore-output"]
last = {}
for way in (DDP, sharded):
    for rank in ddp.launch(client, measure, batch_size=16, wrap=way, **options).result:
        print(f"{way.__name__}, bytes: {rank.held}; in a step: {rank.calls}")
        last.setdefault(way, []).append(rank.loss)
difference = abs(np.mean(last[DDP]) - np.mean(last[sharded]))
print(f"loss {np.mean(last[DDP]):.4f}; the two differ by {difference:.0e}")
assert difference < 1e-4

# %% [markdown]
# Each rank holds half. The sixth step's loss, with one batch, is the same. DDP averages
# with `all_reduce`. FSDP2 gathers the parameters of each block by an *all-gather*, in
# the forward pass and again in the backward pass (`reshard_after_forward=False` keeps
# them); what is outside of the blocks only once. A *reduce-scatter* then gives each
# rank the mean gradient of its own shard. An all-reduce is a reduce-scatter and an
# all-gather. So with NCCL, FSDP2 sends three parts where DDP sends two: 1.5 times the
# bytes. (Several GPUs: untried.) In place of `autocast` it has `mp_policy=`, in place
# of `no_sync()` `set_requires_gradient_sync`.
#
# A model that does not fit on one GPU is made on the *meta device*: its parameters have
# a shape, and no memory. After `fully_shard`, `to_empty(device=…)` makes this rank's
# shards; then make the optimizer. Values come from an initialization, or a checkpoint.
#
# A parameter is now a `DTensor`, and `to_local()` is this rank's shard of it. *DCP*,
# `torch.distributed.checkpoint`, saves such a model: each rank writes its part, and any
# number of ranks can load them. (Adam's means need `get_optimizer_state_dict`.)


# %% tags=["lesson"]
def save_and_load(folder):
    """Save a model, and load it into an empty one: they must be equal on each rank."""
    torch.manual_seed(0)  # unlike DDP, FSDP2 copies no weights from rank 0
    model = sharded(GPT().to(ddp.device()))
    dcp.save({"model": model}, checkpoint_id=folder)
    with torch.device("meta"):
        other = GPT()  # no memory yet
    other = sharded(other).to_empty(device=ddp.device())
    dcp.load({"model": other}, checkpoint_id=folder)  # into its tensors
    pairs = zip(model.parameters(), other.parameters())
    assert all(torch.equal(one.to_local(), two.to_local()) for one, two in pairs)


def save_as_ddp(folder):
    ddp.Checkpoint(model=sharded(GPT()), directory=folder).save()


folder = run.directory / f"sharded-{time.time():.0f}"
ddp.launch(client, save_and_load, folder=folder, **on_two)
print(*sorted(path.name for path in folder.iterdir()), "were loaded on both ranks")
try:
    ddp.launch(client, save_as_ddp, folder=folder / "ddp", **on_two)
except ddp.RankFailed as failure:
    print(str(failure).splitlines()[0].replace(failure.host, "HOST"))

# %% [markdown]
# `ddp.Checkpoint` refuses it: there, rank 0 alone writes, and it has only its shards.
#
# **What comes after.** The ZeRO paper has three stages: it cuts the optimizer's state,
# then gradients too, then parameters too, as FSDP2 does. *Tensor parallelism* cuts a
# matrix product between GPUs of one machine, which then talk in every layer. *Pipeline
# parallelism* gives each GPU some layers; small parts of a batch pass through them.
# Large models combine some ([torchtitan](https://github.com/pytorch/torchtitan)).
#
# ## 9. Exercise C · The bytes of a rank (9 minutes)
#
# A model has so many `parameters`. What does each rank hold between two steps, without
# activations? All numbers are float32, and the optimizer is Adam. There are three ways:
#
# - `"DDP"`: gradients and buckets are separate, also on one rank;
# - `"DDP view"`: DDP with `gradient_as_bucket_view=True`; they are the same memory;
# - `"FSDP2"`: everything is sharded, and there are no buckets.
#
# The check measures three models on two ranks. **Then:** what size at most fits into
# 24 GB (24e9 bytes) on 1, 8 and 64 ranks? Estimate first. The check asks your function.


# %% tags=["exercise", "solution", "minutes-9"]
def bytes_of_a_rank(parameters, ranks, way):
    """The bytes that each rank holds. `way` is "DDP", "DDP view" or "FSDP2"."""
    # your code
    weights, gradients, means, buckets = 4, 4, 8, 4
    if way == "DDP":
        return (weights + gradients + means + buckets) * parameters
    if way == "DDP view":
        return (weights + gradients + means) * parameters
    return (weights + gradients + means) * parameters / ranks
    # end of your code


# %% tags=["exercise"]
judge(partial(checks.bytes_of_a_rank, client=client), bytes_of_a_rank)

# %% [markdown]
# ## 10. Break it: a slow rank
#
# Rank 1 is slower by half: in each step it pauses for half of a step's time. How much
# slower is the training? In whose trace do you see the fault?

# %% tags=["lesson", "nbval-ignore-output"]
pause = traces[2, 16][0].seconds / 2
late = ddp.launch(client, measure, batch_size=16, pause=pause, **options).result
compared = {"both as fast": traces[2, 16], "rank 1 is slower": late}
for title, ranks in compared.items():
    waits = ", ".join(f"{rank.waiting:.0%}" for rank in ranks)
    print(f"{title}: {1_000 * ranks[0].seconds:.0f} ms a step; waiting {waits}")
alt = "Rank 1 is late; rank 0 waits for it at the end of backward."
helpers.show(steps.picture(compared), alt)

# %% [markdown]
# A pause of half a step makes a step about 1.5 times as long. (If yours is not longer,
# another program ran: run the cell again.) Every step waits for the slower rank. **That
# one waits far less, in each step.** Rank 0's trace alone looks like a slow network. So
# record all ranks, and several steps.
#
# ## 11. Recap
#
# - *Time*: for each number of ranks, a step takes about *a* + *b* · rows. Most of
#   computing and loading is in *b*. In *a* is what does not shrink with the rows: many
#   small operations, the optimizer, sending that does not overlap. A trace shows it,
#   and who waits for whom. (`export_chrome_trace` of `torch.profiler.profile` writes
#   the trace of your own loop, for [Perfetto](https://ui.perfetto.dev).)
# - *Memory*: with Adam a float32 parameter takes 16 bytes, 4 more with DDP's buckets.
#   Activations grow with the batch.
# - *When it no longer fits*: fewer activations by bf16, checkpointing, or smaller parts
#   with accumulation; less of everything else by FSDP2.
#
# **Read.** PyTorch on the [profiler][1], [FSDP2][2] and [DCP][3]; the [ZeRO paper][4].
#
# [1]: https://docs.pytorch.org/tutorials/recipes/recipes/profiler_recipe.html
# [2]: https://docs.pytorch.org/tutorials/intermediate/FSDP_tutorial.html
# [3]: https://docs.pytorch.org/tutorials/recipes/distributed_checkpoint_recipe.html
# [4]: https://arxiv.org/abs/1910.02054

# %%
client.close()
