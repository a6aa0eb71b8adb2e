"""Does more hardware help? One tutorial on several numbers of ranks, compared at equal samples seen.

Every number of ranks is a `make run` of its own in the folder of the study; what is compared is read from what those runs leave. The
study therefore needs nothing of a tutorial but a setting `batch_size`, the global batch, and a loss that every rank reports.
"""

import json
import os
import re
import subprocess
import sys
import time

import pandas

from ddp_common.clusters.profiles import gpus
from ddp_common.errors import Error
from ddp_common.run.places import new_directory, shown

SMOOTHED = 20  # points of a curve of the training loss
SAME = 0.02  # losses that differ by less, relatively, are called the same


def study(tutorial, ranks, echo):
    """Train `tutorial` on each of `ranks` (list of int), compare, and leave scaling.csv, curves.csv, scaling.png and scaling.txt.

    Returns the folder of the study. Raises `Error` when a run fails; the runs before it are compared all the same.
    """
    folder, frames, failed = new_directory(f"scaling/{tutorial}", local=True), {}, None
    options = of_equal_ranks(os.environ.get("OPTIONS", ""), ranks)
    for number in ranks:
        echo(f"\n{tutorial} on {number} rank{'s' * (number > 1)}", err=True)
        directory = folder / f"{number}-ranks"
        variables = {
            **os.environ,
            "WORKERS": str(number),
            "CHECKPOINT": str(directory),
            "OPTIONS": options,
        }
        code = subprocess.run(
            [sys.executable, "-m", "ddp_common", "run", tutorial], env=variables
        ).returncode
        if code:
            failed = f"The run on {number} rank{'s' * (number > 1)} ended with code {code}; what it said stands above."
            break
        frames[number] = curve(directory)
    if frames:
        table = compare(frames)
        cores = (
            None
            if os.environ.get("CLUSTER", "local") not in ("", "local", "torchrun")
            else available_cores()
        )
        words = in_words(tutorial, frames, table, cores)
        table.to_csv(folder / "scaling.csv")
        pandas.concat(frames, names=["ranks"]).reset_index("ranks").to_csv(
            folder / "curves.csv", index=False
        )
        (folder / "scaling.txt").write_text(words + "\n")
        draw(frames, table, cores, f"{tutorial}: does more hardware help?").savefig(
            folder / "scaling.png", dpi=110, bbox_inches="tight"
        )
        echo(
            f"\n{table.round(3).to_string()}\n\n{words}\n\n{shown(folder)}/: scaling.png, scaling.csv, curves.csv, scaling.txt, and a folder for each run"
        )
    if failed:
        raise Error(failed)
    return folder


def numbers_of_ranks(text):
    """[1, 2, 4] from "1 2 4" or "1,2,4". Raises `Error` for anything else."""
    words = re.split(r"[\s,]+", text.strip())
    if not all(word.isdecimal() and len(word) < 5 and int(word) for word in words):
        raise Error(
            f'WORKERS={text!r}: a study takes the numbers of ranks to compare, such as WORKERS="1 2 4".'
        )
    return sorted({int(word) for word in words})


def of_equal_ranks(options, ranks):
    """OPTIONS for all runs of a study. On this machine one rank would get all cores: here it gets as many threads as in the largest run."""
    if (
        os.environ.get("CLUSTER", "local") not in ("", "local")
        or "threads_per_worker" in options
        or gpus()
    ):
        return options
    return f"{options} threads_per_worker={max(1, available_cores() // max(ranks))}".strip()


def available_cores():
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def curve(directory):
    """What a run reported, a row for each step: epoch, samples, seconds since its first step, loss (mean over ranks), and other scalars.

    Raises `Error` for a run that reported no loss with a position of a sampler.
    """
    metrics = pandas.DataFrame(
        map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    )
    if not {"loss", "samples", "step"} <= set(metrics):
        raise Error(
            f"{shown(directory)} has no curve: its ranks reported no `loss` while an ElasticSampler counted steps."
        )
    steps = metrics.select_dtypes("number").drop(columns="rank").groupby("step")
    rows = steps.mean().assign(
        time=steps["time"].min()
    )  # an evaluation after a step is reported later, but belongs to it
    rows["seconds"] = rows["time"] - rows["time"].min()
    return rows.drop(columns="time").reset_index()


def throughputs(rows):
    """Samples per second of each epoch: without its first step, and what lies between two epochs."""
    steps = rows[rows["loss"].notna()]
    for _, epoch in steps.groupby("epoch"):
        if len(epoch) > 1:
            yield (epoch["samples"].iloc[-1] - epoch["samples"].iloc[0]) / (
                epoch["seconds"].iloc[-1] - epoch["seconds"].iloc[0]
            )


def compare(frames):
    """A DataFrame, a row for each number of ranks: samples/s (median of the epochs, least, most), efficiency, samples, seconds, losses.

    Efficiency is the speed of each rank over that of each rank of the smallest run. Every loss is the mean of a twentieth of the
    samples, before the number of samples that all runs have seen.
    """
    equal = min(rows["samples"].max() for rows in frames.values())
    lines = []
    for ranks, rows in frames.items():
        speed = pandas.Series(throughputs(rows), dtype=float)
        until = rows[rows["samples"] <= equal]
        last = until[until["samples"] > equal * (1 - 1 / SMOOTHED)]
        lines.append(
            {
                "ranks": ranks,
                "samples/s": speed.median(),
                "slowest": speed.min(),
                "fastest": speed.max(),
                "samples": int(equal),
                "steps": int(until["step"].max()),
                "seconds": until["seconds"].max(),
                "loss": last["loss"].mean(),
                **{
                    name: rows[name].dropna().iloc[-1]
                    for name in rows
                    if name.startswith("validation_")
                },
            }
        )
    table = pandas.DataFrame(lines).set_index("ranks")
    per_rank = table["samples/s"] / table.index
    table.insert(3, "efficiency", per_rank / per_rank.iloc[0])
    return table


def in_words(tutorial, frames, table, cores):
    """What the numbers say, in sentences."""
    first, others = table.index[0], table.index[1:]
    said = [
        f"{tutorial} on {_listed(table.index)} ranks, compared after {table['samples'].iloc[0]:,} samples."
    ]
    for ranks in others:
        ratio = table["samples/s"].loc[ranks] / table["samples/s"].loc[first]
        said.append(
            f"{ranks} ranks train {ratio:.2f} times as fast as {first} (ideal: {ranks / first:g}; efficiency {table['efficiency'].loc[ranks]:.2f})."
        )
    if len(table) > 1:
        worst = (table["loss"] / table["loss"].loc[first] - 1).abs().idxmax()
        difference = table["loss"].loc[worst] / table["loss"].loc[first] - 1
        if abs(difference) < SAME:
            gave = (
                "a faster model, not a better one"
                if table["samples/s"].idxmax() != first
                else "neither a faster model nor a better one"
            )
            said.append(
                f"The loss is the same to {max(abs(difference), 0.0005):.1%}: more ranks gave {gave}."
            )
        else:
            steps, steps_of_first = table["steps"].loc[worst], table["steps"].loc[first]
            why = (
                (
                    "in as many steps with the same samples. That is rounding, which a deep network amplifies, or batch normalisation of each rank's own "
                    "share; more hardware did not make the model better or worse"
                )
                if steps == steps_of_first
                else (
                    f"the number of ranks changed the training, as when the global batch grows with it; it took {steps:,} steps instead of {steps_of_first:,}"
                )
            )
            said.append(
                f"With {worst} ranks the loss is {abs(difference):.0%} {'higher' if difference > 0 else 'lower'} than with {first}: {why}."
            )
    if cores and table.index[-1] > cores:
        said.append(
            f"There are {cores} cores here: beyond {cores} ranks they share them, so nothing is learned about a machine that has more."
        )
    return " ".join(said)


def _listed(values):
    *most, last = map(str, values)
    return f"{', '.join(most)} and {last}" if most else last


def draw(frames, table, cores, title):
    """A figure of four panels: throughput, efficiency, loss against samples, loss against seconds."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import EngFormatter

    figure, ((speed, efficiency), (by_samples, by_seconds)) = plt.subplots(
        2, 2, figsize=(10, 7), layout="constrained"
    )
    ranks, samples = table.index.to_numpy(), table["samples/s"].to_numpy()
    spread = [samples - table["slowest"], table["fastest"] - samples]
    speed.errorbar(
        ranks,
        samples,
        yerr=spread,
        marker="o",
        capsize=3,
        label="measured (slowest and fastest epoch)",
    )
    speed.plot(ranks, samples[0] * ranks / ranks[0], "--", color="grey", label="ideal")
    speed.set(ylabel="samples / s", ylim=(0, None))
    efficiency.plot(ranks, table["efficiency"], marker="o")
    efficiency.axhline(1, linestyle="--", color="grey")
    efficiency.set(ylabel="efficiency", ylim=(0, max(1.25, 1.1 * table["efficiency"].max())))
    for axes in (speed, efficiency):
        axes.set(xlabel="ranks", xticks=ranks)
        if cores and ranks[-1] > cores:
            axes.axvspan(
                cores + 0.5 * (ranks[ranks > cores][0] - cores),
                ranks[-1] * 1.05,
                color="tab:red",
                alpha=0.12,
                label=f"more ranks than the {cores} cores here",
            )
    speed.legend()
    for place, (number, rows) in enumerate(frames.items()):
        colour, width = (
            f"C{place}",
            2 * (len(frames) - place),
        )  # curves that are the same lie on each other, the widest below
        losses = rows[rows["loss"].notna()]
        part = (losses["samples"] - 1) * SMOOTHED // losses["samples"].max()
        points = losses.groupby(part)[["samples", "seconds", "loss"]].mean()
        for axes, x in ((by_samples, "samples"), (by_seconds, "seconds")):
            axes.plot(
                points[x],
                points["loss"],
                color=colour,
                linewidth=width,
                label=f"{number} rank{'s' * (number > 1)}",
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
    by_samples.set(
        xlabel="samples seen",
        ylabel="loss" + " (dotted: validation)" * ("validation_loss" in rows),
    )
    by_samples.xaxis.set_major_formatter(EngFormatter(sep=""))
    by_seconds.set(xlabel="seconds since the first step")
    by_samples.legend()
    figure.suptitle(f"{title}\n{time.strftime('%Y-%m-%d')}, {_machine()}")
    return figure


def _machine():
    where = os.environ.get("CLUSTER") or "local"
    return f"CLUSTER={where}" + f", {available_cores()} cores" * (where in ("local", "torchrun"))
