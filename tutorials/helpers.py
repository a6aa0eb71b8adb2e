"""What the tutorials share and none teaches: pictures, a loss curve, an interval."""

import contextlib
import io
import math
import os
import re
import signal
import socket
import tempfile
import time
from collections import Counter
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

# Lines of a picture: each differs from the others also without its colour, and its
# contrast with white is 3:1 or more.
LINES = [
    {"color": "tab:blue", "linestyle": "-", "marker": "o"},
    {"color": "#d95f02", "linestyle": "--", "marker": "s"},
    {"color": "tab:green", "linestyle": "-.", "marker": "^"},
    {"color": "tab:red", "linestyle": ":", "marker": "D"},
    {"color": "tab:purple", "linestyle": (0, (6, 1)), "marker": "v"},
    {"color": "tab:brown", "linestyle": (0, (1, 3)), "marker": "P"},
]


def line_style(number, *properties):
    """How matplotlib is to draw line `number` of a picture: of `LINES` these."""
    return {name: LINES[number % len(LINES)][name] for name in properties}


def show(figure, alt):
    """Show a figure below the cell. `alt` is a sentence for those who cannot see it."""
    from IPython.display import display  # a notebook has it; a batch job may not

    display(figure, metadata={"image/png": {"alt": alt}})
    plt.close(figure)


def show_file(name, alt):
    """Show a picture of `docs/pictures`. `alt` is for those who cannot see it."""
    from IPython.display import SVG, Image, display

    path = str(Path(__file__).parents[1] / "docs" / "pictures" / name)
    kind, shown = ("svg+xml", SVG) if name.endswith(".svg") else ("png", Image)
    display(shown(filename=path), metadata={f"image/{kind}": {"alt": alt}})


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
    sides = (0.015, 0, 0.97, 1)  # a long title at the right edge has room
    figure.get_layout_engine().set(rect=sides)
    for place in axes.flat:
        place.axis("off")
    for number, (place, image) in enumerate(zip(axes.flat, images)):
        place.imshow(image, cmap="gray_r")
        if titles is not None:
            place.set_title(str(titles[number]), fontsize=9)
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
    from scipy import stats  # not at the top: half of the notebooks do without it

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


def matrix(counts, names):
    """A figure of a confusion matrix: counts (n, n), a row for each true class."""
    side = 2.5 + 0.22 * len(names)
    figure, axes = plt.subplots(figsize=(side, side), layout="constrained")
    axes.imshow(counts, cmap="Blues")
    axes.set(xlabel="guessed class", ylabel="true class")
    axes.set_xticks(range(len(names)), names, rotation=90, fontsize=9)
    axes.set_yticks(range(len(names)), names, fontsize=9)
    dark = 0.715 * counts.max()  # white letters are readable from there
    for row, column in np.argwhere(np.asarray(counts) > 0):
        count = int(counts[row, column])
        colour = "white" if count > dark else "black"
        axes.text(
            column, row, count, ha="center", va="center", fontsize=9, color=colour
        )
    return figure


def broken(client, train, signal_name, step, directory, **arguments):
    """Launch `train` on two ranks, send rank 1 a signal at a step, restart once.

    Returns the first line of the failure, without the host and the step, and the steps
    of rank 0. A file in `directory` marks that the signal was sent: it is sent once.
    """
    import pandas

    import ddp_common as ddp

    def get_it():
        os.kill(os.getpid(), signal.Signals[signal_name])

    with tempfile.TemporaryDirectory(dir=directory) as folder:
        mark = f"{folder}/it-has-struck"
        faulty = ddp.inject(train, get_it, step=step, mark=mark)
        two = {"workers": 2, "restarts": 1, "directory": False}
        with contextlib.redirect_stdout(io.StringIO()):
            whole = ddp.launch(client, faulty, **arguments, **two)
    reports = pandas.DataFrame(whole.records)  # steps that were done again, too
    steps = reports.dropna(subset="loss").query("rank == 0")["step"]
    said = str(whole.failures[0]).replace(socket.gethostname(), "HOST").splitlines()[0]
    return re.sub(r"step \d+", "step …", said), steps


# mnist


def read_digits(folder):
    """Training images (n, 28, 28) and labels (n,), then those held out: bytes.

    Where the folder has no test set, a tenth is held out. Raises `ddp.Error` for files
    that do not fit together.
    """
    import ddp_common as ddp

    if (Path(folder) / "train-images-idx3-ubyte.gz").exists():
        return [*read_part(folder, "train"), *read_part(folder, "t10k")]
    digits = read_part(folder, "digits")
    kept, held_out = ddp.split(len(digits[0]), [0.1], seed=0)
    return [tensor[rows] for rows in (kept, held_out) for tensor in digits]


def read_part(folder, part):
    """Images (n, 28, 28) and labels (n,) of a part: "digits", "train" or "t10k"."""
    import ddp_common as ddp
    from tutorials.kit import read_idx

    images = read_idx(Path(folder) / f"{part}-images-idx3-ubyte.gz")
    labels = read_idx(Path(folder) / f"{part}-labels-idx1-ubyte.gz")
    if images.shape[1:] != (28, 28) or len(images) != len(labels):
        raise ddp.Error(
            f"{folder} holds images {tuple(images.shape)} and {len(labels)} labels: "
            "these are not digits of 28 x 28 with one label each. Restore both files: "
            "git checkout for shipped data, `make data TUTORIAL=mnist` for full ones."
        )
    return images, labels


def pca(pixels, held_out, numbers):
    """`held_out`, drawn again from so many numbers of each row.

    No other linear map through so many numbers has a smaller squared error on `pixels`.
    """
    import torch

    mean = pixels.mean(0)
    scatter = (pixels - mean).T @ (pixels - mean)
    _, directions = torch.linalg.eigh(scatter.double())  # by rising variance
    directions = directions[:, -numbers:].float()
    return mean + (held_out - mean) @ directions @ directions.T


def lines_of_digits(rows, count=12):
    """A figure: for each name in `rows` the first of its digits (n, 784), in a line."""
    lines = [
        np.hstack(pixels[:count].numpy().reshape(-1, 28, 28))
        for pixels in rows.values()
    ]
    figure, axes = plt.subplots(figsize=(9, 0.8 * len(rows)), layout="constrained")
    axes.imshow(np.vstack(lines), cmap="gray_r", vmin=0, vmax=1)
    axes.set(xticks=[], yticks=range(14, 28 * len(rows), 28), yticklabels=list(rows))
    return figure


def unused_parameters(failure):
    """What DDP says of parameters without a gradient, in short, in a RankFailed."""
    message = " ".join(failure.traceback.split())
    said = re.search(r"Expected to have finished[^.,]*", message)[0]
    named = re.search(r"Parameter indices .*? for rank \d+: ([ 0-9]*)", message)[1]
    return f"{said} ... indices {named.strip()}"


# pets


ALPHABET = "+abcdefghijklmnopqrstuvwxyz-. "  # '+' stands between two names


def read_names(path):
    """The table of names: columns name (str) and count (int).

    Raises ddp.Error for an empty table or a foreign character.
    """
    import pandas as pd

    import ddp_common as ddp

    table = pd.read_csv(path, keep_default_na=False)  # a cat may be called Nan
    if table.empty or list(table.columns) != ["name", "count"]:
        needs = "It needs the columns name and count, and at least one row."
        raise ddp.Error(f"{path} holds no names. {needs}")
    for name in table["name"]:
        if foreign := set(name) - set(ALPHABET[1:]):
            what = f"The name {name!r} has {foreign.pop()!r}, "
            why = f"which is not in the alphabet {ALPHABET[1:]!r}. Tidy the list first."
            raise ddp.Error(what + why)
    return table


def encode(names):
    """All names in one row, '+' around each: indices into ALPHABET, a byte for each."""
    import torch

    text = "+" + "".join(name + "+" for name in names)
    codes = [ALPHABET.index(character) for character in text]
    return torch.tensor(codes, dtype=torch.uint8)


def name_filter(registered):
    """A function that says whether an invented name is tame: new, of familiar parts.

    Such a name is one word with three groups of vowels. Any four letters in a row occur
    in two or more of the `registered` names. No rule finds all rude words.
    """

    def fours(name):
        return {name[start : start + 4] for start in range(len(name) - 3)}

    known = set(registered)
    names_with = Counter(group for name in known for group in fours(name))
    familiar = {group for group, count in names_with.items() if count >= 2}

    # a function within a function travels to the ranks by value: they need no helpers
    def is_tame(name):
        vowels = re.findall("[aeiouy]+", name)
        is_familiar = name.isalpha() and len(vowels) >= 3 and fours(name) <= familiar
        return is_familiar and name not in known

    return is_tame


def n_gram(names, held_out, n, prior):
    """Nats per character of `held_out` names, for a rule that counts; '+' ends a name.

    It knows which characters followed the last n - 1 in `names`, and how often. To
    these cases it adds `prior` imagined ones, in the proportions of the context that is
    shorter by one (Dirichlet smoothing). Below the shortest, all of the characters are
    equally likely: those that occur in `names`, and '+'.
    """

    def places(of):
        for name in of:
            text = "+" * n + name + "+"
            for end in range(n, len(text)):
                # the contexts from the shortest to the longest, and what follows
                yield [text[start:end] for start in range(end, end - n, -1)], text[end]

    seen, followed = Counter(), Counter()
    for contexts, character in places(names):
        seen.update(contexts)
        followed.update(context + character for context in contexts)
    equally = 1 / len(set("".join(names)) | {"+"})
    surprises = []
    for contexts, character in places(held_out):
        chance = equally
        for context in contexts:
            cases = followed[context + character] + prior * chance
            chance = cases / (seen[context] + prior)
        surprises.append(-math.log(chance))
    return sum(surprises) / len(surprises)


def resumed_from(directory):
    """From which step the run in `directory` went on last, as its log says."""
    log = (Path(directory) / "log.txt").read_text()
    return int(re.findall(r"Resumed from step-0*(\d+)", log)[-1])


def show_twice(undisturbed, resumed, failure, first=60):
    """Show the loss of an undisturbed run, and of one that was killed and resumed.

    Both are `run.metrics`. What the killed ranks reported is in the run's folder alone.
    It is drawn up to the last known step that `failure`, their RankFailed, names. Steps
    before `first` are left out.
    """
    import pandas

    every = pandas.read_json(Path(failure.directory) / "metrics.jsonl", lines=True)
    killed = every[every["restart"] < every["restart"].max()]
    saved = resumed_from(failure.directory)
    known = re.search(r"last known step is (\d+)", str(failure))
    reported = int(known[1]) if known else saved
    figure, axes = plt.subplots(figsize=(6.5, 3), layout="constrained")
    for records, ends, label, look in [
        (undisturbed, (first, None), "undisturbed", {"color": "0.55", "linewidth": 6}),
        (killed, (first, reported), "killed", {"color": "navy"}),
        (resumed, (saved + 1, None), "resumed", {"color": "maroon", "linestyle": "--"}),
    ]:
        loss = records.groupby("step")["loss"].mean().loc[slice(*ends)]
        axes.plot(loss.index, loss, label=label, **look)
    for step, style, label in [
        (saved, ":", f"checkpoint of step {saved}"),
        (reported, "-.", f"killed; last known step {reported}"),
    ]:
        axes.axvline(step, color="black", linestyle=style, label=label)
    axes.set(xlabel="step", ylabel="loss (nats per character)")
    figure.legend(loc="outside upper center", ncols=3, fontsize=9)
    show(figure, "The loss. Killed and resumed run lie on the undisturbed one.")
