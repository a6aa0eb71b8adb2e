"""What the tutorials share and none teaches: pictures, a loss curve, an interval."""

import math
import re
import time
from collections import Counter

import matplotlib.pyplot as plt
import numpy as np
from scipy import stats


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


# pets


def name_filter(registered):
    """A function that says whether an invented name is tame: new, and made of familiar parts.

    Such a name is one word with three groups of vowels. Any four letters in a row occur in
    two or more of the `registered` names. No rule finds all rude words.
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

    It knows which characters followed the last n - 1 in `names`, and how often. To these
    cases it adds `prior` imagined ones, in the proportions of the context that is shorter
    by one (Dirichlet smoothing). Below the shortest, all of the characters are equally
    likely: those that occur in `names`, and '+'.
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


def loss_twice(undisturbed, killed, saved, first=1):
    """A figure: the loss of an undisturbed run, and of one that was killed and resumed.

    Both are `run.metrics`. The killed run holds the steps after `saved`, its checkpoint,
    twice: as the killed ranks did them, and again. Steps before `first` are left out.
    """
    is_second = killed.duplicated(["rank", "step"])
    reported = max([saved, *killed.loc[is_second, "step"]])  # by the killed ranks, last
    figure, axes = plt.subplots(figsize=(6.5, 3), layout="constrained")
    for records, ends, keep, style, label in [
        (undisturbed, (first, None), "last", "C7-", "undisturbed"),
        (killed, (first, reported), "first", "C0-", "killed"),
        (killed, (saved + 1, None), "last", "C1--", "resumed"),
    ]:
        once = records.drop_duplicates(["rank", "step"], keep=keep)
        loss = once.groupby("step")["loss"].mean().loc[slice(*ends)]
        width, alpha = (6, 0.4) if label == "undisturbed" else (1.5, 1)
        axes.plot(loss.index, loss, style, label=label, linewidth=width, alpha=alpha)
    axes.axvline(saved, color="C2", label=f"checkpoint of step {saved}")
    axes.axvline(reported, color="C3", label=f"killed; last report of step {reported}")
    axes.set(xlabel="step", ylabel="loss (nats per character)")
    figure.legend(loc="outside upper center", ncols=3, fontsize=8)
    return figure
