"""Does more hardware help? One tutorial on several numbers of ranks, at equal samples seen.

    make scaling TUTORIAL=pets WORKERS="1 2 4"

Every number of ranks is a `make run` of its own in the folder of the study, and what is compared
is read from what those runs leave. So a study relies on two things of a tutorial: a setting
`batch_size`, the global batch, and a loss that every rank reports.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy
import pandas
from matplotlib.figure import Figure
from scipy.optimize import nnls

from dask_ranks.clusters.profiles import gpus
from dask_ranks.run.folders import new_directory, shown
from ddp_common.errors import Error
from tutorials.helpers import line_style
from tutorials.kit.beforehand import check_choices
from tutorials.kit.cli import tutorial_path
from tutorials.kit.launchers import available_cores
from tutorials.kit.parameters import program_of

SMOOTHED = 20  # points of a curve of the training loss


def study(tutorial: str, ranks: Sequence[int]) -> None:
    """Train `tutorial` on each number of `ranks`, compare, and print what came of it.

    Leaves a folder with scaling.csv, scaling.png, scaling.txt and the runs. Raises `Error` when a
    run fails; the runs before it are compared all the same.
    """
    folder = Path(new_directory(f"scaling/{tutorial}"))
    options = of_equal_ranks(os.environ.get("OPTIONS", ""), ranks)
    frames = {}  # number of ranks -> its curve
    try:
        for number in ranks:
            print(f"\n{tutorial}, ranks: {number}", file=sys.stderr, flush=True)
            directory = folder / f"{number}-ranks"
            code = train(tutorial, number, directory, options)
            if code:
                raise Error(
                    f"The run in {shown(directory)} was not finished (exit code {code}); what it "
                    "said stands above."
                )
            frames[number] = curve(directory)
    finally:
        if frames:
            write(tutorial, frames, folder)


def numbers_of_ranks(text: str) -> list[int]:
    """[1, 2, 4] from "1 2 4" or "1,2,4". Raises `Error` for anything else."""
    words = re.split(r"[\s,]+", text.strip())
    if not all(re.fullmatch("[1-9][0-9]{0,3}", word) for word in words):
        raise Error(
            f"WORKERS={text!r}: a study takes the numbers of ranks to compare, "
            'such as WORKERS="1 2 4".'
        )
    return sorted({int(word) for word in words})


def of_equal_ranks(options: str, ranks: Sequence[int]) -> str:
    """OPTIONS for all runs of a study.

    On this machine one rank would get all cores: here it gets as many threads as in the largest
    run.
    """
    is_local = os.environ.get("CLUSTER", "local") in ("", "local")
    if not is_local or "threads_per_worker" in options or gpus():
        return options
    threads = max(1, available_cores() // max(ranks))
    return f"{options} threads_per_worker={threads}".strip()


def train(tutorial: str, number: int, directory: Path, options: str) -> int:
    """Run `tutorial` on this number of ranks; returns the exit code."""
    own = {"WORKERS": str(number), "CHECKPOINT": str(directory), "OPTIONS": options}
    command = [sys.executable, "-m", "tutorials", "run", tutorial]
    process = subprocess.Popen(command, env={**os.environ, **own})
    try:
        return process.wait()
    except KeyboardInterrupt:
        # The terminal has told the run, too: it ends its ranks and says how to go on.
        return process.wait()


def curve(directory: Path) -> pandas.DataFrame:
    """What a run reported, a row for each step: means over ranks, and seconds since the first.

    Raises `Error` for a run that reported no loss with a position of a sampler.
    """
    metrics = pandas.read_json(directory / "metrics.jsonl", lines=True)
    if not {"loss", "samples", "step"} <= set(metrics):
        raise Error(
            f"{shown(directory)} has no curve: its ranks reported no `loss` "
            "while an ElasticSampler counted steps."
        )
    metrics = metrics.apply(pandas.to_numeric, errors="coerce")  # the file has "nan" as a text
    steps = metrics.drop(columns="rank").groupby("step")
    # The earliest report counts: an evaluation after a step is reported later, but belongs to it.
    rows = steps.mean().assign(time=steps["time"].min())
    rows["seconds"] = rows["time"] - rows["time"].min()
    return rows.drop(columns="time").reset_index()


def throughputs(rows: pandas.DataFrame) -> Iterator[float]:
    """Samples per second of each epoch, without its first step and the pause before it."""
    steps = rows[rows["loss"].notna()]
    for _, epoch in steps.groupby("epoch"):
        if len(epoch) > 1:
            samples = epoch["samples"].iloc[-1] - epoch["samples"].iloc[0]
            seconds = epoch["seconds"].iloc[-1] - epoch["seconds"].iloc[0]
            yield samples / seconds


def compare(frames: dict[int, pandas.DataFrame]) -> pandas.DataFrame:
    """A row for each number of ranks, from their curves.

    The columns are samples/s (median of the epochs), slowest and fastest (epoch, samples/s),
    efficiency, samples, steps, seconds, and losses. Efficiency is the speed of each rank over that
    of each rank of the smallest run. A loss is the mean of the last twentieth of the samples that
    all runs have seen.
    """
    equal = min(rows["samples"].max() for rows in frames.values())
    lines = []
    for ranks, rows in frames.items():
        speed = pandas.Series(throughputs(rows), dtype=float)
        until = rows[rows["samples"] <= equal]
        last = until[until["samples"] > equal * (1 - 1 / SMOOTHED)]
        line = {
            "ranks": ranks,
            "samples/s": speed.median(),
            "slowest": speed.min(),
            "fastest": speed.max(),
            "samples": int(equal),
            "steps": int(until["step"].max()),
            "seconds": until["seconds"].max(),
            "loss": last["loss"].mean(),
        }
        for name in rows:
            if name.startswith("validation_"):
                line[name] = rows[name].dropna().iloc[-1:].mean()  # NaN if it is never finite
        lines.append(line)
    table = pandas.DataFrame(lines).set_index("ranks")
    per_rank = table["samples/s"] / table.index
    table.insert(3, "efficiency", per_rank / per_rank.iloc[0])
    return table


def write(tutorial: str, frames: dict, folder: Path) -> None:
    """Compare the curves, write the files of the study, and print its table and its words."""
    table = compare(frames)
    is_here = os.environ.get("CLUSTER", "local") in ("", "local", "torchrun")
    words = in_words(tutorial, table, available_cores() if is_here else None)
    table.to_csv(folder / "scaling.csv")
    (folder / "scaling.txt").write_text(words + "\n")
    draw(f"{tutorial}: does more hardware help?", frames, table).savefig(folder / "scaling.png")
    print(f"\n{table.round(3).to_string()}\n\n{words}\n\nAll of it is in {shown(folder)}/")


def in_words(tutorial: str, table: pandas.DataFrame, cores: int | None) -> str:
    """What the numbers say, in sentences; `cores` are those of this machine if it has trained."""
    first, *others = table.index
    samples = table["samples"].iloc[0]
    listed = ", ".join(map(str, table.index))
    sentences = [f"{tutorial} on {listed} ranks, compared after {samples:,} samples."]
    speed = table["samples/s"]
    if speed.isna().any():
        sentences.append(
            "Speed is measured between the steps of an epoch, and there is an epoch of one step: "
            "train on more samples, or with a smaller batch."
        )
    elif others:
        sentences += [
            f"In these runs {ranks} ranks train {speed.loc[ranks] / speed.loc[first]:.2f} times "
            f"as fast as {first} (ideal: {ranks / first:g}; efficiency "
            f"{table['efficiency'].loc[ranks]:.2f})."
            for ranks in others
        ]
        sentences.append(_amdahl_in_words(speed))
    if others:
        sentences.append(_losses_in_words(table, first))
    if cores and table.index[-1] > cores:
        sentences.append(
            f"There are {cores} cores here: beyond {cores} ranks they share them, "
            "so nothing is learned about a machine that has more."
        )
    return " ".join(sentences)


def _losses_in_words(table, first):
    """By how much the losses differ from that of the run on `first` ranks, and no more."""
    change = table["loss"] / table["loss"].loc[first] - 1
    worst = change.abs().idxmax()
    difference = change.loc[worst]
    compared = "higher" if difference > 0 else "lower"
    steps = table["steps"]
    why = "The global batch has not grown."
    if steps.loc[worst] != steps.loc[first]:
        why = "Their training is another one, as when the global batch grows with the ranks."
    return (
        f"The largest difference of the loss: with {worst} ranks, after {steps.loc[worst]:,} "
        f"steps, it is {abs(difference):.1%} {compared} than with {first} after "
        f"{steps.loc[first]:,}. {why} There is one run for each number of ranks: whether another "
        "seed gives the same difference is not known."
    )


def _amdahl_in_words(speed):
    """Amdahl's law, fitted to samples per second by number of ranks, and what it predicts.

    The law: seconds per sample = shared / ranks + serial. Sending gradients around a ring of ranks
    takes a time of the same form, with its (ranks - 1) / ranks.
    """
    ranks, measured = speed.index.to_numpy(), 1 / speed.to_numpy()
    terms = numpy.stack([1 / ranks, numpy.ones(len(ranks))], axis=1) / measured[:, None]
    (shared, serial), _ = nnls(terms, numpy.ones(len(ranks)))  # neither is negative
    off = abs(terms @ (shared, serial) - 1).max()
    first, beyond = ranks[0], max(8, 2 * ranks[-1])
    gain = (shared / first + serial) / (shared / beyond + serial)
    hint = ", which two numbers of ranks hardly test: measure three" if len(ranks) < 3 else ""
    return (
        f"By Amdahl's law {serial / (shared + serial):.0%} of the time on one rank is not shared "
        "out: what every rank computes again, and the exchange of gradients. The law misses the "
        f"measured times by up to {off:.0%}{hint}. On {beyond} ranks that each have a core or GPU "
        f"of their own, it says {gain:.2f} times as fast as {first}: a rough guess."
    )


def draw(title: str, frames: dict, table: pandas.DataFrame) -> Figure:
    """Three panels: speed against ranks, loss against samples, loss against seconds."""
    figure = Figure(figsize=(13, 4.2), layout="constrained")
    figure.suptitle(title)
    of_speed, *of_loss = figure.subplots(1, 3)
    ranks, speed = table.index.to_numpy(), table["samples/s"].to_numpy()
    of_speed.fill_between(
        ranks,
        table["slowest"],
        table["fastest"],
        facecolor=("tab:blue", 0.2),
        edgecolor="tab:blue",
        label="slowest to fastest epoch",
    )
    of_speed.plot(ranks, speed, "o-", label="measured")
    of_speed.plot(ranks, speed[0] * ranks / ranks[0], "--", color="grey", label="ideal")
    of_speed.set(xlabel="ranks", xticks=ranks, ylabel="samples / s", ylim=(0, None))
    for axes, x in zip(of_loss, ("samples", "seconds")):
        axes.set(xlabel=x, ylabel="loss")
        for place, (number, rows) in enumerate(frames.items()):
            losses = rows[rows["loss"].notna()]
            part = (losses["samples"] - 1) * SMOOTHED // losses["samples"].max()
            points = losses.groupby(part)[["samples", "seconds", "loss"]].mean()
            width = 2 * (len(frames) - place)  # equal curves are seen: the widest lies below
            look = line_style(place, "color", "linestyle")
            axes.plot(points[x], points["loss"], linewidth=width, label=f"ranks: {number}", **look)
    for axes in (of_speed, *of_loss):
        axes.legend()
    return figure


def main() -> None:
    """Take everything from the environment, where make puts it."""
    for name in ("RESUME", "CHECKPOINT"):  # of one run, which a study is not
        os.environ.pop(name, None)
    try:
        path = tutorial_path(os.environ.get("TUTORIAL", ""))
        ranks = numbers_of_ranks(os.environ.get("WORKERS") or "1 2")
        check_choices(program_of(path), max(ranks))
        study(path.stem, ranks)
    except Error as error:
        sys.exit(f"\nError: {error}")


if __name__ == "__main__":
    main()
