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
# - read a trace of a step, and find what slows a training down;
# - count the memory of a rank, and save some of it;
# - shard a model that does not fit, with FSDP2.
#
# **You need** the tutorials `mnist` and `pets`: *rank*, *bucket*, *overlap*,
# *checkpoint*. No GPU, no network. **Data:** the names of `pets`. **Time:** 80 to 95
# minutes in class, 27 of them for three exercises.

# %%
import math
import time
from collections import Counter
from contextlib import nullcontext
from functools import partial

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
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

# %% tags=["parameters"]
settings = kit.settings(
    "gpt",
    data="shipped",  # or "full" after `make data TUTORIAL=pets`, or your own names.csv
    epochs=1,
    batch_size=32,  # windows of all ranks together
    learning_rate=3e-3,
    layers=4,
    features=256,
    dropout=0.0,
    seed=0,
    presets={"full": {"epochs": 10, "learning_rate": 1e-3, "dropout": 0.2}},
    limits={"dropout": (0.0, 0.9), "features": (4, None)},
)

# %% tags=["nbval-ignore-output"]
client = ddp.connect()
dataset = kit.fetch("pets", settings.data)
backend = "nccl" if torch.cuda.is_available() else "gloo"
print(f"torch {torch.__version__} · {backend} · {client.ranks} ranks · {dataset.title}")

# %% [markdown]
# ## 2. A step
#
# As in `pets`, all names stand in one row, with `+` between them. We cut it into
# windows of 48 characters, the *tokens*. The model predicts each from those before it.

# %%
WIDTH = 48  # tokens in a window
names, held_out_names = steps.read_names(dataset.path, settings.seed)
windows = steps.windows_of(names, WIDTH)
held_out = steps.windows_of(held_out_names, WIDTH)
print(f"{len(windows):,} windows to learn from, {len(held_out):,} held out")

# %% [markdown]
# A *GPT* is a stack of *transformer* blocks. In each, *attention* lets every position
# look at those before it, and two linear layers follow. The output is the loss. The
# argument `recompute` is for section 7.


# %%
class GPT(nn.Module):
    def __init__(self, layers=4, features=256, dropout=0.0, recompute=False):
        super().__init__()
        self.embedding = nn.Embedding(len(steps.ALPHABET), features)
        self.position = nn.Embedding(WIDTH, features)
        options = {"batch_first": True, "norm_first": True, "activation": "gelu"}
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(features, 4, 4 * features, dropout, **options)
            for _ in range(layers)
        )
        self.head = nn.Linear(features, len(steps.ALPHABET))
        self.recompute = recompute

    def forward(self, rows):
        tokens, targets = rows[:, :-1].long(), rows[:, 1:].long()
        x = self.embedding(tokens) + self.position.weight
        mask = nn.Transformer.generate_square_subsequent_mask(WIDTH, device=x.device)
        for block in self.blocks:
            block = partial(block, src_mask=mask, is_causal=True)
            x = recomputed(block, x, use_reentrant=False) if self.recompute else block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


# %% [markdown]
# The training loop, as in `pets`:


# %%
def train(
    windows, epochs, batch_size, learning_rate, layers, features, dropout, seed
):
    """Train a GPT on this rank's share of the windows; returns its weights."""
    device = ddp.device()
    torch.manual_seed(seed)  # the same initial weights on all ranks
    sampler = ddp.ElasticSampler(len(windows), batch_size, seed=seed)
    model = DDP(GPT(layers, features, dropout).to(device))
    torch.manual_seed(seed + 1 + ddp.rank())  # another dropout on each rank
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    total = epochs * len(sampler)
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
            checkpoint.step()  # what this batch was for is done
            schedule.step()
            ddp.report(loss=loss)
        checkpoint.save()
    return model.module.state_dict()


# %%
NAMES = "epochs batch_size learning_rate layers features dropout seed".split()
hyperparameters = {name: getattr(settings, name) for name in NAMES}
run = ddp.launch(
    client, train, **kit.launch_options(), windows=windows, **hyperparameters
)
figure = helpers.curve(run.metrics, label="loss (nats per character)")
run.save_figure(figure, "loss.png")
plt.close(figure)

# %% tags=["nbval-ignore-output"]
model = GPT(settings.layers, settings.features)
model.load_state_dict(run.result)
with torch.no_grad():
    loss = model(held_out).item()
five = helpers.n_gram(names, held_out_names, n=5, prior=10)
weights = sum(parameter.numel() for parameter in model.parameters())
print(f"{weights:,} parameters; nats per held-out character:")
print(f"GPT {loss:.2f}, 5-gram {five:.2f}, a blind guess {math.log(30):.2f}")

# %% [markdown]
# After one pass over the names, the 5-gram and the LSTM of `pets` (2.37) are better:
# XX. Here the model is a load to measure.
#
# ## 3. Predict: two ranks
#
# *Throughput* is tokens per second. How many times the throughput of one rank have two?
# We ask twice. *Strong scaling*: the global batch stays 16 windows, and each rank has
# 8. *Weak scaling*: each rank has 16, and the global batch is 32.
#
# **Write two numbers before you go on.**

# %% tags=["lesson"]
my_strong_scaling = None  # times the throughput of one rank
my_weak_scaling = None

# %% [markdown]
# The next function makes five steps on each rank. `trace.steps` times them, and the
# last one is traced by `torch.profiler`. `record_function` gives a block its name in
# the trace. The other arguments are for sections 5 and 10.


# %% tags=["lesson"]
def measure(windows, batch_size, parts=1, network=None, pause=0.0, **options):
    """Five steps of DDP; returns for each rank its `steps.Trace`."""
    torch.manual_seed(0)
    model = DDP(GPT().to(ddp.device()), **options)
    if network is not None:
        model.register_comm_hook(None, network.average)  # averages in place of DDP
    optimizer = torch.optim.AdamW(model.parameters())
    rows = windows[:batch_size][ddp.rank() :: ddp.world_size()].to(ddp.device())
    trace = steps.Trace(network)
    for _ in trace.steps(5):
        for number, part in enumerate(rows.chunk(parts), start=1):
            with model.no_sync() if number < parts else nullcontext():
                with record_function("forward"):
                    loss = model(part) / parts
                if pause and ddp.rank() == 1:
                    with record_function("late"):
                        time.sleep(pause)
                with record_function("backward"):
                    loss.backward()
        with record_function("optimizer"):
            optimizer.step()
            optimizer.zero_grad()
    return trace.of_all_ranks()


# %% tags=["lesson", "nbval-ignore-output"]
on_one = {"workers": 1, "directory": False}
on_two = {"workers": 2, "directory": False}
throughput, points = {}, []
for ranks, options in ((1, on_one), (2, on_two)):
    for batch_size in (16, 32):
        sizes = {"windows": windows, "batch_size": batch_size}
        seconds = ddp.launch(client, measure, **sizes, **options).result[0].seconds
        throughput[ranks, batch_size] = batch_size * WIDTH / seconds
        points.append((batch_size / ranks, 1_000 * seconds))
        print(f"{ranks} rank(s), batch {batch_size}: {batch_size * WIDTH / seconds:,.0f} tokens/s")
strong = throughput[2, 16] / throughput[1, 16]
weak = throughput[2, 32] / throughput[1, 16]
print(f"strong scaling {strong:.2f}: efficiency {strong / 2:.0%}")
print(f"weak scaling {weak:.2f}: efficiency {weak / 2:.0%}")
b, a = np.polyfit(*zip(*points), deg=1)
print(f"a step takes about {a:.0f} + {b:.1f} · batch / ranks milliseconds")
print(checks.prediction_of_scaling(my_strong_scaling, strong, "strong"))
print(checks.prediction_of_scaling(my_weak_scaling, weak, "weak"))

# %% [markdown]
# *Efficiency* is the speed-up divided by the number of ranks. The last line but two is a
# model of the time: *b* shrinks with the number of ranks, *a* does not. So no number
# of ranks makes a step of batch *B* more than (*a* + *bB*) / *a* times as fast. A larger
# batch makes *a* matter less. But it may learn less from each window: see `dogs`.
#
# ## 4. A step as a picture
#
# What is in *a*? Here is the same step of both ranks, as the profiler saw it. *Waiting*
# is the end of `backward()`: all gradients are there, and not all are averaged.

# %% tags=["lesson"]
result = ddp.launch(client, measure, windows=windows, batch_size=16, **on_two).result
figure = steps.picture({"DDP, batch 16": [rank.spans for rank in result]})
helpers.show(figure, "A step of two ranks. Sending begins while backward is running.")

# %% [markdown]
# Green is a *bucket*: gradients that DDP averages as one message.
#
# ### Exercise 1 · How many buckets? (6 minutes)
#
# DDP takes the parameters in reverse order, because the last layer's gradients come
# first. It adds them to a bucket **until the bucket has `bucket_cap_mb` MiB or more**.
# Then it begins the next one. No parameter is divided. (So it is from the second step
# on, where you set the size. If you do not, the size is 25, and the first bucket has
# 1 MiB. In the first step all is one bucket.)
#
# `sizes` has the bytes of each parameter, in the order of `model.parameters()`. The
# check compares your number with the messages of real DDP models.


# %% tags=["exercise", "solution"]
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
# Between machines, sending takes longer. `SlowNetwork` is a *communication hook*: DDP
# calls it with each full bucket, in place of its own averaging. It averages, and then
# waits 2 ms, and 3 ms for each MiB.
#
# *Accumulation*: run forward and backward for several parts of a batch, and average
# once. Inside `model.no_sync()`, DDP only adds up gradients. The last part runs outside.

# %% tags=["lesson"]
options = {"windows": windows, "batch_size": 16, **on_two}
slow_steps = {
    "buckets of 1 MiB": {"bucket_cap_mb": 1},
    "one bucket": {"bucket_cap_mb": 25},
    "two parts, averaged once": {"bucket_cap_mb": 1, "parts": 2},
}
for title, changes in slow_steps.items():
    network = steps.SlowNetwork(latency=0.002, per_mib=0.003)
    result = ddp.launch(client, measure, network=network, **changes, **options).result
    slow_steps[title] = [rank.spans for rank in result]
helpers.show(
    steps.picture(slow_steps),
    "Three steps. Small buckets are sent during backward, one bucket after it. In two "
    "parts, only the second backward sends.",
)

# %% [markdown]
# With one bucket nothing overlaps: sending begins when `backward()` has ended. Small
# buckets overlap, but each pays the 2 ms. In two parts, the first `backward()` sends
# nothing. So the same message serves more tokens, if each part is a full batch.
#
# <details><summary><b>A small question:</b> why is loss divided by
# <code>parts</code>?</summary>
#
# Gradients of the parts add up. The mean over the batch is wanted, not the sum.</details>
#
# ## 6. Exercise A · Four runs are slow (12 minutes)
#
# Four clusters run one program with the same settings. Each run is slow for one reason:
# the storage, the network, one slow rank, or a model that is too small for its batch.

# %% tags=["exercise"]
print(steps.PROGRAM)
runs = {name: checks.traced_run(client, windows, name) for name in "ABCD"}
helpers.show(
    steps.picture(runs, most=200),
    "Traces of four runs. In one, loading is the longest bar; in one, sending; in one, "
    "rank 0 waits for rank 1; in one, there are very many short steps.",
)

# %% [markdown]
# | setting | meaning |
# |---|---|
# | `batch_size` | windows that a rank loads at once, for one forward and backward |
# | `num_workers` | processes of the rank's `DataLoader` that load ahead |
# | `average_every` | so many backwards until DDP averages, and the optimizer steps |
# | `log_rows` | write each window of rank 1 to a log |
#
# For each run, change **one** setting, so that it needs at most two thirds of its
# time for the same windows. The check runs all four, before and after, in turns.
#
# <details><summary>Hint</summary>
#
# Which colour takes the most time? Who waits for whom? For grey: who could load the
# next batch while this one is computed?
# </details>


# %% tags=["exercise", "solution"]
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


# %% tags=["exercise"]
judge(partial(checks.four_runs, client=client, windows=windows), my_changes)

# %% [markdown]
# ## 7. Memory
#
# During a step a rank holds the *parameters*, their *gradients*, *Adam's* two means, and
# DDP's *buckets*. It also holds the *activations*: what the forward pass saves
# for the backward pass. **Predict** which is the largest, for 16 windows.

# %% tags=["lesson"]
my_largest = None  # "parameters", "gradients", "Adam", "buckets" or "activations"


# %% tags=["lesson"]
def bytes_held(model, optimizer):
    """What stays on this rank between two steps, in bytes."""
    gradients = [parameter.grad for parameter in model.parameters()]
    means = [value for state in optimizer.state.values() for value in state.values()]
    return {
        "parameters": steps.nbytes(model.parameters()),
        "gradients": steps.nbytes(gradients),
        "Adam": steps.nbytes(means),
    }


def memory_of_a_step(rows, bf16=False, recompute=False):
    """The bytes that this rank holds, by kind, and the seconds of a step."""
    device = ddp.device()
    model, buckets = DDP(GPT(recompute=recompute).to(device)), steps.Buckets()
    model.register_comm_hook(None, buckets.average)
    optimizer = torch.optim.AdamW(model.parameters())
    weights = {parameter.data_ptr() for parameter in model.parameters()}
    saved, trace = {}, steps.Trace()

    def note(tensor):  # called with each tensor that the forward pass saves
        if tensor.data_ptr() not in weights:
            saved[tensor.data_ptr()] = tensor
        return tensor

    for _ in trace.steps(4):
        optimizer.zero_grad()
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
                loss = model(rows.to(device))
        activations = steps.nbytes(saved.values())
        saved.clear()
        loss.backward()
        optimizer.step()
    held = {**bytes_held(model, optimizer), "buckets": steps.nbytes(buckets.buffers)}
    return {**held, "activations": activations}, trace.seconds


# %% [markdown]
# Two ways to save activations. *bf16*: with `autocast`, matrix products take and give
# numbers of two bytes. *Activation checkpointing* (`recompute`): only the input of each
# block is saved. In the backward pass the block runs forward again.

# %% tags=["lesson", "nbval-ignore-output"]
rows, table = windows[:16], {}
ways = {"float32": {}, "bf16": {"bf16": True}, "checkpointing": {"recompute": True}}
ways["both"] = {"bf16": True, "recompute": True}
for name, way in ways.items():
    held, seconds = ddp.launch(client, memory_of_a_step, rows=rows, **way, **on_one).result
    table[name] = {f"{kind}, MiB": size / 2**20 for kind, size in held.items()}
    table[name]["time"] = seconds
table = pd.DataFrame(table).T
table["time"] /= table.loc["float32", "time"]
print(table.round(1).to_string())
print(checks.prediction_of_memory(my_largest))

# %% [markdown]
# Activations grow with the batch, everything else with the model. The figures are
# sums over what is saved. While a block runs again, its own activations come back.
#
# On a GPU it depends on the size whether this pays (measured on one H200, torch 2.11):
#
# | model, batch × tokens | | float32 | TF32 | bf16 | bf16 + checkpointing |
# |---|---|---|---|---|---|
# | 3.3 million, 128 × 64 | ms | 7.9 | 7.5 | 14.5 | 22.7 |
# | | peak, MB | 602 | 627 | 436 | 283 |
# | 203 million, 32 × 512 | ms | 473 | 149 | 69 | 89 |
# | | peak, GB | 16.7 | 18.3 | 12.5 | 6.5 |
#
# *TF32* rounds the inputs of float32 products. The small model gets slower with bf16:
# the GPU is not busy, and there is more to start.
#
# ## 8. When it no longer fits
#
# With DDP, each rank holds everything. *FSDP2* cuts each parameter, its gradient and
# Adam's means into *shards*, one for each rank. `fully_shard(block)` makes a block one
# group. It is gathered before it is needed, and freed afterwards.


# %% tags=["lesson"]
def sharded(seed):
    torch.manual_seed(seed)
    model = GPT().to(ddp.device())
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)  # what is left: embeddings and head


def train_few(windows, way):
    """Six steps; returns of each rank the bytes held and the calls of a step; losses."""
    torch.manual_seed(0)
    model = sharded(seed=0) if way == "FSDP2" else DDP(GPT().to(ddp.device()))
    optimizer = torch.optim.AdamW(model.parameters())
    trace, losses = steps.Trace(), []
    for number in trace.steps(6):
        batch = windows[16 * number : 16 * number + 16]
        loss = model(batch[ddp.rank() :: ddp.world_size()].to(ddp.device()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(sum(steps.of_all_ranks(loss.item())) / ddp.world_size())
    held = steps.of_all_ranks(bytes_held(model, optimizer))
    return held, Counter(trace.calls), losses


# %% tags=["proof"]
losses = {}
for way in ("DDP", "FSDP2"):
    run_of_few = ddp.launch(client, train_few, windows=windows, way=way, **on_two)
    held, calls, losses[way] = run_of_few.result
    for rank, kinds in enumerate(held):
        sizes = ", ".join(f"{kind} {size:,}" for kind, size in kinds.items())
        print(f"{way:5} rank {rank}, bytes: {sizes}")
    print(f"{way:5} calls in a step: {dict(calls)}")
difference = abs(losses["DDP"][-1] - losses["FSDP2"][-1])
print(f"after six steps the losses differ by {difference:.6f}")
assert difference < 1e-3

# %% [markdown]
# Each rank holds half. Instead of one `all_reduce` of all gradients, each block has an
# *all-gather* of its parameters in the forward pass and another one in the backward
# pass, and a *reduce-scatter*: each rank gets the mean of its own shard of the
# gradients. That is about one and a half times the bytes of DDP.
#
# A parameter is now a `DTensor`; `to_local()` is the rank's own part. Such a state goes
# into `torch.distributed.checkpoint` (DCP): each rank writes its part.


# %% tags=["lesson"]
def save_and_load(folder):
    """Save a model, load it into another one; returns of each rank whether all is equal."""
    model, other = sharded(seed=0), sharded(seed=1)
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    state = {"model": other.state_dict()}
    dcp.load(state, checkpoint_id=folder)  # into the tensors of `other`
    pairs = zip(model.parameters(), other.parameters())
    equal = all(torch.equal(one.to_local(), two.to_local()) for one, two in pairs)
    return steps.of_all_ranks(equal)


def save_as_ddp(folder):
    ddp.Checkpoint(model=sharded(seed=0), directory=folder).save()


folder = run.directory / f"sharded-{time.time():.0f}"
equal = ddp.launch(client, save_and_load, folder=folder, **on_two).result
print("files:", *sorted(path.name for path in folder.iterdir()))
print("the weights that were loaded are equal on each rank:", equal)
try:
    ddp.launch(client, save_as_ddp, folder=folder / "ddp", **on_two)
except ddp.RankFailed as failure:
    print(failure.traceback.strip().splitlines()[-1])

# %% [markdown]
# `ddp.Checkpoint` refuses: rank 0 writes alone, and has only a part.
#
# ## 9. Exercise B · The bytes of a rank (9 minutes)
#
# A model has so many parameters, of four bytes each, and Adam. What does a rank hold
# between two steps, without activations? There are three ways:
#
# - `"DDP"`: gradients and buckets are separate;
# - `"DDP view"`: with `gradient_as_bucket_view=True` they are the same memory;
# - `"FSDP2"`: sharded, no buckets.
#
# The check measures three models on two ranks. **Then:** how large a model fits into
# 24 GB on 1, 8, 64 ranks? The check tells what your function says.


# %% tags=["exercise", "solution"]
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
# Rank 1 gets slower by half: in each step it pauses for half of the step's time. How
# much slower is the step? And in whose trace do you see it?

# %% tags=["lesson", "nbval-ignore-output"]
steps_of = {}
for title, pause in (("both as fast", 0.0), ("rank 1 is slower", 0.5 * 16 * WIDTH / throughput[2, 16])):
    result = ddp.launch(client, measure, pause=pause, **options).result
    steps_of[title] = [rank.spans for rank in result]
    waits = [f"rank {n} waits {steps.share(r.spans, 'waiting'):.0%}" for n, r in enumerate(result)]
    print(f"{title}: {1_000 * result[0].seconds:.0f} ms a step;", ", ".join(waits))
figure = steps.picture(steps_of)
helpers.show(figure, "Rank 1 is late; rank 0 waits for it at the end of backward.")

# %% [markdown]
# Both ranks take as long as the slower one. **The slow rank is the one that does not
# wait.** So look at the traces of all ranks: rank 0's alone says 'the network is slow'.
#
# ## 11. Recap
#
# - *Time*: a step is *a* + *b* · batch / ranks. A trace shows what *a* is: loading,
#   sending that does not overlap, waiting for a slow rank.
# - *Memory*: 16 bytes for each parameter with Adam, 4 more for DDP's buckets, and
#   activations, which grow with the batch.
# - *When it no longer fits*: bf16 and checkpointing for activations, a smaller batch
#   with accumulation, FSDP2 for everything else.
#
# **Read.** PyTorch on the [profiler][1], [FSDP2][2] and [DCP][3]; the [ZeRO paper][4].
#
# [1]: https://docs.pytorch.org/tutorials/recipes/recipes/profiler_recipe.html
# [2]: https://docs.pytorch.org/tutorials/intermediate/FSDP_tutorial.html
# [3]: https://docs.pytorch.org/tutorials/recipes/distributed_checkpoint_recipe.html
# [4]: https://arxiv.org/abs/1910.02054

# %%
client.close()
