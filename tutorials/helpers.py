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
    means = whole.to_numpy().reshape(-1, width).mean(axis=1)
    figure, axes = plt.subplots(figsize=(6, 2.8), layout="constrained")
    axes.plot(whole.index.to_numpy().reshape(-1, width).mean(axis=1), means)
    axes.set(xlabel="step", ylabel=label)
    if len(means):
        axes.set_title(f"{column}: from {means[0]:.3g} to {means[-1]:.3g}", fontsize=10)
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
    """A figure of a confusion matrix: counts (n, n), a row for each true class.

    Frames mark the three largest counts off the diagonal; the title names the largest.
    """
    counts = np.asarray(counts)
    side = 2.5 + 0.22 * len(names)
    figure, axes = plt.subplots(figsize=(side, side), layout="constrained")
    axes.imshow(counts, cmap="Blues")
    confused = counts * (1 - np.eye(len(names), dtype=counts.dtype))
    most = np.argsort(-confused, axis=None, kind="stable")[:3]
    places = [divmod(int(place), len(names)) for place in most]
    for row, column in places:
        if confused[row, column]:
            corner = (column - 0.5, row - 0.5)
            frame = plt.Rectangle(corner, 1, 1, fill=False, linewidth=2, color="black")
            axes.add_patch(frame)
    true, guess = places[0]
    if confused[true, guess]:
        said = f"{confused[true, guess]} of {counts[true].sum()}"
        title = f"Confused most often: {names[true]} taken for {names[guess]}, {said}"
        figure.suptitle(title, fontsize=11)
    axes.set(xlabel="guessed class", ylabel="true class")
    axes.set_xticks(range(len(names)), names, rotation=90, fontsize=9)
    axes.set_yticks(range(len(names)), names, fontsize=9)
    dark = 0.715 * counts.max()  # white letters are readable from there
    for row, column in np.argwhere(counts > 0):
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
    """A figure: for each name in `rows` the first of its digits (n, 784), in a line.

    The title says which of the other rows, all digits taken, is nearest to the first.
    """
    true, *drawn = rows
    errors = {name: float((rows[name] - rows[true]).square().mean()) for name in drawn}
    lines = [
        np.hstack(pixels[:count].numpy().reshape(-1, 28, 28))
        for pixels in rows.values()
    ]
    figure, axes = plt.subplots(figsize=(9, 0.8 * len(rows)), layout="constrained")
    axes.imshow(np.vstack(lines), cmap="gray_r", vmin=0, vmax=1)
    axes.set(xticks=[], yticks=range(14, 28 * len(rows), 28), yticklabels=list(rows))
    nearest = min(errors, key=errors.get)
    axes.set_title(f"Nearest to {true!r}, over all its digits: {nearest}", fontsize=10)
    return figure


def unused_parameters(failure):
    """What DDP says of parameters without a gradient, in short, in a RankFailed."""
    message = " ".join(failure.traceback.split())
    said = re.search(r"Expected to have finished[^.,]*", message)[0]
    named = re.search(r"Parameter indices .*? for rank \d+: ([ 0-9]*)", message)[1]
    return f"{said}\n... Parameter indices: {named.strip()}"


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


def show_twice(undisturbed, resumed, directory, killed_at, first=60):
    """Show the loss before a kill and after the resume, and which steps are done twice.

    `undisturbed` and `resumed` are `run.metrics`. What the killed ranks reported is in
    the run's `directory` alone. `killed_at` is the last step before the kill. Steps
    before `first` are left out, and those of which not every rank's report is known.
    """
    import pandas

    def by_step(records):
        loss = records.groupby("step")["loss"]
        return loss.mean()[loss.count() == loss.count().max()].loc[first:]

    every = pandas.read_json(Path(directory) / "metrics.jsonl", lines=True)
    saved = resumed_from(directory)
    whole = by_step(undisturbed)
    before = by_step(every[every["restart"] < every["restart"].max()]).loc[:killed_at]
    after = by_step(resumed).loc[saved + 1 :]
    known = before.index.intersection(after.index)  # of the steps that are done twice
    is_same = len(known) and np.allclose(before[known], after[known], rtol=1e-6)
    title = f"Steps {saved + 1} to {killed_at} are done twice"
    title += ", with the same loss each time" if is_same else ""
    figure, rows = plt.subplots(
        2, sharex=True, sharey=True, figsize=(6.5, 4.5), layout="constrained"
    )
    lines = [(before, f"until the kill after step {killed_at}")]
    lines += [(after, f"resumed from the checkpoint of step {saved}")]
    for axes, (loss, what) in zip(rows, lines):
        axes.plot(whole.index, whole, color="0.55", linewidth=6, label="undisturbed")
        axes.plot(loss.index, loss, color="navy", label="killed, then resumed")
        twice = loss.loc[saved + 1 : killed_at]
        look = {"color": "maroon", "marker": "o", "linestyle": "none"}
        axes.plot(twice.index, twice, label="done twice", **look)
        axes.set_title(what, loc="left", fontsize=10)
        axes.set_ylabel("loss (nats)")
    rows[1].set_xlabel("step")
    figure.suptitle(title, fontsize=11)
    figure.legend(
        *rows[0].get_legend_handles_labels(), loc="outside lower center", ncols=3
    )
    show(
        figure,
        "Two panels with the loss by step, until the kill and after the resume, each "
        f"on the wider line of the undisturbed run. {title}; both panels mark them.",
    )
