"""The commands of the course: `python -m tutorials run|data|check`, which the Makefile calls.

Here is what may be typed; what a command does is in its own module, imported when it is called, so
that `--help` is quick. Every option is also an environment variable: from there a tutorial takes
it.
"""

import os
import signal
import sys
from pathlib import Path

import click

from dask_ranks.run.folders import shown
from dask_ranks.run.job import RunStopped
from ddp_common.errors import Error

TUTORIALS = Path(__file__).parents[1]


class Commands(click.Group):
    """Prints errors that a person can put right as one message, without a traceback."""

    def invoke(self, context):
        try:
            return super().invoke(context)
        except RunStopped as stopped:
            if os.environ.get("RANK", "0") == "0":  # all ranks of a launcher would say the same
                click.echo(f"\n{stopped}", err=True)
            context.exit(128 + signal.SIGTERM)
        except Error as error:
            click.echo(f"\nError: {error}", err=True)
            context.exit(1)
        except KeyboardInterrupt:  # while a job runs, `run.execute` answers it
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one would interrupt the exit
            words = " Nothing had begun." if context.invoked_subcommand == "run" else ""
            click.echo(f"\nStopped.{words}", err=True)
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
@click.option("--preset", envvar="PRESET", help="laptop, full, original, as the tutorial has it")
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
    help="how often to restart automatically after a failure  [default: 0]",
)
def run(tutorial, dry, values, **choices):
    """Train TUTORIAL (such as pets) and leave a run directory."""
    from tutorials.kit.parameters import program_of
    from tutorials.kit.run import run_tutorial

    path = tutorial_path(tutorial)
    set_environment(SET=values, **choices)
    run_tutorial(tutorial, program_of(path), choices, dry)


@main.command()
@click.argument("tutorial", envvar="TUTORIAL", default="")
def data(tutorial):
    """Download the full data set of TUTORIAL into data/cache/."""
    from tutorials.kit.datasets import download, entry_of, ships_whole

    entry = entry_of(tutorial)
    click.echo(f"{entry['title']}. Licence: {entry['licence']}.")
    if ships_whole(entry):
        click.echo("All of it ships with the repository: there is nothing to download.")
        return
    path = download(tutorial)
    click.echo(f'Saved {shown(path)}. Use it with SET="data=full".')


@main.command()
def check():
    """Look whether this machine is ready for a class."""
    from tutorials.kit.classroom import is_ready

    if not is_ready(click.echo):
        sys.exit(1)


def tutorials() -> dict[str, Path]:
    """The file of each tutorial, by its name: the percent scripts of the folder."""
    scripts = sorted(TUTORIALS.glob("*.py"))
    return {
        path.stem: path for path in scripts if path.read_text().startswith("# ---\n# jupyter:")
    }


def tutorial_path(name: str) -> Path:
    """The file of a tutorial. Raises `Error` if there is none of this name."""
    known = tutorials()
    if name not in known:
        said = f"There is no tutorial {name!r}." if name else "Say which tutorial."
        raise Error(f"{said} TUTORIAL takes one of: {', '.join(known)}.")
    return known[name]


def set_environment(**choices: str | None):
    """Put what was chosen into the environment, and remove what was not.

    From there the tutorial takes it, and so do the processes that are started for it.
    """
    for name, value in choices.items():
        os.environ.pop(name.upper(), None)
        if value:
            os.environ[name.upper()] = value
