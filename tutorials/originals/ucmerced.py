"""The network of a university's pages on PBS: `make run TUTORIAL=ucmerced PRESET=original`.

It trained a ResNet101, from random weights, on the 2,100 photographs of UC Merced, for five
epochs, on 60 ranks without a GPU, in PBS jobs of twelve.

Corrected: the network has as many outputs as there are classes; the number of ranks is what the
cluster gives; the ranks report to the client, where theirs all wrote into one file. A comment at
each place says so. As there, no image is held out.
"""

# %%
import pandas as pd
import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import ddp_common as ddp
from tutorials import kit
from tutorials.land import make_network

# %% tags=["parameters"]
settings = kit.original(
    "ucmerced",
    data="shipped",  # or "full" after `make data`, or a folder with one folder per class
    steps=0,  # at most so many in an epoch; 0: all
    seed=0,
    limits={"size": (32, None)},  # a ResNet divides the size by 32
)


# %%
def train(images, settings):
    """Train on this rank's share of each batch; returns the weights."""
    device = ddp.device()
    torch.manual_seed(settings.seed)  # the same initial weights on all ranks

    # One number of ranks, asked for where it is needed: theirs was 2 in one line, 60 in another
    batch_size = settings.batch_per_rank * ddp.world_size()
    # Batch normalisation needs more than one image on each rank: a smaller last batch is left out
    sampler = ddp.ElasticSampler(
        len(images),
        batch_size,
        steps=settings.steps or None,
        seed=settings.seed,
        drop_last=True,
    )
    loader = ddp.DataLoader(images, batch_sampler=sampler, batched=True)
    # As many outputs as classes: theirs had 1,000
    model = DDP(make_network(settings.network, len(images.classes)).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.learning_rate)
    checkpoint = ddp.Checkpoint(model=model, optimizer=optimizer, sampler=sampler)
    checkpoint.restore()
    for epoch in sampler.epochs(settings.epochs):
        for scenes, labels in loader:
            scores = model(scenes.to(device).float() / 255)
            loss = F.cross_entropy(scores, labels.to(device)) * sampler.weight
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            checkpoint.step()
            if (sampler.step - 1) % settings.report_every == 0:  # steps 1, 11, 21, …
                # Theirs appended it to one file on all ranks at once
                ddp.report(loss=loss)
        checkpoint.save()  # all ranks call it, rank 0 writes the file
    return {name: each.cpu() for name, each in model.module.state_dict().items()}


@torch.no_grad()
def cross_table(model, images, batch_size=64):
    """How often an image of a class (row) was taken for which class (column)."""
    device, n = next(model.parameters()).device, len(images.classes)
    counts = torch.zeros(n, n, dtype=torch.long)
    for rows in torch.arange(len(images)).split(batch_size):
        scenes, labels = zip(*images.__getitems__(rows.tolist()))
        guesses = model(torch.stack(scenes).to(device).float() / 255).argmax(1).cpu()
        counts += torch.bincount(torch.tensor(labels) * n + guesses, minlength=n * n).view(n, n)
    return counts


# %%
dataset = kit.fetch("ucmerced", settings.data)
client = ddp.connect()
images = ddp.ImageFolder(dataset.path, size=settings.size, cache="memory")
print(f"{client.ranks} ranks · {len(images):,} images of {len(images.classes)} classes", end="")
print(f": {dataset.origin} · licence: {dataset.licence}")
run = ddp.launch(client, train, **kit.launch_options(), images=images, settings=settings)

# %%
# Afterwards one process judges all images, with the last weights
torch.set_num_threads(1)  # one core, as a rank has: more are slow where others are busy
print(f"\nOne process judges {len(images):,} images", flush=True)
model = make_network(settings.network, len(images.classes)).eval()
model.load_state_dict(run.result)
counts = cross_table(model.to(ddp.device()), images)
table = pd.DataFrame(counts.numpy(), index=images.classes, columns=images.classes)
table.rename_axis("actual").to_csv(run.directory / "confusion.csv")
print("A row is an actual class, a column the predicted one, in the same order:")
for name, row in zip(images.classes, counts.tolist()):
    print(f"{name[:17]:17}" + "".join(f"{count or '·':>4}" for count in row))
accuracy = counts.trace().item() / len(images)
print(f"Accuracy {accuracy:.1%}: of images that it was trained on. None was held out.")
client.close()
