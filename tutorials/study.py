"""The study of the article behind `dogs`, on real ranks, and beside it a fair one.

    make study TUTORIAL=dogs WORKERS="1 2 4"

The article's design: each rank has its batch, the rate grows with the ranks, and the runs are
compared by iteration. The fair one: the batch of all ranks together and the rate are the same in
all runs, and these are compared by the images that a run has seen. Every run is a `make run
PRESET=original` in the folder of the study, and what is compared is read from what it leaves. A
study that was stopped goes on with `RESUME=` and its folder.
"""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas
from matplotlib.figure import Figure
from tqdm import tqdm

import ddp_common as ddp
from dask_ranks.run.folders import local, new_directory, shown
from dask_ranks.run.run_directory import read_records
from ddp_common.errors import Error
from tutorials import kit
from tutorials.helpers import line_style
from tutorials.kit import parameters
from tutorials.kit.beforehand import check_choices
from tutorials.kit.cli import tutorial_path
from tutorials.scaling import numbers_of_ranks, of_equal_ranks

# What two cores train in minutes. What SET says comes after it, and counts.
SMALL = "resize=64 crop=64 batch_per_rank=8 loader_workers=0 epochs=1"
LOOKS = 8  # at the held-out images, in an epoch
POINTS = 25  # of a curve of training
LABELS = {"step": "iterations", "samples": "images seen"}
PANELS = {
    "loss": "training loss",
    "accuracy": "training accuracy",
    "held_out_loss": "held-out loss",
    "held_out_accuracy": "held-out accuracy",
}


@dataclass
class Training:
    """A run of the study: its design, and what is given to it."""

    design: str  # "article" or "fair"
    ranks: int
    batch_size: int  # of all ranks together
    learning_rate: float
    folder: Path

    def words(self) -> str:
        """For SET."""
        return f"batch_size={self.batch_size} learning_rate={self.learning_rate!r}"


def trainings(ranks: Sequence[int], folder: Path, batch: int, rate: float) -> list[Training]:
    """The runs of both designs; `batch` and `rate` are those of one rank."""
    largest = max(ranks)
    found = []
    for design, times in (("article", ranks), ("fair", [largest] * len(ranks))):
        for number, k in zip(ranks, times):
            place = folder / f"{design}-{number}-ranks"
            found.append(Training(design, number, batch * k, rate * k, place))
    return found


def train(run: Training, options: str, looks: str, images: int, bar: tqdm) -> None:
    """Train it, unless it has been, and move the bar on by its `images`.

    Raises `Error` if it fails.
    """
    before = bar.n
    bar.set_description(f"{run.design}, {run.ranks} rank(s)")
    if not parameters.has_finished(run.folder):
        own = {"WORKERS": str(run.ranks), "CHECKPOINT": str(run.folder), "OPTIONS": options}
        chosen = f"{looks} {os.environ['SET']} {run.words()}"
        command = [sys.executable, "-m", "tutorials", "run", "dogs"]
        with open(run.folder.with_suffix(".txt"), "a") as said:
            process = subprocess.Popen(
                command,
                env={**os.environ, **own, "SET": chosen, "DDP_PROGRESS": "off"},
                stdout=said,
                stderr=subprocess.STDOUT,
            )
            try:
                while process.poll() is None:
                    time.sleep(0.5)
                    bar.n = before + seen(run.folder)
                    bar.refresh()
            except KeyboardInterrupt:  # the terminal has told the run, too
                process.wait()
                raise
        if process.returncode:
            last = Path(said.name).read_text().strip().splitlines()[-3:]
            raise Error(f"The run in {shown(run.folder)} was not finished:\n" + "\n".join(last))
    bar.n = before + images
    bar.refresh()


def seen(folder: Path) -> int:
    """How many images a run has trained on, as its reports say."""
    path = folder / "metrics.jsonl"
    records = read_records(path) if path.is_file() else ()
    return max((record.get("samples", 0) for record in records), default=0)


def curve(run: Training) -> pandas.DataFrame:
    """What a run reported: a row for each step, means over ranks."""
    table = pandas.read_json(run.folder / "metrics.jsonl", lines=True)
    columns = ["step", "samples", "rate", *PANELS]
    return table[columns].groupby("step").mean().reset_index()


def compare(runs: dict[str, tuple[Training, pandas.DataFrame]]) -> pandas.DataFrame:
    """A row for each run: what it was, and its held-out accuracy at equal steps, and images."""
    least = {x: min(table[x].max() for _, table in runs.values()) for x in ("step", "samples")}
    rows = []
    for run, rows_of_run in runs.values():
        judged = rows_of_run.dropna(subset="held_out_accuracy")
        row = {
            "design": run.design,
            "ranks": run.ranks,
            "batch": run.batch_size,
            "rate": run.learning_rate,
            "rate at the end": rows_of_run["rate"].iloc[-1],
            "steps": int(rows_of_run["step"].max()),
        }
        for x, most in least.items():
            upto = judged[judged[x] <= most]
            row[f"after {most:,.0f} {LABELS[x]}"] = (
                upto["held_out_accuracy"].iloc[-1] if len(upto) else None
            )
        row["in the end"] = judged["held_out_accuracy"].iloc[-1]
        rows.append(row)
    return pandas.DataFrame(rows).set_index(["design", "ranks"])


def draw(runs: dict[str, tuple[Training, pandas.DataFrame]], x: str, title: str) -> Figure:
    """Four panels against `x`: loss and accuracy, of training and of held-out images.

    A line for each run, dashed for those of the fair design.
    """
    figure = Figure(figsize=(10, 6.6), layout="constrained")
    figure.suptitle(title)
    numbers = sorted({run.ranks for run, _ in runs.values()})
    for axes, (column, name) in zip(figure.subplots(2, 2).flat, PANELS.items()):
        axes.set(xlabel=LABELS[x], ylabel=name)
        for run, table in runs.values():
            rows = table.dropna(subset=column)
            part = (rows["step"] - 1) * POINTS // rows["step"].max()  # means of neighbours
            points = rows.groupby(part)[[x, column]].mean()
            is_fair = run.design == "fair"
            axes.plot(
                points[x],
                points[column],
                linestyle="--" if is_fair else "-",
                label=f"{run.ranks} rank(s), batch {run.batch_size}{', fair' if is_fair else ''}",
                **line_style(numbers.index(run.ranks), "color", "marker"),
            )
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def write(runs: dict[str, tuple[Training, pandas.DataFrame]], folder: Path) -> None:
    """Write the table and the pictures of the study, and print the table."""
    table = compare(runs)
    table.to_csv(folder / "study.csv")
    article = {name: each for name, each in runs.items() if each[0].design == "article"}
    by_iteration = draw(article, "step", "The article's design: more ranks, by iteration")
    by_iteration.savefig(folder / "by-iteration.png")
    by_images = draw(runs, "samples", "The same runs by images seen; dashed: batch and rate fixed")
    by_images.savefig(folder / "by-images.png")
    print(f"\n{table.round(3).to_string(na_rep='–')}\n\nAll of it is in {shown(folder)}/")


def study(numbers: Sequence[int], folder: Path, values: dict) -> None:
    """Train all runs of a study in its folder, and compare them; `values` are the settings."""
    path = kit.fetch("dogs", values["data"]).path
    images = ddp.ImageFolder(path, size=values["resize"], anonymous=values["anonymous"])
    training, _ = ddp.split(len(images), [values["held_out"]], seed=values["seed"])
    folder.mkdir(parents=True, exist_ok=True)
    options = of_equal_ranks(os.environ.get("OPTIONS", ""), numbers)
    wanted = trainings(numbers, folder, values["batch_per_rank"], values["rate_per_rank"])
    steps = [-(-len(training) // run.batch_size) for run in wanted]  # of an epoch
    if values["steps"]:
        steps = [min(each, values["steps"]) for each in steps]
    of_runs = [
        values["epochs"] * min(len(training), number * run.batch_size)
        for number, run in zip(steps, wanted)
    ]
    runs = {}
    with tqdm(total=sum(of_runs), unit=" images", disable=None) as bar:
        for run, number, all_images in zip(wanted, steps, of_runs):
            looks = max(1, number // LOOKS)
            train(run, options, f"evaluate_every={looks}", all_images, bar)
            runs[run.folder.name] = run, curve(run)
            tqdm.write(f"{run.folder.name}: {all_images:,} images")
    write(runs, folder)


def main() -> None:
    """Take everything from the environment, where make puts it."""
    resumed = os.environ.pop("RESUME", None)  # the folder of a study, not of a run
    os.environ.pop("CHECKPOINT", None)
    try:
        path = tutorial_path(os.environ.get("TUTORIAL") or "dogs")
        if path.stem != "dogs":
            raise Error(
                "make study takes TUTORIAL=dogs, whose article compares numbers of workers."
            )
        numbers = numbers_of_ranks(os.environ.get("WORKERS") or "1 2 4")
        os.environ |= {"PRESET": "original", "SET": f"{SMALL} {os.environ.get('SET', '')}"}
        check_choices(parameters.program_of(path), max(numbers))
        assert parameters.chosen is not None, "the settings were checked"
        folder = local(resumed) if resumed else Path(new_directory("study/dogs"))
        study(numbers, folder, parameters.chosen.values)
    except Error as error:
        sys.exit(f"\nError: {error}")
    except KeyboardInterrupt:
        sys.exit(f"\nStopped. Go on with the same command and RESUME={shown(folder)}")


if __name__ == "__main__":
    main()
