"""Does more hardware help? One tutorial on several numbers of ranks, at equal samples seen.

Every number of ranks is a `make run` of its own in the folder of the study, and what is compared
is read from what those runs leave. So a study relies on two things of a tutorial: a setting
`batch_size`, the global batch, and a loss that every rank reports.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pandas

from ddp_common.clusters.profiles import gpus
from ddp_common.errors import Error
from ddp_common.run.places import new_directory, shown
from ddp_common.run.run_directory import read_record
from ddp_common.teaching import step_time
from ddp_common.without_dask.starting import available_cores

SMOOTHED = 20  # points of a curve of the training loss
SAME = 0.02  # losses that differ by less, relatively, are called the same
INTERRUPTED = 128 + signal.SIGINT  # the exit code of a run that Ctrl-C has ended
BEYOND = 8  # ranks, for which a step is predicted; if as many were measured, twice the largest


def study(tutorial: str, ranks: Sequence[int], echo: Callable) -> Path:
    """Train `tutorial` on each number of `ranks`, and compare.

    Returns the folder of the study, with scaling.csv, curves.csv, scaling.png and scaling.txt;
    `echo` prints as click.echo does. Raises `Error` when a run fails; the runs before it are
    compared all the same.
    """
    folder = Path(new_directory(f"scaling/{tutorial}", local=True))
    options = of_equal_ranks(os.environ.get("OPTIONS", ""), ranks)
    frames = {}  # number of ranks -> its curve
    failed = None
    for number in ranks:
        echo(f"\n{tutorial} on {_counted(number)}", err=True)
        directory = folder / f"{number}-ranks"
        code = _train(tutorial, number, directory, options)
        if code == INTERRUPTED:
            failed = f"Stopped. The runs until then are in {shown(folder)}."
            break
        if code:
            failed = (
                f"The run on {_counted(number)} ended with code {code}; what it said stands above."
            )
            break
        frames[number] = curve(directory)
    if frames:
        _write(tutorial, frames, folder, echo)
    if failed:
        raise Error(failed)
    return folder


def _counted(ranks):
    return "1 rank" if ranks == 1 else f"{ranks} ranks"


def _train(tutorial, number, directory, options):
    """Run `tutorial` on this number of ranks; returns the exit code."""
    variables = {
        **os.environ,
        "WORKERS": str(number),
        "CHECKPOINT": str(directory),
        "OPTIONS": options,
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "ddp_common", "run", tutorial], env=variables
    )
    try:
        return process.wait()
    except KeyboardInterrupt:
        # The terminal has told the run, too: it ends its ranks and says how to go on.
        return _wait_for_its_end(process)


def _wait_for_its_end(process):
    try:
        return process.wait()
    except KeyboardInterrupt:  # again: somebody does not want to wait
        process.terminate()
        return process.wait()


def _write(tutorial, frames, folder, echo):
    """Compare the curves and write the files of the study."""
    table = compare(frames)
    is_here = os.environ.get("CLUSTER", "local") in ("", "local", "torchrun")
    cores = available_cores() if is_here else None
    words = in_words(tutorial, frames, table, cores)
    table.to_csv(folder / "scaling.csv")
    curves = pandas.concat(frames, names=["ranks"]).reset_index("ranks")
    curves.to_csv(folder / "curves.csv", index=False)
    (folder / "scaling.txt").write_text(words + "\n")
    figure = draw(frames, table, cores, f"{tutorial}: does more hardware help?")
    figure.savefig(folder / "scaling.png", dpi=110, bbox_inches="tight")
    echo(
        f"\n{table.round(3).to_string()}\n\n{words}\n\n"
        f"{shown(folder)}/: scaling.png, scaling.csv, curves.csv, scaling.txt, "
        "and a folder for each run"
    )


def numbers_of_ranks(text: str) -> list[int]:
    """[1, 2, 4] from "1 2 4" or "1,2,4". Raises `Error` for anything else."""
    words = re.split(r"[\s,]+", text.strip())
    if not all(word.isdecimal() and len(word) < 5 and int(word) for word in words):
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
    if os.environ.get("CLUSTER", "local") not in ("", "local"):
        return options
    if "threads_per_worker" in options or gpus():
        return options
    threads = max(1, available_cores() // max(ranks))
    return f"{options} threads_per_worker={threads}".strip()


def curve(directory: Path) -> pandas.DataFrame:
    """What a run reported, a row for each step.

    The columns are step, epoch, samples, seconds (since the run's first step), loss (mean over
    ranks) and other numbers that were reported. Raises `Error` for a run that reported no loss
    with a position of a sampler.
    """
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    metrics = pandas.DataFrame(map(read_record, lines))
    if not {"loss", "samples", "step"} <= set(metrics):
        raise Error(
            f"{shown(directory)} has no curve: its ranks reported no `loss` "
            "while an ElasticSampler counted steps."
        )
    steps = metrics.select_dtypes("number").drop(columns="rank").groupby("step")
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


def in_words(tutorial: str, frames: dict, table: pandas.DataFrame, cores: int | None) -> str:
    """What the numbers say, in sentences; `cores` are those of this machine if it has trained."""
    first = table.index[0]
    samples = table["samples"].iloc[0]
    sentences = [
        f"{tutorial} on {_listed(table.index)} ranks, compared after {samples:,} samples."
    ]
    has_speed = bool(table["samples/s"].notna().all())
    for ranks in table.index[1:] if has_speed else []:
        ratio = table["samples/s"].loc[ranks] / table["samples/s"].loc[first]
        efficiency = table["efficiency"].loc[ranks]
        sentences.append(
            f"{ranks} ranks train {ratio:.2f} times as fast as {first} "
            f"(ideal: {ranks / first:g}; efficiency {efficiency:.2f})."
        )
    if len(table) > 1:
        sentences.append(_losses_in_words(table, first))
    if len(table) > 1 and has_speed:
        sentences.append(model_in_words(table))
    if not has_speed:
        sentences.append(
            "Speed is measured between the steps of an epoch, and there is an epoch of one step: "
            "train on more samples, or with a smaller batch."
        )
    if cores and table.index[-1] > cores:
        sentences.append(
            f"There are {cores} cores here: beyond {cores} ranks they share them, "
            "so nothing is learned about a machine that has more."
        )
    return " ".join(sentences)


def model_in_words(table: pandas.DataFrame) -> str:
    """The model of the step time, fitted to the rows of `compare`, and what it predicts.

    Bytes and buckets are those of one tutorial, so they are the same in each row. The global
    batch need not be: it may grow with the ranks.
    """
    ranks = list(table.index)
    batches = table["samples"] / table["steps"]
    seconds = batches / table["samples/s"]
    model = step_time.fit(ranks, seconds.tolist(), work=batches.tolist())
    beyond = BEYOND if max(ranks) < BEYOND else 2 * max(ranks)
    words = step_time.in_words(model, ranks, beyond, work=float(batches.iloc[-1]))
    return (
        f"{words} Computing that every rank repeats counts as transfer: here the two look alike."
    )


def _losses_in_words(table, first):
    """Whether the losses are those of the run on `first` ranks, and what it means."""
    loss = table["loss"]
    worst = (loss / loss.loc[first] - 1).abs().idxmax()
    difference = loss.loc[worst] / loss.loc[first] - 1
    if abs(difference) < SAME:
        if table["samples/s"].isna().any():
            gave = "no better model"
        elif table["samples/s"].idxmax() != first:
            gave = "a faster model, not a better one"
        else:
            gave = "neither a faster model nor a better one"
        accuracy = max(abs(difference), 0.0005)
        return f"The loss is the same to {accuracy:.1%}: more ranks gave {gave}."

    steps = table["steps"].loc[worst]
    steps_of_first = table["steps"].loc[first]
    if steps == steps_of_first:
        why = (
            "in as many steps with the same samples. That is rounding, which a deep network "
            "amplifies, or batch normalisation of each rank's own share; more hardware did not "
            "make the model better or worse"
        )
    else:
        why = (
            "the number of ranks changed the training, as when the global batch grows with it; "
            f"it took {steps:,} steps instead of {steps_of_first:,}"
        )
    compared = "higher" if difference > 0 else "lower"
    return (
        f"With {worst} ranks the loss is {abs(difference):.0%} {compared} "
        f"than with {first}: {why}."
    )


def _listed(values):
    *most, last = map(str, values)
    return f"{', '.join(most)} and {last}" if most else last


def draw(frames: dict, table: pandas.DataFrame, cores: int | None, title: str):
    """A matplotlib figure of four panels.

    They are throughput, efficiency, loss against samples, and loss against seconds.
    """
    import matplotlib.pyplot as plt  # slow to import, and a study has minutes of training before

    figure, panels = plt.subplots(2, 2, figsize=(10, 7), layout="constrained")
    (speed, efficiency), (by_samples, by_seconds) = panels
    _draw_speed(speed, table)
    _draw_efficiency(efficiency, table)
    for axes in (speed, efficiency):
        _mark_ranks(axes, table.index.to_numpy(), cores)
    speed.legend()
    _draw_losses(by_samples, by_seconds, frames)
    figure.suptitle(f"{title}\n{time.strftime('%Y-%m-%d')}, {_machine()}")
    return figure


def _draw_speed(axes, table):
    ranks = table.index.to_numpy()
    speed = table["samples/s"].to_numpy()
    axes.errorbar(
        ranks,
        speed,
        yerr=[speed - table["slowest"], table["fastest"] - speed],
        marker="o",
        capsize=3,
        label="measured (slowest and fastest epoch)",
    )
    axes.plot(ranks, speed[0] * ranks / ranks[0], "--", color="grey", label="ideal")
    axes.set(ylabel="samples / s", ylim=(0, None))


def _draw_efficiency(axes, table):
    axes.plot(table.index.to_numpy(), table["efficiency"], marker="o")
    axes.axhline(1, linestyle="--", color="grey")
    axes.set(ylabel="efficiency", ylim=(0, max(1.25, 1.1 * table["efficiency"].max())))


def _mark_ranks(axes, ranks, cores):
    """Label the numbers of ranks; shade those for which there are too few `cores`."""
    axes.set(xlabel="ranks", xticks=ranks)
    if cores and ranks[-1] > cores:
        first_beyond = ranks[ranks > cores][0]
        axes.axvspan(
            cores + 0.5 * (first_beyond - cores),
            ranks[-1] * 1.05,
            color="tab:red",
            alpha=0.12,
            label=f"more ranks than the {cores} cores here",
        )


def _draw_losses(by_samples, by_seconds, frames):
    from matplotlib.ticker import EngFormatter  # as in `draw`

    for place, (number, rows) in enumerate(frames.items()):
        colour = f"C{place}"
        # Curves that are the same lie on each other, the widest below.
        width = 2 * (len(frames) - place)
        losses = rows[rows["loss"].notna()]
        part = (losses["samples"] - 1) * SMOOTHED // losses["samples"].max()
        points = losses.groupby(part)[["samples", "seconds", "loss"]].mean()
        for axes, x in ((by_samples, "samples"), (by_seconds, "seconds")):
            axes.plot(
                points[x], points["loss"], color=colour, linewidth=width, label=_counted(number)
            )
            if "validation_loss" in rows:
                held_out = rows[rows["validation_loss"].notna()]
                axes.plot(
                    held_out[x],
                    held_out["validation_loss"],
                    "o:",
                    color=colour,
                    markersize=4,
                    linewidth=1,
                )
    label = "loss (dotted: validation)" if "validation_loss" in rows else "loss"
    by_samples.set(xlabel="samples seen", ylabel=label)
    by_samples.xaxis.set_major_formatter(EngFormatter(sep=""))
    by_samples.legend()
    by_seconds.set(xlabel="seconds since the first step")


def _machine():
    where = os.environ.get("CLUSTER") or "local"
    words = f"CLUSTER={where}"
    if where in ("local", "torchrun"):
        words += f", {available_cores()} cores"
    return words
