"""What the tutorials share and none teaches: pictures, a loss curve, an interval."""

import time

import matplotlib.pyplot as plt
import numpy as np
import torch
from scipy import stats
from torch import nn
from torch.utils.data import Dataset


def show(figure, alt):
    """Show a figure below the cell. `alt` is a sentence for those who cannot see it."""
    from IPython.display import display  # a notebook has it; a batch job may not

    display(figure, metadata={"image/png": {"alt": alt}})
    plt.close(figure)


def pictures(images, titles=None, columns=10):
    """A figure of images in rows: (n, height, width[, 3]), values as imshow takes."""
    rows = -(-len(images) // columns)
    figure, axes = plt.subplots(
        rows,
        columns,
        figsize=(columns, 1.25 * rows),
        squeeze=False,
        layout="constrained",
    )
    for place in axes.flat:
        place.axis("off")
    for number, (place, image) in enumerate(zip(axes.flat, images)):
        place.imshow(image, cmap="gray_r")
        if titles is not None:
            place.set_title(str(titles[number]), fontsize=8)
    return figure


def curve(metrics, column="loss", label="loss", points=50):
    """A figure: the mean of `column` over ranks, against the step.

    `metrics` is `run.metrics`, one row for each report of a rank. Neighbouring steps
    are averaged, so that about `points` points are left. All have equally many steps:
    those that are left over at the end are not drawn.
    """
    of_step = metrics.groupby("step")[column].mean().dropna()
    width = max(1, len(of_step) // points)
    whole = of_step.iloc[: len(of_step) // width * width]
    figure, axes = plt.subplots(figsize=(6, 2.8), layout="constrained")
    axes.plot(
        whole.index.to_numpy().reshape(-1, width).mean(axis=1),
        whole.to_numpy().reshape(-1, width).mean(axis=1),
    )
    axes.set(xlabel="step", ylabel=label)
    return figure


def interval(values, level=0.95):
    """The mean of independent values, and the ends of its confidence interval.

    By Student's t distribution with n - 1 degrees of freedom; n must be at least 2.
    """
    values = np.asarray(values, dtype=float)
    mean = values.mean()
    error = values.std(ddof=1) / np.sqrt(len(values))
    half = stats.t.ppf((1 + level) / 2, len(values) - 1) * error
    return mean, mean - half, mean + half


class LiveLoss:
    """Draws the loss of rank 0 while the ranks train: `on_report` of a launch."""

    alt = {"image/png": {"alt": "The loss of rank 0 against the step. It falls."}}

    def __init__(self, label="loss"):
        from IPython.display import display

        self.figure, self.axes = plt.subplots(figsize=(6, 2.8), layout="constrained")
        plt.close(self.figure)  # else the notebook shows it a second time
        self.axes.set(xlabel="step", ylabel=label)
        (self.line,) = self.axes.plot([], [])
        self.steps, self.losses, self.drawn_at = [], [], 0.0
        self.shown = display(self.figure, metadata=self.alt, display_id=True)

    def __call__(self, record):
        if record["rank"] == 0 and "loss" in record:
            self.steps.append(record["step"])
            self.losses.append(record["loss"])
        if time.monotonic() - self.drawn_at > 1:  # once a second
            self.draw()

    def draw(self):
        self.line.set_data(self.steps, self.losses)
        self.axes.relim()
        self.axes.autoscale_view()
        self.shown.update(self.figure, metadata=self.alt)
        self.drawn_at = time.monotonic()


# ucmerced


def make_network(name, classes):
    """A ResNet with random weights: `small`, or one of torchvision's.

    `small` has three of torchvision's residual blocks, each of which adds what it
    computes to its input, and one output for each class.
    """
    import torchvision
    from torchvision.models.resnet import BasicBlock

    if name != "small":
        return torchvision.models.get_model(name, weights=None, num_classes=classes)
    widths = (8, 16, 32, 64)
    stem = nn.Conv2d(3, widths[0], 3, stride=2, padding=1, bias=False)
    layers = [stem, nn.BatchNorm2d(widths[0]), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    for before, after in zip(widths, widths[1:]):
        shortcut = nn.Conv2d(before, after, 1, stride=2, bias=False)
        shortcut = nn.Sequential(shortcut, nn.BatchNorm2d(after))
        layers.append(BasicBlock(before, after, stride=2, downsample=shortcut))
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], classes)]
    return nn.Sequential(*layers)


class Views(Dataset):
    """Scenes (3, size, size) and labels; if `turn`, a random one of each scene's views.

    There are eight: flipped or not in two directions, transposed or not.
    """

    def __init__(self, scenes, turn):
        self.scenes, self.turn = scenes, turn

    def __len__(self):
        return len(self.scenes)

    def __getitem__(self, index):
        scene, label = self.scenes[index]
        if self.turn:
            left_right, up_down, transposed = torch.randint(2, (3,)).tolist()
            scene = scene.flip(2) if left_right else scene
            scene = scene.flip(1) if up_down else scene
            scene = scene.mT if transposed else scene
        return scene, label


def matrix(counts, names):
    """A figure of a confusion matrix: counts (n, n), a row for each true class."""
    side = 2.5 + 0.22 * len(names)
    figure, axes = plt.subplots(figsize=(side, side), layout="constrained")
    axes.imshow(counts, cmap="Blues")
    axes.set(xlabel="guessed class", ylabel="true class")
    axes.set_xticks(range(len(names)), names, rotation=90, fontsize=8)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    bright = counts.max() / 2
    for row, column in np.argwhere(np.asarray(counts) > 0):
        count = int(counts[row, column])
        colour = "white" if count > bright else "black"
        axes.text(
            column, row, count, ha="center", va="center", fontsize=6, color=colour
        )
    return figure


def curves(values, xlabel, ylabel):
    """A figure: a line for each of {(kind, number): Series}, a colour for each kind."""
    figure, axes = plt.subplots(figsize=(6, 2.8), layout="constrained")
    kinds = list(dict.fromkeys(kind for kind, _ in values))
    for (kind, _), line in values.items():
        line = np.asarray(line.dropna())
        colour = f"C{kinds.index(kind)}"
        axes.plot(range(1, len(line) + 1), line, color=colour, alpha=0.8)
    for kind in kinds:
        axes.plot([], [], color=f"C{kinds.index(kind)}", label=kind)
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.legend()
    return figure
