"""The command line: `python -m ddp_common run|data|scaling|doctor …`. The Makefile is a thin skin over it.

A tutorial is one file for the notebook and for the command line. `run` executes its cells from top to bottom as a notebook does, but
for those tagged as part of the lesson (proofs, exercises, demonstrations): what is left is the job itself.
"""

import os
import re
import signal
import sys
import time
from pathlib import Path

import click

from ddp_common.errors import Error, RunStopped
from ddp_common.run_directory import local, shown

TUTORIALS = Path(__file__).parent.parent / "tutorials"
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


@click.group(cls=Commands, context_settings={"show_default": True})
def main():
    """Train the tutorials' models with DistributedDataParallel on Dask clusters."""


@main.command()
@click.argument("tutorial")
@click.option("--cluster", envvar="CLUSTER", help="profile in clusters/, a .yaml file, tcp://host:port, torchrun or srun  [default: local]")
@click.option("--workers", envvar="WORKERS", help="number of ranks  [default: the profile's]")
@click.option("--preset", envvar="PRESET", help="laptop, or full where the tutorial has it")
@click.option("--set", "values", envvar="SET", help='settings, "epochs=2 batch_size=128"')
@click.option("--resume", envvar="RESUME", help="directory of an earlier run to go on from")
@click.option("--checkpoint", envvar="CHECKPOINT", help="directory to begin a run in, or to go on if one has begun there")
@click.option("--options", envvar="OPTIONS", help='options of the profile for this once, "queue=gpu walltime=02:00:00"')
@click.option("--dry", envvar="DRY", is_flag=True, help="print what would be submitted, and submit nothing")
@click.option("--restarts", envvar="RESTARTS", help="how often to go on by itself after a failure  [default: 0]")
def run(tutorial, dry, **choices):
    """Train TUTORIAL (such as pets) and leave a run directory."""
    from ddp_common.without_dask import LAUNCHERS, start_ranks, started_by

    path = tutorial_path(tutorial)
    outside({"SET": choices.pop("values"), **choices})
    if dry:
        from ddp_common.clusters import describe

        click.echo(describe(choices["cluster"] or "local", choices["workers"], tutorial))
        return
    check_resumable(choices["resume"])
    os.environ.setdefault("DDP_PROGRESS", "bar" if sys.stderr.isatty() else "lines")
    if choices["cluster"] in LAUNCHERS and started_by() != choices["cluster"]:
        from ddp_common.profiles import number_of_workers
        from ddp_common.launch import whole_number
        from ddp_common.run_directory import new_directory

        if not (choices["resume"] or choices["checkpoint"]):
            os.environ["CHECKPOINT"] = str(new_directory(tutorial))  # so that a restarted rank finds it
        restarts = whole_number("restarts", choices["restarts"] or 0, least=0)
        try:
            start_ranks(choices["cluster"], tutorial, number_of_workers(choices["workers"] or "auto"), restarts)
        except (Error, SystemExit):
            click.echo(resume_hint(tutorial, os.environ.get("CHECKPOINT") or choices["resume"]), err=True)
            raise
    else:
        execute(tutorial, path)


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
        click.echo(f"\nStopped.{resume_hint(tutorial, directory)}", err=True)
        sys.exit(130)
    except Error as error:
        error.args = (f"{error}{resume_hint(tutorial, getattr(error, 'directory', None))}",)
        raise
    finally:
        if (client := namespace.get("client")) is not None:
            client.__exit__(*sys.exc_info())
    click.echo(f"\nDone in {time.monotonic() - began:.0f} s. {'' if 'run' not in namespace else closing_words(namespace['run'])}")


def note_interrupt(number, frame):
    from ddp_common import attempt

    attempt.interrupted = True
    raise KeyboardInterrupt


def pass_on_sigterm(number, frame):
    from ddp_common import attempt

    if attempt.stop_requested or not attempt.Attempt.running:
        sys.exit(128 + number)
    attempt.stop_requested = True


def tutorial_path(name):
    known = {path.stem: path for path in sorted(TUTORIALS.glob("*.py")) if path.read_text().startswith("# ---\n# jupyter:")}
    if name not in known:
        raise Error(f"There is no tutorial {name!r}. TUTORIAL takes one of: {', '.join(known)}.")
    return known[name]


def job_source(text):
    """The percent script `text` with markdown and lesson cells blanked out; line numbers stay those of the file."""
    lines, keep = [], True
    for line in text.splitlines():
        if line.startswith("# %%"):
            tags = re.search(r"tags=\[(.*?)\]", line)
            keep = "[markdown]" not in line and not LESSON_TAGS & set(re.findall(r'"([^"]+)"', tags[1] if tags else ""))
        lines.append(line if keep else "")
    return "\n".join(lines)


def check_resumable(directory):
    from ddp_common.checkpoint import newest
    from ddp_common.settings import resumed_config

    if not directory:
        return
    resumed_config(directory)
    if newest(local(directory) / "checkpoints") is None:
        raise Error(f"RESUME={directory}: that run has no checkpoint to go on from. It ended before its first save; start a new run.")


def resume_hint(tutorial, directory):
    if directory is None:
        return ""
    if not list(Path(directory, "checkpoints").glob("*.pt")):
        return f" There is no checkpoint yet; what there is lies in {shown(directory)}."
    return f" Go on from the newest checkpoint with:\n  make run TUTORIAL={tutorial} RESUME={shown(directory)}"


def closing_words(run):
    """Where a run lies, and what of it could not be written. Training has finished: that is no failure, but a person must know."""
    words = listing(run.directory)
    if run.problems:
        words += "\n\nTraining finished, but not everything was written:" + "".join(f"\n  - {problem}" for problem in run.problems)
    return words


def listing(directory):
    files = ", ".join(sorted(f"{path.name}/" if path.is_dir() else path.name for path in Path(directory).iterdir()))
    return f"Run directory: {shown(directory)}\n  {files}"


@main.command()
@click.argument("tutorial")
def data(tutorial):
    """Download the full data set of TUTORIAL into data/cache/."""
    from ddp_common.datasets import download, entry_of

    click.echo(f"{entry_of(tutorial)['title']}. Licence: {entry_of(tutorial)['licence']}.")
    path = download(tutorial)
    click.echo(f"Saved {shown(path)}. Use it with SET=\"data=full\".")


@main.command()
@click.argument("tutorial")
@click.option("--ranks", envvar="WORKERS", default="1 2", help='numbers of ranks to compare, "1 2 4"')
@click.option("--cluster", envvar="CLUSTER", help="as for run")
@click.option("--preset", envvar="PRESET", help="as for run")
@click.option("--set", "values", envvar="SET", help="as for run")
@click.option("--options", envvar="OPTIONS", help="as for run")
def scaling(tutorial, ranks, values, **choices):
    """Train TUTORIAL on several numbers of ranks, and compare speed and loss."""
    from ddp_common.scaling import numbers_of_ranks, study

    tutorial_path(tutorial)
    outside({"SET": values, "RESUME": None, "CHECKPOINT": None, **choices})
    study(tutorial, numbers_of_ranks(ranks), click.echo)


@main.command()
@click.option("--cluster", envvar="CLUSTER", help="profile in clusters/, a .yaml file, or the address of a scheduler  [default: local]")
@click.option("--workers", envvar="WORKERS", help="number of workers to look at  [default: 2]")
def doctor(cluster, workers):
    """Check what usually goes wrong on a cluster, and say what to do."""
    from ddp_common.doctor import examine

    if not examine(cluster, workers, click.echo):
        sys.exit(1)
