"""Dogs, as its article trained it: a whole pretrained network by DDP, 100 images on each rank.

Saturn Cloud, 'Combining Dask and PyTorch for Better, Faster Transfer Learning': all layers of a
ResNet50 are trained on, the batch and the rate grow with the workers, and ReduceLROnPlateau steps
with the loss of every training step. Here too. What its code did otherwise than its author meant
is repaired, with a comment at the place. Without `make data` the images are drawn, and the network
is the small one that ships.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset

import ddp_common as ddp
from tutorials import dogs_study as ready
from tutorials import kit

# %% tags=["parameters"]
settings = kit.original(
    "dogs",
    data="shipped",  # "full" after `make data`, a folder, s3://…: class = folder
    anonymous=False,  # True: read a public bucket without credentials
    network="",  # "": resnet50 for data=full, else efficientnet-lite0
    download=False,  # True: fetch the weights of resnet50, 98 MB, if they are not here
    batch_size=0,  # of all ranks together; 0: batch_per_rank times their number
    learning_rate=0.0,  # 0: rate_per_rank times the number of ranks
    evaluate_every=0,  # steps between two looks at the held-out images; 0: once an epoch
    steps=0,  # at most so many in an epoch; 0: all
    seed=0,
    limits={"loader_workers": (0, None)},
)


# %%
class Photos(Dataset):
    """The images at `rows`, cropped in the middle: bytes (3, crop, crop), and the class."""

    def __init__(self, images, rows, crop):
        self.images, self.rows, self.crop = images, rows, crop

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        image, breed = self.images[int(self.rows[index])]
        edge = (image.shape[-1] - self.crop) // 2
        return image[:, edge : edge + self.crop, edge : edge + self.crop], breed


def whole_network(name, classes, download):
    """The pretrained network, and a new last layer for these classes (theirs kept 1,000)."""
    backbone = ready.backbone(name, download)
    return nn.Sequential(backbone.pixels, backbone.layers, nn.Linear(backbone.width, classes))


@torch.no_grad()
def evaluate(network, loader):
    """Mean loss and accuracy on all held-out images, the same numbers on every rank.

    Theirs gave this loader the sampler of the training images.
    """
    for buffer in network.buffers():
        dist.broadcast(buffer, src=0)  # each rank has statistics of BatchNorm of its own
    totals = torch.zeros(3, device=ddp.device())
    network.eval()
    for photos, breeds in loader:
        breeds = breeds.to(ddp.device())
        scores = network(photos.to(ddp.device()))
        totals[0] += F.cross_entropy(scores, breeds, reduction="sum")
        totals[1] += (scores.argmax(1) == breeds).sum()
        totals[2] += len(breeds)
    network.train()
    dist.all_reduce(totals)
    loss, right, count = totals.tolist()
    return loss / count, right / count


def train(images, network, settings):
    """Train all layers of `network`; returns its weights."""
    # The same images are held out on every rank: each of theirs shuffled for itself.
    training, held_out = ddp.split(len(images), [settings.held_out], seed=settings.seed)
    training = Photos(images, training, settings.crop)
    held_out = Photos(images, held_out, settings.crop)
    workers = {"num_workers": settings.loader_workers}
    sampler = ddp.ElasticSampler(
        len(training),
        settings.batch_size or settings.batch_per_rank * ddp.world_size(),
        steps=settings.steps or None,
        seed=settings.seed,
    )
    loader = ddp.DataLoader(training, batch_sampler=sampler, **workers)
    to_judge = ddp.EvalSampler(len(held_out), 64)
    evaluation = DataLoader(held_out, batch_sampler=to_judge, **workers)

    model = DDP(network.to(ddp.device()))
    rate = settings.learning_rate or settings.rate_per_rank * ddp.world_size()
    optimizer = torch.optim.SGD(model.parameters(), rate, momentum=settings.momentum)
    plateau = ReduceLROnPlateau(optimizer, mode="min", patience=settings.patience)
    parts = {"model": model, "optimizer": optimizer, "plateau": plateau, "sampler": sampler}
    checkpoint = ddp.Checkpoint(**parts, every_steps=settings.save_every)
    checkpoint.restore()
    looks = settings.evaluate_every or len(sampler)
    for _ in sampler.epochs(settings.epochs):
        for photos, breeds in loader:
            breeds = breeds.to(ddp.device())
            scores = model(photos.to(ddp.device()))
            loss = F.cross_entropy(scores, breeds) * sampler.weight
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            checkpoint.step()
            # The mean over all ranks: with a loss of its own each of theirs had its own rate.
            mean = loss.detach() / ddp.world_size()
            dist.all_reduce(mean)
            plateau.step(mean.item())
            right = (scores.argmax(1) == breeds).float().mean()
            ddp.report(loss=loss, accuracy=right, rate=optimizer.param_groups[0]["lr"])
            if sampler.step % looks == 0 or sampler.step == len(sampler):
                loss, accuracy = evaluate(model.module, evaluation)
                if ddp.rank() == 0:
                    ddp.report(held_out_loss=loss, held_out_accuracy=accuracy)
        checkpoint.save()
    return {name: each.cpu() for name, each in model.module.state_dict().items()}


# %%
dataset = kit.fetch("dogs", settings.data)
name = settings.network or ("resnet50" if settings.data == "full" else "efficientnet-lite0")
ready.imagenet_weights(name, settings.download, "network")  # if they are missing, nothing is begun
client = ddp.connect()
images = ddp.ImageFolder(dataset.path, size=settings.resize, anonymous=settings.anonymous)
network = whole_network(name, len(images.classes), settings.download)
print(f"{client.ranks} rank(s) · dogs: {dataset.origin} · the whole of {name}, pretrained")
print(f"{len(images):,} images of {len(images.classes)} breeds, {settings.held_out:.0%} held out")
given = {"images": images, "network": network, "settings": settings}
run = ddp.launch(client, train, **kit.launch_options(), **given)
table = run.metrics
last = table.dropna(subset="held_out_accuracy").iloc[-1]
print(
    f"after {int(last['step']):,} steps, {int(last['samples']):,} images: held-out accuracy "
    f"{last['held_out_accuracy']:.1%}, rate {table['rate'].dropna().iloc[-1]:.2g}"
)

# %%
client.close()
