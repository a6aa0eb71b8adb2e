"""What a guide to DDP on Finnish clusters trained: `make run TUTORIAL=mnist PRESET=original`.

An autoencoder, 784-128-128-128-784, on MNIST, for two epochs, on two nodes with four GPUs each. It
began with one GPU, then started a process for each GPU, and in the end handed in a batch job.

Corrected: the global batch does not grow with the nodes; each epoch has an order of its own; the
loss of an epoch is that of all ranks; a saved file is also read. A comment at each place says so.
"""

# %%
from itertools import pairwise

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import TensorDataset

import ddp_common as ddp
from tutorials import helpers, kit

# %% tags=["parameters"]
settings = kit.original(
    "mnist",
    data="shipped",  # or "full", or the path of a folder with IDX files
    steps=0,  # at most so many in an epoch; 0: all
    seed=0,
    limits={"loader_workers": (0, None)},
)


# %%
def read_all_digits(folder):
    """The bytes (n, 28, 28) of all digits: the article held none out.

    The full set has 60,000 for training in a file of their own.
    """
    is_full = (folder / "train-images-idx3-ubyte.gz").exists()
    images, _ = helpers.read_part(folder, "train" if is_full else "digits")
    return images


def autoencoder(hidden):
    """From pixels (n, 784) to pixels (n, 784), with ReLU after each layer, also the last."""
    widths = [784, hidden, hidden, hidden, 784]
    layers = [[nn.Linear(before, after), nn.ReLU()] for before, after in pairwise(widths)]
    return nn.Sequential(*sum(layers, []))


def train(images, settings):
    """Train on this rank's share of each batch."""
    device = ddp.device()  # this rank's own GPU: theirs took the number of GPUs
    torch.manual_seed(settings.seed)  # the same initial weights on all ranks
    data = TensorDataset(images.flatten(1).float() / 255)

    # The batch is that of all ranks, so a rank's share is smaller on two nodes. Theirs was divided
    # by the GPUs of one node: two nodes had a batch of 256.
    steps = settings.steps or None
    sampler = ddp.ElasticSampler(len(data), settings.batch_size, steps=steps, seed=settings.seed)
    loader = ddp.DataLoader(
        data,
        batch_sampler=sampler,
        num_workers=settings.loader_workers,
        pin_memory=device.type == "cuda",
    )
    model = DDP(autoencoder(settings.hidden).to(device))
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.learning_rate)
    checkpoint = ddp.Checkpoint(model=model, optimizer=optimizer, sampler=sampler)
    checkpoint.restore()  # their option for it was never read

    # Each epoch has an order of its own: theirs left set_epoch out, and repeated the first one
    for epoch in sampler.epochs(settings.epochs):
        losses = []  # after a resume within an epoch: those of the steps that were left
        for (digits,) in loader:
            digits = digits.to(device, non_blocking=True)
            loss = F.mse_loss(model(digits), digits) * sampler.weight
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            checkpoint.step()
            ddp.report(loss=loss)
            losses.append(loss.detach())
        mean = torch.stack(losses).mean()
        dist.all_reduce(mean)  # the mean over all ranks: theirs printed that of one rank
        mean /= ddp.world_size()
        if ddp.rank() == 0:
            print(f"epoch {epoch + 1} of {settings.epochs}: loss {mean:.4f}", flush=True)
            ddp.report(epoch_loss=mean)
        checkpoint.save()


# %%
dataset = kit.fetch("mnist", settings.data)
images = read_all_digits(dataset.path)
client = ddp.connect()
print(f"{client.ranks} ranks · {len(images):,} digits: {dataset.origin}, none held out")
run = ddp.launch(client, train, **kit.launch_options(), images=images, settings=settings)
print(f"batch {settings.batch_size}, {settings.batch_size / run.world_size:g} for each rank")
client.close()
