"""The command line: `python -m ddp_common run|data|scaling|doctor …`. The Makefile is a thin skin over it.

A tutorial is one file for the notebook and for the command line. `run` executes its cells from top to bottom as a notebook does, but
for those tagged as part of the lesson (proofs, exercises, demonstrations): what is left is the job itself.
"""

import json
import math
import os
import re
import shlex
import signal
import sys
import time
from pathlib import Path

import click

import ddp_common
from ddp_common.errors import Error, RunStopped
from ddp_common.ranks.checkpoint_files import newest, step_of
from ddp_common.run.config import resumed_config
from ddp_common.run.places import local, new_directory, shown
from ddp_common.values import whole_number
from ddp_common.without_dask.launchers import LAUNCHERS, started_by

TUTORIALS = Path(__file__).parents[2] / "tutorials"
LESSON_TAGS = {"lesson", "proof", "exercise", "solution", "instructor"}


class Commands(click.Group):
    """Says errors that a person can put right in one message, without a traceback."""

    def invoke(self, context):
        try:
            return super().invoke(context)
        except RunStopped as stopped:
            click.echo(f"\n{stopped}", err=True)
            context.exit(128 + signal.SIGTERM)
        except Error as error:
            click.echo(f"\nError: {error}", err=True)
            context.exit(1)
        except KeyboardInterrupt:  # while training, `execute` answers it
            click.echo("\nStopped. Nothing had begun.", err=True)
            context.exit(128 + signal.SIGINT)


@click.group(cls=Commands, context_settings={"show_default": True})
def main():
    """Train the tutorials' models with DistributedDataParallel on Dask clusters."""


@main.command()
@click.argument("tutorial", envvar="TUTORIAL", default="")
@click.option(
    "--cluster",
    envvar="CLUSTER",
    help="profile in clusters/, a .yaml file, tcp://host:port, torchrun or srun  [default: local]",
)
@click.option("--workers", envvar="WORKERS", help="number of ranks  [default: the profile's]")
@click.option("--preset", envvar="PRESET", help="laptop, or full where the tutorial has it")
@click.option("--set", "values", envvar="SET", help='settings, "epochs=2 batch_size=128"')
@click.option("--resume", envvar="RESUME", help="directory of an earlier run to go on from")
@click.option(
    "--checkpoint",
    envvar="CHECKPOINT",
    help="directory to begin a run in, or to go on if one has begun there",
)
@click.option(
    "--options",
    envvar="OPTIONS",
    help='options of the profile for this once, "queue=gpu walltime=02:00:00"',
)
@click.option(
    "--dry", envvar="DRY", is_flag=True, help="print what would be submitted, and submit nothing"
)
@click.option(
    "--restarts",
    envvar="RESTARTS",
    help="how often to go on by itself after a failure  [default: 0]",
)
def run(tutorial, dry, **choices):
    """Train TUTORIAL (such as pets) and leave a run directory."""
    path = tutorial_path(tutorial)
    outside({"SET": choices.pop("values"), **choices})
    launcher = choices["cluster"] if choices["cluster"] in LAUNCHERS else None
    is_rank = (
        launcher is not None
        and started_by() == launcher
        or choices["cluster"] is None
        and started_by() is not None
    )
    count = check_choices(path, choices["workers"], is_rank)
    if dry:
        from ddp_common.clusters.connect import describe

        click.echo(describe(choices["cluster"] or "local", choices["workers"], tutorial))
        return
    if is_rank:
        check_resumable(choices["resume"])
    else:
        announce(tutorial, choices, count)
    os.environ.setdefault("DDP_PROGRESS", "bar" if sys.stderr.isatty() else "lines")
    if launcher is not None and not is_rank:
        from ddp_common.clusters.profiles import number_of_workers
        from ddp_common.without_dask.starting import start_ranks

        if not (choices["resume"] or choices["checkpoint"]):
            os.environ["CHECKPOINT"] = str(
                new_directory(tutorial)
            )  # so that a restarted rank finds it
        restarts = whole_number("RESTARTS", choices["restarts"] or 0, least=0)
        try:
            start_ranks(
                launcher, tutorial, number_of_workers(choices["workers"] or "auto"), restarts
            )
        except (Error, SystemExit):
            click.echo(
                resume_hint(tutorial, os.environ.get("CHECKPOINT") or choices["resume"]), err=True
            )
            raise
    else:
        execute(tutorial, path)


def check_choices(path, workers, is_rank=False):
    """Raise `Error` for anything that the environment says and that cannot be, before anything is started or written.

    Returns the number of workers, None if that is yet to be seen: at an address, or where there may be GPUs.
    """
    from ddp_common.clusters.profiles import may_have_gpus, number_of_workers, read_profile

    if is_rank:
        return (
            None  # whoever has started the ranks has checked, and each checks its settings again
        )
    check_settings(path)
    check_place(os.environ.get("CHECKPOINT"))
    cluster = os.environ.get("CLUSTER") or "local"
    profile = {"workers": "auto"} if cluster in LAUNCHERS else read_profile(cluster)
    wanted = workers or profile["workers"]
    if wanted == "auto" and ("://" in cluster or may_have_gpus()):
        return None
    return number_of_workers(wanted)


def check_settings(path):
    """Let the tutorial's own call of `settings` look at SET, PRESET, RESUME and CHECKPOINT: its cell with the tag 'parameters'."""
    cell = cells_with_tag(path.read_text(), "parameters")
    try:
        exec(compile(cell, path, "exec"), {"__name__": "__main__", "ddp": ddp_common})
    except NameError:
        return  # a cell that needs more of the program than `ddp` is checked when its turn comes


def check_place(directory):
    """Raise `Error` if the folder `directory`, that of CHECKPOINT, can be none."""
    if not directory or "://" in directory:
        return
    place = Path(directory)
    while not os.path.lexists(place) and place != place.parent:
        place = place.parent
    if not place.is_dir():
        raise Error(
            f"CHECKPOINT={directory}: {place} is a file, not a folder. Name a folder to begin a run in."
        )
    if not os.access(place, os.W_OK | os.X_OK):
        raise Error(
            f"CHECKPOINT={directory}: you may not write to {place}. Choose a folder that you may write to."
        )


def announce(tutorial, choices, count):
    """Say at once what is going to happen, and where a run goes on."""

    def say(text):
        if os.environ.get("DDP_PROGRESS") != "off":
            click.echo(text)

    if directory := choices["resume"] or choices["checkpoint"]:
        say(f"{tutorial}: the run is in {shown(local(directory))}")
        check_resumable(choices["resume"])
        say(f"{tutorial}: {where_it_goes_on(directory)}")
    cluster, ranks = choices["cluster"] or "local", f"{count or 'the'} worker{'s' * (count != 1)}"
    if cluster == "local":
        say(f"{tutorial}: starting {ranks} on this machine")
    elif "://" in cluster:
        say(f"{tutorial}: connecting to the workers of {cluster}")
    else:
        say(f"{tutorial}: starting {ranks} with CLUSTER={cluster}")


def where_it_goes_on(directory):
    """From which step, and in which epoch, a run goes on; or that it begins."""
    path = local(directory)
    checkpoint = newest(path / "checkpoints")
    if checkpoint is None:
        return "it begins there: no checkpoint yet"
    step = step_of(checkpoint)
    epoch = epoch_of(path / "metrics.jsonl", step)
    return f"it goes on from step {step}{f', in epoch {epoch + 1}' if epoch is not None else ''} ({checkpoint.name})"


def epoch_of(metrics, step):
    """The epoch of a step, from 0, as the ranks have reported it; None if they have not."""
    found = None
    try:
        with open(metrics) as lines:
            for line in lines:
                if f'"step": {step},' in line:
                    found = json.loads(line).get("epoch")
    except (OSError, ValueError):
        return None
    return found if isinstance(found, int) else None


def outside(choices):
    """Let the environment say what was chosen, and nothing that was not: from there the tutorial's own process takes it."""
    for name, value in choices.items():
        os.environ.pop(name.upper(), None)
        if value:
            os.environ[name.upper()] = value


def execute(tutorial, path):
    """Run the job of a tutorial in this process. SIGTERM, which a batch system sends, reaches the ranks if any are training."""
    signal.signal(signal.SIGTERM, pass_on_sigterm)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, note_interrupt)
    os.environ.setdefault("MPLBACKEND", "agg")
    namespace = {"__name__": "__main__", "__file__": str(path)}
    began = time.monotonic()
    try:
        exec(compile(job_source(path.read_text()), path, "exec"), namespace)
    except KeyboardInterrupt as interrupt:
        directory = getattr(interrupt, "directory", None)
        click.echo(
            f"\nStopped{when_it_was(namespace)}.{resume_hint(tutorial, directory)}", err=True
        )
        sys.exit(130)
    except Error as error:
        error.args = (f"{error}{resume_hint(tutorial, getattr(error, 'directory', None))}",)
        raise
    except Exception as error:
        if diverged := where_it_diverged(namespace.get("run")):
            raise Error(
                f"{diverged} So this failed afterwards: {type(error).__name__}: {error}"
            ) from None
        raise
    finally:
        if (client := namespace.get("client")) is not None:
            client.__exit__(*sys.exc_info())
    click.echo(
        f"\nDone in {time.monotonic() - began:.0f} s. {'' if 'run' not in namespace else closing_words(namespace['run'])}"
    )


def when_it_was(namespace):
    """In which part of the job Ctrl-C came, as far as the launch itself does not say."""
    if "run" in namespace:
        return f" after training: the run is whole, in {shown(namespace['run'].directory)}"
    return ""


def where_it_diverged(run):
    """A sentence if the last loss that `run` (a `Run`, or None) reported is no number, else None."""
    losses = [
        (record.get("step"), record["loss"])
        for record in getattr(run, "records", ())
        if isinstance(record.get("loss"), float)
    ]
    if not losses or math.isfinite(losses[-1][1]):
        return None
    step, loss = next((step, loss) for step, loss in losses if not math.isfinite(loss))
    return f"Training diverged: the loss is {loss} from step {step} on. Lower the learning rate, and train again."


def note_interrupt(number, frame):
    from ddp_common.client import attempt

    attempt.interrupted = True
    raise KeyboardInterrupt


def pass_on_sigterm(number, frame):
    from ddp_common.client import attempt

    if attempt.stop_requested or not attempt.Attempt.running:
        sys.exit(128 + number)
    attempt.stop_requested = True


def tutorial_path(name):
    known = {
        path.stem: path
        for path in sorted(TUTORIALS.glob("*.py"))
        if path.read_text().startswith("# ---\n# jupyter:")
    }
    if name not in known:
        raise Error(f"There is no tutorial {name!r}. TUTORIAL takes one of: {', '.join(known)}.")
    return known[name]


def job_source(text):
    """The percent script `text` with markdown and lesson cells blanked out; line numbers stay those of the file."""
    lines, keep = [], True
    for line in text.splitlines():
        if line.startswith("# %%"):
            tags = re.search(r"tags=\[(.*?)\]", line)
            keep = "[markdown]" not in line and not LESSON_TAGS & set(
                re.findall(r'"([^"]+)"', tags[1] if tags else "")
            )
        lines.append(line if keep else "")
    return "\n".join(lines)


def cells_with_tag(text, tag):
    """The cells of the percent script `text` that have this tag; line numbers stay those of the file."""
    lines, keep = [], False
    for line in text.splitlines():
        if line.startswith("# %%"):
            keep = bool(re.search(rf'tags=\[.*"{tag}".*\]', line))
        lines.append(line if keep else "")
    return "\n".join(lines)


def check_resumable(directory):
    if not directory:
        return
    resumed_config(directory)
    if newest(local(directory) / "checkpoints") is None:
        raise Error(
            f"RESUME={directory}: that run has no checkpoint to go on from. It ended before its first save; start a new run."
        )


def resume_hint(tutorial, directory):
    if directory is None:
        return ""
    if "://" in str(directory):
        directory = local(directory)
    if not list(Path(directory, "checkpoints").glob("*.pt")):
        return f" There is no checkpoint yet; what there is lies in {shown(directory)}."
    return f" Go on from the newest checkpoint with:\n  make run TUTORIAL={tutorial} RESUME={shlex.quote(shown(directory))}"


def closing_words(run):
    """Where a run lies, and what of it could not be written. Training has finished: that is no failure, but a person must know."""
    words = listing(run.directory)
    if run.problems:
        words += "\n\nTraining finished, but not everything was written:" + "".join(
            f"\n  - {problem}" for problem in run.problems
        )
    return words


def listing(directory):
    files = ", ".join(
        sorted(
            f"{path.name}/" if path.is_dir() else path.name for path in Path(directory).iterdir()
        )
    )
    return f"Run directory: {shown(directory)}\n  {files}"


@main.command()
@click.argument("tutorial", envvar="TUTORIAL", default="")
def data(tutorial):
    """Download the full data set of TUTORIAL into data/cache/."""
    from ddp_common.data.datasets import download, entry_of

    click.echo(f"{entry_of(tutorial)['title']}. Licence: {entry_of(tutorial)['licence']}.")
    path = download(tutorial)
    click.echo(f'Saved {shown(path)}. Use it with SET="data=full".')


@main.command()
@click.argument("tutorial", envvar="TUTORIAL", default="")
@click.option(
    "--ranks", envvar="WORKERS", default="1 2", help='numbers of ranks to compare, "1 2 4"'
)
@click.option("--cluster", envvar="CLUSTER", help="as for run")
@click.option("--preset", envvar="PRESET", help="as for run")
@click.option("--set", "values", envvar="SET", help="as for run")
@click.option("--options", envvar="OPTIONS", help="as for run")
def scaling(tutorial, ranks, values, **choices):
    """Train TUTORIAL on several numbers of ranks, and compare speed and loss."""
    from ddp_common.commands.scaling import numbers_of_ranks, study

    path = tutorial_path(tutorial)
    outside({"SET": values, "RESUME": None, "CHECKPOINT": None, **choices})
    numbers = numbers_of_ranks(ranks)
    check_choices(path, max(numbers))
    study(tutorial, numbers, click.echo)


@main.command()
@click.option(
    "--cluster",
    envvar="CLUSTER",
    help="profile in clusters/, a .yaml file, or the address of a scheduler  [default: local]",
)
@click.option("--workers", envvar="WORKERS", help="number of workers to look at  [default: 2]")
def doctor(cluster, workers):
    """Check what usually goes wrong on a cluster, and say what to do."""
    from ddp_common.clusters.doctor import examine

    if not examine(cluster, workers, click.echo):
        sys.exit(1)
